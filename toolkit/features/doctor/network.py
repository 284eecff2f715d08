"""The network as this machine sees it: the port, the interface that is chosen, the machine's own address."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from toolkit.errors import plain
from toolkit.features.doctor.finding import Finding
from toolkit.launch import network
from toolkit.launch.network import address_towards, addresses_of, is_loopback
from toolkit.launch.nodes import Nodes

_NOWHERE = "192.0.2.1"
"""An address reserved for documentation: the way to it is the default route."""


@dataclass(frozen=True)
class Interface:
    """An address of this machine, and the interface that has it."""

    name: str
    address: str
    up: bool = True
    """And, where it has a cable, a link."""
    mtu: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.address} ({'' if self.up else 'down, '}MTU {self.mtu})"


def interfaces() -> list[Interface]:
    """This machine's, loopback too."""
    states = psutil.net_if_stats()
    return [
        Interface(name, address, states[name].isup, states[name].mtu)
        for address, name in network.own_addresses().items()
        if name in states
    ]


def check(nodes: Nodes, found: Sequence[Interface]) -> list[Finding]:
    return [_check_port(nodes), *_check_interfaces(nodes, found), *(_check_address(nodes, found) if nodes.count > 1 else [])]


def _check_port(nodes: Nodes) -> Finding:
    """Whether the launch port is free: a run on one machine takes another by itself, several machines cannot."""
    port, several = nodes.port, nodes.count > 1
    try:
        network.listen(port).close()
        return Finding("network", "port", "ok", f"{port} is free")
    except PermissionError:
        remedy = "--main_process_port 29600 (or another from 1024 on)"
        return Finding("network", "port", "fail", f"port {port} is for root alone", remedy)
    except OSError:
        text, remedy = "by a process this user cannot see", f"`sudo ss -ltnp 'sport = :{port}'` shows by whom"
        if holder := network.holder_of(port):
            text, remedy = f"by {holder[1]}", f"kill {holder[0]}  (if it is left over)"
        remedy += f", or --main_process_port {port + 1}{' on every machine' * several}"
        needed = several and nodes.rank == 0  # the others call it
        return Finding("network", "port", "fail" if needed else "warn", plain(f"{port} is taken {text}"), remedy)


def _check_interfaces(nodes: Nodes, found: Sequence[Interface]) -> list[Finding]:
    """Lists the interfaces, and which one the processes of several machines will use."""
    listed = ", ".join(str(interface) for interface in found if not is_loopback(interface.address))
    findings = [Finding("network", "interfaces", "ok", listed or "this machine has none but its loopback")]
    others = nodes.others()
    if nodes.count > 1 and nodes.rank == 0 and not others:
        address, why = next(iter(addresses_of(nodes.first)), None), "the address of this machine in the settings"
    else:
        address = address_towards(others[0] if others else _NOWHERE)
        why = f"the route to {others[0]}" if others else "the default route"
    if chosen := next((interface for interface in found if interface.address == address), None):
        findings.append(Finding("network", "chosen", "ok", f"{chosen.name} ({chosen.address}), by {why}"))
    elif others:
        remedy = f"`ip route get {shlex.quote(others[0])}`, `ip -br link`"
        findings.append(Finding("network", "chosen", "fail", f"no interface leads to {others[0]}", remedy))
    else:
        findings.append(Finding("network", "chosen", "note", "this machine has no default route: it can only run alone"))
    return findings


def _check_address(nodes: Nodes, found: Sequence[Interface]) -> list[Finding]:
    """Whether this machine has the address by which the others call it, on an interface that is up."""
    name, addresses = nodes.address_of(nodes.rank), addresses_of(nodes.address_of(nodes.rank) or "")
    findings = [Finding("machines", "this one", "ok", f"this is machine {nodes.rank} of {nodes.count} ({nodes.how})")]
    if not addresses or addresses == ["127.0.1.1"]:  # unknown, or a host's own name at home, as Debian has it
        return findings
    here = next((interface for interface in found if interface.address in addresses), None)
    sources = {address_towards(other) for other in nodes.others()} - {None, *addresses}
    routed = sorted(source for source in sources if source and not is_loopback(source))
    if here is None:
        own = ", ".join(interface.address for interface in found if not is_loopback(interface.address)) or "none"
        text, remedy = f"{name} is not an address of this machine ({own})", "give its own address (`hostname -I`)"
        findings.append(Finding("machines", "address", "fail", text, f"{remedy}, or another --machine_rank"))
    elif not here.up:
        text = f"{name} is an address of this machine, and its interface {here.name} is down or has no cable"
        remedy = f"sudo ip link set {here.name} up; `ethtool {here.name}`: is the cable in, the switch on?"
        findings.append(Finding("machines", "address", "fail", text, remedy))
    elif routed:
        text = f"{name} is this machine's address in the settings, and what it sends to the others comes from {routed[0]}"
        remedy = f"name {routed[0]} instead of {name}, on all machines"
        findings.append(Finding("machines", "address", "warn", text, remedy))
    return findings
