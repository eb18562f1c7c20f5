"""Plan, dispatch and combine for any sizes: times, bytes over the links, and a bit-exact check.

    torchrun --nproc-per-node 4 examples/ep_a2a.py -M 32768 -N 1536 --topk 8 -G 384 --drop_ratio 0.3 \\
        --enable-local-combine --check
    python examples/ep_a2a.py --check         # the same on four ranks of this machine, with small sizes

Each expert multiplies by a power of two, which is exact.  So a rank can compute its expected sums without the
rows of other ranks.
"""

import argparse
import functools
import statistics
import time

import torch
import torch.distributed as dist
from _launch import launch

import epmoe
from epmoe import reference, testing

# Default sizes.
SIZES = {"cpu": dict(M=256, N=512, topk=4, G=32, iters=5),
         "cuda": dict(M=8192, N=7168, topk=8, G=256, iters=20)}
CHUNK = 8192  # The check compares this many tokens or rows at once, to limit its memory.


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    texts = {"-M": "tokens per rank", "-N": "hidden size", "-G": "experts", "--topk": "choices of a token",
             "--iters": "timed runs"}
    for flag, what in texts.items():
        cpu, cuda = (SIZES[kind][flag.strip("-")] for kind in ("cpu", "cuda"))
        add(flag, type=int, help=f"{what} (CPU: {cpu}, GPU: {cuda})")
    add("--num-sm", type=int, help="thread blocks (CPU: threads) that move tokens")
    add("--empty-rank", type=int, help="a rank without tokens")
    add("--seed", type=int, default=0)
    add("--drop_ratio", "--drop-ratio", type=float, default=0.0, help="share of dropped choices")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--combine-mode", default="scatter", choices=["scatter", "gather"])
    add("--enable-local-combine", action="store_true", help="add up at the rank of the experts first")
    add("--no-weight", action="store_true", help="dispatch and sum without weights")
    add("--check", action="store_true", help="compare with epmoe.reference; a difference gives exit status 1")
    args = parser.parse_args()
    if any(n is not None and n < 1 for n in (args.M, args.N, args.G, args.topk, args.iters, args.num_sm)):
        parser.error("-M, -N, -G, --topk, --iters and --num-sm must be positive")
    if not 0 <= args.drop_ratio <= 1:
        parser.error(f"--drop_ratio {args.drop_ratio:g}: must be 0 to 1")
    return args


def make_inputs(args, rank, world_size, num_tokens):
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    idx = testing.routing("distinct", num_tokens, args.topk, args.G, world_size, rank, generator)
    idx[torch.rand(idx.shape, generator=generator) < args.drop_ratio] = -1
    x = torch.randn(num_tokens, args.N, generator=generator).to(getattr(torch, args.dtype))
    return x, idx, None if args.no_weight else torch.rand(idx.shape, generator=generator)


def expert_factor(expert, dtype):
    return (2.0 ** (expert % 5 - 2)).to(dtype)[..., None]


def difference(what, got, want, first=0):
    """Return [] if the tensors are equal, else [text], which names the first row in which bits differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{what}: wanted {list(want.shape)} {want.dtype}, got {list(got.shape)} {got.dtype}"]
    bits = getattr(torch, f"int{8 * got.element_size()}")
    at = (got.view(bits) != want.view(bits)).nonzero()
    return [f"{what} {first + at[0, 0]} is wrong"] if len(at) else []


def check(args, layer, inputs, sizes, layout, rows, row_weight, out):
    """Return a list of the differences from the reference on this rank.  All ranks must call it."""
    def gather(t):  # with padding, because all_gather needs equal sizes
        full = torch.cat([t, t.new_zeros(args.M - len(t), *t.shape[1:])]).view(torch.uint8)
        parts = [torch.empty_like(full) for _ in sizes]
        dist.all_gather(parts, full)
        return [part.view(t.dtype)[:n] for part, n in zip(parts, sizes)]

    (x, idx, weight), rank, world_size = inputs, layer.rank, layer.world_size
    plan = reference.plan(gather(idx), args.G)
    errors = difference("plan: place of token", layout.token_dst_scatter_idx.cpu(),
                        plan["token_row"][rank].int())
    sources, xs = plan["rows"][rank], gather(x)
    weights = None if weight is None else gather(weight)
    if len(rows) != len(sources):
        return errors + [f"dispatch: {len(rows)} rows, wanted {len(sources)}"]
    for a in range(0, len(rows), CHUNK):
        part = {"rows": [sources[a : a + CHUNK]]}
        errors += difference("dispatch: row", rows[a : a + CHUNK], reference.dispatch(xs, part)[0], a)
        if weight is not None:
            want = reference.dispatch_weights(weights, part)[0]
            errors += difference("dispatch: weight of row", row_weight[a : a + CHUNK], want, a)
    # A plan for this check only: each choice of this rank's tokens has its own row, and the other ranks have
    # no tokens.
    for a in range(0, len(x), CHUNK):
        chosen = idx[a : a + CHUNK].cpu()
        y = (x[a : a + CHUNK, None] * expert_factor(idx[a : a + CHUNK], x.dtype)).flatten(0, 1)
        at = torch.where(chosen >= 0, torch.arange(chosen.numel()).view(chosen.shape), -1)
        ws = None if weight is None else [weight[a : a + CHUNK].flatten()] * world_size
        no_tokens = [chosen[:0]] * (world_size - 1)
        want = reference.combine([y] * world_size, {"token_row": [at, *no_tokens]}, [chosen, *no_tokens],
                                 args.G, ws, args.enable_local_combine)
        errors += difference("combine: token", out[a : a + CHUNK], want[0], a)
    return errors


def time_ms(stage, layer, iters):
    """Return the median time of a stage in ms.  All ranks start the stage together."""
    def now():
        if layer.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks = []
    for _ in range(iters):
        layer.ep_barrier_all()
        begin = now()
        stage()
        marks.append((begin, now()))
    layer.synchronize()
    return statistics.median(1e3 * (b - a) if isinstance(a, float) else a.elapsed_time(b) for a, b in marks)


def count_traffic(args, layout, rank, row_bytes):
    """Return four numbers about the data that this rank sends to other ranks.

    These are the rows of dispatch without and with token saving, and the bytes of dispatch and of combine.
    """
    away = torch.arange(layout.layer.world_size) != rank
    by_rank = layout.counts.cpu().unflatten(1, (len(away), -1)).sum(2)  # choices from rank to rank
    sent, received = layout.send_tokens.cpu()[away].sum(), layout.recv_tokens.cpu()[away].sum()
    # dispatch sends with each row its token, return slot and tag, and the row and weight of each choice.
    # combine without local sums sends two numbers with each row.
    dispatch = sent * (row_bytes + 12 + (4 if args.no_weight else 8) * args.topk)
    combine = received * row_bytes
    if not args.enable_local_combine:
        combine = by_rank[away, rank].sum() * (row_bytes + 8)
    return [by_rank[rank, away].sum(), sent, dispatch, combine]


def main(args, rank, world_size, device):
    for name, value in SIZES[device.type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    sizes = [0 if r == args.empty_rank else args.M for r in range(world_size)]
    x, idx, weight = (t if t is None else t.to(device)
                      for t in make_inputs(args, rank, world_size, sizes[rank]))
    with epmoe.EPAll2AllLayer(None, args.M, args.N, args.topk, num_tot_experts=args.G, dtype=x.dtype,
                              num_sm=args.num_sm, device=device,
                              enable_local_combine=args.enable_local_combine,
                              combine_mode=args.combine_mode) as layer:
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        experts = torch.arange(layer.num_local_experts, device=device) + rank * layer.num_local_experts
        y = rows * expert_factor(torch.repeat_interleave(experts, layout.tokens_per_expert), x.dtype)
        out = layer.combine(y, layout, row_weight)
        layer.synchronize()
        errors = []
        if args.check:
            errors = check(args, layer, (x, idx, weight), sizes, layout, rows, row_weight, out)
        errors = [f"rank {rank}: {e}" for e in errors]
        times = [time_ms(lambda: layer.preprocess(idx), layer, args.iters),
                 time_ms(lambda: layer.dispatch(x, weight=weight, layout=layout), layer, args.iters),
                 time_ms(lambda: layer.combine(y, layout, row_weight), layer, args.iters)]
        traffic = count_traffic(args, layout, rank, args.N * x.element_size())
    of_all = [None] * world_size
    dist.all_gather_object(of_all, (errors, times, [int(n) for n in traffic], len(rows)))
    errors = [e for one in of_all for e in one[0]]
    if rank == 0:
        show(args, device, of_all)
        print("\n".join(errors) if errors else "check passed" if args.check else "not checked")
    return bool(errors)


def show(args, device, of_all):
    _, times, traffic, num_rows = zip(*of_all)
    mode = "local" if args.enable_local_combine else args.combine_mode
    print(f"{len(of_all)} ranks on {device.type}: {args.M} tokens per rank, hidden {args.N}, top "
          f"{args.topk} of {args.G} experts, {args.dtype}\ndrop ratio {args.drop_ratio}, {mode} combine, "
          f"rows received by a rank: {min(num_rows)} to {max(num_rows)}\n")
    print(f"  {'stage':10}{'ms':>10}{'MB sent':>12}{'GB/s':>9}    "
          f"(median of {args.iters} runs on the slowest rank; bytes that a rank sends to others)")
    ms, sums = [max(t) for t in zip(*times)], [sum(n) for n in zip(*traffic)]
    print(f"  {'plan':10}{ms[0]:10.3f}")
    for stage, t, num_bytes in zip(("dispatch", "combine"), ms[1:], sums[2:]):
        each = num_bytes / len(of_all)
        print(f"  {stage:10}{t:10.3f}{each / 1e6:12.2f}{each / t / 1e6:9.2f}")
    saved = (sums[0] - sums[1]) / max(sums[0], 1)
    print(f"\ntoken saving: {sums[1]} rows cross a link in dispatch instead of {sums[0]} ({saved:.1%} saved)")


if __name__ == "__main__":
    launch(functools.partial(main, parse_args()))
