"""Every process of a run shows up, and is compared with the first, before a process group is made.

It works through the store that torch meets at (MASTER_ADDR, MASTER_PORT), so that it is the same whatever launched
the processes: `accelerate`, `torchrun`, `deepspeed`, `mpirun`, `srun`, or variables set by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, listing
from toolkit.launch import facts, watch, wire
from toolkit.launch.environment import Place
from toolkit.launch.member import Member
from toolkit.launch.relaunch import ddp_seconds
from toolkit.launch.wire import UnreachableError

if TYPE_CHECKING:
    from torch.distributed import Store

_VERDICT_SECONDS = 15.0
_HEARING_SECONDS = 5.0
_POLL_SECONDS = 0.02
# Whoever keeps the store must keep it as long as the process lives.
_kept: list[Any] = []


@dataclass(frozen=True)
class Shown:
    """What a process says of itself."""

    member: Member
    world_size: int
    facts: dict[str, str | None]
    toward: str
    """The address by which it reached rank 0."""


def call_roll(place: Place, script: str, seconds: float) -> None:
    """Returns once all are there and alike; from then on each knows when another one fails (see `watch`).

    Raises UserError, within `seconds` and a little more, naming who is missing or what is not the same.
    """
    if place.world_size == 1 or watch.current is not None:  # a second accelerator of the same processes
        return
    _check_meeting_place(place)
    ddp_seconds()  # the watch's threads could tell nobody that it is no number
    deadline = time.monotonic() + seconds
    store = _open_store(place, deadline, seconds)
    member = Member(place.rank, socket.gethostname(), facts.machine(), place.local_rank, os.getpid())
    if store.add(f"twice/{place.rank}", 1) > 1:
        raise UserError(f"two processes say that they are rank {place.rank}, one of them here ({member.host}): "
                        "give each its own RANK (and NODE_RANK or --machine_rank to each machine)")  # fmt: skip
    toward = next(iter(wire.addresses_of(os.environ["MASTER_ADDR"])), "")
    mine = Shown(member, place.world_size, facts.facts(script), toward)
    if place.rank == 0:
        store.set("shown/0", _packed(mine))
        hub = watch.Hub(place.world_size)
        shown, fault = _await_all(store, place, deadline, seconds)
        verdict: dict[str, Any] = {
            "fault": fault,
            "members": [asdict(other.member) for other in shown],
            "towards": [other.toward for other in shown[1:]],
            "port": hub.port,
            "token": hub.token,
        }
        store.set("verdict", json.dumps(verdict))
        if fault:
            _let_hear(store, [other.member.rank for other in shown[1:]])
            raise UserError(fault)
        hub.start([other.member for other in shown])
    else:
        store.set(f"shown/{place.rank}", _packed(mine))
        verdict = _await_verdict(store, place, deadline)
        store.set(f"heard/{place.rank}", "yes")
        fault = verdict["fault"] or _counted_otherwise(verdict["members"], place)
        if fault:
            raise UserError(fault)
        members = [Member(**found) for found in verdict["members"]]
        watch.join(members, place.rank, toward, int(verdict["port"]), str(verdict["token"]))
    _choose_interface(verdict["members"], toward if place.rank else verdict["towards"])


def tell_before_roll(place: Place, message: str) -> None:
    """To the other machines, from a process that fails before it shows up: a setting, a file. It takes seconds."""
    several = place.local_world_size < place.world_size and watch.current is None
    if not several or "torch" not in sys.modules or not os.environ.get("MASTER_ADDR"):
        return
    said = f"rank {place.rank} on {socket.gethostname()} failed: {message}"
    with contextlib.suppress(Exception):  # what there is to say here has been said
        store = _open_store(place, time.monotonic() + _HEARING_SECONDS, _HEARING_SECONDS)
        if place.rank:
            store.set("early", said)
        else:
            store.set("verdict", json.dumps({"fault": said, "members": []}))
            _let_hear(store, range(1, place.world_size))


def _check_meeting_place(place: Place) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE say that there are {place.world_size} processes, and {' and '.join(missing)} is not "
            "set: set the address of rank 0's machine and a port that is free there, the same for all"
        )
    if not os.environ["MASTER_PORT"].isdigit():
        raise UserError(f"MASTER_PORT is {os.environ['MASTER_PORT']!r}, not a TCP port")


def _let_hear(store: Store, ranks: Sequence[int]) -> None:
    """The store ends with this process, where no launcher keeps it."""
    deadline = time.monotonic() + _HEARING_SECONDS
    while time.monotonic() < deadline and not all(store.check([f"heard/{rank}"]) for rank in ranks):
        time.sleep(_POLL_SECONDS)


def _counted_otherwise(members: Sequence[Mapping[str, Any]], place: Place) -> str:
    if len(members) == place.world_size:
        return ""
    return (
        f"rank 0 on {members[0]['host']} counts {len(members)} processes and rank {place.rank} on "
        f"{socket.gethostname()} {place.world_size}: start all of them with the same number"
    )


def _packed(shown: Shown) -> str:
    return json.dumps(asdict(shown))


def _open_store(place: Place, deadline: float, seconds: float) -> Store:
    """The store torch's own rendezvous will find: several of one process share a server."""
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not by_agent
    if not serves:
        _await_server(address, port, place, deadline, seconds)
    try:
        store = TCPStore(
            address,
            port,
            None,
            serves,
            timedelta(seconds=max(10.0, deadline - time.monotonic())),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistNetworkError as error:
        holder = wire.holder_of(port) if serves else None
        if holder:
            raise UserError(
                f"port {port} of {socket.gethostname()} is taken by {holder[1]}: `kill {holder[0]}` if it is left "
                "over, or choose another port: --main_process_port (accelerate, or behind the script), --master_port "
                "(deepspeed, torchrun), MASTER_PORT (mpirun, srun)"
            ) from error
        raise
    _kept.append(store)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"toolkit/roll/{attempt}", store)


def _await_server(address: str, port: int, place: Place, deadline: float, seconds: float) -> None:
    """Until somebody listens there: torch would try for as long, and warn on every failure."""
    while True:
        left = deadline - time.monotonic()
        try:
            wire.connect(address, port, min(max(left, 1.0), 5.0)).close()
        except UnreachableError as error:
            trouble = error
        else:
            return
        if left <= 0:
            break
        time.sleep(0.2)
    raise UserError(
        f"rank {place.rank} on {socket.gethostname()} found no rank 0 within {seconds:.0f} s: {trouble}. "
        f"To do: {wire.remedy(trouble)}. `toolkit doctor --peers {address},"
        f"{wire.address_towards(address) or 'ADDRESS_OF_THIS_MACHINE'}` on each machine finds out more"
    )


def _await_all(store: Store, place: Place, deadline: float, seconds: float) -> tuple[list[Shown], str]:
    """(those that came, why they cannot start together)."""
    missing = list(range(place.world_size))
    while missing := [rank for rank in missing if not store.check([f"shown/{rank}"])]:
        if store.check(["early"]):
            came = [rank for rank in range(place.world_size) if rank not in missing]
            return [_shown(store, rank) for rank in came], str(store.get("early").decode())
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    shown = [_shown(store, rank) for rank in range(place.world_size) if rank not in missing]
    if missing:
        return shown, _missing(missing, shown, place, seconds)
    return shown, _unlike(shown, place)


def _shown(store: Store, rank: int) -> Shown:
    found = json.loads(store.get(f"shown/{rank}"))
    return Shown(Member(**found["member"]), found["world_size"], found["facts"], found["toward"])


def _await_verdict(store: Store, place: Place, deadline: float) -> dict[str, Any]:
    patience = max(1.0, deadline - time.monotonic()) + _VERDICT_SECONDS
    try:
        store.wait(["verdict"], timedelta(seconds=patience))
        return dict(json.loads(store.get("verdict")))
    except RuntimeError as error:
        raise UserError(
            f"rank {place.rank} on {socket.gethostname()} reached {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} and heard nothing of rank 0 in {patience:.0f} s: it did not start, or ended"
        ) from error


def _missing(missing: Sequence[int], shown: Sequence[Shown], place: Place, seconds: float) -> str:
    here: dict[str, list[int]] = {}
    for other in shown:
        here.setdefault(other.member.host, []).append(other.member.rank)
    came = "; ".join(f"{_ranks(ranks)} on {host}" for host, ranks in here.items())
    port = os.environ["MASTER_PORT"]
    return (
        f"{_ranks(missing)} of {place.world_size} did not come within {seconds:.0f} s to {os.environ['MASTER_ADDR']}:"
        f"{port} (there are {came}): start them too, with the same number of processes in all. If they were "
        f"started, they say what they met: a firewall (`sudo ufw allow from THAT_MACHINE` here), another address, or "
        "an error before this point. Longer: --rendezvous_timeout SECONDS"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)}"


def _unlike(shown: Sequence[Shown], place: Place) -> str:
    for other in shown:
        if other.world_size != place.world_size:
            return (
                f"rank 0 on {shown[0].member.host} counts {place.world_size} processes and rank {other.member.rank} on "
                f"{other.member.host} {other.world_size}: start all of them with the same number"
            )
    found = [(other.member.host, other.facts) for other in shown]
    if [other for other in shown if facts.differing(shown[0].facts, other.facts)]:
        hosts = _told_apart(shown)
        found = [(hosts[other.member.rank], other.facts) for other in shown]
        return (
            f"the machines do not run the same: {facts.unlike(found)}. {facts.mend_versions(found)}; "
            "nothing was read or trained"
        )
    return ""


def _told_apart(shown: Sequence[Shown]) -> list[str]:
    """A name for each process's machine; two machines of one name get their number."""
    machines = list(dict.fromkeys(other.member.machine for other in shown))
    names = {other.member.machine: other.member.host for other in shown}
    alike = len(set(names.values())) < len(machines)
    return [
        f"{other.member.host} (machine {machines.index(other.member.machine)})" if alike else other.member.host
        for other in shown
    ]


def _choose_interface(members: Sequence[Mapping[str, Any]], towards: str | Sequence[str]) -> None:
    """gloo and NCCL use the interface by which the machines reach each other, unless the user names another.

    gloo otherwise looks its own host name up, which on Debian is 127.0.1.1, and waits there for the other machine.
    """
    if len({member["machine"] for member in members}) == 1:
        return
    addresses = [towards] if isinstance(towards, str) else towards
    for address in addresses:
        interface = wire.interface_towards(address) if address and not wire.is_loopback(address) else None
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without `=`, eth1 means eth10 too
            return
