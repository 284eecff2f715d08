"""The interfaces, and the machine's own address."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from toolkit.features.doctor import network
from toolkit.features.doctor.finding import Finding
from toolkit.launch.nodes import Nodes

ONE = Nodes(1, 0, "", ("127.0.0.1",), 29500)
TWO = Nodes(2, 0, "--machine_rank", ("10.0.0.1", "10.0.0.2"), 29600)


def test_the_interface_that_is_chosen_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """One way out; other networks cannot be reached."""
    addresses = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "172.17.0.1": "docker0"}
    states = {name: SimpleNamespace(mtu=1500, isup=name != "docker0") for name in addresses.values()}
    monkeypatch.setattr(network, "source_address_for", lambda to: "10.0.0.1" if to.startswith("10.0.") else None)
    monkeypatch.setattr(network.network, "local_addresses", lambda: addresses)
    monkeypatch.setattr(network.psutil, "net_if_stats", lambda: states)

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
    states["eth0"].isup = False
    assert findings(TWO)["10.0.0.1"].remedy.startswith("sudo ip link set eth0 up")
