"""toolkit/report/files.py: files that are whole or not there, and read as a killed run left them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.errors import UserError
from toolkit.report.files import by_step, dumps, read_lines, write_whole


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    write_whole(path, (f"第{place}行\n" for place in range(3)))
    assert path.read_text(encoding="utf-8") == "第0行\n第1行\n第2行\n"

    def broken() -> Iterator[str]:
        yield "half"
        raise OSError("disk full")

    with pytest.raises(UserError, match=r"cannot write .*predictions.jsonl: disk full; nothing was left behind"):
        write_whole(path, broken())
    assert path.read_text(encoding="utf-8") == "第0行\n第1行\n第2行\n"


def test_read_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a killed run leaves them, and a power cut: blocks of NULs, in the place of lines or before one."""
    path = tmp_path / "lines.jsonl"
    assert list(read_lines(path)) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    assert capsys.readouterr().err == ""
    path.write_bytes(b'{"a": 1}\n{"a"\n3\n\xff\n\0\0\0{"a": 3}\n\0\0\0')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 3}]
    assert list(read_lines(path, 2)) == [{"a": 1}]
    named = [f"{path}, line {place} is broken: left out" for place in (2, 3, 4, 6, 2)]
    assert capsys.readouterr().err.splitlines() == named


def test_numbers_that_are_not_finite_are_null() -> None:
    """JSON knows no others."""
    line = {"loss": 0.5, "grad_norm": math.inf, "per_class": [{"f1": math.nan}], "path": Path("a")}
    assert dumps(line) == '{"loss": 0.5, "grad_norm": null, "per_class": [{"f1": null}], "path": "a"}'


def test_steps_done_again_count_once(tmp_path: Path) -> None:
    """A run resumed at step 30 writes the steps from there again."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "again": again} for again, first in ((False, 1), (True, 31)) for step in range(first, 41)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = by_step(read_lines(path))
    assert [line["step"] for line in found] == list(range(1, 41))
    assert [line["again"] for line in found] == [False] * 30 + [True] * 10
