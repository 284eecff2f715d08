"""Ends a run whose peer has failed, died, lost its network, or does not arrive in a collective: everywhere, in seconds.

Each rank writes heartbeats into torch's store (how many collectives it has begun, where its main thread is) and reads
the run's failure there: the first one that was written. A store does not report that a client is gone. So each rank has
a connection to rank 0 on which nothing is sent but one byte, when its work is done: the kernel closes it when the
process dies, however it dies, and reports a node that no longer answers. Every process ends, and one of each node says
why.

Where a rank is killed, the collectives of the others fail, too, perhaps before rank 0 has looked at its connections. So
a rank that fails waits until rank 0 has: only then is its failure the first.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

from toolkit.errors import UserError
from toolkit.launch import network
from toolkit.launch.environment import timeout_seconds
from toolkit.launch.exit_state import close_resources
from toolkit.launch.interrupted import EXIT_CODE_FILE
from toolkit.launch.nodes import name_machine
from toolkit.launch.rendezvous import Rendezvous, nodes_of, read
from toolkit.launch.restarts import max_restarts, stop_launcher
from toolkit.utils.log import logger
from toolkit.utils.timeouts import call_with_timeout

_HEARTBEAT_SECONDS, _CONNECT_SECONDS, _STORE_SECONDS = 1.0, 10.0, 10.0
# A failed rank waits for reports of earlier failures, so that the first cause is named: so long where no other rank's
# end can have caused its own, else until rank 0 has looked, and so long at most.
_REPORT_SECONDS, _LONGEST_REPORT_SECONDS = 0.5, 15.0
# Waiting this long for a rank is worth a line.
_MENTION_SECONDS = 60.0
# Without a heartbeat for so long a rank is stopped, or stuck.
_SILENCE_SECONDS = 15.0
# Rank 0, which may serve the store, stays so long for ranks that have still to read the end of the run.
_LAST_SECONDS = 10.0
_DONE = b"d"


@dataclass(frozen=True)
class Failure:
    """Why a run ends."""

    rank: int
    kind: Literal["failed", "interrupted", "gone", "lost", "late"]
    """It reported so itself; its process ended; its node does not answer; it does not arrive in a collective."""
    message: str = ""
    final: bool = False
    """It would fail again."""


@dataclass
class _Progress:
    """Of a rank, by its heartbeats."""

    looks: int = 0
    """How often it has looked at its connections."""
    collectives: int = 0
    position: str = "its start"
    alive: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)

    def update(self, looks: int, collectives: int, position: str) -> None:
        if looks != self.looks:
            self.alive = time.monotonic()
        if collectives != self.collectives:
            self.moved = time.monotonic()
        self.looks, self.collectives, self.position = looks, collectives, position


class FailureDetector:
    """A rank's part; rank 0 has a connection to every other one, the others have theirs to rank 0."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.peers, self.me = rendezvous.peers, rendezvous.me
        self.failure: Failure | None = None
        self.finished = False
        """Work is done: from now on connections may close."""
        self._store = self._own_store = rendezvous.store
        self._connections: dict[int, socket.socket] = {}
        self._looks = 0
        watched = range(len(self.peers)) if self.me.rank == 0 else (0, self.me.rank)
        self._progress = {rank: _Progress() for rank in watched}
        self._done: set[int] = set()
        self._failed, self._all_done, self._ending = threading.Event(), threading.Event(), threading.Lock()
        self._leaving = False  # the main thread ends the process, not one of the detector

    def start(self, timeout: int) -> None:
        """`timeout`: the seconds for which a node may not answer. Raises UserError where rank 0 cannot be reached."""
        # the threads' own client, as a call that waits holds up all others of its client
        self._store = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._connections = {0: self._connect()} if self.me.rank else self._accept()
        for connection in self._connections.values():
            network.keep_alive(connection, timeout)
            os.register_at_fork(after_in_child=connection.close)  # the copy would stay open when this process dies
        for watch in (self._watch_connections, self._watch_store):
            threading.Thread(target=watch, daemon=True, name="failure detector").start()
        atexit.register(self.done)

    def _accept(self) -> dict[int, socket.socket]:
        """Rank 0's connections: all ranks connect now, as they have read the verdict."""
        master = os.environ["MASTER_ADDR"]
        address = master if network.is_this_machine(master) else network.source_address_for(master) or master
        connections: dict[int, socket.socket] = {}
        with network.listen(0, network.address_to_bind(address, local=len(nodes_of(self.peers)) == 1)) as server:
            self._store.set("connect", json.dumps([address, server.getsockname()[1]]))
            server.settimeout(2 * _CONNECT_SECONDS)
            while absent := set(range(1, len(self.peers))) - connections.keys():
                try:
                    connection, _ = server.accept()
                except TimeoutError:  # a rank that cannot connect reports why
                    self._decide(Failure(min(absent), "gone"))
                    continue
                with contextlib.suppress(OSError, ValueError, TypeError):  # of a stranger
                    connection.settimeout(1.0)
                    hello = b""
                    # to its end alone: a rank that is done at once has sent that, too
                    while not hello.endswith(b"]") and len(hello) < 256 and (byte := connection.recv(1)):
                        hello += byte
                    number, rank = json.loads(hello)
                    if number == self.me.number and rank in absent:
                        connection.settimeout(None)
                        connections[rank] = connection
        return connections

    def _connect(self) -> socket.socket:
        address, port = read(self._store, "connect")
        try:
            connection = network.connect(address, port, _CONNECT_SECONDS)
        except network.UnreachableError as error:
            raise UserError(
                f"rank {self.me.rank} on {self.me.host} reached {address}, but not its port {port}: {error.detail}; "
                f"all TCP ports must be open between the machines of a run, not just one. To do: {error.remedy}"
            ) from error
        connection.settimeout(None)
        connection.sendall(json.dumps([self.peers[0].number, self.me.rank]).encode())
        return connection

    # --- for the main thread

    def report(self, kind: Literal["failed", "interrupted"], message: str, final: bool) -> None:
        """Reports this rank's own failure to all, and returns where it is the first; else the process ends here."""
        self._leaving = True
        if kind == "interrupted" or final:  # by a user, or by a setting: no other rank's end has caused it
            self._failed.wait(_REPORT_SECONDS)
        else:
            self._wait_for_rank_0()
        self.failure = self.failure or self._write(Failure(self.me.rank, kind, message, final))
        if self.failure.rank != self.me.rank:
            self.end(self.failure)
        self._ending.acquire()  # for good

    def _wait_for_rank_0(self) -> None:
        """Until a failure is known, or rank 0 has looked at all connections since this was called."""
        with contextlib.suppress(RuntimeError, TimeoutError):  # rank 0 has ended, or is stopped
            looks, _, _ = call_with_timeout(_STORE_SECONDS, partial(read, self._own_store, "heartbeat 0"))
            deadline = time.monotonic() + _LONGEST_REPORT_SECONDS
            while self._progress[0].looks < looks + 2 and time.monotonic() < deadline and not self._failed.wait(0.1):
                pass

    def wait_for_failure(self, seconds: float) -> None:
        """Of another rank, which ends this one."""
        self._leaving = True
        self._failed.wait(seconds)

    def done(self) -> None:
        """This rank may leave; when rank 0 does, all may."""
        if not self.finished and self.failure is None:
            self.finished = True
            self._send_done()

    def wait_for_all(self, seconds: float) -> None:
        """A barrier: returns when all are done."""
        if self.me.rank:
            self._send_done()
        self._all_done.wait(seconds)
        self.done()
        self.wait_for_readers()

    def _send_done(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(_DONE)

    def wait_for_readers(self) -> None:
        """Rank 0 leaves last, a few seconds later at most."""
        deadline = time.monotonic() + _LAST_SECONDS
        for connection in self._connections.values() if self.me.rank == 0 else ():
            with contextlib.suppress(OSError):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                while connection.recv(64):
                    pass

    def end(self, failure: Failure) -> NoReturn:
        """Leaves at once: what a broken process group would still do can hang."""
        self._ending.acquire()  # for good: the main thread and one of the detector may both be about to
        with contextlib.suppress(OSError):  # nobody reads it any more
            if self.reports_for_node(failure):
                logger.error(f"[rank {self.me.rank} on {self.me.host}] {self.describe(failure)}")
            sys.stdout.flush()
        close_resources()
        self.wait_for_readers()
        code = 130 if failure.kind == "interrupted" else 1
        if self.forbids_restart(failure.final):
            stop_launcher(code)
        os._exit(code)

    def forbids_restart(self, final: bool) -> bool:
        """Also where one node has no restart left: the others would wait for it."""
        return final or (max_restarts() > 0 and any(peer.restarts_left < 1 for peer in self.peers))

    # --- who reports what

    def reports_for_node(self, failure: Failure) -> bool:
        """Whether this process reports for its node what happened to another one."""
        culprit = self.peers[failure.rank]
        reports_itself = failure.kind == "failed" or (failure.kind == "gone" and EXIT_CODE_FILE in os.environ)
        if culprit.node == self.me.node and reports_itself:  # or its launcher does
            return False
        if failure.kind == "interrupted":
            return self.me.rank == 0
        others = [peer.rank for peer in self.peers if peer.node == self.me.node and peer != culprit]
        return self.me.rank == min(others, default=self.me.rank)

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
            machine = name_machine(culprit.host, nodes_of(self.peers)[culprit.node])
            return f"error: no contact with {machine}: it, or the network between, is down ({failure.message}){again}"
        return f"error: {who} has ended without a word: it was killed, or crashed; its own machine knows more{again}"

    def _write(self, failure: Failure) -> Failure:
        """The run's failure: the first that was written; this one where the store does not answer."""

        def write() -> Failure:
            self._store.compare_set("failure", "", json.dumps(asdict(failure)))
            return Failure(**read(self._store, "failure"))

        try:
            return call_with_timeout(_STORE_SECONDS, write)
        except (RuntimeError, TimeoutError):
            return failure

    def _decide(self, failure: Failure) -> None:
        # behind a network that is down the store does not answer
        self._learn(failure if failure.kind == "lost" and self.me.rank else self._write(failure))

    def _learn(self, failure: Failure) -> None:
        """The end of this process, unless its main thread is about to end it."""
        if self.finished or self.failure is not None:
            return
        self.failure = failure
        self._failed.set()
        if not self._leaving:
            self.end(failure)

    # --- who is gone: the connections

    def _watch_connections(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while not self.finished:
                for key, _ in selector.select(_HEARTBEAT_SECONDS):
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                self._looks += 1

    def _receive(self, rank: int) -> bool:
        """Whether the connection is still open."""
        failure = Failure(rank, "gone")
        try:
            if self._connections[rank].recv(64):
                self._done.add(rank)
                self.finished = self.finished or rank == 0
                if rank == 0 or len(self._done) == len(self.peers) - 1:
                    self._all_done.set()
                return True
        except ConnectionResetError:
            pass
        except OSError as error:
            failure = Failure(rank, "lost", str(error.strerror or error))
        if rank not in self._done and not self.finished:
            self._decide(failure)
        return False

    # --- who does not arrive: the store

    def _watch_store(self) -> None:
        # rank 0 names who does not arrive; where it is stopped itself, the others do
        timeout, mentioned = timeout_seconds("ddp_timeout") + (_SILENCE_SECONDS if self.me.rank else 0.0), -1
        while not self.finished and self.failure is None:
            try:
                call_with_timeout(timeout, self._exchange_heartbeats)
            except TimeoutError:  # rank 0, whose process serves the store, is stopped
                self._learn(Failure(0, "late", self._account([0], timeout)))
            except RuntimeError:  # the process that serves it has ended: the connection to rank 0 shows it
                return
            mentioned = self._check_progress(timeout, mentioned)
            time.sleep(_HEARTBEAT_SECONDS)

    def _exchange_heartbeats(self) -> None:
        if self._store.check(["failure"]):
            self._learn(Failure(**read(self._store, "failure")))
        heartbeat = [self._looks, collectives(), main_thread_position()]
        self._store.set(f"heartbeat {self.me.rank}", json.dumps(heartbeat))
        for rank, progress in self._progress.items():
            if self._store.check([f"heartbeat {rank}"]):
                progress.update(*read(self._store, f"heartbeat {rank}"))

    def _check_progress(self, timeout: float, mentioned: int) -> int:
        """`mentioned`, and what is returned, is the collective for which a line has named who is waited for."""
        now, furthest = time.monotonic(), max(progress.collectives for progress in self._progress.values())
        late = [
            rank
            for rank, progress in self._progress.items()
            if progress.collectives < furthest or (now - progress.alive > _SILENCE_SECONDS and rank not in self._done)
        ]
        # nobody has moved since: neither those who wait nor those who are late
        still = now - max(progress.moved for progress in self._progress.values())
        if late and still > timeout:
            self._decide(Failure(late[0], "late", self._account(late, still)))
        elif late and still > min(_MENTION_SECONDS, timeout / 2) and mentioned != furthest and self.me.rank == 0:
            logger.info(f"waiting for {self._account(late, still)}")
            return furthest
        return mentioned

    def _account(self, late: Sequence[int], seconds: float) -> str:
        """`rank 1 on B (it is at read.py:70 read_file < ...), for 60 s`."""
        accounts = []
        for peer in (self.peers[rank] for rank in late[:4]):
            progress = self._progress[peer.rank]
            position = f"it is at {progress.position}"
            if peer.rank in self._done:
                position = "it has left already"
            elif time.monotonic() - progress.alive > 6 * _HEARTBEAT_SECONDS:
                position = f"it does not answer: process {peer.pid} there is stopped or stuck, and may need a `kill -9`"
            accounts.append(f"rank {peer.rank} on {peer.host} ({position})")
        rest = f" and {len(late) - 4} more" if len(late) > 4 else ""
        return f"{', '.join(accounts)}{rest}, for {seconds:.0f} s"


# The process's own: its main thread, its signal handlers and its last lines report failures through it.
current: FailureDetector | None = None


def start(rendezvous: Rendezvous | None, timeout: int) -> None:
    """From now on this process ends when another one of the run has failed, unless one has `--failure_detector off`."""
    global current
    if current is not None or rendezvous is None or len(rendezvous.peers) == 1:
        return
    if all(peer.failure_detector == "on" for peer in rendezvous.peers):
        current = FailureDetector(rendezvous)
        current.start(timeout)


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


def main_thread_position() -> str:
    """`prepare.py:70 _prepared < cls.py:31 main`, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=6, lookup_lines=False) if frame else []
    return " < ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in stack) or "its end"
