"""Fixed sizes between nodes: rail_capacity and capacity have the bits of exact sizes, and errors reach all.

The ranks are threads of this process.  The oracle is that of test_nodes_layer.py.
"""

import contextlib
import dataclasses
import functools

import pytest
import torch
import torch.utils.flop_counter

import chunk_cases as chunked
import epmoe
from cases import Case, generator, indices_of, keep, outcome, process_ranks, random_numbers, same_bits
from epmoe.a2a.internode import fixed
from nodes_cases import SEVERAL, cases, check_one, layer_of, most_of, run_nodes, run_one
from pace import HANG_S

pytestmark = pytest.mark.cpu_only


def never(t):
    raise AssertionError("the host has read numbers between the nodes")


@pytest.mark.parametrize("num_nodes, num_local", SEVERAL)
def test_fixed_sizes_have_the_bits_of_the_oracle(num_nodes, num_local):
    """Also with exactly as many places as are used, and with more than a rank has tokens."""
    some = list(cases())[num_nodes % 2::2]

    def main(nodes):
        results, nodes._read = [], never
        for i, case in enumerate(some):
            sent, rows = most_of(case, num_nodes, num_local)
            options = {"rail_capacity": max(1, sent) if i % 3 else 100, "capacity": max(1, rows)}
            layer = layer_of(nodes, case, **options)
            keep(nodes.team, layer)
            results.append(run_one(layer, case))
        return results

    results = run_nodes(main, num_nodes, num_local)
    for i, case in enumerate(some):
        check_one([r[i] for r in results], case, num_nodes)


def test_fixed_sizes_round_sums_to_the_dtype_of_the_rail():
    case = Case(topk=3, tokens="unequal", dtype=torch.float32, mode="local")

    def main(nodes):
        layer = layer_of(nodes, case, rail_dtype=torch.bfloat16, rail_capacity=9, capacity=200)
        keep(nodes.team, layer)
        return run_one(layer, case)

    check_one(run_nodes(main, 2, 2), case, 2, torch.bfloat16)


def test_sums_of_fixed_sizes_can_be_changed_in_place():
    """Autograd refuses that for a view that a Function returns."""
    def main(nodes):
        layer = layer_of(nodes, CASE, rail_capacity=6, capacity=100)
        keep(nodes.team, layer)
        x, idx, _ = arguments(layer)
        rows, _, layout = layer.dispatch(x.requires_grad_(), idx)
        y = layer.combine(rows, layout)
        y *= 2
        y.sum().backward()
        return x.grad.isfinite().all().item()

    assert all(run_nodes(main, 2, 2))


FORMS = {"fused": {}, "choices": {"token_saving": False}, "unfused": {"fused": False},
         "gather": {"enable_local_combine": False, "combine_mode": "gather"}}
FIXED = {"rail_capacity": 9, "capacity": 4 * 9 * chunked.TOPK}


def steps(nodes, dtype):
    """The results of exact and of fixed sizes, for each form of the layer."""
    found, read = {}, nodes._read
    for form, options in FORMS.items():
        for name, sizes in (("exact", {}), ("fixed", FIXED)):
            nodes._read = never if sizes else read
            moe = chunked.moe_of(nodes, None if sizes else 1, dtype, **options, **sizes)
            found[form, name] = [chunked.step(moe, case) for case in chunked.CASES]
            moe.finalize()
    return found


@pytest.mark.parametrize("num_nodes, num_local, dtype", [
    (2, 2, torch.float32), (2, 2, torch.bfloat16), (4, 1, torch.float16)])
def test_moe_of_fixed_sizes_has_the_bits_of_exact_ones(num_nodes, num_local, dtype):
    """Outputs and all gradients."""
    for rank, found in enumerate(run_nodes(steps, num_nodes, num_local, dtype)):
        for form in FORMS:
            for case, got, want in zip(chunked.CASES, found[form, "fixed"], found[form, "exact"]):
                for name in want:
                    same_bits(got[name], want[name], f"{form}, {case}, rank {rank}: {name}")


def of_processes(rank, size):
    """Rank main: gloo between the nodes, a compiler and a recomputed forward.  Whether the bits are equal."""
    found = []
    for num_chunks, sizes in ((1, {}), (None, FIXED)):
        moe = chunked.moe_of(None, num_chunks, torch.bfloat16, local_world_size=2, timeout_s=HANG_S, **sizes)
        calls = {"plain": moe, "checkpoint": functools.partial(torch.utils.checkpoint.checkpoint, moe,
                                                               use_reentrant=False)}
        if sizes:
            calls["compiled"] = functools.partial(torch.compile(moe, backend="aot_eager"))
        found += [[chunked.step(moe, case, call) for case in chunked.CASES] for call in calls.values()]
        moe.finalize()
    moe.layer.world.close()
    return found


@pytest.mark.long
def test_fixed_sizes_between_processes():
    for rank, (want, *others) in enumerate(process_ranks(of_processes, 4)):
        for i, results in enumerate(others):
            for got, of_one in zip(results, want):
                for name in of_one.keys() - {"facts"}:  # compiled code sets no last_layout
                    same_bits(got[name], of_one[name], f"rank {rank}, variant {i}: {name}")


# ---- errors ----

CASE = Case(num_local=2, topk=3, hidden=16, max_tokens=6, dtype=torch.float32)
TO_LAST = dataclasses.replace(CASE, pattern="one_rank")  # all rows are on one node
BAD = 3  # the rank that makes the mistake
# In float32 an EPMoE calls the operations one by one, in 16 bits the experts are one call of the module.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def arguments(layer, case=CASE):
    idx = indices_of(case, layer.rank, layer.world_size)
    g = generator(layer.rank)
    return [random_numbers((len(idx), case.hidden), case.dtype, g), idx, torch.rand(idx.shape, generator=g)]


def too_many(nodes, case, sizes):
    """Calls with one place too few, then a call of few tokens, on a layer and on a module."""
    layer, found = layer_of(nodes, case, **sizes), {}
    x, idx, weight = arguments(layer, case)
    found["dispatch"] = outcome(lambda: layer.dispatch(x, idx, weight))
    found["preprocess"] = outcome(lambda: layer.preprocess(idx))
    layer.ep_barrier_all()
    rows, _, layout = layer.dispatch(x[:1], idx[:1], weight[:1])
    found["right"] = layer.combine(rows, layout).shape == (1, CASE.hidden)
    layer.finalize()
    moe = epmoe.EPMoE(CASE.hidden, 16, CASE.num_local * nodes.size, CASE.topk, nodes, dtype=case.dtype,
                      max_tokens=CASE.max_tokens, device="cpu", **sizes)
    found["forward"] = outcome(lambda: moe(x, idx, weight))
    x.requires_grad_()
    found["training"] = outcome(lambda: moe(x, idx, weight))
    moe(x[:1], idx[:1], weight[:1]).sum().backward()
    found["right moe"] = bool(x.grad[:1].isfinite().all())
    moe.finalize()
    return found


@DTYPES
@pytest.mark.parametrize("num_nodes, num_local", [(2, 2), (3, 2), (4, 1)])
def test_too_many_tokens_are_an_error_on_all_ranks(num_nodes, num_local, dtype):
    """Of the rail, and of one rank's rows: the message names the rank, the number and the capacity."""
    size = num_nodes * num_local
    for case, less in ((CASE, (1, 0)), (TO_LAST, (0, 1))):
        case = dataclasses.replace(case, dtype=dtype)
        sent, rows = (most - n for most, n in zip(most_of(case, num_nodes, num_local), less))
        results = run_nodes(too_many, num_nodes, num_local, case, {"rail_capacity": sent, "capacity": rows})
        for rank, found in enumerate(results):
            assert found.pop("right") and found.pop("right moe")
            text = f"sends {sent + 1} tokens to another node; its rail_capacity is {sent}."
            if case.pattern == "one_rank":
                text = f"a rank of node {num_nodes - 1} would receive more rows than its capacity, {rows}."
                if rank // num_local == num_nodes - 1:
                    text = f"rank {size - 1} would receive {rows + 1} rows; its capacity is {rows}."
            for name, got in found.items():
                assert got.kind == "EpOverflow" and text in got.text, f"{case}, rank {rank}, {name}: {got}"
        assert case.pattern == "one_rank" or len({found["dispatch"].text for found in results}) == 1


def mistakes(nodes, value):
    sizes = {"rail_capacity": 6, "capacity": 100}
    layer, found = layer_of(nodes, CASE, **sizes), {}
    keep(nodes.team, layer)
    x, idx, weight = arguments(layer)
    if nodes.rank == BAD:
        idx[4, 1] = value
    found["dispatch"] = outcome(lambda: layer.dispatch(x, idx, weight))
    found["preprocess"] = outcome(lambda: layer.preprocess(idx))
    for dtype in (torch.float32, torch.bfloat16):
        moe = epmoe.EPMoE(CASE.hidden, 16, CASE.num_local * nodes.size, CASE.topk, nodes, dtype=dtype,
                          max_tokens=CASE.max_tokens, device="cpu", **sizes)
        found[f"moe in {dtype}"] = outcome(lambda: moe(x.to(dtype), idx, weight))
        moe.finalize()
    return found, run_one(layer, CASE)


@pytest.mark.parametrize("value, text", [(99, "99"), (-2, "-2"), (-(1 << 20), "-1048576"),
                                         (1 << 40, "at least 33554431")])
def test_a_wrong_index_is_an_error_on_all_ranks(value, text):
    results = run_nodes(mistakes, 2, 2, value)
    for rank, (found, _) in enumerate(results):
        for name, got in found.items():
            assert got.kind == "EpIndexError", f"rank {rank}, {name}: {got}"
            assert f"rank {BAD}: expert index {text} of token 4, choice 1 is outside" in got.text, got
    check_one([right for _, right in results], CASE, 2)


@DTYPES
def test_a_rank_without_memory_is_an_error_on_all_ranks(dtype):
    """In the plan of the node: the other nodes are about to learn whether it has failed."""
    def main(nodes):
        moe = chunked.moe_of(nodes, None, dtype, **FIXED)
        args = chunked.inputs_of(moe, chunked.CASES[0])[:3]
        team, good = moe.layer.team_layer, moe.layer._fixed._plan_of_team

        def fails(exp_indices, scatter, buffer):
            team._propagate(epmoe._C.OP_PLAN, MemoryError("no memory"), buffer)

        if nodes.rank == BAD:
            moe.layer._fixed._plan_of_team = fails
        got = outcome(lambda: moe(*args))
        moe.layer._fixed._plan_of_team = good
        return got, outcome(lambda: moe(*args)).kind

    for rank, (got, after) in enumerate(run_nodes(main, 2, 2)):
        assert got.kind == ("MemoryError" if rank == BAD else "PeerError") and after == "nothing", got


@DTYPES
def test_a_rank_without_memory_after_its_plan_is_an_error_on_all_ranks(dtype):
    """With gradients and without them: nobody waits for another result of the plan."""
    def main(nodes):
        moe = chunked.moe_of(nodes, None, dtype, **FIXED)
        x, *args = chunked.inputs_of(moe, chunked.CASES[0])[:3]
        team, found = moe.layer.team_layer, []
        allocator, empty = team._allocator, team._empty

        def fails(*_, **__):
            raise MemoryError("no memory")

        for with_grad in (True, False):
            if nodes.rank == BAD:  # what the node allocates after the plan
                plan = moe.layer._fixed._plan_of_team

                def then_fails(*of_plan):
                    made = plan(*of_plan)
                    team._allocator, team._empty = (lambda: fails), fails
                    return made

                moe.layer._fixed._plan_of_team = then_fails
            found.append(outcome(lambda: moe(x.detach().requires_grad_(with_grad), *args)).kind)
            if nodes.rank == BAD:
                moe.layer._fixed._plan_of_team = plan
                team._allocator, team._empty = allocator, empty
            found.append(outcome(lambda: moe(x, *args)).kind)
        return found

    wanted = ["nothing" if i % 2 else None for i in range(4)]
    for rank, found in enumerate(run_nodes(main, 2, 2)):
        assert found == [w or ("MemoryError" if rank == BAD else "PeerError") for w in wanted], (rank, found)


def test_a_rank_that_counts_operations_makes_the_same_calls():
    def main(nodes):
        moe = chunked.moe_of(nodes, None, torch.bfloat16, **FIXED)
        args = chunked.inputs_of(moe, chunked.CASES[0])[:3]
        with torch.utils.flop_counter.FlopCounterMode(display=False) if nodes.rank == BAD else (
                contextlib.nullcontext()):
            return outcome(lambda: moe(*args)).kind

    assert run_nodes(main, 2, 2) == 4 * ["nothing"]


@DTYPES
def test_a_rank_that_fails_before_its_plan_is_an_error_on_all_ranks(dtype):
    """The rail waits for the result of that plan."""
    def main(nodes):
        moe = chunked.moe_of(nodes, None, dtype, **FIXED)
        args, right = chunked.inputs_of(moe, chunked.CASES[0])[:3], moe.gate_up_proj.data
        if nodes.rank == BAD:
            moe.gate_up_proj.data = right[:, :-1]
        got = outcome(lambda: moe(*args))
        moe.gate_up_proj.data = right
        return got.kind, outcome(lambda: moe(*args)).kind

    found = run_nodes(main, 2, 2)
    assert found == [("ValueError" if rank == BAD else "PeerError", "nothing") for rank in range(4)]


def creations(nodes):
    """Wrong options on all ranks, and on one."""
    sizes = {"max_tokens": 6, "hidden": 16, "topk": 2, "num_tot_experts": 8, "dtype": torch.float32}

    def make(**options):
        return outcome(lambda: epmoe.EPAll2AllLayer(nodes, device="cpu", **sizes, **options))

    def module(**options):
        return outcome(lambda: epmoe.EPMoE(16, 16, 8, 2, nodes, device="cpu", **options))

    is_bad = nodes.rank == BAD
    found = {"no capacity": make(rail_capacity=6), "no rail_capacity": make(capacity=6),
             "zero": make(capacity=6, rail_capacity=0), "kind": make(capacity=6, rail_capacity="6"),
             "chunks": module(capacity=6, rail_capacity=6, num_chunks=2),
             "host_counts": make(capacity=6, rail_capacity=6, host_counts=True),
             "different": make(capacity=6, rail_capacity=6 if is_bad else 5),
             "one": make(capacity=6, rail_capacity=-1 if is_bad else 5),
             "right": make(capacity=6, rail_capacity=6)}
    return found


def test_wrong_creations_are_errors_on_all_ranks():
    wanted = {"no capacity": ("ValueError", "pass capacity"), "zero": ("ValueError", "rail_capacity 0"),
              "no rail_capacity": ("ValueError", "pass rail_capacity"), "kind": ("TypeError", "'6'"),
              "chunks": ("ValueError", "num_chunks 2"), "host_counts": ("ValueError", "host_counts"),
              "different": ("EpMismatch", "rail_capacity"), "right": ("nothing", "")}
    for rank, found in enumerate(run_nodes(creations, 2, 2)):
        one = found.pop("one")
        assert one.kind == ("ValueError" if rank == BAD else "PeerError"), one
        for name, (kind, text) in wanted.items():
            got = found[name]
            assert got.kind == kind and text in got.text, f"rank {rank}, {name}: {got}"


def test_one_node_has_no_rail():
    """rail_capacity has no effect there, but is checked."""
    def main(world):
        layer = layer_of(world, CASE, rail_capacity=1)
        keep(world.team, layer)
        layout = layer.dispatch(*arguments(layer))[2]
        wrong = outcome(lambda: layer_of(world, CASE, rail_capacity=True)).kind
        return type(layer) is epmoe.EPAll2AllLayer and layout.num_rows > 1, layer.rail_capacity, wrong

    assert run_nodes(main, 1, 2) == [(True, 1, "TypeError")] * 2


# ---- what only CUDA does: the host looks at the result of a plan later ----


def learns_later(layer):
    """Make a CPU layer defer, as one on CUDA does: a void plan raises nothing until synchronize()."""
    layer._fixed._defers, layer._fixed._record = True, lambda: "event"
    layer.nodes.rail.wait_for = lambda event: None
    team, errors = layer.team_layer, []
    synchronize = team.synchronize

    def plan(exp_indices, scatter, buffer):
        words = torch.empty(team._plan_words(len(exp_indices)), dtype=torch.int32)
        try:
            epmoe._C.layer_plan(team._c, buffer, (exp_indices, scatter, words, 0))
        except (epmoe.EpIndexError, epmoe.EpOverflow) as error:
            errors.append(error)
        return words

    def raises():
        synchronize()
        if errors:
            raise errors.pop()

    team._plan, team.synchronize = plan, raises
    return layer


def deferred(nodes):
    """A plan that is void, in each call that may meet it, and a right call after each."""
    sizes = {"rail_capacity": CASE.max_tokens, "capacity": most_of(TO_LAST, 2, 2)[1] - 1}
    layer, found, right = learns_later(layer_of(nodes, CASE, **sizes)), {}, []
    keep(nodes.team, layer)
    x, idx, weight = arguments(layer, TO_LAST)
    wrong = idx.clone()
    wrong[3, 2] = 99 if nodes.rank == BAD else wrong[3, 2]
    moe = epmoe.EPMoE(CASE.hidden, 16, CASE.num_local * nodes.size, CASE.topk, nodes, dtype=CASE.dtype,
                      max_tokens=CASE.max_tokens, device="cpu", **sizes)
    in_16_bits = epmoe.EPMoE(CASE.hidden, 16, CASE.num_local * nodes.size, CASE.topk, nodes,
                             dtype=torch.bfloat16, max_tokens=CASE.max_tokens, device="cpu", **sizes)
    learns_later(moe.layer)
    learns_later(in_16_bits.layer)
    layout = layer.preprocess(idx)
    status = int(layout.team.plan[epmoe._C.HEAD_STATUS])
    found["barrier"] = outcome(layer.ep_barrier_all)
    found["again", "ValueError"] = outcome(lambda: layer.dispatch(x, weight=weight, layout=layout))
    for name, call in {"preprocess": lambda i: layer.preprocess(i),
                       "dispatch": lambda i: layer.dispatch(x, i, weight),
                       "moe": lambda i: moe(x, i, weight),
                       "moe in 16 bits": lambda i: in_16_bits(x.bfloat16(), i, weight)}.items():
        its = {"moe": moe.layer, "moe in 16 bits": in_16_bits.layer}.get(name, layer)
        found[name] = outcome(lambda: call(idx), its)
        found[name, "index"] = outcome(lambda: call(wrong), its)
        rows, _, layout = layer.dispatch(x[:1], idx[:1])
        right.append(layer.combine(rows, layout))
        moe(x[:1], idx[:1], weight[:1])
    return found, [torch.equal(r, x[:1] * CASE.topk) for r in right], status


def test_all_ranks_learn_of_a_void_plan_later():
    """Too many rows for a rank of one node, and a wrong index."""
    results = run_nodes(deferred, 2, 2)
    assert [status for *_, status in results] == 4 * [epmoe._C.EOVERFLOW]  # also on node 0: it is made void
    for rank, (found, right, _) in enumerate(results):
        for name, got in found.items():
            kind, text = ("EpIndexError", f"rank {BAD}: expert index 99 of token 3, choice 2")
            if name == ("again", "ValueError"):
                kind, text = "ValueError", "its plan has failed"
            elif isinstance(name, str):
                kind, text = "EpOverflow", "capacity"
            assert got.kind == kind and text in got.text, f"rank {rank}, {name}: {got}"
        assert right == [True] * 4


@pytest.mark.parametrize("status, word", [([0, 0, 0], 0), ([0, -7, -8], 2), ([-8, 0, 0], 1), ([0, 0, 1], -3),
                                          ([1, -7, 0], -1), ([0, -9, -7], -2)])
def test_the_word_says_which_node_has_failed(status, word):
    assert fixed.word_of(torch.tensor(status, dtype=torch.int32)).tolist() == [word]


def test_an_index_keeps_what_it_says():
    """Codes are out of range, and have all bits of their parts."""
    for part in ((0, 0, 0), (1, 0, 1), ((1 << 34) - 1, (1 << 26) - 1, 1), (5, 7, 0)):
        code = int(fixed._pack(*map(torch.tensor, part)))
        assert code < -1 and fixed._unpack(code) == part


def test_a_plan_with_a_status_makes_operations_void():
    """As on a node whose plan is good, when that of another node is not; the layer works afterwards."""
    def main(nodes):
        layer = layer_of(nodes, CASE, capacity=100)
        keep(nodes.team, layer)
        x, idx, weight = arguments(layer)
        layout = layer.preprocess(idx)
        layout.plan.narrow(0, epmoe._C.HEAD_STATUS, 1).fill_(epmoe._C.EOVERFLOW)
        got = outcome(lambda: layer.dispatch(x, weight=weight, layout=layout))
        rows, _, layout = layer.dispatch(x, idx, weight)
        return got.kind, layer.combine(rows, layout).isfinite().all().item()

    assert run_nodes(main, 1, 2) == [("PeerError", True)] * 2
