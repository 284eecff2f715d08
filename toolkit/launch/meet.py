"""The machines of a run, or its ranks, find each other: who is missing, who is there twice, what
differs between them.

All write a hello to torch's store, which the first of them serves, and read those of the others.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, listing, printable
from toolkit.launch import network
from toolkit.launch.machines import Machines
from toolkit.utils import versions
from toolkit.utils.log import logger

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

_POLL_SECONDS, _LOG_SECONDS = 0.1, 5.0
_TWIN_REMEDY = "give each its own --machine_rank (or NODE_RANK; RANK, if set by hand)"
# Who serves the store waits this long for the others to read a fault.
_READ_SECONDS = 3.0


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


@dataclass(frozen=True)
class Met:
    """What a launcher knows of the others after they have met."""

    store: TCPStore
    hosts: list[str]
    """Host names of the machines, in order."""


def facts_to_compare(script: str, device: str, processes: int) -> dict[str, Any]:
    """What must be the same on all machines."""
    versions_here = versions.comparable_versions(script)
    return {**versions_here, "device": device, "num_processes": processes}


def device_type() -> str:
    """`cpu` where torch sees no accelerator."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def meet_launchers(machines: Machines, facts: Mapping[str, Any], seconds: float) -> Met:
    """Waits for the other machines' launchers, and chooses the interface between them.

    Raises UserError, in all, if one is missing, is there twice or differs in `facts`.
    """
    rank, first = machines.rank, machines.first
    is_alone = machines.count == 1
    if not is_alone:
        who = f"machine {rank} ({socket.gethostname()}) of {machines.count}"
        logger.info(f"this is {who}: {machines.rank_source}")
    if rank == 0 and network.is_this_machine(first):
        address = network.address_to_serve(first, is_alone)
        store = network.serve_store(address, machines.port)
    else:
        address = first
        store = network.connect_store(first, machines.port, seconds)
    remedy = (
        f"start the same command there, with --main_process_ip {first} there too; if it "
        "was started, see its output, and open all ports between the machines. "
        f"{network.doctor_command(first)}"
    )
    names = [f"machine {number}" for number in range(machines.count)]
    hellos = meet(store, address, rank, names, facts, remedy, seconds)
    return Met(store, [hello.host for hello in hellos])


def meet(
    store: Store,
    address: str,
    number: int,
    names: Sequence[str],
    facts: Mapping[str, Any],
    remedy: str,
    seconds: float,
) -> list[Hello]:
    """Waits for all, and chooses the interface between them; returns their hellos in order.

    `address`: the store's. `number`: this one's. `names`: `machine 1`, for the user. `remedy`: what
    to do if some are missing. Raises UserError, in all, within `seconds` and a little more.
    """
    me = Hello(number, address=network.source_address_for(address), facts=facts)
    try:
        _write_hello(store, me, names)
        hellos = _wait_for_all(store, me, names, seconds, remedy)
        _refuse_differences(hellos)
    except UserError as error:
        with contextlib.suppress(RuntimeError):  # the first machine has read it, and has ended
            store.set("fault", str(error))
            time.sleep(_READ_SECONDS)
        raise
    except RuntimeError as error:
        raise UserError(f"{names[0]} was reached, and has ended since") from error
    _choose_interface(me, hellos)
    return hellos


def _choose_interface(me: Hello, hellos: Sequence[Hello]) -> None:
    source = me.address
    if len({hello.node for hello in hellos}) == 1:
        source = network.LOOPBACK
    elif network.is_loopback(source):  # the first machine's name, on Debian
        source = network.source_address_for(hellos[-1].address)
    network.choose_interface(source)


def _wait_for_all(
    store: Store, me: Hello, names: Sequence[str], seconds: float, remedy: str
) -> list[Hello]:
    started = time.monotonic()
    is_logged = False
    while True:
        missing = [name for number, name in enumerate(names) if not store.check([_key(number)])]
        if store.check(["fault"]):
            raise UserError(printable(store.get("fault").decode(), 10_000))
        if not missing:
            return [_read_hello(store, number) for number in range(len(names))]
        waited = time.monotonic() - started
        absent = listing(missing, 8)
        if waited > seconds:
            fault = f"{absent} did not come within {seconds:.0f} s (--rendezvous_timeout)"
            raise UserError(f"{fault}: {remedy}")
        if waited > _LOG_SECONDS and me.number == 0 and not is_logged:
            is_logged = True
            logger.info(f"waiting for {absent}: {remedy}")
        time.sleep(_POLL_SECONDS)


def _key(number: int) -> str:
    return f"hello {number}"


def _write_hello(store: Store, me: Hello, names: Sequence[str]) -> None:
    """Raises UserError if there is another one with this number."""
    if store.add(f"count {me.number}", 1) > 1:
        hosts = f"on {_read_hello(store, me.number).host} and {me.host}"
        raise UserError(f"two are {names[me.number]}, {hosts}: {_TWIN_REMEDY}")
    store.set(_key(me.number), json.dumps(asdict(me)))


def _read_hello(store: Store, number: int) -> Hello:
    return Hello(**json.loads(store.get(_key(number))))


def _refuse_differences(hellos: Sequence[Hello]) -> None:
    """Raises UserError if versions or settings differ."""
    facts = [(hello.host, hello.facts) for hello in hellos]
    differences = versions.describe_differences(facts)
    if not differences:
        return
    remedy = versions.remedy(facts) or "start all with the same --num_processes"
    why = f"the machines differ: {printable(differences, 2000)}"
    raise UserError(f"{why}. {remedy}; nothing was read or trained")
