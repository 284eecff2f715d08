"""Programs and checks that hang or break stop nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from toolkit.doctor.finding import Finding
from toolkit.doctor.local import run_checks
from toolkit.doctor.probe import run_program


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    path = tmp_path / "doctors-tool"
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    return path


def test_a_program_and_what_it_says(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nprintf 'out \\377'; echo err >&2; exit 3\n")
    said = run_program(["doctors-tool"])
    assert said is not None
    assert (said.code, said.out, said.err, said.done) == (3, "out \ufffd", "err\n", False)


def test_a_program_that_is_not_there() -> None:
    assert run_program(["no-such-program-at-all"]) is None


def test_a_program_that_hangs_and_ignores_everything(tool: Path) -> None:
    tool.write_text("#!/bin/sh\ntrap '' TERM INT HUP\nsleep 30 &\nwait\nsleep 30\n")
    started = time.monotonic()
    said = run_program(["doctors-tool"], seconds=0.3)
    assert said is not None
    assert (said.code, said.done) == (None, False)
    assert time.monotonic() - started < 3


def test_a_program_that_asks_reads_nothing(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nread answer || echo nobody\n")
    said = run_program(["doctors-tool"])
    assert said is not None
    assert said.out == "nobody\n"


def test_checks_that_break_or_hang_are_notes() -> None:
    def breaks() -> list[Finding]:
        raise RuntimeError("no such thing")

    def hangs() -> list[Finding]:
        time.sleep(30)
        return []

    started = time.monotonic()
    good = Finding("host", "memory", "ok", "64 GB")
    found = run_checks({"a": breaks, "b": hangs, "host": lambda: [good]}, seconds=0.5)
    assert time.monotonic() - started < 3
    assert good in found
    told = {finding.area: finding for finding in found}
    assert told["a"].level == told["b"].level == "note"
    assert "RuntimeError: no such thing" in told["a"].text
    assert "no answer" in told["b"].text
