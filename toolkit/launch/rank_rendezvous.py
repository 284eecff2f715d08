"""Every process of a run finds the others, and is compared with rank 0, before a process group is made.

Where rank 0 listens stands in the store that torch's own rendezvous uses (MASTER_ADDR, MASTER_PORT), so that it is the
same whatever launched the processes: `accelerate`, `torchrun`, `deepspeed`, `mpirun`, `srun`, or variables set by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, listing, plain
from toolkit.launch import failure_detector, network
from toolkit.launch.channel import (
    ChannelError,
    ClosedError,
    Listener,
    Message,
    TokenError,
    UnreachableError,
    connect,
)
from toolkit.launch.environment import TIMEOUTS, Place, seconds_of
from toolkit.launch.failure_detector import Peer
from toolkit.launch.nodes import requested_nodes
from toolkit.launch.rendezvous import VERDICT_SECONDS, Rendezvous, coordinate, join, until_reached
from toolkit.launch.restarts import attempt, most_restarts
from toolkit.utils import versions

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

# How long one that cannot take part waits for the others: they start at the same time, or have met already.
_EARLY_SECONDS, _LATE_SECONDS = 20.0, 5.0
_MENTION_SECONDS = 5.0
# Whoever keeps the store must keep it as long as the process lives.
_kept: list[Any] = []
_exchanges = 0


class _EndedError(UserError):
    """Rank 0 was there."""


def find_ranks(place: Place, script: str, seconds: float, failure: str = "") -> None:
    """Returns once all are there and alike; from then on each knows when another one fails (see `failure_detector`).

    Raises UserError, within `seconds` and a little more, naming who is missing or what is not the same. `failure` is
    why this process cannot take part: all others hear it.
    """
    if failure_detector.current is not None:  # a second accelerator of the same processes
        return
    if place.world_size == 1:
        if not _kept and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():  # DeepSpeed's group of one
            _open_store(place, time.monotonic() + seconds, seconds)
            network.choose_interface(network.LOOPBACK)
        return
    _check_master(place)
    for name in TIMEOUTS:
        seconds_of(name)  # the detector's threads could tell nobody that it is no number
    deadline = time.monotonic() + seconds
    me = Peer(place.rank, socket.gethostname(), network.node_id(), place.local_rank, os.getpid())
    hello: Message = {"number": place.rank, "world_size": place.world_size, "peer": asdict(me), "failure": failure,
                      "versions": versions.comparable(script)}  # fmt: skip
    while True:
        store = _open_store(place, deadline, seconds)
        # a second rank 0 reaches the first one's store, at the address that was named: both hear it by its hello
        claim = f"{me.node} {me.pid}"
        coordinates = place.rank == 0 and store.compare_set(f"rank 0/{attempt()}", "", claim) == claim.encode()
        try:
            found = (_coordinate if coordinates else _join)(store, place, hello, deadline, seconds)
            break
        except _EndedError:  # started again, it says in a new store, or in its launcher's, where it listens then
            if not most_restarts() or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    if found.fault:
        raise UserError(found.fault)
    peers = [Peer(**said["peer"]) for said in found.hellos.values()]
    failure_detector.start(peers, place.rank, found.channels)
    network.choose_interface(found.own_address() if len({peer.node for peer in peers}) > 1 else network.LOOPBACK)


def exchange(place: Place, value: Any) -> list[Any]:
    """What each rank has to say, as JSON knows it, the same list for all of them; before there is a process group, and
    as often on each."""
    if place.world_size == 1 or not _kept:
        return [value]
    global _exchanges
    _exchanges, store = _exchanges + 1, _kept[-1]
    keys = [f"{_exchanges}/{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], json.dumps(value))
    store.wait(keys, timedelta(seconds=seconds_of("ddp_timeout")))
    return [json.loads(store.get(key)) for key in keys]


def tell_of_early_failure(place: Place, message: str) -> None:
    """To the other nodes, from a process that fails before the rendezvous: a setting, a file. It takes seconds."""
    several = place.local_world_size < place.world_size and failure_detector.current is None
    if several and "torch" in sys.modules and os.environ.get("MASTER_ADDR"):
        said = f"rank {place.rank} on {socket.gethostname()} failed: {message}"
        with contextlib.suppress(Exception):  # what there is to say here has been said
            find_ranks(place, "", _LATE_SECONDS if _kept else _EARLY_SECONDS, said)


def _check_master(place: Place) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE say that there are {place.world_size} processes, but {' and '.join(missing)} is not "
            "set: give the address of rank 0's machine and a port that is free there, the same to all"
        )
    if not os.environ["MASTER_PORT"].isdigit():
        raise UserError(f"MASTER_PORT is {os.environ['MASTER_PORT']!r}, not a TCP port")


# --- torch's store


def _open_store(place: Place, deadline: float, seconds: float) -> Store:
    """The store torch's own rendezvous will find: several of one process share a server."""
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _await_server(address, port, place, deadline - time.monotonic(), seconds)
    timeout = timedelta(seconds=max(10.0, deadline - time.monotonic()))
    try:
        if serves:
            store = serve_store(address, network.listen(port, _address_to_listen(place)), timeout)
        else:
            store = TCPStore(address, port, None, False, timeout)
    except (DistNetworkError, OSError) as error:
        if serves and not network.is_own(address):
            raise UserError(f"rank 0 on {socket.gethostname()} reached nobody at {_elsewhere(address)}") from error
        if not serves or not (holder := network.holder_of(port)):
            raise
        raise UserError(
            f"port {port} of {socket.gethostname()} is taken by {holder[1]}: `kill {holder[0]}` if it is left "
            "over, or choose another port: --main_process_port (accelerate, or behind the script, on every machine), "
            "--master_port (deepspeed, torchrun), MASTER_PORT (mpirun, srun)"
        ) from error
    _kept.append(store)
    # not by attempt: launchers of several machines may count differently
    return PrefixStore("toolkit/rendezvous", store)


def serve_store(address: str, server: socket.socket, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """torch's store, where this socket listens: by itself it listens on all addresses. `address` leads there."""
    from torch.distributed import TCPStore

    port, descriptor = server.getsockname()[1], server.detach()  # the store closes it
    return TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )


def _address_to_listen(place: Place) -> str:
    return network.address_to_listen(os.environ["MASTER_ADDR"], local=place.local_world_size == place.world_size)


def _await_server(address: str, port: int, place: Place, left: float, seconds: float) -> None:
    """Until somebody listens there: torch would try for as long, and warn on every failure."""
    mentioned, me = place.local_rank > 0, f"rank {place.rank} on {socket.gethostname()}"

    def waiting(trouble: ChannelError, waited: float) -> None:
        nonlocal mentioned
        if not mentioned and waited > _MENTION_SECONDS:
            mentioned = True
            print(f"{me}: rank 0 is not there yet: {trouble}", file=sys.stderr, flush=True)

    try:
        until_reached(lambda limit: connect(address, port, limit).close(), left, waiting)
    except UnreachableError as trouble:
        hint = ""
        if network.is_own(address) and place.local_world_size < place.world_size:
            how = nodes.how if (nodes := requested_nodes()) else "RANK"
            hint = f". {address} is an address of this very machine ({how}): is it the first one?"
        raise UserError(
            f"{me} found no rank 0 within {seconds:.0f} s: {trouble}. To do: {trouble.remedy}{hint}. "
            f"{_doctor(address, network.address_towards(address) or 'ADDRESS_OF_THIS_MACHINE')}"
        ) from trouble


def _doctor(*addresses: str) -> str:
    """What to type where machines do not find each other."""
    names = dict.fromkeys(addresses) if len(set(addresses)) > 1 else [addresses[0], "ADDRESS_OF_THE_OTHER"]
    return f"`toolkit doctor --peers {shlex.quote(','.join(names))}` on each machine finds out more"


# --- rank 0


def _coordinate(store: Store, place: Place, hello: Message, deadline: float, seconds: float) -> Rendezvous:
    failure, nonce, mentioned = str(hello["failure"]), secrets.token_hex(16), False
    nodes, server = requested_nodes(), network.listen(0, _address_to_listen(place))
    known = {"port": server.getsockname()[1], "nonce": nonce, "host": hello["peer"]["host"], "size": place.world_size,
             "address": network.address_towards(os.environ["MASTER_ADDR"])}  # fmt: skip

    def compare(hellos: Sequence[Message]) -> str:
        if failure:  # for all to hear
            return failure if len(hellos) == place.world_size else ""
        return _difference(hellos)

    def waiting(absent: Sequence[int], hellos: Sequence[Message], waited: float) -> str:
        nonlocal mentioned
        if store.check([f"fault/{nonce}"]):
            return plain(store.get(f"fault/{nonce}").decode(errors="replace"))
        if waited >= left:
            return failure or _missing(absent, hellos, place, seconds, listener.refused)
        if waited > _MENTION_SECONDS and not mentioned and not failure:
            mentioned = True
            print(f"waiting for {_ranks(absent)}: start the same there", file=sys.stderr, flush=True)
        return ""

    with Listener(server, _key(nonce), nodes.allowed() if nodes else ()) as listener:
        store.set("coordinator", json.dumps(known))
        left = deadline - time.monotonic()
        found = coordinate(listener, hello, place.world_size, left, compare, waiting)
        if found.fault:
            store.set(f"fault/{nonce}", found.fault)  # for who is late, where a launcher keeps the store
    _keep_for_exchange(store, nonce)
    return found


def _keep_for_exchange(store: Store, nonce: str) -> None:
    from torch.distributed import PrefixStore

    _kept.append(PrefixStore(f"exchange/{nonce}", store))


def _key(nonce: str) -> str:
    """Whoever reaches torch's store can read the nonce; not so a $TOOLKIT_TOKEN."""
    return f"{os.environ.get('TOOLKIT_TOKEN', '')} {nonce}"


def _difference(hellos: Sequence[Message]) -> str:
    first, other = hellos[0], hellos[-1]
    host, rank = other["peer"]["host"], other["number"]
    if other["failure"]:
        return str(other["failure"])
    if len(set(counts := (first["world_size"], other["world_size"]))) > 1:
        return _unequal(first["peer"]["host"], counts[0], f"rank {rank} on {host}", counts[1])
    if twin := next((hello for hello in hellos[:-1] if hello["number"] == rank), None):
        return (
            f"two processes say that they are rank {rank}, on {twin['peer']['host']} and {host}: give each its own "
            "RANK (and NODE_RANK or --machine_rank to each machine)"
        )
    if len(hellos) < counts[0]:
        return ""
    peers = [hello["peer"] for hello in hellos]
    unclear = len({peer["host"] for peer in peers}) < len({peer["node"] for peer in peers})  # nodes of one name
    found = [(f"{peer['host']} ({peer['node']})" if unclear else peer["host"], hello["versions"])
             for peer, hello in zip(peers, hellos, strict=True)]  # fmt: skip
    if not (differences := versions.differences(found)):
        return ""
    return f"the machines do not run the same: {differences}. {versions.remedy(found)}; nothing was read or trained"


def _unequal(first_host: str, first: int, who: str, other: int) -> str:
    return (
        f"rank 0 on {first_host} counts {first} processes and {who} {other}: start all of them with the same number, "
        f"--num_processes {min(first, other)} perhaps (without it, it is the devices that a machine sees)"
    )


def _missing(
    absent: Sequence[int], hellos: Sequence[Message], place: Place, seconds: float, refused: Mapping[str, str]
) -> str:
    here: dict[str, list[int]] = {}
    for hello in sorted(hellos, key=lambda hello: int(hello["number"])):
        here.setdefault(hello["peer"]["host"], []).append(hello["number"])
    came = "; ".join(f"{_ranks(ranks)} on {host}" for host, ranks in here.items())
    first, nodes = os.environ["MASTER_ADDR"], requested_nodes()
    fault = (
        f"{_ranks(absent)} of {place.world_size} did not come within {seconds:.0f} s to {first}:"
        f"{os.environ['MASTER_PORT']} (those that came: {came})"
    )
    if nodes and not network.is_own(first):
        return f"{fault}: {_elsewhere(first)}"
    if refused:
        fault += "; sent away: " + listing((f"{address} ({why})" for address, why in refused.items()), 4)
    return (
        f"{fault}: start them too, with the same command and number of processes. If they were started, they say what "
        "stopped them: a firewall (`sudo ufw allow from THAT_MACHINE` here), another address, or an earlier error. "
        f"Longer: --rendezvous_timeout SECONDS. {_doctor(*(nodes.addresses if nodes else (first,)))}"
    )


def _elsewhere(first: str) -> str:
    return (
        f"{first}, which the others call, is not an address of this machine "
        f"({', '.join(network.reachable_addresses())}): pass --machine_rank here if it is "
        "another one, or --main_process_ip with an address of the first machine"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 1 (machine 1 (10.0.0.2))`; the machines only where our own launcher knows them."""
    text, nodes = f"rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)}", requested_nodes()
    if not nodes or nodes.count == 1:
        return text
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    return f"{text} ({', '.join(dict.fromkeys(nodes.name_of(rank // each) for rank in ranks))})"


# --- the others


def _join(store: Store, place: Place, hello: Message, deadline: float, seconds: float) -> Rendezvous:
    me, address = f"rank {place.rank} on {socket.gethostname()}", os.environ["MASTER_ADDR"]
    left = max(1.0, deadline - time.monotonic())
    try:
        store.wait(["coordinator"], timedelta(seconds=left + VERDICT_SECONDS))
    except RuntimeError as error:
        raise _EndedError(
            f"{me} reached {address}:{os.environ['MASTER_PORT']} but heard nothing from rank 0 in "
            f"{left + VERDICT_SECONDS:.0f} s: it did not start, or has ended"
        ) from error
    known = json.loads(store.get("coordinator"))
    fault, known["host"] = f"fault/{known['nonce']}", plain(known["host"])  # whoever reaches the store writes there
    # another rank 0 reached the store of this machine before this one had claimed it
    if place.rank == 0 and network.is_own(address):
        address = known["address"] or address

    def waiting(trouble: ChannelError, waited: float) -> None:
        if isinstance(trouble, TokenError):
            text = f"{me} found rank 0 on {known['host']}, and TOOLKIT_TOKEN is not the same on both"
            store.set(fault, text := f"{text}: set it to the same secret on all machines")
            raise UserError(text)
        if known["size"] != place.world_size:
            raise UserError(_unequal(known["host"], known["size"], me, place.world_size))
        if store.check([fault]):
            raise UserError(plain(store.get(fault).decode(errors="replace")))
        if isinstance(trouble, ClosedError) or getattr(trouble, "kind", "") == "refused":
            raise _EndedError(f"{me} had reached rank 0 on {known['host']}, which has ended since")

    _keep_for_exchange(store, known["nonce"])
    try:
        return join(address, known["port"], _key(known["nonce"]), hello, left, waiting)
    except ChannelError as error:
        raise UserError(
            f"{me} reached {address}, but not its port {known['port']}: {error}; all TCP ports must be open between "
            f"the machines of a run, not just one. To do: {error.remedy}"
        ) from error
