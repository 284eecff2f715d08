"""Latency, bandwidth and clocks over a line."""

from __future__ import annotations

import json
import struct
import time

import pytest

from tests.doctor.lines import in_thread, two_lines
from toolkit.doctor import measure
from toolkit.doctor.measure import Measured, drive, read_measured, serve
from toolkit.launch.wire import Line, WireError


def test_both_sides_know_the_same_numbers() -> None:
    with two_lines() as (one, other):
        served = in_thread(lambda: serve(other, 0.2, 5.0))
        driven = drive(one, 0.2)
        assert served.get(timeout=5) == driven.reversed()
    assert 0 < driven.latency_ms < 1000
    assert abs(driven.clock_offset_seconds) < 0.5
    assert driven.out_mbytes_per_second > 10
    assert driven.back_mbytes_per_second > 10


def test_a_clock_that_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that serves: in one process the clock is taken from what it sends."""
    send = Line.send

    def ahead(self: Line, message: dict[str, object], seconds: float = 10.0) -> None:
        shifted = {name: value + 100.0 if name in ("pong", "sent") else value for name, value in message.items()}  # type: ignore[operator]
        send(self, shifted, seconds)

    monkeypatch.setattr(Line, "send", ahead)
    with two_lines() as (one, other):
        in_thread(lambda: serve(other, 0.1, 5.0))
        assert drive(one, 0.1).clock_offset_seconds == pytest.approx(100.0, abs=0.5)


def test_a_slow_line_is_measured_in_its_time() -> None:
    """The receiver counts, and what lies in the sender's buffers is not taken for sent."""
    with two_lines() as (one, other):
        in_thread(lambda: _slowly(other))
        started = time.monotonic()
        rate = measure._receive_blocks(one, 1.0)
        assert time.monotonic() - started < 4
    assert 2 < rate < 30


def _slowly(line: Line) -> None:
    for _ in range(5):
        line.connection.sendall(struct.pack("!I", 1 << 18) + bytes(1 << 18))
        time.sleep(0.05)
    line.connection.sendall(struct.pack("!I", 0))


def test_a_line_that_carries_only_small_messages() -> None:
    with two_lines() as (one, other):
        other.connection.sendall(struct.pack("!I", 1 << 18) + b"only the beginning")
        with pytest.raises(WireError, match=measure.LARGE_MESSAGES):
            measure._receive_blocks(one, -2.5)


def test_blocks_that_are_larger_than_agreed_are_refused() -> None:
    with two_lines() as (one, other):
        other.connection.sendall(struct.pack("!I", 1 << 30))
        with pytest.raises(WireError, match="more than was agreed"):
            measure._receive_blocks(one, 1.0)


def test_the_other_side_leaves_or_asks_for_nonsense() -> None:
    with two_lines() as (one, other):
        served = in_thread(lambda: serve(other, 0.1, 5.0))
        one.send({"format": "your disk"})
        assert "unknown" in str(served.get(timeout=5))
    with two_lines() as (one, other):
        other.close()
        with pytest.raises(WireError):
            drive(one, 0.1)
    with two_lines() as (one, _), pytest.raises(WireError, match="in time"):
        serve(one, 0.1, patience=0.2)


def test_what_is_told_of_a_measurement_is_checked() -> None:
    known = Measured(0.2, 0.0, 1000.0, 900.0)
    assert read_measured(json.loads(json.dumps(known.as_dict()))) == known
    assert read_measured({**known.as_dict(), "latency_ms": "fast"}) is None
    assert read_measured("it timed out") is None
    assert known.reversed().reversed() == known
