"""Promises: a failure is one line and an exit code that says how it ended; only an unexpected error is a traceback."""

import errno
import sys

import pytest

from tests.runs import Finished, start
from toolkit import launch
from toolkit.launch import exit_state, failure
from toolkit.launch.environment import Place

_MAIN = """
import os, signal, sys
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
    monkeypatch.setattr(
        failure, "_place", lambda: Place("torchrun", 0, size["size"], 0, size["size"])
    )
    monkeypatch.setattr(exit_state.exit_state, "explain", None)
    return size


def described(error: Exception) -> failure.Failure:
    try:
        raise error
    except Exception as raised:
        return failure._describe(raised)


def test_lost_connection_is_torchs_and_needs_another_rank(world: dict[str, int]) -> None:
    from_tracker, from_torch = (
        kind("Connection reset by peer") for kind in (ConnectionResetError, RuntimeError)
    )
    assert not described(from_torch).is_effect
    world["size"] = 2
    assert not described(from_tracker).is_effect
    for error in (
        from_torch,
        RuntimeError("NCCL error: Connection closed by remote peer hostB<4711>"),
    ):
        assert described(error).is_effect
        assert "error: lost the connection to another process" in described(error).line


def test_an_explained_failure_is_one_line_and_others_are_tracebacks(world: dict[str, int]) -> None:
    launch.explain_failures(lambda error: "the batch is too large")
    assert (
        described(OSError(errno.ENOMEM, "Cannot allocate memory")).line
        == "error: the batch is too large"
    )
    assert not described(OSError()).text
    launch.explain_failures()
    unexplained = described(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert unexplained.text.startswith("Traceback")
    assert unexplained.text.endswith(unexplained.line)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [("open('/no/such.json')", 1, "error: /no/such.json: No such file or directory\n"),
     ("raise KeyboardInterrupt", 130, "interrupted\n"), ("sys.exit('error: no')", 1, "error: no\n"),
     ("launch.set_exit_signal(15)", 143, ""), ("sys.exit(3)", 3, "")],
)  # fmt: skip
def test_one_line_and_exit_code(body: str, code: int, line: str) -> None:
    done = run(body)
    assert (done.code, done.err) == (code, line)


@pytest.mark.parametrize(("handler", "requested"), [("SIG_DFL", 1), ("SIG_IGN", 0)])
def test_end_of_the_terminal(handler: str, requested: int) -> None:
    """SIGHUP, which `nohup` ignores; nothing can be printed any more."""
    body = (f"signal.signal(signal.SIGHUP, signal.{handler})", "os.close(2)", "with StopSignals(True) as signals:",
            "    os.kill(os.getpid(), signal.SIGHUP)", "    os._exit(40 + signals.requested)")  # fmt: skip
    assert run(*body).code == 40 + requested
