"""Promises: the first failure of a run is the same for all; a member that is gone, stopped or cut
off is named."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    monkeypatch.setattr(heartbeat, "_SERVE_SECONDS", 0.5)
    server = serve_store("127.0.0.1", 0)
    clients = [TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=9)) for _ in "bc"]
    members = [Board(store, NAMES, me, timeout=60) for me, store in enumerate((server, *clients))]
    yield members
    for member in members:
        end_thread(member, monkeypatch)


def end_thread(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_exchange", lambda number: True)
    board._thread.join(5)


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


def test_a_silent_member_is_lost(boards: list[Board], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards[0], "_timeout", 2.0)
    end_thread(boards[2], monkeypatch)
    lost = wait_for(boards[0])
    assert "hostC" in lost.line
    assert lost.permanent


def test_members_that_finish_wait_for_the_last(boards: list[Board]) -> None:
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(board.finish) for board in boards[:2]]
        time.sleep(0.5)
        assert not any(end.done() for end in ends)
        ends.append(pool.submit(boards[2].finish))
        assert [end.result(10) for end in ends] == [None] * 3
