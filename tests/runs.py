"""Starting real runs of the recipes in processes of their own, and reading what they left."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "accelerate_configs"
# How each strategy is asked for.
WAYS = {
    "single": [],
    "ddp x2": ["--config_file", "accelerate_configs/ddp.yaml"],
    "ddp x3": ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "3"],
    "zero1 x2": ["--config_file", "accelerate_configs/zero1.yaml"],
    "zero2 x2": ["--config_file", "accelerate_configs/zero2.yaml"],
    "zero3 x2": ["--config_file", "accelerate_configs/zero3.yaml"],
    "fsdp2 x2": ["--config_file", "accelerate_configs/fsdp2.yaml"],
}
# Slower ones.
MORE_WAYS = {
    "zero2 offload x2": ["--config_file", "accelerate_configs/zero2_offload.yaml"],
    "zero3 offload x2": ["--config_file", "accelerate_configs/zero3_offload.yaml"],
    "zero3 x3": ["--config_file", "accelerate_configs/zero3.yaml", "--num_processes", "3"],
    "fsdp2 x3": ["--config_file", "accelerate_configs/fsdp2.yaml", "--num_processes", "3"],
}
_LAUNCHERS = ("accelerate", "deepspeed", "torchrun")
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TOOLKIT_LAUNCH")


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if "error:" in line]

    def says_in_one_line(self, *parts: str) -> None:
        """Of an error, without a traceback; only where it ends in a colon more lines belong to it."""
        assert self.code != 0
        assert "Traceback" not in self.err
        assert len(self.error_lines) == 1, self.err
        (line,) = self.error_lines
        told = self.err[self.err.index(line) :] if line.endswith(":") else line
        assert [part for part in parts if part not in told] == [], told

    def succeeded(self) -> Finished:
        """Itself, if it has."""
        assert self.code == 0, self.err[-3000:]
        return self


def environment() -> dict[str, str]:
    """For a new process: this one's, without what a launcher left in it."""
    clean = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
    return {**clean, "PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def port_of(command: Sequence[str | Path]) -> contextlib.AbstractContextManager[Any]:
    """`with port_of(command):` one at a time where the launcher that is typed takes its default port, 29500."""
    if Path(command[0]).name in _LAUNCHERS:
        return FileLock(Path(tempfile.gettempdir()) / "toolkit-tests-port-29500.lock")
    return contextlib.nullcontext()


def begin(command: Sequence[str | Path], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts a command from the repository's root, in a session of its own."""
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env={**environment(), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start(
    command: Sequence[str | Path], seconds: float = 240, env: dict[str, str] | None = None, fresh: bool = False
) -> Finished:
    """Runs a command from the repository's root; ends it and its children when it takes too long. What is installed
    with the environment begins in a fork (tests/fork_server.py) unless it is to be `fresh`, as a user's."""
    program, *words = map(str, command)
    if program in ("toolkit", *_LAUNCHERS) and not fresh:
        path = Path(sys.executable).with_name(program)
        with port_of(command):
            return forks().run(["-m", *command] if program == "toolkit" else [path, *words], seconds, env)
    with port_of(command):
        process = begin(command, env)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{' '.join(map(str, command))} did not end in {seconds} s:\n{err[-3000:]}") from None
    return Finished(process.returncode, out, err)


def recipe(*arguments: str | Path, script: str = "recipes/cls.py", seconds: float = 240, **options: Any) -> Finished:
    """`python recipes/cls.py ARGUMENTS`, from a process that has imported all it needs."""
    return forks().run([script, *arguments], seconds, **options)


def train(*arguments: Any) -> str:
    """What recipes/cls.py reported, and its results after that; it must succeed."""
    finished = recipe(*arguments).succeeded()
    return finished.err + finished.out


def failed(*arguments: Any, **options: Any) -> str:
    """The one error that recipes/cls.py ended with."""
    finished = recipe(*arguments, **options)
    assert finished.code == 1, finished.err
    assert "Traceback" not in finished.err, finished.err
    return finished.err.partition("error: ")[2].strip()


def groups(module: str, words: Mapping[int, Sequence[str | Path]], seconds: float = 240) -> Finished:
    """`torchrun -m MODULE WORDS` for each number of processes, at the same time; each must succeed."""
    listed = json.dumps({processes: [str(word) for word in some] for processes, some in words.items()})
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOG_LEVEL": "error"}
    return forks().run(["tests/groups.py", module, listed], seconds, environment).succeeded()


def run_of(settings: Sequence[str], folder: Path) -> Path:
    """The folder of a run of one process with these settings, to compare others with."""
    train(*settings, "--output_dir", folder)
    return folder


@dataclass
class Started:
    """A process of the fork server's, the first of a group."""

    server: subprocess.Popen[str]
    pid: int
    folder: Path
    code: int | None = None

    def wait(self, seconds: float) -> int:
        """Its exit code; kills the group after that time."""
        if self.code is None:
            timer = threading.Timer(seconds, os.killpg, (self.pid, signal.SIGKILL))
            timer.start()
            assert self.server.stdout
            self.code, late = int(self.server.stdout.readline()), not timer.is_alive()
            timer.cancel()
            assert not late, f"it did not end in {seconds} s:\n{self.left().err[-3000:]}"
        return self.code

    def left(self) -> Finished:
        assert self.code is not None
        return Finished(self.code, *((self.folder / name).read_text() for name in ("out", "err")))


@dataclass
class Forks:
    """Processes started by tests/fork_server.py, one after the other."""

    server: subprocess.Popen[str]

    @contextlib.contextmanager
    def begin(
        self, words: Sequence[str | Path], env: dict[str, str] | None = None, largest_file: int | None = None
    ) -> Iterator[Started]:
        """What still runs at the end is killed. As on a full disk, nothing is written beyond `largest_file` bytes."""
        assert self.server.stdin
        assert self.server.stdout
        with tempfile.TemporaryDirectory() as folder:
            request = {"argv": [str(word) for word in words], "env": {**environment(), **(env or {})},
                       "out": f"{folder}/out", "err": f"{folder}/err", "largest_file": largest_file}  # fmt: skip
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            started = Started(self.server, int(self.server.stdout.readline()), Path(folder))
            try:
                yield started
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait(60)

    def run(
        self, words: Sequence[str | Path], seconds: float, env: dict[str, str] | None = None, **options: Any
    ) -> Finished:
        with self.begin(words, env, **options) as started:
            started.wait(seconds)
            return started.left()


@functools.cache
def forks() -> Forks:
    """This session's. It ends with its standard input."""
    return Forks(subprocess.Popen([sys.executable, "tests/fork_server.py"], cwd=ROOT, env=environment(), text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE))  # fmt: skip


def lines_of(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:  # a text in it may hold other ends of lines (U+0085)
        return [json.loads(line) for line in file]


def edit_json(path: Path, **changed: Any) -> None:
    """These keys have these values from now on."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changed), encoding="utf-8")


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in lines_of(folder / "metrics.jsonl")]


def digests(folder: Path) -> dict[str, str]:
    """Every file's checksum and every link's target, but for the lock."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[path.relative_to(folder).as_posix()] = str(path.readlink())
        elif path.is_file() and path.name != ".lock":
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def wait_for_steps(
    run: Path, steps: int = 1, processes: Iterable[subprocess.Popen[str]] = (), seconds: float = 120
) -> None:
    """Until it has logged so many; before that none of the processes may end."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + seconds
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < steps:
        assert time.monotonic() < deadline, f"no {steps} steps in {seconds} s"
        for process in processes:
            assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.01)
