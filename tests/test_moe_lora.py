"""LoRA on the experts of EPMoE: gradients beside float64, bits, merges, peft's tensors, errors."""

import contextlib
import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import epmoe
from cases import generator, keep, process_ranks
from epmoe import reference
from epmoe.gemm.grouped import WGRAD
from epmoe.moe import lora_products
from lora_cases import ALPHA, WEIGHTS, add, experts_of, factors_of, fill, make_lora, step, wanted_of
from moe_cases import Model, close, inputs_of, make_moe, parameters_of
from nodes_cases import run_nodes
from outcomes import MISTAKE_LIMIT_S, check_outcomes, outcome

SIZES = (1, 2, 4)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP32: 3e-5, FP16: 1e-2, BF16: 6e-2}


# ---- numbers ----

CASES = {
    "float32": (Model(), 3),
    "rank 1": (Model(bias=True), 1),
    "rank 16": (Model(dtype=BF16), 16),
    "rank 128": (Model(activation="gelu"), 128),
    "rank 128 in 16 bits": (Model(dtype=BF16, bias=True), 128),
    "odd sizes": (Model(hidden=24, inner=13, num_local=3, topk=2), 5),
    "odd sizes in 16 bits": (Model(hidden=24, inner=13, num_local=3, topk=2, dtype=FP16), 5),
    "gpt_oss": (Model(activation="gpt_oss", bias=True, dtype=BF16), 3),
    "gpt_oss in float32": (Model(activation=epmoe.GptOss(alpha=1.3, limit=3.0), bias=True), 3),
    "no gate": (Model(activation="relu2", bias=True, dtype=BF16), 3),
    "limit": (Model(activation=epmoe.SwiGLU(limit=1.0)), 2),
    "empty experts": (Model(pattern="one_expert", num_local=3, dtype=BF16), 3),
    "one rank": (Model(pattern="one_rank"), 3),
    "drops": (Model(pattern="heavy_drop", capacity=True, dtype=BF16), 3),
    "all dropped": (Model(pattern="all_dropped", dtype=BF16), 3),
    "twice": (Model(pattern="duplicates", local=False, mode="gather"), 3),
    "rank without tokens": (Model(tokens=3, pattern="sentinels"), 4),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_lora_has_the_gradients_of_float64(ranks, case, size):
    model, r = CASES[case]

    def run(world, device):
        moe = make_lora(world, device, model, r)
        got = step(moe, model)
        moe.finalize()
        return got

    results = ranks(run, world_size=size)
    for rank, (got, want) in enumerate(zip(results, wanted_of(model, len(results), r))):
        for name, value in want.items():
            close(got[name], value, f"rank {rank}: {name}", TOLERANCE[model.dtype])
        assert all(got[name] is None for name in got if name in parameters_of(model, 1))


@pytest.mark.parametrize("targets", [("gate_up_proj",), ("down_proj",)], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_lora_of_one_weight(ranks, targets, dtype):
    model = Model(dtype=dtype, bias=True)

    def run(world, device):
        moe = make_lora(world, device, model, 3, targets)
        got = step(moe, model)
        moe.finalize()
        return got

    for got, want in zip(results := ranks(run), wanted_of(model, len(results), 3, targets)):
        assert {n for n in got if n.startswith("adapters")} == {n for n in want if n.startswith("adapters")}
        for name, value in want.items():
            close(got[name], value, name, TOLERANCE[dtype])


@pytest.mark.parametrize("of_layer, of_adapter", [(BF16, FP32), (FP32, BF16), (FP16, BF16)], ids=str)
def test_lora_in_another_dtype(ranks, of_layer, of_adapter):
    """The gradients have the dtype of the adapter; an adapter in float32 rounds only its rows."""
    model = Model(dtype=of_layer)

    def run(world, device):
        moe = make_lora(world, device, model, 3, adapter={"dtype": of_adapter})
        got = step(moe, model)
        moe.finalize()
        return got

    for got, want in zip(results := ranks(run), wanted_of(model, len(results), 3, dtype=of_adapter)):
        for name, value in want.items():
            close(got[name], value, name, TOLERANCE[BF16 if BF16 in (of_layer, of_adapter) else FP16])
            assert got[name].dtype == (of_adapter if name.startswith("adapters") else
                                       FP32 if name == "weight" else of_layer)


def _started(rank, world_size):
    world = epmoe.World.of(None)
    moe = epmoe.EPMoE(16, 32, 4, 3, world, max_tokens=13, dtype=FP32, device="cpu")
    keep(world, moe)
    x, idx, weight, _ = inputs_of(Model(num_local=2), rank, 1)
    idx = idx % 4
    with torch.no_grad():
        before = moe(x, idx, weight, decode=False)
    torch.manual_seed(3)
    outcome(lambda: moe.add_adapter("a", 8 if rank else 0, 16))  # leaves the generators of all ranks alike
    outcome(lambda: moe.load_adapter("a", _state(moe) if rank else {}, alpha=2))
    moe.add_adapter("a", 8, 16)
    moe.set_adapter("a")
    with torch.no_grad():
        same = torch.allclose(moe(x, idx, weight), before, atol=1e-5)
    whole = epmoe.whole_state_dict(moe)
    moe.finalize()
    return same, {n: t for n, t in whole.items() if n.startswith("adapters")}


@pytest.mark.cpu_only
def test_lora_starts_as_peft_and_alike_on_all_ranks():
    """B is zero, so nothing changes; A is uniform in +-1/sqrt(K), and does not depend on W.

    Ranks that are threads would share torch's generator, and draw from it in any order.
    """
    results = process_ranks(_started, 1), process_ranks(_started, 2)
    assert all(same for result in results for same, _ in result)
    one, two = (result[0][1] for result in results)
    assert one.keys() == two.keys() and len(one) == 4
    for name, t in one.items():
        assert torch.equal(t, two[name])
        if name.endswith("lora_B"):
            assert not t.any()
        else:
            bound = t.shape[2]**-0.5
            assert 0.9 * bound < t.abs().max() <= bound and t.shape[:2] == (4, 8)
            assert not torch.equal(t[0], t[1])


@pytest.mark.cpu_only
def test_lora_has_second_derivatives_in_float32():
    """The gradient of a function of the gradient of x, by A and x, beside float64."""
    model, world = Model(activation="silu", num_local=4), epmoe.thread_worlds(1)[0]
    moe = make_lora(world, "cpu", model, 3)
    x, idx, weight, dy = inputs_of(model, 0, 1)
    whole, factors = parameters_of(model, 4), factors_of(model, 4, 3)
    a, b = (t.double().requires_grad_() for t in factors["gate_up_proj"])

    def second(call, x, dy, leaf):
        x.requires_grad_()
        dx, = torch.autograd.grad(call(x), x, dy, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, leaf])

    def exact(x):
        up = whole["gate_up_proj"].double() + ALPHA / 3 * b @ a
        down = whole["down_proj"].double() + ALPHA / 3 * torch.matmul(*(
            t.double() for t in reversed(factors["down_proj"])))
        return reference.moe(x, idx, weight.double(), up, down, "silu")

    wanted = second(exact, x.double(), dy.double(), a)
    got = second(lambda x: moe(x, idx, weight), x, dy, moe.adapters.a.gate_up_proj.lora_A)
    for one, want in zip(got, wanted):
        close(one, want, "a second derivative", 1e-4)
    moe.finalize()


# ---- the frozen base ----


class Products(TorchDispatchMode):
    """Counts the calls of grouped_gemm by (kind, shape of the result)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.epmoe.grouped_gemm.default:
            self.found.append((args[7], tuple(out.shape)))
        return out


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_lora_makes_no_product_for_the_gradient_of_the_base(dtype):
    model = Model(dtype=dtype, num_local=4)
    world = epmoe.thread_worlds(1)[0]
    moe = make_lora(world, "cpu", model, 16)
    moe.requires_grad_(True)  # a program that trains all parameters gets no gradient of the base either
    with Products() as products:
        got = step(moe, model)
    wgrads = sorted(shape for kind, shape in products.found if kind == WGRAD)
    assert wgrads == sorted([(4, 16, 16), (4, 64, 16), (4, 16, 32), (4, 16, 16)])
    assert all(got[name] is None for name in WEIGHTS)
    moe.set_adapter(None)
    with Products() as products:
        got = step(moe, model)
    assert all(got[name] is not None for name in WEIGHTS) and all(
        p is None for n, p in got.items() if n.startswith("adapters"))
    moe.finalize()


def test_lora_trains_where_only_the_adapter_has_a_gradient(ranks):
    """x and the routing weights require none, as behind a frozen embedding."""
    model = Model(tokens=3, dtype=BF16)

    def run(world, device):
        moe = make_lora(world, device, model, 3)
        got = step(moe, model, x_grad=False)
        moe.finalize()
        return got

    for got, want in zip(results := ranks(run), wanted_of(model, len(results), 3)):
        assert got["x"] is None and got["weight"] is None
        for name in got:
            if name.startswith("adapters"):
                close(got[name], want[name], name, TOLERANCE[BF16])


@pytest.mark.cpu_only
def test_lora_sets_what_requires_gradients():
    model, world = Model(), epmoe.thread_worlds(1)[0]
    moe = make_moe(world, "cpu", model)
    moe.down_proj.requires_grad_(False)
    for name in "ab":
        add(moe, name, model, 2)
    trained = lambda: {n for n, p in moe.named_parameters() if p.requires_grad}  # noqa: E731
    of = {name: {f"adapters.{name}.{w}.lora_{f}" for w in WEIGHTS for f in "AB"} for name in "ab"}
    assert trained() == {"gate_up_proj"} and moe.active_adapter is None
    moe.set_adapter("a")
    assert trained() == of["a"] and moe.active_adapter == "a"
    moe.set_adapter("b")
    assert trained() == of["b"]
    moe.merge_adapter()
    assert trained() == set()
    moe.unmerge_adapter()
    assert trained() == of["b"]
    moe.remove_adapter("b")
    assert trained() == {"gate_up_proj"} and moe.active_adapter is None
    moe.set_adapter("a")
    moe.remove_adapter("a")
    assert trained() == {"gate_up_proj"} and not hasattr(moe, "adapters")
    moe.finalize()


# ---- bases of 8 and 4 bits ----

BASES = {"fp8": torch.float8_e4m3fn, "mxfp4": "mxfp4", "int4": epmoe.Int4(64, zero_points=True)}


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
@pytest.mark.parametrize("base", BASES)
def test_lora_over_weights_of_8_and_4_bits(ranks, base, activation):
    """Beside float64 with the dequantised weights; the rows of FP8 are quantised in the forward alone."""
    model = Model(hidden=128, inner=128, dtype=BF16, activation=activation, bias=True)

    def run(world, device):
        moe = make_lora(world, device, model, 3, weight_dtype=BASES[base], fused=None)
        got = step(moe, model)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        moe.enable_decode(model.tokens)
        with torch.no_grad():
            for decode in (False, True):
                got[f"decode={decode}"] = moe(x, idx, weight, decode=decode)
        own = {n: moe._format.dequantized(moe, n) for n in WEIGHTS}
        moe.finalize()
        return got, own

    results = ranks(run)
    parameters = parameters_of(model, model.num_local * len(results))
    parameters |= {n: torch.cat([own[n] for _, own in results]) for n in WEIGHTS}
    wanted = wanted_of(model, len(results), 3, parameters=parameters)
    for (got, _), want in zip(results, wanted):
        for name, value in want.items():
            close(got[name], value, name, 0.1 if base == "fp8" else TOLERANCE[BF16])
        assert torch.equal(got["decode=False"], got["y"])
        assert torch.equal(got["decode=True"], got["y"])
        assert "gate_up_proj" not in got or got["gate_up_proj"] is None


# ---- bits ----


def test_lora_has_the_same_bits_alone_and_in_a_batch(ranks):
    """A token's output and gradients do not depend on the others; decoding and a second run are alike."""
    model = Model(dtype=BF16, bias=True, num_local=4, topk=2)

    def run(world, device):
        moe = make_lora(world, device, model, 3)
        fixed = make_lora(world, device, dataclasses.replace(model, capacity=True), 3)
        first, again, other = step(moe, model), step(moe, model), step(fixed, model)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        moe.enable_decode(model.tokens)
        with torch.no_grad():
            inferred, decoded = moe(x, idx, weight), moe(x, idx, weight, decode=True)
            alone = [moe(x[t:t + 1], idx[t:t + 1], weight[t:t + 1]) for t in range(model.tokens)]
        moe.finalize()
        fixed.finalize()
        y = first["y"]
        return {"again": all(v is None or torch.equal(v, again[n]) for n, v in first.items()),
                "capacity": all(v is None or torch.equal(v, other[n]) for n, v in first.items()),
                "inferred": torch.equal(y, inferred), "decoded": torch.equal(y, decoded),
                "alone": torch.equal(torch.cat(alone), y), "not zero": bool(y.any()) or not len(y)}

    for facts in ranks(run):
        assert all(facts.values()), facts


def test_lora_is_rank_invariant(ranks):
    """With rank_invariant, outputs and gradients have the same bits on 1, 2 and 4 ranks."""
    model, tokens = Model(dtype=BF16, num_local=4, unequal=False, tokens=8), 8

    def run(world, device):
        own = dataclasses.replace(model, num_local=4 // world.size, tokens=tokens // world.size)
        moe = make_lora(world, device, own, 3, rank_invariant=True)
        part = slice(world.rank * own.tokens, (world.rank + 1) * own.tokens)
        x, idx, weight, dy = (t[part].to(device) for t in inputs_of(model, 0, 1))
        x.requires_grad_()
        y = moe(x, idx, weight)
        y.backward(dy)
        moe.layer.synchronize()
        moe.finalize()
        return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in moe.named_parameters()
                                                 if p.grad is not None}

    if ranks.is_torchrun:
        pytest.skip("compares numbers of ranks")
    wholes = []
    for size in SIZES:
        results = ranks(run, world_size=size)
        wholes.append({n: torch.cat([r[n] for r in results]) for n in results[0]})
    for whole in wholes[1:]:
        assert len(whole) == 6 and all(torch.equal(t, whole[n]) for n, t in wholes[0].items())


@pytest.mark.cpu_only
def test_lora_says_what_its_bits_depend_on():
    model, world = Model(dtype=BF16), epmoe.thread_worlds(1)[0]
    moe = make_moe(world, "cpu", model)
    add(moe, "a", model, 2)
    add(moe, "wide", model, 2, dtype=FP32)
    moe.add_adapter("drops", 2, 2, dropout=0.5)
    promises = lambda: epmoe.numerics(moe)  # noqa: E731
    assert promises().batch_invariant and promises().trains_as_it_infers
    moe.set_adapter("a")
    assert promises().batch_invariant and promises().trains_as_it_infers
    moe.set_adapter("wide")
    assert "float32" in promises().reasons["batch_invariant"]
    moe.set_adapter("drops")
    assert "mask" in promises().reasons["batch_invariant"] and not promises().trains_as_it_infers
    moe.eval()
    assert promises().batch_invariant and "dropout" in promises().reasons["trains_as_it_infers"]
    moe.finalize()


# ---- several adapters, merges ----


def test_lora_switches_between_adapters(ranks):
    model = Model()

    def run(world, device):
        moe = make_moe(world, device, model)
        for seed, name in enumerate("ab"):
            add(moe, name, model, 3 + seed, seed=seed)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        found = {}
        with torch.no_grad():
            for name in (None, "a", "b", "a", None):
                moe.set_adapter(name)
                y = moe(x, idx, weight, decode=False)
                if name in found:
                    assert torch.equal(found[name], y)
                found[name] = y
            twin = copy.deepcopy(moe)
            twin.set_adapter("b")
            found["copy"] = twin(x, idx, weight, decode=False)
        moe.finalize()
        return found

    results = ranks(run)
    size = len(results)
    plain = wanted_of(model, size, 3, ())
    wanted = {None: plain, "a": wanted_of(model, size, 3), "b": wanted_of(model, size, 4, seed=1)}
    for rank, found in enumerate(results):
        for name, of_ranks in wanted.items():
            close(found[name], of_ranks[rank]["y"], f"rank {rank}, {name}", TOLERANCE[FP32])
        assert torch.equal(found["copy"], found["b"])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_lora_merged_is_as_unmerged(ranks, dtype):
    model = Model(dtype=dtype, bias=True)

    def run(world, device):
        moe = make_lora(world, device, model, 3)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        before = {n: getattr(moe, n).detach().clone() for n in WEIGHTS}
        with torch.no_grad():
            apart = moe(x, idx, weight)
        moe.merge_adapter()
        x.requires_grad_()
        merged = moe(x, idx, weight)
        merged.sum().backward()
        changed = all(not torch.equal(getattr(moe, n), before[n]) for n in WEIGHTS)
        frozen = all(p.grad is None for p in moe.parameters())
        moe.unmerge_adapter()
        with torch.no_grad():
            same = torch.equal(moe(x, idx, weight), apart) and all(
                torch.equal(getattr(moe, n), before[n]) for n in WEIGHTS)
        moe.merge_adapter(unload=True)
        with torch.no_grad():
            unloaded = moe(x, idx, weight, decode=False)
        names = set(moe.state_dict())
        moe.finalize()
        return merged.detach(), unloaded, changed and frozen and same and names == set(
            parameters_of(model, 1))

    results = ranks(run)
    for rank, want in enumerate(wanted_of(model, len(results), 3)):
        merged, unloaded, is_right = results[rank]
        assert is_right
        close(merged, want["y"], f"rank {rank}", TOLERANCE[dtype])
        close(unloaded, want["y"], f"rank {rank}", TOLERANCE[dtype])


def test_lora_dropout_is_only_in_training(ranks):
    """Its mask follows from torch's generator, also when a checkpoint computes the forward again."""
    model = Model(unequal=False)

    def run(world, device):
        moe = make_lora(world, device, model, 3, adapter={"dropout": 0.5})
        x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        x.requires_grad_()
        grads = []
        for call in (moe, lambda *args: checkpoint(moe, *args, use_reentrant=False)):
            torch.manual_seed(world.rank)
            moe.zero_grad()
            x.grad = None
            y = call(x, idx, weight)
            y.backward(dy)
            grads.append([y.detach(), x.grad] + [p.grad for p in moe.adapters.parameters()])
        other = moe(x, idx, weight).detach()
        moe.eval()
        with torch.no_grad():
            evaluated = moe(x, idx, weight, decode=False)
        moe.finalize()
        return evaluated, grads[0][0], all(map(torch.equal, *grads)) and not torch.equal(other, grads[0][0])

    results = ranks(run)
    for rank, want in enumerate(wanted_of(model, len(results), 3)):
        evaluated, trained, is_right = results[rank]
        # ranks that are threads share torch's generator
        assert is_right or not ranks.is_torchrun and len(results) > 1
        close(evaluated, want["y"], f"rank {rank}", TOLERANCE[FP32])
        assert not torch.allclose(trained, evaluated, atol=1e-3)


# ---- mixtures: each token has its own adapter ----

RANKS_OF = {"a": 3, "b": 16, "c": 20}


def _with_three(world, device, model, **options):
    moe = make_moe(world, device, model, **options)
    for seed, (name, r) in enumerate(RANKS_OF.items()):
        add(moe, name, model, r, WEIGHTS if name != "b" else ("down_proj",), seed=seed)
    return moe


MIXED = {"float32": Model(num_local=3), "bfloat16": Model(dtype=BF16, bias=True),
         "gpt_oss": Model(dtype=FP16, bias=True, activation="gpt_oss"),
         "capacity": Model(dtype=BF16, capacity=True, pattern="sentinels"),
         "few tokens": Model(dtype=BF16, tokens=3, pattern="one_expert"),
         "twice": Model(dtype=BF16, pattern="duplicates"), "mxfp4": Model(hidden=128, inner=128, dtype=BF16),
         "fp8": Model(hidden=128, inner=128, dtype=BF16)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", MIXED)
def test_lora_mixture_gives_each_token_its_adapter(ranks, case, size):
    """A token has what the module gives it where all tokens have its adapter, or none."""
    model, names = MIXED[case], list(RANKS_OF)

    def run(world, device):
        moe = _with_three(world, device, model, fused=None,
                          **({"weight_dtype": BASES[case]} if case in BASES else {}))
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        alone = {}
        with torch.no_grad():
            for name in names:
                moe.set_adapter(name)
                alone[name] = moe(x, idx, weight, decode=False)
            moe.set_adapter(names)
            none = torch.full((len(x),), -1, device=device)
            alone[None] = moe(x, idx, weight, adapters=none)
            numbers = torch.randint(-1, 4, (len(x),), generator=generator(world.rank)).to(device)
            y = moe(x, idx, weight, adapters=torch.stack([numbers.int()] * 2, 1)[:, 0])  # with a stride
            shaped = moe(x[:, None], idx[:, None], weight[:, None], adapters=numbers[:, None])
            if moe.layer.low_latency is None:
                moe.enable_decode(model.tokens)
            decoded = moe(x, idx, weight, adapters=numbers, decode=True)
            of_one = {n: moe(x, idx, weight, adapters=torch.full_like(none, i)) for i, n in enumerate(names)}
            moe.set_adapter(None)
            base = moe(x, idx, weight, decode=False)
        moe.finalize()
        return {"y": y, "shaped": shaped[:, 0], "decoded": decoded, "alone": alone, "of_one": of_one,
                "numbers": numbers, "base": base}

    for got in ranks(run, world_size=size):
        close(got["alone"][None], got["base"], "no adapter", TOLERANCE[model.dtype] if case != "fp8" else 0.1)
        assert torch.equal(got["y"], got["shaped"])
        if model.dtype == FP32 or model.pattern == "duplicates":  # two rows of an expert, or one
            close(got["decoded"], got["y"], "decoded", TOLERANCE[model.dtype])
        else:
            assert torch.equal(got["decoded"], got["y"])
        for i, name in enumerate([*names, None]):
            mine = (got["numbers"] == i) if name else (got["numbers"] < 0) | (got["numbers"] > 2)
            want = got["alone"][name]
            close(got["y"][mine], want[mine], f"adapter {name}", 2e-2 if model.dtype != FP32 else 1e-5)
            if model.dtype != FP32:
                wanted = got["of_one"][name] if name else want
                assert torch.equal(got["y"][mine], wanted[mine]), name
            if name and model.dtype != FP32 and case not in BASES:  # one kernel adds both products
                assert torch.equal(got["y"][mine], want[mine]), name


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_lora_mixture_sees_what_a_program_writes_to_an_adapter(ranks, dtype):
    model = Model(dtype=dtype)

    def run(world, device):
        moe = _with_three(world, device, model)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        numbers = torch.zeros(len(x), dtype=torch.int64, device=device)
        moe.set_adapter(["c", "a"])
        before = moe(x, idx, weight, adapters=numbers)
        again = moe(x, idx, weight, adapters=numbers)
        fill(moe, "c", factors_of(model, moe.num_experts, RANKS_OF["c"], seed=9))
        after = moe(x, idx, weight, adapters=numbers)
        moe.set_adapter("c")
        with torch.no_grad():
            want = moe(x, idx, weight, decode=False)
        moe.finalize()
        return before, again, after, want

    for before, again, after, want in ranks(run):
        assert torch.equal(before, again)
        close(after, want, "written", TOLERANCE[dtype])
        assert not len(before) or not torch.allclose(before, after, atol=1e-3)


@pytest.mark.parametrize("num, r", [(4, 48), (17, 16)], ids=["few columns", "many columns"])
def test_lora_mixture_of_many_columns(ranks, num, r):
    """Up to 256 columns of A are one product; more are a group of rows for each expert and adapter."""
    model, names = Model(dtype=BF16), [f"n{i}" for i in range(num)]

    def run(world, device):
        moe = make_moe(world, device, model)
        for seed, name in enumerate(names):
            add(moe, name, model, r, seed=seed)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        numbers = torch.arange(len(x), device=device) % (num + 1)
        moe.set_adapter(names)
        y, alone = moe(x, idx, weight, adapters=numbers), []
        for name in (*names, None):
            moe.set_adapter(name)
            with torch.no_grad():
                alone.append(moe(x, idx, weight, decode=False))
        moe.finalize()
        return y, torch.stack(alone).gather(0, numbers[None, :, None].expand(1, -1, y.shape[1]))[0]

    for y, want in ranks(run):
        close(y, want, "mixture", TOLERANCE[BF16])


@pytest.mark.cpu_only
def test_lora_mixture_mistakes():
    model, world = Model(num_local=4), epmoe.thread_worlds(1)[0]
    moe = _with_three(world, "cpu", model)
    x, idx, weight, _ = inputs_of(model, 0, 1)
    numbers = torch.zeros(len(x), dtype=torch.int64)
    for kind, text, call in (
            (ValueError, "no list of adapters", lambda: moe(x, idx, weight, adapters=numbers)),
            (ValueError, "different ones", lambda: moe.set_adapter(["a", "a"])),
            (ValueError, "no adapter 'z'", lambda: moe.set_adapter(["a", "z"]))):
        with pytest.raises(kind, match=text):
            call()
    moe.add_adapter("wide", 2, 2, dtype=BF16)
    with pytest.raises(ValueError, match="of one dtype"):
        moe.set_adapter(["a", "wide"])
    moe.set_adapter(["a", "b"])
    assert moe.active_adapter is None and not any(p.requires_grad for p in moe.parameters())
    assert "no gradients" in epmoe.numerics(moe).reasons["trains_as_it_infers"]
    moe.enable_decode(13)
    for kind, text, call in (
            (TypeError, "wanted a tensor, because set_adapter", lambda: moe(x, idx, weight)),
            (TypeError, "int32 or int64", lambda: moe(x, idx, weight, adapters=numbers.float())),
            (ValueError, "a number for each token", lambda: moe(x, idx, weight, adapters=numbers[1:])),
            (RuntimeError, "no gradients", lambda: moe(x.clone().requires_grad_(), idx, weight,
                                                       adapters=numbers)),
            (ValueError, "no adapter is active", moe.merge_adapter)):
        with pytest.raises(kind, match=text):
            call()
    moe.requires_grad_(True)
    want = moe(x, idx, weight, adapters=numbers)
    assert not want.requires_grad
    moe.set_adapter(["a", "b"])
    compiled = torch.compile(moe, backend="eager")
    assert torch.equal(compiled(x, idx, weight, adapters=numbers), want)
    moe.remove_adapter("b")
    assert moe.gate_up_proj.requires_grad  # none is active any more
    moe.finalize()


@pytest.mark.cuda_only
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_lora_in_a_cuda_graph(ranks, mixed, decode):
    """Replays with other tokens, choices, adapters and factors have the bits of calls outside of the graph.

    Ranks that are threads do not replay graphs beside each other, so without torchrun there is one.
    """
    model = Model(dtype=BF16, capacity=True, bias=True)

    def run(world, device):
        moe = _with_three(world, device, model)
        if moe.layer.low_latency is None:
            moe.enable_decode(model.tokens)
        moe.set_adapter(["a", "c"] if mixed else "a")
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        numbers = torch.arange(len(x), device=device) % 3
        options = {"decode": decode, **({"adapters": numbers} if mixed else {})}
        with torch.no_grad():
            moe(x, idx, weight, **options)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = moe(x, idx, weight, **options)
        same = []
        for seed in range(3):
            for t in (x, idx, weight):
                t.copy_(t.roll(seed, 0))
            numbers.copy_((numbers + seed) % 3)
            fill(moe, "a", factors_of(model, moe.num_experts, RANKS_OF["a"], seed=seed + 5))
            with torch.no_grad():
                want = moe(x, idx, weight, **options)  # copies the factors of a mixture in place
            graph.replay()
            same.append(torch.equal(y, want) and (not len(y) or bool(y.any())))
        moe.layer.synchronize()
        moe.finalize()
        return same

    for same in ranks(run, world_size=1):
        assert all(same)


# ---- beside the rest of EPMoE ----


def test_lora_moves_with_its_experts(ranks):
    """Replicas have the factors of their expert; whole_state_dict and peft's tensors have each once."""
    model = Model(num_local=2)

    def run(world, device):
        moe = make_moe(world, device, model, num_physical=3 * world.size)
        expected = make_moe(world, device, model)
        for module in (moe, expected):
            torch.manual_seed(1)
            module.add_adapter("a", 3, ALPHA)
            module.load_adapter("a", peft_of(factors_of(model, module.num_experts, 3)))
            module.set_adapter("a")
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        with torch.no_grad():
            want = expected(x, idx, weight, decode=False)
            home = moe(x, idx, weight, decode=False)
            moe.set_expert_map(epmoe.balance_experts([1.0 + e for e in range(moe.num_experts)], world.size,
                                                     3 * world.size))
            moved = moe(x, idx, weight, decode=False)
        whole, peft = epmoe.whole_state_dict(moe), moe.adapter_state_dict("a")
        x.requires_grad_()
        refused = outcome(lambda: moe(x, idx, weight)).text if world.size == 1 else "no gradients"
        moe.finalize()
        expected.finalize()
        return want, home, moved, whole, peft, refused

    results = ranks(run)
    factors = factors_of(model, model.num_local * len(results), 3)
    _, _, _, whole, peft, refused = results[0]
    assert "no gradients" in refused
    for name, (a, b) in factors.items():
        assert torch.equal(whole[f"adapters.a.{name}.lora_A"], a)
        assert torch.equal(whole[f"adapters.a.{name}.lora_B"], b)
    assert all(torch.equal(t, peft[key]) for key, t in peft_of(factors).items())
    for want, home, moved, *_ in results:
        close(home, want, "home", TOLERANCE[FP32])
        close(moved, want, "moved", TOLERANCE[FP32])


def test_lora_with_experts_that_are_no_multiple_of_the_ranks(ranks):
    """State dicts and peft's tensors have the E experts, also where the last ranks have fewer."""
    model = Model(num_local=1, topk=2)

    def run(world, device):
        num = 2 * world.size + 1
        moe = epmoe.EPMoE(16, 32, num, 2, world, max_tokens=13, dtype=FP32, device=device)
        keep(world, moe)
        moe.add_adapter("a", 3, ALPHA)
        given = peft_of(factors_of(dataclasses.replace(model, num_local=num), num, 3))
        moe.load_adapter("a", given)
        back, whole = moe.adapter_state_dict("a"), epmoe.whole_state_dict(moe)
        with torch.no_grad():
            for p in moe.adapters.parameters():
                p.zero_()
        if world.size == 1:  # threads have no process group, so only whole state dicts of one rank
            moe.load_state_dict(whole)
            back2 = moe.adapter_state_dict("a")
            assert all(torch.equal(back2[k], t) for k, t in given.items())
        moe.finalize()
        return world.rank > 0 or (all(torch.equal(back[k], t) for k, t in given.items())
                                  and whole["adapters.a.down_proj.lora_A"].shape == (num, 3, 32))

    for size in (1, 2, 3):
        assert all(ranks(run, world_size=size))


@pytest.mark.cpu_only
def test_lora_over_nodes():
    model = Model(dtype=BF16, num_local=2)

    def run(nodes, chunks):
        moe = make_lora(nodes, "cpu", model, 3, num_chunks=chunks)
        got = step(moe, model)
        x, idx, weight, _ = inputs_of(model, nodes.rank, nodes.size)
        with torch.no_grad():
            same = torch.equal(moe(x, idx, weight), got["y"])
        moe.finalize()
        return got, same

    for chunks in (None, 2):
        results = run_nodes(run, 2, 2, chunks)
        for (got, same), want in zip(results, wanted_of(model, 4, 3)):
            assert same
            for name, value in want.items():
                close(got[name], value, name, TOLERANCE[BF16])


@pytest.mark.cpu_only
def test_lora_inside_of_compiled_code_and_autocast():
    """The module itself is not traced: compiled code has a break there."""
    model, world = Model(dtype=BF16, num_local=4), epmoe.thread_worlds(1)[0]
    moe = make_lora(world, "cpu", model, 3)
    want = step(moe, model)
    x, idx, weight, dy = inputs_of(model, 0, 1)
    compiled = torch.compile(lambda *args: moe(*args) * 2, backend="aot_eager")
    moe.zero_grad()
    y = compiled(x, idx, weight)
    y.backward(dy / 2)
    assert torch.equal(y, want["y"] * 2)
    assert all(torch.equal(p.grad, want[n]) for n, p in moe.named_parameters() if p.requires_grad)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(moe(x.float(), idx, weight), want["y"])
    moe.finalize()


class Block(torch.nn.Module):
    """A router and experts with an adapter."""

    def __init__(self, group=None):
        super().__init__()
        self.router = torch.nn.Linear(16, 4, bias=False)
        self.moe = epmoe.EPMoE(16, 32, 4, 2, group, max_tokens=16, dtype=FP32, device="cpu")
        self.moe.add_adapter("a", 3, ALPHA)
        self.moe.set_adapter("a")
        whole = peft_of(factors_of(Model(topk=2, num_local=4), 4, 3))
        self.moe.load_adapter("a", whole)

    def forward(self, x):
        weight, idx = self.router(x).softmax(-1).topk(2)
        return self.moe(x, idx, weight)


def _wrapped(model, how):
    """What is called to train a model on all ranks."""
    if how == "ddp":
        return DistributedDataParallel(epmoe.prepare_ddp(model))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(epmoe.prepare_fsdp(model), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _trained(rank, world_size, how):
    """Rank main: steps beside data parallelism, with accumulation, recomputation and clipping."""
    torch.manual_seed(0)
    group = None
    if how == "fsdp with replicas":  # two groups of experts
        group = [dist.new_group([r, r + 1]) for r in range(0, world_size, 2)][rank // 2]
    model = Block(group)
    ddp = _wrapped(model, how) if how else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    num, norms = 16 // world_size, []
    for i in range(3):
        optimizer.zero_grad()
        for half in range(2):
            x = torch.randn(16, 16, generator=generator(i, half))[rank * num:(rank + 1) * num]
            checkpoint(ddp, x, use_reentrant=False).square().mean().div(2).backward()
        norms.append(epmoe.clip_grad_norm_(model, 0.05).item())
        optimizer.step()
    if how not in (None, "ddp"):
        assert "call it before fully_shard" in outcome(lambda: model.moe.add_adapter("b", 2, 2)).text
    whole = epmoe.whole_state_dict(model)
    moments = optimizer.state_dict()["state"]
    shapes = {tuple(s["exp_avg"].shape) for s in moments.values()}
    model.moe.finalize()
    return whole, norms, shapes


@pytest.mark.cpu_only
@pytest.mark.parametrize("how, size", [("ddp", 2), ("fsdp", 2), ("fsdp with replicas", 4)])
def test_lora_trains_beside_data_parallelism_as_in_one_process(how, size):
    one, two = process_ranks(_trained, 1, None)[0], process_ranks(_trained, size, how)[0]
    assert one[0].keys() == two[0].keys() and one[2] == two[2]  # states of all experts in both
    assert torch.allclose(torch.tensor(one[1]), torch.tensor(two[1]), rtol=1e-4) and min(one[1]) > 0.05
    for name, t in one[0].items():
        # AdamW makes steps of 0.01 of gradients of any size
        assert torch.allclose(t, two[0][name], atol=1e-3), name


def _sharded(rank, world_size):
    """Rank main: a state dict of DTensors goes through torch.distributed.checkpoint's form and back."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = Block()
    state = get_model_state_dict(model)
    shapes = {n: (tuple(t.shape), type(t).__name__) for n, t in state.items() if "adapters" in n}
    full = {n: t.full_tensor().clone() for n, t in state.items() if "adapters" in n}
    state = {n: t.clone() for n, t in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    set_model_state_dict(model, state)
    back = model.moe.adapter_state_dict("a")
    model.moe.finalize()
    return shapes, full, back


@pytest.mark.cpu_only
def test_lora_is_in_state_dicts_under_stable_names():
    shapes, full, back = process_ranks(_sharded, 2)[0]
    names = {f"moe.adapters.a.{w}.lora_{f}" for w in WEIGHTS for f in "AB"}
    assert set(shapes) == names and shapes["moe.adapters.a.gate_up_proj.lora_B"] == ((4, 64, 3), "DTensor")
    factors = factors_of(Model(topk=2, num_local=4), 4, 3)
    for name, (a, b) in factors.items():
        assert torch.equal(full[f"moe.adapters.a.{name}.lora_A"], a)
        assert torch.equal(full[f"moe.adapters.a.{name}.lora_B"], b)
    assert all(torch.equal(t, back[key]) for key, t in peft_of(factors).items())


# ---- peft ----

INNER, OUTER = "base_layer.", ""


def peft_of(factors, old=False):
    """What peft saves for {weight: (A [E, r, K], B [E, N, r])}.

    In peft, a wrapper around the experts module has Linear(in, r * E) and Linear(r * E, out).  The wrapper of
    gate_up_proj is inside of the one of down_proj.  old: of peft before 0.19, where "in" is N and "out" is K.
    """
    found = {}
    for name, (a, b) in factors.items():
        wrapper = INNER if name == "gate_up_proj" and len(factors) > 1 else OUTER
        num, r, k = a.shape
        first, second = (b.transpose(1, 2), a.transpose(1, 2)) if old else (a, b)
        lora_a = torch.stack([first[e, i] for e in range(num) for i in range(r)])
        lora_b = torch.stack([second[e, :, i] for i in range(r) for e in range(num)], 1)
        found |= {f"{wrapper}lora_A.weight": lora_a, f"{wrapper}lora_B.weight": lora_b}
    return found


def delta_of(state, wrapper, num_experts, scaling, old=False):
    """ParamWrapper.get_delta_weight of peft, of a weight [E, N, K]."""
    weight_a, weight_b = state[f"{wrapper}lora_A.weight"], state[f"{wrapper}lora_B.weight"]
    weight_a = weight_a.reshape(num_experts, -1, weight_a.shape[-1])
    weight_b = weight_b.reshape(weight_b.shape[0], -1, num_experts)
    return torch.einsum("o r e, e r i -> e i o" if old else "o r e, e r i -> e o i", weight_b,
                        weight_a) * scaling


@pytest.mark.parametrize("old", [False, True])
def test_lora_loads_and_saves_what_peft_has(ranks, old):
    """The layer computes with the weights to which peft's own formula has added its delta."""
    model = Model(num_local=2)

    def run(world, device):
        num, prefix = 2 * world.size, "base_model.model.mlp.experts."
        g = generator(5)
        shapes = {"base_layer.lora_A.weight": (3 * num, 16), "base_layer.lora_B.weight": (64, 3 * num),
                  "lora_A.weight": (3 * num, 32), "lora_B.weight": (16, 3 * num)}
        if old:
            shapes = {"base_layer.lora_A.weight": (3 * num, 64), "base_layer.lora_B.weight": (16, 3 * num),
                      "lora_A.weight": (3 * num, 16), "lora_B.weight": (32, 3 * num)}
        state = {key: torch.randn(shape, generator=g) / 8 for key, shape in shapes.items()}
        moe = make_moe(world, device, model)
        moe.load_adapter("x", {prefix + key: t for key, t in state.items()} | {"other": torch.ones(1)},
                         alpha=6, prefix=prefix)
        moe.set_adapter("x")
        p = parameters_of(model, num)
        p["gate_up_proj"] = p["gate_up_proj"] + delta_of(state, INNER, num, 6 / 3, old)
        p["down_proj"] = p["down_proj"] + delta_of(state, OUTER, num, 6 / 3, old)
        x, idx, weight, _ = inputs_of(model, world.rank, world.size)
        want = reference.moe(x, idx, weight, p["gate_up_proj"], p["down_proj"], model.activation)
        with torch.no_grad():
            y = moe(*(t.to(device) for t in (x, idx, weight)))
        saved = moe.adapter_state_dict("x")
        moe.finalize()
        return y, want, state, saved

    results = ranks(run)
    for y, want, *_ in results:
        close(y, want, "y", 1e-5)
    _, _, state, saved = results[0]
    assert all(not r[3] for r in results[1:])
    num = 2 * len(results)
    for wrapper in (INNER, OUTER):
        want = delta_of(state, wrapper, num, 1, old)
        assert torch.equal(delta_of(saved, wrapper, num, 1), want) or torch.allclose(
            delta_of(saved, wrapper, num, 1), want, atol=1e-6)
    if not old:
        assert saved.keys() == state.keys() and all(torch.equal(saved[k], t) for k, t in state.items())


def test_lora_goes_to_another_number_of_ranks(ranks):
    if ranks.is_torchrun:
        pytest.skip("saves and loads on different numbers of ranks")
    whole = Model(num_local=12, topk=2)

    def save(world, device):
        model = dataclasses.replace(whole, num_local=12 // world.size)
        moe = make_lora(world, device, model, 4, ("down_proj",))
        state, whole_state = moe.adapter_state_dict("a"), epmoe.whole_state_dict(moe)
        moe.finalize()
        return state, whole_state

    def load(world, device, state, whole_state):
        model = dataclasses.replace(whole, num_local=12 // world.size)
        moe, other = (make_moe(world, device, model) for _ in range(2))
        moe.load_adapter("b", state, alpha=ALPHA)
        other.add_adapter("a", 4, ALPHA, ["down_proj"])
        other.load_state_dict(whole_state)
        x, idx, weight, _ = inputs_of(whole, world.rank, 1)
        found = []
        for name, module in (("b", moe), ("a", other)):
            module.set_adapter(name)
            with torch.no_grad():
                found.append(module(x, idx, weight))
            module.finalize()
        assert moe.adapters.b.targets == ("down_proj",) and moe.adapters.b.r == 4
        return found

    wanted = ranks(lambda world, device: load(world, device, *save(world, device)), world_size=1)[0][0]
    for of, to in ((2, 3), (3, 1), (1, 4), (4, 2)):
        state, whole_state = ranks(save, world_size=of)[0]
        for rank, found in enumerate(ranks(load, state, whole_state, world_size=to)):
            for y in found:
                if rank == 0:
                    close(y, wanted, f"{of} to {to}", 1e-5)
                assert torch.equal(y, found[0])


# ---- what is refused ----


def _with_adapter(moe):
    moe.add_adapter("a", 2, 2)


def _with_merged(moe):
    moe.add_adapter("a", 2, 2)
    moe.set_adapter("a")
    moe.merge_adapter()


def _with_list(moe):
    moe.add_adapter("a", 2, 2)
    moe.set_adapter(["a"])


def _state(moe):
    """What peft saves of an adapter of all experts."""
    return peft_of(factors_of(Model(), moe.num_experts, 2))


def _mix(moe, num):
    x, idx, weight, _ = inputs_of(Model(unequal=False), 0, moe.layer.world_size)
    device = moe.layer.device
    numbers = torch.zeros(num, dtype=torch.int64, device=device)
    moe(*(t.to(device) for t in (x, idx, weight)), adapters=numbers)


WRONG = {
    "r": ("ValueError", "r 0: must be positive", lambda m, w: m.add_adapter("a", 0 if w else 2, 2), None),
    "r is no integer": ("ValueError", "r 1.5", lambda m, w: m.add_adapter("a", 1.5 if w else 2, 2), None),
    "alpha": ("ValueError", "alpha inf", lambda m, w: m.add_adapter("a", 2, float("inf") if w else 2), None),
    "dropout": ("ValueError", "dropout 1.0", lambda m, w: m.add_adapter("a", 2, 2, dropout=float(w)), None),
    "targets": ("ValueError", "targets ('up_proj',)",
                lambda m, w: m.add_adapter("a", 2, 2, ["up_proj" if w else "down_proj"]), None),
    "dtype": ("TypeError", "torch.int8",
              lambda m, w: m.add_adapter("a", 2, 2, dtype=torch.int8 if w else None), None),
    "name": ("ValueError", "no dot", lambda m, w: m.add_adapter("a.b" if w else "a", 2, 2), None),
    "name of ModuleDict": ("ValueError", "ModuleDict", lambda m, w: m.add_adapter("keys" if w else "a", 2, 2),
                           None),
    "name taken": ("ValueError", "already", lambda m, w: m.add_adapter("a" if w else "b", 2, 2),
                   _with_adapter),
    "other r": ("EpMismatch", "rank 1 called add_adapter('a', r=3", lambda m, w: m.add_adapter(
        "a", 2 if w else 3, 2), None),
    "other adapter": ("EpMismatch", "Make the same call", lambda m, w: m.set_adapter("a" if w else None),
                      _with_adapter),
    "unknown": ("ValueError", "no adapter 'b': this EPMoE has ['a']",
                lambda m, w: m.set_adapter("b" if w else "a"), _with_adapter),
    "unknown to remove": ("ValueError", "no adapter 'b'", lambda m, w: m.remove_adapter("b" if w else "a"),
                          _with_adapter),
    "unknown to save": ("ValueError", "no adapter 'b'", lambda m, w: m.adapter_state_dict("b" if w else "a"),
                        _with_adapter),
    "keys": ("ValueError", "prefix= must be", lambda m, w: m.load_adapter("a", {} if w else _state(m)),
             _with_adapter),
    "more keys": ("ValueError", "prefix= must be",
                  lambda m, w: m.load_adapter("a", _state(m) | ({"mlp": torch.ones(1)} if w else {})),
                  _with_adapter),
    "no alpha": ("ValueError", "pass alpha=",
                 lambda m, w: m.load_adapter("b", _state(m), alpha=None if w else 2), None),
    "another alpha": ("ValueError", "alpha = 2.0",
                      lambda m, w: m.load_adapter("a", _state(m), alpha=3 if w else 2), _with_adapter),
    "number of experts": ("ValueError", "must all have r for each", lambda m, w: m.load_adapter(
        "b", {k: t[:-1] if w and k.endswith("lora_A.weight") else t for k, t in _state(m).items()}, alpha=2),
        None),
    "another r": ("ValueError", "r = 2, but the tensors have 1", lambda m, w: m.load_adapter(
        "a", peft_of(factors_of(Model(), m.num_experts, 1)) if w else _state(m)), _with_adapter),
    "shapes": ("ValueError", "fits no adapter", lambda m, w: m.load_adapter(
        "b", {k: t[:, :-1] if w and k == "lora_A.weight" else t for k, t in _state(m).items()}, alpha=2),
        None),
    "targets of a file": ("ValueError", "fits no adapter", lambda m, w: m.load_adapter(
        "b", _state(m), alpha=2, targets=["down_proj"] if w else None), None),
    "numbers of a mixture": ("ValueError", "a number for each token", lambda m, w: _mix(m, 12 if w else 13),
                             _with_list),
    "nothing merged": ("RuntimeError", "no adapter is merged",
                       lambda m, w: m.unmerge_adapter() if w else m.layer.world.exchange(b""), None),
    "switch while merged": ("RuntimeError", "unmerge_adapter() first",
                            lambda m, w: m.set_adapter(None) if w else m.layer.world.exchange(b""),
                            _with_merged),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_lora_mistakes_are_errors_on_all_ranks(ranks, wrong):
    """Rank 0 makes a wrong call, the others the right one; nothing changes on some of them."""
    wanted, text, call, prepare = WRONG[wrong]

    def run(world, device):
        moe = make_moe(world, device, Model())
        if prepare is not None:
            prepare(moe)
        got = outcome(lambda: call(moe, world.rank == 0))
        return got, sorted(dict(moe.named_parameters())), moe.active_adapter

    results = ranks(run, world_size=2, at_least=2)
    others = wanted if wanted == "EpMismatch" else "PeerError"
    check_outcomes([got for got, *_ in results], [wanted, *[others] * (len(results) - 1)], text, on_rank=0,
                   within_s=MISTAKE_LIMIT_S)
    assert len({(tuple(names), active) for _, names, active in results}) == 1


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("decode", [False, True])
def test_lora_in_inference_is_counted(ranks, mixed, decode):
    """FlopCounterMode sees the products of a call without gradients, and changes no bit."""
    model = Model(dtype=BF16, num_local=4)

    def run(world, device):
        moe = make_lora(world, device, model, 3)
        moe.enable_decode(model.tokens)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        options = {"decode": decode}
        if mixed:
            moe.set_adapter(["a"])
            options["adapters"] = torch.zeros(len(x), dtype=torch.int64, device=device)
        with torch.no_grad():
            want = moe(x, idx, weight, **options)
            with FlopCounterMode(display=False) as counter:
                y = moe(x, idx, weight, **options)
            moe.set_adapter(None)
            with FlopCounterMode(display=False) as base:
                moe(x, idx, weight, decode=decode)
        num = base.get_total_flops() // (2 * sum(w[0].numel() for w in (moe.gate_up_proj, moe.down_proj)))
        of_factors = sum(p[0].numel() * 16 // 3 for p in moe.adapters.parameters())  # r is padded to 16
        moe.finalize()
        more = counter.get_total_flops() - base.get_total_flops()
        return torch.equal(y, want), num > 0 or not len(x), more == 2 * num * of_factors

    for facts in ranks(run):
        assert all(facts), facts


def test_lora_under_a_mode_of_torch_is_as_without(ranks):
    """A mode sees some operators of a step, and changes no bit. Checkpoints may begin or end inside of it."""
    model = Model(dtype=BF16, bias=True, num_local=4)

    def run(world, device):
        moe = make_lora(world, device, model, 3)
        want, found = step(moe, model), []
        with FlopCounterMode(display=False) as counter:
            found.append(step(moe, model))
        x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        x.requires_grad_()
        for inside in ("forward", "backward"):
            moe.zero_grad()
            x.grad = None
            with FlopCounterMode(display=False) if inside == "forward" else contextlib.nullcontext():
                y = checkpoint(moe, x, idx, weight, use_reentrant=False)
            with FlopCounterMode(display=False) if inside == "backward" else contextlib.nullcontext():
                y.backward(dy)
            found.append({"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in moe.named_parameters()})
        num = moe.last_layout.num_rows
        moe.finalize()
        sizes = sum(w[0].numel() for w in (moe.gate_up_proj, moe.down_proj))
        of_factors = sum(p[0].numel() * 16 // 3 for p in moe.adapters.parameters())  # r is padded to 16
        same = all(one[n] is None and want[n] is None or torch.equal(one[n], want[n])
                   for one in found for n in one)
        return same, counter.get_total_flops() == 2 * num * (2 * sizes + 3 * of_factors)

    for facts in ranks(run):
        assert all(facts), facts


@pytest.mark.parametrize("part", ["A", "B"])
def test_lora_takes_factors_of_any_strides(ranks, part):
    model = Model(dtype=BF16)

    def run(world, device):
        moe = make_lora(world, device, model, 16)
        want = step(moe, model)
        for name in WEIGHTS:
            p = getattr(getattr(moe.adapters.a, name), f"lora_{part}")
            p.data = p.data.transpose(1, 2).contiguous().transpose(1, 2)
        got = step(moe, model)
        for p in moe.adapters.parameters():  # at an address that is no multiple of 16
            p.data = torch.cat([p.data.new_zeros(1), p.data.flatten()])[1:].view(p.shape)
        moved = step(moe, model)
        moe.finalize()
        return all(v is None or torch.equal(v, got[n]) and torch.equal(v, moved[n]) for n, v in want.items())

    assert all(ranks(run))


@pytest.mark.parametrize("decode", [False, True])
def test_lora_of_a_wrong_shape_is_an_error_on_all_ranks(ranks, decode):
    """A program has given a factor of rank 0 another shape. The next call is right on all ranks."""
    model = Model(dtype=BF16)

    def run(world, device):
        moe = make_lora(world, device, model, 16)
        moe.enable_decode(model.tokens)
        factor = moe.adapters["a"].down_proj.lora_B
        right = factor.data
        if world.rank == 0:
            factor.data = right[:, :-16].contiguous()
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))

        @torch.no_grad()
        def call():
            return moe(x, idx, weight, decode=decode)

        got = outcome(call, moe.layer)
        factor.data = right
        y, want = call(), moe(x, idx, weight, decode=False)
        moe.finalize()
        return got, torch.equal(y, want.detach())

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], ["ValueError", *["PeerError"] * (len(results) - 1)],
                   "weights of low rank", on_rank=0, within_s=MISTAKE_LIMIT_S)
    assert all(is_right for _, is_right in results)


@pytest.mark.parametrize("decode", [False, True])
def test_lora_mixture_of_a_wrong_rank_is_an_error_on_all_ranks(ranks, decode):
    """The module checks how many columns an adapter has. The next call is right on all ranks."""
    model = Model(dtype=BF16)

    def run(world, device):
        moe = make_lora(world, device, model, 16)
        moe.set_adapter(["a"])
        moe.enable_decode(model.tokens)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        numbers = torch.zeros(len(x), dtype=torch.int64, device=device)

        @torch.no_grad()
        def call():
            return moe(x, idx, weight, decode=decode, adapters=numbers)

        want = call()
        if world.rank == 0:
            moe._lora.copied.r = 12
        got = outcome(call, moe.layer)
        moe._lora.copied.r = 16
        y = call()
        moe.finalize()
        return got, torch.equal(y, want)

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], ["ValueError", *["PeerError"] * (len(results) - 1)],
                   "adapter_columns, a multiple of 8", on_rank=0, within_s=MISTAKE_LIMIT_S)
    assert all(is_right for _, is_right in results)


def test_lora_without_memory_is_an_error_on_all_ranks(ranks, monkeypatch):
    """Rank 0 cannot pad the factors before the call."""
    model, pad = Model(dtype=BF16), lora_products._padded

    def run(world, device):
        moe = make_lora(world, device, model, 3)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        mine = {id(p) for p in moe.adapters.parameters()}

        def fails(a, b):
            if id(a) in mine:
                raise MemoryError("no memory for the factors")
            return pad(a, b)

        if world.rank == 0:  # ranks that are threads share the function, but have factors of their own
            monkeypatch.setattr(lora_products, "_padded", fails)
        got = outcome(lambda: moe(x, idx, weight), moe.layer)
        moe.finalize()
        return got

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes(results, ["MemoryError", *["PeerError"] * (len(results) - 1)], within_s=MISTAKE_LIMIT_S)


@pytest.mark.cpu_only
@pytest.mark.parametrize("targets", [WEIGHTS, ("down_proj",), ("gate_up_proj",)], ids=str)
def test_lora_is_in_the_calls_of_the_experts(monkeypatch, targets):
    """In 16 bits an adapter adds no call of the module's layer, forward, backward or in decoding."""
    calls, model = [], Model(dtype=BF16, num_local=4)

    def counted(name):
        real = getattr(epmoe._C, name)
        monkeypatch.setattr(epmoe._C, name, lambda *args: calls.append(name) or real(*args))

    for name in [n for n in dir(epmoe._C) if n.startswith("layer_") and n not in ("layer_config",)]:
        if callable(getattr(epmoe._C, name)):
            counted(name)
    moe = make_lora(epmoe.thread_worlds(1)[0], "cpu", model, 16, targets)
    moe.enable_decode(model.tokens)
    calls.clear()
    step(moe, model)
    operations = [name for name in calls if name != "layer_sync"]
    assert operations == ["layer_experts", "layer_experts_down", "layer_experts_up"]
    calls.clear()
    x, idx, weight, _ = inputs_of(model, 0, 1)
    with torch.no_grad():
        moe(x, idx, weight, decode=True)
    assert calls == ["layer_ll_experts"]
    moe.finalize()


@pytest.mark.parametrize("options, text", [
    ({"compute_dtype": torch.float8_e4m3fn, "dtype": BF16, "hidden": 128, "inner": 128}, "compute_dtype"),
    ({"delay_wgrad_compute": True}, "delay_wgrad_compute"),
    ({"fuse_wgrad_accumulation": True}, "fuse_wgrad_accumulation")], ids=["fp8", "delay", "fuse"])
def test_lora_is_refused_beside_options(ranks, options, text):
    def run(world, device):
        dtype, sizes = options.get("dtype", FP32), {k: options.get(k, 16) for k in ("hidden", "inner")}
        rest = {k: v for k, v in options.items() if k not in ("dtype", *sizes)}
        moe = make_moe(world, device, Model(dtype=dtype, **sizes), **rest)
        return outcome(lambda: moe.add_adapter("a", 2, 2))

    check_outcomes(results := ranks(run, world_size=2), ["ValueError"] * len(results), text,
                   within_s=MISTAKE_LIMIT_S)


@pytest.mark.cpu_only
def test_lora_refuses_what_merged_weights_cannot_do():
    world, model = epmoe.thread_worlds(1)[0], Model(dtype=BF16)
    moe = make_lora(world, "cpu", model, 2)
    state = moe.state_dict()
    moe.merge_adapter()
    for call in (moe.state_dict, lambda: moe.load_state_dict(state), lambda: epmoe.whole_state_dict(moe),
                 moe.merge_adapter, lambda: moe.set_expert_map(None), lambda: moe.remove_adapter("a")):
        with pytest.raises(RuntimeError, match="hold the adapter 'a' now: call its unmerge_adapter"):
            call()
    moe.unmerge_adapter()
    moe.load_state_dict(state)
    moe.set_adapter(None)
    with pytest.raises(ValueError, match="no adapter is active: call set_adapter first"):
        moe.merge_adapter()
    moe.finalize()
    moe = make_lora(world, "cpu", Model(hidden=128, inner=128, dtype=BF16), 2, weight_dtype="mxfp4",
                    fused=None)
    with pytest.raises(ValueError, match="weights in MXFP4 would have to be quantised again"):
        moe.merge_adapter()
    with pytest.raises(RuntimeError, match="no gradients"):
        moe.set_adapter(None)
        x, idx, weight, _ = inputs_of(Model(hidden=128, inner=128, dtype=BF16), 0, 1)
        moe(x.requires_grad_(), idx % 2, weight)
    moe.finalize()


@pytest.mark.cpu_only
def test_lora_merged_in_modules_with_the_same_weights():
    """A prefill and a decode module: the weights have the adapter once, and unmerging restores them."""
    world, model = epmoe.thread_worlds(1)[0], Model(dtype=BF16)
    first, second = (make_lora(world, "cpu", model, 2) for _ in range(2))
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    x, idx, weight, _ = inputs_of(model, 0, 1)
    before, state = first.down_proj.detach().clone(), second.state_dict()
    with torch.no_grad():
        want = first(x, idx, weight)
        with pytest.raises(RuntimeError, match="another EPMoE has the same weights"):
            first.merge_adapter()
        second.set_adapter(None)
        first.merge_adapter()
        merged = [moe(x, idx, weight) for moe in (first, second)]
    assert torch.equal(*merged) and (merged[0] - want).norm() < 0.05 * want.norm()
    for call in (second.merge_adapter, second.state_dict, lambda: second.load_state_dict(state),
                 lambda: second.set_adapter("a"), lambda: second.remove_adapter("a")):
        with pytest.raises(RuntimeError, match="which another one has, too, hold the adapter 'a'"):
            call()
    first.unmerge_adapter()
    assert torch.equal(first.down_proj, before)
    second.set_adapter("a")
    second.load_state_dict(state)
    first.finalize()
    second.finalize()


@pytest.mark.cpu_only
def test_lora_factors_stay_frozen_after_a_merge():
    moe = make_lora(epmoe.thread_worlds(1)[0], "cpu", Model(dtype=BF16), 2)
    moe.adapters.a.down_proj.lora_A.requires_grad_(False)
    before = {n: p.requires_grad for n, p in moe.named_parameters()}
    moe.merge_adapter()
    assert not any(p.requires_grad for p in moe.adapters.parameters())
    moe.unmerge_adapter()
    assert {n: p.requires_grad for n, p in moe.named_parameters()} == before and True in before.values()
    for name in ("training", "_modules", "keys"):
        with pytest.raises(ValueError, match="cannot be the name of an attribute"):
            moe.add_adapter(name, 2, 2)
    moe.finalize()


@pytest.mark.cpu_only
@pytest.mark.parametrize("is_root", (True, False))
def test_lora_of_a_state_dict_is_a_matter_of_strict_where_there_is_none(is_root):
    moes = [epmoe.EPMoE(16, 32, 2, 1, dtype=torch.float32, device="cpu") for _ in range(2)]
    moes[0].add_adapter("a", 2, 2)
    state, adapters = moes[0].state_dict(), moes[0].adapters.state_dict()
    module, prefix = (moes[1], "") if is_root else (torch.nn.ModuleDict({"moe": moes[1]}), "moe.")
    for given in (state, {f"adapters.{n}": t for n, t in adapters.items()}):
        given = {prefix + n: t for n, t in given.items()}
        found = module.load_state_dict(given, strict=False)
        assert set(found.unexpected_keys) == {f"{prefix}adapters.{n}" for n in adapters}
        with pytest.raises(RuntimeError, match="Unexpected"):
            module.load_state_dict(given)
    assert torch.equal(moes[1].down_proj, moes[0].down_proj)
    for moe in moes:
        moe.finalize()


@pytest.mark.cpu_only
def test_lora_refuses_a_gradient_in_decoding_and_shapes_of_both_weights():
    world, model = epmoe.thread_worlds(1)[0], Model(hidden=16, inner=16, activation="gelu", num_local=4)
    moe = make_lora(world, "cpu", model, 2)
    moe.enable_decode(13)
    x, idx, weight, _ = inputs_of(model, 0, 1)
    with pytest.raises(RuntimeError, match="decode=True has no gradients"):
        moe(x, idx, weight, decode=True)
    moe.finalize()
    moe = make_moe(epmoe.thread_worlds(1)[0], "cpu", model)
    state = peft_of(factors_of(model, 4, 2, ["down_proj"]))
    with pytest.raises(ValueError, match="fit each of the two weights: pass targets="):
        moe.load_adapter("a", state, alpha=1)
    moe.load_adapter("a", state, alpha=1, targets="down_proj")
    assert moe.adapters.a.targets == ("down_proj",)
    a, _ = factors_of(model, 4, 2, ["down_proj"])["down_proj"]
    assert torch.equal(moe.adapters.a.down_proj.lora_A, a)
    moe.finalize()


@pytest.mark.cpu_only
@pytest.mark.parametrize("wrong", [
    {"moe.down_proj": None}, {"moe.down_proj": torch.zeros(3, 3)}, {"moe.other": torch.zeros(3)},
    {"moe.adapters.a.down_proj.lora_B": torch.zeros(3, 3)}, {"moe.adapters.a.down_proj.lora_B": "text"}],
    ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_lora_a_state_dict_with_an_error_loads_neither_weights_nor_adapters(wrong, assign):
    moe = epmoe.EPMoE(16, 32, 2, 1, dtype=torch.float32, device="cpu")
    moe.add_adapter("a", 2, 2)
    model = torch.nn.ModuleDict({"moe": moe})
    want = {name: p.clone() for name, p in model.named_parameters()}
    state = {name: torch.full_like(p, 7) for name, p in want.items()} | wrong
    got = outcome(lambda: model.load_state_dict({n: t for n, t in state.items() if t is not None},
                                                assign=assign))
    assert got.kind == "RuntimeError" and next(iter(wrong)) in got.text
    assert "Nothing of it was loaded" in got.text
    assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())
    moe.finalize()
