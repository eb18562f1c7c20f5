"""EPMoE over several nodes in chunks, with numbers for which every sum is exact."""

import torch

import epmoe
from cases import Case, generator, indices_of

HIDDEN, INNER, EXPERTS, TOPK = 16, 8, 8, 3
CASES = (Case(topk=TOPK, max_tokens=9, tokens="unequal", pattern="sentinels"),
         Case(topk=TOPK, max_tokens=9, tokens="only_last", pattern="one_rank"),
         Case(topk=TOPK, max_tokens=9, tokens="none"))


def moe_of(nodes, num_chunks, dtype=torch.float32, **options):
    moe = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, nodes, activation="relu2", max_tokens=9, dtype=dtype,
                      device="cpu", bias=True, num_chunks=num_chunks, **options)
    g = generator(moe.layer.rank, 3)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randint(-2, 3, p.shape, generator=g))
    return moe


def inputs_of(moe, case):
    idx = indices_of(case, moe.layer.rank, moe.layer.world_size)
    g = generator(case.seed, moe.layer.rank, 4)
    x, weight, d_out = (torch.randint(-2, 3, (len(idx), n), generator=g) for n in (HIDDEN, TOPK, HIDDEN))
    dtype = moe.layer.dtype
    return x.to(dtype).requires_grad_(), idx, weight.float().requires_grad_(), d_out.to(dtype)


def step(moe, case, call=None):
    x, idx, weight, d_out = inputs_of(moe, case)
    moe.zero_grad()
    y = (call or moe)(x, idx, weight)
    y.backward(d_out)
    layout = moe.last_layout
    facts = [layout.num_rows, *layout.tokens_per_expert_list, *layout.unpadded_tokens_per_expert.tolist()]
    with torch.no_grad():
        again = moe(x, idx, weight)
    got = {"y": y.detach(), "again": again, "dx": x.grad, "dw": weight.grad, "facts": torch.tensor(facts)}
    return got | {n: p.grad.clone() for n, p in moe.named_parameters()}
