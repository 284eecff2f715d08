"""The ranks of a run: who they are, and how they meet and watch each other under a launcher that
is not ours."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, printable
from toolkit.launch import environment, network
from toolkit.launch.environment import Place, timeout_seconds
from toolkit.launch.exit_state import exit_state
from toolkit.launch.failure import exit_with
from toolkit.launch.heartbeat import Board, Failure
from toolkit.launch.machines import name_machine, wrong_first_machine
from toolkit.launch.meet import Hello, meet, open_store
from toolkit.utils.versions import comparable_versions

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass
class World:
    """The processes of this run."""

    machines: list[tuple[str, list[int]]]
    """(host, its ranks), in order."""
    stores: Sequence[Any] = ()
    """Kept alive: this process may serve one."""
    barriers: int = 0
    """How often `wait_for_all` was called."""


# A global, as torch's default process group is: a second accelerator uses it.
current: World | None = None


def join(place: Place, device: str) -> None:
    """Under our launcher the machines have met already; under others the ranks meet here."""
    global current
    if current is not None:
        return
    if place.world_size == 1:
        if {"RANK", "LOCAL_RANK"} <= os.environ.keys() and not environment.launcher_serves_store():
            current = _serve_alone()
        return
    hosts = environment.launch_request().get("hosts")
    if hosts:
        each = place.local_world_size
        ranks = [list(range(first, first + each)) for first in range(0, place.world_size, each)]
        current = World(list(zip(hosts, ranks, strict=True)))
    else:
        current = _meet(place, device)


def _serve_alone() -> World:
    """A process group of one process, in which torch would serve its store on all addresses."""
    server = network.serve_store(network.LOOPBACK, 0)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = network.LOOPBACK, str(server.port)
    return World([], [server])


def list_machines() -> list[str]:
    """`hostA (ranks 0, 1)` for each machine; empty if there is one."""
    if current is None or len(current.machines) < 2:
        return []
    return [name_machine(*machine) for machine in current.machines]


def _meet(place: Place, device: str) -> World:
    by_launcher, address = environment.launcher_serves_store(), os.environ["MASTER_ADDR"]
    serves = place.rank == 0 and not by_launcher
    if serves and not network.is_this_machine(address):
        raise UserError(wrong_first_machine(address))
    if not by_launcher and network.is_this_machine(address):
        address = os.environ["MASTER_ADDR"] = network.address_to_serve(address, place.is_local)
    seconds, port = timeout_seconds("rendezvous_timeout"), int(os.environ["MASTER_PORT"])
    who = f"rank {place.rank} on {socket.gethostname()}"
    server = open_store(address, port, serves, seconds, who)
    store = _prefixed(server, f"toolkit/attempt {environment.attempt()}")
    source = network.source_address_for(address) or ""
    facts = {**comparable_versions(sys.argv[0]), "device": device, "processes": place.world_size}
    remedies = {
        "missing": "start them too, with the same number of processes",
        "twin": "give each its own RANK (and NODE_RANK to each machine)",
    }
    names = [f"rank {rank}" for rank in range(place.world_size)]
    hellos = meet(store, Hello(place.rank, address=source, facts=facts), names, seconds, remedies)
    nodes: dict[str, list[Hello]] = {}
    for hello in hellos:
        nodes.setdefault(hello.node, []).append(hello)
    if len(nodes) == 1:
        source = network.LOOPBACK
    elif network.is_loopback(source):  # the first machine's name, on Debian
        last = hellos[-1].address
        source = network.source_address_for(last) or ""
    network.choose_interface(os.environ, source)
    machines = []
    for members in nodes.values():
        ranks = [hello.number for hello in members]
        machines.append((printable(members[0].host, 100), ranks))
    if len(machines) > 1:
        _watch(_prefixed(store, "heartbeats"), machines, place.rank)
    servers: list[Any] = [server]
    if by_launcher and environment.attempt():
        servers.append(_serve_again(store, place, address))
    return World(machines, servers)


def _prefixed(store: Store, prefix: str) -> Store:
    from torch.distributed import PrefixStore

    return PrefixStore(prefix, store)


def _serve_again(store: Store, place: Place, address: str) -> Store | None:
    """After a restart torch would read addresses of dead processes from the launcher's store
    (pytorch#167288): rank 0 serves another one."""
    server = None
    if place.rank == 0:
        server = network.serve_store(network.address_to_serve(address, place.is_local), 0)
        store.set("port", str(server.port))
    os.environ["MASTER_PORT"] = store.get("port").decode()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return server


def _watch(store: Store, machines: list[tuple[str, list[int]]], rank: int) -> None:
    """The first rank of each machine watches the other machines, and its own launcher."""
    firsts = [ranks[0] for _, ranks in machines]
    if rank not in firsts:
        return
    names, me = [name_machine(*machine) for machine in machines], firsts.index(rank)
    board = exit_state.board = Board(store, names, me, timeout_seconds("peer_timeout"))
    atexit.register(board.leave)
    threading.Thread(target=_exit_on_failure, args=(board, names[me]), daemon=True).start()


def _exit_on_failure(board: Board, name: str) -> None:
    """Ends this process, whatever its main thread waits for."""
    launcher = os.getppid()
    while exit_state.board is board:  # otherwise the main thread is ending it
        failure = board.failure()
        if failure is None and os.getppid() != launcher:
            failure = Failure(f"error: the launcher on {name} was killed", permanent=True)
        if failure:
            exit_with(board.publish(failure))
        time.sleep(0.5)
