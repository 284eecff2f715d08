"""The port, the interfaces, and the machines' addresses."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from toolkit.features.doctor import network
from toolkit.features.doctor.network import Interface
from toolkit.launch.nodes import Nodes

FOUND = [Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1", mtu=1500),
         Interface("docker0", "172.17.0.1", carrier=False)]  # fmt: skip
ONE = Nodes(1, 0, "", ("127.0.0.1",), 29500)
TWO = Nodes(2, 0, "--machine_rank", ("10.0.0.1", "10.0.0.2"), 29600)


@pytest.fixture(autouse=True)
def _route(monkeypatch: pytest.MonkeyPatch) -> None:
    """One way out, as FOUND has it; other networks are not reached."""
    monkeypatch.setattr(network, "address_towards", lambda to: "10.0.0.1" if to.startswith("10.0.") else None)


def test_a_port_that_is_taken_names_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        two = replace(TWO, port=port)
        one, several = (network.check_port(nodes) for nodes in (replace(two, count=1), two))
        monkeypatch.setattr(network.net, "holder_of", lambda port: None)
        unseen = network.check_port(two)
    assert (one.level, several.level) == ("warn", "fail")
    assert f"{port} is taken by process {os.getpid()} (" in several.text
    every = f"--main_process_port {port + 1} on every machine"
    assert several.remedy == f"kill {os.getpid()}  (if it is left over), or {every}"
    assert f"sudo ss -ltnp 'sport = :{port}'" in unseen.remedy
    assert network.check_port(two).level == "ok"


def test_the_interface_that_is_chosen_and_why() -> None:
    listed, chosen = network.check_interfaces(TWO, FOUND)
    assert listed.text == "eth0 10.0.0.1 (MTU 1500), docker0 172.17.0.1 (no cable, MTU 0)"
    assert (chosen.level, chosen.text) == ("ok", "eth0 (10.0.0.1), by the route to 10.0.0.2")
    nowhere = network.check_interfaces(replace(TWO, addresses=("10.0.0.1", "10.9.9.9")), FOUND[:1])[1]
    assert (nowhere.level, nowhere.remedy) == ("fail", "`ip route get 10.9.9.9`, `ip -br link`")
    first = network.check_interfaces(replace(TWO, addresses=("10.0.0.1",)), FOUND)[1]
    assert first.text == "eth0 (10.0.0.1), by the address that was named for this machine"
    assert network.check_interfaces(ONE, FOUND)[1].text == "this machine has no default route: it can only run alone"


@pytest.mark.parametrize(("addresses", "found", "level", "words"), [
    (("10.0.0.1", "10.0.0.2"), FOUND[1], "", ""),
    (("10.0.0.1", "10.0.0.2"), replace(FOUND[1], up=False), "fail", "sudo ip link set eth0 up"),
    (("10.0.0.1", "10.0.0.2"), replace(FOUND[1], carrier=False), "fail", "is the cable in"),
    (("10.0.9.9", "10.0.0.2"), FOUND[1], "fail", "give its own address"),
    (("10.99.0.1", "10.0.0.2"), replace(FOUND[1], address="10.99.0.1"), "warn", "name 10.0.0.1 instead of 10.99.0.1"),
])  # fmt: skip
def test_addresses_as_they_were_given(addresses: tuple[str, ...], found: Interface, level: str, words: str) -> None:
    this_one, *wrong = network.check_addresses(replace(TWO, addresses=addresses), [FOUND[0], found])
    assert this_one.text == "this is machine 0 of 2 (--machine_rank)"
    assert [finding.level for finding in wrong] == ([level] if level else [])
    assert all(words in finding.remedy for finding in wrong)
