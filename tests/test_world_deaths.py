"""Ranks that die or stop: which error the other ranks raise, how soon, and that nothing is left."""

import dataclasses
import os
import random
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import epmoe
from cases import (MODES, Case, check_case, check_outcomes, first, indices_of, inputs_of, make_layer,
                   outcome, process_ranks, run_routing)
from epmoe import _C
from pace import HANG_S, WAIT_S, Events, continue_later, is_soon, slowness, until_ended, when_waiting
from traces import abstract_names, held, remember_names, shared_memory_names

pytestmark = pytest.mark.cpu_only
CASE = Case(num_local=2, topk=3, hidden=64, max_tokens=40)


def step(layer, arguments):
    rows, row_weight, layout = layer.dispatch(**arguments)
    return layer.combine(rows, layout, row_weight)


def arguments_of(layer, case=CASE):
    x, weight = inputs_of(case, layer.rank, layer.world_size)
    return {"input": x, "exp_indices": indices_of(case, layer.rank, layer.world_size), "weight": weight}


# ---- kill -9 ----


def pick_death(pick, num_alive):
    """(victim, delay in seconds, combine mode, num_sm). Every process draws the same values."""
    return pick.randrange(num_alive), pick.random() * 0.08, pick.choice(MODES), pick.choice((1, 3))


def _until_a_death(me, victim, delay, case, note):
    """Run steps until the victim is killed after a delay. Returns what this survivor saw, as a dict."""
    before = held()
    world = epmoe.World(timeout_s=WAIT_S)
    layer = make_layer(world, "cpu", case)
    arguments = arguments_of(layer)
    world.exchange(b"go")
    assert world.lost_ranks() == []

    def die():
        with open(note, "w") as f:
            f.write(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if me == victim:
        threading.Timer(delay, die).start()
    error, limit = None, time.monotonic() + WAIT_S
    while error is None and time.monotonic() < limit:
        try:
            step(layer, arguments)
        except epmoe.EpError as e:
            error, seen_at, lost = e, time.monotonic(), world.lost_ranks()
    seen = {"kind": type(error).__name__, "text": str(error), "victim": victim, "lost": lost}
    seen["next call"] = outcome(layer.ep_barrier_all).kind
    with open(note) as f:
        seen["latency"] = seen_at - float(f.read())
    outcome(layer.finalize)
    seen["close"] = outcome(world.close).kind
    seen["lost later"] = world.lost_ranks()
    del layer, world, error, arguments
    return seen | {"held before": before, "held after": held()}


def _die_in_turn(rank, world_size, num_deaths, seed, folder):
    """Rank main: one rank after the other is killed during steps. The others continue as a smaller world.

    Returns (what this survivor saw of each death, the socket names of this process).
    """
    torch.set_num_threads(1)
    pick, alive, deaths, names = random.Random(seed), list(range(world_size)), [], remember_names()
    held()
    for turn in range(num_deaths):
        victim, delay, mode, num_sm = pick_death(pick, len(alive))
        case = dataclasses.replace(CASE, mode=mode, num_sm=num_sm)
        deaths.append(_until_a_death(alive.index(rank), victim, delay, case, os.path.join(folder, str(turn))))
        dist.destroy_process_group()
        alive = [r for i, r in enumerate(alive) if i not in deaths[-1]["lost"]]  # as docs/guide.md recommends
        store = dist.FileStore(os.path.join(folder, f"store{turn}"), len(alive))
        dist.init_process_group("gloo", store=store, rank=alive.index(rank), world_size=len(alive))
        world = epmoe.World(timeout_s=WAIT_S)
        layer = make_layer(world, "cpu", CASE)
        mine, results = run_routing(layer, CASE), [None] * len(alive)
        dist.all_gather_object(results, mine)
        check_case(results, CASE)
        layer.finalize()
        world.close()
        del layer, world
    return deaths, names


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_world_survives_kill_9(tmp_path, seed):
    """Three deaths at random moments of steps. Every survivor names the dead rank within 3 s.

    After each death, a new world of the survivors gives right results.
    """
    before = shared_memory_names()
    pick, alive = random.Random(seed), [0, 1, 2, 3]
    dead = [alive.pop(pick_death(pick, len(alive))[0]) for _ in range(3)]  # as the ranks pick
    results = process_ranks(_die_in_turn, 4, 3, seed, str(tmp_path), timeout_s=HANG_S, may_die=tuple(dead))
    assert [r is None for r in results] == [rank in dead for rank in range(4)]
    deaths, names = results[alive[0]]
    assert len(deaths) == 3
    for seen in deaths:
        assert seen["kind"] == "PeerDied" and f"rank {seen['victim']} died" in seen["text"], seen
        assert seen["lost"] == seen["lost later"] == [seen["victim"]]
        assert is_soon(seen["latency"], 3), f"seen {seen['latency']:.2f} s after the death"
        assert seen["next call"] == "PeerDied" and seen["close"] in ("nothing", "PeerDied")
        held_before, held_after = seen["held before"], seen["held after"]
        for what in ("fds", "memfds", "heaps", "threads"):
            assert held_after[what] <= held_before[what], f"{what}: {held_before} became {held_after}"
    assert shared_memory_names() == before
    assert not abstract_names() & set(names), "a socket name still exists"


WAITING = {
    "heap": lambda w: epmoe.SymmetricHeap(w, 1 << 16, "cpu"),
    "malloc": lambda w: w.heap.malloc_symmetric((4,)),
    "barrier": lambda w: w.heap.barrier(),
    "signal": lambda w: w.heap.wait(w.words, 0, 1),
    "layer": lambda w: make_layer(w, "cpu", CASE, heap=w.heap),
    "plan": lambda w: w.layer.preprocess(torch.zeros(1, 3, dtype=torch.int64)),
    "exchange": lambda w: w.exchange(b"x"),
    "finalize": lambda w: w.layer.finalize(),
    "close": lambda w: w.close(),
}


def _die_before(rank, world_size, what):
    """Rank main: rank 1 is killed while the other ranks wait for it in a call of WAITING."""
    world = epmoe.World(timeout_s=WAIT_S)
    if what != "heap":
        world.heap = epmoe.SymmetricHeap(world, 1 << 20, "cpu")
        world.words = world.heap.malloc_symmetric((2,), torch.int64)
    if what in ("plan", "finalize"):
        world.layer = make_layer(world, "cpu", CASE)
    world.exchange(b"go")
    if rank == 1:
        time.sleep(0.1)  # meanwhile the other ranks begin to wait
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: WAITING[what](world))


@pytest.mark.parametrize("what", WAITING)
def test_world_death_ends_every_kind_of_wait(what):
    results = process_ranks(_die_before, 3, what, may_die=(1,))
    check_outcomes([results[0], results[2]], "PeerDied", "rank 1 died", within_s=3)


def _fork_then_die(rank, world_size, folder):
    """Rank main: rank 1 forks a child and is killed. The child lives until rank 0 has raised."""
    world, events = epmoe.World(timeout_s=12 * slowness()), Events(folder)
    layer = make_layer(world, "cpu", CASE)
    if rank == 1:
        child = os.fork()  # for example a worker of a data loader: it inherits all sockets
        if child == 0:
            events.wait("raised")
            os._exit(0)
    world.exchange(b"go")
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    got = outcome(layer.ep_barrier_all)
    events.set("raised")
    return got


def test_world_death_is_seen_while_a_forked_child_lives(tmp_path):
    """The death of a rank is reported although its child still holds copies of all its sockets."""
    results = process_ranks(_fork_then_die, 2, str(tmp_path), may_die=(1,))
    check_outcomes(results[:1], "PeerDied", "rank 1", within_s=3)


def _fork_then_die_while_connecting(rank, world_size, folder):
    """Rank main: rank 1 forks a child and is killed when the ranks know each other's addresses.

    The child lives until rank 0 has raised.
    """
    events = Events(folder)

    def fork_and_die(*_):
        if os.fork() == 0:
            events.wait("raised")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        _C.world_create = fork_and_die
    got = outcome(lambda: epmoe.World(timeout_s=12 * slowness()))
    events.set("raised")
    return got


def test_world_death_while_connecting_is_seen_while_a_forked_child_lives(tmp_path):
    """The child does not keep the socket on which rank 1 listened: rank 1 would appear to be alive."""
    results = process_ranks(_fork_then_die_while_connecting, 2, str(tmp_path), may_die=(1,))
    check_outcomes(results[:1], "PeerDied", "rank 1 died", within_s=3)


# ---- Ctrl-C ----


def _interrupt(rank, world_size):
    """Rank main: rank 0 is interrupted by SIGINT while it waits in an exchange."""
    world = epmoe.World(timeout_s=WAIT_S)
    world.exchange(b"go")
    if rank == 1:
        until_ended(world)  # the other ranks wait for this rank until the world has ended
    if rank == 0:
        # SIGINT may be ignored, if the tests were started in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        when_waiting(world, "exchange", os.kill, os.getpid(), signal.SIGINT)
    raised = "nothing"
    try:
        world.exchange(b"x")
    except (KeyboardInterrupt, epmoe.EpError) as e:
        raised = type(e).__name__
    return raised, outcome(world.check)


def test_world_wait_for_peer_is_interruptible():
    """Ctrl-C ends the wait of an exchange and also the world.

    The world cannot continue, because a message that arrives later would belong to no exchange.
    """
    results = process_ranks(_interrupt, 3)
    assert [raised for raised, _ in results] == ["KeyboardInterrupt", "EpClosed", "EpClosed"], results
    check_outcomes([state for _, state in results], "EpClosed", "rank 0 was interrupted")


# ---- stopped, and continued ----


def _stop(rank, world_size, limit, folder):
    """Rank main: rank 1 stops itself by SIGSTOP.

    Rank 0 continues it after 0.5 s or, if folder is not empty, after all other ranks have raised.
    """
    events = Events(folder)
    world = epmoe.World(timeout_s=WAIT_S)
    layer = make_layer(world, "cpu", CASE)
    arguments = arguments_of(layer)
    pids = [int.from_bytes(b, "little") for b in world.exchange(os.getpid().to_bytes(4, "little"))]
    for _ in range(5):
        step(layer, arguments)
    world.exchange(b"go")
    world.set_timeout(limit)
    if rank == 0 and folder:
        continue_later(pids[1], after=lambda: (events.wait("0"), events.wait("2")))
    elif rank == 0:
        continue_later(pids[1], 0.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    got = outcome(lambda: [step(layer, arguments) for _ in range(20)] and None)
    if folder:
        events.set(str(rank))
        events.wait("1")
    return got


def test_world_stopped_rank_is_named_at_the_limit(tmp_path):
    """All ranks raise EpTimeout that names the stopped rank, after the limit.

    The stopped rank raises too, when it is continued after the other ranks have raised.
    """
    limit = 0.8 * slowness()
    results = process_ranks(_stop, 3, limit, str(tmp_path))
    check_outcomes(results, "EpTimeout", "rank 1", within_s=limit + 3)
    assert max(results[r].seconds for r in (0, 2)) > 0.9 * limit, results
    assert all(re.search(r"\(word enter, epoch \d+.* wanted \d+, saw \d+", r.text) for r in results), results


def test_world_stopped_rank_that_continues_in_time_causes_no_error():
    check_outcomes(process_ranks(_stop, 3, WAIT_S, ""), "nothing", within_s=10)


def _stop_a_waiting_rank(rank, world_size, slow):
    """Rank main: rank 0 waits in an exchange and is stopped when its limit expires.

    While it is stopped, the message for which it waits arrives.
    """
    world, limit, got = epmoe.World(timeout_s=WAIT_S), 0.6 * slow, []
    pids = [int.from_bytes(b, "little") for b in world.exchange(os.getpid().to_bytes(4, "little"))]
    for _ in range(4):
        world.exchange(b"go")
        world.set_timeout(limit if rank == 0 else 20)
        if rank == 1:
            time.sleep(limit - 0.2 * slow)
            os.kill(pids[0], signal.SIGSTOP)
            continue_later(pids[0], 0.4 * slow)
        got.append(outcome(lambda: world.exchange(b"there") and None))
        world.set_timeout(WAIT_S)
    return got


def test_world_rank_stopped_while_waiting_does_not_time_out():
    for outcomes in zip(*process_ranks(_stop_a_waiting_rank, 2, slowness()), strict=True):
        check_outcomes(outcomes, "nothing", within_s=10)
