"""What is printed."""

from __future__ import annotations

from toolkit.doctor.finding import Finding
from toolkit.doctor.report import last_line, table, text_of

FOUND = [Finding("network", "port", "fail", "29600 is taken", "kill 7"), Finding("host", "memory", "ok", "64 GB"),
         Finding("host", "disk", "warn", "little", "rm", "hostB")]  # fmt: skip


def test_the_text_is_grouped_and_aligned() -> None:
    assert text_of(FOUND) == (
        "host\n"
        "  ok    memory  64 GB\n"
        "  !!    disk    [hostB] little\n"
        "                -> rm\n"
        "network\n"
        "  FAIL  port    29600 is taken\n"
        "                -> kill 7"
    )


def test_the_last_line() -> None:
    assert last_line(FOUND, "accelerate launch x.py") == "1 failure, 1 warning; first: 29600 is taken"
    assert last_line(FOUND[1:2], "accelerate launch x.py") == "all well: start with `accelerate launch x.py`"
    assert last_line(FOUND[1:2], "") == "all well"
    assert last_line(FOUND[1:], "go") == "1 warning; first: on hostB: little\nno failure: start with `go`"
    assert last_line(FOUND[:1] * 2, "") == "2 failures; first: 29600 is taken"


def test_a_table() -> None:
    assert table([["", "", "A", "B"], ["!!", "torch", "2.13.0", "2.12.1"]]) == (
        "             A       B\n  !!  torch  2.13.0  2.12.1"
    )
