"""Train a small byte-level Mixture-of-Experts language model with `epmoe.EPMoE`.

    python examples/train_lm.py                           # 4 ranks on the CPU, or one for each GPU, at most 4
    python examples/train_lm.py --nodes 2                 # as if the ranks were on two nodes
    torchrun --nproc-per-node 4 examples/train_lm.py      # the same, started by torchrun

The text is the source code of the Python standard library, which every machine has.  The experts are
distributed over the ranks, and all other parameters are replicated (data-parallel).  After training, rank 0
repeats one step without epmoe, in a single process, and compares the logits and all gradients.
_train_results.py prints the tables and writes the plot.
"""

import argparse
import math
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from _launch import num_gpus, set_device, shares_gpu
from _train_results import print_results, write_plot
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import epmoe
import epmoe.reference

HEAD_DIM = 32
AUX_WEIGHT = 0.01  # Weight of the load-balancing loss, as in the Switch Transformer.
VAL_BATCHES = 4  # Batches of each rank in one validation pass.
# Bounds on max|a - b| / max|b| of a whole tensor.  float32 rounds at 6e-8, and a gradient sums a few thousand
# terms.  So rounding alone gives about 1e-6, and a lost row or a wrong scale gives 1e-3 or more.  bfloat16
# rounds at 4e-3, several times in each MoE layer and its gradients, and FP8 at 3e-2.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float8_e4m3fn: 0.25}


class Block(nn.Module):
    """Causal self-attention, then a softmax top-k router and a MoE layer."""

    def __init__(self, args, moe):
        super().__init__()
        self.topk, self.heads = args.topk, args.hidden // HEAD_DIM
        self.norm1, self.norm2 = nn.LayerNorm(args.hidden), nn.LayerNorm(args.hidden)
        self.qkv = nn.Linear(args.hidden, 3 * args.hidden, bias=False)
        self.out = nn.Linear(args.hidden, args.hidden, bias=False)
        self.router = nn.Linear(args.hidden, args.experts, bias=False)
        self.moe = moe

    def forward(self, x, groups, chosen):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, HEAD_DIM))
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))

        h = self.norm2(x)
        probs = self.router(h).softmax(-1)
        self.preferred = probs.topk(self.topk, dim=-1).indices
        self.chosen = self.preferred if chosen is None else chosen
        weights = probs.gather(-1, self.chosen)
        if self.topk > 1:  # With topk 1 the weight would become 1, without a gradient for the router.
            weights = weights / weights.sum(-1, keepdim=True)
        y = self.moe(h.to(self.moe.gate_up_proj.dtype), self.chosen, weights)
        return x + y.to(x.dtype), self.balance_loss(probs, groups)

    def balance_loss(self, probs, groups):
        """Return the scaled sum of load times mean probability of each expert: 1 if all loads are equal."""
        probs, chosen = probs.reshape(groups, -1, probs.shape[-1]), self.chosen.view(groups, -1)
        ones = torch.ones_like(chosen, dtype=probs.dtype)
        load = torch.zeros_like(probs[:, 0]).scatter_add_(1, chosen, ones) / chosen.shape[1]
        return probs.shape[-1] * (load * probs.mean(1)).sum(-1).mean()


class MoELM(nn.Module):
    """The language model.

    `make_moe()` builds the MoE layer of each block.  So the same class runs with its experts distributed over
    the ranks, and with all experts in one process.
    """

    def __init__(self, args, make_moe):
        super().__init__()
        self.embed = nn.Embedding(256, args.hidden)  # The tokens are plain bytes.
        self.position = nn.Embedding(args.seq, args.hidden)
        self.blocks = nn.ModuleList(Block(args, make_moe()) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, windows, groups=1, chosen=None):
        """Return the cross-entropy of the next byte, the loss to minimise, and the logits.

        `groups` is the number of ranks whose windows are concatenated.  The balance loss is not linear.  So
        it is computed for each rank separately.
        """
        x = self.embed(windows[:, :-1]) + self.position.weight
        balances = []
        for block, indices in zip(self.blocks, chosen or [None] * len(self.blocks), strict=True):
            x, balance = block(x, groups, indices)
            balances.append(balance)
        logits = F.linear(self.norm(x), self.embed.weight)  # The head is tied to the embedding.
        entropy = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        return entropy, entropy + AUX_WEIGHT * sum(balances) / len(balances), logits


class ReferenceMoE(nn.Module):
    """All experts in one process, in plain torch."""

    def __init__(self, args):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(args.experts, 2 * args.hidden, args.hidden))
        self.down_proj = nn.Parameter(torch.empty(args.experts, args.hidden, args.hidden))

    def forward(self, x, idx, weights):
        return epmoe.reference.moe(x, idx, weights, self.gate_up_proj, self.down_proj)


class Trainer:
    """The training of one rank: model, data, optimizer and the reduction of gradients."""

    def __init__(self, args, world, device, dtype):
        self.args, self.world, self.device, self.dtype = args, world, device, dtype
        # All windows of seq + 1 bytes: the inputs, and one more byte for the last target.
        self.train, self.val = (t.to(device).unfold(0, args.seq + 1, 1) for t in read_corpus())
        self.generator = torch.Generator().manual_seed(args.seed * 1000 + world.rank)
        # The experts of each rank have their own random values.  All other parameters are those of rank 0.
        torch.manual_seed(args.seed * 1000 + world.rank)
        self.model = MoELM(args, self.make_moe).to(device)
        named = list(self.model.named_parameters())
        self.expert = {n: p for n, p in named if ".moe." in n}
        self.shared = {n: p for n, p in named if ".moe." not in n}
        for p in self.shared.values():
            dist.broadcast(p.data, 0)
        # A small update of a bfloat16 weight would be lost in rounding.  So the optimizer has a float32
        # copy of each weight.  For a float32 weight, the copy is the weight itself.
        self.masters = [(p.detach().float(), p) for _, p in named]
        self.optimizer = torch.optim.AdamW([m for m, _ in self.masters], fused=True)
        # Sums over all steps: choices by layer, source rank and expert, and tokens sent to each rank.
        self.choices = torch.zeros(args.layers, world.size, args.experts, dtype=torch.int64)
        # Over several nodes: tokens sent to each node.
        self.distinct = torch.zeros(args.nodes if args.nodes > 1 else world.size, dtype=torch.int64)

    def make_moe(self):
        args, options = self.args, dict(dtype=self.dtype, device=self.device)
        if args.fp8:
            options |= {"compute_dtype": torch.float8_e4m3fn, "fp8_recipe": args.fp8}
        sizes = args.hidden, args.hidden, args.experts, args.topk
        moe = epmoe.EPMoE(*sizes, self.world, max_tokens=args.batch * args.seq, **options)
        for p in (moe.gate_up_proj, moe.down_proj):
            nn.init.normal_(p, std=args.hidden**-0.5)
        moe.record_stats()
        return moe

    def windows(self):
        starts = torch.randint(len(self.train), (self.args.batch,), generator=self.generator)
        return self.train[starts].long()

    def gradients(self, windows):
        """Run forward and backward.  Return the cross-entropy averaged over the ranks, and the logits."""
        self.model.zero_grad()
        entropy, loss, logits = self.model(windows)
        loss.backward()
        # The loss to minimise is the mean over the ranks.  One flat all_reduce averages the gradients of the
        # shared parameters, and the loss that is reported.
        grads = [p.grad for p in self.shared.values()]
        flat = parameters_to_vector([*grads, entropy.detach()])
        dist.all_reduce(flat)
        vector_to_parameters(flat / self.world.size, grads)
        # The gradient of an expert already is the sum over the tokens of all ranks.
        for p in self.expert.values():
            p.grad /= self.world.size
        return flat[-1].item() / self.world.size, logits.detach()

    def step(self, step):
        loss, _ = self.gradients(self.windows())
        for i, block in enumerate(self.model.blocks):
            self.count(i, block.moe.last_layout, block.chosen)
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / self.args.steps))
        self.optimizer.param_groups[0]["lr"] = 4e-3 * decay * min(1.0, (step + 1) / 20)
        for master, p in self.masters:
            master.grad = p.grad.float()
        self.optimizer.step()
        for master, p in self.masters:
            p.data.copy_(master)
        return loss

    def count(self, i, layout, chosen):
        """Add the choices of a call of layer i, by source rank and expert, and the tokens that were sent."""
        if self.args.nodes == 1:
            self.choices[i] += layout.counts.cpu()
            self.distinct += layout.send_tokens.cpu()
            return
        # A rank knows what it has received.  The sources come from the choices of all ranks.
        mine = torch.bincount(chosen.flatten(), minlength=self.args.experts)
        counts = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(counts, mine)
        counts = torch.stack(counts).cpu()
        local = self.args.experts // self.world.size
        expected = counts[:, self.world.rank * local:][:, :local].sum(0)
        if layout.tokens_per_expert.tolist() != expected.tolist():
            raise AssertionError(f"rank {self.world.rank} received {layout.tokens_per_expert.tolist()} rows "
                                 f"for its experts, the ranks chose them {expected.tolist()} times")
        self.choices[i] += counts
        self.distinct += torch.tensor(layout.send_tokens)

    @torch.no_grad()
    def validate(self):
        """Return the mean loss over evenly spaced validation windows.  Each rank computes a part."""
        count = VAL_BATCHES * self.args.batch * self.world.size
        starts = torch.linspace(0, len(self.val) - 1, count).long()
        parts = starts[self.world.rank :: self.world.size].view(VAL_BATCHES, -1)
        total = sum(self.model(self.val[part].long())[0] for part in parts)
        dist.all_reduce(total)
        return total.item() / (VAL_BATCHES * self.world.size)


def read_corpus():
    """Return training and validation bytes.  Every tenth top-level module, by name, is for validation.

    Modules whose name begins with an underscore are not used, because some are generated for the machine.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    held_out = files[5::10]
    parts = [f for f in files if f not in held_out], held_out
    texts = (bytearray().join(f.read_bytes() for f in part) for part in parts)
    return [torch.frombuffer(text, dtype=torch.uint8) for text in texts]


def compare(trainer, windows):
    """Compare a step with the same model in one process.  All ranks must call this function.

    Rank 0 returns [(name, max|reference|, relative difference)] and the number of routings that the reference
    would have chosen differently.  The other ranks return None.
    """

    def gather(t):
        parts = [torch.empty_like(t) for _ in range(trainer.world.size)]
        dist.all_gather(parts, t.detach().contiguous())
        return torch.cat(parts)

    _, logits = trainer.gradients(windows)
    windows, logits = gather(windows), gather(logits)
    chosen = [gather(block.chosen) for block in trainer.model.blocks]
    weights = trainer.shared | {n: gather(p) for n, p in trainer.expert.items()}
    grads = {n: p.grad for n, p in trainer.shared.items()}
    grads |= {n: gather(p.grad) for n, p in trainer.expert.items()}
    if trainer.world.rank != 0:
        return None
    # The reference computes in float64, so the differences are rounding errors of the distributed model.
    # It uses the same choices of experts.  If two probabilities are nearly equal, rounding decides the top-k,
    # and a different choice is no error.  The number of different choices is printed.
    reference = MoELM(trainer.args, lambda: ReferenceMoE(trainer.args))
    reference.to(trainer.device, torch.float64).load_state_dict(weights)
    _, loss, ref_logits = reference(windows, groups=trainer.world.size, chosen=chosen)
    loss.backward()
    pairs = [("logits", logits, ref_logits.detach())]
    pairs += [("d " + n, grads[n], p.grad) for n, p in reference.named_parameters()]
    table = [(n, b.abs().max(), (a - b).abs().max()) for n, a, b in pairs]
    moved = [(b.preferred.sort()[0] != b.chosen.sort()[0]).any(-1).sum() for b in reference.blocks]
    return [(n, b.item(), (d / b).item()) for n, b, d in table], sum(moved).item()


def progress(steps):
    """Return the steps, with a progress bar if the output is a terminal and rich is installed."""
    try:
        from rich.progress import track
    except ImportError:
        return steps
    return track(steps, "training") if sys.stdout.isatty() else steps


def run(args, world, device):
    """Run one rank's part.  Rank 0 prints, and returns the reasons for a failure, if any."""
    began = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" or args.fp8 else torch.float32
    bound = BOUNDS[torch.float8_e4m3fn if args.fp8 else dtype]
    trainer = Trainer(args, world, device, dtype)
    if world.rank == 0:
        shared = device.type == "cuda" and world.size > torch.cuda.device_count()
        where = f"{device.type}, sharing {torch.cuda.device_count()} GPU" if shared else device.type
        over = f", {args.nodes} nodes" if args.nodes > 1 else ""
        print(f"{world.size} ranks on {where}{over}, {args.experts} experts, top {args.topk}")
    train, val, every = [], {0: trainer.validate()}, max(10, args.steps // 10)
    steps = range(1, args.steps + 1)
    for step in progress(steps) if world.rank == 0 else steps:
        train.append(trainer.step(step - 1))
        if step % every == 0 or step == args.steps:
            val[step] = trainer.validate()
            if world.rank == 0:
                line = f"step {step:4d}  train {train[-1]:.3f}  validation {val[step]:.3f}"
                print(f"{line}  {time.perf_counter() - began:5.1f} s", flush=True)
    compared = compare(trainer, trainer.windows())
    own = world.node if args.nodes > 1 else world.rank
    distinct = (trainer.distinct.sum() - trainer.distinct[own]).to(device)
    dist.all_reduce(distinct)
    waited_s = sum(block.moe.stats().waited_s for block in trainer.model.blocks)
    for block in trainer.model.blocks:
        block.moe.layer.finalize()
    if world.rank != 0:
        return []

    choices, row_bytes = trainer.choices, args.hidden * dtype.itemsize
    print_results(train, val, *compared, choices.sum(0), args.nodes, distinct.item(), row_bytes,
                  waited_s)
    write_plot(args.plot, train, val, choices, waited_s)
    print(f"{time.perf_counter() - began:.1f} s\n")
    # Random guesses have a loss of ln 256 = 5.5 nats per byte.  The frequency of each byte gives about 3.1.
    fall, wanted = val[0] - val[args.steps], min(2.5, 0.0125 * args.steps)
    name, _, worst = max(compared[0], key=lambda row: math.inf if math.isnan(row[2]) else row[2])
    made = args.steps * args.layers * world.size * args.batch * args.seq * args.topk
    checks = {
        f"validation loss fell by {fall:.3f} nats, expected at least {wanted}": fall >= wanted,
        f"largest difference {worst:.1e} ({name}), bound {bound}": worst <= bound,
        f"{choices.sum()} of {made} choices reached their experts": choices.sum() == made,
    }
    for text, good in checks.items():
        print(f"{'ok' if good else 'BAD':4}{text}")
    return [text for text, good in checks.items() if not good]


def rank_main(rank, args, init_method):
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.cuda:
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
        device = set_device(int(os.environ.get("LOCAL_RANK", rank)), num_local)
    backend = "nccl" if args.cuda else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=args.ranks)
    world = epmoe.World() if args.nodes == 1 else epmoe.Nodes(None, args.ranks // args.nodes)
    with world:
        reasons = run(args, world, device)
    dist.destroy_process_group()
    if rank == 0:
        print("demo: FAILED: " + "; ".join(reasons) if reasons else "demo: ok", flush=True)
    sys.exit(1 if reasons else 0)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = dict(steps=300, hidden=128, layers=2, experts=16, topk=4, batch=8, seq=64, seed=0)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--ranks", type=int,
                        help="default: 4 on the CPU, one for each GPU up to 4, 2 on a single GPU")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of equally many ranks; default: 1")
    parser.add_argument("--plot", default="demo.png", help="where to write the plot")
    parser.add_argument("--fp8", nargs="?", const="blockwise", choices=("blockwise", "rowwise"),
                        help="the products of the experts in FP8, with this recipe (blockwise)")
    parser.add_argument("--quick", action="store_true", help="20 steps, for tests")
    args = parser.parse_args()
    args.steps = 20 if args.quick else args.steps
    args.share_gpu = shares_gpu()
    gpus = num_gpus()
    if "RANK" in os.environ:  # started by torchrun
        args.ranks = int(os.environ["WORLD_SIZE"])
    elif args.ranks is None and gpus == 1:  # Two ranks share the GPU.  One rank would send no token.
        args.ranks, args.share_gpu = 2, True
    elif args.ranks is None:
        args.ranks = max(r for r in (1, 2, 3, 4) if r <= (gpus or 4) and args.experts % r == 0)
    # torchrun may start ranks on several hosts.  Each rank of this host needs a GPU of this host.
    args.cuda = gpus >= (1 if args.share_gpu else int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks)))
    if args.nodes < 1 or args.ranks % args.nodes:
        parser.error(f"--nodes {args.nodes}: the {args.ranks} ranks must be a multiple of it")
    if args.experts % args.ranks or args.hidden % HEAD_DIM or args.topk > args.experts:
        parser.error(f"--experts {args.experts} must be a multiple of --ranks {args.ranks}, --hidden "
                     f"{args.hidden} a multiple of {HEAD_DIM}, and --topk {args.topk} at most --experts")
    return args


def main():
    args = parse_args()
    if "RANK" in os.environ:
        rank_main(int(os.environ["RANK"]), args, "env://")
    if args.share_gpu:
        os.environ["EPMOE_SHARE_GPU"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(rank_main, (args, f"file://{folder}/rendezvous"), nprocs=args.ranks)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            if getattr(error, "exit_code", None) != 1:  # With 1, rank 0 has printed the reason.
                print(f"{error}\ndemo: FAILED: a rank did not finish")
            sys.exit(1)


if __name__ == "__main__":
    main()
