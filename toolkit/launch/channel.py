"""JSON messages of bounded size between two processes over TCP, after each has shown that it knows the same token.

Framing is that of `multiprocessing.connection`. The token itself is never sent, and nothing received is unpickled or
executed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import queue
import secrets
import shlex
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from toolkit.errors import plain
from toolkit.launch.environment import seconds_of
from toolkit.launch.network import address_towards, ipv4_of

MAX_BYTES = 1 << 20
# Connections that have still to prove the token: of all addresses, and of one.
MOST_GREETED, MOST_GREETED_OF_ONE = 128, 32
Message = dict[str, Any]
_NONCE_BYTES, _MOST_PROOF_BYTES = 32, 256
_TRANSLATED = (
    "reached this machine by an address that is translated on the way: give each machine's own (`hostname -I`)"
)


class ChannelError(Exception):
    """The peer closed, was silent for too long, or sent something that is not a message of ours."""

    kind, remedy = "stranger", "another program's port there? Or its address is not the one named for it"
    """What stands in the way, in a word; what to look at and to type for it."""


class ClosedError(ChannelError):
    """The peer's end was closed, by its program or by the death of it: its machine is there."""


class TokenError(ChannelError):
    """The peer does not know the token."""

    kind, remedy = "token", "set TOOLKIT_TOKEN to the same secret on all machines, or on none"


class UnreachableError(ChannelError):
    """No connection to `address`:`port`; `kind` is one of name, refused, silent, no_route, local."""

    def __init__(self, address: str, port: int, kind: str, detail: str) -> None:
        super().__init__(f"{address}:{port}: {detail}")
        self.kind, self.detail, self.remedy = kind, detail, remedy_for(kind, address, port)


def remedy_for(kind: str, address: str, port: int) -> str:
    """What to look at and to type for what stands in the way; empty for what this version does not know."""
    here, name = address_towards(address) or "THIS_MACHINE", shlex.quote(address)
    remedies = {
        "name": f"give its IP address (`hostname -I` on that machine), or add `{name}` to /etc/hosts",
        "refused": "start the other machine too; or is another address of it meant (`hostname -I` there)?",
        "silent": f"is that machine on, and is this its address (`hostname -I` there)? If so, a firewall drops the "
        f"packets: on {name}, `sudo ufw allow from {here}` (or the security group of your cloud: all TCP ports "
        f"between the machines, {port} among them)",
        "local": "`sudo iptables -S OUTPUT` and `sudo nft list ruleset` here show the rule",
        "no_route": f"`ip route get {name}` shows the route; is the interface up (`ip -br address`), and the "
        "address right (`hostname -I` on that machine)?",
        **{error.kind: error.remedy for error in (ChannelError, TokenError)},
    }
    return remedies.get(kind, "")


class Channel(contextlib.AbstractContextManager["Channel"]):
    """An open connection. `with Channel(...) as channel:` closes it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        try:
            self.peer, self.own = (ipv4_of(end()[0]) for end in (connected.getpeername, connected.getsockname))
            """The peer's address, and the one of this machine that the connection uses."""
            connected.settimeout(None)
            _keep_alive(connected, seconds_of("peer_timeout"))
            self._messages = Connection(connected.dup().detach())
            self._broken = ""
        except OSError as error:  # the peer has hung up already
            connected.close()
            raise ClosedError(f"the other side is gone: {error.strerror or error}") from error

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Closes this process's copy alone, for one that was forked."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self._messages.close()

    def send(self, message: Message, seconds: float = 10.0) -> None:
        """Raises ChannelError where it does not go through in time."""
        content = json.dumps(message).encode()
        if len(content) > MAX_BYTES:
            raise ChannelError(f"a message of {len(content)} bytes is too long ({MAX_BYTES} at most)")
        with self._within(seconds, socket.SO_SNDTIMEO):
            self._messages.send_bytes(content)

    def receive(self, seconds: float | None = 10.0) -> Message:
        """Waits for ever without `seconds`. Raises ChannelError for what is not a JSON object of at most MAX_BYTES.

        Its texts can be printed.
        """
        with self._within(seconds, socket.SO_RCVTIMEO):
            content = self._messages.recv_bytes(MAX_BYTES)
        try:
            message = _printable(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"{self.peer} sent something that is not JSON") from error
        if not isinstance(message, dict):
            raise ChannelError(f"{self.peer} sent JSON that is not an object")
        return message

    def authenticate(self, token: str, seconds: float, answers: bool) -> None:
        """Both sides prove that they know the token. Raises ChannelError, and closes, where one does not.

        What is signed says who called whom, and from where: no proof is good on another connection, or sent back.
        """
        try:
            with self._within(seconds, socket.SO_RCVTIMEO):
                (self._answer if answers else self._call)(token.encode(errors="replace"))
        except ChannelError:
            self.close()
            raise

    def _answer(self, token: bytes) -> None:
        ends = f"{self.peer} {self.own} {self._socket.getsockname()[1]}".encode()
        self._messages.send_bytes(nonce := secrets.token_bytes(_NONCE_BYTES))
        reply = self._messages.recv_bytes(_MOST_PROOF_BYTES)
        nonces, proof, named = nonce + reply[:_NONCE_BYTES], reply[_NONCE_BYTES:64], reply[64:]
        knows = hmac.compare_digest(proof, _signature(token, "call", nonces, named))
        if knows and named == ends:
            return self._messages.send_bytes(_signature(token, "answer", nonces, ends))
        self._messages.send_bytes(b"ends" if knows else b"token")
        raise ChannelError(f"{self.peer} {_TRANSLATED}") if knows else AuthenticationError

    def _call(self, token: bytes) -> None:
        nonces = self._messages.recv_bytes(_NONCE_BYTES) + (nonce := secrets.token_bytes(_NONCE_BYTES))
        if len(nonces) != 2 * _NONCE_BYTES:
            raise AuthenticationError
        ends = f"{self.own} {self.peer} {self._socket.getpeername()[1]}".encode()
        self._messages.send_bytes(nonce + _signature(token, "call", nonces, ends) + ends)
        reply = self._messages.recv_bytes(_MOST_PROOF_BYTES)
        if reply == b"ends":
            raise ChannelError(f"{self.peer} says that this machine {_TRANSLATED}")
        if not hmac.compare_digest(reply, _signature(token, "answer", nonces, ends)):
            raise AuthenticationError

    @contextlib.contextmanager
    def _within(self, seconds: float | None, option: int) -> Iterator[None]:
        """Limits each read, or write, of the kernel's; what goes wrong becomes a ChannelError."""
        microseconds = int(1e6 * (seconds or 0.0))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(microseconds, 10**6)))
            yield
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            time.sleep(0.05)  # a cut connection is told to one thread, which may be sending; another one reads an end
            if self._broken:
                raise ChannelError(f"{self.peer} is gone: {self._broken}") from error
            raise ClosedError(f"{self.peer} closed the connection") from error
        except BlockingIOError as error:
            raise ChannelError(f"{self.peer} said nothing in time") from error
        except AuthenticationError as error:
            text = "does not know the token that was given here: pass the same to both"
            raise TokenError(f"{self.peer} {text}") from error
        except (OSError, AssertionError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                self._broken = str(error.strerror)
                raise ChannelError(f"{self.peer} is gone: {error.strerror}") from error
            text = "sent something that is not a message of ours: another program's port?"
            raise ChannelError(f"{self.peer} {text}") from error


def _signature(token: bytes, role: str, nonces: bytes, ends: bytes) -> bytes:
    """`ends`: the addresses of who calls, and of who is called, and the port called."""
    return hmac.digest(token, role.encode() + nonces + ends, "sha256")


def _printable(value: Any) -> Any:
    """JSON whose texts and names a terminal can show."""
    if isinstance(value, str):
        return plain(value, MAX_BYTES)
    if isinstance(value, dict):
        return {_printable(name): _printable(held) for name, held in value.items()}
    return [_printable(held) for held in value] if isinstance(value, list) else value


def _keep_alive(connected: socket.socket, seconds: int) -> None:
    """A peer whose machine or network is gone is noticed within `seconds`, also while something is being sent: the
    kernel asks again on its own, whatever Python is doing."""
    count, every = 3, max(1, seconds // 5)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, seconds - count * every)),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", count),
        ("TCP_USER_TIMEOUT", seconds * 1000),
    ):
        if hasattr(socket, name):  # Linux has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Listener(contextlib.AbstractContextManager["Listener"]):
    """Takes connections at a port; each proves the token, and says its first message, in a thread of its own.

    So one that says nothing holds nobody up. Where `allowed` holds addresses, others are sent away unheard.
    """

    def __init__(self, server: socket.socket, token: str, allowed: Collection[str] = (), seconds: float = 3.0) -> None:
        self.refused: dict[str, str] = {}
        """Address -> why it was sent away."""
        self.closed = False
        self._server, self._token, self._allowed, self._seconds = server, token, allowed, seconds
        self._arrived: queue.Queue[tuple[Message, Channel]] = queue.Queue()
        self._greeted: Counter[str] = Counter()
        self._counting = threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="listener").start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def accept(self, seconds: float) -> tuple[Message, Channel] | None:
        """The next peer's first message and its channel; None where nobody comes in time."""
        with contextlib.suppress(queue.Empty):
            return self._arrived.get(timeout=max(0.0, seconds))
        return None

    def take(self, channel: Channel, seconds: float | None = None) -> None:
        """Waits for a channel's first message, as if it had connected here. Raises ChannelError."""
        message = channel.receive(seconds)
        if self.closed:
            channel.close()
        else:
            self._arrived.put((message, channel))

    def close(self) -> None:
        """The port is free from now on, and whoever was not accepted is sent away."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
        self._server.close()
        while waiting := self.accept(0.0):
            waiting[1].close()

    def _accept(self) -> None:
        while not self.closed:
            try:
                connected, (address, *_) = self._server.accept()
            except OSError:  # closed; or this process has too many open files
                time.sleep(0.05)
                continue
            address = ipv4_of(address)
            if self._allowed and address not in self._allowed:
                self.refused[address] = "its address is not one of the machines that were named"
                connected.close()
            elif not self._may_greet(address):
                connected.close()
            else:
                threading.Thread(target=self._greet, args=(connected, address), daemon=True, name="listener").start()

    def _may_greet(self, address: str) -> bool:
        with self._counting:
            may = self._greeted.total() < MOST_GREETED and self._greeted[address] < MOST_GREETED_OF_ONE
            self._greeted[address] += may
        return may

    def _greet(self, connected: socket.socket, address: str) -> None:
        channel = None
        try:
            channel = Channel(connected)
            channel.authenticate(self._token, self._seconds, answers=True)
            self.take(channel, self._seconds)
        except ChannelError as error:
            self.refused[address] = str(error)
            if channel is not None:
                channel.close()
        finally:
            with self._counting:
                self._greeted[address] -= 1


def dial(address: str, port: int, token: str, seconds: float = 5.0) -> Channel:
    """Connects and authenticates. Raises UnreachableError without a connection, ChannelError for a stranger."""
    channel = Channel(connect(address, port, seconds))
    channel.authenticate(token, seconds, answers=False)
    return channel


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """A TCP connection. Raises UnreachableError, which tells what stands in the way."""
    try:
        return socket.create_connection((address, port), timeout=seconds)
    except OSError as error:
        raise UnreachableError(address, port, *_obstacle(error, seconds)) from error


def _obstacle(error: OSError, seconds: float) -> tuple[str, str]:
    """(kind, what it means)."""
    if isinstance(error, socket.gaierror):
        return "name", "this name cannot be resolved here"
    if isinstance(error, ConnectionRefusedError):
        return "refused", "the machine answers, but nothing listens on this port"
    if isinstance(error, TimeoutError):
        return "silent", f"no answer in {seconds:.0f} s"
    if isinstance(error, PermissionError):
        return "local", f"a firewall rule of this machine forbids it ({error.strerror})"
    if error.errno == errno.EHOSTUNREACH:
        return "no_route", "no machine answers to this address, or its firewall rejects the call"
    return "no_route", f"there is no route to it from here ({error.strerror or error})"
