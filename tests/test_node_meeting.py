"""How the ranks of several nodes connect: callers, proofs, addresses, ranks that fail or die meanwhile."""

import doctest
import os
import signal
import socket
import threading
import time

import pytest
import torch.distributed as dist

import epmoe
from cases import outcome, process_ranks
from epmoe import _C
from epmoe.comm import node_links, node_meeting, node_sockets
from epmoe.comm.node_links import NodeLinks
from epmoe.comm.node_sockets import Acceptor, call, listen, own_addresses, pack_card, unpack_card
from pace import HANG_S, is_soon

pytestmark = pytest.mark.cpu_only
SECRET = bytes(range(32))


@pytest.fixture
def acceptor():
    """Rank 0, which expects rank 1 at 127.0.0.1."""
    listeners = listen(["127.0.0.1"])
    it = Acceptor(listeners, 0, SECRET, [1])
    it.card = unpack_card(pack_card(listeners[0].getsockname()[1], ["127.0.0.1"], SECRET))
    yield it
    it.stop()
    for sock in it.found.values():
        sock.close()


def connect(acceptor):
    return socket.create_connection(("127.0.0.1", acceptor.card[0]), timeout=HANG_S)


def call_it(acceptor, rank=1, secret=SECRET, seconds=HANG_S):
    return call(acceptor.card, rank, 0, secret, time.monotonic() + seconds)


def test_meeting_accepts_the_rank_that_proves_the_secret(acceptor):
    assert acceptor.wait(0.0) == [1]
    sock = call_it(acceptor)
    assert acceptor.wait(HANG_S) == []
    acceptor.found[1].setblocking(True)
    acceptor.found[1].send(b"x")
    sock.setblocking(True)
    assert sock.recv(1) == b"x"
    sock.close()


def test_meeting_rank_that_calls_again_replaces_its_first_connection(acceptor):
    first, second = call_it(acceptor), None
    acceptor.wait(HANG_S)
    before = acceptor.found[1]
    second = call_it(acceptor)
    first.settimeout(HANG_S)
    assert first.recv(1) == b"" and acceptor.found[1] is not before
    first.close()
    second.close()


def test_meeting_caller_rejects_another_job(acceptor):
    """What answers does not know the secret of the caller, and gets no proof from it."""
    with pytest.raises(epmoe.EpError, match="is not rank 0 of this job"):
        call_it(acceptor, secret=bytes(32))
    assert acceptor.wait(0.0) == [1]


@pytest.mark.parametrize("change", ["magic", "protocol", "rank", "to"])
def test_meeting_closes_wrong_hellos(acceptor, change):
    good = {"magic": b"epmoe-link", "protocol": _C.ABI_VERSION, "rank": 1, "to": 0}
    bad = {"magic": b"epmoe-LINK", "protocol": 1, "rank": 2, "to": 1}
    hello = node_sockets._HELLO.pack(*(good | {change: bad[change]}).values(), bytes(32))
    with connect(acceptor) as sock:
        sock.sendall(hello)
        assert sock.recv(64) == b""
    assert acceptor.wait(0.0) == [1]


def test_meeting_closes_a_wrong_proof(acceptor):
    """A proof for another challenge, for example a recorded one, is worth nothing."""
    with connect(acceptor) as sock:
        sock.sendall(node_sockets._HELLO.pack(b"epmoe-link", _C.ABI_VERSION, 1, 0, bytes(32)))
        assert len(sock.recv(64)) == 64
        sock.sendall(bytes(32))
        assert sock.recv(1) == b""
    assert acceptor.wait(0.0) == [1]


def test_meeting_silent_callers_do_not_keep_out_a_rank(acceptor):
    callers = [connect(acceptor) for _ in range(100)]
    sock = call_it(acceptor)
    assert acceptor.wait(HANG_S) == []
    for s in (*callers, sock):
        s.close()


def test_meeting_secret_does_not_go_over_the_network(acceptor):
    """Record all bytes of a call, in both directions."""
    proxy, record = socket.create_server(("127.0.0.1", 0)), []

    def copy(source, target):
        while data := source.recv(4096):
            record.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def serve():
        caller, _ = proxy.accept()
        with caller, connect(acceptor) as callee:
            other = threading.Thread(target=copy, args=(callee, caller))
            other.start()
            copy(caller, callee)
            other.join()

    thread = threading.Thread(target=serve)
    thread.start()
    card = (proxy.getsockname()[1], ["127.0.0.1"], SECRET)
    sock = call(card, 1, 0, SECRET, time.monotonic() + HANG_S)
    acceptor.wait(HANG_S)
    sock.close()
    acceptor.found[1].close()
    thread.join(HANG_S)
    proxy.close()
    sent = b"".join(record)
    assert len(sent) == node_sockets._HELLO.size + 64 + 32 + 1
    assert not any(SECRET[i : i + 8] in sent for i in range(24))


def test_meeting_call_fails_where_nothing_listens():
    """At once, if the port is closed; at the deadline, if something accepts and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        card = (server.getsockname()[1], ["127.0.0.1"], SECRET)
        with pytest.raises(epmoe.EpTimeout, match="cannot connect to rank 0 at 127.0.0.1 port"):
            call(card, 1, 0, SECRET, time.monotonic() + 0.1)
    with pytest.raises(epmoe.PeerDied, match="EPMOE_SOCKET_IFNAME"):
        call(card, 1, 0, SECRET, time.monotonic() + HANG_S)


def test_meeting_takes_the_first_address_that_answers(acceptor):
    card = (acceptor.card[0], ["127.77.0.1", "127.0.0.1"], SECRET)
    call(card, 1, 0, SECRET, time.monotonic() + HANG_S).close()


def test_meeting_listens_only_at_the_addresses_of_its_card():
    """Not at other addresses of this host, which may be those of a network for everyone."""
    listeners = listen(["127.0.0.1", "127.0.0.2"])
    port = listeners[0].getsockname()[1]
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            socket.create_connection((address, port), timeout=HANG_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port), timeout=HANG_S)
    finally:
        for listener in listeners:
            listener.close()


def _listening(rank, size):
    """The addresses at which this process listens for other nodes, while it does."""
    found, real = [], node_meeting.listen

    def listen(*arguments):
        listeners = real(*arguments)
        found.extend(s.getsockname()[0] for s in (listeners if isinstance(listeners, list) else [listeners]))
        return listeners

    os.environ["EPMOE_SOCKET_IFNAME"] = "lo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_meeting, "listen", listen)
        epmoe.Nodes(local_world_size=1, timeout_s=HANG_S).close()
    return found


def test_meeting_listens_at_the_interface_that_is_named():
    assert process_ranks(_listening, 2) == [["127.0.0.1"]] * 2


def test_meeting_cards_carry_addresses_of_both_families():
    addresses = ["10.9.0.1", "fd00::1", "192.168.1.200"]
    assert unpack_card(pack_card(65535, addresses, SECRET)) == (65535, addresses, SECRET)


def test_meeting_own_addresses_follow_the_environment(monkeypatch):
    for name in ("EPMOE_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_addresses()[0] == "127.0.0.1"
    monkeypatch.setenv("EPMOE_SOCKET_IFNAME", "lo")
    assert own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("EPMOE_SOCKET_IFNAME", "none0")
    with pytest.raises(ValueError, match="EPMOE_SOCKET_IFNAME=none0: no interface"):
        own_addresses()


@pytest.mark.parametrize("text", ["0.5", "soon", "nan"])
def test_meeting_rejects_a_wrong_node_timeout(monkeypatch, text):
    monkeypatch.setenv("EPMOE_NODE_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="EPMOE_NODE_TIMEOUT_S"):
        node_meeting.node_timeout_s()


@pytest.mark.parametrize("module", [node_links, node_meeting, node_sockets], ids=lambda m: m.__name__)
def test_meeting_examples_run(module, monkeypatch):
    monkeypatch.delenv("EPMOE_NODE_TIMEOUT_S", raising=False)
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


# ---- ranks that fail ----


def _mistakes(rank, size):
    """Rank main: rank 1 makes several mistakes. After each, all ranks can try again."""
    team = epmoe.World(dist.new_group([rank], use_local_synchronization=True))
    results = [outcome(lambda: NodeLinks(None, team, timeout_s=-1 if rank == 1 else None))]
    if rank == 1:
        os.environ["EPMOE_NODE_TIMEOUT_S"] = "0"
    results.append(outcome(lambda: NodeLinks(None, team)))
    os.environ.pop("EPMOE_NODE_TIMEOUT_S", None)
    if rank == 1:  # it has the secret of another job
        node_meeting.call = lambda card, mine, peer, secret, end: call(card, mine, peer, bytes(32), end)
    results.append(outcome(lambda: NodeLinks(None, team)))
    if rank == 1:
        node_meeting.call = call
    links = NodeLinks(None, team)
    links.close()
    team.close()
    return results


def test_meeting_mistakes_of_a_rank_are_errors_on_all():
    results = process_ranks(_mistakes, 3)
    texts = ("timeout of -1 s", "EPMOE_NODE_TIMEOUT_S='0'", "rank 1 cannot connect to rank 0 at 127.0.0.1")
    for rank, got in enumerate(results):
        for mistake, text in zip(got, texts, strict=True):
            own = "EpError" if text is texts[2] else "ValueError"
            assert mistake.kind == (own if rank == 1 else "PeerError"), f"rank {rank}: {mistake}"
            assert text in mistake.text
            assert mistake.is_within(3)


def _die_while_connecting(rank, size):
    team = epmoe.World(dist.new_group([rank], use_local_synchronization=True))
    if rank == 2:
        node_meeting._connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: NodeLinks(None, team))


def test_meeting_death_of_a_rank_ends_it():
    results = process_ranks(_die_while_connecting, 3, may_die=(2,))
    for got in results[:2]:
        assert got.kind == "PeerDied" and is_soon(got.seconds, 3), str(got)
