"""Ends a run on all nodes within seconds when a rank fails, dies, loses its network or does not join a collective.

Each rank writes heartbeats to torch's store (how many collectives it has begun, whether it waits in one, where its main
thread is) and reads the run's failure there: the first one written. A store does not report that a client is gone, so
each rank also keeps a connection to rank 0 and sends nothing on it but one byte when its work is done. The kernel
closes it when the process dies, however it dies, and reports a node that stops answering. Then every process exits, and
one of each node reports the failure.

When a rank is killed, the collectives of the others fail too, perhaps before rank 0 has polled its connections. A rank
that fails therefore waits until rank 0 has polled them: only then is its own failure the first.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, NoReturn

from toolkit.errors import UserError
from toolkit.launch import collectives, network
from toolkit.launch.environment import attempt, max_restarts, timeout_seconds
from toolkit.launch.exit_state import RESUME_HINT, close_resources, stop_launcher
from toolkit.launch.interrupted import EXIT_CODE_FILE, INTERRUPTED, write_exit_code
from toolkit.launch.nodes import name_machine
from toolkit.launch.progress import AT_END, Progress
from toolkit.launch.rendezvous import Rendezvous, nodes_of, read
from toolkit.utils.log import logger
from toolkit.utils.timeouts import call_with_timeout

_HEARTBEAT_SECONDS, _CONNECT_SECONDS, _STORE_SECONDS = 1.0, 10.0, 10.0
# A failed rank waits for reports of earlier failures: the shorter time if no other rank can have caused its failure,
# otherwise until rank 0 has polled its connections, at most the longer time.
_REPORT_SECONDS, _MAX_REPORT_SECONDS = 0.5, 15.0
# Log a line after waiting this long for a rank.
_LOG_SECONDS = 60.0
# A rank without a heartbeat for this long is stopped or stuck.
_SILENCE_SECONDS = 15.0
# Rank 0, which may serve the store, waits this long for ranks that still have to read the failure; on several nodes the
# others wait too: a launcher stops all ranks of its node, with the one that reports, when the first has exited.
_LINGER_SECONDS, _READ_SECONDS = 10.0, 3.0
# The kernel closes the connection of a node that is lost some seconds after --peer_timeout.
_MARGIN_SECONDS = 6.0
_BARRIER_SECONDS = 600.0
_DONE = b"d"
MISMATCH = (
    "the ranks run different code: call each collective on all ranks, not after `if accelerator.is_main_process`, in "
    "the same order and with equal shapes"
)


@dataclass(frozen=True)
class Failure:
    """Why a run ends."""

    rank: int
    kind: Literal["failed", "interrupted", "gone", "lost", "late"]
    """It reported so itself (two kinds); its process ended; its node does not answer; a collective hangs or fails."""
    message: str = ""
    permanent: bool = False
    """A restart would fail again."""


class FailureDetector:
    """Runs in each rank. Rank 0 has a connection to every other rank; the others have one, to rank 0."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.peers, self.me = rendezvous.peers, rendezvous.me
        self.failure: Failure | None = None
        self.finished = False
        """Connections may close: the work is done."""
        self._store = self._main_store = rendezvous.store
        self._connections: dict[int, socket.socket] = {}
        self._polls, self._logged, self._peer_timeout, self._intact = 0, -1, 0, time.monotonic()
        watched = range(len(self.peers)) if self.me.rank == 0 else (0, self.me.rank)
        self._progress = {rank: Progress() for rank in watched}
        self._crashes = dict.fromkeys(range(len(self.peers)), b"")
        self._done: set[int] = set()
        self._position = ""  # of an error; otherwise the main thread's
        self._failed, self._all_done, self._exiting = threading.Event(), threading.Event(), threading.RLock()
        """`_exiting` is held by the thread that exits the process, and never released."""

    def start(self, timeout: int) -> None:
        """A node that does not answer for `timeout` seconds is lost. Raises UserError if rank 0 cannot be reached."""
        self._peer_timeout = timeout
        # a second client for the threads: a call that waits blocks all other calls of its client
        self._store = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._connections = {0: self._connect()} if self.me.rank else self._accept()
        for connection in self._connections.values():
            network.keep_alive(connection, timeout)
            os.register_at_fork(after_in_child=connection.close)  # or it stays open when this process dies
        if not faulthandler.is_enabled():  # a crash (gloo aborts a rank whose peer sends more) says where it was
            faulthandler.enable(self._connections[min(self._connections)])
            os.register_at_fork(after_in_child=faulthandler.disable)  # its file may have the connection's number
        for watch in (self._watch_connections, self._watch_store):
            threading.Thread(target=watch, daemon=True, name="failure detector").start()
        atexit.register(self.mark_done)

    def _accept(self) -> dict[int, socket.socket]:
        """Rank 0's connections: all ranks have read the verdict and connect now."""
        master = os.environ["MASTER_ADDR"]
        address = master if network.is_this_machine(master) else self.me.address or master
        connections: dict[int, socket.socket] = {}
        with network.listen(0, network.address_to_bind(address, local=len(nodes_of(self.peers)) == 1)) as server:
            self._store.set("connect", json.dumps([address, server.getsockname()[1]]))
            server.settimeout(2 * _CONNECT_SECONDS)
            absent = {peer.number.encode(): peer.rank for peer in self.peers[1:]}
            while absent:
                try:
                    connection, _ = server.accept()
                except TimeoutError:  # a rank that cannot connect reports why
                    self._declare(Failure(min(absent.values()), "gone"))
                    continue
                connection.settimeout(1.0)
                with contextlib.suppress(OSError, KeyError):  # another program's connection
                    rank = absent.pop(connection.recv(len(self.me.number)))
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
        connection.sendall(self.me.number.encode())  # one segment of TCP
        return connection

    # --- for the main thread

    def report(self, kind: Literal["failed", "interrupted"], message: str, permanent: bool) -> None:
        """Reports this rank's failure. Returns if it is the run's first; otherwise reports the first one and exits."""
        self._exiting.acquire()
        if kind == "interrupted" or permanent:  # no other rank can have caused it
            self._failed.wait(_REPORT_SECONDS)
        else:
            self._wait_for_poll()
        self.failure = self.failure or self._write(Failure(self.me.rank, kind, message, permanent))
        if self.failure.rank != self.me.rank:
            self.exit(self.failure)

    def _wait_for_poll(self) -> None:
        """Returns when a failure is known, or when rank 0 has polled all its connections since the call."""
        with contextlib.suppress(RuntimeError, TimeoutError):  # rank 0 has exited, or is stopped
            polls, *_ = call_with_timeout(_STORE_SECONDS, partial(read, self._main_store, "heartbeat 0"))
            deadline = time.monotonic() + _MAX_REPORT_SECONDS
            while self._progress[0].polls < polls + 2 and time.monotonic() < deadline and not self._failed.wait(0.1):
                pass

    def wait_for_failure(self, error: Exception) -> None:
        """Waits for another rank's failure, which ends this process, for longer than a node may not answer. The others
        learn where `error` was raised."""
        self._position = collectives.position_of(error)
        self._exiting.acquire()
        self._failed.wait(self._peer_timeout + _MARGIN_SECONDS)

    def mark_done(self) -> None:
        """Reports to rank 0 that this rank may exit; from rank 0, that all ranks may."""
        if not self.finished and self.failure is None:
            self.finished = True
            self._send_done()

    def wait_for_all(self) -> None:
        """A barrier: returns when all ranks are done, or after ten minutes: rank 0 may still draw the report."""
        self._position = AT_END
        if self.me.rank:
            self._send_done()
        self._all_done.wait(_BARRIER_SECONDS)
        self.mark_done()
        self.wait_for_readers()

    def _send_done(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(_DONE)

    def wait_for_readers(self) -> None:
        """Rank 0 exits last: it waits until the others have closed their connections. After a failure they wait until
        all ranks have read it."""
        if self.me.rank and self.failure is not None and len(nodes_of(self.peers)) > 1:
            time.sleep(_READ_SECONDS)
        deadline = time.monotonic() + _LINGER_SECONDS
        for connection in self._connections.values() if self.me.rank == 0 else ():
            with contextlib.suppress(OSError):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                while connection.recv(64):
                    pass

    def exit(self, failure: Failure) -> NoReturn:
        """Exits because of another rank's failure."""
        self._exiting.acquire()
        line = f"[rank {self.me.rank} on {self.me.host}] {self.describe(failure)}"
        code = INTERRUPTED if failure.kind == "interrupted" else 1
        if self._is_left_to_launcher(failure):
            write_exit_code(code, line)
        exit_now(code, line if self.reports_for_node(failure) else "", failure.permanent)

    def forbids_restart(self, permanent: bool) -> bool:
        """Also true if one node has no restart left: the others would wait for it."""
        return permanent or (max_restarts() > 0 and any(peer.restarts_left < 1 for peer in self.peers))

    # --- who reports what

    def reports_for_node(self, failure: Failure) -> bool:
        """Whether this process reports, for its node, the failure of another process."""
        culprit = self.peers[failure.rank]
        if self._is_left_to_launcher(failure) or (culprit.node == self.me.node and failure.kind == "failed"):
            return False
        if failure.kind == "interrupted":
            return self.me.rank == 0
        others = [peer.rank for peer in self.peers if peer.node == self.me.node and peer != culprit]
        return self.me.rank == min(others, default=self.me.rank)

    def _is_left_to_launcher(self, failure: Failure) -> bool:
        """Whether our launcher, unless it restarts, reports a process of this node that has ended: it knows by which
        signal, or has our line."""
        by_launcher = EXIT_CODE_FILE in os.environ and attempt() >= max_restarts()
        here = self.peers[failure.rank].node == self.me.node
        return by_launcher and here and failure.kind == "gone" and not failure.message

    def describe(self, failure: Failure) -> str:
        culprit = self.peers[failure.rank]
        who = f"rank {failure.rank} on {culprit.host}"
        machine = name_machine(culprit.host, nodes_of(self.peers)[culprit.node])
        return {
            "interrupted": "interrupted",
            "failed": f"error: {who} failed: {failure.message}",
            "late": f"error: a collective {failure.message}",
            "lost": f"error: lost the connection to {machine}: it or the network is down ({failure.message})",
            "gone": f"error: {who} "
            + (failure.message or "exited without an error message: it was killed, crashed or called os._exit")
            + "; see the output there",
        }[failure.kind] + RESUME_HINT * (failure.kind in ("lost", "gone"))

    def _write(self, failure: Failure) -> Failure:
        """Returns the run's failure: the first that was written, or this one if the store does not answer."""

        def write() -> Failure:
            self._store.compare_set("failure", "", json.dumps(asdict(failure)))
            return Failure(**read(self._store, "failure"))

        try:
            return call_with_timeout(_STORE_SECONDS, write)
        except (RuntimeError, TimeoutError):
            return failure

    def _declare(self, failure: Failure) -> None:
        """Publishes a failure that this rank has detected."""
        # a lost connection to rank 0: its store does not answer either
        self._handle(failure if failure.kind == "lost" and self.me.rank else self._write(failure))

    def _handle(self, failure: Failure) -> None:
        if not self.finished and self.failure is None:
            self.failure = failure
            self._failed.set()
            self.exit(failure)

    # --- ranks that are gone: the connections

    def _watch_connections(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while not self.finished:
                for key, _ in selector.select(_HEARTBEAT_SECONDS):
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                self._polls += 1

    def _receive(self, rank: int) -> bool:
        """Reads from the connection; returns False when it is closed."""
        failure = Failure(rank, "gone")
        try:
            if data := self._connections[rank].recv(1 << 16):
                if data.startswith(_DONE) and not self._crashes[rank]:  # a dump comes in parts
                    self._done.add(rank)
                    self.finished = self.finished or rank == 0
                    if rank == 0 or len(self._done) == len(self.peers) - 1:
                        self._all_done.set()
                else:
                    self._crashes[rank] += data
                return True
            failure = Failure(rank, "gone", self._describe_crash(self._crashes[rank].decode(errors="replace")))
        except ConnectionResetError:
            pass
        except OSError as error:
            failure = Failure(rank, "lost", str(error.strerror or error))
        if rank not in self._done and not self.finished and self.failure is None:
            self._declare(failure)
        return False

    def _describe_crash(self, dump: str) -> str:
        """From what `faulthandler` has written; empty without."""
        if not (crash := collectives.describe_crash(dump)):
            return ""
        here = f"rank {self.me.rank} on {self.me.host} is at {self._position or collectives.main_thread_position()}"
        return f"{crash}; {here}" + f"; perhaps {MISMATCH}" * collectives.is_in_collective(dump)

    def describe_others(self) -> str:
        """Where the other ranks were at their last heartbeats; empty if rank 0, whose store has them, has exited."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            ranks = [peer.rank for peer in self.peers if peer != self.me]
            keys = [f"heartbeat {rank}" for rank in ranks]
            beats = [call_with_timeout(_STORE_SECONDS, partial(read, self._main_store, key)) for key in keys]
            return "; ".join(f"rank {rank} is at {beat[-1]}" for rank, beat in zip(ranks, beats, strict=True))
        return ""

    # --- ranks that are late: the store

    def _watch_store(self) -> None:
        # rank 0 names who does not join; if rank 0 itself is stopped, the others do, later
        timeout = timeout_seconds("ddp_timeout") + (_SILENCE_SECONDS if self.me.rank else 0.0)
        while not self.finished and self.failure is None:
            try:
                call_with_timeout(timeout, self._exchange_heartbeats)
            except TimeoutError:  # rank 0, whose process serves the store, is stopped
                self._handle(Failure(0, "late", f"hangs: the other ranks wait for {self._describe([0])}"))
            except RuntimeError:  # the process that serves it has exited: the connection to rank 0 shows it
                return
            self._check_progress(timeout)
            time.sleep(_HEARTBEAT_SECONDS)

    def _exchange_heartbeats(self) -> None:
        if self._store.check(["failure"]):
            self._handle(Failure(**read(self._store, "failure")))
        position = self._position or collectives.main_thread_position()
        heartbeat = [self._polls, collectives.count(), collectives.waits(), position]
        self._store.set(f"heartbeat {self.me.rank}", json.dumps(heartbeat))
        for rank, progress in self._progress.items():
            if self._store.check([f"heartbeat {rank}"]):
                progress.update(*read(self._store, f"heartbeat {rank}"))

    def position_of_main(self) -> str:
        """Where rank 0 was at its last heartbeat; empty on rank 0."""
        return self._progress[0].position if self.me.rank else ""

    def _check_progress(self, timeout: float) -> None:
        """Ends the run for ranks that are late, or all wait, for longer than `timeout`; before that logs them once per
        collective. Ends it some seconds after an error of NCCL, too, unless a rank that is gone has caused that."""
        now, everyone = time.monotonic(), self._progress.items()
        furthest = max(progress.collectives for _, progress in everyone)
        silent = [r for r, each in everyone if now - each.alive > _SILENCE_SECONDS and r not in self._done]
        late = [rank for rank, progress in everyone if progress.collectives < furthest or rank in silent]
        waiting = [rank for rank, progress in everyone if progress.waits and rank not in silent]
        # no rank, waiting or late, has begun a collective for this long
        idle = now - max(progress.moved for _, progress in everyone)
        still = min(idle, now - max(progress.changed for _, progress in everyone))
        where, hint = "", f"; perhaps {MISMATCH}"
        if len(waiting) == len(everyone) or (waiting and not late):  # with other counts, too: each in another one
            what = "all ranks wait" if len(waiting) == len(everyone) else "no rank goes on"
            idle, where = still, f"{what}: {self._describe(self._progress)}"
        elif late:
            if waiting and all(rank in self._done or self._progress[rank].position == AT_END for rank in late):
                timeout = min(timeout, _LOG_SECONDS)  # `sys.exit()` in the middle: they never come
            apart = [rank for rank in waiting if rank not in late][:1]
            where, hint = f"the other ranks wait for {self._describe(late)}", ""
            where += f"; {self._describe(apart)}" if apart else ""
        line = f"{where}, for {idle:.0f} s{hint}"
        logs = self.me.rank == 0 and self._logged != furthest
        if where and idle > timeout:
            self._declare(Failure((late or waiting)[0], "late", f"hangs: {line}"))
        elif logs and where and idle > min(_LOG_SECONDS, timeout / 2):
            self._logged = furthest
            logger.info(line)
        elif logs and furthest and not where and idle > timeout:  # of ranks in different collectives none is late
            self._logged = furthest
            each = sorted({progress.position: rank for rank, progress in everyone}.values())
            logger.warning(f"no rank begins a collective: {self._describe(each)}, for {idle:.0f} s{hint}")
        if not (error := collectives.nccl_error()):
            self._intact = now
        elif now - self._intact > _MAX_REPORT_SECONDS:
            where = f"rank {self.me.rank} on {self.me.host}; see the output there"
            self._declare(Failure(self.me.rank, "late", f"failed: NCCL reports {error} on {where}"))

    def _describe(self, ranks: Iterable[int]) -> str:
        """`rank 1 on B (it is at read.py:70 read_file < ...)`."""
        peers = (self.peers[rank] for rank in ranks)
        return ", ".join(
            f"rank {peer.rank} on {peer.host} ({self._progress[peer.rank].describe(peer.pid, peer.rank in self._done)})"
            for peer in peers
        )


# A global: the main thread, signal handlers and `failure.exit_process` report failures through it.
current: FailureDetector | None = None


def start(rendezvous: Rendezvous | None, timeout: int) -> None:
    """Makes this process exit when another rank fails, unless any rank has `--failure_detector off`."""
    global current
    if current is not None or rendezvous is None or len(rendezvous.peers) == 1:
        return
    # or NCCL's watchdog aborts this process for an error of CUDA before the main thread has raised and reported it
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    if all(peer.failure_detector == "on" for peer in rendezvous.peers):
        current = FailureDetector(rendezvous)
        current.start(timeout)


def exit_now(code: int, line: str, permanent: bool, announce: Callable[[], object] | None = None) -> NoReturn:
    """Exits without cleaning up the broken process group, which could hang. `line` says why; it is empty if another
    process does. `announce` is called after it. `permanent`: a restart would fail again."""
    with contextlib.suppress(OSError):  # the output is closed
        if line:
            write_exit_code(code)
            logger.error(line)
        sys.stdout.flush()
    if announce:
        announce()
    close_resources()
    if current is not None:
        current.wait_for_readers()
        permanent = current.forbids_restart(permanent)
    if permanent:
        stop_launcher(code)
    os._exit(code)
