"""Recipes that a command runs as child processes: started, logged, stopped with their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

from toolkit.errors import last_error
from toolkit.launch.exit_state import stop_with_parent

_POLL_SECONDS = 1.0


def run_child(
    words: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    while_running: Callable[[], object] = lambda: None,
) -> str:
    """Runs `python WORDS`; its output is appended to `log`. Returns its error, empty if it ended
    well. `while_running` is called about every second; if it raises, the child is stopped."""
    command = [sys.executable, *words]
    with log.open("ab") as output:
        start = output.tell()
        child = Popen(
            command, stdin=DEVNULL, stdout=output, stderr=STDOUT, start_new_session=True,
            preexec_fn=stop_with_parent, env={**os.environ, **(env or {})},
        )  # fmt: skip
        try:
            while child.poll() is None:
                while_running()
                with contextlib.suppress(TimeoutExpired):
                    child.wait(_POLL_SECONDS)
        finally:
            child.terminate()
            child.wait()
    if child.returncode == 0:
        return ""
    killed = ""
    if child.returncode < 0:
        killed = f"killed by {signal.Signals(-child.returncode).name}; "
    return f"{killed}{last_error(log, start)} ({log})"
