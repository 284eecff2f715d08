"""The ranks of a run: who they are, and how they meet and watch each other under a launcher that
is not ours."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.launch import environment, network
from toolkit.launch.environment import Place, timeout_seconds
from toolkit.launch.exit_state import exit_state
from toolkit.launch.failure import exit_with
from toolkit.launch.heartbeat import Board, Failure
from toolkit.launch.machines import name_machine
from toolkit.launch.meet import Hello, facts_to_compare, meet

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass
class World:
    """The processes of this run."""

    store: Store
    """In which they form their group."""
    machines: list[tuple[str, list[int]]] = field(default_factory=list)
    """(host, its ranks), in order."""
    server: Store | None = None
    """Kept alive: this process may serve it."""
    barriers: int = 0
    """How often `wait_for_all` was called."""


def join(place: Place, device: str) -> World:
    """Under our launcher the machines have met already; under others the ranks meet here."""
    from torch.distributed import HashStore

    if exit_state.world is not None:
        return exit_state.world
    machines = environment.launch_request().get("machines")
    if place.world_size == 1:
        world = World(HashStore())
    elif machines:
        world = World(_connect("ranks"), machines)
    else:
        world = _meet(place, device)
    exit_state.world = world
    return world


def _connect(prefix: str) -> Store:
    """An own connection to the store of this run, in which each attempt has its own keys: those of
    the last one hold addresses of processes that are gone."""
    from torch.distributed import PrefixStore

    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = network.connect_store(address, port, timeout_seconds("rendezvous_timeout"))
    return PrefixStore(f"toolkit/{prefix} of attempt {environment.attempt()}", store)


def list_machines() -> list[str]:
    """`hostA (ranks 0, 1)` for each machine; empty if there is one."""
    world = exit_state.world
    if world is None or len(world.machines) < 2:
        return []
    return [name_machine(*machine) for machine in world.machines]


def _meet(place: Place, device: str) -> World:
    address = os.environ["MASTER_ADDR"]
    server = None
    if not environment.launcher_serves_store():
        if network.is_this_machine(address):
            address = os.environ["MASTER_ADDR"] = network.address_to_serve(address, place.is_local)
        if place.rank == 0:
            server = network.serve_store(address, int(os.environ["MASTER_PORT"]))
    facts = facts_to_compare(sys.argv[0], device, place.world_size)
    names = [f"rank {rank}" for rank in range(place.world_size)]
    remedy = "start them too, with the same number of processes"
    seconds = timeout_seconds("rendezvous_timeout")
    hellos = meet(_connect("meeting"), address, place.rank, names, facts, remedy, seconds)
    nodes: dict[str, list[Hello]] = {}
    for hello in hellos:
        nodes.setdefault(hello.node, []).append(hello)
    machines = [(node[0].host, [hello.number for hello in node]) for node in nodes.values()]
    if len(machines) > 1:
        _watch(_connect("heartbeats"), machines, place.rank)
    return World(_connect("ranks"), machines, server)


def _watch(store: Store, machines: list[tuple[str, list[int]]], rank: int) -> None:
    """The first rank of each machine watches the other machines, and its own launcher."""
    firsts = [ranks[0] for _, ranks in machines]
    if rank not in firsts:
        return
    names = [name_machine(*machine) for machine in machines]
    me = firsts.index(rank)
    board = exit_state.board = Board(store, names, me, timeout_seconds("peer_timeout"))
    atexit.register(board.finish)
    threading.Thread(target=_exit_on_failure, args=(board, names[me]), daemon=True).start()


def _exit_on_failure(board: Board, name: str) -> None:
    """Ends this process, whatever its main thread waits for."""
    launcher = os.getppid()
    while exit_state.board is board:  # otherwise the main thread is ending it
        failure = board.failure()
        if failure is None and os.getppid() != launcher:
            failure = Failure(f"error: the launcher on {name} was killed", permanent=True)
        if failure:
            exit_with(failure)
        time.sleep(0.5)
