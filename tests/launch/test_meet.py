"""Promises: machines that cannot start together all get the same error, which names who is
missing, double or different."""

import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.launch import meet as module
from toolkit.launch.meet import meet
from toolkit.launch.network import connect_store, node_id, serve_store

REMEDY = "start it"
Member = tuple[int, dict[str, Any]]


@pytest.fixture
def meeting(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`meeting([(number, facts)], seconds)` -> what `meet` returns or raises for each, in threads;
    the first serves the store."""
    monkeypatch.setattr(module, "_READ_SECONDS", 0.5)

    def run(members: Sequence[Member], seconds: float = 10.0) -> list[Any]:
        server = serve_store("127.0.0.1", 0)
        stores = [server, *(connect_store("127.0.0.1", server.port, 5) for _ in members[1:])]
        results: list[Any] = [None] * len(members)

        def join(place: int, number: int, facts: dict[str, Any]) -> None:
            try:
                results[place] = meet(
                    stores[place], "127.0.0.1", "machine", number, 2, facts, REMEDY, seconds
                )
            except UserError as error:
                results[place] = str(error)

        threads = []
        for place, member in enumerate(members):
            threads.append(threading.Thread(target=join, args=(place, *member)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return results

    return run


def test_all_come(meeting: Any) -> None:
    here = socket.gethostname(), node_id()
    assert meeting([(0, {"torch": "2.13"}), (1, {"torch": "2.13"})]) == [[here, here]] * 2


def test_one_is_missing(meeting: Any) -> None:
    (fault,) = meeting([(0, {})], 1.0)
    assert "machine 1" in fault
    assert "start it" in fault


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([(0, {}), (0, {})], "two are machine 0"),
        ([(0, {"torch": "2.13"}), (1, {"torch": "2.12\x1b[31m"})], "torch is 2.13 on "),
        ([(0, {"num_processes": 2}), (1, {"num_processes": 4})], "num_processes is 2 on "),
    ],
)
def test_all_raise_what_does_not_match(members: list[Member], says: str, meeting: Any) -> None:
    faults = meeting(members)
    assert [fault for fault in faults if says in fault and "\x1b" not in fault] == faults
