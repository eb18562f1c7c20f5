"""EPAll2AllLayer over several nodes, against the oracle of each node and the documented order between nodes.

The ranks are threads of this process, except in the last tests, where they are processes with gloo.
"""

import itertools
import os

import pytest
import torch
import torch.distributed as dist

import epmoe
from benchmarks.nodes import PacedRail
from cases import (DTYPES, MODES, Case, check_case, generator, indices_of, inputs_of, keep, outcome,
                   process_ranks, random_numbers, run_routing, same_bits)
from nodes_cases import TeamOracle, run_nodes
from pace import HANG_S, wait_until

pytestmark = pytest.mark.cpu_only
PATTERNS = ("uniform", "one_expert", "one_rank", "own_rank", "sentinels", "all_dropped", "duplicates",
            "edges")
CASE = Case(topk=3, tokens="unequal")
SHAPES = ((2, 1), (2, 2), (4, 1), (3, 2))
OF_ROWS = ("rows", "row_weight", "d_rows", "d_row_weight", "y", "v", "dy", "dv")


def layer_of(nodes, case, device="cpu", **options):
    options = {"combine_mode": "scatter" if case.mode == "local" else case.mode, "device": device,
               "enable_local_combine": case.mode == "local", "num_buffers": case.num_buffers} | options
    return epmoe.EPAll2AllLayer(nodes, case.max_tokens, case.hidden, case.topk, dtype=case.dtype,
                                num_tot_experts=case.num_local * nodes.size, **options)


def run_one(layer, case, buffer=0):
    """One call forward and backward on this rank: inputs, results and gradients."""
    rank, device = layer.rank, layer.device

    def numbers(shape, dtype, seed):
        return random_numbers(shape, dtype, generator(case.seed, rank, seed)).to(device).requires_grad_()

    idx = indices_of(case, rank, layer.world_size)
    x, w = inputs_of(case, rank, layer.world_size)
    bits = w.view(torch.int32)  # the oracle assigns single weights: then torch makes signalling NaNs quiet
    x, w = x.to(device), torch.where(w.isnan(), bits | 1 << 22, bits).view(torch.float32).to(device)
    r = {"idx": idx, "bits": x, "weight_bits": w}  # NaNs and denormals travel unchanged
    r["rows"], r["row_weight"], layout = layer.dispatch(x, idx.to(device), w, buffer=buffer)
    x, w = numbers(x.shape, case.dtype, 7), numbers(w.shape, torch.float32, 8)
    rows, row_weight, layout = layer.dispatch(x, None, w, layout=layout)
    r["d_rows"] = numbers(rows.shape, case.dtype, 9).detach()
    r["d_row_weight"] = numbers(row_weight.shape, torch.float32, 10).detach()
    torch.autograd.backward([rows, row_weight], [r["d_rows"], r["d_row_weight"]])
    r |= {"dx": x.grad, "dw": w.grad}
    y, v = numbers(rows.shape, case.dtype, 5), numbers(row_weight.shape, torch.float32, 6)
    out = layer.combine(y, layout, v)
    r["d_out"] = numbers(out.shape, case.dtype, 11).detach()
    out.backward(r["d_out"])
    r |= {"y": y.detach(), "v": v.detach(), "out": out.detach(), "dy": y.grad, "dv": v.grad,
          "plain": layer.combine(y.detach(), layout)}
    r = {name: t.detach().cpu() for name, t in r.items()}
    r |= {name: r[name][: layout.num_rows] for name in OF_ROWS}  # with a capacity there are more
    return r | {"num_rows": layout.num_rows, "ends": layout.expert_offsets.tolist(),
                "of_expert": layout.tokens_per_expert_list, "sent": layout.send_tokens,
                "received": layout.recv_tokens}


def check_one(results, case, num_nodes, rail_dtype=None):
    """Compare the results of all ranks with the oracle, bit by bit."""
    size = len(results)
    oracle = TeamOracle([r["idx"] for r in results], case.num_local * size, num_nodes)
    local = case.mode == "local"

    def of(name):
        return [r[name] for r in results]

    wanted = {"rows": oracle.dispatch(of("bits")), "row_weight": oracle.dispatch_weights(of("weight_bits")),
              "out": oracle.combine(of("y"), of("v"), local, rail_dtype),
              "plain": oracle.combine(of("y"), None, local, rail_dtype),
              "dx": oracle.combine(of("d_rows"), None, local, rail_dtype),
              "dw": oracle.choices(of("d_row_weight"))}
    g = oracle.dispatch(of("d_out"))
    wanted["dy"] = [(rows * v[:, None]).to(case.dtype) for rows, v in zip(g, of("v"))]
    for name, values in wanted.items():
        for rank, (got, want) in enumerate(zip(results, values)):
            same_bits(got[name], want, f"{case}, rank {rank}: {name}")
    for rank, got in enumerate(results):
        terms = g[rank].double() * got["y"].double()
        assert ((got["dv"].double() - terms.sum(1)).abs() <= 1e-5 * terms.abs().sum(1)).all()
        plan = oracle.plans[rank // oracle.num_local]
        rows = plan["expert_rows"].view(oracle.num_local, -1)[rank % oracle.num_local].tolist()
        assert got["of_expert"] == rows and got["ends"][-1] == got["num_rows"] == sum(rows)
        of_rail = range(rank % oracle.num_local, size, oracle.num_local)
        sources = [s for s, _ in oracle.tokens[rank]]
        assert got["received"] == [sources.count(s) for s in of_rail]
        assert got["sent"] == [sum(s == rank for s, _ in oracle.tokens[r]) for r in of_rail]


def cases():
    """Every pattern, dtype, form of combine and distribution of tokens, in turn."""
    some = itertools.cycle(itertools.product(DTYPES, MODES))
    for seed, (pattern, tokens) in enumerate(itertools.product(
            PATTERNS, ("full", "unequal", "first_none", "only_last", "none"))):
        dtype, mode = next(some)
        yield Case(pattern=pattern, tokens=tokens, dtype=dtype, mode=mode, topk=1 + seed % 4, hidden=16,
                   num_local=1 + seed % 3, max_tokens=7, seed=seed,
                   index_dtype=(torch.int32, torch.int64)[seed % 2])


@pytest.mark.parametrize("num_nodes, num_local", SHAPES)
def test_nodes_move_and_sum_as_the_oracle(num_nodes, num_local):
    """Rows, weights, sums and all gradients have the bits of the oracle."""
    def main(nodes):
        results = []
        for case in cases():
            layer = layer_of(nodes, case)
            keep(nodes.team, layer)
            results.append(run_one(layer, case))
        return results

    results = run_nodes(main, num_nodes, num_local)
    for i, case in enumerate(cases()):
        check_one([r[i] for r in results], case, num_nodes)


def test_one_node_is_the_layer_of_today():
    """Nodes of one node, or as many local ranks as ranks: the same class on the same world."""
    def main(nodes):
        layer = layer_of(nodes, CASE)
        keep(nodes.team, layer)
        assert type(layer) is epmoe.EPAll2AllLayer and layer.world is nodes.team
        return run_routing(layer, CASE)

    check_case(run_nodes(main, 1, 3), CASE)
    moe = epmoe.EPMoE(16, 16, 2, 1, epmoe.World(), device="cpu")
    assert type(moe.layer) is epmoe.EpAll2AllFusedOp
    moe.finalize()


@pytest.mark.parametrize("rail_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nodes_round_sums_to_the_dtype_of_the_rail(rail_dtype):
    """Sums on their way home, also those of the own node, and the gradients of tokens; nothing else."""
    case = Case(topk=3, tokens="unequal", dtype=torch.float32, mode="local", hidden=16)

    def main(nodes):
        layer = layer_of(nodes, case, rail_dtype=rail_dtype)
        keep(nodes.team, layer)
        wrong = [outcome(lambda: layer_of(nodes, CASE, rail_dtype=torch.float32)).kind,
                 outcome(lambda: layer_of(nodes, case, rail_dtype=torch.int32)).kind,
                 outcome(lambda: layer_of(nodes, case, rail_dtype=rail_dtype if nodes.rank else None)).kind]
        return run_one(layer, case), wrong

    results = run_nodes(main, 2, 2)
    check_one([r for r, _ in results], case, 2, rail_dtype)
    assert all(wrong == ["ValueError", "TypeError", "EpMismatch"] for _, wrong in results), results[0][1]


def some_cases():
    return list(cases())[::6]


def of_processes(rank, size):
    """Rank main: some cases through process groups."""
    results = []
    for case in some_cases():
        layer = epmoe.EPAll2AllLayer(None, case.max_tokens, case.hidden, case.topk, None,
                                     case.num_local * size, 2, dtype=case.dtype, device="cpu",
                                     combine_mode="gather" if case.mode == "gather" else "scatter",
                                     enable_local_combine=case.mode == "local", timeout_s=HANG_S)
        results.append(run_one(layer, case))
        layer.finalize()
    facts = [repr(layer.world), layer.world is epmoe.Nodes.of(None), outcome(lambda: epmoe.EPAll2AllLayer(
        None, 4, 16, 1, None, 4, 1, device="cpu")).kind]
    layer.world.close()
    return results, facts


def test_nodes_of_processes_move_and_sum_as_the_oracle():
    """2 x 2 processes with gloo between the nodes."""
    results = process_ranks(of_processes, 4)
    for i, case in enumerate(some_cases()):
        check_one([r[i] for r, _ in results], case, 2)
    for rank, (_, facts) in enumerate(results):
        assert facts == [f"epmoe.Nodes(rank={rank}, nodes=2, local=2)", True, "ValueError"]


def names_of_groups(rank, size):
    """Rank main: create Nodes of the same ranks again and again.  The names of the process groups of each."""
    names = []
    for _ in range(3):
        with epmoe.Nodes(None, 2) as nodes:
            groups = nodes.rail.control, nodes.rail.data
            names += [dist.distributed_c10d._world.pg_names[group] for group in groups]
    return names


def test_process_groups_of_nodes_have_names_of_their_own():
    """torch finds the addresses of a group by its name, also those of an earlier group of this name."""
    names = process_ranks(names_of_groups, 4)
    assert all(len(set(mine)) == 6 for mine in names), names
    assert names[0] == names[2] and names[1] == names[3]


def some_die(rank, size, victims):
    """Rank main: the victims die between two calls."""
    facts = []
    layer = layer_of(epmoe.Nodes(None, 2, timeout_s=HANG_S), CASE)
    layer.ep_barrier_all()
    if rank in victims:
        os._exit(1)
    facts += [outcome(lambda: [run_one(layer, CASE) for _ in range(100)]).kind,
              outcome(lambda: layer_of(layer.world, CASE)).kind]
    wait_until(lambda: len(layer.world.lost_ranks()) == len(victims), "this rank knows of all deaths")
    facts += [layer.world.lost_ranks(), outcome(layer.world.check).text]
    return facts


@pytest.mark.parametrize("victims, named", [((3,), "rank 3 (rank 1 of node 1)"), ((2, 3), "of node 1")])
def test_death_of_ranks_ends_the_calls_of_all_nodes(victims, named):
    """All survivors raise PeerDied that names them, also where a call does not wait for a dead rank."""
    results = process_ranks(some_die, 4, victims, may_die=victims)
    for seen in (r for rank, r in enumerate(results) if rank not in victims):
        assert seen[:2] == ["PeerDied", "PeerDied"] and seen[2] == list(victims)
        assert named in seen[3] or "node 1 (ranks 2 to 3) died" in seen[3], seen[3]


def test_creation_of_a_layer_sends_no_rows():
    """On the CPU. With CUDA the first exchange of rows connects NCCL, so creation makes one."""
    def main(nodes):
        nodes.rail = PacedRail(nodes.rail)
        layer = layer_of(nodes, CASE)
        before = nodes.rail.bytes_sent
        run_one(layer, CASE)
        after = nodes.rail.bytes_sent
        layer.finalize()
        return before, after > 0

    assert run_nodes(main, 2, 1) == [(0, True)] * 2


def test_nodes_send_rows_in_fp8():
    """The rows are those of dispatch, quantised; a gradient is refused on all ranks."""
    def main(nodes):
        case = Case(topk=3, hidden=256, tokens="unequal")
        layer = layer_of(nodes, case)
        x = random_numbers((9, 256), case.dtype, generator(nodes.rank)).clamp(-100, 100)
        idx, weight = torch.randint(-1, layer.num_experts, (9, 3)), torch.rand(9, 3)
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        got = layer.dispatch_fp8(x, None, weight, layout=layout)
        q, scales = epmoe.quantize_fp8(rows)
        same_bits(got[0].view(torch.uint8), q.view(torch.uint8), "rows")
        same_bits(got[1], scales, "scales")
        same_bits(got[2], row_weight, "weights")
        wrong = outcome(lambda: layer.dispatch_fp8(x.requires_grad_() if nodes.rank == 1 else x, idx))
        layer.finalize()
        return wrong.kind, wrong.text

    for rank, (kind, text) in enumerate(run_nodes(main, 2, 2)):
        assert kind == ("RuntimeError" if rank == 1 else "PeerError"), text


def test_nodes_random_routings():
    """A sample of fuzz_nodes.py."""
    import fuzz_nodes

    for number in range(8):
        fuzz_nodes.run_batch(11, number)
