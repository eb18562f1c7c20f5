"""Shared parts of the tests of the fused operator: cases, an operator that counts its launches, and sums in
float64.

On a GPU of compute capability 9.x one launch does dispatch + GEMM, and one launch does GEMM + combine. On the
CPU each of these operations runs its stages. So all code around the launches is tested on the CPU too. Faults
of the kernels themselves are found only on GPUs, under torchrun.

Memory that is not written holds NaN (see conftest.py), and so does staging memory (see poison_staging).
"""

import collections
import contextlib
import dataclasses
import functools
import types

import torch

import cases
import epmoe
from cases import Case, generator, indices_of, make_op, num_tokens, same_bits
from epmoe import _C, reference
from epmoe.gemm.activations import is_gated
from gemm_cases import EPS, TINY, check as check_product, forward64
from moe_cases import close

ACTIVATIONS = (None, "gelu", "swiglu", "gpt_oss", epmoe.GptOss(alpha=1.3, limit=3.0),
               epmoe.SwiGLU(limit=3.0), epmoe.SwiGLU(1.3, 3.0, 1), "geglu_tanh", "relu2")
LEAVES = ("x", "weight", "w1", "b1", "w2", "b2")
LOW = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Experts(Case):
    """A Case with experts. Each expert has two GEMMs."""

    topk: int = 3
    hidden: int = 64
    max_tokens: int = 13
    tokens: str = "unequal"
    inner: int = 48
    activation: str | epmoe.GptOss | epmoe.SwiGLU | None = "swiglu"
    bias: bool = True


def grown(ranks, case, times=24):
    """The case; on GPUs with more tokens, so that an expert has several row tiles and a partial one."""
    if ranks.device.type != "cuda":
        return case
    return dataclasses.replace(case, max_tokens=times * case.max_tokens)


def parameters_of(case, num_experts):
    """w1, b1, w2, b2 of all ranks' experts."""
    g = generator(99, case.hidden, case.inner)
    wide = case.inner * (1 + (case.activation is not None and is_gated(case.activation)))
    shapes = {
        "w1": (num_experts, wide, case.hidden),
        "b1": (num_experts, wide),
        "w2": (num_experts, case.hidden, case.inner),
        "b2": (num_experts, case.hidden),
    }
    p = {}
    for name, shape in shapes.items():
        scale = shape[2] ** 0.5 if len(shape) == 3 else 1
        p[name] = (torch.randn(shape, generator=g) / scale).to(case.dtype)
    return p if case.bias else p | {"b1": None, "b2": None}


def inputs_of(case, rank, size):
    """x [T, H], idx and weight [T, K], and the gradient of y [T, H] of a rank."""
    g, t = generator(case.seed, rank, 31), num_tokens(case, rank, size)
    x, dy = (torch.randn(t, case.hidden, generator=g).to(case.dtype) for _ in range(2))
    weight = torch.rand(t, case.topk, generator=g) - 0.2 if case.weights else None
    return {"x": x, "idx": indices_of(case, rank, size), "weight": weight, "dy": dy}


def tensors(case, rank, size, device):
    """The inputs of a rank and the parameters of its experts, on the device."""
    local = slice(rank * case.num_local, (rank + 1) * case.num_local)
    p = parameters_of(case, case.num_local * size)
    p = {name: None if value is None else value[local].clone() for name, value in p.items()}
    values = p | inputs_of(case, rank, size)
    return types.SimpleNamespace(**{name: None if v is None else v.to(device) for name, v in values.items()})


class NoConversion(torch.Tensor):
    """A tensor whose conversion to another dtype fails for lack of memory."""

    def to(self, *_):
        raise MemoryError("no memory for the conversion")


def without_conversion(t):
    return t.double().as_subclass(NoConversion)


class LatePlan:
    """A mixin for an operator: on the CPU, too, the host learns late that a plan has failed, as on CUDA."""

    _late_error = None

    def _plan(self, exp_indices, scatter, buffer):
        if self.device.type == "cuda":
            return super()._plan(exp_indices, scatter, buffer)
        plan = self._empty(self._plan_words(len(exp_indices)), dtype=torch.int32)
        try:
            epmoe._C.layer_plan(self._c, buffer, (exp_indices, scatter, plan, 0))
        except epmoe.EpError as error:
            self._late_error = error
        return plan

    @contextlib.contextmanager
    def _with_late_error(self):
        """Raise the error of the plan where the module says that the plan has failed."""
        try:
            yield
        except epmoe.PeerError as error:
            if self._late_error is None or "the plan of this layout failed" not in str(error):
                raise
            late, self._late_error = self._late_error, None
            raise late from None

    def _num_rows(self, plan, buffer):
        with self._with_late_error():
            return super()._num_rows(plan, buffer)

    def _run_dispatch(self, *arguments, **options):
        with self._with_late_error():
            return super()._run_dispatch(*arguments, **options)


class Launches:
    """Counts the fused operations that the module runs for each layer, whoever calls it."""

    def __init__(self):
        self.of = collections.Counter()  # by the layer's capsule
        for name in ("dispatch_gemm", "gemm_combine", "experts", "experts_down", "experts_up"):
            call = getattr(_C, "layer_" + name)
            setattr(_C, "layer_" + name, functools.partial(self._count, call))

    def _count(self, call, layer, *arguments):
        ran = call(layer, *arguments)
        self.of[id(layer)] += ran[2]
        return ran


LAUNCHES = Launches()


class StagedOp(epmoe.EpAll2AllFusedOp):
    """An EpAll2AllFusedOp that counts its fused operations."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        LAUNCHES.of[id(self._c)] = 0  # a layer that is gone may have had this identity

    @property
    def num_launches(self):
        return LAUNCHES.of[id(self._c)]


def has_fused_path(device):
    """Whether a device has fused operations."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


def poison_staging(op):
    """Fill staging memory with NaN, as cases.poison_staging does; with or without token_saving."""
    if op.token_saving:
        return cases.poison_staging(op)
    num_tokens, k = op.max_tokens // op._copies, op._copies
    if op.capacity is not None:
        num_tokens = min(num_tokens, op.capacity // (op.world_size * k))
    idx = (torch.arange(num_tokens)[:, None] + torch.arange(k)) % op.world_size * op.num_local_experts
    x = torch.full((num_tokens, op.hidden), torch.nan, dtype=op.dtype, device=op.device)
    rows, _, layout = op.dispatch(x, idx.to(op.device))
    op.combine(torch.full_like(rows, torch.nan), layout)


def dispatch_gemm(op, case, t, **options):
    """mega_dispatch_group_gemm of a rank's tensors, by a new plan or by options["layout"]."""
    idx = None if "layout" in options else t.idx
    return op.mega_dispatch_group_gemm(t.x, idx, gemm_weight=t.w1, weight=t.weight, bias=t.b1,
                                       activation=case.activation, **options)


def gemm_combine(op, t, h, row_weight, layout):
    """mega_group_gemm_combine with a rank's tensors."""
    return op.mega_group_gemm_combine(h, t.w2, layout, row_weight, bias=t.b2)


def step(op, case, t, **options):
    """Both operations, one after the other. Returns their results without the undefined rows."""
    h, row_weight, layout = dispatch_gemm(op, case, t, **options)
    y = gemm_combine(op, t, h, row_weight, layout)
    return cut(h, row_weight, y, layout)


def cut(h, row_weight, y, layout):
    """The results of a step; only the first num_rows rows of h and row_weight are defined."""
    m = layout.num_rows
    return {"h": h[:m], "row_weight": None if row_weight is None else row_weight[:m], "y": y}


def same(got, want, what):
    """Compare two results of step bit by bit."""
    for name, value in want.items():
        assert (got[name] is None) == (value is None), f"{what}: {name}"
        if value is not None:
            same_bits(got[name], value, f"{what}: {name}")


def run_stages_and_fused(world, device, case_list, knobs, shared_options=None):
    """Run cases of one shape through the stages once and through the fused op twice; all bits must agree.

    Returns the first result of the fused op for each case.
    """
    plain, op = (make_op(world, device, case_list[0], StagedOp, **(options | (shared_options or {})))
                 for options in ({"fused": False}, knobs))
    poison_staging(plain), poison_staging(op)
    results = []
    for case in case_list:
        t = tensors(case, world.rank, world.size, device)
        launches = op.num_launches
        want, got, again = step(plain, case, t), step(op, case, t), step(op, case, t)
        results.append((want, got, again))
        assert op.num_launches - launches == (4 if has_fused_path(device) else 0)
        assert plain.num_launches == 0
    for o in (plain, op):
        o.synchronize()
        o.finalize()
    for case, (want, got, again) in zip(case_list, results):
        same(got, want, f"{case}, rank {world.rank}")
        same(again, want, f"{case}, rank {world.rank}, second call")
    return [got for _, got, _ in results]


def sums64(case, t, p):
    """y of a rank in float64, and the error that is allowed.

    Allowed are one rounding each of h, of the rows, of each rank's sum and of the final sum, and the error of
    sums in float32.
    """
    y, slack = torch.zeros(t["x"].shape, dtype=torch.float64), torch.zeros(t["x"].shape, dtype=torch.float64)
    eps, tiny = EPS[case.dtype], TINY[case.dtype]
    for e in range(len(p["w1"])):
        at, k = (t["idx"] == e).nonzero(as_tuple=True)
        b1 = None if p["b1"] is None else p["b1"][e]
        h, size = forward64(t["x"][at], p["w1"][e], b1, case.activation, None)
        w2, b2 = p["w2"][e].double(), 0 if p["b2"] is None else p["b2"][e].double()
        row, size_row = h @ w2.t() + b2, h.abs() @ w2.abs().t() + abs(b2)
        off = (eps * h.abs() + 2.0**-19 * size + tiny) @ w2.abs().t()
        off = off + 2 * eps * row.abs() + 2.0**-19 * size_row + 2 * tiny
        if t["weight"] is None:
            weight = torch.ones(len(at), 1, dtype=torch.float64)
        else:
            weight = t["weight"][at, k, None].double()
        y.index_add_(0, at, weight * row)
        slack.index_add_(0, at, weight.abs() * off)
    return y, slack + eps * y.abs() + len(p["w1"]) * tiny


def check_rows64(results, case):
    """h of every expert's rows, in the plan's order, and the row weights."""
    size = len(results)
    params = parameters_of(case, case.num_local * size)
    inputs = [inputs_of(case, rank, size) for rank in range(size)]
    p = reference.plan([t["idx"] for t in inputs], case.num_local * size)
    rows = reference.dispatch([t["x"] for t in inputs], p)
    weights = reference.dispatch_weights([t["weight"] for t in inputs], p) if case.weights else None
    for rank, got in enumerate(results):
        assert len(got["h"]) == len(rows[rank]) and got["h"].dtype == case.dtype
        if weights is not None:
            same_bits(got["row_weight"], weights[rank], f"rank {rank}: row weights")
        begin = 0
        for e in range(rank * case.num_local, (rank + 1) * case.num_local):
            end = begin + int(p["counts"][:, e].sum())
            b1 = None if params["b1"] is None else params["b1"][e]
            want, terms = forward64(rows[rank][begin:end], params["w1"][e], b1, case.activation, None)
            check_product(got["h"][begin:end], want, terms, f"rank {rank}: h of expert {e}")
            begin = end


def check_sums64(results, case):
    """y of every token."""
    size = len(results)
    params = parameters_of(case, case.num_local * size)
    wide = {name: None if v is None else v.double() for name, v in params.items()}
    for rank, got in enumerate(results):
        t = inputs_of(case, rank, size)
        want, slack = sums64(case, t, params)
        if case.activation is not None:
            if t["weight"] is None:
                weight = torch.ones(t["idx"].shape, dtype=torch.float64)
            else:
                weight = t["weight"].double()
            want = reference.moe(t["x"].double(), t["idx"], weight, wide["w1"], wide["w2"], case.activation,
                                 wide["b1"], wide["b2"])
        y = got["y"].double()
        assert got["y"].dtype == case.dtype and y.shape == want.shape
        worst = ((y - want).abs() / slack).max().item() if want.numel() else 0.0
        is_right = worst <= 1 and not y.isnan().any()
        assert is_right, f"rank {rank}: the error of y is {worst} times the allowed rounding error"


def check_numbers(results, case):
    """Compare the results of all ranks with float64."""
    check_rows64(results, case)
    check_sums64(results, case)


def check(ranks, case_list, knobs=None, shared_options=None, **run_options):
    """Compare the fused op with the stages bit by bit, and with float64 within rounding.

    Args:
        case_list: A case, or several cases of one shape.
        knobs: Options of the fused op.
        shared_options: Options of both the fused op and the stages.
        run_options: Options of ranks(...).
    """
    case_list = case_list if isinstance(case_list, list) else [case_list]
    results = ranks(run_stages_and_fused, case_list, knobs or {}, shared_options, **run_options)
    for i, case in enumerate(case_list):
        check_numbers([r[i] for r in results], case)


# of gradients, see test_moe_layer.py
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def moe64(case, t, p):
    """reference.moe, which requires an activation, and the same without one: two GEMMs."""
    weight = torch.ones(t["idx"].shape, dtype=torch.float64) if t["weight"] is None else t["weight"]
    if case.activation is not None:
        return reference.moe(t["x"], t["idx"], weight, p["w1"], p["w2"], case.activation, p["b1"], p["b2"])
    y = torch.zeros_like(t["x"])
    for e in range(len(p["w1"])):
        at, k = (t["idx"] == e).nonzero(as_tuple=True)
        h = t["x"][at] @ p["w1"][e].t() + (0 if p["b1"] is None else p["b1"][e])
        rows = h @ p["w2"][e].t() + (0 if p["b2"] is None else p["b2"][e])
        y = y.index_add(0, at, rows * weight[at, k, None])
    return y


def check_gradients(results, case):
    """Compare with the gradients of moe64 over the tokens of all ranks."""
    size = len(results)
    p = {n: None if v is None else v.double().requires_grad_()
         for n, v in parameters_of(case, case.num_local * size).items()}
    wanted = []
    for rank in range(size):
        t = {n: v.double() if v is not None and v.is_floating_point() else v
             for n, v in inputs_of(case, rank, size).items()}
        for n in ("x", "weight"):
            if t[n] is not None:
                t[n].requires_grad_()
        y = moe64(case, t, p)
        y.backward(t["dy"])
        d_weight = None if t["weight"] is None else t["weight"].grad
        wanted.append({"y": y.detach(), "x": t["x"].grad, "weight": d_weight})
    for rank, got in enumerate(results):
        local = slice(rank * case.num_local, (rank + 1) * case.num_local)
        want = wanted[rank] | {n: None if v is None else v.grad[local] for n, v in p.items()}
        for name, value in got.items():
            assert value.isfinite().all(), f"rank {rank}: {name}"
            factor = 4 if name in ("b1", "b2") else 1  # torch sums the rows of a bias in the bias's dtype
            close(value, want[name], f"rank {rank}: {'y' if name == 'y' else 'gradient of ' + name}",
                  factor * TOLERANCE[case.dtype])
