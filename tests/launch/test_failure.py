"""toolkit/launch/failure.py, signals.py: messages and exit codes of failures and stop signals."""

import errno
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.runs import Finished, start
from toolkit import launch
from toolkit.launch import exit_state, failure, rendezvous
from toolkit.launch.environment import Place
from toolkit.launch.interrupted import EXIT_CODE_FILE, LAUNCHER_PID

_MAIN = """
import ctypes, os, signal, sys, threading, time
from toolkit import launch
from toolkit.launch.signals import StopSignals
def main():
    {}
launch.run(main)
"""


def run(*body: str, **env: str) -> Finished:
    return start([sys.executable, "-c", _MAIN.format("\n    ".join(body))], 60, env)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Sets the world size that `failure` sees."""
    size = {"size": 1}
    monkeypatch.setattr(failure, "_place", lambda: Place("torchrun", 0, size["size"], 0, size["size"]))
    monkeypatch.setattr(exit_state.exit_state, "explain", None)
    return size


def described(error: Exception) -> str:
    try:
        raise error
    except Exception as raised:
        return failure._describe(raised)


def test_lost_connection_is_torchs_and_needs_another_rank(world: dict[str, int]) -> None:
    from_tracker, from_torch = (kind("Connection reset by peer") for kind in (ConnectionResetError, RuntimeError))
    assert "lost the connection" not in described(from_torch)
    world["size"] = 2
    assert "lost the connection" not in described(from_tracker)
    text = described(from_torch)
    assert "lost the connection to another process" in text.splitlines()[-1]
    assert text.startswith("Traceback")
    assert "lost the connection" in described(RuntimeError("NCCL error: Connection closed by remote peer hostB<4711>"))


def test_explanation_ends_with_the_step(world: dict[str, int]) -> None:
    launch.explain_failures(lambda error: "the batch is too large")
    assert described(OSError(errno.ENOMEM, "Cannot allocate memory")) == "error: the batch is too large"
    launch.explain_failures()
    assert described(OSError(errno.ENOMEM, "Cannot allocate memory")).startswith("Traceback")


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [("reader, writer = os.pipe(); os.dup2(writer, 1); os.close(reader); print('x', flush=True)", 141,
      "standard output is closed (as by `| head`): redirect it to a file"),
     ("open('/no/such.json')", 1, "/no/such.json: No such file or directory")],
    ids=["closed stdout", "missing file"],
)  # fmt: skip
def test_one_line_and_exit_code(body: str, code: int, message: str) -> None:
    done = run(body)
    assert (done.code, done.err) == (code, f"error: {message}\n")


def test_an_error_of_cuda_is_printed_before_it_is_reported(
    world: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With several ranks; NCCL's watchdog aborts the process soon."""

    class AcceleratorError(RuntimeError):
        """torch's, in name."""

    def work() -> None:
        raise AcceleratorError("CUDA error: device-side assert triggered")

    reported: list[str] = []
    monkeypatch.setattr(failure, "exit_process", lambda message, *_, **__: reported.append(message))
    for size in (1, 2):
        world["size"] = size
        failure._exit_on_failure(work)
    assert capsys.readouterr().err.count("Traceback") == 1
    assert "Traceback" in reported[0]
    assert reported[1] == "error: " + reported[0].splitlines()[-1]


def test_an_early_failure_is_reported_by_local_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it announces the failure to other nodes, its launcher does not end the rank that waits."""
    waits: list[float] = []
    monkeypatch.setattr(failure, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr(failure.failure_detector, "exit_now", lambda *_: None)
    monkeypatch.setattr(failure, "signal", MagicMock())
    for world_size in (2, 4):
        monkeypatch.setattr(failure, "_place", lambda size=world_size: Place("torchrun", 1, size, 1, 2))
        failure.exit_process("error: x", 1, early=True)
    assert waits[1] - waits[0] > rendezvous._EARLY_FAULT_SECONDS


def test_other_broken_pipes_are_tracebacks() -> None:
    done = run("raise BrokenPipeError(32, 'Broken pipe')")
    assert done.code == 1
    assert "Traceback" in done.err
    assert "head" not in done.err


def test_a_file_of_another_rank_is_no_stuck_step(tmp_path: Path) -> None:
    """This rank waits in training/checkpoints.py while another one writes."""
    file = tmp_path / "toolkit" / "training" / "checkpoints.py"
    file.parent.mkdir(parents=True)
    file.write_text("import time\ndef wait():\n    time.sleep(3)\n")
    stop = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()"
    load = f"exec(compile(open({str(file)!r}).read(), {str(file)!r}, 'exec'), globals())"
    done = run(load, "with StopSignals(True):", f"    {stop}", "    wait()", TOOLKIT_STOP_TIMEOUT="1")
    assert "stuck at" not in done.err


def test_a_rank_that_waits_for_rank_0_is_not_stuck() -> None:
    stop = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()"
    done = run("from types import SimpleNamespace", "from toolkit.launch import failure_detector",
               "current = SimpleNamespace(position_of_main=lambda: str(time.monotonic()))",
               "failure_detector.current = current", "with StopSignals(True):", f"    {stop}", "    time.sleep(3)",
               "failure_detector.current = None", TOOLKIT_STOP_TIMEOUT="1")  # fmt: skip
    assert "stuck at" not in done.err


@pytest.mark.parametrize(
    ("hang", "place"),
    [("threading.Event().wait()", "threading.py:"),
     # in C, as in a collective: Python calls no handler
     ("lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, (ctypes.c_char * 64)(); lock(mutex), lock(mutex)",
      "<string>:")],
    ids=["Python", "C"],
)  # fmt: skip
def test_stuck_step_after_a_stop_signal(hang: str, place: str) -> None:
    stop = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()"
    done = run("with StopSignals(True):", f"    {stop}", f"    {hang}", TOOLKIT_STOP_TIMEOUT="1")
    assert done.code == 143
    assert done.err.count("SIGTERM: stopping after this step, with a checkpoint\n") == 1
    line = done.err.splitlines()[-1]
    assert f"SIGTERM: stuck at {place}" in line
    assert "--stop_timeout SECONDS" in line


@pytest.mark.parametrize(
    ("launcher", "parent", "line", "stops"),
    [("1", 1, "", True), ("77", 1, "", False), ("77", 900, "/usr/bin/python torchrun", False),
     ("", 900, "/usr/bin/python3.11 /usr/bin/torchrun", True), ("", 900, "/lib/systemd/systemd --user", False)],
)  # fmt: skip
def test_only_a_launcher_is_stopped(
    launcher: str, parent: int, line: str, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what adopts the ranks of a killed one; in a container a launcher may be process 1."""
    signals: list[Any] = []
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    if launcher:
        monkeypatch.setenv(LAUNCHER_PID, launcher)
    monkeypatch.delenv(EXIT_CODE_FILE, raising=False)
    monkeypatch.setattr(exit_state.os, "getppid", lambda: parent)
    monkeypatch.setattr(exit_state.os, "kill", lambda *words: signals.append(words))
    monkeypatch.setattr(exit_state.psutil, "Process", lambda _: SimpleNamespace(cmdline=line.split))
    exit_state.stop_launcher(1)
    assert signals == ([(parent, signal.SIGTERM)] if stops else [])


def test_slow_step_after_a_stop_signal_may_finish() -> None:
    busy = ("with StopSignals(False) as signals:", "    time.sleep(2); signals.requested",
            "    os.kill(os.getpid(), signal.SIGUSR1)", "    threading.Event().wait(2.5)")  # fmt: skip
    assert run(*busy, TOOLKIT_STOP_TIMEOUT="1").code == 0


@pytest.mark.parametrize(("handler", "requested"), [("SIG_DFL", 1), ("SIG_IGN", 0)])
def test_end_of_the_terminal(handler: str, requested: int) -> None:
    """SIGHUP, which `nohup` ignores; nothing can be printed any more."""
    body = (f"signal.signal(signal.SIGHUP, signal.{handler})", "os.close(2)", "with StopSignals(True) as signals:",
            "    os.kill(os.getpid(), signal.SIGHUP)", "    os._exit(40 + signals.requested)")  # fmt: skip
    assert run(*body).code == 40 + requested
