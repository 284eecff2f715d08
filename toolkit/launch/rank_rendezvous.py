"""Every process of a run finds the others, and is compared with rank 0, before a process group is made.

Where rank 0 listens stands in the store that torch's own rendezvous uses (MASTER_ADDR, MASTER_PORT), so that it is the
same whatever launched the processes: `accelerate`, `torchrun`, `deepspeed`, `mpirun`, `srun`, or variables set by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit import versions
from toolkit.errors import UserError, listing
from toolkit.launch import failure_detector
from toolkit.launch.channel import (
    Channel,
    ChannelError,
    ClosedError,
    Listener,
    Message,
    UnreachableError,
    connect,
    remedy,
)
from toolkit.launch.environment import Place, ddp_seconds
from toolkit.launch.failure_detector import Peer
from toolkit.launch.network import address_towards, holder_of, is_loopback, listen, node_id, own_addresses
from toolkit.launch.rendezvous import VERDICT_SECONDS, Rendezvous, coordinate, join

if TYPE_CHECKING:
    from torch.distributed import Store

_EARLY_SECONDS = 5.0
# Whoever keeps the store must keep it as long as the process lives.
_kept: list[Any] = []


def find_ranks(place: Place, script: str, seconds: float, failure: str = "") -> None:
    """Returns once all are there and alike; from then on each knows when another one fails (see `failure_detector`).

    Raises UserError, within `seconds` and a little more, naming who is missing or what is not the same. `failure` is
    why this process cannot take part: all others hear it.
    """
    if place.world_size == 1 or failure_detector.current is not None:  # a second accelerator of the same processes
        return
    _check_master(place)
    ddp_seconds()  # the detector's threads could tell nobody that it is no number
    deadline = time.monotonic() + seconds
    store = _open_store(place, deadline, seconds)
    me = Peer(place.rank, socket.gethostname(), node_id(), place.local_rank, os.getpid())
    if store.add(f"claimed/{place.rank}", 1) > 1:
        raise UserError(f"two processes say that they are rank {place.rank}, one of them here ({me.host}): "
                        "give each its own RANK (and NODE_RANK or --machine_rank to each machine)")  # fmt: skip
    hello: Message = {"number": place.rank, "world_size": place.world_size, "peer": asdict(me), "failure": failure,
                      "versions": versions.comparable(script)}  # fmt: skip
    found = (_join if place.rank else _coordinate)(store, place, hello, deadline, seconds)
    if found.fault:
        raise UserError(found.fault)
    peers = [Peer(**said["peer"]) for said in found.hellos.values()]
    failure_detector.start(peers, place.rank, found.channels)
    _choose_interface(peers, found.channels)


def tell_of_early_failure(place: Place, message: str) -> None:
    """To the other nodes, from a process that fails before the rendezvous: a setting, a file. It takes seconds."""
    several = place.local_world_size < place.world_size and failure_detector.current is None
    if several and "torch" in sys.modules and os.environ.get("MASTER_ADDR"):
        said = f"rank {place.rank} on {socket.gethostname()} failed: {message}"
        with contextlib.suppress(Exception):  # what there is to say here has been said
            find_ranks(place, "", _EARLY_SECONDS, said)


def _check_master(place: Place) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE say that there are {place.world_size} processes, and {' and '.join(missing)} is not "
            "set: set the address of rank 0's machine and a port that is free there, the same for all"
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
        _await_server(address, port, place, deadline, seconds)
    timeout = timedelta(seconds=max(10.0, deadline - time.monotonic()))
    try:
        store = TCPStore(address, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        if not serves or not (holder := holder_of(port)):
            raise
        raise UserError(
            f"port {port} of {socket.gethostname()} is taken by {holder[1]}: `kill {holder[0]}` if it is left "
            "over, or choose another port: --main_process_port (accelerate, or behind the script), --master_port "
            "(deepspeed, torchrun), MASTER_PORT (mpirun, srun)"
        ) from error
    _kept.append(store)
    return PrefixStore(f"toolkit/rendezvous/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _await_server(address: str, port: int, place: Place, deadline: float, seconds: float) -> None:
    """Until somebody listens there: torch would try for as long, and warn on every failure."""
    while True:
        left = deadline - time.monotonic()
        try:
            return connect(address, port, min(max(left, 1.0), 5.0)).close()
        except UnreachableError as error:
            if left > 0:
                time.sleep(0.2)
                continue
            raise UserError(
                f"rank {place.rank} on {socket.gethostname()} found no rank 0 within {seconds:.0f} s: {error}. "
                f"To do: {remedy(error)}. `toolkit doctor --peers {address},"
                f"{address_towards(address) or 'ADDRESS_OF_THIS_MACHINE'}` on each machine finds out more"
            ) from error


# --- rank 0


def _coordinate(store: Store, place: Place, hello: Message, deadline: float, seconds: float) -> Rendezvous:
    failure, token = str(hello["failure"]), secrets.token_hex(16)
    server = listen(0, backlog=max(64, place.world_size))
    known = {"port": server.getsockname()[1], "token": token, "host": hello["peer"]["host"], "size": place.world_size}

    def compare(hellos: Sequence[Message]) -> str:
        if failure:  # for all to hear
            return failure if len(hellos) == place.world_size else ""
        return _difference(hellos)

    def missing(absent: Sequence[int], hellos: Sequence[Message]) -> str:
        return failure or _missing(absent, hellos, place, seconds)

    with Listener(server, token) as listener:
        store.set("coordinator", json.dumps(known))
        found = coordinate(listener, hello, place.world_size, deadline - time.monotonic(), compare, missing)
        if found.fault:
            store.set("fault", found.fault)  # for who is late, where a launcher keeps the store
    return found


def _difference(hellos: Sequence[Message]) -> str:
    first, other = hellos[0], hellos[-1]
    if other["failure"]:
        return str(other["failure"])
    if other["world_size"] != first["world_size"]:
        return (
            f"rank 0 on {first['peer']['host']} counts {first['world_size']} processes and rank {other['number']} on "
            f"{other['peer']['host']} {other['world_size']}: start all of them with the same number"
        )
    if len(hellos) < first["world_size"]:
        return ""
    found = list(zip(_hosts(hellos), (hello["versions"] for hello in hellos), strict=True))
    if not (differences := versions.differences(found)):
        return ""
    return f"the machines do not run the same: {differences}. {versions.remedy(found)}; nothing was read or trained"


def _hosts(hellos: Sequence[Message]) -> list[str]:
    """A name for each process's node; two nodes of one name get their number."""
    peers = [hello["peer"] for hello in sorted(hellos, key=lambda hello: int(hello["number"]))]
    nodes = list(dict.fromkeys(peer["node"] for peer in peers))
    alike = len({peer["host"] for peer in peers}) < len(nodes)
    named = {p["node"]: f"{p['host']} (machine {nodes.index(p['node'])})" if alike else p["host"] for p in peers}
    return [str(named[hello["peer"]["node"]]) for hello in hellos]


def _missing(absent: Sequence[int], hellos: Sequence[Message], place: Place, seconds: float) -> str:
    here: dict[str, list[int]] = {}
    for hello in sorted(hellos, key=lambda hello: int(hello["number"])):
        here.setdefault(hello["peer"]["host"], []).append(hello["number"])
    came = "; ".join(f"{_ranks(ranks)} on {host}" for host, ranks in here.items())
    return (
        f"{_ranks(absent)} of {place.world_size} did not come within {seconds:.0f} s to {os.environ['MASTER_ADDR']}:"
        f"{os.environ['MASTER_PORT']} (there are {came}): start them too, with the same number of processes in all. If "
        "they were started, they say what they met: a firewall (`sudo ufw allow from THAT_MACHINE` here), another "
        "address, or an error before this point. Longer: --rendezvous_timeout SECONDS"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)}"


# --- the others


def _join(store: Store, place: Place, hello: Message, deadline: float, seconds: float) -> Rendezvous:
    me, address = f"rank {place.rank} on {socket.gethostname()}", os.environ["MASTER_ADDR"]
    left = max(1.0, deadline - time.monotonic())
    try:
        store.wait(["coordinator"], timedelta(seconds=left + VERDICT_SECONDS))
    except RuntimeError as error:
        raise UserError(
            f"{me} reached {address}:{os.environ['MASTER_PORT']} and heard nothing of rank 0 in "
            f"{left + VERDICT_SECONDS:.0f} s: it did not start, or ended"
        ) from error
    known = json.loads(store.get("coordinator"))

    def waiting(trouble: ChannelError, waited: float) -> None:
        if known["size"] != place.world_size:
            raise UserError(
                f"rank 0 on {known['host']} counts {known['size']} processes and {me} {place.world_size}: start all of "
                "them with the same number"
            )
        if store.check(["fault"]):
            raise UserError(store.get("fault").decode())
        if isinstance(trouble, ClosedError) or getattr(trouble, "kind", "") == "refused":
            raise UserError(f"{me} had reached rank 0 on {known['host']}, which has ended since")

    try:
        return join(address, known["port"], known["token"], hello, left, waiting)
    except ChannelError as error:
        todo = f". To do: {remedy(error)}" if isinstance(error, UnreachableError) else ""
        raise UserError(
            f"{me} reached {address}, and not its port {known['port']}: {error}; every TCP port must be open between "
            f"the machines of a run, not one alone{todo}"
        ) from error


def _choose_interface(peers: Sequence[Peer], channels: Mapping[int, Channel]) -> None:
    """gloo and NCCL use the interface by which the nodes reach each other, unless the user names another.

    gloo otherwise looks its own host name up, which on Debian is 127.0.1.1, and waits there for the other node.
    """
    if len({peer.node for peer in peers}) == 1:
        return
    own = next((channel.own for channel in channels.values() if not is_loopback(channel.own)), "")
    if interface := own_addresses().get(own):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without `=`, eth1 means eth10 too
