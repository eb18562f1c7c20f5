"""What a change of the inside must not change: outputs bit by bit, public names, machine code of kernels.

    python tests/frozen.py record [--device cuda] [--ranks 1,2,4]   write tests/frozen/DEVICE.json
    python tests/frozen.py record [--device cuda] --only REGEX      add the facts of new cases to it
    python tests/frozen.py compare [--device cuda] [--only REGEX]   compare with it; exit 1 if a fact differs
    python tests/frozen.py kernels FILE [--against FILE]            the machine code of a module's kernels

A fact is a name and a hash, and has a line of its own. The outputs of all ranks of a case make the hash:
forward, gradients and plans of every entry point, for dtypes, activations, capacities, dropped choices, empty
ranks and numbers of ranks. The signature of each public name is a fact, too. In float32 the bits of products
made by torch on a CPU depend on the processor and on the version of torch. So each file names both, and
compare refuses a file of another kind of machine.
"""

import argparse
import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import epmoe
from epmoe.gemm import four_bit
from epmoe.testing import run_ranks, set_device

FOLDER = Path(__file__).resolve().parent / "frozen"
FOUR_BITS = {"mxfp4": "mxfp4", "int4": "int4", "int4_zeros": epmoe.Int4(64, zero_points=True)}
EXPERTS, TOKENS, HIDDEN, INNER, TOPK = 8, 24, 64, 48, 3
ACTIVATIONS = {"swiglu": "swiglu", "gelu": "gelu", "relu2": "relu2", "silu": "silu",
               "gpt_oss": epmoe.GptOss(), "swiglu_limit": epmoe.SwiGLU(1.25, 2.0)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# ---- inputs ----


class Inputs:
    """Inputs of one rank: each number follows from the name of the case, the rank and the number of ranks."""

    def __init__(self, case, rank, size, device):
        seed = int.from_bytes(hashlib.sha256(f"{case} {rank} {size}".encode()).digest()[:6], "little")
        self.g = torch.Generator().manual_seed(seed)
        self.device, self.rank, self.size = device, rank, size

    def normal(self, *shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(shape, generator=self.g) * scale).to(dtype).to(self.device)

    def tokens(self, T, dtype):
        return self.normal(T, HIDDEN, dtype=dtype)

    def routing(self, T, pattern="plain", num_experts=EXPERTS):
        """[T, K] experts and weights. pattern: plain, drops (-1 and E), hot (expert 0 in all), twice."""
        idx = torch.rand(T, num_experts, generator=self.g).argsort(1)[:, :TOPK].contiguous()
        if pattern == "drops":
            gone = torch.rand(T, TOPK, generator=self.g)
            idx = torch.where(gone < 0.2, -1, torch.where(gone > 0.9, num_experts, idx))
        elif pattern == "hot":
            idx[:, 0] = 0
        elif pattern == "twice":
            idx[:, 1] = idx[:, 0]
        return idx.to(self.device), torch.rand(T, TOPK, generator=self.g).to(self.device)

    def num_tokens(self, kind):
        return {"full": TOKENS, "unequal": (TOKENS * (self.rank + 1)) // self.size,
                "first_none": 0 if self.rank == 0 else TOKENS}[kind]


# ---- cases: name -> function(inputs) -> {name of an output: tensor} ----

CASES = {}


def case(name, fn, *args):
    assert name not in CASES, name
    CASES[name] = (fn, args)


def _layout(layout):
    names = ("counts", "expert_offsets", "token_dst_scatter_idx", "token_sort_indices", "token_slots",
             "send_tokens", "recv_tokens", "rows_per_rank", "recv_offsets")
    return {n: getattr(layout, n) for n in names}


def a2a(i, dtype, tokens, pattern, weighted, options):
    with epmoe.EPAll2AllLayer(None, TOKENS, HIDDEN, TOPK, num_tot_experts=EXPERTS, dtype=dtype,
                              device=i.device, **options) as layer:
        T = i.num_tokens(tokens)
        x, (idx, w) = i.tokens(T, dtype).requires_grad_(), i.routing(T, pattern)
        w = w.requires_grad_() if weighted else None
        rows, row_weight, layout = layer.dispatch(x, idx, w)
        padding = layer.expert_alignment > 1 or layer.expert_capacity is not None
        y = layer.combine(rows * 3, layout, None if padding else row_weight)
        (y.float() * i.normal(T, HIDDEN)).sum().backward()
        out = {"rows": rows, "row_weight": row_weight, "y": y, "dx": x.grad}
        out["dw"] = w.grad if weighted else None
        again, _, layout2 = layer.dispatch(x.detach(), layout=layout)
        layer.synchronize()
        return out | {"again": again} | _layout(layout2)


def moe(i, dtype, activation, tokens, pattern, bias, options, steps):
    torch.manual_seed(7)
    module = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, activation=ACTIVATIONS[activation],
                         max_tokens=TOKENS, dtype=dtype, bias=bias, device=i.device, **options)
    T, out = i.num_tokens(tokens), {}
    x, (idx, w) = i.tokens(T, dtype), i.routing(T, pattern)
    with torch.no_grad():
        out["inference"] = module(x, idx, w)
        out["inference_stages"] = module(x, idx, w, decode=False)
    for step in range(steps):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = module(x, idx, w)
        (y.float() * i.normal(T, HIDDEN)).sum().backward()
        out |= {f"y{step}": y, f"dx{step}": x.grad, f"dw{step}": w.grad}
        out |= {f"{n}{step}": p.grad for n, p in module.named_parameters()}
    module.layer.synchronize()
    module.finalize()
    return out


def moe_map(i, dtype):
    torch.manual_seed(7)
    module = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, max_tokens=TOKENS, dtype=dtype, device=i.device,
                         num_physical=EXPERTS + 2 * i.size)
    T = TOKENS
    x, (idx, w) = i.tokens(T, dtype), i.routing(T, "hot")
    module.set_expert_map(epmoe.balance_experts([9, *[1] * (EXPERTS - 1)], i.size, EXPERTS + 2 * i.size))
    with torch.no_grad():
        out = {"mapped": module(x, idx, w)}
    module.set_expert_map(None)
    whole = epmoe.whole_state_dict(module)
    module.finalize()
    return out | {f"whole.{k}": v for k, v in whole.items()}


def moe_fp8(i, dtype, options):
    H, I = 256, 128
    torch.manual_seed(7)
    module = epmoe.EPMoE(H, I, EXPERTS, TOPK, max_tokens=TOKENS, dtype=dtype, device=i.device,
                         weight_dtype=torch.float8_e4m3fn, **options)
    x, (idx, w) = i.normal(TOKENS, H, dtype=dtype), i.routing(TOKENS)
    with torch.no_grad():
        y, stages = module(x, idx, w), module(x, idx, w, decode=False)
    module.layer.synchronize()
    module.finalize()
    return {"y": y, "stages": stages}


def gemm_four_bit(i, dtype, weight_dtype, activation):
    """The layout of the weights is no fact: the kernels alone read it."""
    H, N, counts = 192, 128, torch.tensor([5, 0, 17, 2]).to(i.device)
    x = i.normal(24, H, dtype=dtype)
    w = four_bit.quantize(four_bit.as_format(weight_dtype), i.normal(4, N, H, scale=0.1), dtype)
    act = ACTIVATIONS.get(activation)
    with torch.no_grad():
        y = epmoe.grouped_gemm(x, w.numbers, counts, bias=i.normal(4, N, dtype=dtype), activation=act,
                               b_scale=w.scales, b_zero=w.zeros)
    return {"y": y}


def quantize_four_bit(i, dtype):
    w = i.normal(2, 64, 192, dtype=dtype)
    found = {"mxfp4": epmoe.quantize_mxfp4(w), "int4": epmoe.quantize_int4(w),
             "int4_zeros": epmoe.quantize_int4(w, 64, zero_points=True)}
    return {f"{name}{n}": t for name, parts in found.items() for n, t in enumerate(parts)}


def moe_four_bit(i, dtype, weight_dtype, activation, options):
    H, I = 192, 64
    torch.manual_seed(7)
    module = epmoe.EPMoE(H, I, EXPERTS, TOPK, activation=ACTIVATIONS[activation], max_tokens=TOKENS,
                         dtype=dtype, bias=activation == "gpt_oss", device=i.device,
                         weight_dtype=weight_dtype, **options)
    T = i.num_tokens("unequal")
    x, (idx, w) = i.normal(T, H, dtype=dtype), i.routing(T, "drops")
    with torch.no_grad():
        y, stages = module(x, idx, w), module(x, idx, w, decode=False)
    whole = epmoe.whole_state_dict(module)
    module.layer.synchronize()
    module.finalize()
    return {"y": y, "stages": stages} | {f"whole.{k}": v for k, v in whole.items()}


def fused(i, dtype, activation, pattern, options):
    torch.manual_seed(3)
    wide = INNER * (1 if activation in (None, "gelu") else 2)
    with epmoe.EpAll2AllFusedOp(None, TOKENS, HIDDEN, TOPK, num_tot_experts=EXPERTS, dtype=dtype,
                                device=i.device, **options) as op:
        x, (idx, w) = i.tokens(TOKENS, dtype), i.routing(TOKENS, pattern)
        up = i.normal(op.num_local_experts, wide, HIDDEN, dtype=dtype, scale=0.1)
        down = i.normal(op.num_local_experts, HIDDEN, INNER, dtype=dtype, scale=0.1)
        out = {}
        with torch.no_grad():
            h, row_weight, layout = op.mega_dispatch_group_gemm(x, idx, gemm_weight=up, weight=w,
                                                                activation=activation)
            y = op.mega_group_gemm_combine(h[:, :INNER].contiguous(), down, layout, row_weight)
            out |= {"h": h[: layout.num_rows], "y": y}
        if activation is None:
            x, w, up, down = (t.detach().requires_grad_() for t in (x, w, up, down))
            h, row_weight, layout = op.mega_dispatch_group_gemm(x, idx, gemm_weight=up, weight=w)
            y = op.mega_group_gemm_combine(h, down, layout, row_weight)
            (y.float() * i.normal(TOKENS, HIDDEN)).sum().backward()
            out |= {"train": y, "dx": x.grad, "dw": w.grad, "dup": up.grad, "ddown": down.grad}
        op.synchronize()
        return out


def low_latency(i, dtype, fp8, layout, pattern):
    H = 256
    a2a_layer = epmoe.LowLatencyAll2All(None, TOKENS, H, TOPK, EXPERTS, dtype=dtype, device=i.device)
    T = i.num_tokens("unequal")
    x, (idx, w) = i.normal(T, H, dtype=dtype), i.routing(T, pattern)
    out = {}
    with torch.no_grad():
        for turn in range(3):  # more than the banks of the layer
            rows, scales, counts, handle = a2a_layer.dispatch(x * (turn + 1), idx, w, fp8=fp8, layout=layout)
            if layout == "compact":
                parts = [rows[: int(counts.sum())].view(torch.uint8)]
            else:
                parts = [rows[e, : int(n)].view(torch.uint8) for e, n in enumerate(counts)]
            y = rows.float().to(dtype) * 0.5
            out[f"rows{turn}"] = torch.cat([p.flatten() for p in parts])
            out[f"counts{turn}"] = counts
            out[f"sum{turn}"] = a2a_layer.combine(y, handle)
            if dtype is torch.bfloat16:
                again = a2a_layer.dispatch(x, idx, w, fp8=fp8, layout=layout)[3]
                out[f"sum_fp8{turn}"] = a2a_layer.combine(y, again, fp8=True)
    a2a_layer.synchronize()
    a2a_layer.finalize()
    return out


def gemm(i, dtype, activation, transposed, bias):
    gated = activation not in (None, "gelu", "relu2", "silu")
    N, counts = 96, torch.tensor([5, 0, 17, 2]).to(i.device)
    x = i.normal(24, HIDDEN, dtype=dtype)
    w = i.normal(4, HIDDEN, N, dtype=dtype, scale=0.1).transpose(1, 2) if transposed else \
        i.normal(4, N, HIDDEN, dtype=dtype, scale=0.1)
    b = i.normal(4, N, dtype=dtype) if bias else None
    act = ACTIVATIONS.get(activation)
    with torch.no_grad():
        out = {"y": epmoe.grouped_gemm(x, w, counts, bias=b, activation=act)}
    if not gated and activation is None:
        leaves = [t.detach().requires_grad_() for t in (x, w) + ((b,) if bias else ())]
        y = epmoe.grouped_gemm(leaves[0], leaves[1], counts, bias=leaves[2] if bias else None)
        (y.float() * i.normal(24, N)).sum().backward()
        out |= {"train": y} | {f"d{n}": t.grad for n, t in enumerate(leaves)}
    return out


def quantize(i, dtype, activation):
    x = i.normal(9, 512, dtype=dtype)
    q, scale = epmoe.quantize_fp8(x, activation=ACTIVATIONS.get(activation))
    qw, ws = epmoe.quantize_fp8_weight(i.normal(2, 256, 256, dtype=dtype))
    return {"q": q.view(torch.uint8), "scale": scale, "qw": qw.view(torch.uint8), "ws": ws}


def dispatch_fp8(i, dtype):
    with epmoe.EPAll2AllLayer(None, TOKENS, 256, TOPK, num_tot_experts=EXPERTS, dtype=dtype,
                              device=i.device) as layer:
        idx, w = i.routing(TOKENS, "drops")
        rows, scales, row_weight, _ = layer.dispatch_fp8(i.normal(TOKENS, 256, dtype=dtype), idx, w)
        layer.synchronize()
        return {"rows": rows.view(torch.uint8), "scales": scales, "row_weight": row_weight}


def nodes(i, dtype, options):
    """Half of the ranks on each of two nodes."""
    torch.manual_seed(7)
    module = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, epmoe.Nodes(None, i.size // 2), max_tokens=TOKENS,
                         dtype=dtype, device=i.device, **options)
    x, (idx, w) = i.tokens(TOKENS, dtype).requires_grad_(), i.routing(TOKENS, "drops")
    w = w.requires_grad_()
    y = module(x, idx, w)
    (y.float() * i.normal(TOKENS, HIDDEN)).sum().backward()
    out = {"y": y, "dx": x.grad, "dw": w.grad} | {n: p.grad for n, p in module.named_parameters()}
    with torch.no_grad():
        out["inference"] = module(x, idx, w)
    module.finalize()
    return out


def _define():
    local = {"enable_local_combine": True}
    for name, dtype in DTYPES.items():
        for mode, options in (("scatter", {}), ("gather", {"combine_mode": "gather"}), ("local", local)):
            for pattern in ("plain", "drops", "twice"):
                case(f"a2a/{name}/{mode}/{pattern}", a2a, dtype, "unequal", pattern, True, options)
        case(f"a2a/{name}/first_none", a2a, dtype, "first_none", "plain", True, local)
        case(f"a2a/{name}/unweighted", a2a, dtype, "full", "plain", False, {})
        case(f"a2a/{name}/capacity", a2a, dtype, "full", "drops", True, {"capacity": 700})
        case(f"a2a/{name}/alignment", a2a, dtype, "full", "drops", True, {"expert_alignment": 8})
        case(f"a2a/{name}/expert_capacity", a2a, dtype, "full", "plain", True, {"expert_capacity": 90})
        case(f"a2a/{name}/host_counts", a2a, dtype, "full", "plain", True, {"host_counts": True})
        for activation in ACTIVATIONS:
            case(f"moe/{name}/{activation}", moe, dtype, activation, "unequal", "drops", True, {}, 2)
        case(f"moe/{name}/no_bias", moe, dtype, "swiglu", "full", "hot", False, {}, 2)
        case(f"moe/{name}/first_none", moe, dtype, "swiglu", "first_none", "plain", False, {}, 2)
        case(f"moe/{name}/twice", moe, dtype, "swiglu", "full", "twice", True, {"fused": False}, 1)
        case(f"moe/{name}/fused", moe, dtype, "swiglu", "full", "plain", True, {"fused": True}, 2)
        case(f"moe/{name}/capacity", moe, dtype, "swiglu", "unequal", "plain", False, {"capacity": 700}, 2)
        for kind, options in (("no_token_saving", {"token_saving": False}),
                              ("serial", {"combine_order": "serial"})):
            case(f"moe/{name}/{kind}", moe, dtype, "swiglu", "full", "plain", False, options, 1)
        case(f"map/{name}", moe_map, dtype)
        for activation in (None, "swiglu"):
            for kind, options in (("default", {}), ("capacity", {"capacity": 700}),
                                  ("fused", {"fused": True})):
                case(f"fused/{name}/{activation}/{kind}", fused, dtype, activation, "drops", options)
        for layout in ("masked", "compact"):
            case(f"low_latency/{name}/plain/{layout}", low_latency, dtype, False, layout, "drops")
            if dtype is torch.bfloat16:
                case(f"low_latency/{name}/fp8/{layout}", low_latency, dtype, True, layout, "drops")
        for transposed in (False, True):
            for bias in (False, True):
                kind = f"{'transposed' if transposed else 'plain'}{'_bias' if bias else ''}"
                case(f"gemm/{name}/{kind}", gemm, dtype, None, transposed, bias)
        for activation in ACTIVATIONS:
            case(f"gemm/{name}/{activation}", gemm, dtype, activation, False, True)
            case(f"quantize/{name}/{activation}", quantize, dtype, activation)
        case(f"quantize/{name}/none", quantize, dtype, None)
        case(f"dispatch_fp8/{name}", dispatch_fp8, dtype)
        case(f"nodes/{name}", nodes, dtype, {})
        case(f"nodes/{name}/chunks", nodes, dtype, {"num_chunks": 3})
        case(f"nodes/{name}/capacity", nodes, dtype, {"capacity": 700, "rail_capacity": TOKENS})
    for name in ("bf16", "fp16"):
        case(f"moe_fp8/{name}", moe_fp8, DTYPES[name], {})
        case(f"moe_fp8/{name}/capacity", moe_fp8, DTYPES[name], {"capacity": 700})
        case(f"moe_fp8/{name}/fused", moe_fp8, DTYPES[name], {"fused": True})
        case(f"quantize/{name}/four_bit", quantize_four_bit, DTYPES[name])
        for kind, weight_dtype in FOUR_BITS.items():
            for activation in (None, "swiglu", "gpt_oss"):
                case(f"gemm/{name}/{kind}/{activation}", gemm_four_bit, DTYPES[name], weight_dtype,
                     activation)
            for activation in ("swiglu", "gpt_oss"):
                case(f"moe_four_bit/{name}/{kind}/{activation}", moe_four_bit, DTYPES[name], weight_dtype,
                     activation, {})
            case(f"moe_four_bit/{name}/{kind}/capacity", moe_four_bit, DTYPES[name], weight_dtype, "swiglu",
                 {"capacity": 700})


_define()


def _applies(name, size, device):
    if name.startswith("nodes/"):
        return size == 4
    if name.startswith(("gemm/", "quantize/")):
        return size == 1
    if name.startswith("moe_four_bit/"):
        return size <= 2
    return True


def _digest(t):
    if t is None:
        return "none"
    t = t.detach().cpu().contiguous()
    h = hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode())
    h.update(t.view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return h.hexdigest()[:16]


def _outputs(rank, size, device_type, pattern):
    """All cases on one rank: {case: {output: hash}}."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if device_type == "cpu" else set_device(rank, size)
    result = {}
    for name, (fn, args) in CASES.items():
        if not _applies(name, size, device) or not re.search(pattern, name):
            continue
        if rank == 0 and sys.stderr.isatty():
            print(f"\r{size} ranks: {name:50}", end="", file=sys.stderr, flush=True)
        out = fn(Inputs(name, rank, size, device), *args)
        result[name] = {key: _digest(t) for key, t in out.items()}
    return result


def outputs(device, sizes, pattern):
    facts = {}
    for size in sizes:
        if device == "cuda" and torch.cuda.device_count() < size:
            os.environ["EPMOE_SHARE_GPU"] = "1"
        ranks = run_ranks(_outputs, size, device, pattern, timeout_s=1800)
        for name in ranks[0]:
            for key in ranks[0][name]:
                of_ranks = " ".join(r[name].get(key, "on other ranks only") for r in ranks)
                facts[f"{name}/W{size}/{key}"] = hashlib.sha256(of_ranks.encode()).hexdigest()[:16]
    return facts


# ---- public names ----


def _signature(thing):
    """The parameters and their defaults, without type hints."""
    signature = inspect.signature(thing)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def names():
    """The signature of each public name: functions, classes, their public methods and properties.

    It has names, kinds and defaults of parameters. make types checks the type hints.
    """
    facts = {}

    def add(path, thing):
        if inspect.isclass(thing) or inspect.isroutine(thing):
            try:
                facts[f"name/{path}"] = _signature(thing)
            except (ValueError, TypeError):
                facts[f"name/{path}"] = "class" if inspect.isclass(thing) else "callable"
        else:
            facts[f"name/{path}"] = type(thing).__name__

    for name in sorted(epmoe.__all__):
        thing = getattr(epmoe, name)
        add(name, thing)
        if inspect.isclass(thing):
            for base in thing.__mro__:
                if not base.__module__.startswith("epmoe"):
                    continue
                for key, member in vars(base).items():
                    if not key.startswith("_"):
                        add(f"{name}.{key}", getattr(thing, key, member))
        elif inspect.ismodule(thing):
            for key, member in vars(thing).items():
                is_own = inspect.isfunction(member) and member.__module__ == thing.__name__
                if is_own and not key.startswith("_"):
                    add(f"{name}.{key}", member)
    return facts


# ---- machine code ----


def kernels(path):
    """{kernel: hash of its machine code}. Names and the addresses of instructions do not count."""
    text = subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    facts = {}
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", body, re.M)
        digest = hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]
        facts[name.strip()] = f"{len(code)} instructions, {digest}"
    return facts


# ---- files ----


def machine(device):
    if device == "cuda":
        kind = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"machine": kind, "torch": torch.__version__.partition("+")[0]}


def differences(old, new):
    lines = [f"- {k}: gone" for k in old.keys() - new.keys()]
    lines += [f"+ {k}: new" for k in new.keys() - old.keys()]
    lines += [f"! {k}: {old[k]} -> {new[k]}" for k in old.keys() & new.keys() if old[k] != new[k]]
    return sorted(lines)


def write(path, head, sizes, facts):
    rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(facts.items()))
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"of": {json.dumps(head)}, "ranks": "{sizes}",\n"facts": {{\n{rows}\n}}}}\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare", "kernels"))
    parser.add_argument("file", nargs="?", help="kernels: a module or an object file")
    parser.add_argument("--against", help="kernels: an older file to compare with")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", help="numbers of ranks; record: 1,2,4, compare: those of the file")
    parser.add_argument("--only", default="", help="a regular expression of cases")
    args = parser.parse_args()
    if args.command == "kernels":
        new = kernels(args.file)
        if not args.against:
            for name, code in sorted(new.items()):
                print(f"{code}  {name}")
            return 0
        lines = differences(kernels(args.against), new)
        print("\n".join(lines) or f"the machine code of all {len(new)} kernels is the same")
        return bool(lines)
    path = FOLDER / f"{args.device}.json"
    adds = args.command == "record" and args.only
    old = json.loads(path.read_text()) if args.command == "compare" or adds else None
    if old and old["of"] != machine(args.device):
        done = "ADDED TO" if adds else "COMPARED"
        print(f"frozen: NOT {done}, {path.name} is of {old['of']}, this is {machine(args.device)}: record "
              f"the commit before the change on this machine first")
        return 2
    sizes = args.ranks or (old["ranks"] if old else "1,2,4")
    facts = names() | outputs(args.device, [int(n) for n in sizes.split(",")], args.only)
    if adds:
        new = {k: v for k, v in facts.items() if k not in old["facts"]}
        write(path, old["of"], old["ranks"], old["facts"] | new)
        print(f"{len(new)} facts added to {path}, the others are as they were")
        return 0
    if old is None:
        write(path, machine(args.device), sizes, facts)
        print(f"{len(facts)} facts in {path}")
        return 0
    if args.only or sizes != old["ranks"]:
        old["facts"] = {k: v for k, v in old["facts"].items() if k in facts or k.startswith("name/")}
    lines = differences(old["facts"], facts)
    print("\n".join(lines) or f"frozen: all {len(facts)} facts are the same")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
