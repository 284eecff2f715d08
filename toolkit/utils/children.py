"""Recipes that a command runs as child processes: started, logged, stopped with their parent, and
ended when they hang."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

import psutil

_DUMP_SECONDS = 10.0  # for Python to write the stacks of a process that hangs


def run_child(
    words: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> str:
    """Runs `python WORDS`; its output is appended to `log`. Returns its error, empty if it ended
    well; one that has not ended after `seconds` hangs. An exception, as of a signal handler, stops
    the child."""
    with log.open("ab") as output:
        start = output.tell()
        child = Popen(
            [sys.executable, *words], stdin=DEVNULL, stdout=output, stderr=STDOUT,
            start_new_session=True, preexec_fn=_begin,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})},
        )  # fmt: skip
        try:
            child.wait(seconds)
        except TimeoutExpired:
            _abort(child.pid)
            return f"hangs; the stacks of its processes are in {log}"
        finally:
            child.terminate()
            child.wait()
    if child.returncode == 0:
        return ""
    error = f"{_last_error(log, start)} ({log})"
    if child.returncode < 0:
        return f"killed by {signal.Signals(-child.returncode).name}; {error}"
    return error


def _last_error(log: Path, start: int) -> str:
    """The last error line of a run's output from byte `start` on, or its last line."""
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines() or [""]
    for line in reversed(lines):
        if "error: " in line:
            return line.partition("error: ")[2]
    return lines[-1]


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """Makes Linux send a signal to this process when its parent ends, also after `exec`.

    The kernel watches the thread that forked, so that thread must not end.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # prctl(2), PR_SET_PDEATHSIG
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, number)


def _begin() -> None:
    """In the child: no core files of those that `_abort` ends."""
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )
    stop_with_parent()


def _abort(pid: int) -> None:
    """Ends a child and its ranks; Python's fault handler writes their stacks to the log."""
    child = psutil.Process(pid)
    processes = [*child.children(recursive=True), child]
    for number in (signal.SIGABRT, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(processes, _DUMP_SECONDS)
