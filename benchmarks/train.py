"""Measures a training step of a layer: forward, backward, both, the memory that it takes, and inference.

epmoe           EPMoE as it is
epmoe stages    one after the other, each a kernel of its own (fused=False)
torch           sort, all_to_all_single, torch._grouped_mm, compiled SwiGLU, index_add
torch products  torch's grouped GEMMs alone on the same rows: two forward, four backward
Liger           its megakernel, where liger_cute_kernels can be imported
epmoe recomputed  in 16 bits: EPMoE(recompute_gate_up=True), which keeps only the rows
epmoe balanced  with --balance: EPMoE(balance=..), in which ranks with few rows help the others
epmoe FP8       with --fp8: EPMoE(compute_dtype=torch.float8_e4m3fn); its errors are shown
epmoe FP8 rowwise  with --fp8: the same with fp8_recipe="rowwise"
epmoe FP8 rowwise recomputed  with --fp8: that with recompute_gate_up=True
torch FP8 products  with --fp8: torch._scaled_grouped_mm alone on rows that are quantised already, with a
                scale for each row and each column of the weights: two forward, four backward
DeepGEMM products  with --fp8: its grouped GEMMs alone, where it can be imported: two forward, two backward

All alternate in rounds, so that each meets the GPU in the same state.  A rank that is alone computes as one
rank of four: a quarter of the experts, and as many rows; nothing crosses a link.  Gradients are compared
before anything is timed.  Inference is the forward without gradients: it keeps nothing for a backward.

kept bytes: what the forward leaves for the backward, without parameters and inputs.  peak bytes, on a GPU:
the most that a step allocates with torch, with the gradients of weights and inputs.  The symmetric memory of
epmoe and of Liger is not in it.
"""

import functools
import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import epmoe

from .check import poisoned
from .measure import slowest

RANKS = 4  # a rank that is alone computes as one of them
DEFAULT = ("seed", "dsv3", "qwen3-235b", "qwen3-30b", "mixtral")
PASSES = ("forward", "backward", "both")
FP8 = {"epmoe FP8": {"fp8_recipe": "blockwise"}, "epmoe FP8 rowwise": {"fp8_recipe": "rowwise"},
       "epmoe FP8 rowwise recomputed": {"fp8_recipe": "rowwise", "recompute_gate_up": True}}
# Of epmoe and those in FP8, and the names of these ratios.
RATIOS = {"torch": "torch", "torch products": "GEMMs", "Liger": "Liger", "epmoe": "bf16"}
NAMES = ("y", "gradient of x", "gradient of the routing weights", "gradient of gate_up_proj",
         "gradient of down_proj")
FP8_BOUND = 0.15
BOUNDS = {torch.bfloat16: 3e-2, torch.float32: 1e-4}  # of the norm of an error over that of the result


def jobs(run):
    found = [replace(s, experts=s.experts // RANKS) if run.size == 1 else s for s in run.shapes(*DEFAULT)]
    found = run.with_skews([s for s in found if s.experts >= s.topk])
    return [(s.label, functools.partial(measure, run, s)) for s in found]


# ---- the peers: each layer is a function of x [T, H] and weight [T, K] that autograd differentiates ----


def _swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@functools.cache
def swiglu_of(device_type):
    """Return SwiGLU, compiled for a GPU."""
    return torch.compile(_swiglu, dynamic=True) if device_type == "cuda" else _swiglu


def product(a, weight, ends):
    """Multiply the rows of each expert by weight [L, K, N] of the expert: one call on a GPU."""
    if a.device.type == "cuda" and len(a):  # in a skewed routing a rank may have no rows
        return torch._grouped_mm(a, weight, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ w for rows, w in zip(a.split(sizes), weight, strict=True)])


def weight_gradient(a, b, ends):
    """Return [L, N, K]: a [M, N] transposed times b [M, K], for the rows of each expert."""
    if a.device.type == "cuda" and len(a):
        return torch._grouped_mm(a.t(), b, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.stack([x.t() @ y for x, y in zip(a.split(sizes), b.split(sizes), strict=True)])


class _Exchange(torch.autograd.Function):
    """all_to_all_single of rows.  Its backward sends the gradients back."""

    @staticmethod
    def forward(ctx, rows, received, sent):
        ctx.sizes = received, sent
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        received, sent = ctx.sizes
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class TorchLayer:
    """Sort, all_to_all_single, grouped GEMM, SwiGLU, grouped GEMM, all_to_all_single, weights, index_add.

    With one rank nothing is exchanged: it is what the grouped_mm experts of transformers do.
    """

    def __init__(self, idx, num_experts, world_size, gate_up, down):
        self.idx, self.num_experts, self.world_size = idx, num_experts, world_size
        self.gate_up, self.down = gate_up, down

    def _route(self):
        """Return the choices in the order of their experts, and how many each expert has."""
        flat = self.idx.flatten()
        order = flat.argsort(stable=True)
        return order, torch.bincount(flat, minlength=self.num_experts)

    def experts(self, rows, counts):
        ends = counts.cumsum(0, dtype=torch.int32)
        h = product(rows, self.gate_up.transpose(1, 2), ends)
        return product(swiglu_of(rows.device.type)(h), self.down.transpose(1, 2), ends)

    def _spread_experts(self, rows, counts):
        """Compute the experts of all ranks for the rows of this rank, which are ordered by expert."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = torch.stack([counts, theirs]).view(2, self.world_size, -1).sum(2).tolist()
        local = self.num_experts // self.world_size
        expert = torch.arange(local, device=rows.device).repeat(self.world_size)
        by_expert = expert.repeat_interleave(theirs, output_size=sum(received)).argsort(stable=True)
        got = _Exchange.apply(rows, received, sent)[by_expert]
        y = self.experts(got, theirs.view(self.world_size, local).sum(0))
        back = torch.zeros_like(y).index_copy(0, by_expert, y)
        return _Exchange.apply(back, sent, received)

    def __call__(self, x, weight):
        order, counts = self._route()
        token = order // self.idx.shape[1]
        rows = x[token]
        y = self.experts(rows, counts) if self.world_size == 1 else self._spread_experts(rows, counts)
        y = y * weight.flatten()[order][:, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y)


def liger_layer(shape, idx, gate_up, down, world_size, device):
    """Return Liger's megakernel as a layer and its weights [gate, up, down].

    Raises an exception where it cannot be used: it needs the wheel liger_cute_kernels, and ranks of NCCL.
    The weights are copies, because it takes gates and ups as separate tensors.  Each forward must be followed
    by its backward, which returns its symmetric memory.
    """
    from liger_cute_kernels import nvshmem, tvm_ffi
    from liger_kernel.ops.cute.ops import moe_fused

    if not dist.is_initialized():
        raise RuntimeError("it needs a process group: start the bench with torchrun")
    nvshmem.init_from_pg()
    tvm_ffi.moe_configure_symmetric(max_tokens=shape.tokens, hidden_dim=shape.hidden,
                                    max_num_experts=shape.experts, max_top_k=shape.topk, num_pes=world_size,
                                    num_hosts=1, gpus_per_host=world_size)
    gate, up = (t.detach().clone().requires_grad_() for t in gate_up.chunk(2, 1))
    down, idx = down.detach().clone().requires_grad_(), idx.to(torch.int32)

    def layer(x, weight):
        return moe_fused(x, idx, weight.to(x.dtype), gate, up, down, shape.experts, shape.topk)

    return layer, [gate, up, down]


# ---- a step ----


class Step:
    """A layer, and the tensors that require gradients: x [T, H], weight [T, K] and the weights.

    frozen: weights that require none.
    """

    def __init__(self, call, x, weight, dy, parameters, frozen=()):
        self.call, self.dy, self.parameters, self.frozen = call, dy, parameters, frozen
        self.x, self.weight = (t.detach().clone().requires_grad_() for t in (x, weight))

    def clear(self):
        for t in (self.x, self.weight, *self.parameters):
            t.grad = None

    def forward(self):
        return self.call(self.x, self.weight)

    def backward(self, y):
        y.backward(self.dy)

    def results(self):
        """Return y and the gradients of a step, after poisoned memory."""
        self.clear()
        with poisoned():
            y = self.forward()
            self.backward(y)
        found = [y.detach(), self.x.grad, self.weight.grad, *(p.grad for p in self.parameters)]
        self.clear()
        return found


class BalancedStep(Step):
    """A step of an EPMoE with balance.  Its own experts are the first ones of its parameters."""

    def results(self):
        found, num = super().results(), self.num_own
        return found[:3] + [grad[:num] for grad in found[3:]]

    @classmethod
    def of(cls, run, shape, inputs, dy, parameters):
        """Return (the step, its EPMoE).  parameters: those of the experts.  Collective."""
        x, idx, weight = inputs
        moe = epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, run.world, dtype=x.dtype,
                          device=run.device, max_tokens=shape.tokens, num_sm=run.num_sm,
                          balance=epmoe.Balance(run.options.balance))
        own = [moe.gate_up_proj, moe.down_proj]
        with torch.no_grad():
            for mine, p in zip(own, parameters):
                mine[:len(p)] = p
        step = cls(lambda x, w: moe(x, idx, w), x, weight, dy, own)
        step.num_own = len(parameters[0])
        return step, moe


class Inference:
    """The forward of a layer, without gradients."""

    def __init__(self, step):
        self.step = step

    @torch.no_grad()
    def forward(self):
        return self.step.forward()

    def backward(self, y):
        pass

    def clear(self):
        pass


class Fp8Products:
    """torch's FP8 grouped GEMMs alone, with numbers that are quantised already.

    Operands whose contraction runs over rows have, for each expert, a multiple of 16 rows.
    """

    def __init__(self, num_rows, gate_up, down):
        num, device = len(gate_up), gate_up.device
        each = num_rows // num // 16 * 16
        self.ends = torch.arange(each, num * each + 1, each, device=device, dtype=torch.int32)
        wide, hidden, inner = gate_up.shape[1], gate_up.shape[2], down.shape[2]

        def make(*sizes):
            return torch.randn(sizes, device=device).to(torch.float8_e4m3fn)

        self.rows = {n: make(num * each, n) for n in (hidden, wide, inner)}  # K-major over columns
        self.columns = {n: make(n, num * each) for n in (hidden, wide, inner)}  # K-major over rows
        self.weights = {(n, k): make(num, n, k) for n, k in ((wide, hidden), (hidden, inner), (inner, hidden),
                                                             (hidden, wide))}
        self.scale_of_rows = torch.ones(num * each, device=device)
        self.sizes = hidden, wide, inner

    def _product(self, n, k):
        scale = torch.ones(len(self.ends), n, device=self.ends.device)
        return torch._scaled_grouped_mm(self.rows[k], self.weights[n, k].transpose(1, 2), self.scale_of_rows,
                                        scale, offs=self.ends, out_dtype=torch.bfloat16, use_fast_accum=True)

    def _weight_gradient(self, n, k):
        scales = [torch.ones(len(self.ends) * size, device=self.ends.device) for size in (n, k)]
        return torch._scaled_grouped_mm(self.columns[n], self.columns[k].t(), *scales, offs=self.ends,
                                        out_dtype=torch.bfloat16, use_fast_accum=True)

    def forward(self):
        hidden, wide, inner = self.sizes
        self._product(wide, hidden)
        return self._product(hidden, inner)

    def backward(self, dy):
        hidden, wide, inner = self.sizes
        self._product(inner, hidden)
        self._weight_gradient(hidden, inner)
        self._product(hidden, wide)
        self._weight_gradient(wide, hidden)

    def clear(self):
        pass


class DeepGemmProducts(Fp8Products):
    """The grouped GEMMs of DeepGEMM 2 in FP8 alone: two forward, and the two of the rows in the backward.

    The numbers are quantised already, with a scale for each 128 numbers of a row and for each block of 128 by
    128 of the weights.  For each expert there is a multiple of 128 rows.
    """

    def __init__(self, num_rows, gate_up, down):
        import deep_gemm

        self.multiply = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        num, device = len(gate_up), gate_up.device
        each = num_rows // num // 128 * 128
        wide, hidden, inner = gate_up.shape[1], gate_up.shape[2], down.shape[2]
        self.sizes = hidden, wide, inner
        self.expert = torch.arange(num, device=device, dtype=torch.int32).repeat_interleave(each)

        def make(*sizes, blocks):
            scales = torch.ones(*(-(-n // block) for n, block in zip(sizes, blocks)), device=device)
            return torch.randn(sizes, device=device).to(torch.float8_e4m3fn), scales

        self.rows = {n: make(num * each, n, blocks=(1, 128)) for n in self.sizes}
        self.weights = {(n, k): make(num, n, k, blocks=(1, 128, 128))
                        for n, k in ((wide, hidden), (hidden, inner), (inner, hidden), (hidden, wide))}

    def _product(self, n, k):
        out = torch.empty(len(self.expert), n, dtype=torch.bfloat16, device=self.expert.device)
        self.multiply(self.rows[k], self.weights[n, k], out, self.expert)
        return out

    def _weight_gradient(self, n, k):
        pass  # not measured


class Products:
    """torch's grouped GEMMs alone, on the rows that a rank receives."""

    def __init__(self, rows, offsets, gate_up, down):
        self.rows, self.ends, self.gate_up, self.down = rows, offsets[1:].contiguous(), gate_up, down
        with torch.no_grad():
            self.wide = product(rows, gate_up.transpose(1, 2), self.ends)
            self.inner = swiglu_of(rows.device.type)(self.wide)

    @torch.no_grad()
    def forward(self):
        product(self.rows, self.gate_up.transpose(1, 2), self.ends)
        return product(self.inner, self.down.transpose(1, 2), self.ends)

    @torch.no_grad()
    def backward(self, dy):
        weight_gradient(dy, self.inner, self.ends)
        product(dy, self.down, self.ends)
        weight_gradient(self.wide, self.rows, self.ends)
        product(self.wide, self.gate_up, self.ends)

    def clear(self):
        pass


def run_step(step):
    """A step; yields between its parts, for the clock."""
    step.clear()
    yield
    y = step.forward()
    yield
    step.backward(y)
    yield


def clock(on_gpu):
    if not on_gpu:
        return time.perf_counter() * 1e3
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b, on_gpu):
    return a.elapsed_time(b) if on_gpu else b - a


def meet(run):
    """Let the streams of all ranks wait for each other.

    A rank with few rows ends a step before the others.  Its next forward must not count that wait.
    """
    if run.on_gpu and dist.is_initialized() and run.size > 1:
        dist.all_reduce(torch.zeros(1, device=run.device))


def timed_steps(run, step, calls):
    """Return (forward, backward) milliseconds, the median of some steps, which all ranks begin together."""
    on_gpu, marks = run.on_gpu, []
    for _ in range(calls):
        meet(run)
        marks.append([clock(on_gpu) for _ in run_step(step)])
    if on_gpu:
        torch.cuda.synchronize()
    return [statistics.median(between(m[i], m[i + 1], on_gpu) for m in marks) for i in range(2)]


def alternate(run, steps):
    """Return {name: {pass: ms}}: the medians over rounds, in which all steps alternate.  Collective."""
    rounds, round_ms = (run.options.iters or 6, 60.0) if run.on_gpu else (run.options.iters or 2, 1.0)
    calls, times = {}, {name: [] for name in steps}
    for name, step in steps.items():
        timed_steps(run, step, 2)
        took = slowest(run.cpu_group, sum(timed_steps(run, step, 2)))
        calls[name] = max(2, int(round_ms / took)) if run.on_gpu else 1
    for r in range(rounds + 1):  # one to warm up; every other round in reverse order
        for name in (list(steps) if r % 2 else reversed(list(steps))):
            found = timed_steps(run, steps[name], calls[name])
            if r:
                times[name].append((*found, sum(found)))
    medians = {name: map(statistics.median, zip(*t)) for name, t in times.items()}
    return {name: dict(zip(PASSES, (slowest(run.cpu_group, ms) for ms in m))) for name, m in medians.items()}


# ---- memory ----


class Kept:
    """Counts the storages that autograd saves on the CPU, each once, without those of `others`."""

    def __init__(self, others):
        self.sizes, self.others = {}, {t.untyped_storage().data_ptr() for t in others}

    def pack(self, t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.others:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return t


def memory(run, step):
    """Return {"kept": bytes, "peak": bytes} of a step; on the CPU without the peak."""
    step.clear()
    if not run.on_gpu:
        kept = Kept((step.x, step.weight, *step.parameters, *step.frozen))
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
            y = step.forward()
        step.backward(y)
        step.clear()
        return {"kept": sum(kept.sizes.values())}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = step.forward()
    kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    step.backward(y)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    step.clear()
    return {"kept": kept, "peak": peak}


# ---- a shape ----


def relative_error(a, b):
    """Return |a - b| / |b|, computed in float32 a part after the other, because the tensors may be large."""
    rows = max(1, (1 << 26) // max(1, a[0].numel() if len(a) else 1))
    parts = [((p.float() - q.float()).norm(), q.float().norm()) for p, q in zip(a.split(rows), b.split(rows))]
    error, size = (torch.stack(norms).norm().item() for norms in zip(*parts))
    return error / max(size, 1e-30)


def differs(got, want):
    """Return what is wrong with the results of a step, or ""."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error = relative_error(a, b)
        if not error <= BOUNDS[want[0].dtype]:
            return (f"{NAMES[i]} differs from that of the PyTorch-only layer by {error:.1e} of its norm")
    return ""


def add_liger(run, shape, steps, inputs, moe, dy):
    """Add Liger's megakernel to the steps, or say why it cannot be measured.  Collective."""
    x, idx, weight = inputs
    try:
        call, parameters = liger_layer(shape, idx, moe.gate_up_proj, moe.down_proj, run.size, run.device)
        step = Step(call, x, weight, dy, parameters)
        y, *step_grads, gate, up, down = step.results()
        want = steps["torch"].results()
        error = differs([y, *step_grads, torch.cat([gate, up], 1), down], want)
    except Exception as e:  # it must not stop the other measurements
        error = f"{type(e).__name__}: {e}".split("\n")[0]
    if slowest(run.cpu_group, float(bool(error))):
        run.leave_out("Liger", shape, error or "it does not work on all ranks")
    else:
        steps["Liger"] = step


def add_fp8_products(run, steps, num_rows, parameters):
    """Add the products in FP8 of others, or say why they cannot be measured.  Collective."""
    for name, kind in (("torch FP8 products", Fp8Products), ("DeepGEMM products", DeepGemmProducts)):
        error = "" if run.on_gpu else "they need a GPU"
        try:
            if run.on_gpu:
                products = kind(num_rows, *parameters)
                products.backward(products.forward())
                torch.cuda.synchronize()
        except Exception as e:  # it must not stop the other measurements
            error = f"{type(e).__name__}: {e}".split("\n")[0]
        if slowest(run.cpu_group, float(bool(error))):
            run.say(f"  {name}: not measured: {error or 'they do not work on all ranks'}"[:100])
        else:
            steps[name] = products


def record(run, shape, ms, sizes):
    """Add the rows of a shape: the peers' first, then those of epmoe with their ratios."""
    flops = 6.0 * shape.tokens * shape.topk * shape.hidden * shape.inner

    def add(impl, took, factor=1, over=None):
        tflops = factor * flops / took / 1e9
        run.record("train", shape, impl, took, over=over, tflops=round(tflops, 4),
                   rate=f"{tflops:.{'0f' if run.on_gpu else '1g'}} TFLOP/s")

    alone = {name: ms.pop(name)["forward"] for name in [n for n in ms if n.endswith(" inference")]}
    for what, factor in zip(PASSES, (1, 2, 3)):
        for name in sorted(ms, key=lambda n: n.startswith("epmoe")):
            over = None
            if name in ("epmoe", *FP8):
                over = {RATIOS[n]: ms[n][what] for n in RATIOS if n in ms and n != name}
            if name in ("epmoe stages", "epmoe balanced", "epmoe recomputed"):
                over = {n: ms[n][what] for n in ("torch", "epmoe")}
            add(f"{name} {what}", ms[name][what], factor, over)
    peers = {"torch": alone["torch inference"], "GEMMs": ms["torch products"]["forward"]}
    for name in alone:
        add(name, alone[name], over=peers if name.startswith("epmoe") else None)
    for what in sizes["torch"]:
        for name, found in sizes.items():
            num_bytes = slowest(run.cpu_group, float(found[what]))
            ratio = num_bytes / max(1.0, slowest(run.cpu_group, float(sizes["torch"][what])))
            text = f"{num_bytes / 1e6:.5g} MB" + ("" if name == "torch" else f"  {ratio:.2f} torch")
            run.record("train", shape, f"{name} {what} bytes", rate=text, num_bytes=int(num_bytes),
                       bytes_over_torch=round(ratio, 4))


def _of_module(moe, idx, x, weight):
    return moe(x, idx, weight)


def measure(run, shape):
    if run.size == 1:
        run.say(f"{shape.name} as one rank of {RANKS}:")
    x, idx, weight = run.inputs(shape)
    if (run.options.fp8 or run.options.balance) and x.dtype == torch.float32:  # of the CPU
        x = x.bfloat16()
    inputs = x, idx, weight
    dy = torch.randn_like(x)
    fused, stages = (run.layer(shape, x.dtype, epmoe.EpAll2AllFusedOp, **o) for o in ({}, {"fused": False}))
    options = dict(hidden=shape.hidden, inner=shape.inner, num_experts=shape.experts, topk=shape.topk,
                   dtype=x.dtype)
    moe, apart = epmoe.EPMoE(layer=fused, **options), epmoe.EPMoE(layer=stages, **options)
    apart.gate_up_proj, apart.down_proj = moe.gate_up_proj, moe.down_proj
    parameters = [moe.gate_up_proj, moe.down_proj]
    torch_layer = TorchLayer(idx, shape.experts, run.size, *parameters)
    calls = {"torch": torch_layer, "epmoe stages": lambda x, w: apart(x, idx, w),
             "epmoe": lambda x, w: moe(x, idx, w)}
    steps = {name: Step(call, x, weight, dy, parameters) for name, call in calls.items()}
    want = steps["torch"].results()
    for name in calls:
        run.agree(differs(steps[name].results(), want))
    del want
    add_liger(run, shape, steps, inputs, moe, dy)
    if x.dtype != torch.float32:
        again = epmoe.EPMoE(layer=fused, **options, recompute_gate_up=True)
        again.gate_up_proj, again.down_proj = parameters
        steps["epmoe recomputed"] = Step(functools.partial(_of_module, again, idx), x, weight, dy, parameters)
        pairs = zip(steps["epmoe recomputed"].results(), steps["epmoe"].results())
        run.agree("" if all(torch.equal(a, b) for a, b in pairs) else
                  "the results with recompute_gate_up have other bits")
    for fp8_step, of_fp8 in FP8.items() if run.options.fp8 else ():
        eight = epmoe.EPMoE(layer=fused, **options, compute_dtype=torch.float8_e4m3fn, **of_fp8)
        eight.gate_up_proj, eight.down_proj = parameters
        steps[fp8_step] = Step(functools.partial(_of_module, eight, idx), x, weight, dy, parameters)
        pairs = zip(steps[fp8_step].results(), steps["epmoe"].results())
        found = [relative_error(a, b) for a, b in pairs]
        run.say(f"  {fp8_step.removeprefix('epmoe ')} beside 16 bits, norms of errors: "
                + ", ".join(f"{name} {error:.1e}" for name, error in zip(NAMES, found)))
        run.agree("" if max(found) < FP8_BOUND else "the results in FP8 differ too much from those in bf16")
    balanced = None
    if run.options.balance:
        steps["epmoe balanced"], balanced = BalancedStep.of(run, shape, inputs, dy, parameters)
        run.agree(differs(steps["epmoe balanced"].results(), steps["epmoe"].results()))
        helps = balanced.last_layout.helps
        run.say(f"  balanced: {sum(n for _, _, n in helps)} rows of {len({e for e, _, _ in helps})} experts "
                f"are computed by other ranks")
    sizes = {name: memory(run, step) for name, step in steps.items()}
    with torch.no_grad():
        rows, _, layout = stages.dispatch(x, idx)
    steps["torch products"] = Products(rows, layout.expert_offsets, *parameters)
    if run.options.fp8:
        add_fp8_products(run, steps, len(rows), parameters)
    steps |= {f"{name} inference": Inference(steps[name])
              for name in ("torch", "epmoe", "epmoe balanced") if name in steps}
    ms = alternate(run, steps)
    record(run, shape, ms, sizes)
    for layer in (fused, stages):
        layer.synchronize()
        layer.finalize()
    if balanced is not None:
        balanced.layer.synchronize()
        balanced.finalize()
