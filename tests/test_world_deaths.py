"""Ranks that die, stop, fork or leave: what the others see, how soon, and that nothing is left behind."""

import contextlib
import gc
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import epmoe
from cases import MODES, Case, check_case, check_outcomes, indices_of, inputs_of, keep, make_layer, outcome, process_ranks, run_routing
from traces import abstract_names, held, remember_names, shared_memory_names

pytestmark = pytest.mark.cpu_only
CASE = Case(num_local=2, topk=3, hidden=64, max_tokens=40)


def free_ports(n):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def step(layer, arguments):
    rows, row_weight, layout = layer.dispatch(**arguments)
    return layer.combine(rows, layout, row_weight)


def arguments_of(layer, case=CASE):
    x, weight = inputs_of(case, layer.rank, layer.world_size)
    return {"input": x, "exp_indices": indices_of(case, layer.rank, layer.world_size), "weight": weight}


# ---- kill -9 ----


def _die_in_turn(rank, world_size, ports, seed, folder):
    """One rank after the other is killed in the middle of steps; the rest go on as a smaller world, down to one."""
    torch.set_num_threads(1)
    pick, alive, told, names = random.Random(seed), list(range(world_size)), [], remember_names()
    held()
    for turn, port in enumerate(ports):
        me, victim, delay, mode, num_sm = alive.index(rank), pick.randrange(len(alive)), pick.random() * 0.08, pick.choice(MODES), pick.choice((1, 3))
        before = held()
        world = epmoe.World(timeout_s=20)
        layer = make_layer(world, "cpu", Case(num_local=2, topk=3, hidden=64, max_tokens=40, mode=mode, num_sm=num_sm))
        arguments = arguments_of(layer)
        note = os.path.join(folder, str(turn))
        world.exchange(b"go")

        def die():
            with open(note, "w") as f:
                f.write(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        if me == victim:
            threading.Timer(delay, die).start()
        error, limit = None, time.monotonic() + 15
        while error is None and time.monotonic() < limit:
            try:
                step(layer, arguments)
            except epmoe.EpError as e:
                error, seen_at = e, time.monotonic()
        again = outcome(layer.ep_barrier_all)
        late = seen_at - float(open(note).read())
        told.append((type(error).__name__, str(error), victim, late, again.kind))
        endings = [outcome(layer.finalize).kind, outcome(world.close).kind]
        del layer, world, error, again, arguments
        told[-1] += (endings, before, held())
        dist.destroy_process_group()
        alive.pop(victim)
        store = dist.TCPStore("127.0.0.1", port, len(alive), is_master=alive[0] == rank)
        dist.init_process_group("gloo", store=store, rank=alive.index(rank), world_size=len(alive))
        world = epmoe.World(timeout_s=20)
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
    """Twelve deaths at random moments of steps: named within three seconds by every survivor, and a new world works."""
    before = shared_memory_names()
    victims, alive = random.Random(seed), [0, 1, 2, 3]
    dead = []
    for _ in range(3):  # the same picks as the ranks make
        dead.append(alive.pop(victims.randrange(len(alive))))
        victims.random(), victims.choice(MODES), victims.choice((1, 3))
    results = process_ranks(_die_in_turn, 4, free_ports(3), seed, str(tmp_path), timeout_s=90, may_die=tuple(dead))
    assert [r is None for r in results] == [rank in dead for rank in range(4)]
    told, names = results[alive[0]]
    assert len(told) == 3
    for kind, text, victim, late, again, endings, held_before, held_after in told:
        assert kind == "PeerDied" and f"rank {victim} died" in text, (kind, text)
        assert late < 3, f"seen {late:.2f} s after the death"
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
    world = epmoe.World(timeout_s=20)
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


def _fork_then_die(rank, world_size):
    world = epmoe.World(timeout_s=12)
    layer = make_layer(world, "cpu", CASE)
    if rank == 1:
        child = os.fork()  # a data loader's worker, say: it inherits every socket, and outlives its parent
        if child == 0:
            time.sleep(5)
            os._exit(0)
    world.exchange(b"go")
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(layer.ep_barrier_all)


def test_world_death_of_a_rank_whose_child_lives():
    """A rank is dead when it is dead, not when the last process that it forked is."""
    results = process_ranks(_fork_then_die, 2, may_die=(1,))
    check_outcomes(results[:1], "PeerDied", "rank 1", within_s=3)


# ---- Ctrl-C ----


def _interrupt(rank, world_size):
    world = epmoe.World(timeout_s=20)
    world.exchange(b"go")
    if rank == 1:
        time.sleep(1.0)  # the others wait for this one
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests in the background may have it ignored
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start, told = time.monotonic(), "nothing"
    try:
        world.exchange(b"x")
    except (KeyboardInterrupt, epmoe.EpError) as e:
        told = type(e).__name__
    return told, time.monotonic() - start, outcome(world.check)


def test_world_wait_for_a_peer_is_interrupted():
    """Ctrl-C ends an exchange's wait, and the world with it: a frame that comes later belongs to no exchange."""
    results = process_ranks(_interrupt, 3)
    assert [told for told, _, _ in results] == ["KeyboardInterrupt", "EpClosed", "EpClosed"], results
    assert results[0][1] < 0.9, "only the peer's coming ended the wait"
    check_outcomes([state for _, _, state in results], "EpClosed", "rank 0 was interrupted")


# ---- stopped, and continued ----


def _stop(rank, world_size, limit, stopped_for):
    world = epmoe.World(timeout_s=20)
    layer = make_layer(world, "cpu", CASE)
    arguments = arguments_of(layer)
    pids = [int.from_bytes(b, "little") for b in world.exchange(os.getpid().to_bytes(4, "little"))]
    for _ in range(5):
        step(layer, arguments)
    world.set_timeout(limit)
    world.exchange(b"go")
    if rank == 0:
        threading.Timer(stopped_for, os.kill, (pids[1], signal.SIGCONT)).start()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return outcome(lambda: [step(layer, arguments) for _ in range(20)] and None)


def test_world_stopped_rank_is_named_at_the_limit():
    """Alive but stuck: EpTimeout after the limit, on all ranks; the stuck one hears of it when it comes back."""
    results = process_ranks(_stop, 3, 0.8, 2.5)
    check_outcomes(results, "EpTimeout", "rank 1", within_s=4)
    assert all(0.7 < results[r].seconds < 2.4 for r in (0, 2))
    assert all(re.search(r"\(word enter, epoch \d+.* wanted \d+, saw \d+", r.text) for r in results), results


def test_world_stopped_rank_that_continues_in_time():
    check_outcomes(process_ranks(_stop, 3, 10.0, 0.5), "nothing", within_s=10)


def _stop_a_waiting_rank(rank, world_size):
    """Rank 0 waits in an exchange; it is stopped when its limit comes, and what it waits for comes meanwhile."""
    world, limit, got = epmoe.World(timeout_s=20), 0.6, []
    pids = [int.from_bytes(b, "little") for b in world.exchange(os.getpid().to_bytes(4, "little"))]
    for _ in range(4):
        world.exchange(b"go")
        world.set_timeout(limit if rank == 0 else 20)
        if rank == 1:
            time.sleep(limit - 0.2)
            os.kill(pids[0], signal.SIGSTOP)
            time.sleep(0.1)
            threading.Timer(0.3, os.kill, (pids[0], signal.SIGCONT)).start()
        got.append(outcome(lambda: world.exchange(b"there") and None))
        world.set_timeout(20)
    return got


def test_world_rank_stopped_while_it_waits_is_no_false_alarm():
    for outcomes in zip(*process_ranks(_stop_a_waiting_rank, 2), strict=True):
        check_outcomes(outcomes, "nothing", within_s=10)


# ---- fork ----


def _fork(rank, world_size):
    world = epmoe.World(timeout_s=20)
    heap = epmoe.SymmetricHeap(world, 1 << 20, "cpu")
    t, words = heap.malloc_symmetric((4,)), heap.malloc_symmetric((2,), torch.int64)
    layer = make_layer(world, "cpu", CASE)
    arguments = arguments_of(layer)
    rows, _, layout = layer.dispatch(**arguments)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls = [world.check, lambda: world.exchange(b"x"), lambda: heap.malloc_symmetric((1,)), lambda: heap.free(t), lambda: heap.put(t, torch.ones(4), 0),
                 lambda: heap.get(torch.ones(4), t, 0), lambda: heap.signal(words, 0, 1, 0), lambda: heap.wait(words, 0, 0), heap.barrier,
                 lambda: layer.dispatch(**arguments), lambda: layer.preprocess(arguments["exp_indices"]), lambda: layer.combine(rows, layout),
                 layer.ep_barrier_all, lambda: epmoe.SymmetricHeap(world, 1 << 16, "cpu")]
        kinds = [outcome(c).kind for c in calls]
        closings = [outcome(c).seconds for c in (layer.finalize, heap.close, world.close)]
        epmoe.world._leave_all()  # what an interpreter's end would do
        del calls, layer, heap, t, words, rows, layout, arguments
        gc.collect()
        os.write(write, repr((kinds, max(closings))).encode())
        os._exit(0)
    os.close(write)
    text = b""
    while part := os.read(read, 4096):
        text += part
    status = os.waitpid(child, 0)[1]
    kinds, slowest = eval(text.decode())
    result = run_routing(layer, CASE)  # the parent has lost nothing
    heap.barrier()
    layer.finalize()
    heap.close()
    world.close()
    return kinds, slowest, status, result


def test_world_in_a_forked_child():
    """A child cannot use what its parent made, says so, and harms nobody."""
    results = process_ranks(_fork, 2)
    for kinds, slowest, status, _ in results:
        assert kinds == ["EpClosed"] * len(kinds) and status == 0 and slowest < 1, (kinds, status, slowest)
    check_case([r[3] for r in results], CASE)


# ---- leaving ----

EXIT = """
import os, sys, time
import torch.distributed as dist
import epmoe
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[2], rank=rank, world_size=2)
world = epmoe.World(timeout_s=60)
heap = epmoe.SymmetricHeap(world, 1 << 20, "cpu")
t = heap.malloc_symmetric((4,))
layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=4, device="cpu")
layer.ep_barrier_all()
if rank == 1:
    start = time.monotonic()
    try:
        layer.ep_barrier_all()
        print("nothing", end=" ")
    except epmoe.EpError as e:
        print(type(e).__name__, round(time.monotonic() - start, 2), str(e).replace(" ", "_"), end=" ")
print("end", time.monotonic(), flush=True)
"""


EXIT_BUSY = """
import sys, threading, time
import torch.distributed as dist
import epmoe
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[2], rank=rank, world_size=2)
world = epmoe.World(timeout_s=60)
layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=4, device="cpu", num_buffers=2)
layer.ep_barrier_all()

def wait():  # where the other does not come
    try:
        layer.ep_barrier_all(buffer=rank)
    except epmoe.EpError as e:
        print(type(e).__name__, end=" ", flush=True)

waiting = threading.Thread(target=wait)
waiting.start()
time.sleep(0.2)
try:
    with world:
        raise KeyError("mine")
except KeyError:
    pass
print("end", time.monotonic(), flush=True)
"""


def _leave(script):
    """What both ranks printed, and the seconds that each needed to leave after its last word."""
    port = str(free_ports(1)[0])
    processes = [subprocess.Popen([sys.executable, str(script), str(r), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in (0, 1)]
    ended, deadline = [None, None], time.monotonic() + 90
    while None in ended and time.monotonic() < deadline:
        for i, p in enumerate(processes):
            if ended[i] is None and p.poll() is not None:
                ended[i] = time.monotonic()
        time.sleep(0.01)
    outs, needed = [], []
    for i, p in enumerate(processes):
        if p.poll() is None:
            p.kill()
        out, err = p.communicate()
        assert ended[i] is not None and p.returncode == 0, f"rank {i}: {out}\n{err[-2000:]}"
        outs.append(out)
        needed.append(ended[i] - float(out.split("end ")[1].split()[0]))
    return outs, needed


def test_world_interpreter_exits_without_close(tmp_path):
    """Nobody closes anything: the first to leave does not hang, and the other hears that it has left."""
    script = tmp_path / "leave.py"
    script.write_text(EXIT)
    for _ in range(3):  # an interpreter's end takes its time on a machine that is busy; once in three it must be quick
        outs, needed = _leave(script)
        if max(needed) < 2:
            break
    kind, seconds, text = outs[1].split()[:3]
    assert kind == "PeerDied" and "rank_0" in text and float(seconds) < 6, outs[1]
    assert max(needed) < 2, f"the ranks needed {needed} s to leave"


def test_world_interpreter_exits_with_an_operation_on_its_way(tmp_path):
    """Both leave by an exception, each with a thread that waits for the other, which the interpreter waits for: the waits end."""
    script = tmp_path / "leave.py"
    script.write_text(EXIT_BUSY)
    outs, needed = _leave(script)
    assert ["EpClosed" in out for out in outs] == [True, True] and max(needed) < 6, (outs, needed)


def _cycles(rank, world_size):
    counts = []
    for i in range(220):
        world = epmoe.World(timeout_s=20)
        layer = make_layer(world, "cpu", Case(num_buffers=2))
        run_routing(layer, Case()) if i % 20 == 0 else layer.ep_barrier_all()
        layer.finalize()
        world.close()
        del world, layer
        if i in (19, 219):
            counts.append(held())
    return counts


def test_world_two_hundred_lives_leave_nothing():
    for first, last in process_ranks(_cycles, 2, timeout_s=120):
        for what in ("fds", "memfds", "heaps", "threads"):
            assert last[what] <= first[what], f"{what}: {first} became {last}"
        assert last["maps"] <= first["maps"] + 8, f"maps: {first} became {last}"


def test_world_that_is_dropped_leaves_nothing():
    """No close at all: garbage collection is enough."""

    def life():
        world = epmoe.thread_worlds(1)[0]
        heap = epmoe.SymmetricHeap(world, 1 << 16, "cpu")
        heap.malloc_symmetric((4,)).fill_(1)
        layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=4, device="cpu")
        keep(world, layer)  # a cycle, too

    for _ in range(5):
        life()
    before = held()
    for _ in range(30):
        life()
    after = held()
    for what in ("fds", "memfds", "heaps", "threads"):
        assert after[what] <= before[what], f"{what}: {before} became {after}"
