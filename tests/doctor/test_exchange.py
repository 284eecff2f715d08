"""Machines tell each other things, in an order in which nobody waits for ever."""

from __future__ import annotations

import time

import pytest

from tests.doctor.lines import in_thread, two_lines
from toolkit.doctor.exchange import Deadline, Talk, rounds
from toolkit.doctor.meet import Way
from toolkit.launch.wire import Line


@pytest.mark.parametrize("count", range(2, 17))
def test_every_pair_measures_once_and_nobody_waits_in_a_circle(count: int) -> None:
    order = {rank: rounds(count, rank) for rank in range(count)}
    assert all(sorted([rank, *others]) == list(range(count)) for rank, others in order.items())
    place = dict.fromkeys(range(count), 0)
    pairs = 0
    while any(place[rank] < count - 1 for rank in range(count)):
        ready = [rank for rank in range(count) if place[rank] < count - 1
                 and order[order[rank][place[rank]]][place[order[rank][place[rank]]] :][:1] == [rank]]  # fmt: skip
        assert ready, f"{count} machines wait for each other"
        for rank in ready:
            place[rank] += 1
        pairs += len(ready)
    assert pairs == count * (count - 1)


def test_the_rounds_are_few() -> None:
    """In each round of 16 machines 8 pairs are at work."""
    order = [rounds(16, rank) for rank in range(16)]
    for turn in range(15):
        assert all(order[order[rank][turn]][turn] == rank for rank in range(16))


def way(out: Line | None, back: Line | None) -> Way:
    return Way("10.0.0.1", out, back)


def test_two_swap_messages_over_the_line_the_lower_one_chooses() -> None:
    with two_lines() as (one, other), two_lines() as (unused, unused_there):
        lower, higher = Talk(0, {1: way(one, unused)}), Talk(1, {0: way(unused_there, other)})
        swapped = in_thread(lambda: higher.swap("x", {"from": 1}, Deadline(5)))
        assert lower.swap("x", {"from": 0}, Deadline(5)) == {1: {"from": 1, "phase": "x"}}
        assert swapped.get(timeout=5) == {0: {"from": 0, "phase": "x"}}
        assert (lower.lines[1], higher.lines[0]) == (one, other)


def test_one_way_is_enough() -> None:
    with two_lines() as (one, other):
        lower, higher = Talk(0, {1: way(None, one)}), Talk(1, {0: way(other, None)})
        swapped = in_thread(lambda: higher.swap("x", {}, Deadline(5)))
        assert list(lower.swap("x", {}, Deadline(5))) == [1]
        assert list(swapped.get(timeout=5)) == [0]


def test_a_machine_that_was_not_met_is_not_waited_for() -> None:
    talk = Talk(0, {1: way(None, None)})
    started = time.monotonic()
    assert talk.swap("x", {}, Deadline(5)) == {}
    assert time.monotonic() - started < 1


def test_one_that_leaves_or_is_silent_does_not_keep_the_others() -> None:
    with two_lines() as (one, one_there), two_lines() as (two, two_there), two_lines() as (three, three_there):
        talk = Talk(0, {1: way(one, None), 2: way(two, None), 3: way(three, None)})
        one_there.close()
        other = Talk(3, {0: way(None, three_there)})
        in_thread(lambda: other.swap("x", {"here": True}, Deadline(5)))
        started = time.monotonic()
        assert talk.swap("x", {}, Deadline(0.7)) == {3: {"here": True, "phase": "x"}}
        assert time.monotonic() - started < 2
        assert talk.others == [3]
        assert two_there.connection.fileno() >= 0


def test_machines_that_are_at_different_points_notice() -> None:
    with two_lines() as (one, other):
        lower, higher = Talk(0, {1: way(one, None)}), Talk(1, {0: way(None, other)})
        swapped = in_thread(lambda: higher.swap("second", {}, Deadline(2)))
        assert lower.swap("first", {}, Deadline(1)) == {}
        assert swapped.get(timeout=5) == {}
