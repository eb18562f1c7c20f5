"""EPMoE on the fused operator, for tests of training steps in 16 bits."""

import torch

import epmoe
from cases import make_op, same_bits
from fused_cases import LEAVES, StagedOp, has_fused_path, poison_staging, tensors

NAMES = {"w1": "gate_up_proj", "b1": "gate_up_proj_bias", "w2": "down_proj", "b2": "down_proj_bias"}


def make_moe(world, device, case, t, gradients=None, kind=StagedOp, **options):
    """An EPMoE with the parameters of t, on an operator of this kind. gradients: where its gradients go."""
    op = make_op(world, device, case, kind, **options)
    poison_staging(op)
    moe = epmoe.EPMoE(case.hidden, case.inner, op.num_experts, case.topk, activation=case.activation,
                      layer=op, dtype=case.dtype, device=device, bias=case.bias, **(gradients or {}))
    with torch.no_grad():
        for name, attribute in NAMES.items():
            if getattr(t, name) is not None:
                getattr(moe, attribute).copy_(getattr(t, name))
    return moe


def step(moe, t, leaves, forward=None):
    """y and the gradients of the leaves."""
    x, weight = (getattr(t, n).detach().clone().requires_grad_(n in leaves) for n in ("x", "weight"))
    for name, attribute in NAMES.items():
        if getattr(moe, attribute) is not None:
            getattr(moe, attribute).requires_grad_(name in leaves).grad = None
    y = (forward or moe)(x, t.idx, weight)
    y.backward(t.dy)
    of = {"x": x, "weight": weight} | {n: getattr(moe, a) for n, a in NAMES.items()}
    grads = {n: None if leaf is None else leaf.grad for n, leaf in of.items()}
    return {"y": y.detach()} | {n: g for n, g in grads.items() if n in leaves and getattr(t, n) is not None}


def works_after(world, moe, t):
    """Whether a step after an error has gradients.  Closes the module."""
    world.exchange(b"raised")
    after = step(moe, t, LEAVES)
    moe.layer.synchronize()
    moe.finalize()
    return bool(after["x"].isfinite().all())


def gradients(world, device, case, leaves=LEAVES, **options):
    """The results of the fused experts, which must have the bits of the stages, also in a second step."""
    t = tensors(case, world.rank, world.size, device)
    seen = []
    for fused in (False, True):
        moe = make_moe(world, device, case, t, fused=fused, **options)
        seen += [step(moe, t, leaves), step(moe, t, leaves)]
        of_step = 4  # also where this rank wants no gradient of tokens, because another rank may want it
        assert moe.layer.num_launches == (2 * of_step if fused and has_fused_path(device) else 0)
        moe.layer.synchronize()
        moe.finalize()
    for other in seen[1:]:
        assert set(other) == set(seen[0])
        for name, value in seen[0].items():
            assert value is not None, name
            same_bits(other[name], value, f"rank {world.rank}: {name}")
    return seen[0]


def capture(world, moe, forward):
    """(graph, results): forward() runs once on a side stream and is then captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    moe.layer.synchronize()
    world.exchange(b"x")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        captured = forward()
    world.exchange(b"x")
    return graph, captured
