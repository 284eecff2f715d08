"""A group of processes that runs one job after another, for tests/matrix.py. Each rank is tests/matrix_rank.py.

Its processes are forks of tests/fork_server.py, known by files in the group's folder, so that every xdist worker can
use them, one at a time.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.runs import Process, fork, forked, free_port

_GRACE_SECONDS = 10.0  # for the other ranks, when one has failed


class ProcessGroup:
    def __init__(self, folder: Path, config_file: str | None, processes: int, pages: str) -> None:
        """`config_file`: of accelerate, None for a process without a launcher. `pages`: names of jobs, by commas, whose
        run folders get a report and a model card, the slowest parts of a short run."""
        self._config_file, self._processes, self._pages = config_file, processes, pages
        folder.mkdir(parents=True, exist_ok=True)
        self._started = folder / "processes.json"
        self.lock = FileLock(folder / ".lock")
        """Held by the worker that uses the group."""

    def run(
        self, recipe: str, words: list[str], reports: Path, seconds: float
    ) -> dict[int, dict[str, Any]]:
        """Runs the `main` of a module with these arguments on all ranks. Returns what each rank has reported to the
        folder `reports`: `error` (the exception's text or empty), `kind` (its class) and `traceback`. A rank is missing
        that was killed, or did not end within `seconds`."""
        ranks = self._living() or self._start()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        job = {"recipe": recipe, "words": words, "reports": str(reports), "seconds": seconds}
        for process in ranks:
            process.write_line(json.dumps(job | {"cores": cores}))
        found = self._wait(ranks, reports, seconds)
        if len(found) < len(ranks):
            self.stop(ranks)
        return found

    def _wait(
        self, ranks: list[Process], reports: Path, seconds: float
    ) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while True:
            # before the reports: one may report and end
            ended = [process.poll() is not None for process in ranks]
            found = {}
            for rank in range(len(ranks)):
                if (file := reports / f"rank{rank}.json").exists():
                    found[rank] = json.loads(file.read_text())
            if len(found) == len(ranks):
                return found
            if any(report["error"] for report in found.values()) or any(ended):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > deadline or all(ended):
                return found
            time.sleep(0.01)

    def _living(self) -> list[Process] | None:
        if not self._started.exists():
            return None
        ranks = [forked(Path(folder), pid) for folder, pid in json.loads(self._started.read_text())]
        if all(process.poll() is None for process in ranks):
            return ranks
        self.stop(ranks)
        return None

    def _start(self) -> list[Process]:
        count = self._processes
        script = ["tests/matrix_rank.py"]
        env = {"TESTS_WITHOUT_PAGES": self._pages, "OMP_NUM_THREADS": "1"}
        if self._config_file is not None:
            script.append(self._config_file)
            env |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        ranks = []
        for rank in map(str, range(count)):
            place = {"RANK": rank, "LOCAL_RANK": rank} if self._config_file else {}
            ranks.append(fork(script, env | place, stdin=True))
        started = [(str(process.folder), process.pid) for process in ranks]
        self._started.write_text(json.dumps(started))
        return ranks

    def stop(self, ranks: list[Process]) -> None:
        for process in ranks:
            process.kill_session()
        self._started.unlink(missing_ok=True)
