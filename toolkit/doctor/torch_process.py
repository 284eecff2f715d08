"""The process that imports torch for the doctor (`torch_worker`), from the outside."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.launch.relaunch import clean_environment

_SCRIPT = Path(__file__).with_name("torch_worker.py")
_KEPT_CHARACTERS = 4000


class TorchProcess:
    """`with TorchProcess() as torch:` starts importing at once; leaving the block ends the process in any case."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = {**clean_environment(os.environ), **(env or {})}
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._said: dict[str, Any] | None = None
        self._errors = ""
        self._lock = threading.Lock()

    def __enter__(self) -> TorchProcess:
        self._process = subprocess.Popen(
            # -P: the modules beside the script are no top-level modules of anybody's
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._env,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C is ours to pass on
        )
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        for thread in self._threads:
            thread.join(1.0)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in self._process.stdout:
                with contextlib.suppress(json.JSONDecodeError):  # a library's word
                    self._lines.put(json.loads(line))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)  # its exit code says why
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stderr:
                self._errors = (self._errors + line)[-_KEPT_CHARACTERS:]

    @property
    def errors(self) -> str:
        """The end of what it wrote to its error stream."""
        return self._errors.strip()

    def sees(self, seconds: float) -> dict[str, Any]:
        """What torch sees of this machine; `{"broken": why}` where it cannot be imported, in time or at all."""
        with self._lock:
            if self._said is None:
                self._said = self._next(seconds) or {"broken": self._why_nothing(seconds)}
            return self._said

    def _why_nothing(self, seconds: float) -> str:
        code = self._process.poll()
        if code is None:
            return f"importing torch takes longer than {seconds:.0f} s"
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"importing torch ends the process ({ended}): {self.errors[-500:]}"

    def _next(self, seconds: float) -> dict[str, Any] | None:
        try:
            return self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def all_reduce(self, order: Mapping[str, Any], seconds: float) -> dict[str, dict[str, Any]]:
        """Backend -> {ok, seconds, megabytes, error}, of each that was begun; ended after `seconds` in all.

        `order`: rank, world_size, address, port, backends, megabytes, seconds (each backend's own patience), env
        (variables that count where the user has not set them).
        """
        assert self._process.stdin is not None
        found: dict[str, dict[str, Any]] = {}
        deadline, begun = time.monotonic() + seconds, str(order["backends"][0])
        try:
            self._process.stdin.write(json.dumps(dict(order)) + "\n")
            self._process.stdin.flush()
        except OSError:
            return {begun: {"ok": False, "error": "the process that imports torch has ended"}}
        while len(found) < len(order["backends"]):
            said = self._next(deadline - time.monotonic())
            if said is None:
                ended = self._process.poll() is not None
                why = f"it ended: {self.errors[-500:]}" if ended else f"it did not end within {seconds:.0f} s"
                found[begun] = {"ok": False, "error": why}
                break
            if "begun" in said:
                begun = str(said["begun"])
            elif "backend" in said:
                found[str(said["backend"])] = said
        return found
