"""This machine's addresses, interfaces and ports, as the kernel reports them; why another machine
cannot be reached."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import shlex
import socket
import time
from collections.abc import Iterable, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from toolkit.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_TEST_NET = "192.0.2.1"  # reserved for documentation: packets to it would take the default route
_CONNECT_SECONDS, _POLL_SECONDS = 5.0, 0.1


class UnreachableError(OSError):
    """No connection to `address`:`port`; `kind`: name, refused, silent, no_route or local."""

    def __init__(self, address: str, port: int, kind: str, detail: str) -> None:
        super().__init__(f"{address}:{port}: {detail}")
        self.kind, self.detail, self.remedy = kind, detail, _remedy(kind, address, port)


def _remedy(kind: str, address: str, port: int) -> str:
    """What to check, with the commands."""
    here, name = source_address_for(address) or "THIS_MACHINE", shlex.quote(address)
    return {
        "name": f"give its IP address (`hostname -I` there), or add `{name}` to /etc/hosts",
        "refused": "start the other machine too, or use another address of it (`hostname -I` there)",
        "silent": "is that machine on, and is this its address (`hostname -I` there)? If so, a "
        f"firewall drops the packets: on {name}, `sudo ufw allow from {here}` (or the security "
        f"group of your cloud: all TCP ports between the machines, {port} among them)",
        "local": "`sudo iptables -S OUTPUT` and `sudo nft list ruleset` here show the rule",
        "no_route": f"`ip route get {name}` shows the route; is the interface up (`ip -br "
        "address`), and the address right (`hostname -I` there)?",
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
        return "name", "this name cannot be resolved here (write an address without port)"
    if isinstance(error, ConnectionRefusedError):
        return "refused", "the machine answers, but nothing listens on this port"
    if isinstance(error, TimeoutError):
        return "silent", "no answer"
    if isinstance(error, PermissionError):
        return "local", f"a firewall rule of this machine forbids it ({error.strerror})"
    if error.errno == errno.EHOSTUNREACH:
        return "no_route", "no machine has this address, or its firewall rejects the connection"
    return "no_route", f"there is no route to it from here ({error.strerror or error})"


def serve_store(address: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Serves torch's store on one address of this machine, and nowhere else; port 0: any.

    torch itself would listen on all addresses. Raises UserError if the port is taken.
    """
    from torch.distributed import TCPStore

    try:
        server = socket.create_server((address, port), family=_family(address), backlog=256)
    except OSError as error:
        raise UserError(
            f"port {port} of {socket.gethostname()} cannot be opened ({error.strerror}): "
            f"`ss -ltnp 'sport = :{port}'` shows what holds it; another one: --main_process_port "
            "(on every machine), --master_port (deepspeed, torchrun), MASTER_PORT (mpirun, srun)"
        ) from error
    port = server.getsockname()[1]
    # the store closes the descriptor; env:// in this process finds the server again (multi_tenant)
    return TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=server.detach(),
    )  # fmt: skip


def connect_store(address: str, port: int, seconds: float) -> TCPStore:
    """A client of the store at an address. Raises UnreachableError after `seconds`."""
    from torch.distributed import TCPStore

    deadline = time.monotonic() + seconds
    while True:
        remaining = deadline - time.monotonic()
        try:
            connect(address, port, max(1.0, min(_CONNECT_SECONDS, remaining))).close()
            break
        except UnreachableError:
            if remaining < 0:
                raise
        time.sleep(_POLL_SECONDS)
    return TCPStore(address, port, None, False, timedelta(minutes=5))


def free_port() -> int:
    """A free port on the loopback address."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def source_address_for(address: str) -> str | None:
    """This machine's source address for packets to `address`, from the routing table."""
    for target in resolve_addresses(address)[:1]:
        probe = socket.socket(_family(target), socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), probe:
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
    """The addresses of a host name, IPv6 only if there is no IPv4; empty if it is unknown."""
    try:
        return sorted(_prefer_ipv4({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))
    except OSError:
        return []


def address_to_serve(name: str, is_local: bool, others: Iterable[str] = ()) -> str:
    """The address of this machine that peers reach as `name`; `is_local`: peers on this machine.

    In Debian's /etc/hosts a machine's own name is a loopback address, which other machines cannot
    reach: then the address on the way to `others`, or to the default route. Raises UserError.
    """
    candidates = resolve_addresses(name) or [name]
    if is_local or not is_loopback(candidates[0]):
        return candidates[0]
    here = external_addresses()
    routes = [source_address_for(other) for other in (*others, _TEST_NET)]
    usable = [route for route in routes if route and not is_loopback(route)]
    if usable or len(here) == 1:
        return (usable or here)[0]
    raise UserError(f"{name} is {candidates[0]} here: give one of {', '.join(here)} in its place")


def is_this_machine(name: str) -> bool:
    """Whether a host name or an address is this machine's."""
    here = {*local_addresses(), "127.0.1.1"}
    return any(address in here for address in resolve_addresses(name))


def is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def choose_interface(env: MutableMapping[str, str], local_address: str) -> None:
    """Makes gloo and NCCL use only the interface with this address, unless the user has set one.

    Otherwise gloo resolves its own host name, on Debian to 127.0.1.1, and waits there for the
    other node; NCCL uses the loopback only if it is named.
    """
    interface = local_addresses().get(local_address)
    if interface:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without `=`, eth1 means eth10 too


def node_id() -> str:
    """Identifies a node: a machine, a container or a network namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
