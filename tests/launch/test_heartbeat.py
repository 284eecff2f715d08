"""Promises: the first failure of a run is the same for all; a member that is gone, stopped or cut off is named."""

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from toolkit.launch import heartbeat
from toolkit.launch.heartbeat import Board, Failure
from toolkit.launch.network import serve_store

NAMES = ["hostA", "hostB", "hostC"]


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Board]]:
    """Three members; the first serves the store."""
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.05)
    server = serve_store("127.0.0.1", 0)
    clients = [
        TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=10)) for _ in range(2)
    ]
    members = [Board(store, NAMES, me, timeout=60) for me, store in enumerate((server, *clients))]
    yield members
    for member in members:
        monkeypatch.setattr(member, "_exchange", lambda number: True)  # its thread ends
        member.leave()


def wait_for(board: Board, seconds: float = 10) -> Failure:
    deadline = time.monotonic() + seconds
    while (failure := board.failure()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return failure


def test_the_first_failure_is_everyones(boards: list[Board]) -> None:
    first = boards[2].publish(Failure("error: the cause", code=7, permanent=True))
    assert [wait_for(board) for board in boards] == [first] * 3
    assert boards[1].publish(Failure("error: an effect")) == first
    assert (first.line, first.code) == ("error: the cause", 7)


def test_a_silent_member_is_lost_a_finished_one_is_not(
    boards: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    boards[1].finish()
    monkeypatch.setattr(boards[0], "_timeout", 2.0)
    monkeypatch.setattr(boards[2], "_exchange", lambda number: True)  # its thread ends
    lost = wait_for(boards[0])
    assert "lost the connection to hostC" in lost.line
    assert lost.permanent


def test_all_finish_and_none_waits_for_the_store(boards: list[Board]) -> None:
    for board in boards:
        board.finish()
    for board in boards[::-1]:
        board.leave()
    assert [board.all_finished for board in boards] == [True] * 3
    assert [board.failure() for board in boards] == [None] * 3


def test_a_store_that_is_gone_names_who_served_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.05)
    server = serve_store("127.0.0.1", 0)
    board = Board(
        TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=10)), NAMES[:2], 1, 5.0
    )
    time.sleep(0.5)
    assert board.failure() is None
    del server
    assert "hostA" in wait_for(board).line
