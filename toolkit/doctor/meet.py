"""Machines meet: each listens on the port and calls every other one, until all have met both ways or time is up.

Whoever connects shows the token within seconds or is sent away; each connection is answered in a thread of its own, so
that one that says nothing holds nobody up.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.doctor.finding import mapping, number, plain, whole_number
from toolkit.launch import wire
from toolkit.launch.wire import Line, UnreachableError, WireError

_CONNECT_SECONDS = 4.0  # an address that nobody has shows after 3 s, while the kernel asks for it
_TALK_SECONDS = 3.0
_PAUSE_SECONDS = 0.3
# One way works, the other does not yet: both sides listen by now, so it is not for want of starting.
GRACE_SECONDS = 5.0
_MOST_ANSWERS = 32
_MOST_STRANGERS = 8


@dataclass(frozen=True)
class Me:
    """This machine, as it introduces itself."""

    rank: int
    host: str
    names: tuple[str, ...]
    """The machines as they were typed, in the order of ranks; machine 0's alone where only that is known."""
    count: int
    port: int
    token: str
    only_named: bool = False
    """Take connections from the named machines' addresses alone."""
    session: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class Trouble:
    """Why a machine is not reached: `kind` as in `UnreachableError`, or token, stranger, or conflict."""

    kind: str
    detail: str
    fault: UnreachableError | None = None


@dataclass
class Way:
    """To another machine and back."""

    address: str | None
    out: Line | None = None
    back: Line | None = None
    trouble: Trouble | None = None
    """Of the last call."""
    session: str = ""
    host: str = ""
    half_since: float | None = None

    @property
    def met(self) -> bool:
        return self.out is not None and self.back is not None


class Meeting:
    """`with Meeting(me, server) as meeting: meeting.run(30)`; then `ways`, `strangers` and `conflicts` are known.

    `server` listens already (None where the port is taken: then this machine only calls), and is closed with everything
    else at the end of the block.
    """

    def __init__(self, me: Me, server: socket.socket | None) -> None:
        self.me, self._server = me, server
        self.ways = {rank: Way(me.names[rank] if rank < len(me.names) else None)
                     for rank in range(me.count) if rank != me.rank}  # fmt: skip
        self.strangers: dict[str, str] = {}
        """Address -> why it was sent away."""
        self.conflicts: list[str] = []
        self._deadline = 0.0
        self._conflict_since: float | None = None
        self._news = threading.Condition()
        self._over = False
        self._closed = False
        self._answering = threading.Semaphore(_MOST_ANSWERS)
        self._allowed = self._addresses_of_all() if me.only_named and len(me.names) == me.count else None

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_listening()
        for way in self.ways.values():
            for line in (way.out, way.back):
                if line is not None:
                    line.close()

    def stop_listening(self) -> None:
        """From now on nobody can connect, and the port is free."""
        self._over = self._closed = True
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
            self._server.close()

    def _addresses_of_all(self) -> set[str]:
        own = set(wire.own_addresses())
        return own | {address for name in self.me.names for address in wire.addresses_of(name)}

    # --- the waiting

    def run(self, seconds: float) -> None:
        """Returns when all have met both ways, when what is missing will not come any more, or after `seconds`."""
        self._deadline = time.monotonic() + seconds
        if self._server is not None:
            self._start(self._accept, self._server)
        for rank in self.ways:
            self._start(self._call, rank)
        if any(way.address is None for way in self.ways.values()) and self.me.rank:
            self._start(self._ask_for_addresses)
        with self._news:
            while not self._settled() and (left := self._deadline - time.monotonic()) > 0:
                self._news.wait(min(left, 0.2))
            self._over = True

    @property
    def left(self) -> float:
        """Seconds until the last machine gives up waiting."""
        return max(0.0, self._deadline - time.monotonic())

    def _settled(self) -> bool:
        now = time.monotonic()
        states = []
        for way in self.ways.values():
            self._forget_closed(way)
            half = (way.out is None) != (way.back is None)
            way.half_since = (way.half_since or now) if half else None
            given_up = way.half_since is not None and now - way.half_since > GRACE_SECONDS
            final = way.trouble is not None and way.trouble.kind == "conflict"
            self._conflict_since = self._conflict_since or (now if final else None)
            states.append(way.met or given_up or final)
        hopeless = self._conflict_since is not None and now - self._conflict_since > GRACE_SECONDS
        return all(states) or hopeless

    def _forget_closed(self, way: Way) -> None:
        """A machine that was started again comes with new connections."""
        for name in ("out", "back"):
            line: Line | None = getattr(way, name)
            if line is not None and not is_open(line):
                line.close()
                setattr(way, name, None)

    def _start(self, target: Any, *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, daemon=True, name="doctor").start()

    def _hello(self, **more: object) -> dict[str, Any]:
        me = self.me
        left = self._deadline - time.monotonic()
        return {"rank": me.rank, "host": me.host, "session": me.session, "names": me.names, "count": me.count,
                "left": left, **more}  # fmt: skip

    def _hurry(self, left: object) -> None:
        """All give up together with the one that has waited longest."""
        seconds = number(left)
        if seconds is not None:
            self._deadline = min(self._deadline, time.monotonic() + max(seconds, 0.0) + 0.5)

    # --- calling

    def _call(self, rank: int) -> None:
        way = self.ways[rank]
        while not self._over:
            if way.out is None and way.address is not None:
                self._try(rank, way, way.address)
            time.sleep(_PAUSE_SECONDS)

    def _try(self, rank: int, way: Way, address: str) -> None:
        line: Line | None = None
        try:
            line = wire.dial(address, self.me.port, self.me.token, self._patience())
            line.send(self._hello(), _TALK_SECONDS)
            reply = line.receive(_TALK_SECONDS)
            trouble = self._objection(rank, reply)
        except WireError as error:
            trouble = _trouble(error)
        with self._news:
            if not _ended_since(way.trouble, trouble):
                way.trouble = trouble
            if trouble is None and line is not None and not self._over:
                way.out, way.session = line, str(reply["session"])
                way.host = plain(reply.get("host", ""), 100)
                self._hurry(reply.get("left"))
            elif line is not None:
                line.close()
            self._news.notify()

    def _patience(self) -> float:
        return max(0.5, min(_CONNECT_SECONDS, self._deadline - time.monotonic() + GRACE_SECONDS))

    def _objection(self, rank: int, reply: dict[str, Any]) -> Trouble | None:
        if reply.get("fault"):
            return Trouble("conflict", plain(reply["fault"], 500))
        if reply.get("rank") != rank or not isinstance(reply.get("session"), str):
            return Trouble("conflict", f"it says that it is machine {plain(reply.get('rank'), 20)}, not {rank}")
        return None

    def _ask_for_addresses(self) -> None:
        """Where only machine 0's address was given: it learns the others' when they call, and passes them on."""
        while not self._over and any(way.address is None for way in self.ways.values()):
            with (
                contextlib.suppress(WireError),
                wire.dial(self.me.names[0], self.me.port, self.me.token, self._patience()) as line,
            ):
                line.send(self._hello(asks=True), _TALK_SECONDS)
                known = mapping(line.receive(_TALK_SECONDS).get("addresses"))
                for rank, way in self.ways.items():
                    if way.address is None and known.get(str(rank)):
                        way.address = plain(known[str(rank)], 100)
            time.sleep(_PAUSE_SECONDS)

    # --- answering

    def _accept(self, server: socket.socket) -> None:
        while not self._closed:
            try:
                connection, (address, *_) = server.accept()
            except OSError:
                return
            if self._allowed is not None and address not in self._allowed:
                self._send_away(connection, address, "it is none of the machines that were named")
            elif not self._answering.acquire(blocking=False):
                self._send_away(connection, address, "too many connections at once")
            else:
                self._start(self._answer, connection, address)

    def _send_away(self, connection: socket.socket, address: str, why: str) -> None:
        connection.close()
        with self._news:
            if len(self.strangers) < _MOST_STRANGERS:
                self.strangers.setdefault(address, why)

    def _answer(self, connection: socket.socket, address: str) -> None:
        try:
            line = wire.greet(connection, self.me.token, _TALK_SECONDS)
        except (WireError, OSError) as error:
            self._send_away(connection, address, plain(error, 200))
            return
        finally:
            self._answering.release()
        try:
            hello = line.receive(_TALK_SECONDS)
            kept = self._take(line, hello)
        except (WireError, OSError):
            kept = False
        if not kept:
            line.close()

    def _take(self, line: Line, hello: dict[str, Any]) -> bool:
        """Answers an introduction; whether the line is kept."""
        rank = whole_number(hello.get("rank"), -1)
        with self._news:
            fault = self._fault_of(rank, hello, line)
            if fault and fault not in self.conflicts:
                self.conflicts.append(fault)
            known = {str(other): way.address for other, way in self.ways.items() if way.address}
        line.send(self._hello(fault=fault, addresses=known), _TALK_SECONDS)
        if fault or hello.get("asks"):
            return False
        with self._news:
            if self._over:
                return False
            way = self.ways[rank]
            if way.back is not None:
                way.back.close()
            if way.session != hello["session"] and way.out is not None:
                way.out.close()  # to a doctor that has ended since
                way.out = None
            way.back, way.session, way.host = line, str(hello["session"]), plain(hello.get("host", ""), 100)
            way.address = way.address or line.peer
            self._hurry(hello.get("left"))
            self._news.notify()
        return True

    def _fault_of(self, rank: int, hello: dict[str, Any], line: Line) -> str:
        me, host = self.me, plain(hello.get("host", "?"), 100)
        theirs = f"{host} ({line.peer})"
        if hello.get("session") == me.session:
            return f"{line.own} is {me.host} itself, and was given as another machine's address"
        if not isinstance(hello.get("session"), str):
            return f"{theirs} speaks another version of this protocol"
        if hello.get("count") != me.count or _names(hello) != me.names:
            listed = ", ".join(_names(hello)) or "?"
            return f"{me.host} was given the machines {', '.join(me.names)}, and {theirs} {listed}: type the same"
        if rank == me.rank:
            return f"{me.host} and {theirs} both say that they are machine {rank}: pass --machine_rank on each"
        if rank not in self.ways:
            return f"{theirs} says that it is machine {rank} of {me.count}"
        way = self.ways[rank]
        if way.back is not None and way.session != hello["session"] and is_open(way.back):
            return f"{theirs} and {way.host} ({way.back.peer}) both say that they are machine {rank}"
        return ""


def _names(hello: dict[str, Any]) -> tuple[str, ...]:
    sent: object = hello.get("names")
    return tuple(plain(name, 100) for name in sent[:64]) if isinstance(sent, Sequence) else ()


def is_open(line: Line) -> bool:
    """Whether the other side has not closed it; nothing is taken from it."""
    try:
        line.connection.setblocking(False)
        return line.connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            line.connection.settimeout(10.0)


def _ended_since(before: Trouble | None, now: Trouble | None) -> bool:
    """Whether somebody answered there before and has ended: what was said then tells more."""
    told = before is not None and before.kind in ("token", "stranger", "conflict")
    return told and now is not None and now.kind == "refused"


def _trouble(error: WireError) -> Trouble:
    if isinstance(error, UnreachableError):
        return Trouble(error.kind, error.detail, error)
    text = plain(error, 300)
    if "token" in text:
        return Trouble("token", text)
    return Trouble("stranger", text)
