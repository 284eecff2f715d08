"""The addresses, interfaces and ports of this machine, by the kernel's account; why another one cannot be reached."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import shlex
import socket
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


class UnreachableError(OSError):
    """No connection to `address`:`port`; `kind` is one of name, refused, silent, no_route, local."""

    def __init__(self, address: str, port: int, kind: str, detail: str) -> None:
        super().__init__(f"{address}:{port}: {detail}")
        self.address, self.port, self.kind, self.detail = address, port, kind, detail
        self.remedy = remedy_for(kind, address, port)


def remedy_for(kind: str, address: str, port: int) -> str:
    """What to look at and to type for a `kind` of UnreachableError; empty for one that is not known."""
    here, name = source_address_for(address) or "THIS_MACHINE", shlex.quote(address)
    remedies = {
        "name": f"give its IP address (`hostname -I` on that machine), or add `{name}` to /etc/hosts",
        "refused": "start the other machine too; or is another address of it meant (`hostname -I` there)?",
        "silent": f"is that machine on, and is this its address (`hostname -I` there)? If so, a firewall drops the "
        f"packets: on {name}, `sudo ufw allow from {here}` (or the security group of your cloud: all TCP ports "
        f"between the machines, {port} among them)",
        "local": "`sudo iptables -S OUTPUT` and `sudo nft list ruleset` here show the rule",
        "no_route": f"`ip route get {name}` shows the route; is the interface up (`ip -br address`), and the "
        "address right (`hostname -I` on that machine)?",
    }
    return remedies.get(kind, "")


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """A TCP connection. Raises UnreachableError."""
    try:
        return socket.create_connection((address, port), seconds)
    except OSError as error:
        raise UnreachableError(address, port, *_obstacle(error, seconds)) from error


def _obstacle(error: OSError, seconds: float) -> tuple[str, str]:
    """(kind, what it means)."""
    if isinstance(error, socket.gaierror):
        return "name", "this name cannot be resolved here"
    if isinstance(error, ConnectionRefusedError):
        return "refused", "the machine answers, but nothing listens on this port"
    if isinstance(error, TimeoutError):
        return "silent", f"no answer in {seconds:.0f} s"
    if isinstance(error, PermissionError):
        return "local", f"a firewall rule of this machine forbids it ({error.strerror})"
    if error.errno == errno.EHOSTUNREACH:
        return "no_route", "no machine answers to this address, or its firewall rejects the call"
    return "no_route", f"there is no route to it from here ({error.strerror or error})"


def listen(port: int, address: str = "") -> socket.socket:
    """Listens on one address of this machine, or on all. Raises OSError where the port is taken."""
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else _family(address)
    return socket.create_server((address, port), family=family, backlog=256, dualstack_ipv6=dual)


def serve_store(address: str, server: socket.socket, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """torch's store, where this socket listens: by itself it listens on all addresses. `address` leads there."""
    from torch.distributed import TCPStore

    port, descriptor = server.getsockname()[1], server.detach()  # the store closes it
    return TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )


def keep_alive(connection: socket.socket, seconds: int) -> None:
    """The kernel closes it when the other machine has not answered for `seconds`, whatever Python is doing."""
    count, interval = 3, max(1, seconds // 5)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, seconds - count * interval)),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", count),
        ("TCP_USER_TIMEOUT", seconds * 1000),
    ):
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def free_port() -> int:
    """One that the system gives, for this machine's own use."""
    with listen(0, LOOPBACK) as probe:
        return int(probe.getsockname()[1])


def source_address_for(address: str) -> str | None:
    """This machine's own address on the way to `address`, by the routing table."""
    for target in resolve_addresses(address)[:1]:
        with contextlib.suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def local_addresses() -> dict[str, str]:
    """Address -> interface, of this machine; not those of IPv6 that are good on one link alone."""
    return {
        entry.address: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    }


def external_addresses() -> list[str]:
    """This machine's addresses but the loopback; those of IPv6 where it has no other."""
    return _of_one_family(address for address in local_addresses() if not is_loopback(address))


def _of_one_family(addresses: Iterable[str]) -> list[str]:
    listing = list(addresses)
    return [address for address in listing if ":" not in address] or listing


def resolve_addresses(name: str) -> list[str]:
    """The addresses of a host's name here, of IPv6 only where there is nothing else; empty where it cannot be
    resolved."""
    try:
        return sorted(_of_one_family({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))
    except OSError:
        return []


def address_to_bind(name: str, local: bool) -> str:
    """Where those that call `name` are to be answered: that address alone, or all of this machine's (``""``) where it
    is none of them. By Debian's /etc/hosts a machine's own name is a loopback address, good for `local` calls only."""
    candidates = resolve_addresses(name)
    is_certain = len(candidates) == 1 and (local if is_loopback(candidates[0]) else candidates[0] in local_addresses())
    return candidates[0] if is_certain else ""


def is_this_machine(name: str) -> bool:
    """Whether a host's name or address is this machine's."""
    addresses = local_addresses()
    return any(address in addresses or address == "127.0.1.1" for address in resolve_addresses(name))


def is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def choose_interface(own_address: str) -> None:
    """gloo and NCCL use the interface that has this address, and no other, unless the user names one.

    gloo otherwise looks its own host name up, which on Debian is 127.0.1.1, and waits there for the other node; NCCL
    uses the loopback only where it is named.
    """
    if interface := local_addresses().get(own_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without `=`, eth1 means eth10 too


def node_id() -> str:
    """The same for all processes of one node (a machine, a container or a network namespace), and for them only."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def process_listening_on(port: int) -> tuple[int, str] | None:
    """(process id, `process 4711 (python train.py)`) of whoever listens on a TCP port here, where that can be seen."""
    try:
        listeners = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        pid = next((each.pid for each in listeners if each.laddr and each.laddr.port == port and each.pid), None)
        return (pid, f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})") if pid else None
    except psutil.Error:
        return None
