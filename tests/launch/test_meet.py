"""Promises: machines that cannot start together are told so, all of them, with who is missing, double or different."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from toolkit.launch import meet as module
from toolkit.launch.meet import Hello, RendezvousError, meet
from toolkit.launch.network import connect_store, serve_store

NAMES = ["machine 0", "machine 1"]
REMEDIES = {"missing": "start it", "twin": "pass --machine_rank"}


def meeting(
    hellos: Sequence[Hello], monkeypatch: pytest.MonkeyPatch, seconds: float = 10.0
) -> list[Any]:
    """What `meet` returns or raises for each hello, in threads; the first serves the store."""
    monkeypatch.setattr(module, "_READ_SECONDS", 0.5)
    server = serve_store("127.0.0.1", 0)
    stores = [server, *(connect_store("127.0.0.1", server.port, 5) for _ in hellos[1:])]
    results: list[Any] = [None] * len(hellos)

    def join(place: int) -> None:
        try:
            results[place] = meet(stores[place], hellos[place], NAMES, seconds, REMEDIES)
        except RendezvousError as error:
            results[place] = str(error)

    threads = [threading.Thread(target=join, args=(place,)) for place in range(len(hellos))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_come(monkeypatch: pytest.MonkeyPatch) -> None:
    hellos = [Hello(0, "A", facts={"torch": "2.13"}), Hello(1, "B", facts={"torch": "2.13"})]
    assert meeting(hellos, monkeypatch) == [hellos, hellos]


def test_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = meeting([Hello(0, "A")], monkeypatch, 1.0)
    assert "machine 1 did not come within 1 s" in fault


@pytest.mark.parametrize(("hellos", "says"), [
    ([Hello(0, "A"), Hello(0, "B")], "two are machine 0, on "),
    ([Hello(0, "A", facts={"torch": "2.13"}), Hello(1, "B\x1b[31m", facts={"torch": "2.12"})],
     "torch is 2.13 on A and 2.12 on B"),
    ([Hello(0, "A", facts={"num_processes": 2}), Hello(1, "B", facts={"num_processes": 4})], "--num_processes"),
])  # fmt: skip
def test_both_raise_what_does_not_match(
    hellos: list[Hello], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = meeting(hellos, monkeypatch)
    assert [fault for fault in faults if says in fault and "\x1b" not in fault] == faults
