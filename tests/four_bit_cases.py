"""Weights of 4 bits for tests: the forms of checkpoints, made by loops from the definitions of formats."""

import itertools

import torch

import epmoe
from cases import generator, keep
from epmoe.gemm import four_bit
from epmoe.gemm.four_bit import Mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def random_codes(*shape, seed=0):
    return torch.randint(16, shape, generator=generator(*shape, seed), dtype=torch.uint8)


def word_of(nibbles):
    """The int32 with these nibbles, the first in the lowest bits."""
    word = sum(int(nibble) << 4 * n for n, nibble in enumerate(nibbles))
    return word - (word >> 31 << 32)


def words_of(rows):
    """int32 [R, C/8] of codes [R, C]."""
    return torch.tensor([[word_of(row[c:c + 8]) for c in range(0, len(row), 8)] for row in rows.tolist()],
                        dtype=torch.int32)


def weights_of(codes, scales, zeros):
    """The exact weights [N, K], float64.  scales, zeros: [N, K/group]."""
    group = codes.shape[1] // scales.shape[1]
    zeros = torch.full(scales.shape, 8) if zeros is None else zeros
    return torch.tensor([[(int(codes[n, k]) - int(zeros[n, k // group])) * float(scales[n, k // group])
                          for k in range(codes.shape[1])] for n in range(len(codes))], dtype=torch.float64)


def same(got, want):
    """Whether two tensors have the same dtype and the same bits."""
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(
        got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def low_first(codes):
    """Blocks of gpt-oss [N, K/32, 16]."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).unflatten(1, (-1, 16))


def gptq(codes, scales, zeros, is_v2=False):
    """(qweight, qzeros, scales, g_idx) of one matrix, as GPTQ stores them."""
    stored = (torch.full(scales.shape, 8) if zeros is None else zeros.long())
    stored = stored if is_v2 else stored - 1
    group = codes.shape[1] // scales.shape[1]
    return (words_of(codes).T.contiguous(), words_of(stored.T), scales.T.contiguous(),
            torch.tensor([k // group for k in range(codes.shape[1])], dtype=torch.int32))


def awq(codes, scales, zeros):
    """(qweight, qzeros, scales) of one matrix, as AWQ stores them."""
    zeros = torch.full(scales.shape, 8) if zeros is None else zeros

    def pack(rows):  # [R, N]
        return torch.tensor([[word_of([row[c + n] for n in AWQ_ORDER]) for c in range(0, len(row), 8)]
                             for row in rows.tolist()], dtype=torch.int32)

    return pack(codes.T), pack(zeros.T), scales.T.contiguous()


# ---- EPMoE ----

HIDDEN, INNER, TOKENS, K = 128, 128, 9, 2
PROJECTIONS = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def codes_of(num_experts, format, dtype=torch.bfloat16, bias=False, seed=1):
    """{(expert, projection): (codes [N, K], scales and zeros [N, K/group], bias [N])} of random weights."""
    g, found = generator(seed), {}
    for e in range(num_experts):
        for name, (n, k) in PROJECTIONS.items():
            groups = n, k // format.group_size
            if isinstance(format, Mxfp4):
                scales, zeros = torch.randint(120, 126, groups, generator=g, dtype=torch.uint8), None
            else:
                scales = (torch.rand(groups, generator=g) * 0.02).to(dtype)
                zeros = torch.randint(1, 16, groups, generator=g, dtype=torch.uint8)
            codes = torch.randint(16, (n, k), generator=g, dtype=torch.uint8)
            found[e, name] = (codes, scales, zeros if format.zero_points else None,
                              torch.randn(n, generator=g).to(dtype) if bias else None)
    return found


def parameters_of(of, num_experts, format):
    """{name: tensor of all experts} of what codes_of returns, in the layout of the kernels."""
    found = {}
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        codes, scales, zeros, bias = (None if of[0, parts[0]][i] is None else torch.stack([
            torch.cat([of[e, part][i] for part in parts]) for e in range(num_experts)]) for i in range(4))
        found |= {name: four_bit.pack(format, codes), f"{name}_scales": four_bit.pack_scales(format, scales)}
        if zeros is not None:
            found[f"{name}_zeros"] = four_bit.pack_scales(format, zeros)
        if bias is not None:
            found[f"{name}_bias"] = bias
    return found


def deepseek(of):
    """A checkpoint with the experts one by one, as DeepSeek-V4 has them."""
    found = {}
    for (e, name), (codes, scales, _, bias) in of.items():
        key = f"{e}.{ {'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'}[name]}"
        found[f"{key}.weight"] = (codes[:, 0::2] + 16 * codes[:, 1::2]).view(torch.int8)
        found[f"{key}.scale"] = scales.view(torch.float8_e8m0fnu)
        if bias is not None:
            found[f"{key}.bias"] = bias
    return found


def compressed(of):
    """A checkpoint with the experts one by one, as compressed-tensors has them."""
    found = {}
    for (e, name), (codes, scales, zeros, bias) in of.items():
        key = f"{e}.{name}"
        found |= {f"{key}.weight_packed": words_of(codes), f"{key}.weight_scale": scales,
                  f"{key}.weight_shape": torch.tensor(codes.shape)}
        if zeros is not None:
            found[f"{key}.weight_zero_point"] = words_of(zeros.T).T
        if bias is not None:
            found[f"{key}.bias"] = bias
    return found


def by_columns(of, pack, *names):
    """A checkpoint with the experts one by one, as GPTQ and AWQ have them.  pack: gptq or awq."""
    found = {}
    for (e, name), (*parts, bias) in of.items():
        found |= {f"{e}.{name}.{n}": t for n, t in zip(names, pack(*parts))}
        if bias is not None:
            found[f"{e}.{name}.bias"] = bias
    return found


def whole(one_by_one, num_experts):
    """The same checkpoint of DeepSeek-V4 or compressed-tensors with all experts in one tensor."""
    found = {}
    is_deepseek = "0.w1.weight" in one_by_one
    endings = ({"weight": "_blocks", "scale": "_scales"} if is_deepseek else
               {"weight_packed": "_packed", "weight_scale": "_scale", "weight_zero_point": "_zero_point"})
    names = {"gate_up_proj": ("w1", "w3") if is_deepseek else ("gate_proj", "up_proj"),
             "down_proj": ("w2",) if is_deepseek else ("down_proj",)}
    for (name, parts), (of, to) in itertools.product(names.items(), [*endings.items(), ("bias", "_bias")]):
        if f"0.{parts[0]}.{of}" in one_by_one:
            t = torch.stack([torch.cat([one_by_one[f"{e}.{part}.{of}"] for part in parts])
                             for e in range(num_experts)])
            if is_deepseek and of != "bias":
                t = t.view(torch.uint8).unflatten(-1, (-1, 16)) if of == "weight" else t.view(torch.uint8)
            found[name + to] = t
    return found


def in_16_bits(of, format, dtype):
    """{parameter: tensor of all experts} of the same weights in 16 bits."""
    num_experts = 1 + max(e for e, _ in of)
    held = parameters_of(of, num_experts, format)
    found = {name: t for name, t in held.items() if name.endswith("_bias")}
    for name in ("gate_up_proj", "down_proj"):
        found[name] = four_bit.dequantize(format, held[name], held[f"{name}_scales"],
                                          held.get(f"{name}_zeros"), dtype)
    return found


def dequantized(moe, name):
    """The weights of one parameter of a module in 16 bits."""
    return four_bit.dequantize(moe._format.format, getattr(moe, name), getattr(moe, f"{name}_scales"),
                               getattr(moe, f"{name}_zeros", None), moe.layer.dtype)


def make(world, device, num_experts, weight_dtype="mxfp4", **options):
    options = {"max_tokens": TOKENS, "device": device} | options
    moe = epmoe.EPMoE(HIDDEN, INNER, num_experts, K, world, weight_dtype=weight_dtype, **options)
    keep(world, moe)
    return moe


def inputs(world, device, num_experts, seed=0, dtype=torch.bfloat16):
    """x, indices and weights of a rank.  Some ranks have no tokens, and some choices are dropped."""
    g, t = generator(seed, world.rank), (TOKENS + 3 * seed - 4 * world.rank) % (TOKENS + 1)
    idx = torch.rand(t, num_experts, generator=g).topk(K).indices
    idx[torch.rand(t, K, generator=g) < 0.1] = -1
    x = torch.randn(t, HIDDEN, generator=g)
    return [v.to(device) for v in (x.to(dtype), idx, torch.rand(t, K, generator=g))]
