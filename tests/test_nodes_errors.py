"""Wrong calls of a layer over several nodes: all ranks of all nodes raise an error; the next call works."""

import pytest
import torch

import epmoe
from cases import Case, generator, indices_of, outcome, process_ranks, random_numbers
from nodes_cases import check_one, layer_of, run_nodes, run_one
from pace import WAIT_S

pytestmark = pytest.mark.cpu_only
CASE = Case(num_local=2, topk=3, hidden=16, max_tokens=6, dtype=torch.float32)
BAD = 2  # the rank that makes the mistake: of 2 nodes x 2, the first of the second node


def arguments(layer):
    idx = indices_of(CASE, layer.rank, layer.world_size)
    return {"input": random_numbers((len(idx), 16), torch.float32, generator(layer.rank)), "exp_indices": idx,
            "weight": torch.rand(idx.shape)}


def wrong_index(args):
    args["exp_indices"][4, 1] = 99


# name: (change of the arguments of dispatch on rank BAD, its error, the error of the others, texts)
DISPATCH = {
    "dtype": (lambda a: a.update(input=a["input"].half()), "TypeError", "PeerError", "torch.float32"),
    "type": (lambda a: a.update(input=None), "TypeError", "PeerError", "wanted a tensor"),
    "hidden": (lambda a: a.update(input=a["input"][:, :8]), "ValueError", "PeerError", "[*, 16]"),
    "stride": (lambda a: a.update(input=torch.empty(6, 32)[:, ::2]), "ValueError", "PeerError", "contiguous"),
    "tokens": (lambda a: a.update(input=a["input"][:3]), "ValueError", "PeerError", "3 tokens"),
    "many": (lambda a: a.update(input=torch.ones(7, 16), exp_indices=torch.zeros(7, 3, dtype=torch.int64),
                                weight=None), "ValueError", "PeerError", "at most 6"),
    "indices": (lambda a: a.update(exp_indices=None), "TypeError", "PeerError", "exp_indices is None"),
    "index dtype": (lambda a: a.update(exp_indices=a["exp_indices"].half()), "TypeError", "PeerError",
                    "int64"),
    "choices": (lambda a: a.update(exp_indices=a["exp_indices"][:, :2]), "ValueError", "PeerError", "[*, 3]"),
    "weight": (lambda a: a.update(weight=a["weight"][:, :2]), "ValueError", "PeerError", "weight"),
    "buffer": (lambda a: a.update(buffer=1), "ValueError", "PeerError", "buffer 1"),
    "scatter": (lambda a: a.update(full_scatter_indices=a["exp_indices"].int()), "ValueError", "PeerError",
                "full_scatter_indices"),
    "layout": (lambda a: a.update(layout="layout"), "TypeError", "PeerError", "layout"),
    "index": (wrong_index, "EpIndexError", "EpIndexError",
              f"rank {BAD}: expert index 99 of token 4, choice 1"),
    "one without weights": (lambda a: a.update(weight=None), "EpMismatch", "EpMismatch", "pass weights"),
    "one with gradients": (lambda a: a.update(input=a["input"].requires_grad_()), "EpMismatch", "EpMismatch",
                           "pass gradients"),
}


def mistakes(nodes):
    """Make each mistake on rank BAD, then a right call.  Returns the outcomes and the right call's result."""
    is_bad, found = nodes.rank == BAD, {}
    layer, other = layer_of(nodes, CASE), layer_of(nodes, CASE)
    for name, (change, *_) in DISPATCH.items():
        args = arguments(layer)
        if is_bad:
            change(args)
        found[name] = outcome(lambda: layer.dispatch(**args))
    rows, row_weight, layout = layer.dispatch(**arguments(layer))
    planned = layer.preprocess(arguments(layer)["exp_indices"])
    combines = {
        "combine rows": lambda: layer.combine(rows[:-1] if is_bad else rows, layout),
        "combine layout": lambda: layer.combine(rows, None if is_bad else layout),
        "combine planned": lambda: layer.combine(rows, planned if is_bad else layout),
        "combine weight": lambda: layer.combine(rows, layout, "w" if is_bad else row_weight),
        "other call": lambda: layer.combine(rows, layout) if is_bad else layer.preprocess(layout.owner),
        "other layer": lambda: (other if is_bad else layer).preprocess(arguments(layer)["exp_indices"]),
        "barrier": lambda: layer.ep_barrier_all(buffer=3 if is_bad else 0),
        "again": lambda: layer.dispatch(arguments(layer)["input"][: 2 if is_bad else None], layout=layout),
    }
    found |= {name: outcome(call) for name, call in combines.items()}
    layer.ep_barrier_all()
    right = run_one(layer, CASE)
    other.finalize()
    layer.finalize()
    found["closed"] = outcome(lambda: layer.preprocess(arguments(layer)["exp_indices"]))
    return found, right


def test_every_mistake_is_an_error_on_all_ranks():
    """Of the rank that makes it, and PeerError, which names that rank, on all others, also of other nodes."""
    results = run_nodes(mistakes, 2, 2)
    wanted = {name: rest for name, (_, *rest) in DISPATCH.items()} | {
        "combine rows": ("ValueError", "PeerError", "input rows"),
        "combine layout": ("TypeError", "PeerError", "layout"),
        "combine planned": ("ValueError", "PeerError", "only planned"),
        "combine weight": ("TypeError", "PeerError", "weight"),
        "other call": ("EpMismatch", "EpMismatch", f"rank {BAD} has combine, rank 0 has plan"),
        "other layer": ("EpMismatch", "EpMismatch", f"layer: rank {BAD} has 1, rank 0 has 0"),
        "barrier": ("ValueError", "PeerError", "buffer 3"),
        "again": ("ValueError", "PeerError", "[6, 16]"),
        "closed": ("EpClosed", "EpClosed", ""),
    }
    assert wanted.keys() == results[0][0].keys()
    for name, (own, others, text) in wanted.items():
        for rank, (found, _) in enumerate(results):
            got = found[name]
            assert got.kind == (own if rank == BAD else others), f"{name}, rank {rank}: {got}"
            texts = (text,) if rank == BAD or own == others else (f"rank {BAD}", "See the error")
            assert all(t in got.text for t in texts), f"{name}, rank {rank}: {got}"
    check_one([right for _, right in results], CASE, 2)


def creations(nodes):
    """Make mistakes in the creation of a layer on rank BAD, then create one."""
    sizes = {"max_tokens": 6, "hidden": 16, "topk": 2, "num_tot_experts": 8, "dtype": torch.float32}
    found = {}
    for name, value in (("num_tot_experts", 6), ("rank", 7), ("world_size", 9), ("capacity", 5),
                        ("hidden", 32), ("num_tot_experts", None), ("num_tot_experts", 8.5),
                        ("max_tokens", 2.5), ("max_tokens", "4"), ("max_tokens", 0),
                        ("local_world_size", 1), ("combine_mode", "none")):
        mine = sizes | ({name: value} if nodes.rank == BAD else {})
        found[name, value] = outcome(lambda: epmoe.EPAll2AllLayer(nodes, device="cpu", **mine))
    found["all"] = outcome(lambda: epmoe.EPAll2AllLayer(nodes, device="cpu", **sizes | {"hidden": 3}))
    found["decode"] = outcome(lambda: epmoe.EPMoE(16, 16, 8, 2, nodes, max_tokens=6, device="cpu")
                              .enable_decode(4))
    found["low latency"] = outcome(lambda: epmoe.LowLatencyAll2All(nodes, 6, 16, 2, 8, device="cpu"))
    epmoe.EPAll2AllLayer(nodes, device="cpu", **sizes).finalize()
    return found


def test_wrong_creations_are_errors_on_all_ranks():
    """A layer that one rank cannot create is created by none."""
    results = run_nodes(creations, 2, 2)
    own = {("num_tot_experts", 6): "ValueError", ("rank", 7): "ValueError", ("world_size", 9): "ValueError",
           ("capacity", 5): "ValueError", ("num_tot_experts", None): "TypeError",
           ("num_tot_experts", 8.5): "ValueError", ("max_tokens", 2.5): "ValueError",
           ("max_tokens", "4"): "ValueError", ("local_world_size", 1): "ValueError"}
    for rank, found in enumerate(results):
        for name, got in found.items():
            if name in ("all", "decode", "low latency"):
                assert got.kind == "ValueError", f"{name}, rank {rank}: {got}"
                assert name == "all" or "ranks of one node" in got.text, f"{name}, rank {rank}: {got}"
            elif name in own:
                assert got.kind == (own[name] if rank == BAD else "PeerError"), f"{name}, rank {rank}: {got}"
            else:
                assert got.kind == "EpMismatch" and f"rank {BAD} creates" in got.text, f"{name}: {got}"


def _nodes_that_exist(rank, size):
    """Rank main: another local_world_size on one rank, then on all, where the nodes exist already."""
    def make(local, kind=epmoe.EPMoE):
        options = {"max_tokens": 4, "dtype": torch.float32, "device": "cpu", "local_world_size": local}
        return kind(16, 32, 8, 2, **options) if kind is epmoe.EPMoE else kind(
            None, hidden=16, topk=2, num_tot_experts=8, **options)

    first = epmoe.EPMoE(16, 32, 8, 2, max_tokens=4, dtype=torch.float32, device="cpu", local_world_size=2,
                        timeout_s=WAIT_S)
    x, idx, weight = torch.randn(2, 16), torch.tensor([[0, 7], [1, 2]]), torch.ones(2, 2)
    found, kinds = {}, []
    for local in (1, 4, 9, "2"):
        for kind in (epmoe.EPMoE, epmoe.EPAll2AllLayer):
            found[local, kind.__name__] = outcome(lambda: make(local if rank == BAD else 2, kind)).kind
    for local in (None, 2):  # they are those of all layers of the group
        kinds.append(make(local).layer.nodes is first.layer.nodes)
    return found, kinds, first(x, idx, weight).isfinite().all().item()


def test_another_number_of_local_ranks_is_an_error_on_all_ranks():
    for rank, (found, kinds, works) in enumerate(process_ranks(_nodes_that_exist, 4)):
        for (local, name), kind in found.items():
            assert kind == ("ValueError" if rank == BAD else "PeerError"), (rank, local, name, kind)
        assert kinds == [True, True] and works


def second_derivatives(nodes, num_chunks):
    """create_graph=True on one rank, then on all. The next call works."""
    moe = epmoe.EPMoE(16, 16, 8, 2, nodes, max_tokens=6, device="cpu", num_chunks=num_chunks)
    x = torch.ones(6, 16, dtype=torch.bfloat16, requires_grad=True)
    idx, weight = indices_of(Case(topk=2, max_tokens=6), nodes.rank, 4), torch.ones(6, 2)

    def step(create_graph):
        return torch.autograd.grad(moe(x, idx, weight).float().sum(), x, create_graph=create_graph)

    return [outcome(lambda: step(create_graph)).kind
            for create_graph in (nodes.rank == BAD, False, True, False)]


@pytest.mark.parametrize("num_chunks", (1, 2))
def test_second_derivatives_in_16_bits_are_an_error_on_all_ranks(num_chunks):
    for rank, found in enumerate(run_nodes(second_derivatives, 2, 2, num_chunks)):
        first = "NotImplementedError" if rank == BAD else "PeerError"
        assert found == [first, "nothing", "NotImplementedError", "nothing"], (rank, found)


def no_memory(nodes):
    """The product of the experts has no memory on rank BAD."""
    moe = epmoe.EPMoE(16, 16, 8, 2, nodes, dtype=torch.float32, max_tokens=6, device="cpu")
    case = Case(topk=2, max_tokens=6)
    args = torch.ones(6, 16), indices_of(case, nodes.rank, 4), torch.ones(6, 2)
    good = moe._compute

    def fails(layer, *args):
        out = layer.dispatch(args[0], args[1], args[2])
        return layer._propagate(epmoe._C.OP_COMBINE, MemoryError("no memory"), out[2].buffer)

    if nodes.rank == BAD:
        moe._compute = fails
    got = outcome(lambda: moe(*args))
    moe._compute = good
    return got, outcome(lambda: moe(*args)).kind


def test_lack_of_memory_is_an_error_on_all_ranks():
    """Between dispatch and combine; the module works afterwards."""
    for rank, (got, after) in enumerate(run_nodes(no_memory, 2, 2)):
        assert got.kind == ("MemoryError" if rank == BAD else "PeerError") and after == "nothing", f"{got}"


def fused_gradients(nodes):
    """The tokens of a fused dispatch require a gradient on rank BAD only, or all but them; the weights do."""
    op = epmoe.EpAll2AllFusedOp(nodes, 6, 16, 2, num_tot_experts=8, dtype=torch.float32, device="cpu")
    w1, w2 = (torch.ones(shape, requires_grad=True) for shape in ((2, 32, 16), (2, 16, 32)))
    idx, weight = indices_of(Case(topk=2, max_tokens=6), nodes.rank, 4), torch.ones(6, 2)

    def step(wants):
        x = torch.ones(6, 16, requires_grad=wants)
        h, row_weight, layout = op.mega_dispatch_group_gemm(x, idx, gemm_weight=w1, weight=weight)
        op.mega_group_gemm_combine(h, w2, layout, row_weight).sum().backward()

    is_bad = nodes.rank == BAD
    found = [outcome(lambda: step(wants)).kind for wants in (is_bad, not is_bad, True, False)]
    op.finalize()
    return found


def test_gradients_of_tokens_that_one_rank_wants_of_a_fused_call():
    assert run_nodes(fused_gradients, 2, 2) == 4 * [["EpMismatch", "EpMismatch", "nothing", "nothing"]]


def wrong_products(nodes):
    """Pass weights of a wrong size to each fused call on rank BAD, then right ones."""
    is_bad, (w1, w2) = nodes.rank == BAD, (torch.ones(2, 32, 16), torch.ones(2, 16, 32))
    wrong1, wrong2 = (w1[:, :, :8].contiguous(), w2[:, :8].contiguous()) if is_bad else (w1, w2)
    layer = epmoe.EpAll2AllFusedOp(nodes, 6, 16, 3, num_tot_experts=8, dtype=torch.float32, device="cpu")
    args = arguments(layer)
    x, idx, weight = args["input"], args["exp_indices"], args["weight"]
    planned = layer.preprocess(idx)

    def step(layout, up, down):
        h, row_weight, layout = layer.mega_dispatch_group_gemm(x, None if layout else idx, layout, up, weight)
        return layer.mega_group_gemm_combine(h, down, layout, row_weight)

    found = {"plan": outcome(lambda: step(None, wrong1, w2)),
             "dispatch": outcome(lambda: step(planned, wrong1, w2)),
             "combine": outcome(lambda: step(planned, w1, wrong2))}
    right = step(None, w1, w2)
    layer.finalize()
    return found, right, 32 * weight.sum(1, keepdim=True) * x.sum(1, keepdim=True)


def test_wrong_weights_of_a_fused_call_are_an_error_on_all_ranks():
    """Before a row has moved, so the next call works."""
    for rank, (found, right, want) in enumerate(run_nodes(wrong_products, 2, 2)):
        for name, got in found.items():
            kind, text = ("ValueError", "gemm_weight") if rank == BAD else ("PeerError", f"rank {BAD}")
            assert got.kind == kind and text in got.text, f"{name}, rank {rank}: {got}"
        torch.testing.assert_close(right, want.expand_as(right), rtol=1e-4, atol=1e-3)


def wrong_products_fp8(nodes):
    """Make a mistake in each fused call of FP8 on rank BAD, then right calls."""
    is_bad = nodes.rank == BAD
    layer = epmoe.EpAll2AllFusedOp(nodes, 6, 16, 3, num_tot_experts=8, device="cpu")
    idx, weight = (arguments(layer)[name] for name in ("exp_indices", "weight"))
    x, scale = torch.ones(len(idx), 16, dtype=torch.bfloat16), torch.full((2, 1, 1), 0.5)
    up, down = (torch.ones(2, *shape).to(torch.float8_e4m3fn) for shape in ((32, 16), (16, 32)))

    def step(x=x, up=up, up_scale=scale, down=down, down_scale=scale):
        h, row_weight, layout = layer.mega_dispatch_group_gemm(x, idx, gemm_weight=up, gemm_scale=up_scale,
                                                               weight=weight)
        return layer.mega_group_gemm_combine(h, down, layout, row_weight, gemm_scale=down_scale)

    wrong = {"scale": {"up_scale": scale[:1, :, :0]}, "dtype": {"up": up.bfloat16()},
             "gradient": {"x": x.clone().requires_grad_()}, "second scale": {"down_scale": scale.half()},
             "second size": {"down": down[:, :8]}}
    found = {name: outcome(lambda: step(**change) if is_bad else step()) for name, change in wrong.items()}
    y = step()
    layer.finalize()
    return found, y, 8 * 16 * weight.sum(1, keepdim=True)  # 16 * 0.5 = 8 in each column, then 32 * 8 * 0.5


def test_wrong_products_in_fp8_are_an_error_on_all_ranks():
    """Before a row has moved, so the next call works."""
    errors = {"scale": ("ValueError", "gemm_scale"), "dtype": ("TypeError", "gemm_weight"),
              "gradient": ("RuntimeError", "no gradients"), "second scale": ("TypeError", "gemm_scale"),
              "second size": ("ValueError", "gemm_weight")}
    for rank, (found, y, want) in enumerate(run_nodes(wrong_products_fp8, 2, 2)):
        for name, got in found.items():
            kind, text = errors[name] if rank == BAD else ("PeerError", f"rank {BAD}")
            assert got.kind == kind and text in got.text, f"{name}, rank {rank}: {got}"
        torch.testing.assert_close(y.float(), want.expand_as(y), rtol=0.02, atol=0.02)


def tokens_that_one_rank_wants(nodes, dtype, num_chunks):
    """Whether the gradients are those of a step in which all ranks want them, and the outcome without
    gradients of the parameters."""
    torch.manual_seed(1)
    moe = epmoe.EPMoE(16, 32, 8, 2, nodes, max_tokens=6, dtype=dtype, device="cpu", num_chunks=num_chunks)
    grads = []
    g = generator(nodes.rank)
    x, weight = torch.randn(6, 16, generator=g).to(dtype), torch.rand(6, 2, generator=g)
    idx = torch.randint(8, (6, 2), generator=g)
    for wants in (True, nodes.rank == BAD):
        x = x.detach().requires_grad_(wants)
        moe.zero_grad()
        moe(x, idx, weight).float().square().sum().backward()
        grads.append([p.grad.clone() for p in (*moe.parameters(), *([x] if x.requires_grad else []))])
    moe.requires_grad_(False)
    got = outcome(lambda: moe(x, idx, weight))
    moe.requires_grad_(True)(x, idx, weight).sum().backward()
    moe.finalize()
    return all(map(torch.equal, *grads)), got


@pytest.mark.parametrize("nodes, local", [(2, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_tokens_whose_gradients_one_rank_wants(monkeypatch, dtype, num_chunks, nodes, local):
    monkeypatch.setitem(globals(), "BAD", nodes * local - 1)
    for is_right, got in run_nodes(tokens_that_one_rank_wants, nodes, local, dtype, num_chunks):
        assert is_right
        assert got.kind == "EpMismatch" and "pass gradients" in got.text, got
