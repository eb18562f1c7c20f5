"""Ranks that call different operations: EpMismatch names the ranks and their calls, long before the timeout.

A rank that is only late causes no exception.
"""

import threading
import time

import pytest
import torch

import epmoe
from cases import Case, check_case, check_outcomes, indices_of, inputs_of, make_layer, outcome, run_routing
from pace import WAIT_S

BAD = 1
CASE = Case(num_local=2, topk=3, hidden=64, max_tokens=40)


@pytest.fixture(autouse=True)
def new_world(ranks):
    """Start each test in a new world.

    After a failed operation, epmoe no longer compares the order of calls in that world.
    """
    ranks.close()


class Calls:
    """Two layers with two buffers each, and a heap. All of them have been used."""

    def __init__(self, world, device):
        self.world = world
        self.layers = [make_layer(world, device, CASE, num_buffers=2) for _ in range(2)]
        self.heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        self.idx = indices_of(CASE, world.rank, world.size).to(device)
        self.x = inputs_of(CASE, world.rank, world.size)[0].to(device)
        self.plans = [layer.preprocess(self.idx) for layer in self.layers]
        self.heap.barrier()
        self.layers[0].ep_barrier_all()
        self.layers[0].ep_barrier_all(buffer=1)
        world.set_timeout(WAIT_S)

    def plan(self, of):
        return self.layers[of].preprocess(self.idx)

    def dispatch(self, of):
        return self.layers[of].dispatch(self.x, layout=self.plans[of])

    def close(self):
        for layer in self.layers:
            layer.finalize()
        self.heap.close()

    def dispatch_with(self, layout):
        """Dispatch, on rank 0 with this layout, which is of another layer."""
        return self.layers[0].dispatch(self.x, layout=layout if self.world.rank == 0 else self.plans[0])


# The calls of rank BAD, the calls of all other ranks, and the names of both in the message.
CASES = {
    "layers": (lambda c: c.plan(1), lambda c: c.plan(0), "plan of layer 1", "plan of layer 0"),
    "buffers": (lambda c: c.layers[0].ep_barrier_all(buffer=1), lambda c: c.layers[0].ep_barrier_all(),
                "barrier in buffer 1", "barrier in buffer 0"),
    "heap": (lambda c: c.heap.barrier(), lambda c: c.dispatch(0), "heap barrier", "dispatch"),
    "heaps": (lambda c: c.layers[0].heap.barrier(), lambda c: c.heap.barrier(), "heap barrier of heap 0",
              "heap barrier of heap 2"),
    "allocation": (lambda c: c.heap.malloc_symmetric((4,)), lambda c: c.plan(0), "allocation", "plan"),
    "finalize": (lambda c: c.layers[1].finalize(), lambda c: c.dispatch(1), "layer close", "dispatch"),
    "exchange": (lambda c: c.world.exchange(b"x"), lambda c: c.layers[0].ep_barrier_all(), "exchange",
                 "barrier"),
    "far ahead": (lambda c: [c.layers[1].ep_barrier_all() for _ in range(40)],
                  lambda c: [c.layers[0].ep_barrier_all() for _ in range(40)], "barrier of layer 1",
                  "barrier of layer 0"),
    "one more": (lambda c: (c.dispatch(0), c.heap.barrier()), lambda c: (c.dispatch(0), c.dispatch(1)),
                 "heap barrier", "dispatch"),
}


@pytest.mark.parametrize("what", CASES)
def test_errors_order_differs_on_one_rank(ranks, what):
    bad_call, good_call, bad_name, good_name = CASES[what]

    def run(world, device):
        calls = Calls(world, device)
        call = bad_call if world.rank == BAD else good_call
        got = outcome(lambda: call(calls), calls.layers[0])
        return got, outcome(world.check), world.flight_record().splitlines()[0]

    results = ranks(run, world_size=3, at_least=2)
    texts = [f"rank {BAD} called {bad_name} as operation ", f"called {good_name}"]
    if len(results) == 2:  # no majority: the message begins with rank 0
        texts = [f"rank 0 called {good_name} as operation ", f"where rank 1 called {bad_name}"]
    check_outcomes([got for got, _, _ in results], "EpMismatch", "ranks disagree in the order of calls: ",
                   *texts)
    check_outcomes([after for _, after, _ in results], "EpMismatch", *texts, within_s=0.5)
    assert all(first.startswith(f"culprit: {texts[0]}") for _, _, first in results), results


def test_errors_order_differs_on_every_rank(ranks):
    """Each rank calls another operation than the next rank."""

    def run(world, device):
        calls = Calls(world, device)
        mine = [lambda: calls.plan(0), lambda: calls.plan(1), lambda: calls.heap.barrier(),
                lambda: calls.layers[0].ep_barrier_all(buffer=1)]
        return outcome(mine[world.rank % 4], calls.layers[0])

    check_outcomes(ranks(run, world_size=4, at_least=2), "EpMismatch",
                   "ranks disagree in the order of calls: rank 0 called plan")


@pytest.mark.parametrize("what", ["plan", "allocation"])
def test_errors_none_if_a_rank_is_late(ranks, what):
    """The other ranks wait in the same operation until the late rank calls it."""

    def run(world, device):
        calls = Calls(world, device)
        time.sleep(1.4 * world.rank)
        call = {"plan": lambda: calls.plan(0),
                "allocation": lambda: bool(calls.heap.malloc_symmetric((4,)).sum() == 0)}[what]
        got = outcome(call, calls.layers[0])
        result = run_routing(calls.layers[1], CASE)
        calls.close()
        return got, result

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], "nothing", within_s=8)
    check_case([result for _, result in results], CASE)


# The first call of each rank, and the exceptions of ranks 0, 1 and 2. The last rank is late.
FAILURES = {
    "bytes": (lambda c: c.world.exchange(b"x" * (5 if c.rank == 0 else 4)) and None,
              ("EpMismatch", "EpMismatch", "EpMismatch")),
    "kind": (lambda c: (c.layers[0].ep_barrier_all() if c.rank == 0 else c.plan(0)) and None,
             ("EpMismatch", "EpMismatch", "EpMismatch")),
    "layer": (lambda c: make_layer(c.world, c.device, CASE, heap=42 if c.rank == 0 else c.heap) and None,
              ("TypeError", "PeerError", "PeerError")),
    "layout": (lambda c: c.dispatch_with(c.layers[1].preprocess(c.idx, buffer=1)) and None,
               ("ValueError", "PeerError", "PeerError")),
    "closed": (lambda c: c.rank == 0 and c.closed.malloc_symmetric((4,)) and None,
               ("EpClosed", "nothing", "nothing")),
}


@pytest.mark.parametrize("what", FAILURES)
def test_errors_with_a_late_rank_are_not_order_errors(ranks, what):
    """A late rank must not be reported as a wrong order of calls, before and after another error.

    Before: ranks whose arguments differ get their EpMismatch when the late rank arrives. After: not all ranks
    have seen the error, and the other ranks wait for the late rank.
    """
    call, wanted = FAILURES[what]

    def run(world, device):
        calls = Calls(world, device)
        calls.device, calls.rank = device, world.rank
        calls.closed = epmoe.SymmetricHeap(world, 1 << 20, device)
        calls.closed.close()
        delay_s = 1.6 if world.rank == world.size - 1 else 0.0
        is_late_before = what in ("bytes", "kind")
        time.sleep(delay_s if is_late_before else 0.0)
        got = outcome(lambda: call(calls), calls.layers[0])
        another = make_layer(world, device, CASE)
        time.sleep(0.0 if is_late_before else delay_s)
        return got, outcome(another.ep_barrier_all, another), outcome(lambda: world.exchange(b"x") and None)

    results = ranks(run, world_size=3, at_least=3)
    for kind, (got, *later) in zip((*wanted, wanted[-1]), results, strict=False):
        check_outcomes([got], kind, within_s=4)
        check_outcomes(later, "nothing", within_s=4)


@pytest.mark.cuda_only
def test_errors_none_for_a_graph_captured_on_one_rank(ranks):
    """Calls during a capture are counted but do not run. So this rank's counter differs from then on."""

    def run(world, device):
        calls = Calls(world, device)
        if world.rank == BAD:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls.layers[0].ep_barrier_all()
                calls.layers[0].ep_barrier_all(buffer=1)
        time.sleep(1.6 * (world.rank == 0))
        got = [outcome(lambda: world.exchange(b"x") and None)]
        got.append(outcome(calls.layers[1].ep_barrier_all, calls.layers[1]))
        calls.close()
        return got

    for got in ranks(run, world_size=3, at_least=3):
        check_outcomes(got, "nothing", within_s=4)


@pytest.mark.cpu_only
def test_errors_none_if_threads_of_a_rank_call_in_any_order(ranks):
    """On the CPU, each buffer may have its own thread.

    The first thread of rank 0 and the second thread of rank 1 wait in two operations until the other threads
    call them.
    """

    def run(world, device):
        layer = make_layer(world, device, CASE, num_buffers=2)
        got = [None, None]

        def run_buffer(buffer):
            for i in range(2):
                time.sleep(2.0 if i == 1 and buffer != world.rank else 0)
                got[buffer] = outcome(lambda: layer.ep_barrier_all(buffer=buffer))

        threads = [threading.Thread(target=run_buffer, args=(b,)) for b in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        layer.finalize()
        return got

    for got in ranks(run, world_size=2):
        check_outcomes(got, "nothing", within_s=4)


@pytest.mark.cuda_only
def test_errors_none_if_a_gpu_is_late(ranks):
    """The GPU of rank BAD runs another kernel first. Its operations still have the same order."""

    def run(world, device):
        calls = Calls(world, device)
        if world.rank == BAD:
            torch.cuda._sleep(int(5e9))  # clock cycles: some seconds

        def call():
            calls.dispatch(0)
            calls.plan(1)
            calls.heap.barrier()

        got = outcome(call, calls.layers[0])
        result = run_routing(calls.layers[1], CASE)
        calls.close()
        return got, result

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], "nothing", within_s=10)
    check_case([result for _, result in results], CASE)


@pytest.mark.cpu_only
def test_order_between_worlds_is_told_by_the_timeout():
    """A world knows nothing of another: calls of two worlds in opposite order wait to the limit."""
    worlds = [epmoe.thread_worlds(2, timeout_s=WAIT_S) for _ in range(2)]

    def main(rank, seen):
        heaps = [epmoe.SymmetricHeap(of_ranks[rank], 1 << 16, "cpu") for of_ranks in worlds]
        heaps[rank].world.set_timeout(0.3)
        seen[rank] = outcome(heaps[rank].barrier)

    seen = [None, None]
    threads = [threading.Thread(target=main, args=(rank, seen)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_outcomes(seen, "EpTimeout", "timed out waiting for rank", within_s=WAIT_S)
    for rank in range(2):
        page = worlds[rank][rank].flight_record()
        assert page.startswith(f"culprit: rank {1 - rank} did not reach operation 2"), page
