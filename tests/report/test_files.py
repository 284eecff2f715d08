"""toolkit/report/files.py: files that are whole or not there, and read as a killed run left them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.report.files import by_step, read_lines, write_whole


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    write_whole(path, (f"第{place}行\n" for place in range(3)))
    assert path.read_text(encoding="utf-8") == "第0行\n第1行\n第2行\n"

    def broken() -> Iterator[str]:
        yield "half"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, broken())
    assert path.read_text(encoding="utf-8") == "第0行\n第1行\n第2行\n"


def test_read_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert list(read_lines(path)) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        list(read_lines(path))


def test_steps_done_again_count_once(tmp_path: Path) -> None:
    """A run resumed at step 30 writes the steps from there again."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "again": again} for again, first in ((False, 1), (True, 31)) for step in range(first, 41)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = by_step(read_lines(path))
    assert [line["step"] for line in found] == list(range(1, 41))
    assert [line["again"] for line in found] == [False] * 30 + [True] * 10
