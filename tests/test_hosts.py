"""The two hosts that other tests run on are two hosts."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import ADDRESSES, NOBODY, TwoHosts, two_hosts

pytestmark = pytest.mark.namespaces

PORT = 29500
SERVE = f"""
import socket
server = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(socket.gethostname().encode())
    connection.close()
"""
CALL = f"""
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], {PORT}), timeout=1).recv(99).decode())
except OSError as error:
    print(type(error).__name__, error.errno)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    for made in two_hosts():
        for host in ("a", "b"):
            server = made.start(host, [sys.executable, "-c", SERVE])
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        yield made


@pytest.fixture(autouse=True)
def _healed(hosts: TwoHosts) -> Iterator[None]:
    yield
    hosts.heal()


def call(hosts: TwoHosts, host: str, address: str) -> str:
    return hosts.run(host, [sys.executable, "-c", CALL, address], seconds=20).out.strip()


def both_ways(hosts: TwoHosts) -> tuple[str, str]:
    return call(hosts, "a", ADDRESSES["b"]), call(hosts, "b", ADDRESSES["a"])


def test_they_reach_each_other_by_address_and_by_name(hosts: TwoHosts) -> None:
    assert both_ways(hosts) == ("hostB", "hostA")
    assert call(hosts, "a", "hostB") == "hostB"
    assert call(hosts, "a", "hostA") == "hostA"  # over 127.0.1.1
    assert call(hosts, "a", NOBODY).startswith("TimeoutError")


def test_this_machine_is_neither_of_them(hosts: TwoHosts) -> None:
    own = hosts.run("a", [sys.executable, "-c", "import os; print(os.uname().nodename)"]).out.strip()
    assert own == "hostA" != socket.gethostname()


def test_a_blocked_port_is_blocked_one_way(hosts: TwoHosts) -> None:
    hosts.block("b", PORT)
    to_b, to_a = both_ways(hosts)
    assert to_b.startswith("TimeoutError")
    assert to_a == "hostA"
    hosts.heal()
    assert both_ways(hosts) == ("hostB", "hostA")


def test_a_forbidden_port(hosts: TwoHosts) -> None:
    hosts.forbid("a", PORT)
    assert both_ways(hosts) == ("PermissionError 13", "hostA")


def test_a_pulled_cable_and_a_dead_switch(hosts: TwoHosts) -> None:
    hosts.cut()
    assert call(hosts, "a", ADDRESSES["b"]) == "OSError 101"
    hosts.heal()
    assert both_ways(hosts) == ("hostB", "hostA")
    hosts.silence()
    assert all(answer.startswith("TimeoutError") for answer in both_ways(hosts))
    hosts.heal()
    assert both_ways(hosts) == ("hostB", "hostA")


def test_an_interface_that_leads_nowhere(hosts: TwoHosts) -> None:
    hosts.add_interface("a", "lan9", "10.99.0.1/24")
    assert call(hosts, "a", "10.99.0.1") == "hostA"
    assert call(hosts, "a", "10.99.0.2").startswith(("TimeoutError", "OSError 113"))


def test_a_file_seen_by_one_program_only(hosts: TwoHosts, tmp_path: Path) -> None:
    there, other = tmp_path / "data.csv", tmp_path / "other.csv"
    there.write_text("there")
    other.write_text("other")
    assert hosts.run("a", ["cat", there], binds={there: other}).out == "other"
    assert hosts.run("a", ["cat", there]).out == "there"
    assert there.read_text() == "there"


def test_a_program_that_does_not_end_is_ended(hosts: TwoHosts) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"did not end in 0\.5 s"):
        hosts.run("b", ["sleep", "60"], seconds=0.5)
    assert time.monotonic() - started < 8
    assert all("sleep" not in process.cmdline() for process in hosts.processes("b"))


def test_nothing_is_left_behind(hosts: TwoHosts) -> None:
    with TwoHosts() as more:
        spaces, folder = list(more._spaces.values()), more.folder("a")
        sleeper = more.start("a", ["sleep", "60"])
        assert all(Path("/run/netns", space).exists() for space in spaces)
        assert folder.is_dir()
    assert sleeper.poll() is not None
    assert not any(Path("/run/netns", space).exists() or Path("/etc/netns", space).exists() for space in spaces)
    assert not folder.exists()
