"""Ranks that die or stop: what the others see, how soon, and that nothing is left behind."""

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
from cases import (
    MODES, Case, check_case, check_outcomes, indices_of, inputs_of, make_layer, outcome,
    process_ranks, run_routing,
)
from pace import (HANG_S, WAIT_S, Events, continue_later, is_soon, slowness, until_ended,
                  when_waiting)
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


def _die_in_turn(rank, world_size, num_deaths, seed, folder):
    """One rank after the other is killed in the middle of steps; the rest go on as a smaller world, down to
    one.
    """
    torch.set_num_threads(1)
    pick, alive, told, names = random.Random(seed), list(range(world_size)), [], remember_names()
    held()
    for turn in range(num_deaths):
        me, victim, delay, mode, num_sm = (
            alive.index(rank),
            pick.randrange(len(alive)),
            pick.random() * 0.08,
            pick.choice(MODES),
            pick.choice((1, 3)),
        )
        before = held()
        world = epmoe.World(timeout_s=WAIT_S)
        layer = make_layer(world, "cpu", Case(num_local=2, topk=3, hidden=64, max_tokens=40, mode=mode,
                                              num_sm=num_sm))
        arguments = arguments_of(layer)
        note = os.path.join(folder, str(turn))
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
        again = outcome(layer.ep_barrier_all)
        late = seen_at - float(open(note).read())
        told.append((type(error).__name__, str(error), victim, late, again.kind, lost))
        endings = [outcome(layer.finalize).kind, outcome(world.close).kind]
        told[-1] += (world.lost_ranks(),)
        del layer, world, error, again, arguments
        told[-1] += (endings, before, held())
        dist.destroy_process_group()
        alive = [r for i, r in enumerate(alive) if i not in lost]  # as docs/guide.md has it
        store = dist.FileStore(os.path.join(folder, f"store{turn}"), len(alive))
        dist.init_process_group("gloo", store=store, rank=alive.index(rank), world_size=len(alive))
        world = epmoe.World(timeout_s=WAIT_S)
        layer = make_layer(world, "cpu", CASE)
        mine, everybody = run_routing(layer, CASE), [None] * len(alive)
        dist.all_gather_object(everybody, mine)
        check_case(everybody, CASE)
        layer.finalize()
        world.close()
        del layer, world
    return told, names


@pytest.mark.parametrize("seed", range(4))
def test_world_survives_kill_9(tmp_path, seed):
    """Twelve deaths at random moments of steps: named within three seconds by every survivor, and a new world
    works.
    """
    before = shared_memory_names()
    victims, alive = random.Random(seed), [0, 1, 2, 3]
    dead = []
    for _ in range(3):  # the same picks as the ranks make
        dead.append(alive.pop(victims.randrange(len(alive))))
        victims.random(), victims.choice(MODES), victims.choice((1, 3))
    results = process_ranks(_die_in_turn, 4, 3, seed, str(tmp_path), timeout_s=HANG_S, may_die=tuple(dead))
    assert [r is None for r in results] == [rank in dead for rank in range(4)]
    told, names = results[alive[0]]
    assert len(told) == 3
    for kind, text, victim, late, again, lost, lost_later, endings, held_before, held_after in told:
        assert kind == "PeerDied" and f"rank {victim} died" in text, (kind, text)
        assert lost == lost_later == [victim]
        assert is_soon(late, 3), f"seen {late:.2f} s after the death"
        assert again == "PeerDied" and endings[1] in ("nothing", "PeerDied")
        for what in ("fds", "memfds", "heaps", "threads"):
            assert held_after[what] <= held_before[what], f"{what}: {held_before} became {held_after}"
    assert shared_memory_names() == before
    assert not abstract_names() & set(names), "a socket name is left"


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
    world = epmoe.World(timeout_s=WAIT_S)
    if what != "heap":
        world.heap = epmoe.SymmetricHeap(world, 1 << 20, "cpu")
        world.words = world.heap.malloc_symmetric((2,), torch.int64)
    if what in ("plan", "finalize"):
        world.layer = make_layer(world, "cpu", CASE)
    world.exchange(b"go")
    if rank == 1:
        time.sleep(0.1)  # the others are waiting by now
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: WAITING[what](world))


@pytest.mark.parametrize("what", WAITING)
def test_world_death_ends_every_wait(what):
    results = process_ranks(_die_before, 3, what, may_die=(1,))
    check_outcomes([results[0], results[2]], "PeerDied", "rank 1 died", within_s=3)


def _fork_then_die(rank, world_size, folder):
    world, events = epmoe.World(timeout_s=12 * slowness()), Events(folder)
    layer = make_layer(world, "cpu", CASE)
    if rank == 1:
        child = os.fork()  # a data loader's worker, say: it inherits every socket, and outlives its parent
        if child == 0:
            events.wait("heard")
            os._exit(0)
    world.exchange(b"go")
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    got = outcome(layer.ep_barrier_all)
    events.set("heard")
    return got


def test_world_death_of_a_rank_whose_child_lives(tmp_path):
    """A rank is dead when it is dead, not when the last process that it forked is: the child lives until
    rank 0 has raised."""
    results = process_ranks(_fork_then_die, 2, str(tmp_path), may_die=(1,))
    check_outcomes(results[:1], "PeerDied", "rank 1", within_s=3)


# ---- Ctrl-C ----


def _interrupt(rank, world_size):
    world = epmoe.World(timeout_s=WAIT_S)
    world.exchange(b"go")
    if rank == 1:
        until_ended(world)  # the others wait for this rank, which comes only when their waits are over
    if rank == 0:
        signal.signal(signal.SIGINT,
                      # who starts the tests in the background may have it ignored
                      signal.default_int_handler)
        when_waiting(world, "exchange", os.kill, os.getpid(), signal.SIGINT)
    told = "nothing"
    try:
        world.exchange(b"x")
    except (KeyboardInterrupt, epmoe.EpError) as e:
        told = type(e).__name__
    return told, outcome(world.check)


def test_world_wait_for_a_peer_is_interrupted():
    """Ctrl-C ends an exchange's wait, and the world with it: a frame that comes later belongs to no exchange.
    """
    results = process_ranks(_interrupt, 3)
    assert [told for told, _ in results] == ["KeyboardInterrupt", "EpClosed", "EpClosed"], results
    check_outcomes([state for _, state in results], "EpClosed", "rank 0 was interrupted")


# ---- stopped, and continued ----


def _stop(rank, world_size, limit, folder):
    """Rank 1 stops itself.  Rank 0 continues it after half a second; or, if there is a folder, when the
    others have raised."""
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
    """Alive but stuck: EpTimeout after the limit, on all ranks.  The stuck one hears of it when it comes
    back, after the others have raised."""
    limit = 0.8 * slowness()
    results = process_ranks(_stop, 3, limit, str(tmp_path))
    check_outcomes(results, "EpTimeout", "rank 1", within_s=limit + 3)
    assert max(results[r].seconds for r in (0, 2)) > 0.9 * limit, results
    assert all(re.search(r"\(word enter, epoch \d+.* wanted \d+, saw \d+", r.text) for r in results), results


def test_world_stopped_rank_that_continues_in_time():
    check_outcomes(process_ranks(_stop, 3, WAIT_S, ""), "nothing", within_s=10)


def _stop_a_waiting_rank(rank, world_size, slow):
    """Rank 0 waits in an exchange; it is stopped when its limit comes, and what it waits for comes meanwhile.
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


def test_world_rank_stopped_while_it_waits_is_no_false_alarm():
    for outcomes in zip(*process_ranks(_stop_a_waiting_rank, 2, slowness()), strict=True):
        check_outcomes(outcomes, "nothing", within_s=10)
