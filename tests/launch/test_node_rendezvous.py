"""toolkit/launch/meeting.py: machines meet over 127.0.0.1, each a thread of this process with a name of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from toolkit.launch.machines import Machines

from tests.conftest import REPOSITORY
from toolkit.errors import UserError
from toolkit.launch import meeting, wire
from toolkit.launch.environment import free_port

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
    monkeypatch.setattr(meeting.socket, "gethostname", lambda: threading.current_thread().name)


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
        self.machines = Machines(count, rank, how, addresses, port)
        self.fault: str | None = None
        self._arguments = (processes or count, script, seconds)
        self._failed: BaseException | None = None
        self.thread = threading.Thread(target=self._meet, name=name or f"host{rank}", daemon=True)
        self.thread.start()

    def _meet(self) -> None:
        try:
            meeting.meet(self.machines, *self._arguments)
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
            wire.connect(HERE, port, 1.0).close()
        except wire.UnreachableError:
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


def test_each_says_which_machine_it_is_and_how_it_knows(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert faults(Host(0, port, how="NODE_RANK"), Host(1, port, how="its address")) == [None, None]
    text = capfd.readouterr().err
    for line in ("machine 0 (host0) of 2: NODE_RANK", "machine 1 (host1) of 2: its address"):
        assert text.count(line) == 1


def test_scripts_of_one_name_in_different_folders_are_the_same(port: int) -> None:
    assert faults(Host(0, port, script="/a/cls.py"), Host(1, port, script="/b/recipes/cls.py")) == [None, None]


def test_the_port_is_free_for_the_launcher_afterwards(port: int) -> None:
    assert faults(Host(0, port), Host(1, port)) == [None, None]
    deadline = time.monotonic() + 10
    while True:
        try:
            wire.listen(port).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            break


# --- one does not come


def test_a_machine_that_does_not_come_is_named_within_the_time(port: int) -> None:
    started = time.monotonic()
    (fault,) = said(Host(0, port, seconds=1, addresses=(HERE, "10.0.0.2")))
    assert 1 <= time.monotonic() - started < 15
    for part in ("machine 1 (10.0.0.2) did not come within 1 s", "host0", f"port {port}", "ufw allow"):
        assert part in fault
    assert f"toolkit doctor --peers {HERE},10.0.0.2" in fault


def test_of_three_the_one_that_came_hears_which_one_did_not(port: int) -> None:
    first, other = said(Host(0, port, 3, seconds=2), Host(1, port, 3, seconds=2))
    assert first == other
    assert "machine 2 did not come within 2 s" in first
    assert "machine 1" not in first
    assert "1 other came" in first


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


def test_a_name_that_nobody_knows_is_said_at_the_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (fault,) = said(Host(1, port, seconds=0.5, addresses=("gpu1",)))
    assert "gpu1" in fault
    assert "no machine is known here by this name" in fault


def test_who_waits_says_so_once(port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(meeting, "_SAY_AFTER_SECONDS", 0.2)
    alone = Host(1, port, name="early", seconds=1.5, addresses=(HERE, "10.0.0.2"))
    said(alone)
    assert capfd.readouterr().err.count("machine 0 is not there yet") == 1
    said(Host(0, port, name="early", seconds=1.5, addresses=(HERE, "10.0.0.2")))
    lines = [line for line in capfd.readouterr().err.splitlines() if "waiting at port" in line]
    assert len(lines) == 1
    assert f"waiting at port {port} for machine 1 (10.0.0.2)" in lines[0]


def test_a_machine_that_is_early_waits_for_the_latest_as_long_as_machine_0_does(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others, which wait from their own start on, would begin without it."""
    monkeypatch.setattr(meeting, "_VERDICT_SECONDS", 0.5)
    early = Host(1, port, 3, seconds=4)
    early.thread.join(2.5)  # most of its time is over when machine 0 comes
    first = Host(0, port, 3, seconds=4)
    early.thread.join(2.5)  # now all of it is
    late = Host(2, port, 3, seconds=4)
    assert faults(first, early, late) == [None, None, None]


# --- they are not the same


def test_unequal_numbers_of_processes_are_answered_on_both_sides_with_the_number_to_pass(port: int) -> None:
    first, other = said(Host(0, port, processes=16), Host(1, port, processes=4))
    assert first == other
    assert "host0 asks for 16 processes (8 on each machine)" in first
    assert "host1 (127.0.0.1) for 4 (2 on each)" in first
    assert "pass --num_processes 4 on all of them (2 on each)" in first


def test_of_three_machines_all_that_came_hear_of_the_one_that_counts_differently(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, compared = meeting._disagreement, threading.Event()

    def noticed(found: list[Any]) -> str:
        fault = compare(found)
        compared.set()
        return fault

    monkeypatch.setattr(meeting, "_disagreement", noticed)
    hosts = [Host(rank, port, 3, processes=6) for rank in range(2)]
    compared.wait(5)  # with machine 1, which is there by now
    found = said(*hosts, Host(2, port, 3, processes=3))
    assert len(set(found)) == 1
    assert "host2" in found[0]
    assert "host1" not in found[0]
    assert "--num_processes 3" in found[0]


def test_a_difference_is_told_at_once_and_not_when_all_have_come(port: int) -> None:
    started = time.monotonic()
    first, other = said(Host(0, port, 3, processes=6), Host(2, port, 3, processes=3))
    assert time.monotonic() - started < LONG / 2
    assert first == other
    assert "--num_processes 3" in first


def test_another_script_is_answered_on_both_sides(port: int) -> None:
    first, other = said(Host(0, port, script="recipes/cls.py"), Host(1, port, script="recipes/title.py"))
    assert first == other
    for part in ("host0", "cls.py", "host1", "title.py", "type the same"):
        assert part in first


def test_another_number_of_machines_is_answered_on_both_sides(port: int) -> None:
    first, other = said(Host(0, port, 2, seconds=5), Host(1, port, 3, seconds=5))
    for fault in (first, other):
        assert "num_machines" in fault
        assert "token" not in fault  # none was given


def test_a_number_that_is_claimed_twice_is_answered_to_all_three(port: int) -> None:
    first = Host(0, port, 3)
    twins = [Host(1, port, 3, name=name) for name in ("left", "right")]
    found = said(first, *twins)
    assert len(set(found)) == 1
    for part in ("number 1", "left", "right", "--machine_rank"):
        assert part in found[0]


def test_two_that_are_both_machine_0_hear_of_each_other(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of them has the first machine's address; without asking there both would wait in vain."""
    listen, own = meeting.listen, meeting.is_own
    other = "other"

    def of_this_host(there: Callable[[Any], Any], elsewhere: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: (elsewhere if threading.current_thread().name == other else there)(value)

    monkeypatch.setattr(meeting, "listen", of_this_host(listen, lambda _: listen(0)))
    monkeypatch.setattr(meeting, "is_own", of_this_host(own, lambda _: False))
    found = said(Host(0, port), Host(0, port, name=other))
    for fault in found:
        assert "two machines say that they are number 0" in fault
        assert "--machine_rank" in fault


def test_machine_0_behind_a_translated_address_does_not_take_itself_for_another(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloud's public address, or a container's published port, is none of its own and leads back to it."""
    monkeypatch.setattr(meeting, "is_own", lambda _: False)
    first = Host(0, port, seconds=8)
    await_listener(port)
    first.thread.join(2)  # it has called the first machine by then
    assert faults(first, Host(1, port, seconds=8)) == [None, None]


def test_an_address_that_is_not_machine_0s_is_said_to_be_none_of_it(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "is_own", lambda _: False)
    monkeypatch.setattr(meeting, "_other_first", lambda *_: None)
    (fault,) = said(Host(0, port, seconds=1))
    assert f"{HERE}, which the others call, is not an address of this machine" in fault
    assert "--main_process_ip" in fault


# --- the port


def test_a_taken_port_names_the_process_that_holds_it(port: int) -> None:
    with wire.listen(port):
        started = time.monotonic()
        (fault,) = said(Host(0, port))
        assert time.monotonic() - started < LONG  # nobody waits for it
    for part in (f"port {port}", "host0", f"process {os.getpid()} (", f"`kill {os.getpid()}`", "--main_process_port"):
        assert part in fault


def test_another_program_at_machine_0s_port_is_said(port: int) -> None:
    with wire.listen(port) as server:

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
    silent, garbage, long = (wire.connect(HERE, port, 5.0) for _ in range(3))
    with silent, garbage, long:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
        long.sendall(b"\xff" * (1 << 16))
        with pytest.raises(wire.WireError, match="does not know the token"):
            wire.dial(HERE, port, "another")
        with wire.connect(HERE, port, 5.0) as rude:
            rude.sendall(b"\0")  # half a message, then gone
        assert faults(first, Host(1, port)) == [None, None]


def test_who_knows_the_token_and_says_nothing_of_itself_is_not_counted(port: int) -> None:
    token = meeting._token(Machines(2, 1, "", (HERE,), port))
    first = Host(0, port)
    await_listener(port)
    with wire.dial(HERE, port, token) as nameless, wire.dial(HERE, port, token):
        nameless.send({"host": "x"})
        assert faults(first, Host(1, port)) == [None, None]


def test_with_a_token_of_their_own_they_meet_and_others_do_not(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_TOKEN", "secret")
    first = Host(0, port)
    await_listener(port)
    with pytest.raises(wire.WireError, match="does not know the token"):
        wire.dial(HERE, port, meeting._token(replace(first.machines, rank=1)) + "x")
    assert faults(first, Host(1, port)) == [None, None]


CALL = """
import sys
from toolkit.errors import UserError
from toolkit.launch.machines import Machines
from toolkit.launch.meeting import meet
rank, port, seconds = map(int, sys.argv[1:])
try:
    meet(Machines(2, rank, "--machine_rank", ("127.0.0.1",), port), 2, "cls.py", seconds)
except UserError as error:
    sys.exit(f"error: {error}")
"""


def start(rank: int, port: int, seconds: int, token: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CALL, *map(str, (rank, port, seconds))]
    env = {**os.environ, "TOOLKIT_TOKEN": token}
    return subprocess.Popen(command, env=env, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def test_two_processes_with_different_tokens_do_not_meet_and_say_why(port: int) -> None:
    first, other = started = [start(0, port, 20, "a"), start(1, port, 4, "b")]
    try:
        _, of_the_other = other.communicate(timeout=60)
        assert other.returncode == 1
        assert "does not know the token" in of_the_other
        assert "pass the same to both" in of_the_other
        with start(1, port, 20, "a") as right:  # and the first goes on waiting for the right one
            _, of_the_right = right.communicate(timeout=60)
        assert (right.returncode, first.wait(60)) == (0, 0), of_the_right
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=10)
