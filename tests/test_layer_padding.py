"""Layers with padding rows (expert_alignment, expert_capacity), and host_counts."""

import pytest
import torch

import epmoe
from epmoe import _C
from cases import (
    BITS, MODES, Case, check_case, check_outcomes, indices_of, inputs_of, make_layer, outcome,
    poison_staging, run_case, run_routing,
)
from layer_cases import BAD, mistake
from pace import HANG_S

SIZES = [1, 2, 4]


def roomy(**options):
    """A case with an expert_capacity that no routing of it exceeds at 4 ranks."""
    return Case(**{"num_local": 3, "topk": 3, "max_tokens": 10, "expert_capacity": 4 * 10 * 3} | options)


PADDED = [
    Case(num_local=3, topk=3, tokens="unequal", pattern="sentinels", expert_alignment=4),
    Case(num_local=1, topk=1, tokens="first_none", expert_alignment=128, weights=False, num_sm=3),
    Case(num_local=2, topk=2, tokens="none", expert_alignment=5, capacity="roomy"),
    Case(num_local=5, topk=4, max_tokens=33, pattern="one_rank", expert_alignment=24, capacity="exact"),
    Case(num_local=40, topk=6, max_tokens=21, expert_alignment=16, dtype=torch.float32, num_sm=2),
    roomy(tokens="unequal", pattern="sentinels"),
    roomy(num_local=2, topk=1, max_tokens=1, expert_capacity=4, weights=False),
    roomy(tokens="none", dtype=torch.float16),
]


@pytest.mark.parametrize("size", SIZES)
def test_layer_padding_is_as_in_the_oracle(ranks, size):
    """Plan, rows and sums, bit by bit. Padding rows are zero after dispatch, and NaN in combine."""

    def run(world, device):
        return [run_case(world, device, case) for case in cases]

    cases = [Case(**vars(case) | {"mode": mode}) for case in PADDED for mode in MODES]
    for case, of_all in zip(cases, zip(*ranks(run, world_size=size))):
        try:
            check_case(of_all, case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.parametrize("size", SIZES)
def test_layer_padding_of_one_row_per_expert(ranks, size):
    """The smallest expert_capacity, with experts that have no row: their one row is padding."""

    def run(world, device):
        layer = make_layer(world, device, Case(topk=1, max_tokens=1, expert_capacity=1, weights=False))
        x = torch.full((1, 16), 1.0 + world.rank, dtype=layer.dtype, device=device)
        rows, _, layout = layer.dispatch(x, torch.tensor([[2 * world.rank + 1]], device=device))
        y = layer.combine(rows.new_tensor([[torch.nan] * 16, [3.0] * 16]), layout)
        layer.finalize()
        return rows.cpu(), layout.unpadded_tokens_per_expert.tolist(), y.cpu()

    for rank, (rows, num, y) in enumerate(ranks(run, world_size=size)):
        assert rows[:, 0].tolist() == [0, rank + 1] and num == [0, 1] and y[:, 0].tolist() == [3]


def test_layer_padding_alignment_of_one_changes_nothing(ranks):
    """All parts of a plan and all results are those of a layer without the option."""
    case = Case(num_local=3, topk=3, tokens="unequal", pattern="sentinels")

    def run(world, device):
        return [run_case(world, device, case, **options) for options in
                ({}, {"expert_alignment": 1}, {"expert_alignment": 1, "host_counts": True})]

    for default, *others in ranks(run):
        for other in others:
            for name, want in default.items():
                if isinstance(want, torch.Tensor):
                    bits = BITS[want.element_size()]
                    assert torch.equal(other[name].view(bits), want.view(bits)), name
                else:
                    assert other[name] == want, name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{"expert_alignment": 8}, {"expert_capacity": 40}],
                         ids=["alignment", "capacity"])
def test_layer_padding_gradients(ranks, size, options):
    """Rows have padding in the backward too, and it changes no gradient.

    The experts multiply by a matrix. Its gradient is a sum over all rows, so padding rows must be zero.
    """

    def run(world, device):
        case = Case(num_local=2, topk=2, max_tokens=10, dtype=torch.float32)
        g = torch.Generator().manual_seed(world.rank)
        x = torch.randn(10, 16, generator=g).to(device).requires_grad_()
        weight = torch.rand(10, 2, generator=g).to(device).requires_grad_()
        seen = []
        for extra in ({}, options):
            layer = make_layer(world, device, case, **extra)
            poison_staging(layer)
            a = torch.eye(16, device=device).requires_grad_()
            idx = indices_of(case, world.rank, world.size).to(device)
            rows, row_weight, layout = layer.dispatch(x, idx, weight)
            out = layer.combine(torch.tanh(rows @ a), layout, row_weight)
            seen.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, weight, a])])
            assert all(t.isfinite().all() for t in seen[-1])
            layer.finalize()
        return seen

    for rank, (bare, padded) in enumerate(ranks(run, world_size=size)):
        for name, want, got in zip(("output", "x", "weight", "a"), bare, padded):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=f"rank {rank}: {name}")


@pytest.mark.parametrize("options", [{"expert_alignment": 8}, {"expert_alignment": 8, "capacity": 64},
                                     {"expert_capacity": 24}, {"capacity": 40}], ids=str)
def test_layer_padding_has_no_gradient(ranks, options):
    """Padding rows and their weights may hold anything in combine.  Their gradients are zero."""

    def run(world, device):
        case, found = Case(num_local=2, topk=2, max_tokens=5, dtype=torch.float32), []
        layer = make_layer(world, device, case, **options)
        g = torch.Generator().manual_seed(world.rank)
        x, weight = torch.randn(5, 16, generator=g).to(device), torch.rand(5, 2, generator=g).to(device)
        idx = torch.randint(0, case.num_local * world.size, (5, 2), generator=g).to(device)
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        offsets, counts = layout.expert_offsets.tolist(), layout.unpadded_tokens_per_expert.tolist()
        is_padding = torch.ones(len(rows), dtype=torch.bool, device=device)
        for first, count in zip(offsets, counts):
            is_padding[first:first + count] = False
        for holder in (rows, row_weight):
            before = holder.clone()
            holder[is_padding] = torch.nan
            leaves = [rows.clone().requires_grad_(), row_weight.clone().requires_grad_()]
            grads = torch.autograd.grad(layer.combine(leaves[0], layout, leaves[1]).square().sum(), leaves)
            found += [(t[is_padding].count_nonzero().item(), t.isfinite().all().item(),
                       is_padding.any().item()) for t in grads]
            holder.copy_(before)
        layer.synchronize()
        layer.finalize()
        return found

    found = ranks(run)
    assert any(padded for of_rank in found for *_, padded in of_rank)
    for rank, of_rank in enumerate(found):
        for count, is_finite, _ in of_rank:
            assert count == 0 and is_finite, f"rank {rank}: {of_rank}"


@pytest.mark.parametrize("size", SIZES)
def test_layer_padding_host_counts(ranks, size):
    """The list is read with M, is kept when the buffer has a newer plan, and is right without the option."""
    case = Case(num_local=3, topk=3, tokens="unequal", pattern="sentinels", num_buffers=2)

    def run(world, device):
        seen = []
        for options in ({"host_counts": True}, {"host_counts": True, "expert_alignment": 4}, {},
                        {"expert_capacity": 120}):
            # Only some ranks have the option.
            if world.rank % 2 == 1 and len(options) == 1:
                options = {k: v for k, v in options.items() if k != "host_counts"}
            layer = make_layer(world, device, case, **options)
            layouts = [layer.preprocess(indices_of(Case(**vars(case) | {"seed": seed}), world.rank,
                                                   world.size).to(device), buffer=seed % 2)
                       for seed in range(4)]
            for layout in layouts:
                assert (layout._expert_rows is None) == (not layer.host_counts)
                num = layout.tokens_per_expert.tolist()
                seen.append((layout.tokens_per_expert_list, num, layout.num_rows))
                layout.tokens_per_expert_list.clear()
                assert len(layout.tokens_per_expert_list) == 3
            layer.finalize()
        return seen

    for seen in ranks(run, world_size=size):
        for got, want, num_rows in seen:
            assert got == want and sum(got) == num_rows


def test_layer_padding_expert_overflow_is_an_error_on_all_ranks(ranks):
    """One expert has more rows than its capacity. The message names it, and the next call works."""
    case = Case(num_local=2, topk=2, max_tokens=12, expert_capacity=20)

    def run(world, device):
        layer = make_layer(world, device, case)
        x, weight = (t.to(device) for t in inputs_of(case, world.rank, world.size))
        idx = torch.full((12, 2), -1, device=device)
        idx[:, 0] = 1
        got = outcome(lambda: layer.dispatch(x, idx, weight), layer)
        result = run_routing(layer, Case(**vars(case) | {"max_tokens": 4}))
        layer.finalize()
        return got, result

    results = ranks(run, at_least=2)
    check_outcomes([r[0] for r in results], "EpOverflow", "expert 1, on rank 0",
                   f"would receive {12 * len(results)} rows", "expert_capacity is 20")
    check_case([r[1] for r in results], Case(**vars(case) | {"max_tokens": 4}))


def test_layer_padding_counts_toward_the_capacity(ranks):
    """A rank with few rows overflows, if the rows with their padding are too many."""

    def run(world, device):
        case = Case(num_local=2, topk=2, max_tokens=1, expert_alignment=16)
        layer = make_layer(world, device, case, capacity=31)
        x = torch.ones(1, 16, dtype=layer.dtype, device=device)
        got = outcome(lambda: layer.dispatch(x, torch.tensor([[0, 1]], device=device)), layer)
        layer.finalize()
        return got

    check_outcomes(ranks(run, world_size=2), "EpOverflow", "rank 0 would receive 32 rows", "capacity is 31")


@pytest.mark.parametrize("options", [{"expert_alignment": 2}, {"expert_capacity": 60}],
                         ids=["alignment", "capacity"])
def test_layer_padding_refuses_scatter_indices(ranks, options):
    def call(layer, arguments, is_bad, prepared):
        scatter = torch.zeros_like(arguments["exp_indices"], dtype=torch.int32) if is_bad else None
        return layer.dispatch(**arguments, full_scatter_indices=scatter)

    results = ranks(lambda world, device: mistake(world, device, call, **options), at_least=2)
    outcomes = [r[0] for r in results]
    check_outcomes(outcomes, ["ValueError" if r == BAD else "PeerError" for r in range(len(outcomes))],
                   "full_scatter_indices: must be None", on_rank=BAD, elsewhere=[f"rank {BAD}"])


class ForcedOp(epmoe.EpAll2AllFusedOp):
    """An operator with padding rows, as if Python did not refuse them."""

    def _make_config(self, *args):
        self.expert_alignment = 4
        return super()._make_config(*args)


@pytest.mark.cpu_only
def test_layer_padding_module_refuses_fused_operations(ranks):
    """The fused kernels would wait for padding rows, which never arrive."""

    def run(world, device):
        op = ForcedOp(world, 4, 16, 1, num_tot_experts=1, device=device)
        x = torch.ones(2, 16, dtype=op.dtype)
        rows, _, layout = op.dispatch(x, torch.zeros(2, 1, dtype=torch.int64))
        weight = torch.zeros(1, 16, 16, dtype=op.dtype)
        of_dispatch = outcome(lambda: op._dispatch_gemm(x, None, layout.plan, weight, None, 0, 4, (0, 0, 0)))
        of_combine = outcome(lambda: op._gemm_combine(rows, weight, None, None, layout.plan, layout.recv, 0,
                                                      2, False))
        op.finalize()
        return of_dispatch, of_combine

    (got,) = ranks(run, world_size=1)
    check_outcomes(got, "ValueError", "has no fused operations")


def test_layer_padding_host_counts_of_an_older_plan(ranks):
    """Of an older plan, the module reads them from the device. Without host_counts it reads none."""

    def run(world, device):
        layer = make_layer(world, device, Case(), host_counts=True)
        plain = make_layer(world, device, Case())
        idx = torch.zeros(1, 2, dtype=torch.int64, device=device)
        old, _, other = layer.preprocess(idx), layer.preprocess(idx + 1), plain.preprocess(idx)
        got = [outcome(lambda: _C.layer_expert_rows(plain._c, 0, other.plan)),
               outcome(lambda: _C.layer_expert_rows(layer._c, 0, old.plan[:8]))]
        counts = _C.layer_expert_rows(layer._c, 0, old.plan), old.tokens_per_expert.tolist()
        old.plan[layer._plan_front["expert_row"]] = 7
        got.append(outcome(lambda: _C.layer_expert_rows(layer._c, 0, old.plan)))
        layer.finalize()
        plain.finalize()
        return got, counts

    for got, (counts, want) in ranks(run):
        for one, text in zip(got, ("only in a layer with host_counts", "a plan of 8 words", "overwritten"),
                             strict=True):
            check_outcomes([one], "ValueError", text)
        assert counts == want


def moe_gradients(world, device, options, compiled):
    """The output of an EPMoE over a layer with these options, and its gradients."""
    case = Case(num_local=2, topk=2, max_tokens=10, dtype=torch.float32)
    idx = indices_of(case, world.rank, world.size).to(device)
    g = torch.Generator().manual_seed(world.rank)
    x = torch.randn(10, 16, generator=g).to(device).requires_grad_()
    weight = torch.rand(10, 2, generator=g).to(device)
    torch.manual_seed(0)
    moe = epmoe.EPMoE(16, 24, 2 * world.size, 2, layer=make_layer(world, device, case, **options),
                      dtype=torch.float32, device=device)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randn(p.shape, generator=g).to(device) / 4)
    fn = torch.compile(moe, backend="aot_eager", fullgraph=True) if compiled else moe
    y = fn(x, idx, weight)
    seen = [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *moe.parameters()])]
    assert fn(x[:0], idx[:0], weight[:0]).shape == (0, 16)
    moe.layer.synchronize()
    return seen


OPTIONS = [{}, {"expert_alignment": 8, "host_counts": True}, {"expert_capacity": 60}]


def check_moe_gradients(of_all):
    for want, *others in of_all:
        for other in others:
            for a, b in zip(other, want):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_layer_padding_in_modules(ranks, size):
    """EPMoE computes with padding rows too: the grouped GEMM multiplies them; nothing uses the results."""

    def run(world, device):
        return [moe_gradients(world, device, options, False) for options in OPTIONS]

    check_moe_gradients(ranks(run, world_size=size))


def compiled_modules(world, device):
    return [moe_gradients(world, device, options, i > 0) for i, options in enumerate(OPTIONS[:2])]


def test_layer_padding_in_compilers(ranks):
    check_moe_gradients(ranks.isolated(compiled_modules, world_size=1, timeout_s=HANG_S))
