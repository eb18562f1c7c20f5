"""Experts of 4 bits in vLLM: vLLM's configurations choose epmoe's methods, which load, repack and multiply.

Four processes start once for stand-ins of vLLM's classes, and once for vLLM's own files if EPMOE_VLLM_SOURCE
names their folder (vllm_modules.py). They run all cases in groups of 1 and 2 ranks.
"""

import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist

import epmoe
import four_bit_cases
import vllm_modules
from cases import generator, process_ranks
from epmoe import Int4, reference
from epmoe.gemm.four_bit import Mxfp4

pytestmark = pytest.mark.cpu_only
NUM_RANKS = 4
SIZES = 1, 2
GRAPH = 5  # the most tokens of a rank in a CUDA graph
H, I, K, TOKENS = four_bit_cases.HIDDEN, four_bit_cases.INNER, four_bit_cases.K, four_bit_cases.TOKENS
BF16, F16 = torch.bfloat16, torch.float16
OURS = "epmoe.integrations.vllm_four_bits"
UNINTERLEAVED = {"swiglu_alpha": 1.25, "swiglu_limit": 5.0, "swiglu_beta": 1.0}
# (format, number of experts, activation of vLLM, attributes of its layer, epmoe's activation, dtype)
CASES = {
    "gpt-oss": (Mxfp4(), 8, "swigluoai", {}, "gpt_oss", BF16),
    "gpt-oss, uneven": (Mxfp4(), 7, "swigluoai", {"swiglu_limit": 3.0}, epmoe.GptOss(limit=3.0), BF16),
    "gpt-oss, no bias": (Mxfp4(), 8, "swigluoai", {"swiglu_alpha": 1.5}, epmoe.GptOss(1.5), F16),
    "DeepSeek-V4": (Mxfp4(), 7, "silu", {"swiglu_limit": 10.0}, epmoe.SwiGLU(limit=10.0), BF16),
    "int4": (Int4(32), 8, "silu", {}, "swiglu", BF16),
    "int4 of 128": (Int4(128), 8, "silu", {"swiglu_limit": 1.5}, epmoe.SwiGLU(limit=1.5), F16),
    "int4 with zeros": (Int4(64, zero_points=True), 7, "swigluoai_uninterleave", UNINTERLEAVED,
                        epmoe.SwiGLU(1.25, 5.0, 1), BF16),
    "weights on the input": (Int4(32), 8, "silu", {"apply_router_weight_on_input": True}, "swiglu", BF16),
}


def has_bias(name):
    return name in ("gpt-oss", "gpt-oss, uneven")


def topk_of(name):
    return 1 if "input" in name else K


def tokens_of(rank):
    return (5, 0, 9, 2)[rank]


# ---- in the ranks ----


def config_of(size, num_experts, activation, dtype=BF16, bias=False, topk=K, rank=0, **changes):
    """What the adapter reads of vLLM's FusedMoEConfig."""
    num, more = divmod(num_experts, size)
    parallel = dict(tp_size=1, pcp_size=1, dp_size=max(2, size), ep_size=size, tp_rank=0, pcp_rank=0,
                    dp_rank=0, ep_rank=rank, sp_size=1, use_ep=True, enable_eplb=False,
                    all2all_backend="allgather_reducescatter")
    if vllm_modules.is_loaded("source"):
        parallel = sys.modules[vllm_modules.OWN[3]].FusedMoEParallelConfig(**parallel)
    else:
        parallel = types.SimpleNamespace(**parallel, use_all2all_kernels=True)
    return types.SimpleNamespace(**dict(
        moe_parallel_config=parallel, num_experts=num_experts, num_local_experts=num + (rank < more),
        activation=sys.modules[vllm_modules.FOUR_BITS[0]].MoEActivation(activation),
        experts_per_token=topk, hidden_dim=H, hidden_dim_unpadded=H, intermediate_size_per_partition=I,
        in_dtype=dtype, device="cpu", max_num_tokens=TOKENS, is_lora_enabled=False,
        skip_final_all_reduce=False, moe_backend="auto", has_bias=bias, is_act_and_mul=True, tp_rank=0,
        rocm_aiter_fmoe_enabled=False, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None,
        activation_situ_beta=None, activation_situ_linear_beta=None, shared_expert_prefix=None,
        tp_size=1, tp_shard_with_padding=False, w13_num_shards=2) | changes)


def quantization_of(format, is_deepseek=False):
    """Return the configuration that vLLM makes for a checkpoint of this format."""
    if isinstance(format, Int4):
        config = configuration("compressed-tensors")()
        config.of_vllm = method_of_vllm(format)
        return config
    config = configuration("deepseek_v4_fp8" if is_deepseek else "gpt_oss_mxfp4")()
    config.of_vllm = vllm_modules.MXFP4_METHODS["Mxfp4MoEMethod" if is_deepseek else "GptOssMxfp4MoEMethod"]()
    return config


def configuration(name):
    return sys.modules[vllm_modules.QUANTIZATION].get_quantization_config(name)


def experts_of(own, num_experts):
    """What vLLM's ExpertMapManager says of the experts of a rank."""
    places = torch.full((num_experts,), -1, dtype=torch.int32)
    places[own.start:own.stop] = torch.arange(len(own), dtype=torch.int32)
    return types.SimpleNamespace(
        local_num_experts=len(own), placement_strategy="linear", expert_map=places, expert_mask=None,
        routing_tables=None, map_global_to_local=lambda e: int(places[e]))


def layer_of(quantization, moe, own, dtype=BF16, **attributes):
    return sys.modules[vllm_modules.MOE].RoutedExperts(
        "layer.experts", dtype, moe, quantization, experts_of(own, moe.num_experts), **attributes)


def method_of_vllm(format, **changes):
    """What vLLM's compressed-tensors chooses for this format."""
    quant = dict(num_bits=4, type="int", strategy="group", group_size=format.group_size,
                 symmetric=not format.zero_points, actorder=None)
    others = {name: changes.pop(name) for name in ("input_quant",) if name in changes}
    return types.SimpleNamespace(weight_quant=types.SimpleNamespace(**quant | changes),
                                 **{"input_quant": None} | others)


def load(layer, name, of, own):
    """Load the experts of a rank, as vLLM's models do: gpt-oss all at once, others one by one."""
    if name.startswith("gpt-oss"):
        state = four_bit_cases.whole(four_bit_cases.deepseek(of), 1 + max(e for e, _ in of))
        for name, to in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            for end, t in (("weight", state[f"{name}_blocks"].flatten(-2)),
                           ("weight_scale", state[f"{name}_scales"]), ("bias", state.get(f"{name}_bias"))):
                if t is not None:
                    param = getattr(layer, f"{to}_{end}")
                    param.weight_loader(param, t[own.start:own.stop], f"{to}_{end}", None, None)
        return
    shards = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "w1", "w3": "w3", "w2": "w2"}
    checkpoint = four_bit_cases.deepseek if name == "DeepSeek-V4" else four_bit_cases.compressed
    for key, t in checkpoint(of).items():
        e, projection, end = key.split(".")
        shard, end = shards[projection], "weight_scale" if end == "scale" else end
        name = f"{'w2' if shard == 'w2' else 'w13'}_{end}"
        param = getattr(layer, name)
        param.weight_loader(param, t, name, shard, int(e))


def make_layer(name, of, size, place):
    """Return the loaded layer of vLLM on a rank of a group."""
    format, num_experts, activation, attributes, _, dtype = CASES[name]
    num, more = divmod(num_experts, size)
    first = place * num + min(place, more)
    own = range(first, first + num + (place < more))
    moe = config_of(size, num_experts, activation, dtype, has_bias(name), topk_of(name), place)
    layer = layer_of(quantization_of(format, name == "DeepSeek-V4"), moe, own, dtype, **attributes)
    assert type(layer.quant_method).__module__ == OURS
    # vLLM keeps what holds a loader, unless the loader is a method of the layer.
    assert all(p.weight_loader.__self__ is layer for p in layer.parameters())
    # By this vLLM's gpt-oss knows how to load single experts.
    assert getattr(layer.quant_method, "weight_dtype", None) == ("gpt_oss_mxfp4" if isinstance(format, Mxfp4)
                                                                 else None)
    load(layer, name, of, own)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def run_case(integration, name, group, size, rank):
    """Return the output of a layer of vLLM, also with CUDA graphs, that of an EPMoE, and what it must be."""
    format, num_experts, _, _, ours, dtype = CASES[name]
    topk, first = topk_of(name), rank // size * size
    of = four_bit_cases.codes_of(num_experts, format, dtype, bias=has_bias(name))
    integration._graph_options = lambda moe: {}
    layer = make_layer(name, of, size, rank - first)
    integration._graph_options = lambda moe: {"graph_tokens": GRAPH}
    captured = make_layer(name, of, size, rank - first)
    for p in captured.parameters():  # as after vLLM has loaded new weights into other memory
        before = p.data
        p.data = before.clone()
        before.zero_()
    most = torch.tensor([tokens_of(r) for r in range(first, first + size)])
    integration.get_forward_context = lambda: types.SimpleNamespace(
        dp_metadata=types.SimpleNamespace(num_tokens_across_dp_cpu=most))
    g = generator(len(name), rank)
    x = torch.randn(tokens_of(rank), H, generator=g).to(dtype)
    idx = torch.rand(len(x), num_experts, generator=g).topk(topk).indices.int()
    idx[torch.rand(idx.shape, generator=g) < 0.1] = -1
    weight = torch.rand(idx.shape, generator=g)
    on_input = layer.apply_router_weight_on_input
    with torch.inference_mode():
        got, fixed = (of_vllm.quant_method.apply(of_vllm, x, weight, idx, None, None)
                      for of_vllm in (layer, captured))
    if on_input:
        x, weight = x * weight.to(dtype), torch.ones_like(weight)
    twin = epmoe.EPMoE(H, I, num_experts, topk, group, activation=ours, max_tokens=TOKENS, dtype=dtype,
                       device="cpu", bias=has_bias(name),
                       weight_dtype="mxfp4" if isinstance(format, Mxfp4) else format)
    if isinstance(format, Mxfp4):
        twin.load_state_dict(four_bit_cases.whole(four_bit_cases.deepseek(of), num_experts))
    else:
        twin.load_state_dict(four_bit_cases.compressed(of))
    with torch.no_grad():
        same = twin(x, idx, weight, decode=False)
    twin.finalize()
    exact = {n: t.double() for n, t in four_bit_cases.in_16_bits(of, format, torch.float64).items()}
    want = reference.moe(x.double(), idx, weight.double(), exact["gate_up_proj"], exact["down_proj"], ours,
                         exact.get("gate_up_proj_bias"), exact.get("down_proj_bias"))
    return got, fixed, same, want


def choices():
    """For each change of a layer, whether epmoe's method is chosen."""
    from epmoe.integrations import vllm_four_bits

    def chosen(format, activation="silu", config=None, method=None, **attributes):
        quantization = quantization_of(format)
        if method is not None:
            quantization.of_vllm = method
        kind = sys.modules[vllm_modules.MOE].RoutedExperts
        layer = kind.__new__(kind)  # its method alone
        torch.nn.Module.__init__(layer)
        layer.moe_config = moe = config_of(1, 4, activation, **config or {})
        layer.activation = moe.activation
        layer.swiglu_limit = layer.swiglu_alpha = layer.swiglu_beta = None
        vars(layer).update(attributes)
        chosen = quantization.get_quant_method(layer, "layer.experts")
        return type(chosen).__name__ in ("Mxfp4Method", "Int4Method")

    def parallel(**changes):
        of = config_of(1, 4, "silu").moe_parallel_config
        return {"moe_parallel_config": types.SimpleNamespace(**vars(of) | {"use_all2all_kernels": True}
                                                             | changes)}

    found = {"as they are": chosen(Mxfp4(), "swigluoai") and chosen(Int4()) and chosen(Int4(128, True))}
    found |= {f"not {name}": not chosen(*args, **options) for name, args, options in (
        ("without expert parallelism", (Mxfp4(), "swigluoai"),
         {"config": parallel(use_all2all_kernels=False)}),
        ("with --moe-backend", (Int4(),), {"config": {"moe_backend": "marlin"}}),
        ("with EPLB", (Int4(),), {"config": parallel(enable_eplb=True)}),
        ("with LoRA", (Int4(),), {"config": {"is_lora_enabled": True}}),
        ("in float32", (Int4(),), {"config": {"dtype": torch.float32}}),
        ("with other sizes", (Int4(),), {"config": {"intermediate_size_per_partition": 96}}),
        ("with groups that do not fit", (Int4(128),), {"config": {"hidden_dim": 192}}),
        ("with another activation", (Int4(), "gelu"), {}),
        ("with another beta", (Mxfp4(), "swigluoai"), {"swiglu_beta": 0.0}),
        *((f"without {name}", (Int4(), "swigluoai_uninterleave"), UNINTERLEAVED | {name: None})
          for name in UNINTERLEAVED),  # vLLM has other defaults
        ("without a gate", (Int4(),), {"config": {"is_act_and_mul": False}}),
        ("with biases in INT4", (Int4(),), {"config": {"bias": True}}),
        ("with quantized tokens", (Int4(),), {"method": method_of_vllm(Int4(), input_quant="fp8")}),
        ("of 8 bits", (Int4(),), {"method": method_of_vllm(Int4(), num_bits=8)}),
        ("of channels", (Int4(),), {"method": method_of_vllm(Int4(), strategy="channel")}),
        ("of groups of 16", (Int4(),), {"method": method_of_vllm(Int4(), group_size=16)}),
        ("with act-order", (Int4(),), {"method": method_of_vllm(Int4(), actorder="group")}),
        ("of another method", (Int4(),), {"method": "UnquantizedFusedMoEMethod"}))}
    found["with numbers"] = chosen(Int4(), "swigluoai_uninterleave", **UNINTERLEAVED)
    fast = vllm_four_bits.capabilities
    vllm_four_bits.capabilities = lambda device: types.SimpleNamespace(has_hopper=device.index == 3)
    found["on Hopper"] = chosen(Int4(), config={"device": "cuda:3"})
    found["not on another GPU"] = not chosen(Int4(), config={"device": "cuda:2"})
    vllm_four_bits.capabilities = fast
    for name in ("gpt_oss_mxfp4", "deepseek_v4_fp8", "compressed-tensors"):  # vLLM sends it to its workers
        kind = configuration(name)
        found[f"{name} can be pickled"] = type(pickle.loads(pickle.dumps(kind()))) is kind
        found[f"{name} is epmoe's"] = kind.__module__ == OURS
    quantization = quantization_of(Int4())
    found["other layers"] = quantization.get_quant_method(torch.nn.Linear(2, 2), "") is quantization.of_vllm
    return found


def errors():
    """The message for weights that epmoe's kernels cannot read."""
    layer = layer_of(quantization_of(Mxfp4()), config_of(1, 4, "swigluoai"), range(4))
    layer.w2_weight_scale.data.fill_(200)
    try:
        layer.quant_method.process_weights_after_loading(layer)
    except ValueError as error:
        return str(error)


def main(rank, world_size, which):
    vllm_modules.load(which, four_bits=True)
    from epmoe.integrations import vllm as integration

    integration.use()
    if which == "source":
        vllm_modules.prepare_kernel()
    mode = types.SimpleNamespace(name="NONE")
    integration.get_current_vllm_config_or_none = lambda: types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=0,
                                                 cudagraph_mm_encoder=False),
        parallel_config=types.SimpleNamespace(enable_elastic_ep=False))
    results = {}
    for size in SIZES:
        groups = [dist.new_group(list(range(r, r + size))) for r in range(0, NUM_RANKS, size)]
        mine = groups[rank // size]
        integration.get_ep_group = lambda mine=mine: types.SimpleNamespace(cpu_group=mine)
        for name in CASES:
            results[size, name] = run_case(integration, name, mine, size, rank)
    return results, choices(), errors()


def changed(rank, world_size):
    """What the adapter says where vLLM's classes for experts of 4 bits have changed."""
    vllm_modules.load("stand-in")
    base = sys.modules[vllm_modules.OWN[0]].FusedMoEExpertsModular
    base.workspace_shapes = lambda self, M: None
    from epmoe.integrations import vllm as integration

    integration.use()
    warning = integration.logger.warning.call_args.args
    return warning[0] % warning[1:], configuration("gpt_oss_mxfp4").__module__


# ---- the tests ----


@pytest.fixture(scope="module", params=("stand-in", "source"))
def results(request):
    if request.param == "source":
        vllm_modules.SOURCE.need()
    return process_ranks(main, NUM_RANKS, request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_integrations_vllm_four_bits_has_the_bits_of_the_module(results, name, size):
    for outputs, *_ in results:
        got, fixed, same, want = outputs[size, name]
        assert four_bit_cases.same(got, same) and four_bit_cases.same(fixed, same)
        if len(want):
            assert (got.double() - want).norm() < 0.01 * want.norm() and want.any()
    assert [len(outputs[size, name][0]) for outputs, *_ in results] == [*map(tokens_of, range(NUM_RANKS))]


def test_integrations_vllm_four_bits_chooses(results):
    for _, found, _ in results:
        assert len(found) > 20 and all(found.values()), [name for name, is_right in found.items()
                                                         if not is_right]


def test_integrations_vllm_four_bits_names_the_weights(results):
    for *_, message in results:
        assert message and message.startswith("layer.experts.w2_weight: a scale is 2^73")


def test_integrations_vllm_four_bits_leaves_changed_classes_alone():
    (message, module), = process_ranks(changed, 1, backend=None)
    assert message.startswith("epmoe does not multiply experts of 4 bits: vllm 0.33.0: ")
    assert "FusedMoEExpertsModular.workspace_shapes has changed" in message
    assert module == "vllm_modules"
