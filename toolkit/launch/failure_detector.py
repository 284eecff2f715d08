"""Ends a run whose peer has failed, died, lost its network, or does not arrive in a collective: everywhere, in seconds.

Each rank keeps its channel to rank 0 (the coordinator) open. The kernel closes it when its process dies, however it
dies, and notices by itself when a node's answers stay away: no death depends on what Python is doing. Heartbeats only
carry how many collectives a rank has begun and where its main thread is. The coordinator decides what the failure was
and tells all; then every process ends, and one of each node says why.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from toolkit.errors import listing
from toolkit.launch.bad_end import close_what_is_open
from toolkit.launch.channel import Channel, ChannelError, ClosedError, Message
from toolkit.launch.environment import seconds_of
from toolkit.launch.interrupted import ENDED_FILE
from toolkit.launch.restarts import give_up

_HEARTBEAT_SECONDS = 2.0
# A failure waits this long for news of a process that died before it: what that did to others is not the cause.
_SECOND_THOUGHT_SECONDS = 0.5
# Waiting this long for a rank is worth a line.
_MENTION_SECONDS = 60.0
# Without a heartbeat for so long a rank is stopped, or stuck.
_SILENCE_SECONDS = 15.0
# How long the coordinator stays for those that have still to hear that all are done.
_LAST_SECONDS = 5.0


@dataclass(frozen=True)
class Peer:
    """A process of the run."""

    rank: int
    host: str
    node: str
    """See `network.node_id`."""
    local_rank: int
    pid: int


@dataclass(frozen=True)
class Failure:
    """Why a run ends."""

    rank: int
    kind: Literal["failed", "interrupted", "gone", "lost", "late"]
    """It said so itself; its process ended; its node does not answer; it does not arrive in a collective."""
    message: str
    final: bool = False
    """It would fail again."""


@dataclass
class _Progress:
    """Of a rank, by its heartbeats."""

    collectives: int = 0
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    doing: str = "its start"

    def update(self, collectives: int, doing: str) -> None:
        self.heard, self.doing = time.monotonic(), doing
        if collectives != self.collectives:
            self.collectives, self.since = collectives, self.heard


class FailureDetector:
    """A rank's part; rank 0 has a channel to every other one, the others have theirs to rank 0."""

    def __init__(self, peers: Sequence[Peer], rank: int, channels: Mapping[int, Channel]) -> None:
        self.peers, self.me = peers, peers[rank]
        self.failure: Failure | None = None
        self.finished = False
        """Work is done: from now on channels may close."""
        self._channels = dict(channels)
        self._progress = {number: _Progress() for number in sorted({rank, *channels})}
        self._known, self._all_done = threading.Event(), threading.Event()
        self._leaving = False  # the main thread has the last word, not one of the detector
        self._word, self._sending, self._deciding = threading.Lock(), threading.Lock(), threading.Lock()
        self._reports: list[Failure] = []
        self._done: set[int] = set()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._threads = [self._start(self._receive, rank, channel) for rank, channel in self._channels.items()]
        self._start(self._beat)
        atexit.register(self.done)
        for channel in self._channels.values():  # a forked process's copy would keep it open when this one dies
            os.register_at_fork(after_in_child=channel.forget)

    # --- for the main thread

    def report(self, kind: Literal["failed", "interrupted"], message: str, final: bool) -> Failure:
        """Tells all of this rank's own failure; returns the one that counts, which came first."""
        self._leaving = True
        mine = Failure(self.me.rank, kind, message, final)
        self._suspect(mine)
        return self.failure_within(3.0) or mine  # without an answer nobody is left who could tell

    def failure_within(self, seconds: float) -> Failure | None:
        """The failure that others know of, where they tell it in time."""
        self._leaving = True
        self._known.wait(seconds)
        return self.failure

    def done(self) -> None:
        """This rank may leave; when rank 0 does, all may."""
        if not self.finished and self.failure is None:
            self.finished = True
            self._send({"done": True})

    def wait_for_all(self, seconds: float) -> None:
        """A barrier: returns when all are done."""
        if self.me.rank:
            self._send({"done": True})
        self._all_done.wait(seconds)
        self.done()
        deadline = time.monotonic() + (0.0 if self.me.rank else _LAST_SECONDS)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def end(self, failure: Failure) -> NoReturn:
        """Leaves at once: what a broken process group would still do can hang."""
        self._word.acquire()  # for good: the main thread and one of the detector may both be about to
        with contextlib.suppress(OSError):  # nobody reads it any more
            if self.speaks_of(failure):
                print(f"[rank {self.me.rank} on {self.me.host}] {self.describe(failure)}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        close_what_is_open()
        code = 130 if failure.kind == "interrupted" else 1
        if failure.final:
            give_up(code)
        os._exit(code)

    # --- who says what

    def speaks_of(self, failure: Failure) -> bool:
        """Whether this process is its node's voice for what happened to another one."""
        culprit = self.peers[failure.rank]
        same = culprit.node == self.me.node
        if same and (failure.kind == "failed" or (failure.kind == "gone" and ENDED_FILE in os.environ)):
            return False  # it spoke itself, or the launcher does
        if failure.kind == "interrupted":
            return self.me.rank == 0
        others = [p.local_rank for p in self.peers if p.node == self.me.node and p.rank != failure.rank]
        return self.me.local_rank == min(others, default=self.me.local_rank)

    def describe(self, failure: Failure) -> str:
        """One line."""
        culprit = self.peers[failure.rank]
        who = f"rank {failure.rank} on {culprit.host}"
        again = "; the same command goes on from the newest checkpoint, if one was taken (--checkpoint_every)"
        if failure.kind == "interrupted":
            return "interrupted"
        if failure.kind == "failed":
            return f"error: {who} failed: {failure.message}"
        if failure.kind == "late":
            return f"error: a collective hangs: the others wait for {failure.message}"
        if failure.kind == "lost":
            named = _named(culprit.host, [p.rank for p in self.peers if p.node == culprit.node])
            down = f"it, or the network between, is down ({failure.message})"
            return f"error: no contact with {named}: {down}{again}"
        return f"error: {who} has ended without a word: it was killed, or crashed; its own machine knows more{again}"

    # --- the detector's threads

    def _start(self, target: object, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name="failure detector")  # type: ignore[arg-type]
        thread.start()
        return thread

    def _send(self, message: Message, rank: int | None = None) -> None:
        for number, channel in list(self._channels.items()):
            if rank in (None, number):
                with self._sending, contextlib.suppress(ChannelError):
                    channel.send(message, 2.0)

    def _receive(self, rank: int, channel: Channel) -> None:
        while True:
            try:
                self._take(rank, channel.receive(None))
            except ChannelError as error:
                if rank not in self._done:
                    kind: Literal["gone", "lost"] = "gone" if isinstance(error, ClosedError) else "lost"
                    self._suspect(Failure(rank, kind, str(error)))
                return
            except (LookupError, TypeError, ValueError):  # not of this version; its death is noticed all the same
                continue

    def _take(self, rank: int, message: Message) -> None:
        if "collectives" in message:
            self._progress[rank].update(int(message["collectives"]), str(message["doing"]))
            if self.me.rank == 0:  # an answer, and no beat of its own: nothing piles up before a rank that is stopped
                self._send(self._heartbeat(), rank)
        elif "failure" in message:
            failure = Failure(**message["failure"])
            self.peers[failure.rank]  # LookupError for a rank there is not
            self._learn(failure) if rank == 0 else self._suspect(failure)
        elif "done" in message:
            self._done.add(rank)
            self.finished = self.finished or rank == 0
            if rank == 0 or len(self._done) == len(self.peers) - 1:
                self._all_done.set()

    def _suspect(self, failure: Failure) -> None:
        if self.me.rank:  # where it is rank 0 that is gone nobody else decides
            self._learn(failure) if failure.rank == 0 else self._send({"failure": asdict(failure)})
            return
        with self._deciding:
            self._reports.append(failure)
            if len(self._reports) == 1:
                self._start(self._decide)

    def _decide(self) -> None:
        time.sleep(_SECOND_THOUGHT_SECONDS)
        with self._deciding:
            dead = [report for report in self._reports if report.kind in ("gone", "lost")]
            spoke = {report.rank for report in self._reports if report not in dead}
            failure = next((report for report in dead if report.rank not in spoke), self._reports[0])
        if not self.finished:
            self._send({"failure": asdict(failure)})
            self._learn(failure)

    def _learn(self, failure: Failure) -> None:
        """The end of this process, unless its main thread is about to end it."""
        if self.finished or self.failure is not None:
            return
        self.failure = failure
        self._known.set()
        if not self._leaving:
            self.end(failure)

    # --- who does not arrive

    def _heartbeat(self) -> Message:
        return {"collectives": collectives(), "doing": what_main_thread_does()}

    def _beat(self) -> None:
        # rank 0 tells who does not arrive; where it is stopped itself, the others do
        timeout, mentioned = seconds_of("ddp_timeout") + (_SILENCE_SECONDS if self.me.rank else 0.0), -1
        while not self.finished:
            time.sleep(_HEARTBEAT_SECONDS)
            beat = self._heartbeat()
            self._progress[self.me.rank].update(beat["collectives"], beat["doing"])
            if self.me.rank:
                self._send(beat)
            mentioned = self._check(timeout, mentioned)

    def _check(self, timeout: float, mentioned: int) -> int:
        """`mentioned`, and what is returned, is the collective of which a line has told that it is waited for."""
        now, furthest = time.monotonic(), max(progress.collectives for progress in self._progress.values())
        late = [
            rank
            for rank, progress in self._progress.items()
            if progress.collectives < furthest or (now - progress.heard > _SILENCE_SECONDS and rank not in self._done)
        ]
        # nobody has moved since: neither those who wait nor those who are late
        still = now - max(progress.since for progress in self._progress.values())
        if late and still > timeout and self.failure is None and not self._reports:
            self._suspect(Failure(late[0], "late", self._account(late, still)))
        elif late and still > min(_MENTION_SECONDS, timeout / 2) and mentioned != furthest and self.me.rank == 0:
            print(f"waiting for {self._account(late, still)}", file=sys.stderr, flush=True)
            return furthest
        return mentioned

    def _account(self, late: Sequence[int], seconds: float) -> str:
        """`rank 1 on B (it is at read.py:70 read_file < ...), for 60 s`."""
        said = []
        for peer in (self.peers[rank] for rank in late[:4]):
            progress = self._progress[peer.rank]
            doing = f"it is at {progress.doing}"
            if peer.rank in self._done:
                doing = "it has left already"
            elif time.monotonic() - progress.heard > 3 * _HEARTBEAT_SECONDS:
                doing = f"it does not answer: process {peer.pid} there is stopped or stuck, and may need a `kill -9`"
            said.append(f"rank {peer.rank} on {peer.host} ({doing})")
        rest = f" and {len(late) - 4} more" if len(late) > 4 else ""
        return f"{', '.join(said)}{rest}, for {seconds:.0f} s"


current: FailureDetector | None = None


def start(peers: Sequence[Peer], rank: int, channels: Mapping[int, Channel]) -> None:
    """From now on this process ends when another one of the run has failed."""
    global current
    current = FailureDetector(peers, rank, channels)
    current.start()


def named_machines() -> list[str]:
    """`hostA (ranks 0, 1)` of each machine, where there are several."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for peer in current.peers if current else ():
        ranks.setdefault((peer.node, peer.host), []).append(peer.rank)
    return [_named(host, of_node) for (_, host), of_node in ranks.items()] if len(ranks) > 1 else []


def _named(host: str, ranks: Sequence[int]) -> str:
    return f"{host} (rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)})"


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


def what_main_thread_does() -> str:
    """`prepare.py:70 _prepared < cls.py:31 main`, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=6, lookup_lines=False) if frame else []
    return " < ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in stack) or "its end"
