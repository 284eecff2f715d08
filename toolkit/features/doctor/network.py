"""The network as this machine sees it: the interface that is chosen, the machine's own address."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import psutil

from toolkit.features.doctor.finding import Finding
from toolkit.launch import network
from toolkit.launch.network import is_loopback, resolve_addresses, source_address_for
from toolkit.launch.nodes import Nodes

_NOWHERE = "192.0.2.1"
"""An address reserved for documentation: the way to it is the default route."""


def check_interfaces(nodes: Nodes) -> Iterator[Finding]:
    """Lists the interfaces, and the one that processes of several machines will use."""
    interfaces, states = network.local_addresses(), psutil.net_if_stats()
    down = {name for name, state in states.items() if not state.isup}  # switched off, or without a cable
    listed = ", ".join(
        f"{name} {address} ({'down, ' * (name in down)}MTU {states[name].mtu})"
        for address, name in interfaces.items()
        if name in states and not is_loopback(address)
    )
    yield Finding("network", "interfaces", "ok", listed or "this machine has none but its loopback")
    others = nodes.others()
    address, why = source_address_for(others[0] if others else _NOWHERE), "the default route"
    if others:
        why = f"the route to {others[0]}"
    elif nodes.count > 1:
        address, why = next(iter(resolve_addresses(nodes.first)), None), "its address in the settings"
    if address in interfaces:
        yield Finding("network", "chosen", "ok", f"{interfaces[address]} ({address}), by {why}")
    elif others:
        remedy = f"`ip route get {shlex.quote(others[0])}`, `ip -br link`"
        yield Finding("network", "chosen", "fail", f"no interface leads to {others[0]}", remedy)
    else:
        yield Finding("network", "chosen", "note", "this machine has no default route: it can only run alone")
    if nodes.count > 1:
        yield Finding(
            "machines", "this one", "ok", f"this is machine {nodes.rank} of {nodes.count} ({nodes.rank_source})"
        )
        name = nodes.address_of(nodes.rank)
        for interface in {interfaces.get(address) for address in (resolve_addresses(name) if name else ())} & down:
            text = f"{name} is an address of this machine, and its interface {interface} is down or has no cable"
            remedy = f"sudo ip link set {interface} up; `ethtool {interface}`: is the cable in, the switch on?"
            yield Finding("machines", name, "fail", text, remedy)
