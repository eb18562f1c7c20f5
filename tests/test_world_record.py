"""The flight record. Its first line must name the rank that caused the end of the world, on every rank."""

import os
import re
import signal
import socket
import struct
import time

import pytest
import torch

import epmoe
from cases import Case, indices_of, inputs_of, make_layer, process_ranks
from epmoe import _C
from pace import WAIT_S, Events, continue_later, is_soon, slowness, until_ended, when_waiting

pytestmark = pytest.mark.cpu_only
CASE = Case(num_local=2, topk=3, hidden=64, max_tokens=40)
CULPRIT = 2
RECORD_S = WAIT_S / 2  # for a test in which a write that blocks would never return


def _step(layer):
    x, weight = inputs_of(CASE, layer.rank, layer.world_size)
    rows, row_weight, layout = layer.dispatch(x, indices_of(CASE, layer.rank, layer.world_size), weight)
    layer.combine(rows, layout, row_weight)


def _malloc(layer):
    layer.heap.malloc_symmetric((4,))


WAYS = {
    "killed": lambda layer: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda layer: os.kill(os.getpid(), signal.SIGSTOP),
    "late": lambda layer: until_ended(layer.world),
    "other order": _malloc,
    "left": lambda layer: layer.world._leave(False),
}


def _end(rank, world_size, way, folder, limit):
    """Rank main: CULPRIT ends the world in one of WAYS.

    Returns (kind of error, flight record, seconds to get it, text of the written file, record after leaving).
    """
    events = Events(os.getcwd() if folder is None else os.path.dirname(folder))
    if folder:
        os.environ["EPMOE_FLIGHT_RECORD"] = folder
    os.chdir(os.environ.get("EPMOE_FLIGHT_RECORD", os.getcwd()))
    world = epmoe.World(timeout_s=WAIT_S)
    layer = make_layer(world, "cpu", CASE)
    pids = [int.from_bytes(b, "little") for b in world.exchange(os.getpid().to_bytes(4, "little"))]
    for _ in range(5):
        _step(layer)
    world.exchange(b"go")
    world.set_timeout(limit if way in ("stopped", "late") else WAIT_S)
    error = None
    if rank == 0 and way == "stopped":
        others = [f"wrote{r}" for r in range(world_size) if r != CULPRIT]
        continue_later(pids[CULPRIT], after=lambda: [events.wait(name) for name in others])
    try:
        if rank == CULPRIT:
            WAYS[way](layer)
        while True:
            _step(layer)
    except epmoe.EpError as e:
        error = type(e).__name__
    start = time.monotonic()
    page = world.flight_record()
    seconds = time.monotonic() - start
    if way == "stopped":
        events.set(f"wrote{rank}")
    path = folder and os.path.join(folder, f"epmoe-rank{rank}-pid{os.getpid()}.txt")
    written = path and os.path.exists(path) and open(path).read()
    if way == "stopped":
        events.wait(f"wrote{CULPRIT}")  # a thread of rank 0 continues CULPRIT
    world._leave(False)
    return error, page, seconds, written, world.flight_record()


# For each way: the kind of error, the culprit in the record, and more of its first line.
EXPECTED = {
    "killed": ("PeerDied", "rank 2 is gone", "last known: combine #15 of layer 0 buffer 0"),
    "stopped": ("EpTimeout", "rank 2 did not answer", "last known: combine #15 of layer 0 buffer 0"),
    "late": ("EpTimeout", "rank 2 did not reach operation", "last: exchange #15 of 2 bytes: finished"),
    "other order": ("EpMismatch", "rank 2 called allocation", "where ranks 0, 1, 3 called plan"),
    "left": ("PeerDied", "rank 2 left before the others", "last known: combine #15 of layer 0 buffer 0"),
}


@pytest.mark.parametrize("way", WAYS)
def test_world_record_names_culprit(tmp_path, way):
    """Every living rank names the culprit, also the culprit itself. The written file has the same text."""
    folder = tmp_path / "pages"
    folder.mkdir()
    may_die = (CULPRIT,) if way == "killed" else ()
    results = process_ranks(_end, 4, way, str(folder), 2 * slowness(), may_die=may_die)
    kind, culprit, more = EXPECTED[way]
    for rank, result in enumerate(results):
        if result is None or (way == "left" and rank == CULPRIT):
            assert rank == CULPRIT
            continue
        error, page, seconds, written, again = result
        first, ended, by = page.splitlines()[:3]
        # The stopped rank reads the call records of the others when it continues. They are ahead of it,
        # unless it started the same operation before it saw the end of the world.
        is_back = way == "stopped" and rank == CULPRIT
        names = (culprit,)
        if is_back:
            names = (EXPECTED["late"][1],
                     f"rank {CULPRIT}, for which another rank waited until the timeout")
        starts = tuple(f"culprit: {name}" for name in names)
        assert error == kind and first.startswith(starts), f"rank {rank}: {error}\n{page}"
        assert is_back or more in first, f"rank {rank}: {first}"
        assert ended.startswith(f"ended:   {kind}: ") and f"by rank {rank} of 4, process " in by, page
        assert len(page.splitlines()) < 50 and len(page) < 8000, page
        assert max(map(len, page.splitlines())) < 200, page
        assert is_back or "layer 0 buffer 0: entered by rank 0: #16, 1: #16, 2: #15, 3: #16" in page, page
        assert is_soon(seconds, 1) and again == page
        assert written == page + "\n", f"rank {rank}"
    files = [n.split("-pid")[0] for n in sorted(os.listdir(folder))]
    assert files == [f"epmoe-rank{r}" for r in range(4) if way not in ("killed", "left") or r != CULPRIT]


def test_world_record_is_not_written_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPMOE_FLIGHT_RECORD", raising=False)
    results = process_ranks(_end, 4, "killed", None, WAIT_S, may_die=(CULPRIT,))
    assert all("culprit: rank 2" in r[1] for r in results if r) and os.listdir(tmp_path) == []


def _missing_folder(rank, world_size, folder):
    os.environ["EPMOE_FLIGHT_RECORD"] = os.path.join(folder, "none")
    return _page_of_a_late_rank(rank)


def test_world_record_says_that_writing_failed(tmp_path):
    for page in process_ranks(_missing_folder, 2, str(tmp_path)):
        last = page.splitlines()[-1]
        assert "could not be written to" in last and "none/epmoe-rank" in last
    assert os.listdir(tmp_path) == []


def _page_of_a_late_rank(rank):
    """The flight record of a world that ends because rank 1 is too late for an exchange."""
    world = epmoe.World(timeout_s=WAIT_S)
    if rank == 0:
        world.set_timeout(0.3)
        with pytest.raises(epmoe.EpTimeout):
            world.exchange(b"")
    else:
        until_ended(world)
    page = world.flight_record()
    world._leave(False)
    return page


def _two_worlds_end(rank, world_size, folder):
    os.environ["EPMOE_FLIGHT_RECORD"] = folder
    return os.getpid(), [_page_of_a_late_rank(rank) for _ in range(2)]


def test_world_record_of_each_world_has_its_own_file(tmp_path):
    results = process_ranks(_two_worlds_end, 2, str(tmp_path))
    wanted = {f"epmoe-rank{rank}-pid{pid}{number}.txt": page + "\n"
              for rank, (pid, pages) in enumerate(results)
              for number, page in zip(("", "-2"), pages, strict=True)}
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == wanted


def _planted(rank, world_size, folder, kind):
    """Rank main: something else has the name of the file that this rank is about to write."""
    os.environ["EPMOE_FLIGHT_RECORD"] = folder
    path = os.path.join(folder, f"epmoe-rank{rank}-pid{os.getpid()}")
    target = os.path.join(os.path.dirname(folder), f"target{rank}")
    PLANTS[kind](path + ".txt", target)
    page = _page_of_a_late_rank(rank)
    return page, open(path + "-2.txt").read(), os.path.exists(target) and os.path.getsize(target)


PLANTS = {
    "pipe": lambda path, target: os.mkfifo(path),
    "folder": lambda path, target: os.mkdir(path),
    "link to a file": lambda path, target: (open(target, "w").close(), os.symlink(target, path)),
    "link to no file": lambda path, target: os.symlink(target, path),
    "second name of a file": lambda path, target: (open(target, "w").close(), os.link(target, path)),
}


@pytest.mark.parametrize("kind", PLANTS)
def test_world_record_ignores_what_has_its_name(tmp_path, kind):
    """The record is written to a new file. No link is followed, and no rank waits for a reader of a pipe."""
    folder = tmp_path / "pages"
    folder.mkdir()
    for page, written, bytes_in_target in process_ranks(_planted, 2, str(folder), kind, timeout_s=RECORD_S):
        assert written == page + "\n" and not bytes_in_target


def _empty_variable(rank, world_size):
    os.environ["EPMOE_FLIGHT_RECORD"] = ""
    return _page_of_a_late_rank(rank), os.path.exists(f"/epmoe-rank{rank}-pid{os.getpid()}.txt")


def test_world_record_is_not_written_for_empty_variable():
    for page, written in process_ranks(_empty_variable, 2):
        assert not written and "could not be written" not in page


def _socket_to_peer():
    """A copy of the socket that this rank has to its only peer."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            copy = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        if copy.type == socket.SOCK_SEQPACKET:
            return copy
        copy.close()
    raise AssertionError("this rank has no socket to a peer")


def _reason_in_other_bytes(rank, world_size):
    """Rank main: rank 1 sends a frame of csrc/runtime/socket.h, with a reason that is no UTF-8."""
    world = epmoe.World(timeout_s=WAIT_S)
    world.exchange(b"go")
    if rank == 0:
        with pytest.raises(epmoe.EpError) as error:
            world.exchange(b"x")
        return type(error.value).__name__, str(error.value), world.flight_record()
    text = b"caf\xe9 \xff\xfe\xc3"
    abort, timeout = 3, -5  # EP_FRAME_ABORT and EP_ETIMEOUT
    frame = struct.pack("=IIQiIIII4x", _C.ABI_VERSION, abort, 0, timeout, 1, len(text), 0, 0)
    with _socket_to_peer() as peer:
        peer.send(frame + text.ljust(_C.ALL_GATHER_BYTES, b"\0"))
    until_ended(world)
    return None


def test_world_record_of_reason_that_is_no_text():
    """Bytes of a peer that are no UTF-8 are replaced. The error keeps its class."""
    kind, text, page = process_ranks(_reason_in_other_bytes, 2)[0]
    assert kind == "EpTimeout" and text == "caf\ufffd \ufffd\ufffd\ufffd", (kind, text)
    assert f"ended:   EpTimeout: {text}\n" in page, page


def _missing_signal(rank, world_size):
    """Rank main: rank 1 waits for a signal that no rank sends."""
    world = epmoe.World(timeout_s=WAIT_S)
    heap = epmoe.SymmetricHeap(world, 1 << 16, "cpu")
    words = heap.malloc_symmetric((2,), torch.int64)
    with pytest.raises(epmoe.EpTimeout) as error:
        if rank == 1:
            world.set_timeout(0.5)
            heap.wait(words, 0, 1)
        heap.barrier()
    if rank == 1:
        error.match(r"rank 1 timed out: no rank signalled the word on which it waits "
                    r"\(expected value 1, found 0\)")
    return world.flight_record()


def test_world_record_of_missing_signal():
    """The waiting rank is not the culprit, although it has finished fewer operations."""
    pages = process_ranks(_missing_signal, 3)
    for page in pages:
        first = page.splitlines()[0]
        assert first == "culprit: the rank that had to signal rank 1, whose wait timed out", page
        assert "a wait for rank" not in page, page
    assert "heap 0: a wait for a signal wanted 1 and saw 0\n" in pages[1], pages[1]


def _layers_in_another_order(rank, world_size, folder):
    """Rank main: the two ranks call plan of different layers.

    Rank 1 starts when rank 0 is in its plan. Only the limit of rank 1 can expire. It is shorter than the time
    after which ranks that wait in different operations raise EpMismatch.
    """
    world = epmoe.World(timeout_s=WAIT_S)
    layers = [epmoe.EPAll2AllLayer(world, 4, 16, 1, num_tot_experts=2, device="cpu") for _ in range(2)]
    if rank == 0:
        when_waiting(world, "plan", Events(folder).set, "waiting")
    else:
        Events(folder).wait("waiting")
        world.set_timeout(0.3)
    text = r"rank \d timed out waiting for rank \d in its plan \(word enter.*flight_record"
    with pytest.raises(epmoe.EpTimeout, match=text):
        layers[rank].preprocess(torch.zeros(4, 1, dtype=torch.int64))
    return world.flight_record()


def test_world_record_of_layers_in_another_order(tmp_path):
    """Both ranks call plan. The record shows that they call it on different layers."""
    pages = process_ranks(_layers_in_another_order, 2, str(tmp_path))
    first = re.compile(r"culprit: rank \d called plan of layer (\d+) as operation \d+, "
                       r"where rank \d called plan of layer (?!\1)\d+")
    for page in pages:
        assert first.match(page), page
        assert page.splitlines()[0].endswith(" (equally many ranks made each call)"), page
    # On the other rank, the world may have ended before its own wait reached the limit.
    wait = re.compile(r"^layer \d buffer 0: a wait for rank \d in epoch 1 wanted 1 and saw 0$", re.M)
    assert any(wait.search(page) for page in pages), pages


def test_world_record_names_late_rank_despite_different_counts(ranks):
    """A local error changes the operation count of rank 0. The record must still name the late rank 2."""
    slow = slowness()

    def body(world, device):
        heaps = [epmoe.SymmetricHeap(world, 1 << 16, device) for _ in range(2)]
        heaps[0].close()
        if world.rank == 0:
            with pytest.raises(epmoe.EpClosed):
                heaps[0].malloc_symmetric((4,))
        world.exchange(b"x")
        world.set_timeout(0.5 * slow)
        if world.rank == 2:
            until_ended(world)
        with pytest.raises(epmoe.EpTimeout):
            world.exchange(b"x")
        return world.flight_record()

    for page in ranks(body, world_size=3, at_least=3):
        assert page.startswith("culprit: rank 2 did not reach operation "), page


def test_world_record_says_for_whom_a_rank_has_waited(ranks):
    def waits(world):
        line = f"\nin earlier operations rank {world.rank} waited for"
        rest = (world.flight_record() + line).split(line)[1].split("\n")[0]
        return [float(x) for x in re.findall(r" rank \d: ([0-9.]+) s", rest)]

    def body(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 16, device)
        found = [waits(world)]
        for seconds in (0.1, 0.4, 1.6, 6.4):  # longer where the machine is busy, so that all ranks are late
            if world.rank == 2:
                time.sleep(seconds)
            heap.barrier()
            found.append(waits(world))
            if any(world.exchange(bytes([world.rank < 2 and found[-1][1] > seconds / 2]))[:2]):
                break
        heap.close()
        return found, seconds

    results = ranks(body, world_size=3)
    for found, _ in results:
        assert found[0] == [] and all(len(w) == 2 for w in found[1:])
        assert all(a <= b for w, later in zip(found[1:], found[2:]) for a, b in zip(w, later))
    assert any(found[-1][1] > seconds / 2 for found, seconds in results[:2])


def test_world_record_of_working_world(ranks):
    def body(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 16, device)
        words = heap.malloc_symmetric((2,), torch.int64)
        heap.signal(words, 0, 1, world.rank)
        heap.wait(words, 0, 1)
        heap.barrier()
        page = world.flight_record()
        heap.close()
        return page

    for rank, page in enumerate(ranks(body, world_size=2)):
        lines = page.splitlines()
        assert lines[0] == "culprit: none, because no fault has ended the world"
        last = next(line for line in lines if line.split()[:1] == [str(rank)])
        assert last.split()[1:3] == ["3", "0"] and "heap barrier #1 of heap 0: finished" in last, page


def test_world_record_marks_rejected_call(ranks):
    def body(world, device):
        layer = make_layer(world, device, CASE)
        x, weight = inputs_of(CASE, world.rank, world.size)
        with pytest.raises(ValueError if world.rank == 1 else epmoe.PeerError):
            layer.dispatch(x[:, :8] if world.rank == 1 else x, indices_of(CASE, world.rank, world.size),
                           weight)
        return world.flight_record()

    pages = ranks(body, world_size=2)
    lines = [next(line for line in page.splitlines() if line.split()[:1] == [str(rank)])
             for rank, page in enumerate(pages)]
    assert "plan #1 of layer 0 buffer 0" in lines[1], lines
    assert ", error here (ValueError): finished " in lines[1], lines
    assert "error here" not in lines[0], lines


def test_world_record_of_wrong_index_has_no_other_call(ranks):
    """All ranks know of a wrong index. A dispatch is refused only after an error that one rank knows."""
    def body(world, device):
        layer = make_layer(world, device, Case(num_local=1, topk=1))
        for _ in range(2):
            with pytest.raises(epmoe.EpIndexError):
                layer.preprocess(torch.full((1, 1), 7, device=device))
        return world.flight_record()

    page, = ranks(body, world_size=1)
    assert "plan #2 of layer 0" in page and "dispatch" not in page, page
