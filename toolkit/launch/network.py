"""The addresses, interfaces and ports of this machine, by the kernel's account; nothing is sent."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"


def listen(port: int, address: str = "") -> socket.socket:
    """Listens on one address of this machine, or on all. Raises OSError where the port is taken."""
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else _family(address)
    return socket.create_server((address, port), family=family, backlog=256, dualstack_ipv6=dual)


def free_port() -> int:
    """One that the system gives, for this machine's own use."""
    with listen(0, LOOPBACK) as probe:
        return int(probe.getsockname()[1])


def address_towards(address: str) -> str | None:
    """This machine's own address on the way to `address`, by the routing table."""
    for found in addresses_of(address)[:1]:
        with contextlib.suppress(OSError), socket.socket(_family(found), socket.SOCK_DGRAM) as probe:
            probe.connect((found, 9))
            return str(probe.getsockname()[0])
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_addresses() -> dict[str, str]:
    """Address -> interface, of this machine; not those of IPv6 that are good on one link alone."""
    return {
        entry.address: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    }


def reachable_addresses() -> list[str]:
    """This machine's addresses but the loopback; those of IPv6 where it has no other."""
    return _of_one_family(address for address in own_addresses() if not is_loopback(address))


def _of_one_family(addresses: Iterable[str]) -> list[str]:
    found = list(addresses)
    return [address for address in found if ":" not in address] or found


def addresses_of(name: str) -> list[str]:
    """What a host's name (or an address) stands for here, of IPv6 only where there is nothing else; empty where nobody
    knows it."""
    try:
        return sorted(_of_one_family({str(found[4][0]) for found in socket.getaddrinfo(name, None)}))
    except OSError:
        return []


def address_to_listen(name: str, local: bool) -> str:
    """Where those that call `name` are to be answered: that address alone, or all of this machine's (``""``) where it
    is none of them. By Debian's /etc/hosts a machine's own name is a loopback address, good for `local` calls only."""
    found = addresses_of(name)
    sure = len(found) == 1 and (local if is_loopback(found[0]) else found[0] in own_addresses())
    return found[0] if sure else ""


def is_own(name: str) -> bool:
    """Whether a host's name or address is this machine's."""
    own = own_addresses()
    return any(address in own or address == "127.0.1.1" for address in addresses_of(name))


def ipv4_of(address: str) -> str:
    """Of a caller by IPv4, as a socket for both writes it."""
    return address.removeprefix("::ffff:")


def is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def choose_interface(own_address: str) -> None:
    """gloo and NCCL use the interface that has this address, and no other, unless the user names one.

    gloo otherwise looks its own host name up, which on Debian is 127.0.1.1, and waits there for the other node; NCCL
    uses the loopback only where it is named.
    """
    if interface := own_addresses().get(own_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without `=`, eth1 means eth10 too


def node_id() -> str:
    """The same for all processes of one node (a machine, a container or a network namespace), and for them only."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def holder_of(port: int) -> tuple[int, str] | None:
    """(process id, `process 4711 (python train.py)`) of whoever listens on a TCP port here, where that can be seen."""
    try:
        held = [found for found in psutil.net_connections("tcp") if found.status == psutil.CONN_LISTEN]
        pid = next((found.pid for found in held if found.laddr and found.laddr.port == port and found.pid), None)
        return (pid, f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})") if pid else None
    except psutil.Error:
        return None
