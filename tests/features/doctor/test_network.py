"""The port, the interfaces, and the machine's own address."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from toolkit.features.doctor import network
from toolkit.features.doctor.finding import Finding
from toolkit.launch.nodes import Nodes

ONE = Nodes(1, 0, "", ("127.0.0.1",), 29500)
TWO = Nodes(2, 0, "--machine_rank", ("10.0.0.1", "10.0.0.2"), 29600)


def test_a_port_that_is_taken_names_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        two = replace(TWO, port=port)
        one, several, other = (
            network.check_port(nodes) for nodes in (replace(two, count=1), two, replace(two, rank=1))
        )
        monkeypatch.setattr(network.network, "holder_of", lambda port: None)
        unseen = network.check_port(two)
    assert (one.level, several.level, other.level) == ("warn", "fail", "warn")
    assert f"{port} is taken by process {os.getpid()} (" in several.text
    every = f"--main_process_port {port + 1} on every machine"
    assert several.remedy == f"kill {os.getpid()}  (if it is left over), or {every}"
    assert f"sudo ss -ltnp 'sport = :{port}'" in unseen.remedy
    assert network.check_port(two).level == "ok"


def test_the_interface_that_is_chosen_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """One way out; other networks cannot be reached."""
    addresses = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "172.17.0.1": "docker0"}
    states = {name: SimpleNamespace(mtu=1500) for name in addresses.values()}
    down = {"docker0"}
    monkeypatch.setattr(network, "address_towards", lambda to: "10.0.0.1" if to.startswith("10.0.") else None)
    monkeypatch.setattr(network.network, "own_addresses", lambda: addresses)
    monkeypatch.setattr(network.psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(network, "_is_down", down.__contains__)

    def findings(nodes: Nodes) -> dict[str, Finding]:
        return {finding.name: finding for finding in network.check_interfaces(nodes)}

    two = findings(TWO)
    assert two["interfaces"].text == "eth0 10.0.0.1 (MTU 1500), docker0 172.17.0.1 (down, MTU 1500)"
    assert (two["chosen"].level, two["chosen"].text) == ("ok", "eth0 (10.0.0.1), by the route to 10.0.0.2")
    assert two["this one"].text == "this is machine 0 of 2 (--machine_rank)"
    nowhere = findings(replace(TWO, addresses=("10.0.0.1", "10.9.9.9")))["chosen"]
    assert (nowhere.level, nowhere.remedy) == ("fail", "`ip route get 10.9.9.9`, `ip -br link`")
    assert findings(replace(TWO, addresses=("10.0.0.1",)))["chosen"].text.startswith("eth0 (10.0.0.1)")
    assert findings(ONE)["chosen"].text == "this machine has no default route: it can only run alone"
    down.add("eth0")
    assert findings(TWO)["10.0.0.1"].remedy.startswith("sudo ip link set eth0 up")
