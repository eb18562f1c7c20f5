"""The experts of transformers for a model in MXFP4: what it computes without epmoe.

grouped_mm     the weights are dequantised to bfloat16 when the model is loaded; then torch's grouped_mm
Triton MXFP4   transformers' kernels for MXFP4, of GPT-OSS alone

They get the tokens of all ranks, and compute this rank's experts, as transformers does with ranks that share
the experts.  No communication is in their times.  What cannot run here is left out, and the bench says why.
"""

import dataclasses
import functools
import importlib
import textwrap
import types

import torch
import torch.distributed as dist

from epmoe.gemm import four_bit
from epmoe.moe.weights import WEIGHTS

from .check import poisoned
from .measure import captured, slowest
from .transformers import experts_class
from .w4 import error_of

# The parts of triton_kernels that transformers uses.
TRITON_KERNELS = ("matmul_ogs", "routing", "swiglu", "tensor", "tensor_details.layout",
                  "numerics_details.mxfp")
MOST_ERROR = 0.02  # the norm of the difference from EPMoE over that of its results


class Peer:
    """Experts of transformers: a function of x [T, H], idx [T, K], where -1 means dropped, and weight.

    held_as: the format of FORMATS that has as many bytes.
    """

    def __init__(self, experts, num_experts, held_as):
        self.experts, self.num_experts, self.held_as = experts, num_experts, held_as

    def __call__(self, x, idx, weight):
        # to transformers, the experts of other ranks have a number that is no expert's
        return self.experts(x, idx.masked_fill(idx < 0, self.num_experts), weight.to(x.dtype))


def load(run, formats):
    """Return {name: Peer} of what can run here, on all ranks.  The weights are those of formats' MXFP4."""
    found = {}
    for name, make in (("grouped_mm", dequantized), ("Triton MXFP4", triton)):
        peer, why = None, "another rank has none"
        try:
            peer = make(formats)
            call = functools.partial(peer, *tokens_of(run, formats))
            call()
            if run.on_gpu:
                captured([call])
        except Exception as error:  # whatever a version of transformers or of its kernels lacks
            peer, why = None, repr(error).split("\n")[0]
        if slowest(run.cpu_group, float(peer is None)):
            run.say(textwrap.fill(f"{formats.shape.name}: no {name} of transformers, because of {why}", 100,
                                  max_lines=3, break_on_hyphens=False))
        else:
            found[name] = peer
    return found


def tokens_of(run, formats):
    """Return inputs of one token, to see whether a peer can run."""
    shape = formats.shape
    idx = torch.zeros(1, shape.topk, dtype=torch.int64, device=run.device)
    idx[0, 1:] = -1
    x = torch.zeros(1, shape.hidden, dtype=torch.bfloat16, device=run.device)
    return x, idx, torch.ones(1, shape.topk, device=run.device)


def dequantized(formats):
    """Return the peer that multiplies with torch's grouped_mm."""
    num = formats.op.num_local_experts
    kind, config = experts_class(dataclasses.replace(formats.shape, experts=num))
    with torch.device("meta"):
        experts = kind(config)
    twin = formats.twin_of("MXFP4")
    for name, p in twin.named_parameters():
        p = p.detach()
        if experts.is_transposed and name in WEIGHTS:
            p = p.transpose(1, 2).contiguous()
        setattr(experts, name, torch.nn.Parameter(p, requires_grad=False))
    config._experts_implementation = "grouped_mm"
    experts._is_expert_parallel = True
    return Peer(experts, num, "bf16")


def triton(formats):
    """Return the peer that multiplies with transformers' kernels for MXFP4."""
    if not formats.shape.name.startswith("gpt-oss"):
        raise ValueError("its kernels are for GPT-OSS")
    from transformers.integrations import mxfp4

    try:
        for name in TRITON_KERNELS:
            importlib.import_module(f"triton_kernels.{name}")
        mxfp4.triton_kernels_hub = importlib.import_module("triton_kernels")
    except ImportError:
        importlib.import_module("kernels")  # with which transformers fetches them
        mxfp4.replace_with_mxfp4_linear(torch.nn.Module(), types.SimpleNamespace(dequantize=False))
    moe, num = formats.modules["MXFP4"], formats.op.num_local_experts
    _, config = experts_class(dataclasses.replace(formats.shape, experts=num))
    with torch.device(formats.run.device):
        experts = mxfp4.Mxfp4GptOssExperts(config)
    for name in WEIGHTS:
        blocks, scales = four_bit.write_mxfp4(getattr(moe, name), getattr(moe, f"{name}_scales"))
        mxfp4.swizzle_mxfp4_convertops(blocks, scales, experts, name, blocks.device, mxfp4.triton_kernels_hub)
        getattr(experts, f"{name}_bias").copy_(getattr(moe, f"{name}_bias"))
    return Peer(experts, num, "MXFP4")


def check(run, peer, inputs, wanted):
    """Return a peer's results, which must be those of EPMoE, and the error.  Collective.

    inputs: those of all ranks.  wanted: the results of this rank's tokens.
    """
    with poisoned():
        found = [peer(*args) for args in inputs]
    sums = [y.float() for y in found]
    if run.size > 1:
        for y in sums:
            dist.all_reduce(y)
    mine = [y.chunk(run.size)[run.rank] for y in sums]
    error = error_of(run, mine, wanted)
    run.agree("" if error <= MOST_ERROR else f"transformers differs from EPMoE by {error:.3f} of the norm")
    return found, error
