"""EPAll2AllLayer over several nodes, against the oracle of each node and the documented order between nodes.

The ranks are threads of this process, except in the last tests, where they are processes with gloo.
"""

import os

import pytest
import torch
import torch.distributed as dist

import epmoe
from benchmarks.nodes import PacedRail
from cases import (Case, check_case, generator, keep, outcome, process_ranks, random_numbers, run_routing,
                   same_bits)
from nodes_cases import SEVERAL, cases, check_one, layer_of, run_nodes, run_one
from pace import HANG_S, wait_until

pytestmark = pytest.mark.cpu_only
CASE = Case(topk=3, tokens="unequal")


@pytest.mark.parametrize("num_nodes, num_local", SEVERAL)
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
