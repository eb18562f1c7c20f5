"""EPMoE over several nodes: the oracle in float64, gradients, the forms of the layer, DDP, state dicts."""

import os

import pytest
import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import Case, generator, indices_of, outcome, process_ranks
from epmoe import reference
from pace import HANG_S
from parallel_cases import check_prepared_ddp, check_wrong_mesh

pytestmark = pytest.mark.cpu_only
HIDDEN, INNER, TOPK, EXPERTS = 16, 32, 3, 8
FORMS = {"fused": {}, "choices": {"token_saving": False}, "unfused": {"fused": False}, "bias": {"bias": True},
         "physical": {"num_physical": 12},
         "gather": {"enable_local_combine": False, "combine_mode": "gather"}}
CASES = {"unequal": Case(topk=TOPK, max_tokens=9, tokens="unequal", pattern="sentinels"),
         "empty node": Case(topk=TOPK, max_tokens=9, tokens="only_last", pattern="one_rank"),
         "none": Case(topk=TOPK, max_tokens=9, tokens="none")}


def inputs(case, rank, size):
    idx = indices_of(case, rank, size)
    g = generator(case.seed, rank, 21)
    x, weight, d_out = (torch.randn(len(idx), n, generator=g) for n in (HIDDEN, TOPK, HIDDEN))
    return x.requires_grad_(), idx, weight.requires_grad_(), d_out


def step(moe, case, call=None):
    x, idx, weight, d_out = inputs(case, moe.layer.rank, moe.layer.world_size)
    moe.zero_grad()
    y = (moe if call is None else call)(x, idx, weight)
    y.backward(d_out)
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad} | {
        n: p.grad.clone() for n, p in moe.named_parameters()}


def main(rank, size):
    torch.manual_seed(5)
    results, facts = {}, {}
    for form, options in FORMS.items():
        moe = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, max_tokens=9, dtype=torch.float32, device="cpu",
                          local_world_size=2, timeout_s=HANG_S, **options)
        state = epmoe.whole_state_dict(moe)
        for name, case in CASES.items():
            results[form, name] = step(moe, case) | {"state": state}
            again = step(moe, case, lambda *args: checkpoint(moe, *args, use_reentrant=False))
            facts[form, name] = all(torch.equal(v, results[form, name][n]) for n, v in again.items())
        with torch.no_grad():
            x, idx, weight, _ = inputs(CASES["unequal"], rank, size)
            facts[form] = torch.equal(moe(x, idx, weight), results[form, "unequal"]["y"])
        if form == "choices":
            facts |= with_compiled_choices(moe, results, rank)
        if form == "fused":
            facts |= with_compiler(moe, results, rank, size)
            shared = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, layer=moe.layer, dtype=torch.float32)
            shared.load_state_dict(moe.state_dict())
            facts["shared"] = torch.equal(step(shared, CASES["unequal"])["y"], results[form, "unequal"]["y"])
            facts["state"] = {n: tuple(t.shape) for n, t in moe.state_dict().items()}
            facts["ddp"] = with_ddp(moe, rank, size)
            facts["map"] = "spans several nodes" in outcome(lambda: moe.set_expert_map(None)).text
        moe.finalize()
    plain = epmoe.EPAll2AllLayer(None, 9, HIDDEN, TOPK, None, EXPERTS, 2, dtype=torch.float32, device="cpu")
    moe = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, layer=plain, dtype=torch.float32)
    results["plain", "unequal"] = step(moe, CASES["unequal"]) | {"state": epmoe.whole_state_dict(moe)}
    return results, facts


def with_compiler(moe, results, rank, size):
    """Whether one graph has the bits of Python for all cases, and a wrong index is an error on all ranks."""
    facts, compiled = {}, torch.compile(moe, backend="aot_eager", fullgraph=True, dynamic=True)
    facts["no breaks"] = breaks(moe) == []
    for name, case in CASES.items():
        got = step(moe, case, compiled)
        facts["compiled", name] = all(torch.equal(t, results["fused", name][n]) for n, t in got.items())
    x, idx, weight, _ = inputs(CASES["empty node"], rank, size)
    wrong = outcome(lambda: compiled(x, torch.full_like(idx, 99), weight))  # only the last rank has tokens
    facts["wrong index"] = wrong.kind == "EpIndexError" and "rank 3: expert index 99 of token 0" in wrong.text
    return facts


def breaks(moe):
    """Return where a compiler that may break the graph does so."""
    found = torch._dynamo.utils.counters["graph_break"]
    found.clear()
    for name in ("unequal", "empty node"):
        step(moe, CASES[name], torch.compile(moe, backend="aot_eager", dynamic=True))
    return list(found)


def with_compiled_choices(moe, results, rank):
    """Whether one graph has the bits of Python also where each choice is a token of its own."""
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True, dynamic=True)
    got = step(moe, CASES["unequal"], compiled)
    right = all(torch.equal(t, results["choices", "unequal"][n]) for n, t in got.items())
    num = 10 if rank == 1 else 9  # one more than max_tokens
    x, idx, weight = torch.ones(num, HIDDEN), torch.zeros(num, TOPK, dtype=torch.int64), torch.ones(num, TOPK)
    wrong = outcome(lambda: compiled(x, idx, weight)).kind
    wanted = "ValueError" if rank == 1 else "PeerError"
    return {"compiled choices": right, "too many choices": wrong == wanted}


class Model(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.router, self.moe = nn.Linear(HIDDEN, TOPK), moe

    def forward(self, x, idx):
        return self.moe(x, idx, self.router(x).softmax(-1))


def with_ddp(moe, rank, size):
    """Whether a step under DDP keeps the routers of all ranks equal, and scales the experts' gradients."""
    model = DistributedDataParallel(epmoe.prepare_ddp(Model(moe)))
    x, idx, _, d_out = inputs(CASES["unequal"], rank, size)
    model(x, idx).backward(d_out)
    grads = [torch.empty_like(model.module.router.weight) for _ in range(size)]
    torch.distributed.all_gather(grads, model.module.router.weight.grad)
    scale, moe.gradient_scale = moe.gradient_scale, 1.0
    return scale == 1 / size and all(torch.equal(g, grads[0]) for g in grads)


@pytest.fixture(scope="module")
def everything():
    return process_ranks(main, 4)


@pytest.mark.parametrize("form", [*FORMS, "plain"])
def test_moe_over_nodes_is_the_oracle(everything, form):
    """Outputs and all gradients, against one process in float64."""
    for name in [n for n in CASES if (form, n) in everything[0][0]]:
        case, results = CASES[name], [r[form, name] for r, _ in everything]
        args = [inputs(case, rank, 4) for rank in range(4)]
        x, weight, d_out = (torch.cat([a[i].detach().double() for a in args]) for i in (0, 2, 3))
        idx = torch.cat([a[1] for a in args])
        params = {n: t.double().requires_grad_() for n, t in results[0]["state"].items()}
        y = reference.moe(x.requires_grad_(), idx, weight.requires_grad_(), params["gate_up_proj"],
                          params["down_proj"], "swiglu", params.get("gate_up_proj_bias"),
                          params.get("down_proj_bias"))
        y.backward(d_out)
        wanted = {"y": y.detach(), "dx": x.grad, "dw": weight.grad} | {n: p.grad for n, p in params.items()}
        for what, want in wanted.items():
            got = torch.cat([r[what] for r in results]).double()
            if what in params:  # physical experts after the last one hold nothing
                got = torch.cat([r[what][: -(-EXPERTS // 4)] for r in results]).double()
            assert got.shape == want.shape, f"{name}: {what} {got.shape} {want.shape}"
            largest = want.abs().max().item() if want.numel() else 0.0
            assert torch.allclose(got, want, rtol=0, atol=2e-6 * largest), f"{name}: {what}"


def over_nodes(rank, size, fn, *args):
    os.environ["LOCAL_WORLD_SIZE"] = str(max(1, size // 2))
    return fn(rank, size, *args)


@pytest.mark.long
def test_recipes_over_nodes():
    """Tests of one node: DDP with a compiled forward, and FSDP2 over different experts."""
    def run(fn, size, *args, **options):
        return process_ranks(over_nodes, size, fn, *args, **options)

    check_prepared_ddp(run, "compiled")
    check_wrong_mesh(run)


def test_moe_over_nodes_in_a_model(everything):
    """Checkpointing, no_grad, torch.compile, shared layers, DDP and state dicts."""
    for _, facts in everything:
        assert facts.pop("state") == {"gate_up_proj": (8, 64, 16), "down_proj": (8, 16, 32)}
        assert all(facts.values()), facts
