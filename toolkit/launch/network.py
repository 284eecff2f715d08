"""This machine's addresses, interfaces and ports, as the kernel reports them; why another machine
cannot be reached."""

from __future__ import annotations

import contextlib
import shlex
import socket
import time
from collections.abc import MutableMapping
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

    def __init__(self, address: str, port: int, error: OSError) -> None:
        here, there = source_address_for(address) or "THIS_MACHINE", shlex.quote(address)
        self.kind = _kind(error)
        detail, remedy = _CAUSES[self.kind]
        self.detail = f"{detail} ({error.strerror or error})"
        self.remedy = remedy.format(here=here, there=there, port=port)
        super().__init__(f"{address}:{port}: {self.detail}")


# kind -> (what it means, what to check, with the commands)
_CAUSES = {
    "name": (
        "this name cannot be resolved here (write an address without port)",
        "give its IP address (`hostname -I` there), or add `{there}` to /etc/hosts",
    ),
    "refused": (
        "the machine answers, but nothing listens on this port",
        "start the other machine too, or use its right address (`hostname -I` there)",
    ),
    "silent": (
        "no answer",
        "is that machine on, and is this its address (`hostname -I` there)? If so, a firewall "
        "drops the packets: on {there}, `sudo ufw allow from {here}` (or the security group of "
        "your cloud: all TCP ports between the machines, {port} among them)",
    ),
    "local": (
        "a firewall rule of this machine forbids it",
        "`sudo iptables -S OUTPUT` and `sudo nft list ruleset` here show the rule",
    ),
    "no_route": (
        "no machine has this address, its firewall rejects the connection, or no route leads there",
        "`ip route get {there}` shows the route; is the interface up (`ip -br address`), and the "
        "address right (`hostname -I` there)?",
    ),
}


def _kind(error: OSError) -> str:
    kinds = {
        socket.gaierror: "name",
        ConnectionRefusedError: "refused",
        TimeoutError: "silent",
        PermissionError: "local",
    }
    return kinds.get(type(error), "no_route")


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """A TCP connection. Raises UnreachableError."""
    try:
        return socket.create_connection((address, port), seconds)
    except OSError as error:
        raise UnreachableError(address, port, error) from error


def serve_store(address: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Serves torch's store on one address of this machine, and nowhere else; port 0: any.

    torch itself would listen on all addresses. Raises UserError if the port is taken.
    """
    from torch.distributed import TCPStore

    try:
        server = socket.create_server((address, port), backlog=256)
    except OSError as error:
        host = f"{socket.gethostname()} ({address})"
        raise UserError(
            f"port {port} of {host} cannot be opened ({error.strerror}): "
            f"`ss -ltnp 'sport = :{port}'` shows what holds it; another one: --main_process_port "
            "(on every machine), --master_port (deepspeed, torchrun), MASTER_PORT (mpirun, srun)"
        ) from error
    port = server.getsockname()[1]
    return TCPStore(
        address, port, None, True, timeout, wait_for_workers=False,
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


def source_address_for(address: str) -> str | None:
    """This machine's source address for packets to `address`, from the routing table."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError), probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def local_addresses() -> dict[str, str]:
    """Address -> interface of this machine."""
    return {
        entry.address: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def resolve_addresses(name: str) -> list[str]:
    """The addresses of a host name; empty if it is unknown."""
    try:
        entries = socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in entries})


def address_to_serve(name: str, is_local: bool) -> str:
    """The address of this machine that peers reach as `name`; `is_local`: peers on this machine.

    In Debian's /etc/hosts a machine's own name is a loopback address, which other machines cannot
    reach: then the address of the default route, or the only other one. Raises UserError.
    """
    address = (resolve_addresses(name) or [name])[0]
    if is_local or not is_loopback(address):
        return address
    default = source_address_for(_TEST_NET)
    others = [other for other in local_addresses() if not is_loopback(other)]
    if default is None and len(others) != 1:
        choice = ", ".join(others)
        raise UserError(f"{name} is {address} here: give one of {choice} in its place")
    return default or others[0]


def is_this_machine(name: str) -> bool:
    """Whether a host name or an address is this machine's."""
    here = {*local_addresses(), "127.0.1.1"}
    return any(address in here for address in resolve_addresses(name))


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


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
    """Identifies a machine or a container; cloned machines have the same host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
