"""Machines meet, on several addresses of one machine's loopback."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from tests.doctor.lines import free_port, listen
from toolkit.doctor import meet
from toolkit.doctor.meet import Me, Meeting
from toolkit.launch import wire

ADDRESSES = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


@pytest.fixture
def port() -> int:
    return free_port(ADDRESSES)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meet, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(meet, "_TALK_SECONDS", 1.0)


def me(rank: int, port: int, count: int = 2, token: str = "word") -> Me:
    return Me(rank, f"host{rank}", tuple(ADDRESSES[:count]), count, port, token)


@contextlib.contextmanager
def meeting(own: Me, listens: bool = True) -> Iterator[Meeting]:
    server = listen(ADDRESSES[own.rank], own.port) if listens else None
    with Meeting(own, server) as made:
        yield made


def run_all(meetings: list[Meeting], seconds: float = 5.0) -> float:
    """Returns the seconds it took."""
    started = time.monotonic()
    threads = [threading.Thread(target=one.run, args=(seconds,)) for one in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 10)
    return time.monotonic() - started


@pytest.mark.parametrize("count", [2, 3])
def test_all_meet_within_a_moment(port: int, count: int) -> None:
    before = psutil.Process().num_fds()
    with contextlib.ExitStack() as stack:
        meetings = [stack.enter_context(meeting(me(rank, port, count))) for rank in range(count)]
        assert run_all(meetings) < 3
        for one in meetings:
            assert all(way.met and way.trouble is None for way in one.ways.values())
            assert {way.host for way in one.ways.values()} == {f"host{rank}" for rank in one.ways}
            assert (one.strangers, one.conflicts) == ({}, [])
    deadline = time.monotonic() + 5  # threads that were calling end within a moment
    while psutil.Process().num_fds() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert psutil.Process().num_fds() == before


def test_one_that_never_comes_is_waited_for_only_so_long(port: int) -> None:
    with meeting(me(0, port)) as alone:
        assert 1.0 <= run_all([alone], 1.0) < 3
        assert not alone.ways[1].met
        trouble = alone.ways[1].trouble
        assert trouble is not None
        assert trouble.kind == "refused"


def test_one_that_comes_late(port: int) -> None:
    with meeting(me(0, port)) as first:
        waiting = threading.Thread(target=first.run, args=(5.0,))
        waiting.start()
        time.sleep(0.8)
        with meeting(me(1, port)) as second:
            run_all([second])
            waiting.join(5)
            assert first.ways[1].met
            assert second.ways[0].met


def test_all_give_up_together_with_the_one_that_waited_longest(port: int) -> None:
    with meeting(me(0, port, 3)) as first, meeting(me(1, port, 3)) as second:
        threading.Thread(target=first.run, args=(1.5,)).start()
        started = time.monotonic()
        second.run(60.0)
        assert time.monotonic() - started < 6
        assert second.ways[0].met


def test_one_way_alone_is_given_up_early(port: int) -> None:
    """As where a firewall lets one side through: the other does not listen here."""
    with meeting(me(0, port)) as open_one, meeting(me(1, port), listens=False) as deaf:
        assert run_all([open_one, deaf], 30.0) < 8
        assert (open_one.ways[1].out, open_one.ways[1].back is None) == (None, False)
        assert (deaf.ways[0].out is None, deaf.ways[0].back) == (False, None)
        assert open_one.ways[1].address == ADDRESSES[1]


def test_strangers_neither_get_in_nor_hold_anybody_up(port: int) -> None:
    with meeting(me(0, port)) as first, meeting(me(1, port)) as second, contextlib.ExitStack() as stack:
        for _ in range(20):  # they say nothing at all
            stack.enter_context(contextlib.closing(socket.create_connection((ADDRESSES[0], port))))
        for said in (b"GET / HTTP/1.0\r\n\r\n", struct.pack("!I", 1 << 31), b"\x80\x04pickle"):
            stranger = stack.enter_context(contextlib.closing(socket.create_connection((ADDRESSES[0], port))))
            stranger.sendall(said)
        assert run_all([first, second], 10.0) < 4
        assert first.ways[1].met
        assert second.ways[0].met
        deadline = time.monotonic() + 4
        while not first.strangers and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(first.strangers) == ["127.0.0.1"]


def test_more_strangers_than_are_answered_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meet, "_MOST_ANSWERS", 2)
    monkeypatch.setattr(meet, "GRACE_SECONDS", 5.0)
    with meeting(me(0, port)) as first, meeting(me(1, port)) as second, contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(contextlib.closing(socket.create_connection((ADDRESSES[0], port))))
        run_all([first, second], 10.0)
        assert first.ways[1].met  # their second is over, and the machine calls again


def test_a_wrong_token(port: int) -> None:
    with meeting(me(0, port)) as first, meeting(me(1, port, token="other")) as second:
        run_all([first, second], 1.5)
        for one in (first, second):
            (way,) = one.ways.values()
            assert way.trouble is not None
            assert (way.met, way.trouble.kind) == (False, "token")
            assert "does not know the token" in one.strangers["127.0.0.1"]


def test_addresses_that_were_not_named_are_sent_away_where_no_token_was_given(port: int) -> None:
    own = replace(me(0, port), only_named=True)
    with meeting(own) as first:
        assert first._allowed is not None
        first._allowed.discard("127.0.0.1")
        with meeting(me(1, port)) as second:
            run_all([first, second], 1.0)
        assert first.strangers == {"127.0.0.1": "it is none of the machines that were named"}
        assert first.ways[1].back is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, "both say that they are machine 0"),
        ({"names": (ADDRESSES[1], ADDRESSES[0])}, "was given the machines"),
        ({"count": 3, "names": tuple(ADDRESSES)}, "was given the machines"),
    ],
)
def test_machines_that_understand_different_things_stop_early(port: int, change: dict[str, object], words: str) -> None:
    other = replace(me(1, port), **change)  # type: ignore[arg-type]
    server = listen(ADDRESSES[1], port)
    with meeting(me(0, port)) as first, Meeting(other, server) as second:
        assert run_all([first, second], 30.0) < 8
        assert any(words in conflict for conflict in first.conflicts + second.conflicts)
        assert not first.ways[1].met


def test_an_address_that_leads_back_here(port: int) -> None:
    own = replace(me(0, port), names=(ADDRESSES[0], ADDRESSES[0]))
    with meeting(own) as one:
        assert run_all([one], 10.0) < 3
        assert "is host0 itself" in one.conflicts[0]


def test_a_doctor_that_was_started_again_replaces_itself(port: int) -> None:
    with meeting(me(0, port, 3)) as first:
        waiting = threading.Thread(target=first.run, args=(6.0,))
        waiting.start()
        with meeting(me(1, port, 3)) as second:
            stopped = threading.Thread(target=second.run, args=(30.0,))
            stopped.start()
            deadline = time.monotonic() + 4
            while not first.ways[1].met and time.monotonic() < deadline:
                time.sleep(0.02)
            assert first.ways[1].met
        with meeting(me(1, port, 3)) as again, meeting(me(2, port, 3)) as third:
            run_all([again, third])
            waiting.join(8)
            assert first.ways[1].session == again.me.session
            assert all(way.met for way in first.ways.values())


def test_only_machine_0_is_known(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each calls from its own address, as different machines do; machine 0 passes on where they are."""
    sources = threading.local()

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        try:
            return socket.create_connection((address, port), seconds, source_address=(sources.address, 0))
        except OSError as error:
            raise wire.UnreachableError(address, port, "refused", str(error)) from error

    class FromItsAddress(Meeting):
        def _start(self, target: object, *arguments: object) -> None:
            def run() -> None:
                sources.address = ADDRESSES[self.me.rank]
                target(*arguments)  # type: ignore[operator]

            super()._start(run)

    monkeypatch.setattr(wire, "connect", connect)
    with contextlib.ExitStack() as stack:
        meetings = [
            stack.enter_context(
                FromItsAddress(replace(me(rank, port, 3), names=(ADDRESSES[0],)), listen(ADDRESSES[rank], port))
            )
            for rank in range(3)
        ]
        run_all(meetings, 8.0)
        for one in meetings:
            assert all(way.met for way in one.ways.values()), one.me.rank
            assert {way.address for way in one.ways.values()} == set(ADDRESSES) - {ADDRESSES[one.me.rank]}
