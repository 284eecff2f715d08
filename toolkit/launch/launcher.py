"""Starts this machine's processes and watches them; the launchers of several machines watch each
other.

The launcher of machine 0 serves a store, in which the launchers meet and count their heartbeats,
and the processes of each attempt form their group.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

from toolkit.launch import environment
from toolkit.launch.environment import ERROR_FILE, timeout_seconds
from toolkit.launch.heartbeat import RESUME_HINT, Board, Failure
from toolkit.launch.machines import name_machine
from toolkit.launch.meet import device_type, facts_to_compare, meet_launchers
from toolkit.launch.options import Request, accelerate_environment, clean_environment
from toolkit.launch.signals import INTERRUPTED, STOP_SIGNALS, StopSignals
from toolkit.utils.children import stop_with_parent
from toolkit.utils.log import logger

_POLL_SECONDS = 0.1
# Time to end by themselves, when the run has failed or after a second Ctrl-C.
_STOP_SECONDS = 10.0
# A lost connection is the effect of another failure: wait this long for that one.
_CAUSE_SECONDS = 3.0


def launch(request: Request) -> int:
    """Runs what was requested; returns the exit code. Raises UserError if it cannot start."""
    if environment.accelerate_options():
        stop_with_parent()  # `accelerate launch` forwards no stop signal
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # for addresses without a host name
    with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
        return Launcher(request, Path(folder)).run()


class Launcher:
    def __init__(self, request: Request, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self.here = request.processes // request.machines.count  # processes on this machine
        self.first_rank = request.machines.rank * self.here
        self.host = socket.gethostname()
        self.ranks: list[Popen[bytes]] = []
        self.signals = StopSignals(prints=False)

    def run(self) -> int:
        request = self.request
        variables = accelerate_environment(request)
        device = "cpu" if request.use_cpu else device_type()
        facts = facts_to_compare(request.script[0], device, request.processes)
        self.met = meet_launchers(request.machines, facts, timeout_seconds("rendezvous_timeout"))
        with self.signals:
            for attempt in range(request.max_restarts + 1):
                failure = self._run_attempt(variables, attempt)
                if failure is None:
                    return max(rank.returncode for rank in self.ranks)
                line = failure.text or failure.line
                is_last = attempt == request.max_restarts
                if is_last or failure.permanent or self.signals.requested:
                    break
                logger.error(f"{line}: restart {attempt + 1} of {request.max_restarts}")
        logger.error(line)
        return failure.code

    def _run_attempt(self, variables: dict[str, str], attempt: int) -> Failure | None:
        board = self._make_board(attempt)
        self._start(variables, attempt)
        try:
            failure = self._watch(board)
            self._stop(signal.SIGTERM)
        except KeyboardInterrupt:  # the second Ctrl-C
            failure = board.publish(Failure("interrupted", INTERRUPTED, permanent=True))
            self._stop(signal.SIGINT)
        return failure

    def _make_board(self, attempt: int) -> Board:
        from torch.distributed import PrefixStore

        names = [name_machine(*machine) for machine in self._machines()]
        store = PrefixStore(f"attempt {attempt}", self.met.store)
        return Board(store, names, self.request.machines.rank, timeout_seconds("peer_timeout"))

    def _machines(self) -> list[tuple[str, list[int]]]:
        """(host, its ranks) of each."""
        starts = range(0, self.request.processes, self.here)
        ranks = [list(range(start, start + self.here)) for start in starts]
        return list(zip(self.met.hosts, ranks, strict=True))

    # --- the processes of this machine

    def _start(self, variables: dict[str, str], attempt: int) -> None:
        request = self.request
        marker = {**request.marker(), "machines": self._machines()}
        self.ranks = []
        common = {
            **clean_environment(os.environ), **variables,
            environment.MARKER: json.dumps(marker),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(request.max_restarts),
        }  # fmt: skip
        for local in range(self.here):
            file = self._error_file(local)
            file.unlink(missing_ok=True)
            env = {**common, ERROR_FILE: str(file), **self._torch_variables(local, common)}
            # in a session of its own: a terminal's Ctrl-C reaches the launcher alone
            rank = Popen(request.command(), env=env, stdin=DEVNULL, start_new_session=True)
            self.ranks.append(rank)

    def _torch_variables(self, local: int, env: dict[str, str]) -> dict[str, str]:
        """None for a single process of no strategy, which needs no group."""
        sharded = {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"} & env.keys()
        if self.request.processes == 1 and not sharded:
            return {}
        return {
            "RANK": str(self.first_rank + local),
            "WORLD_SIZE": str(self.request.processes),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.here),
            "MASTER_ADDR": self.met.store.host,
            "MASTER_PORT": str(self.met.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # a group made by hand finds this store, too
        }

    def _error_file(self, local: int) -> Path:
        return self.folder / f"rank-{local}.json"

    def _watch(self, board: Board) -> Failure | None:
        """The run's first failure on any machine; None when all have ended well. Passes the first
        stop signal on: ranks stop after their step, with a checkpoint."""
        cause_seconds = _CAUSE_SECONDS
        if self.request.machines.count > 1:
            cause_seconds += timeout_seconds("peer_timeout")
        effect_since = float("inf")
        is_passed_on = False
        while True:
            failure = board.failure() or self._first_failure()
            now = time.monotonic()
            if failure and failure.is_effect:
                effect_since = min(effect_since, now)
            if failure and (not failure.is_effect or now > effect_since + cause_seconds):
                return board.publish(failure)
            if failure is None and all(rank.poll() is not None for rank in self.ranks):
                return board.finish()
            if self.signals.requested and not is_passed_on:
                is_passed_on = True
                self._send(self.signals.requested)
            time.sleep(_POLL_SECONDS)

    def _first_failure(self) -> Failure | None:
        """The failure of one of this machine's processes, a cause if there is one."""
        failures = []
        for local, rank in enumerate(self.ranks):
            code = rank.poll() or 0
            stopped = code - 128 in STOP_SIGNALS and not self._error_file(local).exists()
            if code and not stopped:
                failures.append(self._describe(local, code))
        first = min(failures, key=lambda failure: failure.is_effect, default=None)
        ended = [local for local, rank in enumerate(self.ranks) if rank.poll() == 0]
        if first and first.is_effect and ended:
            who = f"rank {self.first_rank + ended[0]}"
            return replace(first, line=f"{first.line} ({who} has ended without an error)")
        return first

    def _describe(self, local: int, code: int) -> Failure:
        who = f"rank {self.first_rank + local} on {self.host}"
        with contextlib.suppress(OSError, ValueError):
            return Failure(**json.loads(self._error_file(local).read_text(encoding="utf-8")))
        if code > 0:
            return Failure(f"error: {who} exited with code {code}", code)
        name = signal.Signals(-code).name
        if -code == self.signals.requested:  # before it could handle it
            line = "interrupted" if -code == signal.SIGINT else f"error: stopped by {name}"
            return Failure(line, 128 - code, permanent=True)
        hint = ""
        if -code == signal.SIGKILL:
            hint = ", by a user, a scheduler or the kernel if memory ran out (`dmesg | tail`)"
        line = f"error: {who} was killed by {name}{hint}{RESUME_HINT}"
        return Failure(line, is_effect=-code == signal.SIGABRT)  # NCCL's watchdog

    def _stop(self, number: int) -> None:
        """Ends all processes, with a signal first."""
        self._send(number)
        deadline = time.monotonic() + _STOP_SECONDS
        for rank in self.ranks:
            with contextlib.suppress(TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))
        self._send(signal.SIGKILL)
        for rank in self.ranks:
            rank.wait()

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)
