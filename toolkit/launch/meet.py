"""The machines of a run, or its ranks, find each other: who is missing, who is there twice, what
differs between them.

All write a hello to torch's store, which the first of them serves, and read those of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, listing, printable
from toolkit.launch import network
from toolkit.launch.machines import Machines, doctor_command
from toolkit.utils import versions
from toolkit.utils.log import logger

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

_POLL_SECONDS, _LOG_SECONDS = 0.1, 5.0
# Who serves the store waits this long for the others to read a fault.
_READ_SECONDS = 3.0


class RendezvousError(UserError):
    """The machines, or the ranks, cannot start together."""


@dataclass(frozen=True)
class Hello:
    """One machine, or one rank, of a run."""

    number: int
    host: str = field(default_factory=socket.gethostname)
    node: str = field(default_factory=network.node_id)
    address: str = ""
    """Its source address for connections to the first one."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Versions and settings that must be the same everywhere."""


def connect(address: str, port: int, seconds: float) -> TCPStore:
    """Connects to the store of the first machine. Raises RendezvousError."""
    try:
        return network.connect_store(address, port, seconds)
    except network.UnreachableError as error:
        who = f"{socket.gethostname()} could not reach the first machine in {seconds:.0f} s"
        remedy = f"{error.remedy}. {doctor_command(address)}"
        raise RendezvousError(f"{who}: {error}. To do: {remedy}") from error


@dataclass(frozen=True)
class Met:
    """What a launcher knows of the others after they have met."""

    store: TCPStore
    address: str
    port: int
    """Where machine 0 serves the store."""
    hosts: list[str]
    """Host names of the machines, in order."""


def meet_launchers(machines: Machines, facts: Mapping[str, Any], seconds: float) -> Met:
    """Waits for the other machines' launchers, and chooses the interface between them.

    Raises RendezvousError, in all, if one is missing, is there twice or differs in `facts`.
    """
    rank, first, is_alone = machines.rank, machines.first, machines.count == 1
    if not is_alone:
        who = f"machine {rank} ({socket.gethostname()}) of {machines.count}"
        logger.info(f"this is {who}: {machines.rank_source}")
    if rank == 0 and network.is_this_machine(first):
        address = network.address_to_serve(first, is_alone)
        store = network.serve_store(address, machines.port)
    else:
        address, store = first, connect(first, machines.port, seconds)
    remedies = {
        "missing": f"start the same command there, with --main_process_ip {first} there too; if it "
        "was started, see its output, and open all ports between the machines. "
        f"{doctor_command(first)}",
        "twin": "pass another --machine_rank on each machine (or set NODE_RANK there)",
    }
    names = [f"machine {number}" for number in range(machines.count)]
    hellos = meet(store, address, rank, names, facts, remedies, seconds)
    return Met(store, address, store.port, [hello.host for hello in hellos])


def meet(
    store: Store,
    address: str,
    number: int,
    names: Sequence[str],
    facts: Mapping[str, Any],
    remedies: Mapping[str, str],
    seconds: float,
) -> list[Hello]:
    """Waits for all, and chooses the interface between them; returns their hellos in order.

    `address`: the store's. `number`: this one's. `names`: `machine 1`, for the user. `remedies`:
    what to do if some are `missing`, and about a `twin`. Raises RendezvousError, in all, within
    `seconds` and a little more.
    """
    me = Hello(number, address=network.source_address_for(address) or "", facts=facts)
    try:
        _write_hello(store, me, names, remedies["twin"])
        hellos = _wait_for_all(store, me, names, seconds, remedies["missing"])
        _refuse_differences(hellos)
    except RendezvousError as error:
        with contextlib.suppress(RuntimeError):  # the first machine has read it, and has ended
            store.set("fault", str(error))
            time.sleep(_READ_SECONDS)
        raise
    except RuntimeError as error:
        raise RendezvousError(f"{names[0]} was reached, and has ended since") from error
    _choose_interface(me, hellos)
    return hellos


def _choose_interface(me: Hello, hellos: Sequence[Hello]) -> None:
    source = me.address
    if len({hello.node for hello in hellos}) == 1:
        source = network.LOOPBACK
    elif network.is_loopback(source):  # the first machine's name, on Debian
        source = network.source_address_for(hellos[-1].address) or ""
    network.choose_interface(os.environ, source)


def _wait_for_all(
    store: Store, me: Hello, names: Sequence[str], seconds: float, remedy: str
) -> list[Hello]:
    started, is_logged = time.monotonic(), False
    while True:
        missing = [name for number, name in enumerate(names) if not store.check([_key(number)])]
        if store.check(["fault"]):
            raise RendezvousError(printable(store.get("fault").decode(), 10_000))
        if not missing:
            return [_read_hello(store, number) for number in range(len(names))]
        waited, absent = time.monotonic() - started, listing(missing, 8)
        if waited > seconds:
            fault = f"{absent} did not come within {seconds:.0f} s (--rendezvous_timeout)"
            raise RendezvousError(f"{fault}: {remedy}")
        if waited > _LOG_SECONDS and me.number == 0 and not is_logged:
            is_logged = True
            logger.info(f"waiting for {absent}: {remedy}")
        time.sleep(_POLL_SECONDS)


def _key(number: int) -> str:
    return f"hello {number}"


def _write_hello(store: Store, me: Hello, names: Sequence[str], remedy: str) -> None:
    """Raises RendezvousError if there is another one with this number."""
    if store.add(f"count {me.number}", 1) > 1:
        hosts = f"on {_read_hello(store, me.number).host} and {me.host}"
        raise RendezvousError(f"two are {names[me.number]}, {hosts}: {remedy}")
    store.set(_key(me.number), json.dumps(asdict(me)))


def _read_hello(store: Store, number: int) -> Hello:
    hello = Hello(**json.loads(store.get(_key(number))))
    return replace(hello, host=printable(hello.host, 100))


def _refuse_differences(hellos: Sequence[Hello]) -> None:
    """Raises RendezvousError if versions or settings differ."""
    facts = [(hello.host, hello.facts) for hello in hellos]
    differences = versions.describe_differences(facts)
    if not differences:
        return
    remedy = versions.remedy(facts) or "start all with the same --num_processes"
    why = f"the machines differ: {printable(differences, 2000)}"
    raise RendezvousError(f"{why}. {remedy}; nothing was read or trained")
