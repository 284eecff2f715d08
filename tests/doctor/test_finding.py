"""What peers send is fit for a terminal; what is printed."""

from __future__ import annotations

from toolkit.doctor.finding import Finding, last_line, plain, report

FOUND = [Finding("network", "port", "fail", "29600 is taken", "kill 7"), Finding("host", "disk", "ok", "64 GB"),
         Finding("host", "shared", "warn", "little", "rm", "hostB")]  # fmt: skip


def test_text_from_elsewhere_carries_no_control_characters() -> None:
    assert plain("\x1b]0;title\x07red\x1b[31m\nnext\u202e") == "]0;title red [31m next"
    assert plain("文本 Ärger") == "文本 Ärger"
    assert len(plain("x" * 5000)) == 1000
    assert plain("half a pair \ud800").encode() == b"half a pair ?"


def test_the_text_is_grouped_and_aligned() -> None:
    assert report(FOUND) == (
        "host\n"
        "  ok    disk    64 GB\n"
        "  !!    shared  [hostB] little\n"
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
