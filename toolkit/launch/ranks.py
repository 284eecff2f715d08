"""The ranks of a run: who they are, what they compare, and how they meet and watch each other under
a launcher that is not ours."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.launch import environment, network
from toolkit.launch.environment import Place, parse_int, timeout_seconds
from toolkit.launch.failure import exit_state, exit_with
from toolkit.launch.heartbeat import Board
from toolkit.launch.machines import name_machine
from toolkit.launch.meet import (
    exchange,
    facts_to_compare,
    meet,
    open_store,
    refuse_differences,
)

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore


@dataclass
class World:
    """The processes of this run."""

    place: Place
    store: Store
    """In which they form their group."""
    machines: list[tuple[str, list[int]]] = field(default_factory=list)
    """(host, its ranks), in order."""
    gathers: int = 0

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Gathers a value of each rank, without a timeout: a collective would time out while one
        machine works longer than others."""
        from torch.distributed import PrefixStore

        self.gathers += 1
        store = PrefixStore(f"gather {self.gathers}", self.store)
        return exchange(
            store, "rank", self.place.rank, self.place.world_size, value, purpose
        )


def join(place: Place, device: str) -> World:
    """Under our launcher the machines have met already; under others the ranks meet here."""
    if exit_state.world is None:
        exit_state.world = _connect(place, device)
    return exit_state.world


def _connect(place: Place, device: str) -> World:
    from torch.distributed import HashStore, PrefixStore

    if place.world_size == 1:
        return World(place, HashStore())
    address = os.environ["MASTER_ADDR"]
    port = parse_int("MASTER_PORT", os.environ["MASTER_PORT"])
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not launcher_serves
    seconds = timeout_seconds("rendezvous_timeout")
    server = open_store(address, port, serves, place.is_local, seconds)
    os.environ["MASTER_ADDR"] = server.host
    # keys of its own for each attempt: those of the last hold addresses of processes that are gone
    store = PrefixStore(f"toolkit/attempt {environment.attempt()}", server)
    world = World(place, store, environment.launch_request().get("machines", []))
    if not world.machines:
        _meet(world, server, device)
    return world


def _meet(world: World, server: TCPStore, device: str) -> None:
    from torch.distributed import PrefixStore

    place, seconds = world.place, timeout_seconds("rendezvous_timeout")
    rank, size = place.rank, place.world_size
    facts = facts_to_compare(sys.argv[0], device, size)
    remedy = (
        "start them too, with the same number of processes; or to run one process, unset the "
        "variables that announce others: RANK, WORLD_SIZE and LOCAL_RANK (in a shell of Slurm: "
        "SLURM_STEP_NUM_TASKS; of Open MPI: OMPI_COMM_WORLD_SIZE)"
    )
    members = meet(world.store, server.host, "rank", rank, size, facts, remedy, seconds)
    ranks_of: dict[str, tuple[str, list[int]]] = {}
    for number, (host, machine) in enumerate(members):
        ranks_of.setdefault(machine, (host, []))[1].append(number)
    world.machines = list(ranks_of.values())
    if len(world.machines) > 1:
        # a connection of its own: the group's may wait for a key
        connection = network.connect_store(server.host, server.port, seconds)
        prefix = f"toolkit/heartbeats of attempt {environment.attempt()}"
        _watch(PrefixStore(prefix, connection), world.machines, rank)


def _watch(store: Store, machines: list[tuple[str, list[int]]], rank: int) -> None:
    """The first rank of each machine watches the other machines."""
    firsts = [ranks[0] for _, ranks in machines]
    if rank not in firsts:
        return
    names = [name_machine(*machine) for machine in machines]
    me = firsts.index(rank)
    board = exit_state.board = Board(store, names, me, timeout_seconds("peer_timeout"))
    atexit.register(board.finish)
    threading.Thread(target=_exit_on_failure, args=(board,), daemon=True).start()


def _exit_on_failure(board: Board) -> None:
    """Ends this process, whatever its main thread waits for."""
    while exit_state.board is board:  # otherwise the main thread is ending it
        failure = board.failure()
        if failure:
            exit_with(failure)
        time.sleep(0.5)


# --- for the rest of the package


def list_machines() -> list[str]:
    """`hostA (ranks 0, 1)` for each machine; empty if there is one."""
    world = exit_state.world
    if world is None or len(world.machines) < 2:
        return []
    return [name_machine(*machine) for machine in world.machines]


def require_equal(what: str, values: Mapping[str, Any]) -> None:
    """Waits for all ranks, without a timeout. Raises UserError on all of them if a value differs,
    with the values and their hosts. `what`: the values, or what others may still work on."""
    world = exit_state.world
    if world is None:
        return
    host = f"{socket.gethostname()} (rank {world.place.rank})"
    refuse_differences(what, world.gather((host, values), what))
