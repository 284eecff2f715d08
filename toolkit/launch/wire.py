"""A line between two machines: JSON objects of bounded size over TCP, and what is wrong where there is none.

Whoever connects proves that it knows a token the other side knows (HMAC-SHA256 over a number used once, RFC 2104),
and the other way round; the token itself never travels. Nothing that was received is ever executed or unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import psutil

MAX_BYTES = 1 << 20
_MAX_STRANGER_BYTES = 1 << 10
"""Of a message from somebody who has not shown the token yet."""
_GREETING = "finetune-toolkit 1"
# A dead machine answers nothing: the kernel asks again on its own, whatever Python is doing.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_EVERY_SECONDS, KEEPALIVE_COUNT = 5, 3, 3


class WireError(Exception):
    """The other side closed, said nothing in time, or said something that is not a message of ours."""


class ClosedError(WireError):
    """The other side's end was closed, by its program or by the death of it: its machine is there."""


class UnreachableError(WireError):
    """No connection to `address`:`port`; `kind` is one of name, refused, silent, no_route, local."""

    def __init__(self, address: str, port: int, kind: str, detail: str) -> None:
        super().__init__(f"{address}:{port}: {detail}")
        self.address, self.port, self.kind, self.detail = address, port, kind, detail


class Line:
    """An open connection. `with Line(...) as line:` closes it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        try:
            self.peer = str(connection.getpeername()[0])
            self.own = str(connection.getsockname()[0])
            """The address of this machine that the connection uses."""
            keep_alive(connection)
        except OSError as error:  # whoever called has hung up already
            connection.close()
            raise WireError(f"the other side is gone: {error.strerror or error}") from error

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def send(self, message: dict[str, Any], seconds: float = 10.0) -> None:
        """Raises WireError where it does not go through in time."""
        content = json.dumps(message, ensure_ascii=False).encode(errors="replace")
        if len(content) > MAX_BYTES:
            raise WireError(f"a message of {len(content)} bytes is too long ({MAX_BYTES} at most)")
        try:
            self.connection.settimeout(seconds)
            self.connection.sendall(struct.pack("!I", len(content)) + content)
        except OSError as error:
            raise WireError(f"{self.peer} is gone: {error.strerror or error}") from error

    def receive(self, seconds: float = 10.0, most: int = MAX_BYTES) -> dict[str, Any]:
        """Raises WireError where nothing comes in time, or what comes is not a JSON object of at most `most` bytes."""
        deadline = time.monotonic() + seconds
        (size,) = struct.unpack("!I", self._read(4, deadline))
        if size > most:
            raise WireError(f"{self.peer} sent something that is not a message of ours: another program's port?")
        try:
            message = json.loads(self._read(size, deadline).decode())
        except (ValueError, RecursionError) as error:
            raise WireError(f"{self.peer} sent something that is not JSON") from error
        if not isinstance(message, dict):
            raise WireError(f"{self.peer} sent JSON that is not an object")
        return message

    def _read(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WireError(f"{self.peer} said nothing in time")
            try:
                self.connection.settimeout(left)
                part = self.connection.recv(min(count - len(parts), 1 << 16))
            except TimeoutError as error:
                if error.errno is None:  # ours, not the network's
                    continue
                raise WireError(f"{self.peer} does not answer any more") from error
            except ConnectionResetError as error:
                raise ClosedError(f"{self.peer} closed the connection") from error
            except OSError as error:
                raise WireError(f"{self.peer} is gone: {error.strerror or error}") from error
            if not part:
                raise ClosedError(f"{self.peer} closed the connection")
            parts += part
        return bytes(parts)


def keep_alive(connection: socket.socket) -> None:
    """A peer whose machine or network is gone is noticed within 15 s, also while something is being sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    silent = KEEPALIVE_IDLE_SECONDS + KEEPALIVE_EVERY_SECONDS * KEEPALIVE_COUNT
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_EVERY_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", silent * 1000),
    ):
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(port: int, backlog: int = 64) -> socket.socket:
    """Listens on every address of this machine. Raises OSError where the port is taken."""
    server = socket.socket(socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
        server.listen(backlog)
    except OSError:
        server.close()
        raise
    return server


def dial(address: str, port: int, token: str, seconds: float = 5.0) -> Line:
    """Connects and greets. Raises UnreachableError without a connection, WireError where something else answers."""
    with _closed_on_failure(Line(connect(address, port, seconds))) as line:
        hello = line.receive(seconds, _MAX_STRANGER_BYTES)
        if hello.get("greeting") != _GREETING:
            raise WireError(f"{address}:{port} is not this toolkit, or another version of it")
        theirs, ours = str(hello.get("once")), secrets.token_hex(16)
        line.send({"once": ours, "proof": _proof(token, "dial", theirs, ours)}, seconds)
        reply = line.receive(seconds, _MAX_STRANGER_BYTES)
        if not _same(str(reply.get("proof")), _proof(token, "answer", theirs, ours)):
            raise WireError(f"{address}:{port} does not know the token that was given here: pass the same to both")
        return line


def answer(server: socket.socket, token: str, seconds: float = 5.0) -> Line:
    """Takes one connection (`server` may have a timeout: TimeoutError) and greets. Raises WireError for a stranger."""
    connection, _ = server.accept()
    return greet(connection, token, seconds)


def greet(connection: socket.socket, token: str, seconds: float = 5.0) -> Line:
    """The answering side of `dial`. Raises WireError for a stranger, and closes the connection."""
    with _closed_on_failure(Line(connection)) as line:
        once = secrets.token_hex(16)
        line.send({"greeting": _GREETING, "once": once}, seconds)
        reply = line.receive(seconds, _MAX_STRANGER_BYTES)
        theirs = str(reply.get("once"))
        known = _same(str(reply.get("proof")), _proof(token, "dial", once, theirs))
        line.send({"proof": _proof(token, "answer", once, theirs) if known else ""}, seconds)
        if not known:
            raise WireError(f"{line.peer} does not know the token that was given here: pass the same to both")
        return line


def token_or(default: str) -> str:
    """$TOOLKIT_TOKEN, or a word that keeps only accidents out."""
    return os.environ.get("TOOLKIT_TOKEN") or default


@contextlib.contextmanager
def _closed_on_failure(line: Line) -> Iterator[Line]:
    try:
        yield line
    except BaseException:
        line.close()
        raise


def _proof(token: str, who: str, once: str, other: str) -> str:
    said = f"{who}:{once}:{other}".encode(errors="replace")  # a stranger may send half a surrogate pair
    return hmac.new(token.encode(errors="replace"), said, hashlib.sha256).hexdigest()


def _same(proof: str, expected: str) -> bool:
    return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """A TCP connection. Raises UnreachableError, which tells what stands in the way."""
    try:
        return socket.create_connection((address, port), timeout=seconds)
    except OSError as error:
        raise _unreachable(address, port, error, seconds) from error


def _unreachable(address: str, port: int, error: OSError, seconds: float) -> UnreachableError:
    if isinstance(error, socket.gaierror):
        return UnreachableError(address, port, "name", "no machine is known here by this name")
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError(address, port, "refused", "the machine answers and nothing listens on this port")
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return UnreachableError(address, port, "silent", f"no answer in {seconds:.0f} s")
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.EINVAL):
        return UnreachableError(address, port, "no_route", f"there is no way to it from here ({error.strerror})")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UnreachableError(address, port, "local", f"a rule of this machine forbids it ({error.strerror})")
    return UnreachableError(address, port, "no_route", str(error.strerror or error))


def remedy(fault: UnreachableError) -> str:
    """What to look at and to type for it."""
    address, port = fault.address, fault.port
    if fault.kind == "name":
        return f"give the address in numbers (`hostname -I` on that machine), or add `{address}` to /etc/hosts"
    if fault.kind == "refused":
        return "start the other machine's side too; or another address is meant (`hostname -I` there)"
    if fault.kind == "silent":
        return (
            f"is that machine on, and is it its address (`hostname -I` there)? If so a firewall drops the packets: on "
            f"{address}, `sudo ufw allow from {address_towards(address) or 'THIS_MACHINE'}` (or the security group of "
            f"your cloud: all TCP ports between the machines, {port} among them)"
        )
    if fault.kind == "local":
        return "`sudo iptables -S OUTPUT` and `sudo nft list ruleset` here show the rule"
    return f"`ip route get {address}` shows the way; is the interface up (`ip -br address`), the address right?"


def address_towards(address: str) -> str | None:
    """This machine's own address on the way to `address`, by the routing table alone: nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_addresses() -> dict[str, str]:
    """IPv4 address -> interface, of this machine."""
    return {
        entry.address: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def addresses_of(name: str) -> list[str]:
    """What a host's name (or an address) stands for here; empty where nobody knows it."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_towards(address: str) -> str | None:
    """The network interface that holds the way to `address` (the one that has it, for an address of this machine)."""
    return own_addresses().get(address_towards(address) or "")


def holder_of(port: int) -> tuple[int, str] | None:
    """(process id, `process 4711 (python train.py)`) of whoever listens on a TCP port here, where that can be seen."""
    try:
        held = [found for found in psutil.net_connections("tcp") if found.status == psutil.CONN_LISTEN]
        pid = next((found.pid for found in held if found.laddr and found.laddr.port == port and found.pid), None)
        return (pid, f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})") if pid else None
    except psutil.Error:
        return None
