"""Nodes find each other over 127.0.0.1, each a thread of this process with a name of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from toolkit.errors import UserError
from toolkit.launch import node_rendezvous
from toolkit.launch.channel import ChannelError, UnreachableError, connect, dial
from toolkit.launch.network import free_port, listen
from toolkit.launch.nodes import Nodes

HERE = "127.0.0.1"
# Longer than anything takes here; a machine that waits that long fails its test.
LONG = 30.0


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def _hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread is a host, called as the thread is."""
    monkeypatch.delenv("TOOLKIT_TOKEN", raising=False)
    monkeypatch.setattr(node_rendezvous.socket, "gethostname", lambda: threading.current_thread().name)


@pytest.fixture(autouse=True)
def _all_closed(port: int) -> Iterator[None]:
    """Every test leaves no socket at its port: neither the one that listens, nor any that was answered."""
    yield
    deadline = time.monotonic() + 15
    while (left := sockets_at(port)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def sockets_at(port: int) -> list[Any]:
    ends = [(found, found.laddr, found.raddr) for found in psutil.Process().net_connections("tcp")]
    return [found for found, *addresses in ends if any(address and address.port == port for address in addresses)]


class Host:
    """A machine that meets the others in a thread of its own."""

    def __init__(
        self,
        rank: int,
        port: int,
        count: int = 2,
        name: str = "",
        processes: int | None = None,
        script: str = "recipes/cls.py",
        seconds: float = LONG,
        addresses: tuple[str, ...] = (HERE,),
        how: str = "--machine_rank",
    ) -> None:
        self.machines = Nodes(count, rank, how, addresses, port)
        self.fault: str | None = None
        self._arguments = (processes or count, script, seconds)
        self._failed: BaseException | None = None
        self.thread = threading.Thread(target=self._meet, name=name or f"host{rank}", daemon=True)
        self.thread.start()

    def _meet(self) -> None:
        try:
            node_rendezvous.find_peers(self.machines, *self._arguments)
        except UserError as error:
            self.fault = str(error)
        except BaseException as error:
            self._failed = error

    def ended(self) -> Host:
        self.thread.join(LONG + 10)
        assert not self.thread.is_alive(), f"{self.thread.name} still waits"
        assert self._failed is None, repr(self._failed)
        assert "\n" not in (self.fault or "")
        return self


def faults(*hosts: Host) -> list[str | None]:
    return [host.ended().fault for host in hosts]


def said(*hosts: Host) -> list[str]:
    """All fail."""
    found = faults(*hosts)
    assert None not in found
    return [str(fault) for fault in found]


def await_listener(port: int) -> None:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        try:
            connect(HERE, port, 1.0).close()
        except UnreachableError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"nobody listens at {port}")


# --- they come


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("first_last", [False, True], ids=["machine 0 first", "machine 0 last"])
def test_machines_that_ask_for_the_same_meet(port: int, count: int, first_last: bool) -> None:
    order = [*range(1, count), 0] if first_last else range(count)
    assert faults(*(Host(rank, port, count, processes=4 * count) for rank in order)) == [None] * count


# --- one does not come


def test_a_machine_that_does_not_come_is_named_within_the_time(port: int) -> None:
    started = time.monotonic()
    (fault,) = said(Host(0, port, seconds=1, addresses=(HERE, "10.0.0.2")))
    assert 1 <= time.monotonic() - started < 15
    for part in ("machine 1 (10.0.0.2) did not come within 1 s", "host0", f"port {port}", "ufw allow"):
        assert part in fault
    assert f"toolkit doctor --peers {HERE},10.0.0.2" in fault


def test_machine_0_that_is_not_there_is_said_with_what_was_met(port: int) -> None:
    started = time.monotonic()
    (fault,) = said(Host(1, port, seconds=1))
    assert 1 <= time.monotonic() - started < 15
    for part in ("machine 0 was not found within 1 s", "machine 1 (host1)", f"{HERE}:{port}", "nothing listens"):
        assert part in fault
    assert "toolkit doctor --peers" in fault


def test_a_machine_that_calls_itself_is_asked_whether_it_is_machine_0(port: int) -> None:
    (fault,) = said(Host(1, port, seconds=0.5, how="NODE_RANK"))
    assert f"{HERE} is an address of this very machine" in fault
    assert "number 1 (NODE_RANK)" in fault
    assert "is it machine 0?" in fault


def test_who_waits_says_so_once(port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(node_rendezvous, "_MENTION_SECONDS", 0.2)
    alone = Host(1, port, name="early", seconds=1.5, addresses=(HERE, "10.0.0.2"))
    said(alone)
    assert capfd.readouterr().err.count("machine 0 is not there yet") == 1
    said(Host(0, port, name="early", seconds=1.5, addresses=(HERE, "10.0.0.2")))
    lines = [line for line in capfd.readouterr().err.splitlines() if "waiting at port" in line]
    assert len(lines) == 1
    assert f"waiting at port {port} for machine 1 (10.0.0.2)" in lines[0]


# --- they are not the same


def test_unequal_numbers_of_processes_are_answered_on_both_sides_with_the_number_to_pass(port: int) -> None:
    first, other = said(Host(0, port, processes=16), Host(1, port, processes=4))
    assert first == other
    assert "host0 asks for 16 processes (8 on each machine)" in first
    assert "host1 (127.0.0.1) for 4 (2 on each)" in first
    assert "pass --num_processes 4 on all of them (2 on each)" in first


def test_another_number_of_machines_is_answered_on_both_sides(port: int) -> None:
    first, other = said(Host(0, port, 2, seconds=5), Host(1, port, 3, seconds=5))
    for fault in (first, other):
        assert "num_machines" in fault
        assert "token" not in fault  # none was given


def test_two_that_are_both_machine_0_hear_of_each_other(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of them has the first machine's address; without asking there both would wait in vain."""
    own = node_rendezvous.is_own
    other = "other"

    def of_this_host(there: Callable[[Any], Any], elsewhere: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: (elsewhere if threading.current_thread().name == other else there)(value)

    monkeypatch.setattr(node_rendezvous, "listen", of_this_host(listen, lambda _: listen(0)))
    monkeypatch.setattr(node_rendezvous, "is_own", of_this_host(own, lambda _: False))
    found = said(Host(0, port), Host(0, port, name=other))
    for fault in found:
        assert "two machines say that they are number 0" in fault
        assert "--machine_rank" in fault


def test_machine_0_behind_a_translated_address_does_not_take_itself_for_another(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloud's public address, or a container's published port, is none of its own and leads back to it."""
    monkeypatch.setattr(node_rendezvous, "is_own", lambda _: False)
    first = Host(0, port, seconds=8)
    await_listener(port)
    first.thread.join(2)  # it has called the first machine by then
    assert faults(first, Host(1, port, seconds=8)) == [None, None]


# --- the port


def test_a_taken_port_names_the_process_that_holds_it(port: int) -> None:
    with listen(port):
        started = time.monotonic()
        (fault,) = said(Host(0, port))
        assert time.monotonic() - started < LONG  # nobody waits for it
    for part in (f"port {port}", "host0", f"process {os.getpid()} (", f"`kill {os.getpid()}`", "--main_process_port"):
        assert part in fault


def test_another_program_at_machine_0s_port_is_said(port: int) -> None:
    with listen(port) as server:

        def greet_otherwise() -> None:
            server.settimeout(0.2)
            while not done.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"SSH-2.0-Something\r\n")

        done = threading.Event()
        program = threading.Thread(target=greet_otherwise, daemon=True)
        program.start()
        (fault,) = said(Host(1, port, seconds=1))
        done.set()
        program.join()
    assert "another program's port?" in fault


# --- strangers


def test_strangers_disturb_nobody(port: int) -> None:
    first = Host(0, port)
    await_listener(port)
    silent, garbage, long = (connect(HERE, port, 5.0) for _ in range(3))
    with silent, garbage, long:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
        long.sendall(b"\xff" * (1 << 16))
        with pytest.raises(ChannelError, match="does not know the token"):
            dial(HERE, port, "another")
        with connect(HERE, port, 5.0) as rude:
            rude.sendall(b"\0")  # half a message, then gone
        assert faults(first, Host(1, port)) == [None, None]
