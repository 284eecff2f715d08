"""Promises: machines that cannot start together all get the same error, which names who is missing, double or
different; the first failure of a run is the same for all."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from toolkit.errors import UserError
from toolkit.launch import heartbeat
from toolkit.launch import meet as module
from toolkit.launch.heartbeat import Board, Failure
from toolkit.launch.meet import meet
from toolkit.launch.network import connect_store, serve_store

Member = tuple[int, dict[str, Any]]


@pytest.fixture(autouse=True)
def _reads_briefly(no_launcher: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_READ_SECONDS", 0.5)


def meeting(*members: Member, seconds: float = 10.0) -> list[Any]:
    """What `meet` returns or raises for each (number, facts), in threads; the first serves the store."""
    server = serve_store("127.0.0.1", 0)
    stores = [server, *(connect_store("127.0.0.1", server.port, 5) for _ in members[1:])]

    def join(store: Any, member: Member) -> Any:
        number, facts = member
        try:
            return meet(store, "127.0.0.1", "machine", number, 2, facts, "start it", seconds)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(join, stores, members))


def test_one_is_missing() -> None:
    (fault,) = meeting((0, {}), seconds=1.0)
    assert "machine 1" in fault
    assert "start it" in fault


def test_all_raise_what_does_not_match() -> None:
    for one, other, says in (
        ((0, {}), (0, {}), "two are machine 0"),
        ((0, {"torch": "2.13"}), (1, {"torch": "2.12\x1b[31m"}), "torch is 2.13 on "),
        ((0, {"num_processes": 2}), (1, {"num_processes": 4}), "num_processes is 2 on "),
    ):
        for fault in meeting(one, other):
            assert says in fault
            assert "\x1b" not in fault


NAMES = ["hostA", "hostB", "hostC"]


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Board]]:
    """Three members; the first serves the store."""
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "_SERVE_SECONDS", 0.5)
    server = serve_store("127.0.0.1", 0)
    clients = [TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=9)) for _ in "bc"]
    members = [Board(store, NAMES, me, timeout=60) for me, store in enumerate((server, *clients))]
    yield members
    for member in members:
        monkeypatch.setattr(member, "_beat", lambda number: True)
        member._thread.join(5)


def wait_for(board: Board) -> Failure:
    deadline = time.monotonic() + 10
    while (failure := board.failure()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return failure


def test_the_first_failure_is_everyones(boards: list[Board]) -> None:
    first = boards[2].publish(Failure("error: the cause", code=7, permanent=True))
    assert [wait_for(board) for board in boards] == [first] * 3
    assert boards[1].publish(Failure("error: an effect")) == first
    assert boards[0].finish() == first
    assert (first.line, first.code) == ("error: the cause", 7)


def test_members_that_finish_wait_for_the_last(boards: list[Board]) -> None:
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(board.finish) for board in boards[:2]]
        time.sleep(0.5)
        assert not any(end.done() for end in ends)
        ends.append(pool.submit(boards[2].finish))
        assert [end.result(10) for end in ends] == [None] * 3
