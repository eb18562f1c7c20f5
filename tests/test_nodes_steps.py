"""Ranks of several nodes out of step: they differ in a call, one is interrupted, or one did not come."""

import contextlib
import itertools
import signal
import time

import pytest
import torch
import torch.distributed as dist

import epmoe
from cases import Case, outcome, process_ranks
from nodes_cases import layer_of
from pace import WAIT_S, is_soon, wait_until

pytestmark = pytest.mark.cpu_only
SHAPES = ((2, 1), (3, 1), (2, 2))  # nodes x local
CASE = Case(num_local=2, topk=3, hidden=16, max_tokens=6, dtype=torch.float32)


def calls_of(nodes, layer, other):
    """A call of each kind that ranks of several nodes make together."""
    idx = torch.zeros(4, 3, dtype=torch.int64)
    return {"plan": lambda: layer.preprocess(idx),
            "plan of another layer": lambda: other.preprocess(idx),
            "barrier": layer.ep_barrier_all,
            "creation": lambda: layer_of(nodes, CASE),
            "exchange": lambda: nodes.exchange(b"x"),
            "refusal": lambda: nodes.exchange("x"),
            "finalize": other.finalize,
            "close": nodes.close}


def _differ(rank, size, local):
    nodes = epmoe.Nodes(local_world_size=local, timeout_s=WAIT_S)
    layer, other = layer_of(nodes, CASE), layer_of(nodes, CASE)
    calls, found = calls_of(nodes, layer, other), {}
    for bad, (mine, theirs) in itertools.product((0, size - 1), itertools.permutations(calls, 2)):
        name = mine if rank == bad else theirs
        got = outcome(calls[name])
        is_right = nodes.exchange(bytes([rank])) == [bytes([r]) for r in range(size)]
        found[bad, mine, theirs] = name, got.kind, is_right
    other.finalize()
    layer.finalize()
    nodes.close()
    return found


@pytest.mark.parametrize("num_nodes, local", SHAPES)
def test_ranks_of_several_nodes_in_different_calls(num_nodes, local):
    """All raise EpMismatch, or PeerError where a rank refuses, and the next call works on all."""
    for rank, found in enumerate(process_ranks(_differ, num_nodes * local, local)):
        for case, (name, kind, is_right) in found.items():
            wanted = "TypeError" if name == "refusal" else "PeerError" if "refusal" in case else "EpMismatch"
            assert (kind, is_right) == (wanted, True), f"rank {rank}, {case}: {kind}"


def _layouts(rank, size, local):
    nodes = epmoe.Nodes(local_world_size=local, timeout_s=WAIT_S)
    layer = layer_of(nodes, CASE)
    experts = layer.num_experts
    x = [torch.randn(4, 16, requires_grad=True) for _ in range(2)]
    # The first plan leaves all tokens at home, the second sends all to the last node: other sizes for gloo.
    home = torch.full((4, 3), nodes.node * experts // nodes.num_nodes)
    away = torch.full((4, 3), experts - 1)
    layouts = [layer.preprocess(idx) for idx in (home, away)]
    which = int(rank == size - 1)
    with torch.no_grad():
        found = {"dispatch": outcome(lambda: layer.dispatch(x[0], layout=layouts[which]))}
    sums = []
    for t, layout in zip(x, layouts):
        rows, _, layout = layer.dispatch(t, layout=layout)
        sums.append(layer.combine(rows, layout))
    found["backward"] = outcome(lambda: sums[which].sum().backward())
    rows = torch.zeros(layouts[which].num_rows, 16)
    found["combine"] = outcome(lambda: layer.combine(rows, layouts[which]))
    rows, _, layout = layer.dispatch(x[0].detach(), home)
    right = torch.equal(layer.combine(rows, layout), x[0] * 3)
    layer.finalize()
    nodes.close()
    return found, right


@pytest.mark.parametrize("num_nodes, local", SHAPES)
def test_ranks_of_several_nodes_with_layouts_of_different_plans(num_nodes, local):
    """In a dispatch, a combine and a backward. All raise EpMismatch, and the next call works."""
    for rank, (found, right) in enumerate(process_ranks(_layouts, num_nodes * local, local)):
        for name, got in found.items():
            assert got.kind == "EpMismatch" and "plan" in got.text, f"rank {rank}, {name}: {got}"
        assert right


def _interrupted(rank, size, local, call, kind):
    nodes = epmoe.Nodes(local_world_size=local, timeout_s=WAIT_S)
    layer = layer_of(nodes, CASE)
    calls = calls_of(nodes, layer, layer_of(nodes, CASE))
    began = time.monotonic()
    if rank == 1:
        def handler(*_):
            raise kind("by a handler")

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        own = ""
        try:
            calls[call]()
        except kind as error:
            own = str(error)
    elif rank == size - 1:  # this rank does not come, so that the others wait
        own = outcome(lambda: wait_until(lambda: nodes.check(), "the end of the nodes", WAIT_S)).text
    else:
        own = outcome(calls[call]).text
    seconds = time.monotonic() - began
    after = outcome(nodes.check)
    with contextlib.suppress(epmoe.EpError):
        nodes.close()
    return own, seconds, after, _works_again(rank, size, local)


def _works_again(rank, size, local):
    with epmoe.Nodes(local_world_size=local, timeout_s=WAIT_S) as nodes:
        return nodes.exchange(bytes([rank])) == [bytes([r]) for r in range(size)]


@pytest.mark.parametrize("call", ["exchange", "plan"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("num_nodes, local", ((3, 1), (2, 2)))
def test_interrupt_over_several_nodes_ends_them_on_all_ranks(num_nodes, local, kind, call):
    """All ranks have EpClosed that names the rank, soon, also one that makes no call."""
    results = process_ranks(_interrupted, num_nodes * local, local, call, kind)
    for rank, (own, seconds, after, is_right) in enumerate(results):
        assert after.kind == "EpClosed" and "rank 1 " in after.text, f"rank {rank}: {after}"
        assert own == "by a handler" if rank == 1 else "rank 1 " in own, f"rank {rank}: {own}"
        assert is_soon(seconds, 3) and is_right


def _late(rank, size, local):
    nodes = epmoe.Nodes(local_world_size=local, timeout_s=0.5)
    if rank < size - 1:
        first = outcome(lambda: nodes.exchange(b"x")).kind
    else:
        time.sleep(2.5)
        first = ""
    return first, _works_again(rank, size, local)


@pytest.mark.parametrize("num_nodes, local", SHAPES)
def test_nodes_are_made_again_after_a_timeout_that_one_rank_did_not_see(num_nodes, local):
    for rank, (first, right) in enumerate(process_ranks(_late, num_nodes * local, local)):
        assert right and (first == "EpTimeout" or rank == num_nodes * local - 1), first


def _groups(rank, size):
    if rank == 1:  # a pipeline, for example, makes groups on some ranks only
        dist.new_group([1], use_local_synchronization=True)
    return [_works_again(rank, size, 1) for _ in range(2)]


def test_nodes_of_ranks_that_have_different_numbers_of_groups():
    """torch makes the name of a group of the number of groups that a rank has."""
    assert process_ranks(_groups, 2) == [[True, True]] * 2


def _alone(rank, size):
    if rank == 0:
        began = time.monotonic()
        return outcome(lambda: epmoe.Nodes(local_world_size=1, timeout_s=1.0)).kind, time.monotonic() - began
    time.sleep(3)
    return "EpTimeout", 0.0


def test_nodes_that_one_rank_makes_alone_end_at_their_limit():
    for kind, seconds in process_ranks(_alone, 2):
        assert kind == "EpTimeout" and is_soon(seconds, 5)


def _handled(rank, size):
    nodes = epmoe.Nodes(local_world_size=1, timeout_s=WAIT_S)
    layer, found = layer_of(nodes, CASE), []
    if rank == 1:
        for call in (lambda: nodes.exchange(b"y"), layer.ep_barrier_all, layer.finalize, nodes.close):
            signal.signal(signal.SIGALRM, lambda *_, call=call: found.append(outcome(call).kind))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            nodes.exchange(b"x")
    else:
        for _ in range(4):
            time.sleep(1)
            nodes.exchange(b"x")
    right = nodes.exchange(bytes([rank])) == [bytes([r]) for r in range(size)]
    layer.finalize()
    nodes.close()
    return found, right


def test_handler_that_calls_the_nodes_during_a_call_gets_an_error():
    """Else the calls of this rank would be one ahead of those of the others."""
    (_, first), (found, second) = process_ranks(_handled, 2)
    assert found == ["ValueError"] * 4 and first and second
