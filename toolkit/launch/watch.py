"""Who of a run has failed, is gone, or does not arrive where the others wait: known to all within seconds.

Every process holds a connection to rank 0's. The kernel closes it when its process dies, however it dies, and notices
by itself when nothing comes back from a machine: no heartbeat depends on what Python is doing, so that a long
computation is never taken for a death. The first cause is told to all; then every process ends, and one of each
machine says why.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from toolkit.errors import UserError, listing
from toolkit.launch import wire
from toolkit.launch.member import Cause, Member, where
from toolkit.launch.relaunch import ddp_seconds
from toolkit.launch.restarts import ENDED_FILE, give_up
from toolkit.launch.wire import ClosedError, Line, UnreachableError, WireError

_FOR_EVER_SECONDS = 1_000_000.0
_BEAT_SECONDS = 2.0
# A failure waits this long for news of a process that died before it: what that did to others is not the cause.
_SECOND_THOUGHT_SECONDS = 0.5
_CONNECT_SECONDS = 20.0
# Waiting this long for a process is worth a line.
_MENTION_SECONDS = 60.0
_HUB_GRACE_SECONDS = 15.0
_MESSAGE_CHARACTERS = 2000


@dataclass
class _Progress:
    """How far a process has come."""

    collectives: int = 0
    since: float = field(default_factory=time.monotonic)


class Watch:
    """What is common to rank 0 and the others."""

    def __init__(self) -> None:
        self.members: Sequence[Member] = ()
        self.me = Member(0, "", "", 0, 0)
        self.cause: Cause | None = None
        self.over = False
        """Work is done: from now on connections may end."""
        self.leaving = False
        """The main thread has the last word, not the watch."""
        self._known = threading.Event()
        self._word = threading.Lock()
        if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
            os.register_at_fork(after_in_child=self._forget)

    def _connections(self) -> Sequence[socket.socket]:
        return ()

    def _forget(self) -> None:
        """In a process that was forked: its copies would keep the connections open when this one dies."""
        for connection in self._connections():
            connection.close()  # no shutdown, which would end them for all

    def fail(self, cause: Cause) -> None:
        raise NotImplementedError

    def done(self) -> None:
        raise NotImplementedError

    def await_byes(self, seconds: float) -> None:
        """Rank 0, with which the store may end, leaves last."""

    def failed(
        self, kind: Literal["failed", "interrupted"], message: str, hopeless: bool = False, seconds: float = 3.0
    ) -> bool:
        """Tells all. Returns whether this process is to say what went wrong: it was the first to fail."""
        self.leaving = True
        mine = Cause(self.me.rank, kind, message[-_MESSAGE_CHARACTERS:], hopeless)
        self.fail(mine)
        if not self._known.wait(seconds) or self.cause is None:
            return True  # nobody is left who could tell
        return self.cause.rank == self.me.rank

    def cause_within(self, seconds: float) -> Cause | None:
        """The cause that others know of, where they tell it in time."""
        self.leaving = True
        self._known.wait(seconds)
        return self.cause

    def speaks_of(self, cause: Cause) -> bool:
        """Whether this process is its machine's voice for what happened to another one."""
        culprit = self.members[cause.rank]
        same = culprit.machine == self.me.machine
        if same and (cause.kind == "failed" or (cause.kind == "gone" and ENDED_FILE in os.environ)):
            return False  # it spoke itself, or the launcher does
        if cause.kind == "interrupted":
            return self.me.rank == 0
        others = [m.local_rank for m in self.members if m.machine == self.me.machine and m.rank != cause.rank]
        return self.me.local_rank == min(others, default=self.me.local_rank)

    def take_word(self) -> bool:
        """Whether nobody in this process has spoken: the watch's thread and the main one may both be about to."""
        return self._word.acquire(blocking=False)

    def describe(self, cause: Cause) -> str:
        """One line."""
        return "interrupted" if cause.kind == "interrupted" else f"error: {self._described(cause)}"

    def _described(self, cause: Cause) -> str:
        culprit = self.members[cause.rank]
        who = f"rank {cause.rank} on {culprit.host}"
        if cause.kind == "failed":
            return f"{who} failed: {cause.message}"
        again = "; the same command goes on from the newest checkpoint, where it takes any (--checkpoint_every)"
        if cause.kind == "lost":
            ranks = [m.rank for m in self.members if m.machine == culprit.machine]
            named = f"{culprit.host} (rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)})"
            return f"no contact with {named}: it, or the network between, is down ({cause.message}){again}"
        if cause.kind == "hangs":
            return f"a collective hangs: the others wait for {cause.message}"
        return f"{who} has ended without a word: it was killed, or crashed; its own machine knows more{again}"

    def _learn(self, cause: Cause) -> None:
        """In a thread of the watch: the end of this process, unless its main thread is about to end it."""
        if self.over or self.cause is not None:
            return
        self.cause = cause
        self._known.set()
        if self.leaving:
            return
        if self.take_word():
            if self.speaks_of(cause):
                print(f"[rank {self.me.rank} on {self.me.host}] {self.describe(cause)}", file=sys.stderr, flush=True)
            end(cause)


def end(cause: Cause) -> None:
    """Leaves at once; what a broken process group would still do can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    if cause.hopeless:
        give_up()
    os._exit(130 if cause.kind == "interrupted" else 1)


# --- rank 0


class Hub(Watch):
    """Rank 0's part: hears all, decides what the cause is, tells all."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.token = secrets.token_hex(16)
        self._server = wire.listen(0, backlog=max(64, processes))
        self.port: int = self._server.getsockname()[1]
        self._lines: dict[int, Line] = {}
        self._left: set[int] = set()
        self._suspects: list[Cause] = []
        self._lock = threading.Lock()
        self._progress: dict[int, _Progress] = {}
        self._where: dict[int, str] = {}

    def _connections(self) -> Sequence[socket.socket]:
        return [self._server, *(line.connection for line in self._lines.values())]

    def start(self, members: Sequence[Member]) -> None:
        global current
        self.members, self.me = members, members[0]
        self._progress = {member.rank: _Progress() for member in members}
        current = self
        _thread(self._accept)
        _thread(self._look)
        atexit.register(self.done)

    def fail(self, cause: Cause) -> None:
        self._suspect(cause)

    def done(self) -> None:
        if not self.over and self.cause is None:
            self.over = True
            self._tell({"over": True})

    def await_byes(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._left) < len(self.members) - 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def _accept(self) -> None:
        deadline = time.monotonic() + _CONNECT_SECONDS
        self._server.settimeout(1.0)
        while len(self._lines) < len(self.members) - 1 and not self.over:
            with contextlib.suppress(TimeoutError, OSError):
                _thread(self._greet, self._server.accept()[0])
            if time.monotonic() > deadline:
                missing = [member.rank for member in self.members[1:] if member.rank not in self._lines]
                if missing:
                    self._suspect(Cause(missing[0], "gone", "it did not connect"))
                break
        self._server.close()

    def _greet(self, connection: socket.socket) -> None:
        """In a thread of its own: a stranger that says nothing holds nobody up."""
        with contextlib.suppress(WireError, OSError):
            line = wire.greet(connection, self.token)
            rank = line.receive(5.0).get("rank")
            if isinstance(rank, int) and 0 < rank < len(self.members) and rank not in self._lines:
                self._lines[rank] = line
                self._hear(rank, line)
            else:
                line.close()

    def _hear(self, rank: int, line: Line) -> None:
        try:
            while True:
                message = line.receive(_FOR_EVER_SECONDS)
                if "at" in message:
                    self._advance(rank, int(message["at"]))
                elif "where" in message:
                    self._where[rank] = str(message["where"])
                elif "bye" in message:
                    self._left.add(rank)
                elif "ping" in message:
                    line.send({"pong": True}, 2.0)
                elif "cause" in message:
                    self._suspect(Cause(**message["cause"]))
        except WireError as error:
            if rank not in self._left:
                self._suspect(_cause_of(rank, error))

    def _suspect(self, cause: Cause) -> None:
        with self._lock:
            self._suspects.append(cause)
            first = len(self._suspects) == 1
        if first:
            _thread(self._decide)

    def _decide(self) -> None:
        time.sleep(_SECOND_THOUGHT_SECONDS)
        with self._lock:
            dead = [cause for cause in self._suspects if cause.kind in ("gone", "lost")]
            spoke = {cause.rank for cause in self._suspects if cause.kind not in ("gone", "lost")}
        cause = next((found for found in dead if found.rank not in spoke), self._suspects[0])
        if self.over:
            return
        self._tell({"cause": asdict(cause)})
        self._learn(cause)

    def _tell(self, message: dict[str, Any]) -> None:
        for line in list(self._lines.values()):
            with contextlib.suppress(WireError):
                line.send(message, 2.0)

    # who does not arrive

    def _advance(self, rank: int, collectives: int) -> None:
        progress = self._progress[rank]
        if collectives != progress.collectives:
            progress.collectives, progress.since = collectives, time.monotonic()

    def _look(self) -> None:
        mentioned, patience = -1, ddp_seconds()
        while not self.over:
            time.sleep(_BEAT_SECONDS / 2)
            self._advance(0, collectives())
            furthest = max(progress.collectives for progress in self._progress.values())
            late = [rank for rank, progress in self._progress.items() if progress.collectives < furthest]
            # nobody has moved since: neither those who wait nor those who are late
            still = time.monotonic() - max(progress.since for progress in self._progress.values())
            if not late:
                continue
            if still > patience:
                self._suspect(Cause(late[0], "hangs", self._account(late, still)))
                return
            if still > min(_MENTION_SECONDS, patience / 2) and mentioned != furthest:
                mentioned = furthest
                print(f"waiting for {self._account(late, still)}", file=sys.stderr, flush=True)

    def _account(self, late: Sequence[int], seconds: float) -> str:
        """`rank 1 on B (it is at read.py:70 read_file < ...), for 60 s`."""
        self._where = {}
        for rank in late:
            if rank == 0:
                self._where[0] = where()
            elif rank in self._lines:
                with contextlib.suppress(WireError):
                    self._lines[rank].send({"where": True}, 2.0)
        time.sleep(_BEAT_SECONDS)
        said = [self._account_of(rank) for rank in late[:4]]
        rest = f" and {len(late) - 4} more" if len(late) > 4 else ""
        return f"{', '.join(said)}{rest}, for {seconds:.0f} s"

    def _account_of(self, rank: int) -> str:
        member = self.members[rank]
        stuck = f"it does not answer: process {member.pid} there is stopped or stuck, and may need a `kill -9`"
        doing = f"it is at {self._where[rank]}" if rank in self._where else stuck
        if rank in self._left:
            doing = "it has left already"
        return f"rank {rank} on {member.host} ({doing})"


# --- the others


class Client(Watch):
    """A rank's part."""

    def __init__(self, members: Sequence[Member], rank: int, line: Line) -> None:
        super().__init__()
        self.members, self.me, self._line = members, members[rank], line
        self._lock = threading.Lock()
        self._answered = threading.Event()

    def _connections(self) -> Sequence[socket.socket]:
        return [self._line.connection]

    def start(self) -> None:
        _thread(self._hear)
        _thread(self._beat)
        atexit.register(self.done)

    def fail(self, cause: Cause) -> None:
        self._send({"cause": asdict(cause)})

    def done(self) -> None:
        if not self.over and self.cause is None:
            self.over = True
            self._send({"bye": True})

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(WireError):
            self._line.send(message)

    def _hear(self) -> None:
        try:
            while True:
                message = self._line.receive(_FOR_EVER_SECONDS)
                if "where" in message:
                    self._send({"where": where()})
                elif "over" in message:
                    self.over = True
                elif "pong" in message:
                    self._answered.set()
                elif "cause" in message:
                    self._learn(Cause(**message["cause"]))
        except WireError as error:
            self._learn(_cause_of(0, error))

    def _beat(self) -> None:
        said, since, patience = 0, time.monotonic(), ddp_seconds()
        while not self.over:
            time.sleep(_BEAT_SECONDS)
            now = collectives()
            if now != said:
                said, since = now, time.monotonic()
                self._send({"at": now})
            elif time.monotonic() - since > patience + _HUB_GRACE_SECONDS:
                since = time.monotonic()
                self._ask_hub(patience)

    def _ask_hub(self, patience: float) -> None:
        """Rank 0 tells who does not arrive; where it is stopped itself, nobody would."""
        self._answered.clear()
        self._send({"ping": True})
        if not self._answered.wait(_HUB_GRACE_SECONDS):
            self._learn(
                Cause(0, "hangs", f"rank 0 on {self.members[0].host}, which does not answer, for {patience:.0f} s")
            )


current: Watch | None = None


def named_machines() -> list[str]:
    """`hostA (ranks 0, 1)` of each machine, where there are several."""
    if current is None:
        return []
    ranks: dict[str, list[int]] = {}
    hosts = {member.machine: member.host for member in current.members}
    for member in current.members:
        ranks.setdefault(member.machine, []).append(member.rank)
    named = [f"{hosts[machine]} (rank{'s' * (len(r) > 1)} {listing(r, 8)})" for machine, r in ranks.items()]
    return named if len(named) > 1 else []


def join(members: Sequence[Member], rank: int, address: str, port: int, token: str) -> None:
    """Connects to rank 0's hub. Raises UserError where that cannot be reached."""
    global current
    try:
        line = wire.dial(address, port, token, _CONNECT_SECONDS / 2)
        line.send({"rank": rank})
    except WireError as error:
        if isinstance(error, ClosedError):
            raise UserError(
                f"rank {rank} on {socket.gethostname()} had reached rank 0 on {members[0].host}, which has ended since"
            ) from error
        remedy = f". To do: {wire.remedy(error)}" if isinstance(error, UnreachableError) else ""
        raise UserError(
            f"rank {rank} on {socket.gethostname()} reached {address}, and not its port {port}: {error}; every TCP "
            f"port must be open between the machines of a run, not one alone{remedy}"
        ) from error
    client = Client(members, rank, line)
    client.start()
    current = client


def _cause_of(rank: int, error: WireError) -> Cause:
    return Cause(rank, "gone" if isinstance(error, ClosedError) else "lost", str(error))


def collectives() -> int:
    """How many collectives this process has begun, over all groups in which all take part."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    with contextlib.suppress(RuntimeError):  # a group that is being made, or taken down
        world = distributed.get_world_size()
        groups = [group for group in list(distributed.distributed_c10d._world.pg_map) if group.size() == world]
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    return 0


def _thread(target: Any, *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, daemon=True, name="watch").start()
