"""The port, the interfaces and firewalls."""

from __future__ import annotations

import os
import socket

import pytest

from toolkit.doctor import network
from toolkit.doctor.network import Interface, PortUse

FOUND = [Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1", megabits=10000, mtu=1500),
         Interface("docker0", "172.17.0.1", carrier=False)]  # fmt: skip


def test_a_port_that_is_taken_names_who_has_it() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (one,) = network.check_port(port, several_machines=False)
        (several,) = network.check_port(port, several_machines=True)
    assert (one.level, several.level) == ("warn", "fail")
    assert f"{port} is taken by process {os.getpid()} (" in several.text
    assert (
        several.remedy
        == f"kill {os.getpid()}  (if it is left over), or --main_process_port {port + 1} on every machine"
    )
    (free,) = network.check_port(port, several_machines=True)
    assert free.level == "ok"


def test_a_port_somebody_else_has() -> None:
    theirs = network.port_taken(29500, PortUse(7, "python", "ann"), several_machines=True)
    assert theirs.remedy.startswith("sudo kill 7")
    unseen = network.port_taken(29500, PortUse(None), several_machines=True)
    assert "sudo ss -ltnp 'sport = :29500'" in unseen.remedy


def test_interfaces_on_one_line() -> None:
    line = network.all_interfaces(FOUND)
    assert line.text == "eth0 10.0.0.1 (10 Gbit/s, MTU 1500), docker0 172.17.0.1 (no cable, MTU 0)"
    assert network.all_interfaces(FOUND[:1]).level == "note"


def test_the_interface_that_is_chosen_and_why() -> None:
    (good,) = network.chosen(FOUND, ("10.0.0.2", "10.0.0.1"), {})
    assert (good.level, good.text) == ("ok", "eth0 (10.0.0.1), by the route to 10.0.0.2")
    (nowhere,) = network.chosen(FOUND, ("10.9.9.9", None), {})
    assert (nowhere.level, nowhere.remedy) == ("fail", "`ip route get 10.9.9.9`, `ip -br link`")


def test_where_the_others_are_not_known_the_own_address_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: FOUND)
    found = network.check_interfaces([], "10.0.0.1", {})
    assert found[1].text == "eth0 (10.0.0.1), by the address that was named for this machine"


def test_a_variable_that_chooses_another_interface_than_the_route() -> None:
    env = {"NCCL_SOCKET_IFNAME": "docker", "GLOO_SOCKET_IFNAME": "eth0"}
    _, warned = network.chosen(FOUND, ("10.0.0.2", "10.0.0.1"), env)
    assert (warned.level, warned.name) == ("warn", "NCCL_SOCKET_IFNAME")
    assert "export NCCL_SOCKET_IFNAME=eth0" in warned.remedy


def test_a_host_name_that_means_loopback() -> None:
    assert network.own_name("gpu1", ["10.0.0.1"]) == []
    assert "gpu1 means 127.0.1.1 here" in network.own_name("gpu1", ["127.0.1.1"])[0].text
    assert "/etc/hosts" in network.own_name("gpu1", [])[0].remedy


NFT_DROPS = """table inet filter {
	chain input {
		type filter hook input priority filter; policy drop;
		ct state established accept
		ip saddr 10.0.0.9 accept
	}
	chain output { type filter hook output priority filter; policy accept; }
}"""


@pytest.mark.parametrize(("answers", "line"), [
    ({"ufw": "Status: active\n\nTo   Action  From\n22   ALLOW  Anywhere\n"}, "sudo ufw allow from 10.0.0.2"),
    ({"firewalld": "running\n"}, "sudo firewall-cmd --zone=trusted --add-source=10.0.0.2"),
    ({"nftables": NFT_DROPS}, "sudo nft insert rule inet filter input ip saddr 10.0.0.2 accept"),
    ({"iptables": "-P INPUT DROP\n-A INPUT -p tcp --dport 22 -j ACCEPT\n"}, "sudo iptables -I INPUT -s 10.0.0.2 -j"),
    ({"iptables": "-P INPUT ACCEPT\n-A INPUT -j REJECT --reject-with icmp-host-prohibited\n"}, "sudo iptables"),
])  # fmt: skip
def test_firewalls_that_drop(answers: dict[str, str], line: str) -> None:
    (found,) = network.firewalls(answers, 29600, ["10.0.0.2"])
    assert found.level == "warn"
    assert found.remedy.startswith(line)
    assert network.firewalls(answers, 29600, [])[0].level == "note"  # one machine alone needs nothing opened


@pytest.mark.parametrize("answers", [
    {},
    {"ufw": "Status: inactive\n"},
    {"ufw": "Status: active\n\nAnywhere  ALLOW  10.0.0.2\n"},
    {"nftables": NFT_DROPS.replace("10.0.0.9", "10.0.0.2")},
    {"nftables": NFT_DROPS.replace("policy drop", "policy accept")},
    {"iptables": "-P INPUT ACCEPT\n-A INPUT -i docker0 -j DROP\n"},
])  # fmt: skip
def test_firewalls_that_do_not_stand_in_the_way(answers: dict[str, str]) -> None:
    (found,) = network.firewalls(answers, 29600, ["10.0.0.2"])
    assert found.level == "ok"


def test_addresses_nobody_answered_to() -> None:
    table = (
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        "10.0.0.1         0x1         0x2         02:fc:00:00:00:05     *        eth0\n"
        "10.0.0.77        0x1         0x0         00:00:00:00:00:00     *        eth0\n"
    )
    assert network.unanswered(table) == {"10.0.0.77": "eth0"}
    assert network.unanswered("") == {}
