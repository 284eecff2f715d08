"""This machine's addresses, interfaces and ports, as the kernel reports them; why another machine
cannot be reached."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from toolkit.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
# reserved for documentation: packets to it would take the default route
_TEST_NET = "192.0.2.1"
_STORE_TIMEOUT = timedelta(minutes=5)
_CONNECT_SECONDS, _POLL_SECONDS = 3.0, 0.1


# error -> (what it means, what to check, with the commands)
_CAUSES: dict[type[OSError], tuple[str, str]] = {
    socket.gaierror: (
        "this name cannot be resolved here (write an address without port)",
        "give its IP address (`hostname -I` there), or add `{there}` to /etc/hosts",
    ),
    ConnectionRefusedError: (
        "the machine answers, but nothing listens on this port",
        "start the other machine too (or rank 0, which RANK and WORLD_SIZE announce), or use its "
        "right address (`hostname -I` there)",
    ),
    TimeoutError: (
        "no answer",
        "is that machine on, and is this its address (`hostname -I` there)? If so, a firewall "
        "drops the packets: on {there}, `sudo ufw allow from {here}` (or the security group of "
        "your cloud: all TCP ports between the machines, {port} among them)",
    ),
    OSError: (
        "no machine has this address, its firewall rejects the connection, or no route leads there",
        "`ip route get {there}` shows the route; is the interface up (`ip -br address`), and the "
        "address right (`hostname -I` there)?",
    ),
}


def serve_store(address: str, port: int) -> TCPStore:
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
        address, port, None, True, _STORE_TIMEOUT, wait_for_workers=False,
        master_listen_fd=server.detach(),
    )  # fmt: skip


def connect_store(address: str, port: int, seconds: float) -> TCPStore:
    """A client of the store of the first machine. Raises UserError after `seconds`."""
    from torch.distributed import TCPStore

    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{socket.gethostname()} could not reach the first machine "
                    f"(--main_process_ip, or MASTER_ADDR) in {seconds:.0f} s: "
                    f"{_explain(error, address, port)}"
                ) from error
        time.sleep(_POLL_SECONDS)
    return TCPStore(address, port, None, False, _STORE_TIMEOUT)


def _explain(error: OSError, address: str, port: int) -> str:
    """Why there is no connection, and what to do."""
    detail, remedy = _CAUSES.get(type(error), _CAUSES[OSError])
    here = source_address_for(address) or "THIS_MACHINE"
    advice = remedy.format(here=here, there=shlex.quote(address), port=port)
    return (
        f"{address}:{port}: {detail} ({error.strerror or error}). To do: {advice}. "
        f"{doctor_command(address)}"
    )


def doctor_command(first: str) -> str:
    """What to run when machines do not find each other."""
    return f"`toolkit doctor --main_process_ip {first}` on each machine shows more"


def source_address_for(address: str) -> str:
    """This machine's source address for packets to `address`, from the routing table; empty if
    there is no route."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError), probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return ""


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
    reach: then the address of the default route. Raises UserError if there is none.
    """
    address = (resolve_addresses(name) or [name])[0]
    if is_local or not address.startswith("127."):
        return address
    default = source_address_for(_TEST_NET)
    if not default:
        raise UserError(
            f"{name} is {address} here: give an address of `hostname -I` in its place"
        )
    return default


def is_this_machine(name: str) -> bool:
    """Whether a host name or an address is this machine's."""
    here = {*local_addresses(), "127.0.1.1"}
    return any(address in here for address in resolve_addresses(name))


def choose_interface(local_address: str) -> None:
    """Makes gloo and NCCL use only the interface with this address, unless the user has set one.

    Otherwise gloo resolves its own host name, on Debian to 127.0.1.1, and waits there for the
    other machine; NCCL uses the loopback only if it is named.
    """
    interface = local_addresses().get(local_address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # without `=`, eth1 means eth10 too
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def node_id() -> str:
    """Identifies a machine or a container; cloned machines have the same host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
