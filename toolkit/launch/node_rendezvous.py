"""Before processes are started on several nodes, the nodes find each other and compare what they are about to start.

Node 0 listens on the port that its launcher will use. Without this, torch's own rendezvous waits for a quarter of an
hour in silence, and nodes that count differently wait for each other for ever.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from toolkit.errors import UserError
from toolkit.launch.channel import (
    ChannelError,
    Listener,
    Message,
    UnreachableError,
    dial,
    remedy,
    token_or,
)
from toolkit.launch.network import address_towards, holder_of, is_loopback, is_own, listen, own_addresses
from toolkit.launch.nodes import Nodes
from toolkit.launch.rendezvous import coordinate, join

_MENTION_SECONDS = 5.0


def find_peers(nodes: Nodes, processes: int, script: str, seconds: float) -> None:
    """Returns once every node is there and asks for the same. Raises UserError after `seconds` otherwise.

    `processes` are those of all nodes together, as this one counts them.
    """
    hello: Message = {
        "number": nodes.rank,
        "id": secrets.token_hex(8),
        "host": socket.gethostname(),
        "machines": nodes.count,
        "processes": processes,
        "script": Path(script).name,
    }
    _print(f"{_here(nodes)} of {nodes.count}: {nodes.how}")
    fault = _coordinate(nodes, hello, seconds) if nodes.rank == 0 else _join(nodes, hello, seconds)
    if fault:
        raise UserError(fault)


def _here(nodes: Nodes) -> str:
    return f"this is machine {nodes.rank} ({socket.gethostname()})"


def _token(nodes: Nodes) -> str:
    return token_or(f"machines at port {nodes.port}")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- node 0


def _coordinate(nodes: Nodes, hello: Message, seconds: float) -> str:
    mentioned = False

    def waiting(absent: Sequence[int], waited: float) -> str:
        nonlocal mentioned
        if waited > _MENTION_SECONDS and not mentioned:
            mentioned = True
            names = ", ".join(map(nodes.name_of, absent))
            _print(f"waiting at port {nodes.port} for {names}: type the same command there")
        return "" if is_own(nodes.first) else _other_coordinator(nodes, hello)

    try:
        server = listen(nodes.port)
    except OSError as error:
        raise UserError(port_taken(nodes.port, error.strerror)) from error
    with Listener(server, _token(nodes)) as listener:
        missing = partial(_missing, nodes, seconds)
        with coordinate(listener, hello, nodes.count, seconds, _difference, missing, waiting) as found:
            return found.fault


def _other_coordinator(nodes: Nodes, hello: Message) -> str:
    """Whether the machine that has the first machine's address is another one that calls itself number 0."""
    try:
        with dial(nodes.first, nodes.port, _token(nodes), 0.5) as channel:
            channel.send(hello)
            return str(channel.receive(2.0).get("fault"))
    except ChannelError:  # this machine itself does not answer itself, see `coordinate`
        return ""


def _difference(hellos: Sequence[Message]) -> str:
    """Why these nodes cannot start together; empty where they can."""
    first, other = hellos[0], hellos[-1]
    if twin := next((hello for hello in hellos[:-1] if hello["number"] == other["number"]), None):
        return (
            f"two machines say that they are number {other['number']}: {_who(twin)} and {_who(other)}: pass "
            "another --machine_rank on one of them"
        )
    for name, how in (("machines", "machines (num_machines)"), ("script", "(the script)")):
        if other.get(name) != first[name]:
            return f"{_who(first)} starts {first[name]} {how}, {_who(other)} {other.get(name)}: type the same on both"
    if other.get("processes") == first["processes"]:
        return ""
    nodes, counts = int(first["machines"]), [int(hello["processes"]) for hello in (first, other)]
    each = min(counts) // nodes
    return (
        f"{_who(first)} asks for {counts[0]} processes ({counts[0] // nodes} on each machine), {_who(other)} for "
        f"{counts[1]} ({counts[1] // nodes} on each): without --num_processes they are the devices it sees. "
        f"Every machine runs the same number: pass --num_processes {nodes * each} on all of them ({each} on each)"
    )


def _who(hello: Message) -> str:
    return f"{hello.get('host')} ({hello['address']})" if hello.get("address") else str(hello.get("host"))


def _missing(nodes: Nodes, seconds: float, absent: Sequence[int], hellos: Sequence[Message]) -> str:
    names = ", ".join(map(nodes.name_of, absent))
    fault = f"{names} did not come within {seconds:.0f} s to machine 0 ({socket.gethostname()}, port {nodes.port})"
    if not is_own(nodes.first):
        own = ", ".join(address for address in own_addresses() if not is_loopback(address))
        return (
            f"{fault}: {nodes.first}, which the others call, is not an address of this machine ({own}): pass "
            "--machine_rank here if it is another one, or --main_process_ip with an address of machine 0"
        )
    others = len(hellos) - 1
    came = f"; {others} other{'s' * (others > 1)} came" if others else ""
    peers = ",".join(nodes.addresses[1:]) or "ADDRESS_OF_THE_OTHER"
    return (
        f"{fault}{came}: type the same command there too. If it was typed, that machine says what it met; where it "
        f"found no answer, a firewall here drops it: `sudo ufw allow from THAT_MACHINE to any port {nodes.port} "
        f"proto tcp`. `toolkit doctor --peers {address_towards(nodes.first)},{peers}` on each machine finds out"
    )


def port_taken(port: int, why: str | None) -> str:
    """What there is to say of a port of this machine that another process holds."""
    holder = holder_of(port)
    by = f" by {holder[1]}: `kill {holder[0]}` if it is left over, or" if holder else ":"
    return (
        f"port {port} of this machine ({socket.gethostname()}) is taken{by} pass another --main_process_port on every "
        f"machine ({why})"
    )


# --- the others


def _join(nodes: Nodes, hello: Message, seconds: float) -> str:
    mentioned = False

    def waiting(trouble: ChannelError, waited: float) -> None:
        nonlocal mentioned
        if waited > _MENTION_SECONDS and not mentioned:
            mentioned = True
            _print(f"machine 0 is not there yet: {trouble}")

    try:
        with join(nodes.first, nodes.port, _token(nodes), hello, seconds, waiting) as found:
            if not found.fault:
                host = found.hellos[0]["host"]
                _print(f"machine 0 ({host}) is there: it tells how the run goes, this one what fails here")
            return found.fault
    except ChannelError as trouble:
        raise UserError(_not_found(nodes, trouble, seconds)) from trouble


def _not_found(nodes: Nodes, trouble: ChannelError, seconds: float) -> str:
    fault = f"machine 0 was not found within {seconds:.0f} s from here ({_here(nodes)}): {trouble}"
    if isinstance(trouble, UnreachableError):
        fault += f". To do: {remedy(trouble)}"
    if is_own(nodes.first):
        fault += (
            f". {nodes.first} is an address of this very machine, which is said to be number {nodes.rank} "
            f"({nodes.how}): is it machine 0?"
        )
    own = address_towards(nodes.first) or "ADDRESS_OF_THIS_MACHINE"
    own = "ADDRESS_OF_THE_OTHER" if own == nodes.first else own
    stop = "" if fault.endswith("?") else "."
    return f"{fault}{stop} `toolkit doctor --peers {nodes.first},{own}` on each machine finds out more"
