"""Problems for the grouped GEMM, the comparison of its results with sums in float64, and its kernels."""

import pytest
import torch

import epmoe
from cases import generator
from epmoe import reference
from epmoe.gemm.activations import is_gated

# Rows of each expert: none, one, a part of a tile, several tiles; "hot": one expert has most of the rows.
SIZES = {"mixed": [1, 0, 64, 130, 17, 200], "hot": [0, 0, 700, 1], "single": [300], "empty": [0, 0, 0],
         "many": [3] * 128}
ACTIVATIONS = [None, "gelu", "swiglu", "gpt_oss", epmoe.GptOss(alpha=1.3, limit=0.6),
               epmoe.SwiGLU(limit=0.6), epmoe.SwiGLU(1.3, 0.6, 1), "geglu_tanh",
               "relu2", "gelu_tanh", "silu"]
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 2.0**-24}  # float16's smallest number
# N of gate and up, K, L, rows of the first GEMM in models, for the experts of one of four ranks.
MODELS = {
    "seed": (3072, 1536, 96, 183501),
    "dsv3": (4096, 7168, 64, 65536),
    "qwen3-235b": (3072, 4096, 32, 65536),
    "mixtral": (28672, 4096, 2, 16384),
    "gpt-oss": (5760, 2880, 32, 32768),
}


BLIND = "the profiler sees no work of this GPU"


def needs_hopper():
    """Skip a test of the kernels for few rows on other GPUs.  Not a mark: asking for the GPU while modules
    are imported would initialise CUDA in the processes that are forked from them.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has kernels for few rows")


def kernel_names(fn):
    """The kernels that fn launches on the GPU; none if the profiler sees no work of this GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def problem(sizes, n, k, dtype, device, seed=0, before=3, after=5):
    """x [M, K], weight [L, N, K], bias, row_weight, offsets; rows that belong to no expert are NaN."""
    g = generator(seed, n, k, len(sizes), sum(sizes))
    rows = before + sum(sizes) + after
    x = torch.randn(rows, k, generator=g)
    x[:before] = float("nan")
    x[before + sum(sizes):] = float("nan")
    weight = torch.randn(len(sizes), n, k, generator=g) / k**0.5
    bias = torch.randn(len(sizes), n, generator=g)
    offsets = torch.tensor([before, *sizes]).cumsum(0).to(torch.int32)
    x, weight, bias = (t.to(dtype).to(device) for t in (x, weight, bias))
    return x, weight, bias, torch.rand(rows, generator=g).to(device), offsets.to(device)


def check(got, want, size, what):
    """Allow |got - want| one rounding of the result and the error of a float32 sum of terms; `size` is the
    sum of the absolute terms.
    """
    got, slack = got.double(), EPS[got.dtype] * want.abs() + 2.0**-19 * size + TINY[got.dtype]
    errors = ((got - want).abs() / slack).nan_to_num(float("inf"))
    worst = errors.max().item() if want.numel() else 0.0
    assert worst <= 1, (f"{what}: the error of number {errors.argmax().item()} of {list(want.shape)} is "
                        f"{worst} times the allowed rounding error")


def products64(x, weight):
    """x @ weight.t() in float64, and the same sum of the absolute terms."""
    x, weight = x.double(), weight.double()
    return x @ weight.t(), x.abs() @ weight.abs().t()


def finish64(y, size, bias, activation, row_weight):
    """(y, size) of the output for a result of products64. bias: [N], or [M, N] with one of each row."""
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    if activation == "relu2":  # an error of one factor is multiplied by the other factor
        size = 2 * (size + 1)**2
    elif activation is not None and is_gated(activation):
        is_mixed = activation == "gpt_oss" or isinstance(activation, epmoe.GptOss)
        gate, up = (size[:, 0::2], size[:, 1::2]) if is_mixed else size.chunk(2, -1)
        size = 2 * (gate + 1) * (up + 1)
    y = y if activation is None else reference.activate(y, activation)
    if row_weight is None:
        return y, size
    return y * row_weight.double()[:, None], size * row_weight.double()[:, None]


def forward64(x, weight, bias, activation, row_weight):
    """(y, size) in float64: an expert's output, and the sum of the absolute terms for check()."""
    return finish64(*products64(x, weight), bias, activation, row_weight)


def kernels(ranks):
    """Values of `portable`. On a GPU, True selects the kernel for any GPU. The CPU has one implementation."""
    return (False,) if ranks.device.type == "cpu" else (False, True)


def rows_of_experts(offsets):
    """(expert, first row, end) of each expert."""
    ends = offsets.tolist()
    return [(e, begin, end) for e, (begin, end) in enumerate(zip(ends, ends[1:]))]


def bits(t):
    return t.view(torch.uint8)


def dequantized(q, scales):
    """The numbers of rows or weights in float64: each times the scale of its block."""
    for dim in range(q.dim()):
        if scales.shape[dim] != q.shape[dim]:
            scales = scales.repeat_interleave(128, dim).narrow(dim, 0, q.shape[dim])
    return q.double() * scales.double()
