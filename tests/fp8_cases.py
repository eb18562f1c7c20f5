"""EPMoE with weights in FP8: checkpoints, modules and inputs for tests."""

import torch

import epmoe
from cases import generator, keep
from epmoe.gemm.activations import is_gated

E4M3 = torch.float8_e4m3fn
HIDDEN, TOKENS, K = 256, 9, 2


def experts_of(num_experts, inner=128, activation="swiglu", bias=False, seed=1):
    """A checkpoint in 16 bits, with the experts one by one."""
    g, found = generator(seed), {}
    projections = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    if not is_gated(activation):
        del projections["gate_proj"]
    for e in range(num_experts):
        for name, (n, k) in projections.items():
            # blocks of different magnitude, so that a wrong scale is seen
            size = 2.0 ** torch.randint(-3, 2, (-(-n // 128), -(-k // 128)), generator=g)
            size = size.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            found[f"{e}.{name}.weight"] = (torch.randn(n, k, generator=g) * size / k**0.5).bfloat16()
            if bias:
                found[f"{e}.{name}.bias"] = torch.randn(n, generator=g).bfloat16()
    return found


def in_fp8(checkpoint):
    """The same in FP8, as DeepSeek-V3's."""
    found = {}
    for key, t in checkpoint.items():
        if key.endswith("bias"):
            found[key] = t
            continue
        q, scales = epmoe.quantize_fp8_weight(t[None])
        found |= {key: q[0], key + "_scale_inv": scales[0]}
    return found


def stacked(checkpoint, num_experts):
    """The same with the experts of a parameter of EPMoE in one tensor."""
    found = {}
    for kind, ending in (("weight", ""), ("weight_scale_inv", "_scale_inv"), ("bias", "_bias")):
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            each = [[checkpoint[key] for part in parts if (key := f"{e}.{part}.{kind}") in checkpoint]
                    for e in range(num_experts)]
            if each[0]:
                found[name + ending] = torch.stack([torch.cat(of_one) for of_one in each])
    return found


def make(world, device, num_experts, inner=128, load=True, **options):
    options = {"max_tokens": TOKENS, "device": device, "weight_dtype": E4M3} | options
    moe = epmoe.EPMoE(HIDDEN, inner, num_experts, K, world, **options)
    keep(world, moe)
    if load:
        activation, bias = moe.activation, moe.down_proj_bias is not None
        plain = experts_of(num_experts, inner, activation, bias)
        moe.load_state_dict(stacked(plain, num_experts) if activation == "gpt_oss" else in_fp8(plain))
    return moe


def inputs(world, device, num_experts, seed=0, dtype=torch.bfloat16):
    """x, indices and weights of a rank. Some ranks have no tokens, and some choices are dropped."""
    g, t = generator(seed, world.rank), (TOKENS + 3 * seed - 4 * world.rank) % (TOKENS + 1)
    idx = torch.rand(t, num_experts, generator=g).topk(K).indices
    idx[torch.rand(t, K, generator=g) < 0.1] = -1
    x = torch.randn(t, HIDDEN, generator=g) * 2.0 ** torch.randint(-3, 3, (t, 1), generator=g)
    return [v.to(device) for v in (x.to(dtype), idx, torch.rand(t, K, generator=g))]
