"""How ranks meet to make a world: one that cannot, does not come, has another build, or is nobody of theirs.
"""

import os
import socket
import unittest.mock

import torch.distributed as dist

import epmoe
from cases import Case, check_case, check_outcomes, outcome, process_ranks, run_case
from epmoe import _C, rendezvous
from pace import WAIT_S, Events, slowness
from traces import grown, held

CASE = Case(topk=3, tokens="unequal")


NO_TIMES = (-1, 0, 1e7, float("nan"), "soon", [1])


def _world_that_one_rank_cannot_make(rank, world_size):
    """Rank 1's reasons, one after the other: times that cannot be, by argument, layer and environment, and no
    socket to be had.
    """

    def world(timeout_s=WAIT_S):
        return epmoe.World(timeout_s=timeout_s)

    def layer(timeout_s=WAIT_S):
        return epmoe.EPAll2AllLayer(None, 8, 16, 2, num_tot_experts=4, device="cpu", timeout_s=timeout_s)

    def no_socket():
        raise OSError("no socket")

    before, got = held(), []
    for make in (world, layer):
        got += [outcome(lambda t=t: make(t) if rank == 1 else make()) for t in NO_TIMES]
    with unittest.mock.patch.dict(os.environ, {"EPMOE_TIMEOUT_S": "never"} if rank == 1 else {}):
        got.append(outcome(epmoe.World))
    with unittest.mock.patch.object(_C, "world_listen", no_socket if rank == 1 else _C.world_listen):
        got.append(outcome(epmoe.World))
    left = grown(before, held(), maps=8)
    with epmoe.World(timeout_s=WAIT_S) as w:
        return got, left, run_case(w, "cpu", CASE)


def test_world_that_one_rank_cannot_make():
    """Nobody waits for a rank that does not come to the meeting; the next world is made as if nothing had
    been.
    """
    results = process_ranks(_world_that_one_rank_cannot_make, 3)
    kinds = 2 * (["ValueError"] * (len(NO_TIMES) - 1) + ["TypeError"]) + ["ValueError", "OSError"]
    for of_all, kind in zip(zip(*(got for got, _, _ in results)), kinds, strict=True):
        check_outcomes(of_all, ["PeerError", kind, "PeerError"])
        check_outcomes([of_all[0], of_all[2]], "PeerError", "rank 1 could not make its world")
    assert [left for _, left, _ in results] == ["", "", ""], "descriptors are left open"
    check_case([r for _, _, r in results], CASE)


def _world_of_two_builds(rank, world_size):
    with unittest.mock.patch.object(_C, "ABI_VERSION", _C.ABI_VERSION + (rank == 1)):
        got = outcome(lambda: epmoe.World(timeout_s=WAIT_S))
    with epmoe.World(timeout_s=WAIT_S) as w:
        return got, run_case(w, "cpu", CASE)


def test_world_of_two_builds_says_so():
    results = process_ranks(_world_of_two_builds, 3)
    for rank, (got, _) in enumerate(results):
        check_outcomes([got], "EpMismatch", f"rank {0 if rank == 1 else 1} has another epmoe")
    check_case([r for _, r in results], CASE)


def _absent_from_the_meeting(rank, world_size, folder, limit):
    events = Events(folder)
    events.set(str(rank))
    events.wait(str(1 - rank))
    if rank == 1:  # takes part in the group's exchange of names, and in nothing else
        rendezvous.all_gather_bytes(dist.group.WORLD, rendezvous.listen()[1], WAIT_S)
        events.wait("over")
        return None
    got = outcome(lambda: epmoe.World(timeout_s=limit))
    events.set("over")
    return got


def test_world_meeting_has_a_limit(tmp_path):
    results = process_ranks(_absent_from_the_meeting, 2, str(tmp_path), slowness())
    check_outcomes(results[:1], "EpTimeout", "rank 1 did not connect")


def _absent_altogether(rank, world_size, folder):
    if rank == 1:
        return Events(folder).wait("over")
    got = outcome(lambda: epmoe.World(timeout_s=1.0))
    Events(folder).set("over")
    return got


def test_world_of_a_rank_that_never_comes_has_a_limit(tmp_path):
    """Its own, not that of the process group."""
    results = process_ranks(_absent_altogether, 2, str(tmp_path))
    check_outcomes(results[:1], "EpTimeout", "rank 0 timed out after 1 s: not every rank")


def _meeting_with_strangers(rank, world_size):
    """Others of the same machine find the door: they know no nonce, send rubbish or nothing, and are not let
    in.
    """
    real = _C.world_create
    keep = []

    def create(me, size, timeout_s, fd, nonce, names):
        if me != 0:
            name = names[: _C.NAME_BYTES]
            address = b"\0" + name[1 : name[0]]
            frames = [bytes(_C.EXCHANGE_BYTES + n) for n in range(0, 65,
                                                                  8)]  # one of them is as long as a frame
            for junk in (b"", b"x", *frames, bytes(4000)):
                s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                s.connect(address)
                if junk:
                    socket.send_fds(s, [junk], [0, 1])  # descriptors, too, which must be closed again
                    keep.append(s)
                else:
                    s.close()
        return real(me, size, timeout_s, fd, nonce, names)

    before = held()
    _C.world_create = create
    try:
        world = epmoe.World(timeout_s=WAIT_S)
    finally:
        _C.world_create = real
    result = run_case(world, "cpu", CASE)
    world.close()
    for s in keep:
        s.close()
    return result, grown(before, held(), maps=8)


def test_world_turns_strangers_away():
    results = process_ranks(_meeting_with_strangers, 2)
    check_case([r for r, _ in results], CASE)
    assert [more for _, more in results] == ["", ""], "descriptors of strangers are left open"


def _stranger_who_says_nothing(rank, world_size):
    """A stranger that connects and then stays silent must not use up the time of those who are awaited."""
    real = _C.world_create
    keep = []

    def create(me, size, timeout_s, fd, nonce, names):
        if me == 1:
            name = names[: _C.NAME_BYTES]
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            s.connect(b"\0" + name[1 : name[0]])
            keep.append(s)
        return real(me, size, timeout_s, fd, nonce, names)

    _C.world_create = create
    got = outcome(lambda: epmoe.World(timeout_s=WAIT_S).close())
    _C.world_create = real
    return got


def test_world_does_not_wait_for_a_silent_stranger():
    check_outcomes(process_ranks(_stranger_who_says_nothing, 2), "nothing", within_s=3.5)


# ---- the harness itself: a test that cannot fail shows nothing ----
