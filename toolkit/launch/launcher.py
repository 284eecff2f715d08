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
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from toolkit.launch import environment, signals
from toolkit.launch.environment import timeout_seconds
from toolkit.launch.exit_state import ERROR_FILE, RESUME_HINT
from toolkit.launch.heartbeat import Board, Failure
from toolkit.launch.machines import name_machine
from toolkit.launch.meet import device_type, facts_to_compare, meet_launchers
from toolkit.launch.options import Request, accelerate_environment, clean_environment
from toolkit.utils.children import stop_with_parent
from toolkit.utils.log import logger

_POLL_SECONDS = 0.1
# Time to end by themselves after SIGTERM, when the run has failed, or after a second Ctrl-C.
_STOP_SECONDS = 10.0
# A lost connection is the effect of another failure: wait this long for that one.
_CAUSE_SECONDS = 3.0


def launch(request: Request) -> int:
    """Runs what was requested; returns the exit code. Raises UserError if it cannot start."""
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
        self.signal = 0
        """The first stop signal that came."""
        self.deadline = float("inf")
        """When processes are killed."""
        self.oom_kills = _count_oom_kills()
        if environment.accelerate_launch_words():
            stop_with_parent()  # `accelerate launch` forwards no stop signal
        signals.install_handler(self._forward)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # for addresses without a host name

    def run(self) -> int:
        variables = accelerate_environment(self.request)
        device = "cpu" if self.request.use_cpu else device_type()
        facts = facts_to_compare(self.request.script[0], device, self.request.processes)
        self.met = meet_launchers(
            self.request.machines, facts, timeout_seconds("rendezvous_timeout")
        )
        restarts = self.request.max_restarts
        attempt = 0
        while True:
            board = self._make_board(attempt)
            self._start(variables, attempt)
            failure = self._watch(board)
            self._stop()
            if failure is None:
                return max(rank.returncode for rank in self.ranks)
            line = failure.text or failure.line
            if failure.permanent or self.signal or attempt == restarts:
                logger.error(line)
                return failure.code
            attempt += 1
            logger.error(f"{line}: restart {attempt} of {restarts}")

    # --- before the start

    def _make_board(self, attempt: int) -> Board:
        from torch.distributed import PrefixStore

        names = [name_machine(*machine) for machine in self._machines()]
        store = PrefixStore(f"attempt {attempt}", self.met.store)
        return Board(store, names, self.request.machines.rank, timeout_seconds("peer_timeout"))

    def _machines(self) -> list[tuple[str, list[int]]]:
        """(host, its ranks) of each."""
        ranks = list(range(self.request.processes))
        starts = range(0, self.request.processes, self.here)
        return [
            (host, ranks[start : start + self.here])
            for host, start in zip(self.met.hosts, starts, strict=True)
        ]

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
        if request.module and str(Path.cwd()) not in map(os.path.abspath, sys.path):
            common["PYTHONSAFEPATH"] = "1"  # `-m` would import from this folder, unlike now
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
        """The run's first failure on any machine; None when all have ended well."""
        cause_seconds = _CAUSE_SECONDS
        if self.request.machines.count > 1:
            cause_seconds += timeout_seconds("peer_timeout")
        effect_since = float("inf")
        while True:
            failure = board.failure() or self._first_failure()
            now = time.monotonic()
            if failure and failure.is_effect:
                effect_since = min(effect_since, now)
            if failure and (not failure.is_effect or now > effect_since + cause_seconds):
                return board.publish(failure)
            if failure is None and all(rank.poll() is not None for rank in self.ranks):
                return board.finish()
            if now > self.deadline:
                self._send(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _first_failure(self) -> Failure | None:
        """The failure of one of this machine's processes, a cause if there is one."""
        failures = []
        for local, rank in enumerate(self.ranks):
            code = rank.poll() or 0
            stopped = code - 128 in signals.STOP_SIGNALS and not self._error_file(local).exists()
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
        if -code == self.signal or time.monotonic() > self.deadline:
            return Failure(_stop_line(self.signal), 128 + self.signal, permanent=True)
        hint = ""
        if -code == signal.SIGKILL:
            hint = ", by a user, a scheduler or a memory guard"
            if _count_oom_kills() > self.oom_kills:
                hint = ", probably by the kernel: out of memory (`dmesg | tail`)"
        line = f"error: {who} was killed by {signal.Signals(-code).name}{hint}{RESUME_HINT}"
        return Failure(line, is_effect=-code == signal.SIGABRT)  # NCCL's watchdog

    def _stop(self) -> None:
        self._send(signal.SIGTERM)
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

    def _forward(self, number: int, _: Any) -> None:
        """Ranks stop after their step, with a checkpoint; at once after a second Ctrl-C."""
        if not self.ranks:
            os.write(2, f"{_stop_line(number)}\n".encode())
            raise SystemExit(128 + number)
        if self.signal and number == signal.SIGINT:
            self.deadline = time.monotonic() + _STOP_SECONDS
        self.signal = self.signal or number
        self._send(number)


def _stop_line(number: int) -> str:
    if number == signal.SIGINT:
        return "interrupted"
    return f"error: stopped by {signal.Signals(number).name}"


def _count_oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory since boot; 0 if it counts none."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
