"""EPMoE with weights of 4 bits: the bits of its results, its checkpoints, and what it refuses."""

import copy
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import epmoe
from cases import first, keep, process_ranks
from epmoe import Int4, reference
from epmoe.gemm import four_bit
from four_bit_cases import (HIDDEN, INNER, TOKENS, K, awq, by_columns, codes_of, compressed, deepseek,
                            dequantized, gptq, in_16_bits, inputs, make, parameters_of, same, whole)
from nodes_cases import run_nodes
from outcomes import MISTAKE_LIMIT_S, check_outcomes, outcome

# Under torchrun all ranks take part in every test.
SIZES = (int(os.environ["WORLD_SIZE"]),) if "WORLD_SIZE" in os.environ else first(2, (3, 1, 2, 4))
FORMATS = ["mxfp4", "int4", Int4(64, zero_points=True)]
NAMES = ("gate_up_proj", "down_proj")


def twin_of(moe, world, **options):
    """A module in 16 bits with the same weights."""
    twin = make(world, moe.layer.device, moe.num_experts, None, **{"dtype": moe.layer.dtype} | options)
    state = {n: p for n, p in moe.named_parameters() if n.endswith("_bias")}
    for name in NAMES:
        state[name] = dequantized(moe, name)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(state[name])
    return twin


def mine(world, num_experts):
    """The experts of a rank as a slice."""
    num = -(-num_experts // world.size)
    return slice(min(world.rank * num, num_experts), min((world.rank + 1) * num, num_experts))


# ---- results ----

OPTIONS = [{}, {"bias": True}, {"activation": "relu2", "bias": True}, {"dtype": torch.float16},
           {"activation": epmoe.SwiGLU(limit=1.0), "combine_mode": "gather", "enable_local_combine": False},
           {"activation": "gpt_oss", "bias": True}, {"token_saving": False, "token_sorting": False},
           {"rank_invariant": True}, {"fused": False}, {"fused": True}]


@pytest.mark.parametrize("part", (0, 1), ids=("first", "second"))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_has_the_bits_of_16_bits(ranks, weight_dtype, size, part):
    """Prefill, with and without a capacity, and decode.  part: half of the options."""

    def run(world, device):
        found = []
        for i, options in list(enumerate(OPTIONS))[part::2]:
            num_experts = 2 * world.size + 1  # the last ranks have fewer, and there are empty ones
            torch.manual_seed(i)
            moe = make(world, device, num_experts, weight_dtype, **options)
            twin = twin_of(moe, world, **options)
            fixed = make(world, device, num_experts, weight_dtype, **options, capacity=4 * TOKENS * K)
            fixed.load_state_dict(moe.state_dict())
            for module in (moe, twin):
                module.enable_decode(TOKENS)
            for seed in range(2):
                args = inputs(world, device, num_experts, seed, moe.layer.dtype)
                with torch.no_grad():
                    want = twin(*args, decode=False)
                    found += [(i, "prefill", same(moe(*args, decode=False), want)),
                              (i, "decode", same(moe(*args, decode=True), twin(*args, decode=True))),
                              (i, "capacity", same(fixed(*args), want)),
                              (i, "numbers", not len(want) or bool(want.isfinite().all() and want.any()))]
                found.append((i, "with gradients enabled", same(moe(*args, decode=False), want)))
            for module in (moe, twin, fixed):
                module.finalize()
        return found

    for results in ranks(run, world_size=size):
        assert all(is_right for *_, is_right in results), [r[:2] for r in results if not r[2]]


E4M3 = torch.float8_e4m3fn
WIRE_OPTIONS = [{}, {"bias": True, "activation": "gpt_oss"}, {"dtype": torch.float16, "fused": True},
                {"rank_invariant": True}, {"token_saving": False, "token_sorting": False}]


def as_sent(x):
    """Tokens as they arrive when they travel in FP8: quantised, and dequantised to their dtype."""
    if not len(x):
        return x
    q, scales = reference.quantize_fp8(x.cpu())
    return (q.float() * scales.repeat_interleave(128, 1)).to(x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_tokens_in_fp8_have_the_bits_of_quantised_tokens(ranks, weight_dtype, size):
    """In prefill, with and without a capacity, and in decoding."""

    def run(world, device):
        found = []
        for i, options in enumerate(WIRE_OPTIONS):
            num_experts = 2 * world.size + 1
            torch.manual_seed(i)
            twin = make(world, device, num_experts, weight_dtype, **options)
            options = options | {"dispatch_dtype": E4M3}
            moe = make(world, device, num_experts, weight_dtype, **options)
            fixed = make(world, device, num_experts, weight_dtype, **options, capacity=4 * TOKENS * K)
            for module in (moe, fixed):
                module.load_state_dict(twin.state_dict())
            for module in (moe, twin):
                module.enable_decode(TOKENS)
            for seed in range(2):
                x, idx, weight = inputs(world, device, num_experts, seed, moe.layer.dtype)
                x = x * torch.logspace(-2, 2, len(x), device=device)[:, None].to(x)
                sent = as_sent(x)
                with torch.no_grad():
                    want = twin(sent, idx, weight, decode=False)
                    found += [(i, "prefill", same(moe(x, idx, weight, decode=False), want)),
                              (i, "decode", same(moe(x, idx, weight, decode=True),
                                                 twin(sent, idx, weight, decode=True))),
                              (i, "capacity", same(fixed(x, idx, weight), want)),
                              (i, "rounded", not len(x) or not same(sent, x))]
                found.append((i, "with gradients enabled", same(moe(x, idx, weight, decode=False), want)))
            for module in (moe, twin, fixed):
                module.finalize()
        return found

    for results in ranks(run, world_size=size):
        assert all(is_right for *_, is_right in results), [r[:2] for r in results if not r[2]]


COMPUTE_OPTIONS = [{}, {"bias": True, "activation": "gpt_oss"}, {"dtype": torch.float16, "fused": True},
                   {"activation": "relu2", "fused": False}, {"rank_invariant": True}]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_computes_in_fp8_as_16_bits_do(ranks, weight_dtype, size):
    """With compute_dtype a layer has the bits of that of 16 bits with the dequantised weights."""

    def run(world, device):
        found = []
        for i, options in enumerate(COMPUTE_OPTIONS):
            num_experts = 2 * world.size + 1
            torch.manual_seed(i)
            options = options | {"compute_dtype": E4M3}
            moe = make(world, device, num_experts, weight_dtype, **options)
            twin = twin_of(moe, world, **options)
            fixed = make(world, device, num_experts, weight_dtype, **options, capacity=4 * TOKENS * K)
            fixed.load_state_dict(moe.state_dict())
            for seed in range(2):
                args = inputs(world, device, num_experts, seed, moe.layer.dtype)
                with torch.no_grad():
                    want = twin(*args)
                    found += [(i, "alone", same(moe(*args), want)), (i, "capacity", same(fixed(*args), want)),
                              (i, "numbers", not len(want) or bool(want.isfinite().all() and want.any()))]
            for module in (moe, twin, fixed):
                module.finalize()
        return found

    for results in ranks(run, world_size=size):
        assert all(is_right for *_, is_right in results), [r[:2] for r in results if not r[2]]


def test_moe_four_bit_computes_in_fp8_beside_decoding(ranks):
    """A module that multiplies in FP8 shares layer and parameters with one that decodes in 16 bits."""

    def run(world, device):
        moe = make(world, device, 24)
        prefill = epmoe.EPMoE(HIDDEN, INNER, 24, K, layer=moe.layer, weight_dtype="mxfp4", compute_dtype=E4M3)
        for name, p in moe.named_parameters():
            setattr(prefill, name, p)
        args, found = inputs(world, device, 24), []
        with torch.no_grad():
            want = prefill(*args)
            found.append(prefill.last_layout is not None)
            y = moe(*args)
            found.append(moe.last_layout is None and not same(y, want) and same(prefill(*args), want))
            moe.down_proj_scales.data += 1  # all weights of the second product are doubled
            found.append(same(prefill(*args), 2 * want))
        said = repr(prefill), outcome(lambda: prefill.enable_decode(4))
        check_outcomes([outcome(lambda: prefill(args[0].clone().requires_grad_(), *args[1:]))],
                       "RuntimeError", "MXFP4 has no gradients")
        moe.finalize()
        return found, *said

    for found, said, refusal in ranks(run):
        assert all(found), found
        assert "weights in MXFP4, products in FP8, " in said
        check_outcomes([refusal], "ValueError", "without compute_dtype")


@pytest.mark.cpu_only
@pytest.mark.parametrize("data, bound", [("normal", 0.08), ("heavy", 0.1)])
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_in_fp8_beside_float64(weight_dtype, data, bound):
    """Of the dequantised weights: the rounding of rows adds most of the error, in MXFP4 all of it."""
    world = epmoe.thread_worlds(1)[0]
    moe = make(world, "cpu", 4, weight_dtype, compute_dtype=E4M3)
    x, idx, weight = inputs(world, "cpu", 4)
    if data == "heavy":
        x = x * torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.02, 30, 1)
    up, down = (dequantized(moe, name).double() for name in NAMES)
    with torch.no_grad():
        y = moe(x.bfloat16(), idx, weight)
    want = reference.moe(x.bfloat16().double(), idx, weight.double(), up, down, "swiglu")
    assert (y.double() - want).norm() < bound * want.norm()
    moe.finalize()


def test_moe_four_bit_sends_fp8(ranks):
    """By itself in decoding, beside a module of the same layer that does not, and not with an adapter."""

    def run(world, device):
        moe = make(world, device, 24, dispatch_dtype=E4M3)
        plain = epmoe.EPMoE(HIDDEN, INNER, 24, K, layer=moe.layer, weight_dtype="mxfp4")
        plain.load_state_dict(moe.state_dict())
        x, idx, weight = inputs(world, device, 24)
        found = []
        with torch.no_grad():
            found.append(same(moe(x, idx, weight), plain(as_sent(x), idx, weight)))
            found.append(moe.last_layout is None and moe.layer.low_latency is not None)
            found.append(same(copy.deepcopy(moe)(x, idx, weight), moe(x, idx, weight)))
            found.append(same(plain(x, idx, weight), plain(x, idx, weight, decode=False)))
            for module in (moe, plain):
                module.add_adapter("a", 4, 8)
                module.set_adapter("a")
            found.append(same(moe(x, idx, weight), plain(x, idx, weight)))
        said = repr(moe), repr(plain)
        moe.finalize()
        return found, said

    for found, (moe, plain) in ranks(run):
        assert all(found), found
        assert "weights in MXFP4, tokens sent in FP8, " in moe and "tokens sent" not in plain


def test_moe_four_bit_modules_of_a_layer_that_send_other_dtypes(ranks):
    """A layer that modules share learns it only in a call: EpMismatch on all ranks."""

    def run(world, device):
        first = make(world, device, 8, max_tokens=1024)
        moe = epmoe.EPMoE(HIDDEN, INNER, 8, K, layer=first.layer, weight_dtype="mxfp4",
                          dispatch_dtype=E4M3 if world.rank == 1 else None)
        world.set_timeout(MISTAKE_LIMIT_S)
        args = inputs(world, device, 8)
        with torch.no_grad():
            got = outcome(lambda: moe(*args), first.layer)
            again = first(*args).isfinite().all().item()
        first.finalize()
        return got, again

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], "EpMismatch", "dispatch in FP8")
    assert all(again for _, again in results)


@pytest.mark.cpu_only
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_computes_what_a_checkpoint_says(weight_dtype):
    """Beside float64, from the numbers of the checkpoint."""
    world, format = epmoe.thread_worlds(1)[0], four_bit.as_format(weight_dtype)
    of = codes_of(4, format, bias=True)
    moe = make(world, "cpu", 4, weight_dtype, bias=True)
    moe.load_state_dict(deepseek(of) if weight_dtype == "mxfp4" else compressed(of))
    exact = {n: t.double() for n, t in in_16_bits(of, format, torch.float64).items()}
    x, idx, weight = inputs(world, "cpu", 4)
    with torch.no_grad():
        y = moe(x, idx, weight)
    want = reference.moe(x.double(), idx, weight.double(), exact["gate_up_proj"], exact["down_proj"],
                         "swiglu", exact["gate_up_proj_bias"], exact["down_proj_bias"])
    assert (y.double() - want).norm() < 0.01 * want.norm()
    moe.finalize()


def test_moe_four_bit_decodes_by_itself_and_shares_a_layer(ranks):
    def run(world, device):
        moe = make(world, device, 24)
        twin, other = (epmoe.EPMoE(HIDDEN, INNER, moe.layer.num_experts, K, layer=moe.layer, weight_dtype=w)
                       for w in (None, "mxfp4"))
        other.load_state_dict(moe.state_dict())
        with torch.no_grad():
            for name in NAMES:
                getattr(twin, name).copy_(dequantized(moe, name))
        args = inputs(world, device, 24)
        with torch.no_grad():
            y, z = moe(*args), other(*args)
            took_path = moe.last_layout is None and moe.layer.low_latency is not None
            again, want = copy.deepcopy(moe)(*args), twin(*args)
        moe.finalize()
        return took_path, same(y, z), same(y, again), same(y, want)

    assert all(all(r) for r in ranks(run))


@pytest.mark.cuda_only
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
@pytest.mark.parametrize("options", [{}, {"capacity": 4 * TOKENS * K},
                                     {"capacity": 4 * TOKENS * K, "compute_dtype": E4M3}], ids=str)
def test_moe_four_bit_in_a_cuda_graph(ranks, weight_dtype, options):
    """A captured layer is replayed with new tokens, between calls outside of the graph.

    Ranks that are threads do not replay graphs beside each other, so without torchrun there is one.
    """
    def run(world, device):
        moe, found = make(world, device, 8, weight_dtype, **options), []
        decode = not options
        if decode:
            moe.enable_decode(TOKENS)
        with torch.no_grad():
            fixed = [t[:5].clone() for t in inputs(world, device, 8, seed=world.rank)]
            moe(*fixed, decode=decode)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = moe(*fixed, decode=decode)
            for seed in range(6):
                g = torch.Generator().manual_seed(7 * seed + world.rank)
                fixed[0].copy_(torch.randn(len(fixed[0]), HIDDEN, generator=g))
                fixed[1].copy_(torch.rand(len(fixed[0]), 8, generator=g).topk(K).indices)
                graph.replay()
                got = y.clone()
                found.append(same(got, moe(*fixed, decode=False)) and bool(got.any()))
        moe.layer.synchronize()
        moe.finalize()
        return found

    assert all(all(r) for r in ranks(run, world_size=1))


@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_moves_experts(ranks, weight_dtype):
    """Replicas have numbers, scales and zero points; whole_state_dict knows where they are."""
    format = four_bit.as_format(weight_dtype)

    def run(world, device):
        of = codes_of(5, format)
        state = deepseek(of) if weight_dtype == "mxfp4" else compressed(of)
        moe = make(world, device, 5, weight_dtype, num_physical=(-(-5 // world.size) + 1) * world.size)
        moe.load_state_dict(state)
        twin = twin_of(moe, world, num_physical=moe.layer.num_experts)
        args = inputs(world, device, 5)
        with torch.no_grad():
            want = moe(*args, decode=False)
            expert_map = epmoe.balance_experts([9, 1, 1, 30, 1], world.size, moe.layer.num_experts)
            moe.set_expert_map(expert_map)
            twin.set_expert_map(expert_map)
            moved, as_twin = moe(*args, decode=False), twin(*args, decode=False)
            gathered = epmoe.whole_state_dict(moe)
            moe.load_state_dict(state)  # each physical expert takes its logical one
            loaded = moe(*args, decode=False)
            alone = outcome(moe.state_dict)
            moe.set_expert_map(None)
            back = moe(*args, decode=False)
        moe.finalize()
        twin.finalize()
        return (same(moved, as_twin), same(loaded, moved), same(back, want)), gathered, alone

    results = ranks(run, world_size=2)
    of = codes_of(5, format)
    wanted = whole(deepseek(of) if weight_dtype == "mxfp4" else compressed(of), 5)
    gathered = results[0][1]
    assert gathered.keys() == wanted.keys() and all(same(gathered[n], t) for n, t in wanted.items())
    assert all(all(facts) for facts, *_ in results)
    check_outcomes([alone for *_, alone in results], "RuntimeError", "set_expert_map(None)")


def over_nodes(nodes, weight_dtype, options):
    moe = make(nodes, "cpu", 8, weight_dtype, **options)
    twin = twin_of(moe, nodes, **options)
    sends = make(nodes, "cpu", 8, weight_dtype, **options, dispatch_dtype=E4M3)
    sends.load_state_dict(moe.state_dict())
    computes = make(nodes, "cpu", 8, weight_dtype, **options, compute_dtype=E4M3)
    computes.load_state_dict(moe.state_dict())
    computes_too = twin_of(moe, nodes, **options, compute_dtype=E4M3)
    found = []
    for seed in range(2):
        x, *args = inputs(nodes, "cpu", 8, seed)
        with torch.no_grad():
            found.append(same(computes(x, *args), computes_too(x, *args)))
            found += [same(moe(x, *args), twin(x, *args)), same(sends(x, *args), moe(as_sent(x), *args))]
    state = moe.state_dict()
    moe.load_state_dict(state)
    found.append(set(state) >= {f"{n}_{'blocks' if weight_dtype == 'mxfp4' else 'packed'}" for n in NAMES})
    for module in (moe, twin, sends, computes, computes_too):
        module.finalize()
    return found


@pytest.mark.cpu_only
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
@pytest.mark.parametrize("options", [{}, {"num_chunks": 3}, {"capacity": 4 * TOKENS * K,
                                                             "rail_capacity": TOKENS}], ids=str)
def test_moe_four_bit_over_nodes(weight_dtype, options):
    assert all(map(all, run_nodes(over_nodes, 2, 2, weight_dtype, options)))


# ---- checkpoints ----


def forms_of(weight_dtype, num_experts):
    """{name of a form: checkpoint with the experts one by one} of the same weights."""
    format = four_bit.as_format(weight_dtype)
    of = codes_of(num_experts, format, bias=True)
    if weight_dtype == "mxfp4":
        bytes_of = {k: t.view(torch.uint8) if k.endswith((".weight", ".scale")) else t
                    for k, t in deepseek(of).items()}
        fp4 = {k: t.view(torch.float4_e2m1fn_x2) if k.endswith(".weight") else t
               for k, t in bytes_of.items()}
        names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        renamed = {f"{e}.{names[w]}.{end}": t for k, t in deepseek(of).items()
                   for e, w, end in [k.split(".")]}
        return of, {"deepseek": deepseek(of), "bytes": bytes_of, "fp4": fp4, "other names": renamed}
    return of, {"compressed-tensors": compressed(of),
                "int64 order": compressed(of) | {f"{e}.{p}.weight_g_idx": torch.full((128,), -1)
                                                 for e, p in of},
                "gptq": by_columns(of, gptq, "qweight", "qzeros", "scales", "g_idx"),
                "gptq without order": by_columns(of, gptq, "qweight", "qzeros", "scales"),
                "awq": by_columns(of, awq, "qweight", "qzeros", "scales")}


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_loads_checkpoints(ranks, weight_dtype, size):
    """One by one or stacked, of all experts or of this rank: the same parameters."""

    def run(world, device):
        num_experts, failures, format = 2 * world.size, [], four_bit.as_format(weight_dtype)
        of, forms = forms_of(weight_dtype, num_experts)
        wanted, own = parameters_of(of, num_experts, format), mine(world, num_experts)
        moe = make(world, device, num_experts, weight_dtype, bias=True)
        model = nn.ModuleDict({"experts": moe})
        states = dict(forms)
        first, one_by_one = next(iter(forms.items()))
        states["this rank"] = {k: t for k, t in one_by_one.items()
                               if int(k.split(".")[0]) in range(own.start, own.stop)}
        states["stacked"] = whole(one_by_one, num_experts)
        states["stacked, this rank"] = {k: t[own] for k, t in states["stacked"].items()}
        states["its own state dict"] = None
        for name, state in states.items():
            state = {k: t.clone() for k, t in moe.state_dict().items()} if state is None else state
            with torch.no_grad():
                for p in moe.parameters():
                    p.fill_(1)
            model.load_state_dict({f"experts.{k}": t for k, t in state.items()}, assign="rank" in name)
            failures += [f"{name}: {n}" for n, p in moe.named_parameters()
                         if not same(p.detach().cpu(), wanted[n][own]) or p.requires_grad]
        moe.finalize()
        return failures, {n: (tuple(t.shape), t.dtype) for n, t in moe.state_dict().items()}

    of, forms = forms_of(weight_dtype, 2)
    wanted = whole(next(iter(forms.values())), 2)
    for failures, shapes in ranks(run, world_size=size):
        assert not failures
        assert {n: (s[1:], d) for n, (s, d) in shapes.items()} == {
            n: (tuple(t.shape[1:]), t.dtype) for n, t in wanted.items()}


@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_quantises_what_it_loads(ranks, weight_dtype):
    """Weights of 16 and 32 bits, stacked and one by one; and MXFP4 that were 16 bits are again the same."""
    format = four_bit.as_format(weight_dtype)

    def run(world, device):
        num_experts, failures = 2 * world.size, []
        plain = in_16_bits(codes_of(num_experts, format, bias=True), format, torch.bfloat16)
        own = mine(world, num_experts)
        moe = make(world, device, num_experts, weight_dtype, bias=True)
        gates = {"gate_proj": ("gate_up_proj", slice(0, INNER)), "down_proj": ("down_proj", slice(None)),
                 "up_proj": ("gate_up_proj", slice(INNER, None))}
        one_by_one = {f"{e}.{p}.{'bias' if end else 'weight'}": plain[name + end][e][rows]
                      for e in range(num_experts) for p, (name, rows) in gates.items()
                      for end in ("", "_bias")}
        for name, state in {"stacked": plain, "this rank": {k: t[own] for k, t in plain.items()},
                            "float32": {k: t.float() for k, t in plain.items()},
                            "one by one": one_by_one}.items():
            with torch.no_grad():
                for p in moe.parameters():
                    p.fill_(1)
            moe.load_state_dict(state)
            for n in NAMES:
                want = four_bit.quantize(format, plain[n], torch.bfloat16)
                got = [getattr(moe, n + end) for end in moe._format.ends]
                failures += [(name, n) for p, t in zip(got, want) if not same(p.detach().cpu(), t[own])]
                if weight_dtype == "mxfp4" and not same(dequantized(moe, n).cpu(), plain[n][own]):
                    failures.append((name, n, "other values"))
        moe.finalize()
        return failures

    assert not any(ranks(run, world_size=2))


@torch.no_grad()
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_starts_with_the_quantised_numbers_of_16_bits(weight_dtype):
    found = []
    for dtype in (None, weight_dtype):
        torch.manual_seed(5)
        found.append(make(epmoe.thread_worlds(1)[0], "cpu", 3, dtype, num_physical=4))
        found[-1].finalize()
    plain, moe = found
    for name in NAMES:
        want = four_bit.quantize(moe._format.format, getattr(plain, name), torch.bfloat16)
        for end, t in zip(moe._format.ends, want):
            t[3] = 0  # holds no expert
            assert same(getattr(moe, name + end), t)


def change(**entries):
    """A checkpoint with some entries changed: a function of the tensor, or None: without it."""

    def apply(checkpoint):
        for key, fn in entries.items():
            key = key.replace("__", ".")
            if fn is None:
                del checkpoint[key]
            else:
                checkpoint[key] = fn(checkpoint.get(key))
        return checkpoint

    return apply


def raised(t):
    return (t.view(torch.uint8) * 0 + 129).view(torch.float8_e8m0fnu)


MISTAKES = [
    ("mxfp4", "deepseek", {"0__w3__weight": None}, ("Missing", "0.w3.weight")),
    ("mxfp4", "deepseek", {"1__w2__scale": None}, ("Missing", "1.w2.scale")),
    ("mxfp4", "deepseek", {"0__w1__weight": lambda t: t[:64]}, ("0.w1: scales: wanted shape [64, 4]",)),
    ("mxfp4", "deepseek", {"0__w1__weight": lambda t: t[:64], "0__w1__scale": lambda t: t[:64]},
     ("0.w1: wanted weights [128, 128], got [64, 128]",)),
    ("mxfp4", "deepseek", {"1__w2__scale": raised}, ("1.w2: a scale is 2^2", "magnitude 16")),
    ("mxfp4", "deepseek", {"1__w2__weight": lambda t: torch.ones(128, 128)},
     ("1.w2.scale: is given, but the weights are torch.float32",)),
    ("mxfp4", "deepseek", {"1__w2__weight": lambda t: torch.ones(128, 128) * 16, "1__w2__scale": None},
     ("1.w2.weight: a scale is 2^2",)),
    ("mxfp4", "deepseek", {"1__w2__weight": lambda t: torch.ones(128, 64, dtype=torch.int32),
                           "1__w2__scale": None}, ("1.w2.weight: wanted float32, bfloat16 or float16, got",)),
    ("mxfp4", "deepseek", {"2__w2__weight": lambda t: torch.ones(128, 128)}, ("Unexpected", "2.w2.weight")),
    ("mxfp4", "deepseek", {"1__w2__weight": lambda t: 3}, ("1.w2.weight: wanted a tensor, got int",)),
    ("mxfp4", "whole", {"gate_up_proj_scales": None}, ("Missing", '"gate_up_proj_scales"')),
    ("mxfp4", "whole", {"gate_up_proj_blocks": None}, ("Missing", '"gate_up_proj_blocks"')),
    ("mxfp4", "whole", {"gate_up_proj": lambda t: torch.ones(2, 256, 128)},
     ("gate_up_proj: is given, but gate_up_proj_blocks is, too",)),
    ("mxfp4", "whole", {"down_proj": lambda t: torch.ones(2, 128, 128), "down_proj_blocks": None},
     ("down_proj_scales: is given, but the weights are torch.float32",)),
    ("mxfp4", "whole", {"down_proj_blocks": lambda t: t[:, :64], "down_proj_scales": lambda t: t[:, :64]},
     ("down_proj: wanted weights [2, 128, 128], got [2, 64, 128]",)),
    ("mxfp4", "whole", {"down_proj_blocks": lambda t: torch.cat((t, t[:1]))},
     ("down_proj: scales: wanted shape [3, 128, 4]",)),
    ("mxfp4", "whole", {"down_proj_packed": lambda t: torch.ones(2)}, ("Unexpected", "down_proj_packed")),
    ("int4", "compressed-tensors", {"0__up_proj__weight_packed": None},
     ("Missing", "0.up_proj.weight_packed")),
    ("int4", "compressed-tensors", {"0__up_proj__weight_scale": None}, ("Missing", "0.up_proj.weight_scale")),
    ("int4", "compressed-tensors", {"0__up_proj__weight_shape": lambda t: t + 1},
     ("0.up_proj.weight_shape: wanted [128, 128], got [129, 129]",)),
    ("int4", "compressed-tensors", {"0__up_proj__weight_zero_point": lambda t: torch.zeros(
        16, 4, dtype=torch.int32)}, ("0.up_proj: a zero point is not 8", "zero_points=True")),
    ("int4", "compressed-tensors", {"0__up_proj__weight_g_idx": lambda t: torch.arange(127, -1, -1) // 32},
     ("0.up_proj.weight_g_idx", "act-order")),
    ("int4", "compressed-tensors", {"0__up_proj__weight": lambda t: torch.ones(128, 128)},
     ("0.up_proj.weight_packed: is given, but 0.up_proj.weight is, too",)),
    ("int4", "compressed-tensors", {"0__up_proj__weight_scale": lambda t: t.float() * torch.inf},
     ("0.up_proj: scales: a scale is NaN or too large",)),
    ("int4", "gptq", {"0__up_proj__g_idx": lambda t: t.flip(0)}, ("0.up_proj.g_idx", "desc_act=False")),
    ("int4", "gptq", {"0__up_proj__qweight": lambda t: t[:8]},
     ("0.up_proj.qweight: wanted [16, 128], as GPTQ has it, or [128, 16], as AWQ has it, got [8, 128]",)),
    ("int4", "gptq", {"0__up_proj__qzeros": None}, ("Missing", "0.up_proj.qzeros")),
    ("int4", "awq", {"0__up_proj__scales": lambda t: t[:2]}, ("0.up_proj.scales: wanted shape [4, 128]",)),
    (Int4(64, True), "awq", {"0__up_proj__scales": None}, ("Missing", "0.up_proj.scales")),
    ("int4", "whole", {"down_proj_scale": None}, ("Missing", '"down_proj_scale"')),
    (Int4(64, True), "whole", {"down_proj_zero_point": lambda t: t[:, :8]}, ("down_proj: zero points",)),
]


@pytest.mark.parametrize("weight_dtype, form, entries, texts", MISTAKES,
                         ids=[f"{w}-{f}-{' '.join(e)}-{n}" for n, (w, f, e, _) in enumerate(MISTAKES)])
def test_moe_four_bit_checkpoint_mistakes(weight_dtype, form, entries, texts):
    """Nothing is loaded, and the error names the tensor."""
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2, weight_dtype, bias=True)
    _, forms = forms_of(weight_dtype, 2)
    forms["whole"] = whole(next(iter(forms.values())), 2)
    before = {name: p.clone() for name, p in moe.named_parameters()}
    got = outcome(lambda: moe.load_state_dict(change(**entries)(forms[form])))
    check_outcomes([got], "RuntimeError", *texts)
    assert all(same(p, before[name]) for name, p in moe.named_parameters())
    moe.finalize()


@pytest.mark.parametrize("weight_dtype, options, form, texts", [
    ("mxfp4", {"weight_dtype": None}, "deepseek", ("0.w1.weight", "[128, 128]")),
    ("mxfp4", {"activation": "gpt_oss"}, "deepseek", ("interleaved",)),
    ("mxfp4", {"weight_dtype": "int4"}, "whole", ("Missing", "gate_up_proj_packed", "gate_up_proj_blocks")),
    ("int4", {"weight_dtype": None}, "compressed-tensors", ("Unexpected", "0.gate_proj.weight_packed")),
    ("int4", {"weight_dtype": Int4(64)}, "compressed-tensors", ("scales: wanted shape [128, 2]",)),
    ("int4", {"weight_dtype": torch.float8_e4m3fn}, "whole", ("Missing", "gate_up_proj_scale_inv")),
    ("int4", {"weight_dtype": "mxfp4"}, "gptq", ("Missing", "0.gate_proj.weight", "0.gate_proj.qweight")),
], ids=str)
def test_moe_four_bit_checkpoints_of_other_formats_are_refused(weight_dtype, options, form, texts):
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2, **{"weight_dtype": weight_dtype, "bias": True} | options)
    _, forms = forms_of(weight_dtype, 2)
    forms["whole"] = whole(next(iter(forms.values())), 2)
    check_outcomes([outcome(lambda: moe.load_state_dict(forms[form]))], "RuntimeError", *texts)
    moe.finalize()


@pytest.mark.parametrize("assign", [False, True])
def test_moe_four_bit_lack_of_memory_in_the_middle_changes_nothing(monkeypatch, assign):
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2)
    _, forms = forms_of("mxfp4", 2)
    state = {k: t for k, t in forms["deepseek"].items() if not k.endswith("bias")}
    parameters = dict(moe.named_parameters())
    before = {name: p.clone() for name, p in parameters.items()}
    left, read = [3], four_bit.read_mxfp4

    def fails(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory")
        return read(*arguments)

    monkeypatch.setattr(four_bit, "read_mxfp4", fails)
    check_outcomes([outcome(lambda: moe.load_state_dict(state, assign=assign))], "OutOfMemoryError")
    for name, p in moe.named_parameters():
        assert p is parameters[name] and same(p, before[name]), name
    monkeypatch.undo()
    moe.load_state_dict(state)
    assert not same(moe.down_proj, before["down_proj"])
    moe.finalize()


def test_moe_loads_16_bits_by_the_names_of_mixtral():
    """w1, w3 and w2 are gate, up and down, whatever the format."""
    plain = in_16_bits(codes_of(2, Int4()), Int4(), torch.bfloat16)
    state = {}
    for e in range(2):
        gate, up = plain["gate_up_proj"][e].chunk(2)
        state |= {f"{e}.w1.weight": gate, f"{e}.w3.weight": up, f"{e}.w2.weight": plain["down_proj"][e]}
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2, None)
    moe.load_state_dict(state)
    assert all(same(p.detach(), plain[n]) for n, p in moe.named_parameters())
    moe.finalize()


# ---- mistakes ----


@pytest.mark.parametrize("how", ["x", "topk_weights", "parameter"])
@pytest.mark.parametrize("max_tokens", [TOKENS, 2048], ids=["decode", "prefill"])
def test_moe_four_bit_has_no_gradients(ranks, how, max_tokens):
    """A gradient that one rank wants is an error on all, and the next call works."""

    def run(world, device):
        moe = make(world, device, 24, "int4", max_tokens=max_tokens)
        last = world.rank == world.size - 1
        x, idx, weight = inputs(world, device, 24, seed=3)
        with torch.no_grad():
            want = moe(x, idx, weight)
        if last and how == "x":
            x = x.clone().requires_grad_()
        if last and how == "topk_weights":
            weight = weight.clone().requires_grad_()
        moe.down_proj_scales.requires_grad_(last and how == "parameter")
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: moe(x, idx, weight), moe.layer)
        with torch.no_grad():
            again = same(moe(x, idx, weight), want)
        moe.finalize()
        return got, again

    results = ranks(run, at_least=2)
    last = len(results) - 1
    check_outcomes([r[0] for r in results], ["PeerError"] * last + ["RuntimeError"],
                   "in INT4 has no gradients", "torch.no_grad()", on_rank=last, elsewhere=(f"rank {last}",))
    assert all(again for _, again in results)


@pytest.mark.parametrize("options, error, text", [
    ({"hidden": 96}, "ValueError", "hidden 96 with weights in mxfp4"),
    ({"inner": 96}, "ValueError", "inner 96"),
    ({"weight_dtype": Int4(128), "inner": 192}, "ValueError", "inner 192 with weights in int4"),
    ({"dtype": torch.float32}, "TypeError", "weights in MXFP4: must be torch.bfloat16"),
    ({"weight_dtype": "fp4"}, "ValueError", "'fp4'"), ({"weight_dtype": 4}, "TypeError", "weight_dtype 4"),
    ({"weight_dtype": torch.uint8}, "TypeError", "epmoe.Int4"),
    ({"delay_wgrad_compute": True}, "ValueError", "MXFP4 have no gradients"),
    ({"fuse_wgrad_accumulation": True}, "ValueError", "have no gradients"),
    ({"compute_dtype": E4M3, "wgrad_dtype": torch.bfloat16}, "ValueError", "wgrad_dtype with compute_dtype"),
    ({"compute_dtype": E4M3, "dispatch_dtype": E4M3}, "ValueError", "dispatch_dtype with compute_dtype"),
    ({"compute_dtype": E4M3, "token_saving": False}, "ValueError", "token_saving"),
    ({"compute_dtype": E4M3, "delay_wgrad_compute": True}, "ValueError", "MXFP4 have no gradients"),
    ({"compute_dtype": torch.float8_e5m2}, "TypeError", "compute_dtype torch.float8_e5m2"),
    ({"compute_dtype": E4M3}, "EpMismatch", "compute_dtype torch.float8_e4m3fn"),
    ({"dispatch_dtype": torch.float16}, "TypeError", "dispatch_dtype torch.float16: must be torch.float8"),
    ({"dispatch_dtype": E4M3, "hidden": 192}, "ValueError", "hidden 192 with dispatch_dtype"),
    ({"dispatch_dtype": E4M3, "weight_dtype": E4M3}, "ValueError", "only for weights of 4 bits"),
    ({"dispatch_dtype": E4M3, "weight_dtype": None}, "ValueError", "only for weights of 4 bits"),
    ({"dispatch_dtype": torch.bfloat16, "weight_dtype": None, "compute_dtype": E4M3}, "ValueError",
     "only for weights of 4 bits"),
    ({"dispatch_dtype": E4M3}, "EpMismatch", "dispatch_dtype torch.float8_e4m3fn"),
    ({"weight_dtype": None}, "EpMismatch", "weight_dtype"),
    ({"weight_dtype": "int4"}, "EpMismatch", "weight_dtype")], ids=str)
def test_moe_four_bit_wrong_arguments_on_one_rank(ranks, options, error, text):
    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        base = {"hidden": 128, "inner": 128, "num_experts": 4, "topk": 2, "ep_group": world, "device": device,
                "weight_dtype": "mxfp4", "max_tokens": TOKENS}
        got = outcome(lambda: keep(world, epmoe.EPMoE(**base | (options if world.rank == 1 else {}))))
        epmoe.EPMoE(**base).finalize()
        return got

    results = ranks(run, world_size=2, at_least=2)
    kinds = [error if error == "EpMismatch" or r == 1 else "PeerError" for r in range(len(results))]
    check_outcomes(results, kinds, text, on_rank=1)


def test_moe_four_bit_casts(ranks):
    """The numbers cannot be cast; a cast of the scales of INT4 is an error at the next call, on all ranks."""

    def run(world, device):
        moe, mx = make(world, device, 4, "int4"), make(world, device, 4)
        args = inputs(world, device, 4)
        with torch.no_grad():
            want = mx(*args)
            mx.half()
            stays = same(mx(*args), want) and mx.down_proj_scales.dtype == torch.uint8
        moe.bfloat16()  # changes nothing
        if world.rank == 1:
            moe.half()
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: moe(*args), moe.layer)
        moe.finalize()
        mx.finalize()
        return got, stays

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], ["PeerError", "TypeError"], "do not cast the module",
                   on_rank=1, elsewhere=("rank 1",))
    assert all(stays for _, stays in results)


class Doubled(nn.Module):
    def forward(self, t):
        return t * 2


def test_moe_four_bit_parametrizations_are_no_state_dicts():
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2, "int4")
    x, idx, weight = inputs(epmoe.thread_worlds(1)[0], "cpu", 2)
    state = moe.state_dict()
    with torch.no_grad():
        before = moe(x, idx, weight)
        nn.utils.parametrize.register_parametrization(moe, "down_proj_scales", Doubled())
        assert not same(moe(x, idx, weight), before)
    for call in (moe.state_dict, lambda: epmoe.whole_state_dict(moe), lambda: moe.load_state_dict(state),
                 moe.reset_parameters):
        check_outcomes([outcome(call)], "RuntimeError", "down_proj_scales", "parametrization")
    moe.finalize()


def test_moe_four_bit_says_what_it_is():
    moe = make(epmoe.thread_worlds(1)[0], "cpu", 2, Int4(64), rank_invariant=True)
    assert "weights in INT4" in repr(moe) and moe.weight_dtype == Int4(64) and not moe.is_fp8
    promises = epmoe.numerics(moe)
    assert promises.batch_invariant and promises.rank_invariant and not promises.trains_as_it_infers
    assert promises.reasons == {"trains_as_it_infers": "experts in INT4 have no gradients"}
    other = make(epmoe.thread_worlds(1)[0], "cpu", 2, moe.weight_dtype)
    named = make(epmoe.thread_worlds(1)[0], "cpu", 2, "int4")
    assert named.weight_dtype == Int4() and other.weight_dtype == Int4(64)
    assert not any(p.requires_grad for p in moe.parameters())
    for module in (moe, other, named):
        module.finalize()


# ---- ranks that are processes: torch.compile, checkpoints, fully_shard ----


def compile_and_load(world, device, weight_dtype, path):
    """Whether a compiled module has the bits of the module, and a checkpoint of one rank those of two."""
    torch._dynamo.reset()
    moe, sends = make(world, device, 5, weight_dtype), make(world, device, 5, weight_dtype,
                                                            dispatch_dtype=E4M3)
    results = []
    for module in (sends, moe):
        fast = torch.compile(module, backend="aot_eager", fullgraph=True)
        for seed in range(2):
            args = inputs(world, device, 5, seed)
            with torch.no_grad():
                results.append(same(fast(*args), module(*args, decode=False)))
    state = moe.state_dict()
    results.append(all(t.shape[0] == 5 for t in state.values()))  # the experts of all ranks
    dcp.load(state, checkpoint_id=path)
    moe.load_state_dict(state)
    format = four_bit.as_format(weight_dtype)
    wanted, own = parameters_of(codes_of(5, format), 5, format), mine(world, 5)
    results += [same(p[:own.stop - own.start], wanted[n][own]) for n, p in moe.named_parameters()]
    gathered = epmoe.whole_state_dict(moe)
    moe.finalize()
    sends.finalize()
    return results, gathered


def shard(world, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = make(epmoe.thread_worlds(1)[0], device, 4)
    got = outcome(lambda: fully_shard(alone, mesh=init_device_mesh("cpu", (2,))))
    alone.finalize()
    return got


@pytest.mark.long
@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("weight_dtype", FORMATS, ids=str)
def test_moe_four_bit_compiles_and_loads_checkpoints_of_other_ranks(ranks, weight_dtype, tmp_path):
    of = codes_of(5, four_bit.as_format(weight_dtype))
    state = deepseek(of) if weight_dtype == "mxfp4" else compressed(of)
    alone = make(epmoe.World(), "cpu", 5, weight_dtype)
    alone.load_state_dict(state)
    dcp.save(alone.state_dict(), checkpoint_id=tmp_path)
    alone.finalize()
    results = ranks.isolated(compile_and_load, weight_dtype, str(tmp_path), world_size=2)
    assert all(all(facts) for facts, _ in results)
    wanted, gathered = whole(state, 5), results[0][1]
    assert gathered.keys() == wanted.keys() and all(same(gathered[n], t) for n, t in wanted.items())
    assert results[1][1] == {}


@pytest.mark.cpu_only
def test_moe_four_bit_cannot_be_sharded(ranks):
    check_outcomes(ranks.isolated(shard, world_size=2), "ValueError", "MXFP4", "ignored_params", within_s=60)


def get_and_set(rank, size, weight_dtype):
    """Rank main: get_state_dict and set_state_dict of a model with experts of 4 bits and an adapter."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"moe": epmoe.EPMoE(HIDDEN, INNER, 4, K, max_tokens=TOKENS, device="cpu",
                                              weight_dtype=weight_dtype), "linear": nn.Linear(4, 4)})
    model.moe.add_adapter("a", 2, 2)
    model.moe.set_adapter("a")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    want = {name: p.clone() for name, p in model.named_parameters()}
    state, of_optimizer = copy.deepcopy(get_state_dict(model, optimizer))
    assert set(state) == set(model.state_dict()) != set(want)
    moments = [t.clone() for s in optimizer.state.values() for t in s.values()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for s in optimizer.state.values():
            for t in s.values():
                t.zero_()
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())
    assert all(map(torch.equal, moments, [t for s in optimizer.state.values() for t in s.values()]))
    model.moe.finalize()


@pytest.mark.cpu_only
@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_moe_four_bit_state_dicts_of_torch_distributed_checkpoint(weight_dtype):
    """Below another module: torch looks up each key of the state dict among the attributes of modules."""
    process_ranks(get_and_set, 2, weight_dtype)
