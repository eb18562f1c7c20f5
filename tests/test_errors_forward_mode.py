"""Forward-mode differentiation and transforms of torch.func: an error on every rank, never a lost tangent."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad

import epmoe
from cases import check_outcomes, outcome

TEXT = "does not support forward-mode differentiation"
T, H, INNER = 3, 16, 32
SIZES = dict(max_tokens=4, hidden=H, topk=1, dtype=torch.float32)


def dual(t):
    return forward_ad.make_dual(t, torch.ones_like(t))


class Calls:
    """One layer of each kind, and calls of them; `mark` gives the tensor of a call its tangent."""

    def __init__(self, world, device):
        experts = 2 * world.size
        self.op = epmoe.EpAll2AllFusedOp(world, device=device, num_tot_experts=experts, **SIZES)
        self.moe = epmoe.EPMoE(H, INNER, experts, 1, layer=self.op, dtype=torch.float32, device=device)
        self.low = epmoe.LowLatencyAll2All(world, device=device, num_experts=experts, **SIZES)
        self.x = torch.ones(T, H, device=device)
        self.idx = (torch.arange(T, device=device)[:, None] + world.rank) % experts
        self.w = torch.ones(T, 1, device=device)
        with torch.no_grad():
            self.rows, self.row_weight, self.layout = self.op.dispatch(self.x, self.idx, self.w)
            self.kept = self.low.dispatch(self.x, self.idx)

    def dispatch(self, mark):
        return self.op.dispatch(mark(self.x), self.idx)[0]

    def dispatch_weight(self, mark):
        return self.op.dispatch(self.x, weight=mark(self.w), layout=self.layout)[1]

    def combine(self, mark):
        return self.op.combine(mark(self.rows), self.layout)

    def combine_weight(self, mark):
        return self.op.combine(self.rows, self.layout, mark(self.row_weight))

    def mega_dispatch(self, mark):
        weight = self.moe.gate_up_proj.detach()
        return self.op.mega_dispatch_group_gemm(self.x, self.idx, gemm_weight=mark(weight))[0]

    def mega_combine(self, mark):
        weight, bias = self.moe.gate_up_proj.detach()[:, :H], torch.zeros(2, H, device=self.x.device)
        return self.op.mega_group_gemm_combine(self.rows, weight.contiguous(), self.layout, bias=mark(bias))

    def module(self, mark):
        return self.moe(mark(self.x), self.idx, self.w)

    def low_dispatch(self, mark):
        return self.low.dispatch(mark(self.x), self.idx)[0]

    def low_weights(self, mark):
        return self.low.dispatch(self.x, self.idx, mark(self.w))[0]

    def low_combine(self, mark):
        return self.low.combine(mark(self.kept[0]), self.kept[3])

    def low_out(self, mark):
        return self.low.combine(self.kept[0], self.kept[3], out=mark(torch.zeros(T, H, device=self.x.device)))

    # Forward over reverse: the gradient that comes in has a tangent.

    def _backward(self, y, leaf, mark):
        return torch.autograd.grad(y, leaf, mark(torch.ones_like(y)))[0]

    def dispatch_backward(self, mark):
        leaf = self.x.clone().requires_grad_()
        return self._backward(self.op.dispatch(leaf, self.idx)[0], leaf, mark)

    def combine_backward(self, mark):
        leaf = self.rows.clone().requires_grad_()
        return self._backward(self.op.combine(leaf, self.layout), leaf, mark)

    def module_backward(self, mark):
        leaf = self.x.clone().requires_grad_()
        return self._backward(self.moe(leaf, self.idx, self.w), leaf, mark)


NAMES = [name for name in vars(Calls) if not name.startswith("_")]


def run_all(world, device, is_marked, modes):
    """The outcome of each call with `is_marked` ranks' tensors marked, and whether it works after that."""
    calls = Calls(world, device)
    got = {}
    for name in NAMES:
        call = getattr(calls, name)
        context = torch.enable_grad if "backward" in name or "low" not in name else torch.no_grad
        with context():
            mark = modes[0] if is_marked(world.rank) else modes[1]
            is_low = "low" in name
            layer = calls.low if is_low else calls.op
            refused = outcome(lambda: call(mark) is None, layer)
            right = call(modes[1]).isfinite().all().item() if not is_low else call(modes[1]) is not None
        layer.synchronize()
        got[name] = refused, right
    calls.low.finalize()
    calls.op.finalize()
    return got


def test_errors_forward_mode_on_all_ranks_and_on_one(ranks):
    with forward_ad.dual_level():  # of the process: ranks that are threads share it
        for is_marked in (lambda r: True, lambda r: r == 0):
            results = ranks(run_all, is_marked, (dual, lambda t: t), world_size=2)
            for name in NAMES:
                kinds = ["NotImplementedError" if is_marked(r) else "PeerError" for r in range(len(results))]
                check_outcomes([r[name][0] for r in results], kinds, TEXT, on_rank=0,
                               elsewhere=() if is_marked(1) else ("rank 0",))
                assert all(r[name][1] for r in results), name


def test_errors_forward_mode_where_a_gradient_is_wanted(ranks):
    """Here torch itself would raise, but on this rank alone, and after the operation."""
    with forward_ad.dual_level():
        modes = lambda t: dual(t.clone().requires_grad_()), lambda t: t.clone().requires_grad_()  # noqa: E731

        def run(world, device):
            calls = Calls(world, device)
            got = []
            for name in ("dispatch", "combine", "mega_dispatch", "mega_combine", "module"):
                mark = modes[0] if world.rank == 0 else modes[1]
                got.append(outcome(lambda: getattr(calls, name)(mark) is None, calls.op))
            calls.low.finalize()
            calls.op.finalize()
            return got

        results = ranks(run, world_size=2)
    for outcomes in zip(*results):
        kinds = ["NotImplementedError"] + ["PeerError"] * (len(results) - 1)
        check_outcomes(outcomes, kinds, TEXT, on_rank=0, elsewhere=("rank 0",))


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[0],
    "vmap": lambda f, x: torch.func.vmap(f)(x[None])[0],
}


def transformed(world, device):
    """The outcomes of transforms of combine and dispatch(layout=), which plan nothing."""
    calls = Calls(world, device)
    got = []
    for transform in TRANSFORMS.values():
        for f, x in ((lambda t: calls.op.combine(t, calls.layout), calls.rows),
                     (lambda t: calls.op.dispatch(t, layout=calls.layout)[0], calls.x)):
            got.append(outcome(lambda: transform(f, x) is None, calls.op))
    y = calls.op.combine(calls.rows, calls.layout)
    calls.low.finalize()
    calls.op.finalize()
    return got, y.isfinite().all().item()


def test_errors_transforms_of_one_call(ranks):
    for got, right in ranks.isolated(transformed, world_size=2):
        check_outcomes(got, "NotImplementedError", "torch.func")
        assert right


def test_errors_forward_mode_of_a_gemm():
    x, weight, counts = torch.ones(3, 4), torch.ones(2, 4, 4), torch.tensor([1, 2])
    bias, scale = torch.zeros(2, 4), torch.ones(3)
    with forward_ad.dual_level():
        calls = [lambda: epmoe.grouped_gemm(dual(x), weight, counts),
                 lambda: epmoe.grouped_gemm(x, dual(weight), counts),
                 lambda: epmoe.grouped_gemm(x, weight, counts, bias=dual(bias)),
                 lambda: epmoe.grouped_gemm(x, weight, counts, row_weight=dual(scale))]
        leaf = x.clone().requires_grad_()
        y = epmoe.grouped_gemm(leaf, weight, counts)
        calls.append(lambda: torch.autograd.grad(y, leaf, dual(torch.ones_like(y))))
        check_outcomes([outcome(call) for call in calls], "NotImplementedError", TEXT)
        assert epmoe.grouped_gemm(x, weight, counts).unique().tolist() == [4.0]


def batched_backward(world, device):
    """A backward of a batch of gradients, and the same gradients one by one."""
    calls = Calls(world, device)
    x, w = calls.x.clone().requires_grad_(), calls.w.clone().requires_grad_()
    rows, row_weight, layout = calls.op.dispatch(x, calls.idx, w)
    y = calls.op.combine(rows * rows, layout, row_weight)
    batch = torch.arange(3.0, device=device)[:, None, None].expand(3, *y.shape).contiguous()

    def gradients(g):
        return torch.autograd.grad(y, (x, w), g, retain_graph=True)

    got = torch.func.vmap(gradients)(batch)
    wanted = [torch.stack(g) for g in zip(*(gradients(g) for g in batch))]
    calls.low.finalize()
    calls.op.finalize()
    return [torch.equal(g, v) for g, v in zip(got, wanted, strict=True)]


def test_errors_forward_mode_leaves_vmap_where_it_is_right(ranks):
    """torch calls an operator for each element of a batch. That is right for a backward and for a GEMM."""
    assert ranks.isolated(batched_backward, world_size=2) == [[True, True]] * ranks.size(2)
    weight, counts = torch.randn(2, 4, 4), torch.tensor([1, 2])
    batch = torch.randn(3, 3, 4)

    def gemm(x):
        return epmoe.grouped_gemm(x, weight, counts)

    assert torch.equal(torch.func.vmap(gemm)(batch), torch.stack([gemm(x) for x in batch]))
    for transform in (lambda: torch.func.jvp(gemm, (batch[0],), (batch[1],)),
                      lambda: torch.func.jvp(torch.func.vmap(gemm), (batch,), (batch,)),
                      lambda: torch.func.grad(lambda x: gemm(x).sum())(batch[0])):
        check_outcomes([outcome(transform)], "NotImplementedError", "torch.func")


def decoded(world, device, weight_dtype):
    """The outcomes of calls on the low-latency path, and whether it works after them."""
    moe = epmoe.EPMoE(64, 64, 2 * world.size, 1, world, max_tokens=4, device=device,
                      weight_dtype=weight_dtype)
    x = torch.ones(T, 64, dtype=torch.bfloat16, device=device)
    idx, w = torch.zeros(T, 1, dtype=torch.int64, device=device), torch.ones(T, 1, device=device)
    with torch.no_grad():
        want, low = moe(x, idx, w), moe.layer.low_latency
        got = [outcome(lambda t=t: t(lambda x: moe(x, idx, w), x) is None, low) for t in TRANSFORMS.values()]
        with forward_ad.dual_level():
            got.append(outcome(lambda: moe(dual(x), idx, w) is None, low))
        is_right = moe.last_layout is None and torch.equal(moe(x, idx, w), want)
    moe.layer.synchronize()
    moe.finalize()
    return got, is_right


@pytest.mark.parametrize("weight_dtype", [None, "mxfp4"])
def test_errors_forward_mode_of_a_module_that_decodes(ranks, weight_dtype):
    """It runs in one call of the module of C, without the operators that refuse it elsewhere."""
    for got, is_right in ranks.isolated(decoded, weight_dtype, world_size=2):
        check_outcomes(got[:1], *(("RuntimeError", "has no gradients") if weight_dtype else
                                  ("NotImplementedError", "torch.func")))
        check_outcomes(got[1:-1], "NotImplementedError", "torch.func")
        check_outcomes(got[-1:], "NotImplementedError", TEXT)
        assert is_right


@pytest.mark.cpu_only
def test_errors_forward_mode_of_a_heap():
    heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
    t = heap.malloc_symmetric(3)
    with forward_ad.dual_level():
        into = dual(torch.zeros(3))
        check_outcomes([outcome(lambda: heap.get(into, t, 0)), outcome(lambda: heap.put(dual(t), t, 0))],
                       "RuntimeError", "tangent")
        with contextlib.closing(heap):
            heap.get(torch.zeros(3), t, 0)
