"""The network as this machine sees it: the port, the interface that is chosen, the machines' addresses."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from toolkit.doctor.finding import Finding, Level, plain, read_text
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


def check_port(port: int, several_machines: bool) -> Finding:
    """Checks that the launch port is free: one machine takes another by itself, several have to agree on one."""
    try:
        net.listen(port).close()
    except PermissionError:
        text = f"port {port} is for root alone"
        return Finding("network", "port", "fail", text, "--main_process_port 29600 (or another from 1024 on)")
    except OSError:
        level: Level = "fail" if several_machines else "warn"
        other = f"--main_process_port {port + 1}{' on every machine' * several_machines}"
        if (holder := net.holder_of(port)) is None:
            remedy = f"`sudo ss -ltnp 'sport = :{port}'` shows by whom; or {other}"
            return Finding("network", "port", level, f"{port} is taken, by a process this user cannot see", remedy)
        remedy = f"kill {holder[0]}  (if it is left over), or {other}"
        return Finding("network", "port", level, plain(f"{port} is taken by {holder[1]}"), remedy)
    return Finding("network", "port", "ok", f"{port} is free")


def check_interfaces(machines: Nodes | None, found: Sequence[Interface]) -> list[Finding]:
    """Shows the interfaces, and which one processes of several machines will use."""
    shown = ", ".join(str(interface) for interface in found if not is_loopback(interface.address))
    lines = [Finding("network", "interfaces", "ok", shown or "this machine has none but its loopback")]
    others = other_addresses(machines)
    why = f"the route to {others[0]}" if others else "the default route"
    own = address_towards(others[0] if others else _NOWHERE)
    if machines and machines.rank == 0 and not others:
        why, own = "the address that was named for this machine", next(iter(addresses_of(machines.first)), None)
    chosen = next((one for one in found if one.address == own), None)
    if chosen is not None:
        return [*lines, Finding("network", "chosen", "ok", f"{chosen.name} ({chosen.address}), by {why}")]
    if not others:
        return [
            *lines,
            Finding("network", "chosen", "note", "this machine has no default route: it can only run alone"),
        ]
    remedy = f"`ip route get {shlex.quote(others[0])}`, `ip -br link`"
    return [*lines, Finding("network", "chosen", "fail", f"no interface leads to {others[0]}", remedy)]


def other_addresses(machines: Nodes | None) -> list[str]:
    """The other machines' addresses, as far as they were given."""
    addresses = machines.addresses if machines else ()
    return [name for rank, name in enumerate(addresses) if machines and rank != machines.rank]


# --- the machines' addresses as they were given


def check_addresses(machines: Nodes, found: Sequence[Interface]) -> list[Finding]:
    """Checks that this machine has its address, with a cable in it, and that the others' are not its own."""
    text = f"this is machine {machines.rank} of {machines.count} ({machines.how})"
    lines = [Finding("machines", "this one", "ok", text)]
    if machines.rank < len(machines.addresses):
        lines += _check_own_address(machines.addresses[machines.rank], other_addresses(machines), found)
    for name in filter(is_this_machine, other_addresses(machines)):
        text = f"{name} means this machine itself, so no other one can be there"
        remedy = "give the address by which the others reach it (`hostname -I` there)"
        lines.append(Finding("machines", name, "fail", text, remedy))
    return lines


def is_this_machine(name: str) -> bool:
    """Whether only this machine itself can have that address."""
    addresses = addresses_of(name)
    return bool(addresses) and all(map(is_loopback, addresses))


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
