"""Measures LoRA on the experts: a training step, the forward with several adapters, and decoding.

epmoe           EPMoE with all weights trained, or without an adapter
epmoe LoRA      EPMoE with one adapter of rank R on both weights, which are frozen
epmoe N adapters  each token has one of N adapters
torch LoRA      what peft computes for target_parameters, in plain torch: W + s * B A of all experts, then
                sort, torch._grouped_mm, compiled SwiGLU, index_add
peft            peft itself, on the grouped_mm experts of transformers; one rank, where both are installed

Steps alternate in rounds.  A step's results and gradients are compared with those of torch LoRA before
anything is timed; those of N adapters with the adapters one after the other.  Each rank has all E / W experts
of its own, and one rank alone has all E.

with AdamW: forward, backward and the step of a fused AdamW over what is trained.

peak bytes, on a GPU: the most that a step allocates with torch, with all gradients, and with AdamW its two
moments; without the symmetric memory.  kept bytes: what the forward leaves for the backward.
"""

import functools

import torch
from torch import nn

import epmoe
from epmoe.moe.weights import WEIGHTS

from .check import poisoned
from .measure import captured, in_turn, slowest
from .train import BOUNDS, Inference, Step, TorchLayer, alternate, memory, relative_error

DEFAULT = ("qwen3-30b",)
R, ALPHA, NUM_ADAPTERS = 16, 32, 8
DECODE_TOKENS = 16
NAMES = ("y", "gradient of x", "gradient of the routing weights", "gradient of A of gate_up_proj",
         "gradient of B of gate_up_proj", "gradient of A of down_proj", "gradient of B of down_proj")


def jobs(run):
    return [(s.name, functools.partial(measure, run, s)) for s in run.shapes(*DEFAULT)]


# ---- modules and peers ----


def make(run, shape, layer, num_adapters):
    """Return an EPMoE with adapters "0", "1", ..  B is not zero, as after some training."""
    moe = epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, layer=layer, dtype=layer.dtype)
    generator = torch.Generator(run.device).manual_seed(7 + run.rank)
    for i in range(num_adapters):
        moe.add_adapter(str(i), R, ALPHA)
        with torch.no_grad():
            for name in WEIGHTS:
                b = moe.adapters[str(i)].factors(name).lora_B
                b.normal_(0, 0.1, generator=generator)
    return moe


def factors_of(moe, name="0"):
    """Return A and B of gate_up_proj, A and B of down_proj."""
    pairs = [moe.adapters[name].factors(weight) for weight in WEIGHTS]
    return [p for pair in pairs for p in (pair.lora_A, pair.lora_B)]


def torch_lora(run, shape, idx, moe):
    """Return a function of x and weight, whose gradients reach the factors of adapter "0"."""
    a_up, b_up, a_down, b_down = factors_of(moe)
    gate_up, down = (getattr(moe, name).detach() for name in WEIGHTS)

    def layer(x, weight):
        whole = (torch.baddbmm(w, b, a, alpha=ALPHA / R) for w, a, b in ((gate_up, a_up, b_up),
                                                                       (down, a_down, b_down)))
        return TorchLayer(idx, shape.experts, run.size, *whole)(x, weight)

    return layer


def peft_layer(shape, idx, moe):
    """Return peft's experts as a function of x and weight, and the parameters that it trains.

    Raises an exception where peft or transformers is missing, or too old.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from .transformers import experts_class

    kind, config = experts_class(shape)
    with torch.device("meta"):
        experts = kind(config)
    for name in WEIGHTS:
        weight = getattr(moe, name).detach()
        setattr(experts, name, nn.Parameter(weight.transpose(1, 2).contiguous() if experts.is_transposed
                                            else weight))
    config._experts_implementation = "grouped_mm"
    model = nn.Module()
    model.experts = experts
    targets = [f"experts.{name}" for name in WEIGHTS]
    inject_adapter_in_model(LoraConfig(r=R, lora_alpha=ALPHA, target_parameters=targets), model)
    model.to(device=moe.layer.device, dtype=moe.layer.dtype)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for key, t in moe.adapter_state_dict("0").items():
            own["experts." + key.replace(".weight", ".default.weight")].copy_(t)
    trained = [p for p in model.parameters() if p.requires_grad]
    return (lambda x, weight: model.experts(x, idx, weight.to(x.dtype))), trained


# ---- checks ----


def differs(got, want):
    """Return what is wrong with the results of a step, or ""."""
    for name, a, b in zip(NAMES, got, want):
        error = relative_error(a, b)
        if not error <= BOUNDS[want[0].dtype]:
            return f"{name} differs from that of torch LoRA by {error:.1e} of its norm"
    return ""


def add_peft(run, shape, steps, inputs, dy, moe, want):
    """Add peft to the steps, or say why it cannot be measured."""
    x, idx, weight = inputs
    try:
        if run.size > 1:
            raise RuntimeError("it has no expert parallelism")
        call, trained = peft_layer(shape, idx, moe)
        step = Step(call, x, weight, dy, trained)
        error = differs(step.results()[:2], want)  # its factors are stored in another order
    except Exception as e:  # it must not stop the other measurements
        error = f"{type(e).__name__}: {e}".split("\n")[0]
    if error:
        run.say(f"  peft: not measured: {error}"[:100])
    else:
        steps["peft"] = step


# ---- a training step ----


class WithAdamW(Step):
    """A Step whose backward also trains: the step of AdamW."""

    @classmethod
    def of(cls, step):
        found = cls(step.call, step.x, step.weight, step.dy, step.parameters, step.frozen)
        found.optimizer = torch.optim.AdamW(step.parameters, lr=1e-6, fused=step.x.device.type == "cuda")
        return found

    def backward(self, y):
        super().backward(y)
        self.optimizer.step()

    def moments(self):
        """The bytes of the moments, which the first step has made."""
        return sum(t.numel() * t.element_size() for state in self.optimizer.state.values()
                   for t in state.values() if t.dim())


def measure_step(run, shape, layer, inputs):
    x, idx, weight = inputs
    dy = torch.randn_like(x)
    moe, whole = make(run, shape, layer, 1), make(run, shape, layer, 0)
    for name in WEIGHTS:
        setattr(whole, name, nn.Parameter(getattr(moe, name).detach()))
    moe.set_adapter("0")
    factors, weights = factors_of(moe), [getattr(whole, name) for name in WEIGHTS]
    steps = {
        "epmoe": Step(lambda x, w: whole(x, idx, w), x, weight, dy, weights),
        "epmoe LoRA": Step(lambda x, w: moe(x, idx, w), x, weight, dy, factors, weights),
        "torch LoRA": Step(torch_lora(run, shape, idx, moe), x, weight, dy, factors, weights)}
    want = steps["torch LoRA"].results()
    run.agree(differs(steps["epmoe LoRA"].results(), want))
    add_peft(run, shape, steps, inputs, dy, moe, want)
    del want
    sizes = {name: memory(run, step) for name, step in steps.items()}
    for name in ("epmoe", "epmoe LoRA"):
        steps[f"{name} with AdamW"] = trains = WithAdamW.of(steps[name])
        trains.backward(trains.forward())  # makes the moments
        trains.clear()
        if run.on_gpu:
            peak = memory(run, trains)["peak"] + trains.moments()
            sizes[f"{name} with AdamW"] = {"peak": peak}
    steps["epmoe inference"], steps["epmoe LoRA inference"] = (Inference(steps[n]) for n in
                                                               ("epmoe", "epmoe LoRA"))
    ms = alternate(run, steps)
    for what in ("forward", "backward", "both"):
        for name in (n for n in steps if not n.endswith(("inference", "AdamW"))):
            over = None
            if name == "epmoe LoRA":
                over = {n: ms[n][what] for n in ("epmoe", "torch LoRA", "peft") if n in ms}
            run.record("lora", shape, f"{name} {what}", ms[name][what], over=over)
    for name in ("epmoe with AdamW", "epmoe LoRA with AdamW"):
        over = {"epmoe": ms["epmoe with AdamW"]["both"]} if "LoRA" in name else None
        run.record("lora", shape, name, ms[name]["both"], over=over)
    for name in ("epmoe inference", "epmoe LoRA inference"):
        over = {"epmoe": ms["epmoe inference"]["forward"]} if "LoRA" in name else None
        run.record("lora", shape, name, ms[name]["forward"], over=over)
    for what in sizes["epmoe"]:
        for name, found in ((n, s) for n, s in sizes.items() if what in s):
            num_bytes = slowest(run.cpu_group, float(found[what]))
            full = "epmoe with AdamW" if "AdamW" in name else "epmoe"
            ratio = num_bytes / max(1.0, slowest(run.cpu_group, float(sizes[full][what])))
            text = f"{num_bytes / 1e6:.5g} MB" + ("" if name == full else f"  {ratio:.2f} {full}")
            run.record("lora", shape, f"{name} {what} bytes", rate=text, num_bytes=int(num_bytes),
                       bytes_over_full=round(ratio, 4))


# ---- several adapters ----


@torch.no_grad()
def check_mixture(run, moe, inputs, numbers):
    """Compare a mixture with the adapters one after the other.  Leaves the mixture active."""
    names = [str(i) for i in range(NUM_ADAPTERS)]
    want = torch.empty_like(inputs[0])
    for i, name in enumerate(names):
        moe.set_adapter(name)
        own = numbers == i
        want[own] = moe(*inputs, decode=False)[own]
    moe.set_adapter(names)
    with poisoned():
        got = moe(*inputs, adapters=numbers)
    error = relative_error(got, want)
    run.agree("" if error <= BOUNDS[got.dtype] else f"the mixture differs from its adapters by {error:.1e}")


class Forward:
    """A forward without gradients, as a step of `alternate`."""

    def __init__(self, call):
        self.forward = torch.no_grad()(call)

    def backward(self, y):
        pass

    def clear(self):
        pass


def measure_mixture(run, shape, layer, inputs):
    moe, base = make(run, shape, layer, NUM_ADAPTERS), make(run, shape, layer, 0)
    numbers = torch.arange(len(inputs[0]), device=run.device, dtype=torch.int32) % NUM_ADAPTERS
    check_mixture(run, moe, inputs, numbers)
    ms = alternate(run, {"epmoe": Forward(lambda: base(*inputs, decode=False)),
                         "mixture": Forward(lambda: moe(*inputs, adapters=numbers))})
    run.record("lora", shape, f"epmoe {NUM_ADAPTERS} adapters inference", ms["mixture"]["forward"],
               over={"epmoe": ms["epmoe"]["forward"]})


def measure_decode(run, shape):
    """Decode layers in CUDA graphs; on the CPU plain calls."""
    few = shape.with_tokens(DECODE_TOKENS)
    x, idx, weight = inputs_of(run, few)
    inputs = x, idx, weight
    layer = run.layer(few, x.dtype, epmoe.EpAll2AllFusedOp, capacity=run.size * few.tokens * few.topk)
    base, moe = make(run, few, layer, 0), make(run, few, layer, NUM_ADAPTERS)
    numbers = torch.arange(len(x), device=run.device, dtype=torch.int32) % NUM_ADAPTERS
    check_mixture(run, moe, inputs, numbers)
    one = make(run, few, layer, 1)
    one.set_adapter("0")
    calls = {"epmoe": lambda: base(*inputs), "epmoe LoRA": lambda: one(*inputs),
             f"epmoe {NUM_ADAPTERS} adapters": lambda: moe(*inputs, adapters=numbers)}
    with torch.no_grad():
        fns = [graph.replay for graph in captured(list(calls.values()))] if run.on_gpu else list(
            calls.values())
        times = in_turn(fns, run.device, run.options.iters or (50 if run.on_gpu else 3))
    ms = {name: slowest(run.cpu_group, float(torch.tensor(t).median())) for name, t in zip(calls, times)}
    for name in calls:
        run.record("lora", few, f"{name} decode", ms[name],
                   over=None if name == "epmoe" else {"epmoe": ms["epmoe"]})
    layer.synchronize()
    layer.finalize()


def inputs_of(run, shape):
    x, idx, weight = run.inputs(shape)
    return (x if x.dtype != torch.float32 else x.bfloat16()), idx, weight  # float32: of the CPU


def measure(run, shape):
    inputs = inputs_of(run, shape)
    layer = run.layer(shape, inputs[0].dtype, epmoe.EpAll2AllFusedOp)
    measure_step(run, shape, layer, inputs)
    measure_mixture(run, shape, layer, inputs)
    layer.synchronize()
    layer.finalize()
    measure_decode(run, shape)
