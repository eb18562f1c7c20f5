"""EPMoE with weights in FP8: its checkpoints, its results against float64, and what it refuses.

The sums in float64 are of the quantised numbers: weights, tokens, and the rows between the two linear maps.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import epmoe
from cases import first, keep
from epmoe import reference
from fp8_cases import E4M3, HIDDEN, K, TOKENS, experts_of, in_fp8, inputs, make, stacked
from gemm_cases import bits, dequantized
from outcomes import MISTAKE_LIMIT_S, check_outcomes, outcome

SIZES = (1, 2, 4)


def wanted(x, idx, weight, num_experts, inner, activation, bias):
    """The result in float64 of the quantised numbers, and that of the numbers before."""
    plain = experts_of(num_experts, inner, activation, bias)
    whole = stacked(plain, num_experts)
    q = {n: t if n.endswith("bias") else dequantized(*epmoe.quantize_fp8_weight(t)) for n, t in whole.items()}

    def quantize(t):
        return dequantized(*epmoe.quantize_fp8(t.to(x.dtype)))

    x, y = x.cpu(), torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for t in range(len(x)):
        for e, w in zip(idx[t].tolist(), weight[t].tolist()):
            if e >= 0:
                h = q["gate_up_proj"][e] @ quantize(x[t:t + 1])[0]
                h = reference.activate(h + (q["gate_up_proj_bias"][e] if bias else 0), activation)
                out = q["down_proj"][e] @ quantize(h[None])[0] + (q["down_proj_bias"][e] if bias else 0)
                y[t] += w * out
    whole = {n: t.double() for n, t in whole.items()}
    exact = reference.moe(x.double(), idx.cpu(), weight.cpu().double(), whole["gate_up_proj"],
                          whole["down_proj"], activation, whole.get("gate_up_proj_bias"),
                          whole.get("down_proj_bias"))
    return y, exact


def compare(got, x, idx, weight, *arguments):
    y, exact = wanted(x, idx, weight, *arguments)
    if not len(x):
        return
    # Sums in FP8 have fewer bits, so some activations round to the other neighbour when they are quantised,
    # 6 to 12 % away.  After relu2, one of them can be half of a token's norm.
    assert (got.cpu().double() - y).norm() < 0.05 * y.norm()
    assert (got.cpu().double() - exact).norm() < 0.2 * exact.norm()
    assert not got.isnan().any()


# ---- results ----

OPTIONS = [{}, {"bias": True}, {"activation": "relu2", "inner": 192, "bias": True}, {"dtype": torch.float16},
           {"activation": epmoe.SwiGLU(limit=1.0), "combine_mode": "gather", "enable_local_combine": False},
           {"activation": "gpt_oss", "inner": 192}, {"token_saving": False, "token_sorting": False}]


@pytest.mark.parametrize("size", first(1, [2, 1, 4]))
def test_moe_fp8_equals_float64(ranks, size):
    """Prefill, with and without a capacity, and decode have the same bits."""

    def run(world, device):
        results = []
        for i, options in enumerate(OPTIONS):
            num_experts = 2 * world.size + 1  # the last ranks have fewer, and there are empty ones
            moe = make(world, device, num_experts, **options)
            fixed = make(world, device, num_experts, **options, capacity=4 * TOKENS * K)
            moe.enable_decode(TOKENS)
            for seed in range(3):
                with torch.no_grad():
                    args = inputs(world, device, num_experts, seed, moe.layer.dtype)
                    y = moe(*args, decode=False)
                    results.append((y, moe(*args, decode=True), fixed(*args), args, num_experts, i))
            moe.finalize()
            fixed.finalize()
        return results

    for results in ranks(run, world_size=size):
        for y, decoded, fixed, args, num_experts, i in results:
            options = OPTIONS[i]
            assert y.dtype == args[0].dtype
            if options.get("enable_local_combine", True) and "token_saving" not in options:
                assert torch.equal(y, decoded), options  # elsewhere other sums are rounded
            assert torch.equal(y, fixed), options
            compare(y, *args, num_experts, options.get("inner", 128), options.get("activation", "swiglu"),
                    options.get("bias", False))


def test_moe_fp8_decodes_by_itself_and_shares_a_layer(ranks):
    def run(world, device):
        moe = make(world, device, 24)
        plain = epmoe.EPMoE(HIDDEN, 128, moe.layer.num_experts, K, layer=moe.layer)
        other = epmoe.EPMoE(HIDDEN, 128, moe.layer.num_experts, K, layer=moe.layer, weight_dtype=E4M3)
        other.load_state_dict(moe.state_dict())
        args = inputs(world, device, 24)
        with torch.no_grad():
            y, same = moe(*args), other(*args)
            took_path = moe.last_layout is None and moe.layer.low_latency is not None
            again, z = copy.deepcopy(moe)(*args), plain(*args)
        moe.finalize()
        return torch.equal(y, same), torch.equal(y, again), took_path, z.shape == y.shape

    assert all(all(r) for r in ranks(run))


def test_moe_fp8_moves_experts(ranks):
    def run(world, device):
        moe = make(world, device, 5, num_physical=(-(-5 // world.size) + 1) * world.size)
        args = inputs(world, device, 5)
        with torch.no_grad():
            want = moe(*args, decode=False)
            moe.set_expert_map(epmoe.balance_experts([9, 1, 1, 30, 1], world.size, moe.layer.num_experts))
            moved, whole = moe(*args, decode=False), epmoe.whole_state_dict(moe)
            moe.load_state_dict(in_fp8(experts_of(5)))  # each physical expert takes its logical one
            loaded = moe(*args, decode=False)
            moe.set_expert_map(None)
            back = moe(*args, decode=False)
        moe.finalize()
        return want, moved, loaded, back, {n: bits(t) for n, t in whole.items()}  # pickle has no FP8

    results = ranks(run, world_size=2)
    whole = results[0][4]
    want = stacked(in_fp8(experts_of(5)), 5)
    for name, t in want.items():
        assert torch.equal(whole[name], bits(t)), name
    for want, moved, loaded, back, _ in results:
        torch.testing.assert_close(moved, want, rtol=2e-2, atol=2e-2)
        assert torch.equal(loaded, moved) and torch.equal(back, want)


# ---- checkpoints ----

@pytest.mark.parametrize("size", SIZES)
def test_moe_fp8_loads_checkpoints(ranks, size):
    """One by one or stacked, of all experts or of this rank, in FP8 or quantised: the same parameters."""

    def run(world, device):
        num_experts, failures = 2 * world.size, []
        moe = make(world, device, num_experts, load=False, bias=True)
        plain = experts_of(num_experts, bias=True)
        whole = stacked(in_fp8(plain), num_experts)
        own = slice(2 * world.rank, 2 * world.rank + 2)
        mine = {k: t for k, t in in_fp8(plain).items() if int(k.split(".")[0]) in range(own.start, own.stop)}
        old = {k: t.bfloat16() if k.endswith("inv") else t for k, t in in_fp8(plain).items()}
        model = nn.ModuleDict({"experts": moe})
        for name, state in {
                "one by one": in_fp8(plain), "one by one, this rank": mine, "quantised": plain,
                "quantised, float32": {k: t.float() for k, t in plain.items()}, "stacked": whole,
                "stacked, this rank": {k: t[own] for k, t in whole.items()},
                "stacked, quantised": stacked(plain, num_experts),
                "scales in 16 bits": old}.items():
            for p in moe.parameters():
                p.fill_(0) if p.dtype != E4M3 else bits(p).zero_()
            model.load_state_dict({f"experts.{k}": t for k, t in state.items()}, assign=name == "stacked")
            for n, p in moe.named_parameters():
                got, want = p.detach().cpu(), whole[n][own]
                if "16 bits" in name and n.endswith("inv"):
                    want = want.bfloat16().float()
                if not torch.equal(bits(got), bits(want)) or p.requires_grad or p.dtype != want.dtype:
                    failures.append(f"{name}: {n}")
        state = moe.state_dict()
        again = make(world, device, num_experts, load=False, bias=True)
        again.load_state_dict(state)
        failures += [n for (n, p), q in zip(moe.named_parameters(), again.parameters())
                     if not torch.equal(bits(p).cpu(), bits(q).cpu())]
        moe.finalize()
        again.finalize()
        return failures, {n: (tuple(t.shape), t.dtype) for n, t in state.items()}

    for failures, shapes in ranks(run, world_size=size):
        assert not failures
        assert set(shapes) == {"gate_up_proj", "gate_up_proj_scale_inv", "gate_up_proj_bias", "down_proj",
                               "down_proj_scale_inv", "down_proj_bias"}
        assert shapes["gate_up_proj"][1] == E4M3 and shapes["down_proj_scale_inv"][1] == torch.float32
        assert shapes["gate_up_proj_scale_inv"][0][1:] == (2, 2)
        assert shapes["down_proj_scale_inv"][0][1:] == (2, 1)


def test_moe_loads_experts_one_by_one_in_16_bits(ranks):
    def run(world, device):
        results = []
        for activation in ("swiglu", "relu2"):
            moe = epmoe.EPMoE(HIDDEN, 128, 6, K, world, activation, device=device, bias=True,
                              max_tokens=TOKENS)
            plain = experts_of(6, activation=activation, bias=True)
            moe.load_state_dict(plain)
            whole = stacked(plain, 6)
            results += [torch.equal(whole[n][e], p[i].cpu()) for n, p in moe.named_parameters()
                        for i, e in enumerate(moe._held) if e >= 0]
            moe.finalize()
        return results

    results = ranks(run)
    assert sum(map(len, results)) == 2 * 4 * 6 and all(map(all, results))


@torch.no_grad()
def test_moe_fp8_starts_with_the_quantised_numbers_of_16_bits():
    found = []
    for weight_dtype in (None, E4M3):
        torch.manual_seed(5)
        world = epmoe.thread_worlds(1)[0]
        found.append(make(world, "cpu", 3, load=False, weight_dtype=weight_dtype, num_physical=4))
        found[-1].finalize()
    plain, fp8 = found
    for name in ("gate_up_proj", "down_proj"):
        q, scales = epmoe.quantize_fp8_weight(getattr(plain, name))
        bits(q)[3], scales[3] = 0, 0  # holds no expert
        assert torch.equal(bits(q), bits(getattr(fp8, name)))
        assert torch.equal(scales, getattr(fp8, name + "_scale_inv"))


def change(**entries):
    """Checkpoints with some entries changed: a function of the tensor, or None: without it."""

    def apply(checkpoint):
        for key, fn in entries.items():
            key = key.replace("__", ".")
            if fn is None:
                del checkpoint[key]
            else:
                checkpoint[key] = fn(checkpoint.get(key))
        return checkpoint

    return apply


def mistake_id(names):
    """The id of a dict or of texts. It has no value, because the text of a function has an address."""
    return " ".join(names) or "none"


@pytest.mark.parametrize("options, entries, texts", [
    ({}, {"0__up_proj__weight": None}, ("Missing", "0.up_proj.weight")),
    ({}, {"1__down_proj__weight_scale_inv": None}, ("Missing", "1.down_proj.weight_scale_inv")),
    ({}, {"0__gate_proj__weight": lambda t: t[:64]}, ("0.gate_proj.weight", "[128, 256]", "[64, 256]")),
    ({}, {"0__gate_proj__weight_scale_inv": lambda t: t[:, :1]}, ("weight_scale_inv", "[1, 2]", "[1, 1]")),
    ({}, {"0__gate_proj__weight": lambda t: t.float()}, ("0.gate_proj.weight_scale_inv", "float32")),
    ({}, {"0__gate_proj__weight": lambda t: t.to(torch.float8_e5m2)}, ("float8_e4m3fn", "float8_e5m2")),
    ({}, {"0__gate_proj__weight_scale_inv": lambda t: t.int()}, ("floating-point", "int32")),
    ({}, {"2__gate_proj__weight": lambda t: torch.zeros(128, 256)}, ("Unexpected", "2.gate_proj.weight")),
    ({}, {"0__gate_proj__bias": lambda t: torch.zeros(128)}, ("Unexpected", "0.gate_proj.bias")),
    ({"weight_dtype": None}, {}, ("0.gate_proj.weight", "weight_dtype=torch.float8_e4m3fn")),
    ({"activation": "gpt_oss"}, {}, ("interleaved",)),
    ({"activation": "relu2"}, {}, ("Unexpected", "0.gate_proj.weight"))], ids=mistake_id)
def test_moe_fp8_checkpoint_mistakes(options, entries, texts):
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2, load=False, **options)
    before = {name: bits(p).clone() for name, p in moe.named_parameters()}
    got = outcome(lambda: moe.load_state_dict(change(**entries)(in_fp8(experts_of(2)))))
    check_outcomes([got], "RuntimeError", *texts)
    assert all(torch.equal(bits(p), before[name]) for name, p in moe.named_parameters())
    moe.finalize()


def out_of_memory(after):
    """A function that quantises, and raises after some calls."""
    left = [after]

    def quantize(t):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory")
        return epmoe.quantize_fp8_weight(t)

    return quantize


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_moe_fp8_lack_of_memory_in_the_middle_changes_nothing(monkeypatch, is_stacked, assign):
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2, load=False)
    plain = experts_of(2)
    parameters = dict(moe.named_parameters())
    before = {name: bits(p).clone() for name, p in parameters.items()}
    monkeypatch.setattr(epmoe.moe.fp8, "quantize_fp8_weight", out_of_memory(1))
    whole = stacked(plain, 2) if is_stacked else plain
    got = outcome(lambda: moe.load_state_dict(whole, assign=assign))
    check_outcomes([got], "OutOfMemoryError", "no memory")
    for name, p in moe.named_parameters():
        assert p is parameters[name] and torch.equal(bits(p), before[name]), name
    monkeypatch.undo()
    moe.load_state_dict(whole)
    assert not torch.equal(bits(moe.down_proj), before["down_proj"])
    moe.finalize()


@pytest.mark.parametrize("options, entries, texts", [
    ({}, {"gate_up_proj": lambda t: t.float()}, ("gate_up_proj_scale_inv", "float32")),
    ({}, {"gate_up_proj": lambda t: t.to(torch.float8_e5m2)}, ("float8_e4m3fn", "float8_e5m2")),
    ({}, {"down_proj_scale_inv": None}, ("Missing", "down_proj_scale_inv")),
    ({"weight_dtype": None}, {"down_proj_scale_inv": None, "gate_up_proj_scale_inv": None},
     ("gate_up_proj", "weight_dtype=torch.float8_e4m3fn"))], ids=mistake_id)
def test_moe_fp8_stacked_mistakes(options, entries, texts):
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2, load=False, **options)
    before = {name: bits(p).clone() for name, p in moe.named_parameters()}
    got = outcome(lambda: moe.load_state_dict(change(**entries)(stacked(in_fp8(experts_of(2)), 2))))
    check_outcomes([got], "RuntimeError", *texts)
    assert all(torch.equal(bits(p), before[name]) for name, p in moe.named_parameters())
    moe.finalize()


# ---- mistakes ----

@pytest.mark.parametrize("how", ["x", "topk_weights", "parameter"])
@pytest.mark.parametrize("max_tokens", [TOKENS, 2048], ids=["decode", "prefill"])
def test_moe_fp8_has_no_gradients(ranks, how, max_tokens):
    """A gradient that one rank wants is an error on all, and the next call works."""

    def run(world, device):
        moe, last = make(world, device, 24, max_tokens=max_tokens), world.rank == world.size - 1
        x, idx, weight = inputs(world, device, 24, seed=3)
        with torch.no_grad():
            want = moe(x, idx, weight)
        if last and how == "x":
            x = x.clone().requires_grad_()
        if last and how == "topk_weights":
            weight = weight.clone().requires_grad_()
        moe.down_proj_scale_inv.requires_grad_(last and how == "parameter")
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: moe(x, idx, weight), moe.layer)
        with torch.no_grad():
            same = torch.equal(moe(x, idx, weight), want)
        moe.finalize()
        return got, same

    results = ranks(run, at_least=2)
    last = len(results) - 1
    check_outcomes([r[0] for r in results], ["PeerError"] * last + ["RuntimeError"], "no gradients",
                   "torch.no_grad()", on_rank=last, elsewhere=(f"rank {last}",))
    assert all(same for _, same in results)


@pytest.mark.parametrize("options, error, text", [
    ({"hidden": 192}, "ValueError", "hidden 192"), ({"inner": 192}, "ValueError", "inner 192"),
    ({"dtype": torch.float32}, "TypeError", "bfloat16"),
    ({"weight_dtype": torch.float8_e5m2}, "TypeError", "float8_e4m3fn"),
    ({"weight_dtype": torch.float16}, "TypeError", "float8_e4m3fn"),
    ({"delay_wgrad_compute": True}, "ValueError", "have no gradients"),
    ({"fuse_wgrad_accumulation": True}, "ValueError", "have no gradients"),
    ({"weight_dtype": None}, "EpMismatch", "weight_dtype")], ids=str)
def test_moe_fp8_wrong_arguments_on_one_rank(ranks, options, error, text):
    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        base = {"hidden": 256, "inner": 128, "num_experts": 4, "topk": 2, "ep_group": world, "device": device,
                "weight_dtype": E4M3, "max_tokens": TOKENS}
        got = outcome(lambda: keep(world, epmoe.EPMoE(**base | (options if world.rank == 1 else {}))))
        epmoe.EPMoE(**base).finalize()
        return got

    results = ranks(run, world_size=2, at_least=2)
    kinds = [error if error == "EpMismatch" or r == 1 else "PeerError" for r in range(len(results))]
    check_outcomes(results, kinds, text, on_rank=1)


def test_moe_fp8_must_not_be_cast(ranks):
    def run(world, device):
        moe = make(world, device, 4)
        args = inputs(world, device, 4)
        moe.bfloat16()
        got = outcome(lambda: moe(*args))
        moe.finalize()
        return got

    check_outcomes(ranks(run, world_size=2), ["TypeError"] * ranks.size(2), "cast")


# ---- CUDA graphs ----


@pytest.mark.cuda_only
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_moe_fp8_graphs(ranks, decode):
    """A captured module, replayed between calls outside of the graph."""
    if not ranks.is_torchrun:
        pytest.skip("ranks that are threads do not replay graphs")

    def run(world, device):
        num_experts = 2 * world.size
        moe, same = make(world, device, num_experts, capacity=world.size * TOKENS * K), []
        if decode:
            moe.enable_decode(TOKENS)
        with torch.no_grad():
            fixed = [t[:5] for t in inputs(world, device, num_experts, seed=3 + world.rank)]
            fixed = [torch.cat([t, t.new_zeros(5 - len(t), *t.shape[1:])]) for t in fixed]
            moe(*fixed, decode=decode)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = moe(*fixed, decode=decode)
            for _ in range(4):
                fixed[0].copy_(torch.randn(5, HIDDEN, device=device))
                graph.replay()
                got = y.clone()
                same.append(torch.equal(got, moe(*fixed, decode=decode)) and not got.isnan().any().item())
        moe.layer.synchronize()
        moe.finalize()
        return same

    assert all(map(all, ranks(run)))


# ---- ranks that are processes: torch.compile, checkpoints, fully_shard ----


def compile_and_load(world, device, path):
    """Whether a compiled module has the bits of the module, and a checkpoint of one rank those of two."""
    torch._dynamo.reset()
    moe = make(world, device, 5)
    fast, results = torch.compile(moe, backend="aot_eager", fullgraph=True), []
    for seed in range(2):
        args = inputs(world, device, 5, seed)
        with torch.no_grad():
            results.append(torch.equal(fast(*args), moe(*args, decode=False)))
    want = {n: p.clone() for n, p in moe.named_parameters()}
    for p in moe.parameters():
        bits(p).zero_()
    state = moe.state_dict()
    results.append(all(t.shape[0] == 5 for t in state.values()))  # the experts of all ranks
    dcp.load(state, checkpoint_id=path)
    moe.load_state_dict(state)
    results += [torch.equal(bits(p), bits(want[n])) for n, p in moe.named_parameters()]
    moe.finalize()
    return results


@pytest.mark.long
@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_moe_fp8_compiles_and_loads_checkpoints_of_other_ranks(ranks, tmp_path):
    alone = make(epmoe.World(), "cpu", 5)
    dcp.save(alone.state_dict(), checkpoint_id=tmp_path)
    alone.finalize()
    assert all(map(all, ranks.isolated(compile_and_load, str(tmp_path), world_size=2)))


def load_sharded(world, device):
    """What happens to a checkpoint with the experts one by one, after fully_shard and before it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = epmoe.EPMoE(HIDDEN, 128, 4, K, epmoe.thread_worlds(1)[0], max_tokens=4, device=device)
    plain = experts_of(4)
    alone.load_state_dict(plain)
    loaded = torch.equal(alone.down_proj[3], plain["3.down_proj.weight"])
    fully_shard(alone, mesh=init_device_mesh("cpu", (2,)))
    got = outcome(lambda: alone.load_state_dict(plain))
    alone.finalize()
    return loaded, got


@pytest.mark.cpu_only
def test_moe_loads_experts_one_by_one_before_fully_shard(ranks):
    results = ranks.isolated(load_sharded, world_size=2)
    assert all(loaded for loaded, _ in results)
    check_outcomes([got for _, got in results], "RuntimeError", "load before it")
