"""Promises: machines that cannot start together all get the same error, which names who is
missing, double or different."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.launch import meet as module
from toolkit.launch.meet import meet
from toolkit.launch.network import connect_store, node_id, serve_store

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


def test_all_come() -> None:
    here = socket.gethostname(), node_id()
    assert meeting((0, {"torch": "2.13"}), (1, {"torch": "2.13"})) == [[here, here]] * 2


def test_one_is_missing() -> None:
    (fault,) = meeting((0, {}), seconds=1.0)
    assert "machine 1" in fault
    assert "start it" in fault


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ((0, {}), (0, {}), "two are machine 0"),
        ((0, {"torch": "2.13"}), (1, {"torch": "2.12\x1b[31m"}), "torch is 2.13 on "),
        ((0, {"num_processes": 2}), (1, {"num_processes": 4}), "num_processes is 2 on "),
    ],
)
def test_all_raise_what_does_not_match(one: Member, other: Member, says: str) -> None:
    for fault in meeting(one, other):
        assert says in fault
        assert "\x1b" not in fault
