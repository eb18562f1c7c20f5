"""The fused operator under torch.compile."""

import pytest
import torch

from cases import first, make_op, same_bits
from fused_cases import LEAVES, Experts, StagedOp, has_fused_path, tensors
from pace import HANG_S


def run_compiled(world, device):
    """Forward and backward, compiled as one graph, without and with gradients.

    Returns the comparisons with the same function uncompiled, and whether there was a fused launch. A second
    call of the compiled function uses the same graph again.
    """
    torch._dynamo.reset()
    case = Experts(tokens="full", capacity="roomy", activation="gelu")
    op = make_op(world, device, case, StagedOp)
    t = tensors(case, world.rank, world.size, device)

    def forward(x, weight, w1, b1, w2, b2):
        h, row_weight, layout = op.mega_dispatch_group_gemm(x, t.idx, gemm_weight=w1, weight=weight, bias=b1,
                                                            activation=case.activation)
        return op.mega_group_gemm_combine(h, w2, layout, row_weight, bias=b2)

    compiled, equal = torch.compile(forward, backend="aot_eager", fullgraph=True), []
    for with_grad in (False, True):
        seen = []
        for fn in (forward, compiled, compiled):
            leaves = [getattr(t, n).detach().clone().requires_grad_(with_grad) for n in LEAVES]
            y = fn(*leaves)
            if with_grad:
                y.backward(t.dy)
            seen.append([y.detach()] + [p.grad for p, n in zip(leaves, LEAVES) if with_grad and n[0] != "b"])
        equal += [torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later)]
    launches = op.num_launches
    op.synchronize()
    op.finalize()
    return equal, launches > 0 or not has_fused_path(device)


def count_graphs(world, device, with_capacity, token_saving):
    """The number of graphs for twelve numbers of tokens, compiled with dynamic=True. Results are compared."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case = Experts(tokens="full", max_tokens=16, capacity="roomy" if with_capacity else None, bias=False)
    op = make_op(world, device, case, StagedOp, token_saving=token_saving)
    t = tensors(case, world.rank, world.size, device)

    def forward(x, idx, weight):
        h, row_weight, layout = op.mega_dispatch_group_gemm(x, idx, gemm_weight=t.w1, weight=weight,
                                                            activation=case.activation)
        return op.mega_group_gemm_combine(h, t.w2, layout, row_weight)

    compiled = torch.compile(forward, backend="aot_eager", dynamic=True, fullgraph=True)
    for tokens in (5, 9, 7, 6, 8, 10, 11, 12, 13, 14, 15, 16):
        seen = []
        for fn in (forward, compiled):
            x = t.x[:tokens].clone().requires_grad_()
            y = fn(x, t.idx[:tokens].clone(), t.weight[:tokens].clone())
            y.sum().backward()
            seen.append((y.detach(), x.grad))
        for a, b in zip(*seen):
            same_bits(b, a, f"{tokens} tokens")
    op.synchronize()
    op.finalize()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("with_capacity, token_saving",
                         first(1, [(False, True), (True, False), (False, False), (True, True)]))
def test_fused_many_sizes_share_one_graph(ranks, with_capacity, token_saving):
    num_graphs = ranks.isolated(count_graphs, with_capacity, token_saving, world_size=1, timeout_s=HANG_S)
    assert num_graphs == [1] * ranks.size(1)


def test_fused_is_traced_by_the_compiler(ranks):
    for equal, launched in ranks.isolated(run_compiled, world_size=1, timeout_s=HANG_S):
        assert launched and len(equal) == 2 + 2 * 5 and all(equal)
