"""Promises: a failure is one line and an exit code that says how it ended; only an unexpected error
is a traceback."""

import sys

import pytest

from tests.runs import Finished, start
from toolkit import launch
from toolkit.launch import failure
from toolkit.launch.environment import Place

_MAIN = """
import os, signal, sys
from toolkit import launch
from toolkit.launch.signals import StopSignals
def main():
    {}
launch.run(main)
"""


def run(*body: str) -> Finished:
    return start([sys.executable, "-c", _MAIN.format("\n    ".join(body))], 60)


def describe(error: Exception) -> failure.Failure:
    try:
        raise error
    except Exception as raised:
        return failure._describe(raised)


def test_a_lost_connection_is_another_ranks_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure.exit_state, "place", Place("torchrun", 0, 1, 0, 1))
    assert not describe(RuntimeError("Connection reset by peer")).is_effect
    monkeypatch.setattr(failure.exit_state, "place", Place("torchrun", 0, 2, 0, 2))
    assert describe(RuntimeError("Connection reset by peer")).is_effect
    assert describe(RuntimeError("NCCL error: Connection closed by remote peer")).is_effect
    assert not describe(ConnectionResetError("Connection reset by peer")).is_effect  # a tracker's


def test_an_explained_failure_is_one_line_and_others_are_tracebacks(
    no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure.exit_state, "explain", None)
    error = RuntimeError("a bug")
    unexplained = describe(error)
    assert unexplained.text.startswith("Traceback")
    assert unexplained.text.endswith(unexplained.line)
    launch.exit_state.explain = lambda error: "the batch is too large"
    explained = describe(error)
    assert (explained.line, explained.text) == ("error: the batch is too large", "")


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("open('/no/such.json')", 1, "error: /no/such.json: No such file or directory\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("sys.exit('error: no')", 1, "error: no\n"),
        ("launch.exit_state.exit_code = 143", 143, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
    ],
)
def test_one_line_and_exit_code(body: str, code: int, line: str) -> None:
    done = run(body)
    assert (done.code, done.err) == (code, line)


@pytest.mark.parametrize(("handler", "requested"), [("SIG_DFL", 1), ("SIG_IGN", 0)])
def test_end_of_the_terminal(handler: str, requested: int) -> None:
    """SIGHUP, which `nohup` ignores; nothing can be printed any more."""
    body = (
        f"signal.signal(signal.SIGHUP, signal.{handler})",
        "os.close(2)",
        "with StopSignals(True) as signals:",
        "    os.kill(os.getpid(), signal.SIGHUP)",
        "    os._exit(40 + signals.requested)",
    )
    assert run(*body).code == 40 + requested
