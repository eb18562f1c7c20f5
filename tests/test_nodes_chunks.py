"""EPMoE over several nodes in chunks: the same bits for every number of chunks, one launch order, errors.

The numbers are small integers, so every product and every sum of float32 is exact, whatever its order: only
the sums and roundings that the layer documents are left. torch.mm has other bits for other numbers of rows.
"""

import functools
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import Case, first, outcome, process_ranks, same_bits
from chunk_cases import CASES, TOPK, inputs_of, moe_of, step
from epmoe.comm import validation
from epmoe.moe.chunks import check_layer, choose_chunks
from epmoe.moe.cost_model import CHUNKS
from nodes_cases import run_nodes
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
CHUNKS_TRIED = (1, 2, 3, 7, 64)  # 64: more than tokens


def steps(nodes, dtype, rail_dtype):
    """The results for every number of chunks, in turn."""
    found = []
    for num_chunks in CHUNKS_TRIED:
        moe = moe_of(nodes, num_chunks, dtype, rail_dtype=rail_dtype)
        found.append([step(moe, case) for case in CASES])
        moe.finalize()
    return found


@pytest.mark.parametrize("num_nodes, num_local, dtype, rail_dtype", first(1, [
    (2, 2, torch.float32, torch.bfloat16), (2, 2, torch.bfloat16, None), (4, 1, torch.float16, None)]))
def test_results_do_not_depend_on_the_number_of_chunks(num_nodes, num_local, dtype, rail_dtype):
    for rank, found in enumerate(run_nodes(steps, num_nodes, num_local, dtype, rail_dtype)):
        for num_chunks, results in zip(CHUNKS_TRIED, found):
            for case, got, want in zip(CASES, results, found[0]):
                for name in want:
                    same_bits(got[name], want[name], f"{num_chunks} chunks, {case}, rank {rank}: {name}")


def some_gradients(nodes, num_chunks, options):
    """Steps in which each combination of the ranks' tokens and weights requires a gradient."""
    moe = epmoe.EPMoE(16, 32, 4, 2, nodes, max_tokens=8, device="cpu", num_chunks=num_chunks, **options)
    g = torch.Generator().manual_seed(nodes.rank)
    for p in moe.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) / p.shape[-1]**0.5)
    x, weight = torch.randn(5, 16, generator=g).to(moe.layer.dtype), torch.rand(5, 2, generator=g)
    idx, results = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]]), []
    for wanted in range(4):
        for who in ({0}, {1}, {0, 1}):
            leaves = [t.detach().requires_grad_(nodes.rank in who and bool(wanted >> i & 1))
                      for i, t in enumerate((x, weight))]
            for p in moe.parameters():
                p.grad = None
            moe(leaves[0], idx, leaves[1]).float().sum().backward()
            results.append([t.grad for t in (*leaves, *moe.parameters())])
    moe.finalize()
    return results


@pytest.mark.parametrize("options", [
    {"dtype": torch.float32}, {}, {"compute_dtype": torch.float8_e4m3fn},
    {"compute_dtype": torch.float8_e4m3fn, "wgrad_dtype": torch.bfloat16}], ids=str)
def test_gradients_that_some_ranks_want(options):
    """Tokens and weights of a call may require gradients on some ranks, also of other nodes."""
    want, found = (run_nodes(some_gradients, 2, 1, n, options) for n in (1, 2))
    for steps_of_rank, wanted in zip(found, want):
        for got, expected in zip(steps_of_rank, wanted):
            assert [t is None for t in got] == [t is None for t in expected]
            for a, b in zip(got, expected):
                if a is not None:
                    torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.05)


def of_frozen(nodes, num_chunks, wanted):
    """Steps of frozen experts, whose ranks want the gradients of x, of weight, or of both: wanted[rank]."""
    moe = epmoe.EPMoE(16, 32, 4, 2, nodes, max_tokens=8, device="cpu", dtype=torch.float32,
                      num_chunks=num_chunks).requires_grad_(False)
    g = torch.Generator().manual_seed(nodes.rank)
    for p in moe.parameters():
        p.copy_(torch.randn(p.shape, generator=g) / p.shape[-1]**0.5)
    idx = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]])
    leaves = [torch.randn(5, n, generator=g) for n in (16, 2)]
    for name, t in zip(("x", "weight"), leaves):
        t.requires_grad_(name in wanted[nodes.rank])

    def backward():
        moe(leaves[0], idx, leaves[1]).sum().backward()

    got = outcome(backward), outcome(backward)
    moe.finalize()
    return got, [t.grad for t in leaves]


@pytest.mark.parametrize("wanted", [("x", "weight"), ("weight", "x weight"), ("x", "")], ids=str)
def test_gradients_of_frozen_experts_that_some_ranks_want(wanted):
    """The backward needs all ranks, whatever a rank wants. A rank that wants nothing makes no backward."""
    want, found = (run_nodes(of_frozen, 2, 1, n, wanted) for n in (1, 2))
    for (outcomes, got), (_, expected) in zip(found, want):
        assert {o.kind for o in outcomes} == {"nothing" if all(wanted) else "EpMismatch"}, outcomes
        for a, b in zip(got, expected):
            assert (a is None) == (b is None)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def asked(nodes, num_chunks, dtype):
    """The gradients for which the ranks of two nodes ask: each for others, also for those of one weight."""
    torch.manual_seed(0)
    moe = epmoe.EPMoE(16, 32, 4, 2, nodes, max_tokens=8, device="cpu", bias=True, dtype=dtype,
                      num_chunks=num_chunks)
    x, weight = torch.randn(5, 16, dtype=dtype, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    idx, leaves = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]]), [x, weight, *moe.parameters()]
    moe(x, idx, weight).sum().backward()
    for i, t in enumerate(leaves):
        wanted = leaves[0] if nodes.rank else t
        got, = torch.autograd.grad(moe(x, idx, weight).sum(), [wanted])
        same_bits(got, wanted.grad, f"rank {nodes.rank}, tensor {i}")
    moe.finalize()


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_ask_for_gradients_of_other_tensors(dtype, num_chunks):
    run_nodes(asked, 2, 1, num_chunks, dtype)


def of_processes(rank, size):
    """Rank main: gloo between the nodes. Whether chunks, and a recomputed forward, have the bits of one."""
    found = []
    layer = None
    for num_chunks in (1, 3):
        moe = moe_of(None, num_chunks, torch.bfloat16, local_world_size=2, timeout_s=HANG_S)
        layer = moe.layer
        found.append([step(moe, case) for case in CASES])
        recomputed = functools.partial(checkpoint, moe, use_reentrant=False)
        found.append([step(moe, case, recomputed) for case in CASES])
        moe.finalize()
    layer.world.close()
    return found


def test_chunks_of_processes_and_recomputation():
    for rank, (want, *others) in enumerate(process_ranks(of_processes, 4)):
        for i, results in enumerate(others):
            for got, of_one in zip(results, want):
                for name in of_one:
                    same_bits(got[name], of_one[name], f"rank {rank}, variant {i}: {name}")


class Log:
    """A rail that notes when exchanges of rows are started and waited for."""

    def __init__(self, rail):
        self.rail, self.events = rail, []

    def __getattr__(self, name):
        return getattr(self.rail, name)

    def start(self, out, *rest):
        number = sum(e[0] == "start" for e in self.events)
        self.events.append(("start", number))
        finish = self.rail.start(out, *rest)
        return lambda: (finish(), self.events.append(("wait", number)))


def launches(nodes, num_chunks):
    nodes.rail = log = Log(nodes.rail)
    moe = moe_of(nodes, num_chunks)
    compute = moe._compute

    def logged(*args):
        log.events.append(("multiply",))
        return compute(*args)

    moe._compute = logged
    log.events.clear()
    step(moe, CASES[0])
    moe.finalize()
    return log.events


def test_launch_order_is_that_of_the_model_on_all_ranks():
    """D1 X0 D2 X1 R1 D3 X2 R2 X3 R3, as tests/models/rail.pml: the next chunk is under way during each X."""
    results = run_nodes(launches, 2, 2, 3)
    assert all(events == results[0] for events in results)
    x = ("multiply",)
    d1, d2, r1, d3, r2, r3 = (("start", i) for i in range(6))
    w = [("wait", i) for i in range(6)]
    forward = [d1, x, d2, w[0], x, r1, d3, w[1], x, r2, w[3], x, r3, w[2], w[4], w[5]]
    assert results[0][: len(forward)] == forward
    # Backward, in numbers of starts: D3 D2 X3 R3 D1 X2 R2 X1 R1, and X0 before the last rows are home.
    backward = [("start", 6), ("start", 7), ("wait", 6), ("start", 8), ("start", 9), ("wait", 7),
                ("start", 10), ("wait", 9), ("start", 11), ("wait", 8), ("wait", 10), ("wait", 11)]
    assert results[0][len(forward) :][: len(backward)] == backward


BAD = 2


def mistakes(nodes):
    found = {}
    moe, is_bad = moe_of(nodes, 3), nodes.rank == BAD
    x, idx, weight, _ = inputs_of(moe, Case(topk=TOPK, max_tokens=9))
    good = moe._compute
    for chunk in range(4):
        calls = iter(range(4))

        def fails(layer, *args):
            if next(calls) < chunk:
                return good(layer, *args)
            out = layer.dispatch(args[0], args[1], args[2])
            return layer._propagate(epmoe._C.OP_COMBINE, MemoryError("no memory"), out[2].buffer)

        moe._compute = fails if is_bad else good
        found["memory", chunk] = outcome(lambda: moe(x, idx, weight))
    moe._compute = good
    found["index"] = outcome(lambda: moe(x, idx.clamp(min=99) if is_bad else idx, weight))
    moe.num_chunks = 2 if is_bad else 3
    found["other"] = outcome(lambda: moe(x, idx, weight))
    moe.num_chunks = 3
    right = step(moe, CASES[0])
    rows = torch.zeros(moe.last_layout.num_rows, moe.layer.hidden)
    found["returned"] = outcome(lambda: moe.layer.combine(rows, moe.last_layout))
    one = moe_of(nodes, 1)
    want = step(one, CASES[0])
    for name in want:
        same_bits(right[name], want[name], name)
    for value in (0, 65, True, 1.5):
        found["created", value] = outcome(lambda: moe_of(nodes, value if is_bad else 3))
    found["differ"] = outcome(lambda: moe_of(nodes, 2 if is_bad else 3))
    return found


def retried(nodes):
    """A backward that fails between two chunks, and then a second one of the same forward."""
    moe = moe_of(nodes, 3, torch.bfloat16)
    x, idx, weight, _ = inputs_of(moe, Case(topk=TOPK, max_tokens=9))
    leaves = [x.requires_grad_(), weight.requires_grad_(), *moe.parameters()]
    want = torch.autograd.grad(moe(x, idx, weight).float().sum(), leaves)
    total, validate, calls = moe(x, idx, weight).float().sum(), nodes._validate, []

    def fails_once(header):
        calls.append(header.op == validation.DISPATCH_BACKWARD)
        validate(header._replace(failed=validation.FAILED) if nodes.rank == BAD and sum(calls) == 2
                 and calls[-1] else header)

    nodes._validate = fails_once
    kind = outcome(lambda: torch.autograd.grad(total, leaves, retain_graph=True)).kind
    nodes._validate = validate
    again = torch.autograd.grad(total, leaves)
    return kind, [torch.equal(a, b) for a, b in zip(again, want, strict=True)]


def test_a_backward_in_chunks_that_failed_can_be_repeated():
    for kind, same in run_nodes(retried, 2, 2):
        assert kind == "PeerError" and all(same), same


def test_mistakes_in_chunks_are_errors_on_all_ranks():
    """A chunk without memory, wrong indices, other numbers of chunks; the module works afterwards."""
    for rank, found in enumerate(run_nodes(mistakes, 2, 2)):
        is_bad = rank == BAD
        for chunk in range(4):
            got = found["memory", chunk]
            assert got.kind == ("MemoryError" if is_bad else "PeerError"), f"chunk {chunk}, {rank}: {got}"
        assert found["index"].kind == "EpIndexError"
        assert found["other"].kind == "EpMismatch"
        assert found["returned"].kind == "ValueError" and "rows have returned" in found["returned"].text
        assert "chunks: rank 2 has 2, rank 0 has 3" in found["other"].text
        for value, kind in ((0, "ValueError"), (65, "ValueError"), (True, "TypeError"), (1.5, "TypeError")):
            assert found["created", value].kind == (kind if is_bad else "PeerError"), found["created", value]
        assert found["differ"].kind == "EpMismatch" and "num_chunks 2" in found["differ"].text


def test_choose_chunks_is_one_where_overlap_brings_nothing():
    sizes = {"hidden": 7168, "inner": 2048, "num_experts": 256, "topk": 8, "local_size": 8}
    assert choose_chunks(8192, num_nodes=1, **sizes) == 1
    assert choose_chunks(32, num_nodes=2, **sizes) == 1  # latency
    for num_nodes in (2, 4, 8):
        for trains in (False, True):
            assert choose_chunks(8192, num_nodes=num_nodes, trains=trains, **sizes) in set(CHUNKS) - {1}
    assert choose_chunks(8192, 7168, 2048, 2, 8, 2, 1) == 1  # more choices than experts


def test_choose_chunks_counts_the_backward_only_in_training():
    """The backward multiplies more, so the slower multiplications of chunks cost more there."""
    sizes = {"hidden": 7168, "inner": 2048, "num_experts": 256, "topk": 8, "num_nodes": 2, "local_size": 8}
    for max_tokens in (2048, 8192):
        assert choose_chunks(max_tokens, **sizes) > choose_chunks(max_tokens, trains=True, **sizes)


@pytest.mark.parametrize("num_chunks, error", [(None, "nothing"), (1, "nothing"), (2, "ValueError")])
def test_chunks_need_a_layer_that_leaves_sms(num_chunks, error):
    """Only a layer on a GPU can leave none, so an object stands for it."""
    layer = types.SimpleNamespace(rail_capacity=None, leaves_sms=False)
    got = outcome(lambda: check_layer(num_chunks, layer))
    assert got.kind == error and ("reserve_sms" in got.text) == (error != "nothing"), got
