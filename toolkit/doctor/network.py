"""The network as this machine sees it: the port, the interfaces and which one is chosen, names, firewalls."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from toolkit.doctor import shell
from toolkit.doctor.finding import Finding, Level, plain
from toolkit.doctor.probe import read_text, run_program
from toolkit.launch import wire
from toolkit.launch.wire import is_loopback

AREA = "network"
_FIREWALL_SECONDS = 2.5
_WAY_OUT = "the default route"
_OTHERS = "the other machines"


@dataclass(frozen=True)
class PortUse:
    """Who listens on a port; what cannot be seen is empty."""

    pid: int | None
    command: str = ""
    user: str = ""
    mine: bool = False


@dataclass(frozen=True)
class Interface:
    """An IPv4 address and the interface that has it."""

    name: str
    address: str
    up: bool = True
    carrier: bool = True
    """Whether a cable (or a wireless network) is there."""
    megabits: int = 0
    """0 where the driver does not say."""
    mtu: int = 0


def interfaces() -> list[Interface]:
    """Of this machine, loopback too."""
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        for entry in entries:
            if entry.family == socket.AF_INET:
                speed, mtu = (state.speed, state.mtu) if state else (0, 0)
                up, carrier = _state(name, state.isup if state else True)
                found.append(Interface(name, entry.address, up, carrier, speed if 0 < speed < 10**7 else 0, mtu))
    return found


def _state(name: str, otherwise: bool) -> tuple[bool, bool]:
    """(switched on, has a carrier); the kernel's own word, which psutil's lags behind by a second."""
    flags, carrier = (read_text(f"/sys/class/net/{name}/{file}") for file in ("flags", "carrier"))
    up = bool(int(flags, 16) & 1) if flags else otherwise
    return up, carrier != "0"


def interface_names() -> list[str]:
    return sorted(psutil.net_if_addrs())


# --- the port


def check_port(port: int, several_machines: bool) -> list[Finding]:
    """Whether the launch port of this machine is free."""
    try:
        wire.listen(port).close()
    except PermissionError:
        text = f"port {port} is for root alone"
        return [Finding(AREA, "port", "fail", text, "--main_process_port 29600 (or another from 1024 on)")]
    except OSError:
        return [port_taken(port, _use_of(port), several_machines)]
    return [Finding(AREA, "port", "ok", f"{port} is free")]


def port_taken(port: int, use: PortUse, several_machines: bool) -> Finding:
    """On one machine a start takes another port by itself; several have to agree on one."""
    other = (
        f"--main_process_port {port + 1} on every machine" if several_machines else f"--main_process_port {port + 1}"
    )
    level: Level = "fail" if several_machines else "warn"
    if use.pid is None:
        remedy = f"`sudo ss -ltnp 'sport = :{port}'` shows by whom; or {other}"
        return Finding(AREA, "port", level, f"{port} is taken, by a process this user cannot see", remedy)
    kill = "kill" if use.mine else "sudo kill"
    text = plain(f"{port} is taken by process {use.pid} ({use.command}) of {use.user or 'somebody'}")
    remedy = f"{kill} {use.pid}  (if it is left over), or {other}"
    return Finding(AREA, "port", level, text, remedy)


def _use_of(port: int) -> PortUse:
    with contextlib.suppress(psutil.Error):
        for held in psutil.net_connections("tcp"):
            if held.status == psutil.CONN_LISTEN and held.laddr and held.laddr.port == port and held.pid:
                process = psutil.Process(held.pid)
                command = " ".join(process.cmdline())[:100] or process.name()
                return PortUse(held.pid, command, process.username(), process.username() == getpass.getuser())
    return PortUse(None)


# --- interfaces


def check_interfaces(towards: Sequence[str], named: str | None, env: Mapping[str, str]) -> list[Finding]:
    """`towards`: the other machines that are known; `named`: this one's own address, where one was given. Without
    either the way out counts."""
    found = interfaces()
    return [all_interfaces(found), *chosen(found, _way(towards, named), env), *own_name(socket.gethostname(), _means())]


def all_interfaces(found: Sequence[Interface]) -> Finding:
    """One line about those that are not loopback."""
    shown = [_described(interface) for interface in found if not is_loopback(interface.address)]
    if not shown:
        text = "this machine has no IPv4 address but its own loopback"
        return Finding(AREA, "interfaces", "note", text, "`ip -br address` shows the interfaces")
    return Finding(AREA, "interfaces", "ok", ", ".join(shown))


def _described(interface: Interface) -> str:
    state = "" if interface.up and interface.carrier else "no cable, " if interface.up else "down, "
    speed = f"{interface.megabits / 1000:g} Gbit/s, " if interface.megabits else ""
    return f"{interface.name} {interface.address} ({state}{speed}MTU {interface.mtu})"


def _way(towards: Sequence[str], named: str | None) -> tuple[str, str | None]:
    """(where to, this machine's address on that way)."""
    own_named = next((own for own in (wire.addresses_of(named) if named else ()) if not is_loopback(own)), None)
    for other in towards:
        if (own := wire.address_towards(other)) and not is_loopback(own):
            return other, own
    if towards:
        return towards[0], None
    if own_named:
        return _OTHERS, own_named
    return _WAY_OUT, wire.address_towards("192.0.2.1")  # an address kept for documentation; nothing is sent


def chosen(found: Sequence[Interface], way: tuple[str, str | None], env: Mapping[str, str]) -> list[Finding]:
    """Which interface processes of several machines will use, and why."""
    target, own = way
    by_route = next((interface for interface in found if interface.address == own), None)
    if by_route is None:
        if target == _WAY_OUT:
            return [Finding(AREA, "chosen", "note", "there is no way out of this machine: one machine only")]
        remedy = f"`ip route get {target}`, `ip -br link`"
        return [Finding(AREA, "chosen", "fail", f"no interface leads to {target}", remedy)]
    names = sorted({interface.name for interface in found})
    asked = {
        "NCCL_SOCKET_IFNAME": shell.nccl_interfaces(env.get("NCCL_SOCKET_IFNAME", ""), names),
        "GLOO_SOCKET_IFNAME": shell.gloo_interfaces(env.get("GLOO_SOCKET_IFNAME", ""), names),
    }
    wrong = [
        Finding(
            AREA,
            variable,
            "warn",
            plain(f"{variable}={env[variable]} means {fits[0]}, and the way to {target} is over {by_route.name}"),
            f"unset {variable}  (or `export {variable}={by_route.name}`)",
        )
        for variable, fits in asked.items()
        if fits and by_route.name not in fits and target != _WAY_OUT
    ]
    why = {_WAY_OUT: _WAY_OUT, _OTHERS: "the address that was named for this machine"}.get(target)
    why = why or f"the route to {target}"
    return [Finding(AREA, "chosen", "ok", f"{by_route.name} ({by_route.address}), by {why}"), *wrong]


def _means() -> list[str]:
    return wire.addresses_of(socket.gethostname())


def own_name(name: str, addresses: Sequence[str]) -> list[Finding]:
    """Gloo looks its host's name up where nobody tells it an interface; this package's launcher does tell it."""
    if not addresses:
        text = f"this machine's own name {name} is not known to it: programs that look it up fail or wait"
        return [Finding(AREA, "host name", "note", text, f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts")]
    if all(is_loopback(address) for address in addresses):
        text = f"{name} means {addresses[0]} here, so it is no address to give to other machines; give them numbers"
        return [Finding(AREA, "host name", "note", text)]
    return []


def unanswered(arp: str) -> dict[str, str]:
    """/proc/net/arp -> {address: interface} of those for which the network was asked, and nobody answered."""
    rows = [line.split() for line in arp.splitlines()[1:]]
    return {row[0]: row[5] for row in rows if len(row) == 6 and int(row[2], 16) & 2 == 0}


# --- firewalls


def check_firewall(port: int, peers: Sequence[str]) -> list[Finding]:
    """As far as this user may look; programs that are missing or refuse are passed over."""
    asked = {
        "ufw": run_program(["ufw", "status"], _FIREWALL_SECONDS),
        "firewalld": run_program(["firewall-cmd", "--state"], _FIREWALL_SECONDS),
        "nftables": run_program(["nft", "list", "ruleset"], _FIREWALL_SECONDS),
    }
    if asked["nftables"] is None:  # it shows iptables' rules too
        asked["iptables"] = run_program(["iptables", "-S", "INPUT"], _FIREWALL_SECONDS)
    answers = {name: output.out + output.err for name, output in asked.items() if output and output.done}
    if "ufw" not in answers and (read_text("/etc/ufw/ufw.conf") or "").upper().find("ENABLED=YES") >= 0:
        answers["ufw"] = "Status: active"  # its settings can be read by all, its state by root alone
    return firewalls(answers, port, peers)


def firewalls(answers: Mapping[str, str], port: int, peers: Sequence[str]) -> list[Finding]:
    """Program -> what it said (those that answered) -> whether something may drop what the others send."""
    at_work = [name for name, test in _DROPS.items() if test(answers.get(name, ""), peers)]
    if not at_work:
        seen = ", ".join(answers) or ("none that this user may look at" if os.geteuid() else "none is installed")
        return [Finding(AREA, "firewall", "ok", f"nothing in the way is seen ({seen})")]
    name = at_work[0]
    others = list(peers) or ["ADDRESS_OF_THE_OTHER_MACHINE"]
    lines = " && ".join(_OPENS[name].format(peer=peer) for peer in others)
    text = f"{name} is at work here and drops what it is not told to take (every port between the machines is needed, "
    text += f"{port} first)"
    return [Finding(AREA, "firewall", "warn" if peers else "note", text, lines)]


def _ufw_drops(text: str, peers: Sequence[str]) -> bool:
    return "Status: active" in text and not _all_allowed(text, peers, "ALLOW")


def _iptables_drops(text: str, peers: Sequence[str]) -> bool:
    drops = "-P INPUT DROP" in text or "-A INPUT -j DROP" in text or "-A INPUT -j REJECT" in text
    return drops and not _all_allowed(text, peers, "ACCEPT")


def _nft_drops(text: str, peers: Sequence[str]) -> bool:
    """An input chain whose policy is to drop, or whose last rule is."""
    drops = False
    for block in text.split("chain ")[1:]:
        if "hook input" in block:
            rules = [line.strip() for line in block.split("}")[0].splitlines() if line.strip()]
            drops = drops or "policy drop" in block or rules[-1].endswith(("drop", "reject"))
    return drops and not _all_allowed(text, peers, "accept")


def _all_allowed(text: str, peers: Sequence[str], word: str) -> bool:
    """Whether a line lets each peer in by its address; port rules are not read: more ports than one are needed."""
    lines = [line for line in text.splitlines() if word in line and "dport" not in line and "/tcp" not in line]
    return bool(peers) and all(any(peer in line for line in lines) for peer in peers)


_DROPS = {
    "ufw": _ufw_drops,
    "firewalld": lambda text, _: text.strip() == "running",
    "nftables": _nft_drops,
    "iptables": _iptables_drops,
}
_OPENS = {
    "ufw": "sudo ufw allow from {peer}",
    "firewalld": "sudo firewall-cmd --zone=trusted --add-source={peer}",
    "nftables": "sudo nft insert rule inet filter input ip saddr {peer} accept",
    "iptables": "sudo iptables -I INPUT -s {peer} -j ACCEPT",
}
