"""Starts processes for tests, and reads what a run wrote.

    start(["toolkit", "predict", ...])      runs a command: its exit code and output
    recipe("--train_file", ...)             runs `python recipes/cls.py`
    fork(["recipes/cls.py", ...])           starts a Python program in a fork of a process with warm imports
    begin([...])                            starts any program
    groups(MODULE, {2: [...], 3: [...]})    runs a module on 2 ranks and on 3

Jobs that share processes: tests/matrix.py. Two machines: tests/hosts.py.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "accelerate_configs"
# The arguments for each strategy; tests/matrix.py has the same names, and more.
_STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
WAYS: dict[str, list[str]] = {
    "single": [],
    **{f"{name} x2": ["--config_file", f"accelerate_configs/{name}.yaml"] for name in _STRATEGIES},
    "ddp x3": ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "3"],
}
CLASSIFIER = ("sklearn.metrics", "sklearn.linear_model", "toolkit.report.html", "toolkit.report.card", "toolkit.run",
              "toolkit.training.prepare", "toolkit.launch.launcher", "recipes.cls")  # fmt: skip
"""What a fork server imports for recipes/cls.py: no package of an extra."""
_servers: list[subprocess.Popen[bytes]] = []
_LAUNCHERS = ("accelerate", "deepspeed", "torchrun")
_LAUNCHER_VARIABLES = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TOOLKIT_LAUNCH".split()


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases of a parametrized test; all but `quick` are marked slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def words_of(words: Iterable[Any]) -> list[str]:
    """The words of a command line; functions are called, for a file that must be made."""
    return [str(word() if callable(word) else word) for word in words]


@dataclass(frozen=True)
class Finished:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if "error:" in line]

    def says_in_one_line(self, *parts: str) -> None:
        """One error line, or more if it ends in a colon, contains `parts`; there is no traceback."""
        assert self.code != 0
        assert "Traceback" not in self.err
        assert len(self.error_lines) == 1, self.err
        (line,) = self.error_lines
        message = self.err[self.err.index(line) :] if line.endswith(":") else line
        assert [part for part in parts if part not in message] == [], message

    def succeeded(self) -> Self:
        assert self.code == 0, self.err[-3000:]
        return self


def environment() -> dict[str, str]:
    """This process's environment, without a launcher's variables."""
    clean = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
    return {**clean, "PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def port_of(command: Sequence[str | Path]) -> contextlib.AbstractContextManager[Any]:
    """A lock for launchers that use the default port 29500."""
    if Path(command[0]).name in _LAUNCHERS:
        return FileLock(Path(tempfile.gettempdir()) / "toolkit-tests-port-29500.lock")
    return contextlib.nullcontext()


class Process:
    """A process in a new session, with its output in files. Leaving the context kills the session."""

    def __init__(
        self, folder: Path, pid: int, poll: Callable[[], int | None], stdin: int = -1
    ) -> None:
        self.pid, self.poll, self.folder = pid, poll, folder
        self._stdin = stdin

    def finish(self, seconds: float = 60) -> Finished:
        """Waits for its end. After `seconds` kills the session and raises AssertionError."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill_session()
                ended = self.finish()
                parts = (f"it did not end in {seconds} s:", ended.out[-3000:], ended.err[-3000:])
                raise AssertionError("\n".join(parts))
            time.sleep(0.02)
        files = (self.folder / name for name in ("out", "err"))
        return Finished(code, *(file.read_text("utf-8", "replace") for file in files))

    def write_line(self, line: str = "go") -> None:
        """Writes a line to its standard input."""
        # this worker may not be the one that started it
        pipe = os.open(self.folder / "in", os.O_RDWR)
        os.write(pipe, f"{line}\n".encode())
        os.close(pipe)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_session()
        if self._stdin >= 0:
            os.close(self._stdin)
        shutil.rmtree(self.folder, ignore_errors=True)


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="process-", dir=os.environ.get("TOOLKIT_TESTS_FOLDER")))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def begin(words: Sequence[Any], env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Process:
    folder = _new_folder()
    with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
        process = subprocess.Popen(
            words_of(words), cwd=cwd, env={**environment(), **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=out, stderr=err, start_new_session=True)  # fmt: skip
    return Process(folder, process.pid, process.poll)


def fork(
    words: Sequence[Any], env: Mapping[str, str] | None = None, largest_file: int | None = None,
    stdin: bool = False, imported: tuple[str, ...] = (), early: Mapping[str, str] | None = None, cwd: Path = ROOT,
    inside: Mapping[str, Any] | None = None,
) -> Process:  # fmt: skip
    """Starts `python WORDS` in a fork of tests/fork_server.py. Files cannot grow beyond `largest_file` bytes, as on a
    full disk. A server with only these modules `imported` forks faster. `early`: variables that are read on import.
    `inside`: arguments of the server's `enter`."""
    folder, pipe = _new_folder(), -1
    if stdin:
        os.mkfifo(folder / "in")
        pipe = os.open(folder / "in", os.O_RDWR)
    variables = {**environment(), **(early or {}), **(env or {})}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    request = {"argv": words_of(words), "env": variables, "folder": str(folder), "cwd": str(cwd),
               "cores": cores, "largest_file": largest_file, "inside": inside}  # fmt: skip
    server = _fork_server(imported, tuple((early or {}).items()))
    print(json.dumps(request), file=server, flush=True)
    answer = server.readline()
    assert answer, "the fork server has ended"
    return forked(folder, int(answer), pipe)


def forked(folder: Path, pid: int, pipe: int = -1) -> Process:
    """A process that `fork` has started, perhaps in another worker of xdist."""

    def poll() -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return int((folder / "code").read_text())
        return None

    return Process(folder, pid, poll, pipe)


@functools.cache
def _fork_server(imported: tuple[str, ...], early: tuple[tuple[str, str], ...]) -> Any:
    """A connection to the server for these imports and variables, which all workers of a session share."""
    name = hashlib.sha256(repr((imported, early)).encode()).hexdigest()[:8]
    folder = os.environ.get("TOOLKIT_TESTS_FOLDER") or tempfile.mkdtemp()
    path = Path(folder) / f"fork-server-{name}"
    client = socket.socket(socket.AF_UNIX)
    with FileLock(f"{path}.lock"):
        if client.connect_ex(str(path)):  # it has not started, or has ended
            path.unlink(missing_ok=True)
            command = [sys.executable, "tests/fork_server.py", path, *imported]
            env, none = {**environment(), **dict(early)}, subprocess.DEVNULL
            server = subprocess.Popen(command, cwd=ROOT, env=env, stdin=none, stdout=none)
            _servers.append(server)
            while client.connect_ex(str(path)):
                assert server.poll() is None
                time.sleep(0.05)
    return client.makefile("rw")


def start(
    command: Sequence[Any], seconds: float = 240, env: Mapping[str, str] | None = None, fresh: bool = False,
    cwd: Path = ROOT,
) -> Finished:  # fmt: skip
    """Runs a command. `toolkit` and launchers start in a fork, unless `fresh` or in another folder."""
    program, *words = words_of(command)
    with port_of(command):
        if program not in ("toolkit", *_LAUNCHERS) or fresh or cwd != ROOT:
            process = begin([program, *words], env, cwd)
        elif program == "toolkit":
            process = fork(["-m", program, *words], env)
        else:
            process = fork([Path(sys.executable).with_name(program), *words], env)
        with process:
            return process.finish(seconds)


def recipe(
    *arguments: Any, script: str | Path = "recipes/cls.py", seconds: float = 240, env: Mapping[str, str] | None = None,
    pages: bool = False, **options: Any,
) -> Finished:  # fmt: skip
    """Runs `python SCRIPT ARGUMENTS` in a fork. Without `pages` report.html is empty, and no model card and no
    baselines.json are written."""
    variables = {**(env or {})} if pages else {"TESTS_WITHOUT_PAGES": "", **(env or {})}
    with fork([script, *arguments], variables, **options) as process:
        return process.finish(seconds)


def train(*arguments: Any, pages: bool = False) -> str:
    """stderr and stdout of recipes/cls.py, which must succeed."""
    finished = recipe(*arguments, pages=pages).succeeded()
    return finished.err + finished.out


def failed(*arguments: Any, **options: Any) -> str:
    """The error line of recipes/cls.py, which must fail."""
    finished = recipe(*arguments, **options)
    assert finished.code == 1, finished.err
    assert "Traceback" not in finished.err, finished.err
    return finished.err.partition("error: ")[2].strip()


def groups(module: str, words: Mapping[int, Sequence[str | Path]], seconds: float = 240) -> None:
    """`torchrun -m MODULE WORDS` for each number of processes, at the same time; each must succeed."""
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOG_LEVEL": "error"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    with contextlib.ExitStack() as stack:
        processes = []
        for count, some in words.items():
            process = fork([*torchrun, str(count), "-m", module, *some], env)
            processes.append(stack.enter_context(process))
        for process in processes:
            process.finish(seconds).succeeded()


def lines_of(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:  # texts may contain other line separators (U+0085)
        return [json.loads(line) for line in file]


def edit_json(path: Path, **changed: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changed), encoding="utf-8")


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in lines_of(folder / "metrics.jsonl")]


def assert_same_run(
    run: Path, expected: Path, rel: float = 1e-5, absolute: float = 3e-6, after: int = 0
) -> None:
    """Each step, evaluation and prediction once, with the same numbers: decimals to `rel`, those of predictions to
    `absolute`. `after`: the step of `expected` at which `run` was resumed."""
    for name in ("metrics.jsonl", "eval.jsonl", "predictions.jsonl"):
        lines = [line for line in lines_of(expected / name) if line.get("step", after + 1) > after]
        mine, theirs = _numbers(lines_of(run / name)), _numbers(lines)
        differences = [f"{path} is only in one of them" for path in mine.keys() ^ theirs.keys()]
        for path in mine.keys() & theirs.keys():
            # the correlation of predictions that hardly differ is not as exact as they are
            most = 1e-3 if path.endswith("pearson") else absolute * name.startswith("predictions")
            if not _close(mine[path], theirs[path], rel, most):
                differences.append(f"{path}: {mine[path]} and {theirs[path]}")
        assert differences == [], f"{run / name}: {differences}"


def _numbers(value: Any, at: str = "") -> dict[str, Any]:
    """Every value of these lines by its path, without seconds and bytes."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {at: value}
    leaves = {}
    for name, part in value.items():
        if not str(name).endswith(("_second", "_seconds", "_bytes")):
            leaves |= _numbers(part, f"{at} {name}")
    return leaves


def _close(one: Any, other: Any, rel: float, absolute: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=rel, abs_tol=absolute)
    return bool(one == other)


def digests(folder: Path) -> dict[str, str]:
    """The checksum of every file, without the lock, and the target of every link."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            contents[name] = str(path.readlink())
        elif path.is_file() and path.name != ".lock":
            contents[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return contents


def wait_until_stopped(process: Process, seconds: float = 120) -> None:
    """Waits until SIGSTOP has stopped it."""
    deadline = time.monotonic() + seconds
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, f"it was not stopped in {seconds} s"
        time.sleep(0.01)


def wait_for_steps(
    run: Path, steps: int = 1, processes: Iterable[Process] = (), seconds: float = 120
) -> None:
    """Waits until `run` has logged `steps` steps; until then none of the processes may end."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + seconds
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < steps:
        assert time.monotonic() < deadline, f"no {steps} steps in {seconds} s"
        for process in processes:
            assert process.poll() is None, process.finish().err[-3000:]
        time.sleep(0.01)
