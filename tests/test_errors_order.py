"""Ranks that call different things where all should call one: an error that says who called what, long before
the limit of waits; and none where a rank is only late."""

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
def world_of_its_own(ranks):
    """No failed operation of an earlier test is in its record: behind one, ranks are not compared any more.
    """
    ranks.close()


class Calls:
    """Two layers with two buffers each, and a heap besides; all of them have been used."""

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
        """On rank 0, a layout of another layer."""
        return self.layers[0].dispatch(self.x, layout=layout if self.world.rank == 0 else self.plans[0])


# what rank BAD does, what all others do; how the error names the two
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
                  lambda c: [c.layers[0].ep_barrier_all() for _ in range(40)],
                  "barrier of layer 1", "barrier of layer 0"),
    "one more": (lambda c: (c.dispatch(0), c.heap.barrier()), lambda c: (c.dispatch(0), c.dispatch(1)),
                 "heap barrier", "dispatch"),
}


@pytest.mark.parametrize("what", CASES)
def test_errors_other_order_on_one_rank(ranks, what):
    odd, others, odd_name, name = CASES[what]

    def run(world, device):
        calls = Calls(world, device)
        got = outcome(lambda: (odd if world.rank == BAD else others)(calls), calls.layers[0])
        return got, outcome(world.check), world.flight_record().splitlines()[0]

    results = ranks(run, world_size=3, at_least=2)
    told = [f"rank {BAD} called {odd_name} as operation ", f"called {name}"]
    if len(results) == 2:  # nobody stands out: the first rank's is said first
        told = [f"rank 0 called {name} as operation ", f"where rank 1 called {odd_name}"]
    check_outcomes([got for got, _, _ in results], "EpMismatch", "ranks disagree in the order of calls: ",
                   *told)
    check_outcomes([after for _, after, _ in results], "EpMismatch", *told, within_s=0.5)
    assert all(first.startswith(f"culprit: {told[0]}") for _, _, first in results), results


def test_errors_other_order_on_every_rank(ranks):
    """A ring of ranks, each in what is not the next one's."""

    def run(world, device):
        calls = Calls(world, device)
        mine = [lambda: calls.plan(0), lambda: calls.plan(1), lambda: calls.heap.barrier(),
                lambda: calls.layers[0].ep_barrier_all(buffer=1)]
        return outcome(mine[world.rank % 4], calls.layers[0])

    check_outcomes(ranks(run, world_size=4, at_least=2), "EpMismatch",
                   "ranks disagree in the order of calls: rank 0 called plan")


@pytest.mark.parametrize("what", ["plan", "allocation"])
def test_errors_late_rank_is_in_order(ranks, what):
    """Others are stuck until it comes, in the same operation."""

    def run(world, device):
        calls = Calls(world, device)
        time.sleep(1.4 * world.rank)
        got = outcome((lambda: calls.plan(0)) if what == "plan"
                      else lambda: bool(calls.heap.malloc_symmetric((4,)).sum() == 0), calls.layers[0])
        result = run_routing(calls.layers[1], CASE)
        calls.close()
        return got, result

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], "nothing", within_s=8)
    check_case([result for _, result in results], CASE)


# what each rank does first, while the last one comes late; and what ranks 0, 1, 2 are told
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
def test_errors_with_a_late_rank_are_no_disorder(ranks, what):
    """Who meets and disagrees is told so when the last one has come; and behind an error, which not all have
    seen, a late rank is late.
    """
    call, wanted = FAILURES[what]

    def run(world, device):
        calls = Calls(world, device)
        calls.device, calls.rank, late = device, world.rank, 1.6 * (world.rank == world.size - 1)
        calls.closed = epmoe.SymmetricHeap(world, 1 << 20, device)
        calls.closed.close()
        time.sleep(late * (what in ("bytes", "kind")))
        got = outcome(lambda: call(calls), calls.layers[0])
        another = make_layer(world, device, CASE)
        time.sleep(late * (what not in ("bytes", "kind")))
        return got, outcome(another.ep_barrier_all, another), outcome(lambda: world.exchange(b"x") and None)

    results = ranks(run, world_size=3, at_least=3)
    for kind, (got, *behind) in zip((*wanted, wanted[-1]), results, strict=False):
        check_outcomes([got], kind, within_s=4)
        check_outcomes(behind, "nothing", within_s=4)


@pytest.mark.cuda_only
def test_errors_graph_of_one_rank_is_no_disorder(ranks):
    """What is captured is noted and does not run: that rank's count is its own from then on."""

    def run(world, device):
        calls = Calls(world, device)
        if world.rank == BAD:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls.layers[0].ep_barrier_all()
                calls.layers[0].ep_barrier_all(buffer=1)
        time.sleep(1.6 * (world.rank == 0))
        got = outcome(lambda: world.exchange(b"x") and None), outcome(calls.layers[1].ep_barrier_all,
                                                                      calls.layers[1])
        calls.close()
        return got

    for got in ranks(run, world_size=3, at_least=3):
        check_outcomes(got, "nothing", within_s=4)


@pytest.mark.cpu_only
def test_errors_threads_of_a_rank_call_in_any_order(ranks):
    """On the CPU a thread each may work on a buffer: rank 0's first thread and rank 1's second are stuck in
    two operations, until the others come."""

    def run(world, device):
        layer = make_layer(world, device, CASE, num_buffers=2)
        got = [None, None]

        def one(buffer):
            for again in range(2):
                time.sleep(2.0 if again and buffer != world.rank else 0)
                got[buffer] = outcome(lambda: layer.ep_barrier_all(buffer=buffer))

        threads = [threading.Thread(target=one, args=(b,)) for b in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        layer.finalize()
        return got

    for got in ranks(run, world_size=2):
        check_outcomes(got, "nothing", within_s=4)


@pytest.mark.cuda_only
def test_errors_late_gpu_is_in_order(ranks):
    """A rank whose GPU has something else to do first: its operations stand in the same order, and nobody is
    to blame.
    """

    def run(world, device):
        calls = Calls(world, device)
        if world.rank == BAD:
            torch.cuda._sleep(int(5e9))  # clocks: some seconds
        got = outcome(lambda: [call() and None for call in (lambda: calls.dispatch(0), lambda: calls.plan(1),
                                                            calls.heap.barrier)], calls.layers[0])
        result = run_routing(calls.layers[1], CASE)
        calls.close()
        return got, result

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], "nothing", within_s=10)
    check_case([result for _, result in results], CASE)
