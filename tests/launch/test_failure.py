"""Promises: a failure is one line and an exit code that says how it ended; only an unexpected error is a traceback.
What an application around this package does with its lines on stderr."""

import sys
from pathlib import Path

import pytest

from tests.runs import Finished, start
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


def test_only_an_unexplained_failure_is_a_traceback() -> None:
    """Explained by the run: tests/utils/test_memory.py."""
    done = run("raise RuntimeError('a bug')")
    assert done.code == 1
    assert done.err.startswith("Traceback")
    assert done.err.endswith("\nerror: RuntimeError: a bug\n")


def test_one_line_and_exit_code() -> None:
    for body, code, line in (
        ("open('/no/such.json')", 1, "error: /no/such.json: No such file or directory\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("sys.exit('error: no')", 1, "error: no\n"),
        ("launch.exit_state.exit_code = 143", 143, ""),
        ("sys.exit(3)", 3, ""),
    ):
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


LINE = "import toolkit.launch, logging; logging.getLogger('toolkit').info('a line')"
SETUP = "import logging; logging.basicConfig(level='INFO', "
CASES = {
    LINE: "a line\n",
    f"{LINE}; logging.info('theirs'); {LINE}": "a line\na line\n",  # once each
    f"{SETUP}format='%(name)s %(message)s'); {LINE}": "toolkit a line\n",  # an application's
    f"{SETUP}filename='log'); {LINE}": "",
}


@pytest.mark.parametrize("code", CASES)
def test_lines(code: str, tmp_path: Path) -> None:
    done = start([sys.executable, "-c", code], cwd=tmp_path).succeeded()
    assert (done.out, done.err) == ("", CASES[code])
