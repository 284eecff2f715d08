"""This machine's addresses, interfaces and ports, as the kernel reports them; why another machine cannot be reached."""

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

from toolkit.errors import UserError, listing

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


class UnreachableError(OSError):
    """No connection to `address`:`port`; `kind` is one of name, refused, silent, no_route, local."""

    def __init__(self, address: str, port: int, kind: str, detail: str) -> None:
        super().__init__(f"{address}:{port}: {detail}")
        self.kind, self.detail, self.remedy = kind, detail, _remedy(kind, address, port)


def _remedy(kind: str, address: str, port: int) -> str:
    """What to check, with the commands."""
    here, name = source_address_for(address) or "THIS_MACHINE", shlex.quote(address)
    return {
        "name": f"give its IP address (`hostname -I` on that machine), or add `{name}` to /etc/hosts",
        "refused": "start the other machine too, or use another address of it (`hostname -I` there)",
        "silent": f"is that machine on, and is this its address (`hostname -I` there)? If so, a firewall drops the "
        f"packets: on {name}, `sudo ufw allow from {here}` (or the security group of your cloud: all TCP ports "
        f"between the machines, {port} among them)",
        "local": "`sudo iptables -S OUTPUT` and `sudo nft list ruleset` here show the rule",
        "no_route": f"`ip route get {name}` shows the route; is the interface up (`ip -br address`), and the "
        "address right (`hostname -I` on that machine)?",
    }[kind]


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """A TCP connection. Raises UnreachableError."""
    try:
        return socket.create_connection((address, port), seconds)
    except OSError as error:
        raise UnreachableError(address, port, *_classify(error)) from error


def _classify(error: OSError) -> tuple[str, str]:
    """(kind, detail) of an UnreachableError."""
    if isinstance(error, socket.gaierror):
        return "name", "this name cannot be resolved here (an address is written without port and brackets)"
    if isinstance(error, ConnectionRefusedError):
        return "refused", "the machine answers, but nothing listens on this port"
    if isinstance(error, TimeoutError):
        return "silent", "no answer"
    if isinstance(error, PermissionError):
        return "local", f"a firewall rule of this machine forbids it ({error.strerror})"
    if error.errno == errno.EHOSTUNREACH:
        return "no_route", "no machine has this address, or its firewall rejects the connection"
    return "no_route", f"there is no route to it from here ({error.strerror or error})"


def listen(port: int, address: str = "") -> socket.socket:
    """Listens on one address of this machine, or on all (`""`). Raises OSError if the port is taken."""
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else _family(address)
    return socket.create_server((address, port), family=family, backlog=256, dualstack_ipv6=dual)


def serve_store(address: str, server: socket.socket, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Serves torch's store on a listening socket, which `address` leads to; by default it listens on all addresses."""
    from torch.distributed import TCPStore

    port, descriptor = server.getsockname()[1], server.detach()  # the store closes it
    return TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )


def keep_alive(connection: socket.socket, seconds: int) -> None:
    """Makes the kernel close the connection when the other machine has not answered for `seconds`."""
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
    """A free port on the loopback address."""
    with listen(0, LOOPBACK) as probe:
        return int(probe.getsockname()[1])


def source_address_for(address: str) -> str | None:
    """This machine's source address for packets to `address`, from the routing table."""
    for target in resolve_addresses(address)[:1]:
        with contextlib.suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def local_addresses() -> dict[str, str]:
    """Address -> interface of this machine, without link-local IPv6 addresses."""
    return {
        entry.address: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    }


def external_addresses() -> list[str]:
    """This machine's addresses without loopback ones; IPv6 only if there is no IPv4."""
    return _prefer_ipv4(address for address in local_addresses() if not is_loopback(address))


def _prefer_ipv4(addresses: Iterable[str]) -> list[str]:
    both = list(addresses)
    return [address for address in both if ":" not in address] or both


def resolve_addresses(name: str) -> list[str]:
    """The addresses of a host name, IPv6 only if there is no IPv4; empty if it cannot be resolved."""
    try:
        return sorted(_prefer_ipv4({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))
    except OSError:
        return []


def address_to_bind(name: str, local: bool) -> str:
    """The address to listen on for peers that connect to `name`; `""` (all) if `name` is no single address of this
    machine. In Debian's /etc/hosts a machine's own name is a loopback address, which only `local` peers can reach."""
    candidates = resolve_addresses(name)
    is_certain = len(candidates) == 1 and (local if is_loopback(candidates[0]) else candidates[0] in local_addresses())
    return candidates[0] if is_certain else ""


def is_this_machine(name: str) -> bool:
    """Whether a host name or an address is this machine's."""
    addresses = local_addresses()
    return any(address in addresses or address == "127.0.1.1" for address in resolve_addresses(name))


def is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def choose_interface(local_address: str, device: str) -> None:
    """Makes gloo and NCCL use only the interface with this address, unless the user has set one. Raises UserError if
    this machine has no such interface and needs one.

    Otherwise gloo resolves its own host name, on Debian to 127.0.1.1, and waits there for the other node; NCCL uses
    the loopback only if it is named.
    """
    interfaces = local_addresses()
    if interface := interfaces.get(local_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without `=`, eth1 means eth10 too
    setting, here = os.environ.get("GLOO_SOCKET_IFNAME", ""), {*interfaces.values(), *psutil.net_if_addrs()}
    if device == "cpu" and setting and not here.issuperset(setting.split(",")):
        raise UserError(f"GLOO_SOCKET_IFNAME={setting}: {socket.gethostname()} has {listing(sorted(here))}: name one")


def node_id() -> str:
    """Identifies a node: a machine, a container or a network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def process_listening_on(port: int) -> tuple[int, str] | None:
    """(pid, `process 4711 (python train.py)`) of the process that listens on a local TCP port; None if it is hidden."""
    try:
        listeners = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        pid = next((each.pid for each in listeners if each.laddr and each.laddr.port == port and each.pid), None)
        return (pid, f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})") if pid else None
    except psutil.Error:
        return None
