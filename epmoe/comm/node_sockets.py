"""TCP connections between ranks on different hosts: addresses, options, and the proof that the other end is a
rank of this job.

The process group carries a secret of rank 0 to all ranks. It never goes over these connections: each end
proves that it knows the secret, with an HMAC over random numbers of both ends (challenge and response). This
keeps out strangers and ranks of an older job. It does not hide anything from a program that reads the
network, and neither does the process group.
"""

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref

from .. import _C
from ..errors import EpError, EpTimeout, PeerDied

SECRET_BYTES = 32
MAX_ADDRESSES = 4
CARD_BYTES = MAX_ADDRESSES * 16 + 2 + SECRET_BYTES
# What an end says at an error that means: the host of the peer, or the way to it, does not answer.
SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
_MAGIC = b"epmoe-link"
_HELLO = struct.Struct("<10sIII32s")  # magic, protocol, from, to, challenge
_MAX_CALLERS = 64  # that have connected and not yet proved anything
_CALLER_S = 5.0  # the time in which they must
_TRY_S = 2.0  # for one address
_PORT_TRIES = 20  # until a port is free at all addresses
_SIOCGIFADDR = 0x8915

# ---- sockets that a forked child must not keep ----

_open = weakref.WeakSet()
_fork_lock = threading.Lock()


def _in_child():
    for s in list(_open):
        s.close()
    _fork_lock.release()


# A forked child that kept a copy of a socket would hide the death of its parent.
os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_in_child)


@contextlib.contextmanager
def _creating(sockets):
    """No process is forked inside the block; what it appends to `sockets` is closed in a later child."""
    with _fork_lock:
        yield
        _open.update(sockets)


def _new_socket(family):
    made = []
    with _creating(made):
        made.append(socket.socket(family, socket.SOCK_STREAM))
    return made[0]


def _accept(listener):
    """Return a connection of the queue, or None."""
    made = []
    with contextlib.suppress(OSError), _creating(made):
        made.append(listener.accept()[0])
    return made[0] if made else None


# ---- addresses ----


def _address_of_interface(name):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host):
    """Return the local address of the route to a host. Nothing is sent."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as s:
            s.connect(address)
            return s.getsockname()[0]
    raise OSError(f"no route to {host}")


def _family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_addresses():
    """Return the addresses under which other ranks may reach this one, the best first.

    EPMOE_SOCKET_IFNAME, or else GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, names the network interface.
    Without them it is the interface with which this host reaches MASTER_ADDR.

    Raises:
        ValueError: When EPMOE_SOCKET_IFNAME names no interface with an IPv4 address.

    Examples:
        >>> from epmoe.comm.node_sockets import own_addresses
        >>> len(own_addresses()) >= 1
        True
    """
    name = os.environ.get("EPMOE_SOCKET_IFNAME")
    if name:
        try:
            return [_address_of_interface(name)]
        except OSError as error:
            raise ValueError(f"EPMOE_SOCKET_IFNAME={name}: no interface of this host with an IPv4 address "
                             f"({error})") from None
    found = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in os.environ.get(variable, "").lstrip("=").split(","):
            with contextlib.suppress(OSError):
                found.append(_address_of_interface(name))
    for host in (os.environ.get("MASTER_ADDR"), socket.gethostname()):
        with contextlib.suppress(OSError, UnicodeError):
            found += [_address_towards(host)] if host else []
    addresses = list(dict.fromkeys(a for a in found if "%" not in a)) or ["127.0.0.1"]
    return addresses[:MAX_ADDRESSES]


def pack_card(port, addresses, secret):
    """Return what a rank tells the others: CARD_BYTES bytes. port 0: this rank cannot take part."""
    packed = b"".join(socket.inet_pton(socket.AF_INET6, a if ":" in a else f"::ffff:{a}") for a in addresses)
    return packed.ljust(MAX_ADDRESSES * 16, b"\0") + port.to_bytes(2, "little") + secret


def unpack_card(card):
    """Return (port, addresses, secret)."""
    places = [card[i : i + 16] for i in range(0, MAX_ADDRESSES * 16, 16)]
    names = [socket.inet_ntop(socket.AF_INET6, p) for p in places if p != bytes(16)]
    return (int.from_bytes(card[-SECRET_BYTES - 2 : -SECRET_BYTES], "little"),
            [n.removeprefix("::ffff:") if "." in n else n for n in names], card[-SECRET_BYTES:])


def listen(addresses):
    """Listen at these addresses of this host only, at one free port.  Return a list of sockets."""
    for is_last in (*[False] * (_PORT_TRIES - 1), True):
        listeners, port = [], 0
        try:
            for address in addresses:
                listeners.append(_new_socket(_family(address)))
                listeners[-1].bind((address, port))
                port = listeners[0].getsockname()[1]
                listeners[-1].listen(1024)
                listeners[-1].setblocking(False)
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            if is_last or error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"cannot listen at {', '.join(addresses)}: "
                                           f"{error.strerror}") from error


def watch_silence(sock, timeout_s):
    """Let the kernel end the connection when the other host has not answered for timeout_s.

    The kernels answer each other, not the processes. So a peer that is stopped, or busy, is not silent.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(timeout_s / 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


# ---- challenge and response ----


def _proof(secret, role, hello, challenge):
    return hmac.new(secret, role + hello + challenge, hashlib.sha256).digest()


def _receive(sock, num):
    data = b""
    while len(data) < num:
        piece = sock.recv(num - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        data += piece
    return data


def _call(address, port, mine, peer, secret):
    """Connect to a rank, and return the socket. Both ends prove that they know the secret.

    Raises OSError or EpError.
    """
    sock = _new_socket(_family(address))
    try:
        sock.settimeout(_TRY_S)
        sock.connect((address, port))
        hello = _HELLO.pack(_MAGIC, _C.ABI_VERSION, mine, peer, secrets.token_bytes(32))
        sock.sendall(hello)
        answer = _receive(sock, 64)
        if not hmac.compare_digest(answer[32:], _proof(secret, b"accepts", hello, answer[:32])):
            raise EpError(f"what answers at {address} port {port} is not rank {peer} of this job")
        sock.sendall(_proof(secret, b"calls", hello, answer[:32]))
        _receive(sock, 1)  # from here on the peer counts this connection as this rank's
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise


def call(card, mine, peer, secret, deadline):
    """Connect to a peer at one of its addresses, until the deadline. Return the socket.

    Raises:
        PeerDied: When no process listens at its addresses.
        EpError: When no address can be reached, or something else answers there.
        EpTimeout: When the peer does not answer until the deadline.
    """
    port, addresses, _ = card
    where = " or ".join(f"{a} port {port}" for a in addresses)
    while True:
        problems = []
        for address in addresses:
            try:
                return _call(address, port, mine, peer, secret)
            except (OSError, EpError) as error:
                problems.append(error)
        is_late = time.monotonic() > deadline
        # A peer that has failed or died closes its listening socket. A busy one answers late.
        if not any(isinstance(p, (TimeoutError, ConnectionResetError)) for p in problems) or is_late:
            is_refused = all(isinstance(p, ConnectionRefusedError) for p in problems)
            kind = EpTimeout if is_late else PeerDied if is_refused else EpError
            raise kind(f"rank {mine} cannot connect to rank {peer} at {where}: {problems[0]}. Either that "
                       f"rank has died or failed, or the network does not let them: EPMOE_SOCKET_IFNAME "
                       f"names the interface to use")
        time.sleep(0.01)


def is_listening(card):
    """Whether a rank has its listening socket open, as far as this rank can see."""
    port, addresses, _ = card
    for address in addresses:
        with contextlib.suppress(OSError), _new_socket(_family(address)) as s:
            s.settimeout(_TRY_S)
            if s.connect_ex((address, port)) != errno.ECONNREFUSED:
                return True
    return False


class Acceptor:
    """Accepts the ranks that call this one, in a thread, until stop().

    A caller that has proved that it knows the secret gets its place in `found`. Others are closed after 5 s,
    or when 64 of them wait, the oldest first. A rank that was closed calls again.
    """

    def __init__(self, listeners, mine, secret, expected):
        self.found = {}  # rank -> socket
        self._expected = set(expected)
        self._listeners = listeners
        self._mine = mine
        self._secret = secret
        self._callers = {}  # socket -> [bytes received, proof that is wanted or None, when to give up]
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._main, name="epmoe acceptor", daemon=True)
        self._thread.start()

    def wait(self, seconds):
        """Wait until all have called, at most some seconds. Return the ranks that are missing, in order."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.found) == len(self._expected), seconds)
            return sorted(self._expected - self.found.keys())

    def stop(self):
        self._stopped = True
        self._thread.join()
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def _main(self):
        while not self._stopped:
            for key, _ in self._selector.select(0.02):
                if key.fileobj in self._listeners:
                    self._accept_all(key.fileobj)
                elif key.fileobj in self._callers:
                    self._read(key.fileobj)
            for caller, (_, _, until) in list(self._callers.items()):
                if time.monotonic() > until:
                    self._drop(caller)

    def _accept_all(self, listener):
        while (caller := _accept(listener)) is not None:
            if len(self._callers) == _MAX_CALLERS:
                self._drop(next(iter(self._callers)))
            caller.setblocking(False)
            self._callers[caller] = [b"", None, time.monotonic() + _CALLER_S]
            self._selector.register(caller, selectors.EVENT_READ)

    def _drop(self, caller):
        self._forget(caller)
        caller.close()

    def _forget(self, caller):
        del self._callers[caller]
        self._selector.unregister(caller)

    def _read(self, caller):
        state = self._callers[caller]
        wanted = (_HELLO.size if state[1] is None else _HELLO.size + 32) - len(state[0])
        try:
            piece = caller.recv(wanted)
            state[0] += piece
            if not piece or not self._answer(caller, state):
                self._drop(caller)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(caller)

    def _answer(self, caller, state):
        """Answer what is complete. False: the caller is no rank of this job."""
        data, proof, _ = state
        if proof is None and len(data) == _HELLO.size:
            magic, abi, rank, to, _ = _HELLO.unpack(data)
            if (magic, abi, to) != (_MAGIC, _C.ABI_VERSION, self._mine) or rank not in self._expected:
                return False
            challenge = secrets.token_bytes(32)
            state[1] = _proof(self._secret, b"calls", data, challenge)
            # A few bytes into an empty buffer: they are sent whole or the connection is broken.
            caller.send(challenge + _proof(self._secret, b"accepts", data, challenge))
        elif proof is not None and len(data) == _HELLO.size + 32:
            if not hmac.compare_digest(data[_HELLO.size :], proof):
                return False
            rank = _HELLO.unpack(data[: _HELLO.size])[2]
            caller.send(b"\1")
            self._forget(caller)
            with self._changed:
                before = self.found.get(rank)
                self.found[rank] = caller
                if before is not None:  # the rank has called again, so it has left that connection
                    before.close()
                self._changed.notify_all()
        return True
