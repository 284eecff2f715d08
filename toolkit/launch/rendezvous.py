"""Every rank finds the others before there is a process group, through torch's store, which every run opens.

Each rank writes its hello into the store. Rank 0, the coordinator, compares them and writes the verdict: who takes
part, or why they cannot start together. The keys carry a number of that coordinator alone: what an earlier attempt left
in a launcher's store (`--max_restarts`) is not taken for this one's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, printable
from toolkit.launch import network
from toolkit.launch.environment import FAILURE_DETECTOR, Place
from toolkit.launch.nodes import doctor_command, name_machine, name_ranks, requested_nodes, wrong_first_machine
from toolkit.launch.restarts import attempt, launcher_serves_store, max_restarts
from toolkit.utils import versions
from toolkit.utils.log import logger
from toolkit.utils.timeouts import call_with_timeout

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store

_POLL_SECONDS, _MENTION_SECONDS, _CONNECT_SECONDS = 0.1, 5.0, 5.0
# The verdict comes so much later at most: rank 0 may have started later.
_VERDICT_SECONDS = 15.0
# Rank 0 stays so long for ranks that have still to read a fault; where the fault is its own, until they come.
_FAULT_SECONDS, _EARLY_FAULT_SECONDS = 3.0, 20.0


@dataclass(frozen=True)
class Peer(Place):
    """A process of the run, by the hello that it writes into the store."""

    host: str
    node: str
    """See `network.node_id`."""
    pid: int
    number: str
    """No other process's."""
    address: str | None = None
    """By which it reaches rank 0."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    failure: str = ""
    """Why it cannot take part."""
    failure_detector: str = "on"
    attempt: int = 0
    restarts_left: int = 0


class RendezvousError(UserError):
    """The ranks cannot start together."""

    def __init__(self, fault: str, missing: Sequence[int] = (), why: network.UnreachableError | None = None) -> None:
        super().__init__(printable(fault, 10_000))  # whoever reaches the store can write there
        self.missing, self.unreachable = list(missing), why


class Rendezvous:
    """How a rank joins the others; once it has, it knows all `peers`, in the order of ranks."""

    store: PrefixStore
    """Its keys are those of this rendezvous alone."""

    def __init__(self, me: Peer, seconds: float) -> None:
        """`seconds`: how long the ranks wait for each other."""
        self.me, self.seconds, self.peers = me, seconds, list[Peer]()
        self.address, self.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._who, self._deadline = f"rank {me.rank} on {me.host}", time.monotonic() + seconds
        self._serves = me.rank == 0 and not launcher_serves_store()
        self._mentioned = me.local_rank > 0
        self._exchanges = 0

    def exchange(self, value: Any, seconds: float) -> list[Any]:
        """An all-gather of JSON values, in the order of ranks; each rank calls it equally often.

        Raises RendezvousError, naming the ranks that did not answer within `seconds`.
        """
        self._exchanges += 1
        keys = [f"exchange {self._exchanges}/{rank}" for rank in range(self.me.world_size)]
        self.store.set(keys[self.me.rank], json.dumps(value))
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise RendezvousError(f"no answer from {name_ranks(missing)} in {seconds:.0f} s", missing) from error
        return [read(self.store, key) for key in keys]

    def join(self) -> None:
        """Raises RendezvousError, within `seconds` and a little more."""
        while True:
            try:
                return call_with_timeout(max(0.0, self._deadline - time.monotonic()) + 2 * _VERDICT_SECONDS, self._join)
            except TimeoutError as error:
                fault = f"{self._who} got no answer at {self.address}:{self.port}: another program's port? Another one:"
                raise RendezvousError(f"{fault} --main_process_port", [0]) from error
            except (LookupError, TypeError, ValueError) as error:
                fault = f"{self._who} cannot read what another rank wrote: another version of this toolkit there?"
                raise RendezvousError(fault) from error
            except RuntimeError as error:  # the process that serves the store has ended
                if self._serves or not max_restarts() or time.monotonic() > self._deadline:
                    fault = f"{self._who} had reached rank 0 at {self.address}:{self.port}, which has ended since"
                    raise RendezvousError(fault, [0]) from error
                time.sleep(0.5)

    def _join(self) -> None:
        from torch.distributed import PrefixStore

        self._server = self._open_store()  # as long as this process lives, where it serves it
        common = PrefixStore("toolkit/rendezvous", self._server)
        self._coordinate(common) if self.me.rank == 0 else self._follow(common)

    def _mention(self, line: str) -> None:
        if not self._mentioned and self._deadline - time.monotonic() < self.seconds - _MENTION_SECONDS:
            self._mentioned = True
            logger.info(printable(line))

    def _open_store(self) -> Store:
        """The store that torch's own rendezvous will use: the stores of one process share a server."""
        from torch.distributed import TCPStore

        timeout, address = timedelta(seconds=max(10.0, self._deadline - time.monotonic())), self.address
        if not self._serves:
            self._await_server()
            return TCPStore(address, self.port, None, False, timeout)
        try:
            listener = network.listen(self.port, network.address_to_bind(address, self.me.is_local))
            return network.serve_store(address, listener, timeout)
        except (RuntimeError, OSError) as error:
            if not network.is_this_machine(address):
                raise RendezvousError(f"{self._who} reached nobody at {wrong_first_machine(address)}") from error
            holder = network.process_listening_on(self.port) or ("PID", f"a process of another user ({error})")
            raise RendezvousError(
                f"port {self.port} of {self.me.host} is taken by {holder[1]}: `kill {holder[0]}` if it is left "
                "over, or choose another port: --main_process_port (accelerate, or behind the script, on every "
                "machine), --master_port (deepspeed, torchrun), MASTER_PORT (mpirun, srun)"
            ) from error

    def _await_server(self) -> None:
        """Until somebody listens there: torch would try for as long, and warn on every failure."""
        while True:
            remaining = self._deadline - time.monotonic()
            try:
                return network.connect(self.address, self.port, max(1.0, min(_CONNECT_SECONDS, remaining))).close()
            except network.UnreachableError as error:
                self._mention(f"{self._who}: rank 0 is not there yet: {error}")
                if remaining < 0:
                    hint = ""
                    if network.is_this_machine(self.address) and not self.me.is_local:
                        how = nodes.how if (nodes := requested_nodes()) else "RANK"
                        hint = f". {self.address} is an address of this very machine ({how}): is it the first one?"
                    fault = f"{self._who} found no rank 0 within {self.seconds:.0f} s: {error}. To do: {error.remedy}"
                    doctor = doctor_command(self.address, network.source_address_for(self.address))
                    raise RendezvousError(f"{fault}{hint}. {doctor}", [0], error) from error
            time.sleep(_POLL_SECONDS)

    def _coordinate(self, common: Store) -> None:
        from torch.distributed import PrefixStore

        first, peers, missing = self._claim(common), [self.me], list(range(1, self.me.world_size))
        self.store = PrefixStore(first.number, common)
        fault = self.me.failure if first == self.me else _conflict([first, self.me])
        while missing and not fault:
            lines = self.store.get("hellos").decode().splitlines() if self.store.check(["hellos"]) else []
            if len(lines) >= len(peers):
                peers.append(Peer(**json.loads(lines[len(peers) - 1])))
                missing = [rank for rank in missing if rank != peers[-1].rank]
                fault = _conflict(peers) or peers[-1].failure
            elif self.store.check(["verdict"]):  # by a second rank 0
                raise RendezvousError(read(self.store, "verdict")["fault"])
            elif time.monotonic() > self._deadline:
                fault = self._name_missing(missing, peers)
            else:
                self._mention(f"waiting for {name_ranks(missing)}: start the same there")
                time.sleep(_POLL_SECONDS)
        self.peers = sorted(peers, key=lambda peer: peer.rank)
        fault = fault or _difference(self.peers)
        verdict = json.dumps({"fault": fault, "peers": [asdict(peer) for peer in self.peers]})
        if not fault:
            self.store.set("verdict", verdict)
            return
        readers = self.me.world_size if time.monotonic() < self._deadline else len(peers)
        last = self._deadline if self.me.failure else time.monotonic() + _FAULT_SECONDS
        with contextlib.suppress(RuntimeError):  # a second rank 0, which serves the store, has ended
            self.store.set("verdict", verdict)
            while self.store.add("readers", 0) < readers - 1 and time.monotonic() < last:
                time.sleep(_POLL_SECONDS)
        raise RendezvousError(fault, missing)

    def _claim(self, common: Store) -> Peer:
        """The coordinator: this process, or a second rank 0 that was here before it. In a launcher's store what is
        there is left of an earlier attempt."""
        hello = json.dumps(asdict(self.me))
        if self._serves:
            return Peer(**json.loads(common.compare_set("coordinator", "", hello)))
        common.set("coordinator", hello)
        return self.me

    def _follow(self, common: Store) -> None:
        from torch.distributed import PrefixStore

        coordinator = ""
        while time.monotonic() < self._deadline + _VERDICT_SECONDS:
            if common.check(["coordinator"]) and (first := Peer(**read(common, "coordinator"))).number != coordinator:
                coordinator, self.store = first.number, PrefixStore(first.number, common)
                hello = f"{json.dumps(asdict(self.me))}\n"
                self.store.append("hellos", hello)  # type: ignore[attr-defined]  # torch's stubs lack it
                if fault := _conflict([first, self.me]):
                    raise RendezvousError(fault)
            if coordinator and self.store.check(["verdict"]):
                verdict = read(self.store, "verdict")
                if verdict["fault"]:
                    with contextlib.suppress(RuntimeError):  # rank 0 has ended meanwhile
                        self.store.add("readers", 1)
                    raise RendezvousError(verdict["fault"])
                peers = [Peer(**hello) for hello in verdict["peers"]]
                if self.me in peers:  # not an earlier attempt's
                    self.peers = peers
                    return
            time.sleep(_POLL_SECONDS)
        fault = (
            f"{self._who} reached {self.address}:{self.port} but no verdict of rank 0: it did not start, or has ended"
        )
        raise RendezvousError(fault, [0])

    def _name_missing(self, missing: Sequence[int], peers: Sequence[Peer]) -> str:
        hosts: dict[str, list[int]] = {}
        for peer in sorted(peers, key=lambda peer: peer.rank):
            hosts.setdefault(peer.host, []).append(peer.rank)
        came, nodes = "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items()), requested_nodes()
        fault = (
            f"{name_ranks(missing)} of {self.me.world_size} did not come within {self.seconds:.0f} s to {self.address}:"
            f"{self.port} (those that came: {came})"
        )
        if nodes and not network.is_this_machine(self.address):
            return f"{fault}: {wrong_first_machine(self.address)}"
        doctor = doctor_command(*(nodes.addresses if nodes else (self.address,)))
        return (
            f"{fault}: start them too, with the same command and number of processes. If they were started, they say "
            "what stopped them: a firewall (`sudo ufw allow from THAT_MACHINE` here), another address, or an earlier "
            f"error. Longer: --rendezvous_timeout SECONDS. {doctor}"
        )


def read(store: Store, key: str) -> Any:
    """A JSON value; waits for it."""
    return json.loads(store.get(key))


def _conflict(peers: Sequence[Peer]) -> str:
    """Of the last one with one that came before it."""
    first, last = peers[0], peers[-1]
    if first.world_size != last.world_size:
        return (
            f"rank 0 on {first.host} counts {first.world_size} processes and rank {last.rank} on {last.host} "
            f"{last.world_size}: start all of them with the same number, --num_processes "
            f"{min(first.world_size, last.world_size)} perhaps (without it, it is the devices that a machine sees)"
        )
    if twin := next((peer for peer in peers[:-1] if peer.rank == last.rank), None):
        return (
            f"two processes say that they are rank {last.rank}, on {twin.host} and {last.host}: give each its own RANK "
            "(and NODE_RANK or --machine_rank to each machine)"
        )
    return ""


def _difference(peers: Sequence[Peer]) -> str:
    """Other versions of the libraries, or of the code."""
    unclear = len({peer.host for peer in peers}) < len({peer.node for peer in peers})  # nodes of one name
    of_hosts = [(f"{peer.host} ({peer.node})" if unclear else peer.host, peer.versions) for peer in peers]
    if not (differences := versions.describe_differences(of_hosts)):
        return ""
    return f"the machines do not run the same: {differences}. {versions.remedy(of_hosts)}; nothing was read or trained"


# --- the ranks of a run

# The process's own, as torch has one default group of a process: a second accelerator uses it.
current: Rendezvous | None = None


def find_ranks(place: Place, script: str, seconds: float, failure: str = "") -> Rendezvous | None:
    """Returns once all ranks are there and alike; None for a process that is alone.

    Raises RendezvousError, naming who is missing or what is not the same. `failure` is why this process cannot take
    part: all others raise it.
    """
    global current
    alone = place.world_size == 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if current is not None or alone:
        return current
    me = Peer(
        **asdict(place),
        host=socket.gethostname(),
        node=network.node_id(),
        pid=os.getpid(),
        number=secrets.token_hex(8),
        address=network.source_address_for(os.environ["MASTER_ADDR"]),
        versions=versions.comparable_versions(script),
        failure=failure,
        failure_detector=os.environ.get(FAILURE_DETECTOR, "on"),
        attempt=attempt(),
        restarts_left=max_restarts() - attempt(),
    )
    rendezvous = Rendezvous(me, seconds)
    rendezvous.join()
    current = rendezvous
    if launcher_serves_store():  # the launchers of several machines may count differently, and torch's keys carry it
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(current.peers[0].attempt)
    network.choose_interface(_own_address(current))
    return current


def announce_early_failure(place: Place, message: str) -> None:
    """To the other nodes, from a process that fails before the rendezvous: a setting, a file. It takes seconds."""
    if not place.is_local and current is None and os.environ.get("MASTER_ADDR"):
        failure = f"rank {place.rank} on {socket.gethostname()} failed: {message}"
        with contextlib.suppress(Exception):  # it has been reported here
            find_ranks(place, "", _EARLY_FAULT_SECONDS, failure)


def list_machines() -> list[str]:
    """`hostA (ranks 0, 1)` of each machine, where there are several."""
    peers = current.peers if current else []
    nodes = nodes_of(peers).values()
    return [name_machine(printable(peers[ranks[0]].host), ranks) for ranks in nodes] if len(nodes) > 1 else []


def nodes_of(peers: Sequence[Peer]) -> dict[str, list[int]]:
    """Node -> its ranks."""
    nodes: dict[str, list[int]] = {}
    for peer in peers:
        nodes.setdefault(peer.node, []).append(peer.rank)
    return nodes


def _own_address(rendezvous: Rendezvous) -> str:
    """This node's, by which the nodes reach each other; the loopback's where there is one node."""
    others = [peer.address for peer in rendezvous.peers if peer.node != rendezvous.me.node]
    if not others:
        return network.LOOPBACK
    routes = (network.source_address_for(address) for address in (rendezvous.address, *others) if address)
    return next((address for address in routes if address and not network.is_loopback(address)), "")
