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
from dataclasses import dataclass
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
    # or what an outer launcher has set already would not be set again for the processes
    clean_environment(os.environ)
    # for addresses without a host name
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
        return Launcher(request, Path(folder)).run()


@dataclass(frozen=True)
class Rank:
    """A process of this machine."""

    name: str
    process: Popen[bytes]
    error_file: Path
    """Where it leaves its failure."""

    def failure(self, requested: int) -> Failure | None:
        """Its failure, if it has ended with one. `requested`: the stop signal that it was sent."""
        code = self.process.poll()
        if not code:
            return None
        with contextlib.suppress(OSError, ValueError):
            return Failure(**json.loads(self.error_file.read_text(encoding="utf-8")))
        if code - 128 in STOP_SIGNALS:  # it has stopped after a step
            return None
        if code > 0:
            return Failure(f"error: {self.name} exited with code {code}", code)
        name = signal.Signals(-code).name
        if -code == requested:  # before it could handle it
            return Failure(f"error: stopped by {name}", 128 - code, permanent=True)
        hint = ""
        if -code == signal.SIGKILL:
            hint = (
                ", by a user, a scheduler or the kernel if memory ran out (`dmesg | tail`)"
            )
        line = f"error: {self.name} was killed by {name}{hint}{RESUME_HINT}"
        return Failure(line, is_effect=-code == signal.SIGABRT)  # NCCL's watchdog


class Launcher:
    def __init__(self, request: Request, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self.started = time.strftime("%Y%m%d-%H%M%S")
        self.here = request.processes // request.machines.count  # processes on this machine
        self.ranks: list[Rank] = []
        self.signals = StopSignals(prints=False)

    def run(self) -> int:
        request = self.request
        variables = accelerate_environment(request)
        device = "cpu" if request.use_cpu else device_type()
        facts = facts_to_compare(request.script[0], device, request.processes)
        seconds = timeout_seconds("rendezvous_timeout")
        self.store, hosts = meet_launchers(request.machines, facts, seconds)
        self.machines = []
        for number, host in enumerate(hosts):
            first = number * self.here
            self.machines.append((host, list(range(first, first + self.here))))
        attempt = 0
        with self.signals:
            while True:
                failure = self._run_attempt(variables, attempt)
                if failure is None:
                    return max(rank.process.returncode for rank in self.ranks)
                line = failure.text or failure.line
                attempt += 1
                is_last = attempt > request.max_restarts
                if is_last or failure.permanent or self.signals.requested:
                    logger.error(line)
                    return failure.code
                logger.error(f"{line}: restart {attempt} of {request.max_restarts}")

    def _run_attempt(self, variables: dict[str, str], attempt: int) -> Failure | None:
        from torch.distributed import PrefixStore

        store = PrefixStore(f"attempt {attempt}", self.store)
        names = [name_machine(*machine) for machine in self.machines]
        timeout = timeout_seconds("peer_timeout")
        board = Board(store, names, self.request.machines.rank, timeout)
        self._start(variables, attempt)
        try:
            failure = self._watch(board)
            self._stop(signal.SIGTERM)
        except KeyboardInterrupt:  # the second Ctrl-C
            failure = board.publish(Failure("interrupted", INTERRUPTED, permanent=True))
            self._stop(signal.SIGINT)
        return failure

    # --- the processes of this machine

    def _start(self, variables: dict[str, str], attempt: int) -> None:
        request = self.request
        marker = {
            "config_file": str(request.config_file),
            "num_processes": request.processes,
            "argv": request.argv,
            "machines": self.machines,
            "started": self.started,
        }
        self.ranks = []
        common = {
            **os.environ,
            **variables,
            environment.MARKER: json.dumps(marker),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        for local in range(self.here):
            rank = request.machines.rank * self.here + local
            file = self.folder / f"attempt-{attempt}-rank-{local}.json"
            env = {
                **common,
                ERROR_FILE: str(file),
                **self._torch_variables(rank, local, common),
            }
            # in a session of its own: a terminal's Ctrl-C reaches the launcher alone
            process = Popen(
                request.command(), env=env, stdin=DEVNULL, start_new_session=True
            )
            name = f"rank {rank} on {socket.gethostname()}"
            self.ranks.append(Rank(name, process, file))

    def _torch_variables(
        self, rank: int, local: int, env: dict[str, str]
    ) -> dict[str, str]:
        """Empty for a single process of no strategy, which needs no group."""
        sharded = {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"} & env.keys()
        if self.request.processes == 1 and not sharded:
            return {}
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.request.processes),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.here),
            "MASTER_ADDR": self.store.host,
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # a group made by hand finds this store, too
        }

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
            if failure is None and all(
                rank.process.poll() is not None for rank in self.ranks
            ):
                return board.finish()
            if self.signals.requested and not is_passed_on:
                is_passed_on = True
                self._send(self.signals.requested)
            time.sleep(_POLL_SECONDS)

    def _first_failure(self) -> Failure | None:
        """The failure of one of this machine's processes, a cause if there is one."""
        failures = filter(
            None, [rank.failure(self.signals.requested) for rank in self.ranks]
        )
        first = min(failures, key=lambda failure: failure.is_effect, default=None)
        ended = [rank.name for rank in self.ranks if rank.process.poll() == 0]
        if first and first.is_effect and ended:
            line = f"error: {ended[0]} has ended without an error, before the others"
            return Failure(line, is_effect=True)
        return first

    def _stop(self, number: int) -> None:
        """Ends all processes, with a signal first."""
        self._send(number)
        deadline = time.monotonic() + _STOP_SECONDS
        for rank in self.ranks:
            with contextlib.suppress(TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        self._send(signal.SIGKILL)
        for rank in self.ranks:
            rank.process.wait()

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.process.send_signal(number)  # does nothing if it has ended
