"""The network as this machine sees it: the port, the interface that is chosen, the machines' addresses."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from toolkit.errors import plain
from toolkit.features.doctor.finding import Finding, Level, read_text
from toolkit.launch import network as net
from toolkit.launch.network import address_towards, addresses_of, is_loopback
from toolkit.launch.nodes import Nodes

_NOWHERE = "192.0.2.1"
"""An address kept for documentation: the way to it is the default route."""


@dataclass(frozen=True)
class Interface:
    """An IPv4 address and the interface that has it."""

    name: str
    address: str
    up: bool = True
    carrier: bool = True
    """Whether a cable (or a wireless network) is there."""
    mtu: int = 0

    def __str__(self) -> str:
        state = "" if self.up and self.carrier else "no cable, " if self.up else "down, "
        return f"{self.name} {self.address} ({state}MTU {self.mtu})"


def interfaces() -> list[Interface]:
    """This machine's, loopback too."""
    states, found = psutil.net_if_stats(), []
    for address, name in net.own_addresses().items():
        # the kernel's own word: psutil's lags behind by a second
        flags, carrier = (read_text(f"/sys/class/net/{name}/{file}") for file in ("flags", "carrier"))
        up = bool(int(flags, 16) & 1) if flags else states[name].isup
        found.append(Interface(name, address, up, carrier != "0", states[name].mtu if name in states else 0))
    return found


def check_port(nodes: Nodes) -> Finding:
    """Checks that the launch port is free: one machine takes another by itself, several have to agree on one."""
    port, several = nodes.port, nodes.count > 1
    try:
        net.listen(port).close()
        return Finding("network", "port", "ok", f"{port} is free")
    except PermissionError:
        remedy = "--main_process_port 29600 (or another from 1024 on)"
        return Finding("network", "port", "fail", f"port {port} is for root alone", remedy)
    except OSError:
        text, remedy = "by a process this user cannot see", f"`sudo ss -ltnp 'sport = :{port}'` shows by whom"
        if holder := net.holder_of(port):
            text, remedy = f"by {holder[1]}", f"kill {holder[0]}  (if it is left over)"
        remedy += f", or --main_process_port {port + 1}{' on every machine' * several}"
        return Finding("network", "port", "fail" if several else "warn", plain(f"{port} is taken {text}"), remedy)


def chosen(nodes: Nodes, found: Sequence[Interface]) -> tuple[Interface | None, str]:
    """(the interface that processes of several machines will use, why); None where none leads to the others."""
    others = nodes.others()
    if nodes.count > 1 and nodes.rank == 0 and not others:
        own, why = next(iter(addresses_of(nodes.first)), None), "the address that was named for this machine"
    else:
        own = address_towards(others[0] if others else _NOWHERE)
        why = f"the route to {others[0]}" if others else "the default route"
    return next((one for one in found if one.address == own), None), why


def check_interfaces(nodes: Nodes, found: Sequence[Interface]) -> list[Finding]:
    """Shows the interfaces, and which one is chosen."""
    shown = ", ".join(str(interface) for interface in found if not is_loopback(interface.address))
    listed = Finding("network", "interfaces", "ok", shown or "this machine has none but its loopback")
    (one, why), others = chosen(nodes, found), nodes.others()
    if one is not None:
        return [listed, Finding("network", "chosen", "ok", f"{one.name} ({one.address}), by {why}")]
    if not others:
        text = "this machine has no default route: it can only run alone"
        return [listed, Finding("network", "chosen", "note", text)]
    remedy = f"`ip route get {shlex.quote(others[0])}`, `ip -br link`"
    return [listed, Finding("network", "chosen", "fail", f"no interface leads to {others[0]}", remedy)]


# --- the machines' addresses as they were given


def check_addresses(nodes: Nodes, found: Sequence[Interface]) -> list[Finding]:
    """Checks that this machine has its address, with a cable in it."""
    text = f"this is machine {nodes.rank} of {nodes.count} ({nodes.how})"
    named = nodes.address_of(nodes.rank)
    wrong = _check_own_address(named, nodes.others(), found) if named else []
    return [Finding("machines", "this one", "ok", text), *wrong]


def _check_own_address(name: str, others: Sequence[str], found: Sequence[Interface]) -> list[Finding]:
    addresses = addresses_of(name)
    here = [interface for interface in found if interface.address in addresses]
    sources = {source for other in others if (source := address_towards(other)) and not is_loopback(source)}
    level: Level = "fail"
    if not addresses or addresses == ["127.0.1.1"]:  # what a host's own name means at home, as Debian has it
        return []
    if not here:
        own = ", ".join(one.address for one in found if not is_loopback(one.address)) or "none"
        text = f"{name} was named for this machine, which does not have it ({own})"
        remedy = "give its own address (`hostname -I`), or another --machine_rank"
    elif not here[0].up:
        text = f"{name} is an address of this machine, and its interface {here[0].name} is down"
        remedy = f"sudo ip link set {here[0].name} up"
    elif not here[0].carrier:
        text = f"{name} is an address of this machine, and its interface {here[0].name} has no cable"
        remedy = f"`ethtool {here[0].name}`; is the cable in, the switch on?"
    elif source := next(iter(sources - set(addresses)), None):
        text = f"{name} was named for this machine, and what it sends to the others comes from {source}"
        level, remedy = "warn", f"name {source} instead of {name}, on all machines"
    else:
        return []
    return [Finding("machines", name, level, text, remedy)]


def own_host() -> str:
    return plain(socket.gethostname(), 100)
