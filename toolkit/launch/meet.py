"""The launchers of a run, or its ranks, find each other: who is missing, who is there twice, what
differs between them.

All write what they know of themselves to torch's store, which the first of them serves, and read
what the others have written.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, listing, printable
from toolkit.launch import network
from toolkit.launch.machines import Machines
from toolkit.utils import versions
from toolkit.utils.log import logger

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

_POLL_SECONDS, _LOG_SECONDS = 0.05, 10.0
_FAULT = "fault"
# A member that has found a fault waits this long for the others to read it.
_READ_SECONDS = 3.0


def facts_to_compare(script: str, device: str, processes: int) -> dict[str, Any]:
    """What must be the same on all machines."""
    versions_here = versions.comparable_versions(script)
    return {**versions_here, "device": device, "num_processes": processes}


def device_type() -> str:
    """`cpu` where torch sees no accelerator."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def open_store(
    first: str, port: int, serves: bool, is_local: bool, seconds: float
) -> TCPStore:
    """The store of a run, at the first machine's address: served by one process there, `serves`,
    to which the others connect. `is_local`: all are on this machine. Raises UserError."""
    is_here = network.is_this_machine(first)
    address = network.address_to_serve(first, is_local) if is_here else first
    if serves and is_here:
        return network.serve_store(address, port)
    return network.connect_store(address, port, seconds)


def meet_launchers(
    machines: Machines, facts: Mapping[str, Any], seconds: float
) -> tuple[TCPStore, list[str]]:
    """Waits for the other machines' launchers; returns their store and the machines' host names,
    in order. Raises UserError as `meet`."""
    rank, first, count = machines.rank, machines.first, machines.count
    if count > 1:
        host = socket.gethostname()
        logger.info(f"this is machine {rank} ({host}) of {count}: {machines.rank_source}")
    store = open_store(first, machines.port, rank == 0, count == 1, seconds)
    remedy = (
        f"start the same command there, with --main_process_ip {first} there too; if it "
        "was started, see its output, and open all ports between the machines. "
        f"{network.doctor_command(first)}"
    )
    members = meet(store, store.host, "machine", rank, count, facts, remedy, seconds)
    return store, [host for host, _ in members]


def meet(
    store: Store,
    address: str,
    noun: str,
    number: int,
    count: int,
    facts: Mapping[str, Any],
    remedy: str,
    seconds: float,
) -> list[tuple[str, str]]:
    """Waits for all, and chooses the interface between them; returns each's host name and
    machine (`network.node_id`).

    `address`: the store's. `noun`: machine or rank. `remedy`: what to do if some are missing.
    Raises UserError, in all, within `seconds` and a little more, if one is missing, is there twice
    or differs in `facts`.
    """
    here = socket.gethostname(), network.node_id(), facts
    try:
        if store.add(f"count {number}", 1) > 1:
            other = json.loads(store.get(str(number)))
            raise UserError(
                f"two are {noun} {number}, on {other[0]} and {here[0]}: give each its own "
                "--machine_rank (or NODE_RANK; RANK, if set by hand)"
            )
        members = exchange(store, noun, number, count, here, remedy, seconds)
        refuse_differences(
            "versions and settings", [(host, facts) for host, _, facts in members]
        )
    except UserError as error:
        # the member that serves the store may have ended
        with contextlib.suppress(RuntimeError):
            store.set(_FAULT, str(error))
            # if this one serves it, the others still read the fault
            time.sleep(_READ_SECONDS)
        raise
    except RuntimeError as error:
        raise UserError(f"{noun} 0 was reached, and has ended since") from error
    source = network.source_address_for(address)
    if len({machine for _, machine, _ in members}) == 1:
        source = network.LOOPBACK
    network.choose_interface(source)
    return [(host, machine) for host, machine, _ in members]


def exchange(
    store: Store,
    noun: str,
    number: int,
    count: int,
    value: Any,
    purpose: str,
    seconds: float = math.inf,
) -> list[Any]:
    """Publishes this member's `value`, as JSON; waits for those of all, and returns them in order.

    `purpose`: what the first member logs if it takes long. Raises UserError after `seconds`, and
    for a fault that another member has published.
    """
    store.set(str(number), json.dumps(value, default=str))
    missing = list(range(count))
    started = time.monotonic()
    log_time = started + _LOG_SECONDS
    while True:
        missing = [other for other in missing if not store.check([str(other)])]
        if store.check([_FAULT]):
            raise UserError(printable(store.get(_FAULT).decode(), 10_000))
        if not missing:
            break
        absent = f"{noun} {listing(missing, 8)}"
        now = time.monotonic()
        if now > started + seconds:
            raise UserError(
                f"{absent} did not come within {seconds:.0f} s (--rendezvous_timeout): {purpose}"
            )
        if number == 0 and now > log_time:
            log_time = math.inf
            logger.info(f"waiting for {absent}: {purpose}")
        time.sleep(_POLL_SECONDS)
    values = [json.loads(store.get(str(other))) for other in range(count)]
    store.add("read", 1)
    if number == 0:  # it may serve the store, and end after this
        deadline = time.monotonic() + _LOG_SECONDS
        while store.add("read", 0) < count and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    return values


def refuse_differences(what: str, tables: Sequence[versions.HostValues]) -> None:
    """Raises UserError if a value differs between the members of a run."""
    differences = versions.describe_differences(tables)
    if differences:
        raise UserError(
            f"{what} are not the same everywhere: {printable(differences, 2000)}. Give all "
            "machines the same versions, code, files and settings; nothing was trained"
        )
