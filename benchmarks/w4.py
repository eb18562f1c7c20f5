"""What `layer --w4` and `decode --w4` share: one layer with the same experts in each format, and its checks.

bf16    an EPMoE in 16 bits
FP8     an EPMoE with weight_dtype=torch.float8_e4m3fn; left out where it does not take the sizes
MXFP4   an EPMoE with weight_dtype="mxfp4"
INT4    an EPMoE with weight_dtype="int4", groups of 32
W4A8    the weights of MXFP4 with compute_dtype=torch.float8_e4m3fn, in `layer --w4`; also with
        fp8_recipe="rowwise"

All share a communication layer, and have the same weights before they were quantised.  A twin in 16 bits gets
the dequantised weights of MXFP4 or INT4: their results must have the bits of its results.  bf16 is compared
with float64 on sampled tokens, and the others with bf16, which shows that the weights are the same.
GPT-OSS has its activation and biases.  A rank that is alone is one rank of four: it has a quarter of the
experts.
"""

import dataclasses

import torch
import torch.distributed as dist

import epmoe
from epmoe.gemm import four_bit
from epmoe.moe.weights import WEIGHTS
from epmoe.reference import activate

from .check import poisoned
from .gemm_fp8 import E4M3
from .measure import slowest
from .shapes import KNOWN_SHAPES
from .w4_tables import FORMATS, IN_FP8

DTYPES = dict(zip(FORMATS, (None, E4M3, "mxfp4", "int4")))
# The formats whose times a format is compared with.
OVER = {"FP8": ("bf16",), **dict.fromkeys(("MXFP4", "INT4", *IN_FP8), ("FP8", "bf16"))}
FOUR_BITS = ("INT4", "MXFP4")
SHAPES = "gpt-oss-120b", "dsv3", "v4-flash"
RANKS = 4  # a rank that is alone is one of them
SAMPLED = 4  # tokens of a rank that are compared with float64
# The norm of the difference from bf16 over that of bf16, and of the difference of bf16 from float64.
MOST_ERROR = {"FP8": 0.1, "MXFP4": 0.3, "INT4": 0.2, **dict.fromkeys(IN_FP8, 0.3), "bf16": 0.02}


def shapes(run):
    """Return the shapes of the run that 4 bits can have.

    The small shapes of the CPU are widened to a multiple of 128 where the shape is one, else of 64.
    """
    found = []
    for shape in run.shapes(*SHAPES):
        if not run.on_gpu:
            known = KNOWN_SHAPES[shape.name.removesuffix("-small")]
            unit = 64 if known.hidden % 128 or known.inner % 128 else 128
            shape = dataclasses.replace(shape, hidden=-(-shape.hidden // unit) * unit,
                                        inner=-(-shape.inner // unit) * unit)
        if shape.hidden % 64 or shape.inner % 64:
            run.say(f"skipped: {shape.name}, because H or I is not a multiple of 64")
            continue
        found.append(shape)
    return found


def ranks_of(run, shape):
    """Return the number of ranks: that of the run, or of those that a rank that is alone is one of."""
    return RANKS if run.size == 1 and shape.experts >= RANKS * shape.topk else run.size


def alone(run, shape):
    """Return what the rows of a rank that is alone have, and no others."""
    ranks = ranks_of(run, shape)
    return {"of_ranks": ranks} if ranks > run.size else {}


def held(run, shape):
    """Return the shape with the experts that the ranks of this run hold."""
    return dataclasses.replace(shape, experts=shape.experts * run.size // ranks_of(run, shape))


def gathered(run, t):
    """Return the tensors of all ranks, one after the other; they have the same shape.  Collective."""
    if run.size == 1:
        return t
    parts = [torch.empty_like(t) for _ in range(run.size)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def error_of(run, got, want):
    """Return the norm of the difference of results over that of `want`, the largest of all ranks."""
    squares = [sum(t.double().square().sum().item() for t in tensors)
               for tensors in ((g.double() - w.double() for g, w in zip(got, want)), want)]
    return slowest(run.cpu_group, (squares[0] / (squares[1] or 1.0))**0.5)


def have_same_bits(got, want):
    return all(torch.equal(g.view(torch.int16), w.view(torch.int16)) for g, w in zip(got, want))


class Formats:
    """A layer in each format.

    shape: with the experts that the ranks hold.  max_tokens: the most tokens of a call.

    Attributes:
        modules: {format: EPMoE}.
    """

    def __init__(self, run, shape, max_tokens):
        self.run, self.shape = run, shape
        self.op = run.layer(shape.with_tokens(max_tokens), torch.bfloat16, epmoe.EpAll2AllFusedOp)
        self.twin, self.is_twin_of = self.module(None), None
        self.modules = {}
        for name, weight_dtype in DTYPES.items():
            try:
                self.modules[name] = self.module(weight_dtype)
            except ValueError as error:
                if name in FOUR_BITS:
                    raise
                run.say(f"{shape.name}: no {name}, because of {error}"[:100])
        self.generator = torch.Generator(run.device).manual_seed(4000 + run.rank)
        self.fill()

    def module(self, weight_dtype, **options):
        shape, is_gpt_oss = self.shape, self.shape.name.startswith("gpt-oss")
        return epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, layer=self.op,
                           activation="gpt_oss" if is_gpt_oss else "swiglu", bias=is_gpt_oss,
                           weight_dtype=weight_dtype, **options)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.op.synchronize()
            self.twin.finalize()

    def normal(self, *size):
        return torch.randn(*size, device=self.run.device, generator=self.generator).to(torch.bfloat16)

    def fill(self):
        """Give all modules the same normal numbers, which keep the size of a row.

        One expert after the other, because the quantisation needs several copies in float32.
        """
        for name, (num, n, k) in self.twin._shapes.items():
            for e in range(num):
                numbers = self.normal(n, k) * k**-0.5
                for moe in self.modules.values():
                    moe._format.put(moe, name, e, numbers)
            if self.twin.gate_up_proj_bias is not None:
                bias = self.normal(num, n) * 0.5
                for moe in (self.twin, *self.modules.values()):
                    getattr(moe, f"{name}_bias").copy_(bias)

    def twin_of(self, name):
        """Return the twin in 16 bits, with the dequantised weights of a format of 4 bits."""
        if self.is_twin_of != name:
            moe = self.modules[name]
            for weight in WEIGHTS:
                numbers, scales = getattr(moe, weight), getattr(moe, f"{weight}_scales")
                for e in range(len(numbers)):
                    getattr(self.twin, weight)[e] = four_bit.dequantize(
                        moe._format.format, numbers[e], scales[e], None, torch.bfloat16)
            self.is_twin_of = name
        return self.twin

    def in_fp8(self, name, args, of_bf16):
        """Return a module that multiplies the weights of MXFP4 in FP8, and its error.  Collective.

        name: in IN_FP8.  args: of a call.  of_bf16: its result in bf16.
        """
        found = []
        for moe in (self.modules["MXFP4"], self.twin_of("MXFP4")):
            found.append(self.module(moe.weight_dtype if moe is not self.twin else None, compute_dtype=E4M3,
                                     fp8_recipe=IN_FP8[name]))
            for weight, p in moe.named_parameters():
                setattr(found[-1], weight, p)
        with poisoned():
            got, want = (moe(*args) for moe in found)
        error = error_of(self.run, [got], [of_bf16])
        self.run.agree("" if have_same_bits([got], [want]) and error <= MOST_ERROR[name] else
                       f"{name}: other bits than one of 16 bits in FP8 with the same weights, or wrong by "
                       f"{error:.3f} of the norm of bf16")
        return found[0], error

    def bytes_of_expert(self, name):
        """Return the bytes of the parameters of an expert in a format."""
        parameters = self.modules[name].parameters(recurse=False)
        return sum(p.numel() * p.element_size() for p in parameters) / self.op.num_local_experts

    def check(self, inputs, **options):
        """Check the results of all modules.  Collective.

        inputs: [(x, idx, weight)] of calls.  options: of EPMoE.forward.

        Returns:
            {format: [y]} with the checked results, and {format: error}: how far it is from bf16.
        """
        with poisoned():
            found = {name: [moe(*args, **options) for args in inputs] for name, moe in self.modules.items()}
        errors = {"bf16": self.error_of_bf16(inputs[0], found["bf16"][0])}
        for name in FOUR_BITS:
            twin = self.twin_of(name)
            with poisoned():
                want = [twin(*args, **options) for args in inputs]
            self.run.agree("" if have_same_bits(found[name], want) else
                           f"{name}: the layer and one in 16 bits with the same weights differ in their bits")
        for name in self.modules:
            errors.setdefault(name, error_of(self.run, found[name], found["bf16"]))
            is_right = errors[name] <= MOST_ERROR[name]
            self.run.agree("" if is_right else f"{name}: wrong by {errors[name]:.3f} of the norm of bf16")
        return found, errors

    def error_of_bf16(self, args, y):
        """Return the error of the results in bf16 on sampled tokens, compared with float64.  Collective."""
        moe, (x, idx, weight) = self.modules["bf16"], args
        at = (idx >= 0).sum(1).topk(min(SAMPLED, len(idx))).indices  # alone, tokens have few choices
        x, idx, weight, y = (gathered(self.run, t[at]) for t in (x, idx, weight, y))
        idx = idx - self.op.rank * self.op.num_local_experts
        want = torch.zeros(x.shape, dtype=torch.float64, device=x.device)

        def linear(name, e, rows):
            bias = getattr(moe, f"{name}_bias")
            product = rows @ getattr(moe, name)[e].double().t()
            return product if bias is None else product + bias[e].double()

        for t, choice in ((idx >= 0) & (idx < self.op.num_local_experts)).nonzero().tolist():
            e = int(idx[t, choice])
            h = activate(linear("gate_up_proj", e, x[t:t + 1].double()), moe.activation)
            want[t] += weight[t, choice].double() * linear("down_proj", e, h)[0]
        if self.run.size > 1:
            dist.all_reduce(want)
        return error_of(self.run, [y], [want])
