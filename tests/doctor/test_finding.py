"""What other machines send is fit for a terminal, and of the types it should have."""

from __future__ import annotations

import pytest

from toolkit.doctor.finding import Finding, number, plain, read_finding, size_of, whole_number, worst


def test_text_from_elsewhere_carries_no_control_characters() -> None:
    assert plain("\x1b]0;title\x07red\x1b[31m\nnext\u202e") == "]0;title red [31m next"
    assert plain("文本 Ärger") == "文本 Ärger"
    assert len(plain("x" * 5000)) == 1000
    assert plain("half a pair \ud800").encode() == b"half a pair ?"


def test_a_finding_survives_the_way_and_other_things_do_not() -> None:
    finding = Finding("host", "memory", "warn", "little", "free some", "B")
    assert read_finding(finding.as_dict()) == finding
    assert read_finding({**finding.as_dict(), "level": "catastrophe"}) is None
    assert read_finding(["warn"]) is None
    odd = read_finding({"level": "fail", "text": {"a": 1}, "area": None})
    assert odd is not None
    assert odd.text == "{'a': 1}"


@pytest.mark.parametrize(("value", "whole", "real"), [
    (3, 3, 3.0), (True, 0, None), ("3", 0, None), (2.5, 0, 2.5), (None, 0, None), (1e301, 0, None),
    (float("nan"), 0, None),
])  # fmt: skip
def test_numbers_are_numbers(value: object, whole: int, real: float | None) -> None:
    assert whole_number(value) == whole
    assert number(value) == real


def test_the_worst_of_several() -> None:
    levels = [Finding("a", "b", level, "") for level in ("ok", "warn", "note")]
    assert worst(levels) == "warn"
    assert worst([]) == "ok"


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1500, "1.5 kB"), (64 << 20, "67.1 MB"), (2.5e12, "2.5 TB")])
def test_sizes_for_people(size: float, text: str) -> None:
    assert size_of(size) == text
