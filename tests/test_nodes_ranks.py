"""A layer over several nodes on whatever ranks there are: on GPUs with NCCL and with gloo between the nodes.

Under torchrun W ranks are two nodes of W / 2, or W nodes where W is odd. Ranks may share a GPU. Without
torchrun the ranks are threads on the CPU.
"""

import pytest
import torch
import torch.distributed as dist

import epmoe
from cases import Case, generator, indices_of, outcome, same_bits
from epmoe import reference
from epmoe.moe import fp8 as moe_fp8
from nodes_cases import check_one, layer_of, run_nodes, run_one

HIDDEN, INNER, EXPERTS_OF_RANK, TOPK = 64, 32, 2, 3
CASES = [Case(topk=3, hidden=64, max_tokens=40, num_local=2, seed=seed, dtype=dtype, mode=mode, tokens=tokens,
              pattern=pattern)
         for seed, (dtype, mode, tokens, pattern) in enumerate((
             (torch.bfloat16, "local", "full", "uniform"), (torch.float32, "scatter", "unequal", "sentinels"),
             (torch.float16, "gather", "first_none", "one_rank"),
             (torch.bfloat16, "scatter", "none", "edges")))]


def over_nodes(ranks, backend, fn):
    """Run fn(nodes, device) on every rank. Returns (the results in rank order, the number of nodes)."""
    if not ranks.is_torchrun:
        if backend == "gloo":
            pytest.skip("gloo for the rows of GPUs: needs torchrun")
        return run_nodes(lambda nodes: fn(nodes, torch.device("cpu")), 2, 2), 2
    local = max(1, ranks.size() // 2 if ranks.size() % 2 == 0 else 1)

    def main(world, device):
        group = dist.new_group(backend="gloo") if backend == "gloo" else dist.group.WORLD
        with epmoe.Nodes(group, local) as nodes:
            return fn(nodes, device)

    return ranks(main, at_least=2), ranks.size() // local


@pytest.mark.parametrize("backend", ["default", "gloo"])
def test_nodes_of_ranks_move_and_sum_as_the_oracle(ranks, backend):
    """Rows, weights, sums and gradients have the bits of the oracle."""
    def main(nodes, device):
        results = []
        for case in CASES:
            layer = layer_of(nodes, case, device)
            for _ in range(2):
                results.append(run_one(layer, case))
            layer.synchronize()
            layer.finalize()
        return results

    results, num_nodes = over_nodes(ranks, backend, main)
    for i, case in enumerate(c for c in CASES for _ in range(2)):
        check_one([r[i] for r in results], case, num_nodes)


def a_step(moe, call, x, idx, weight, d_out):
    """The results and gradients of a training step, and the result without gradients."""
    x, idx, weight, d_out = (t.detach().to(moe.layer.device, copy=True) for t in (x, idx, weight, d_out))
    moe.zero_grad()
    y = call(x.requires_grad_(), idx, weight.requires_grad_())
    y.backward(d_out)
    with torch.no_grad():
        again = call(x, idx, weight)
    got = {"y": y, "again": again, "dx": x.grad, "dw": weight.grad, "gate_up_proj": moe.gate_up_proj.grad,
           "down_proj": moe.down_proj.grad}
    return {name: t.detach().cpu() for name, t in got.items()}


@pytest.mark.parametrize("backend", ["default", "gloo"])
def test_nodes_of_ranks_run_the_megakernels(ranks, backend):
    """EPMoE against one process in float64; its fused kernels have the bits of the stages."""
    case = Case(topk=TOPK, max_tokens=96, num_local=EXPERTS_OF_RANK, tokens="unequal", pattern="sentinels")

    def main(nodes, device):
        idx = indices_of(case, nodes.rank, nodes.size)
        g = generator(nodes.rank, 31)
        x, weight, d_out = (torch.randn(len(idx), n, generator=g) for n in (HIDDEN, TOPK, HIDDEN))
        x, d_out = x.bfloat16(), d_out.bfloat16()
        result = {"x": x, "idx": idx, "weight": weight, "d_out": d_out}
        for form in (True, False):
            moe = epmoe.EPMoE(HIDDEN, INNER, EXPERTS_OF_RANK * nodes.size, TOPK, nodes, max_tokens=96,
                              device=device, fused=form)
            g = generator(nodes.rank, 32)
            with torch.no_grad():
                for p in moe.parameters():
                    p.copy_(torch.randn(p.shape, generator=g) / p.shape[2] ** 0.5)
            result[form] = a_step(moe, moe, x, idx, weight, d_out)
            if form and nodes.group is not None:  # ranks that are threads share one compiler
                compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
                again = a_step(moe, compiled, x, idx, weight, d_out)
                for name, want in result[form].items():
                    same_bits(again[name], want, f"compiled: {name}")
            result["params"] = [moe.gate_up_proj.detach().cpu(), moe.down_proj.detach().cpu()]
            moe.finalize()
        return result

    results, _ = over_nodes(ranks, backend, main)
    x, weight, d_out = (torch.cat([r[n] for r in results]).double() for n in ("x", "weight", "d_out"))
    params = [torch.cat([r["params"][i] for r in results]).double().requires_grad_() for i in (0, 1)]
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = reference.moe(x, torch.cat([r["idx"] for r in results]), weight, *params)
    y.backward(d_out)
    wanted = {"y": y.detach(), "again": y.detach(), "dx": x.grad, "dw": weight.grad,
              "gate_up_proj": params[0].grad, "down_proj": params[1].grad}
    for name, want in wanted.items():
        fused, stages = (torch.cat([r[form][name] for r in results]) for form in (True, False))
        assert torch.equal(fused, stages), name
        assert (fused.double() - want).abs().max() <= 2e-2 * want.abs().max(), name


def test_nodes_of_ranks_survive_mistakes(ranks):
    """A wrong index and a wrong dtype on the last rank are errors on all ranks; then a right call."""
    def main(nodes, device):
        layer, is_bad = layer_of(nodes, CASES[1], device), nodes.rank == nodes.size - 1
        x = torch.ones(3, 64, device=device)
        idx = torch.zeros(3, 3, dtype=torch.int64, device=device)
        idx[1, 2] = 99 if is_bad else 0
        found = [outcome(lambda: layer.dispatch(x, idx)),
                 outcome(lambda: layer.dispatch(x.half() if is_bad else x, idx.clamp(max=1)))]
        rows, _, layout = layer.dispatch(x, idx.clamp(max=1))
        found.append(outcome(lambda: layer.combine(rows[:, :8] if is_bad else rows, layout)))
        right = run_one(layer, CASES[1])
        layer.finalize()
        return [(got.kind, got.text) for got in found], right

    results, num_nodes = over_nodes(ranks, "default", main)
    last = len(results) - 1
    for rank, (found, _) in enumerate(results):
        own = [("EpIndexError", "index 99 of token 1, choice 2"), ("TypeError", "float32"),
               ("ValueError", "rows")]
        others = [own[0], ("PeerError", f"rank {last}"), ("PeerError", f"rank {last}")]
        for (kind, text), (want, part) in zip(found, own if rank == last else others):
            assert kind == want and part in text, f"rank {rank}: {kind} {text}"
    check_one([right for _, right in results], CASES[1], num_nodes)


@pytest.mark.parametrize("backend", ["default", "gloo"])
def test_nodes_of_ranks_have_fixed_sizes(ranks, backend):
    """The bits of the oracle; too many tokens and a wrong index are errors on all ranks."""
    case = Case(topk=3, hidden=64, max_tokens=40, num_local=2, seed=7, tokens="unequal", pattern="sentinels")

    def main(nodes, device):
        layer = layer_of(nodes, case, device, rail_capacity=40, capacity=nodes.size * 120)
        few = layer_of(nodes, case, device, rail_capacity=2, capacity=nodes.size * 120)
        results = [run_one(layer, case) for _ in range(2)]
        x = torch.ones(3, 64, dtype=case.dtype, device=device)
        idx = torch.full((3, 3), layer.num_experts - 1, device=device)  # all on the last node
        found = [outcome(lambda: few.dispatch(x, idx), few)]
        rows, _, layout = few.dispatch(x[:2], idx[:2])
        right = torch.equal(few.combine(rows, layout), 3 * x[:2])
        if nodes.rank == nodes.size - 1:
            idx[1, 2] = 99
        found.append(outcome(lambda: layer.dispatch(x, idx), layer))
        results.append(run_one(layer, case))
        for made in (layer, few):
            made.synchronize()
            made.finalize()
        return results, [(got.kind, got.text) for got in found], right

    results, num_nodes = over_nodes(ranks, backend, main)
    for i in range(3):
        check_one([r[i] for r, _, _ in results], case, num_nodes)
    for _, (too_many, wrong), right in results:
        assert too_many[0] == "EpOverflow" and "sends 3 tokens to another node" in too_many[1], too_many
        assert wrong[0] == "EpIndexError" and "index 99 of token 1, choice 2" in wrong[1], wrong
        assert right


@pytest.mark.cuda_only
def test_nodes_of_ranks_in_a_graph(ranks):
    """A captured EPMoE of fixed sizes, replayed with other tokens and routings, and with a wrong index."""
    if not ranks.is_torchrun:
        pytest.skip("ranks that are threads do not replay graphs")
    case = Case(topk=TOPK, max_tokens=40, num_local=EXPERTS_OF_RANK)

    def main(nodes, device):
        if not nodes.rail.is_nccl:
            return None
        moe = epmoe.EPMoE(HIDDEN, INNER, EXPERTS_OF_RANK * nodes.size, TOPK, nodes, max_tokens=40,
                          device=device, rail_capacity=40, capacity=nodes.size * 40 * TOPK)
        idx = indices_of(case, nodes.rank, nodes.size).to(device)
        x = torch.randn(len(idx), HIDDEN, device=device).bfloat16()
        weight = torch.rand(idx.shape, device=device)
        same = []
        with torch.no_grad():
            moe(x, idx, weight)
            moe.layer.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = moe(x, idx, weight)
            for i in range(6):
                x.copy_(torch.randn(x.shape, device=device))
                idx.copy_(torch.randint(-1, moe.num_experts, idx.shape, device=device))
                if i == 3 and nodes.rank == nodes.size - 1:
                    idx[1, 2] = 99
                graph.replay()
                got = y.clone()
                error = outcome(moe.layer.synchronize)
                same.append(error.kind == "EpIndexError" if i == 3 else torch.equal(got, moe(x, idx, weight)))
        moe.finalize()
        return same

    results, _ = over_nodes(ranks, "default", main)
    if results[0] is None:
        pytest.skip("CUDA graphs over nodes need NCCL")
    assert results == [[True] * 6] * len(results)


def test_nodes_of_ranks_quantise_where_tokens_arrive(ranks):
    """dispatch_fp8 gives the rows of dispatch in FP8. EPMoE and the megakernels in FP8 compute with them."""
    case = Case(topk=TOPK, max_tokens=40, num_local=EXPERTS_OF_RANK, tokens="unequal", pattern="sentinels")

    def main(nodes, device):
        idx = indices_of(case, nodes.rank, nodes.size).to(device)
        g = generator(nodes.rank, 33)
        x, weight = (torch.randn(len(idx), n, generator=g) for n in (128, TOPK))
        x, weight = x.bfloat16().to(device), weight.to(device)
        moe = epmoe.EPMoE(128, 128, EXPERTS_OF_RANK * nodes.size, TOPK, nodes, max_tokens=40, device=device,
                          weight_dtype=torch.float8_e4m3fn)
        rows, row_weight, layout = moe.layer.dispatch(x, idx, weight)
        q, scales, _, _ = moe.layer.dispatch_fp8(x, layout=layout)
        want = epmoe.quantize_fp8(rows)
        n = int(layout.expert_offsets[-1])
        same = torch.equal(q[:n].float(), want[0][:n].float()) and torch.equal(scales[:n], want[1][:n])
        with torch.no_grad():
            y = moe(x, idx, weight)
            h = moe._multiply(moe.layer, q, scales, layout.expert_offsets, *moe._weights())
            of_stages = moe.layer.combine(h, layout, row_weight)
            h, row_weight, layout = moe.layer.mega_dispatch_group_gemm(
                x, idx, weight=weight, gemm_weight=moe.gate_up_proj, gemm_scale=moe.gate_up_proj_scale_inv,
                activation="swiglu")
            fused = moe.layer.mega_group_gemm_combine(h, moe.down_proj, layout, row_weight,
                                                      gemm_scale=moe.down_proj_scale_inv)
        moe.finalize()
        return same, torch.equal(y, of_stages), torch.equal(y, fused)

    results, _ = over_nodes(ranks, "default", main)
    assert results == [(True, True, True)] * len(results)
