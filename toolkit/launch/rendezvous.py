"""The ranks find each other, before there is a process group, through torch's store, which every run opens anyway.

Each rank writes a hello to the store. Rank 0, the coordinator, compares them and writes the verdict: the list of peers,
or why they cannot start together. The keys carry a random id of the coordinator, so that what an earlier attempt
(`--max_restarts`) left in a launcher's store is not read.
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
from toolkit.launch.environment import FAILURE_DETECTOR, Place, attempt, launcher_serves_store, max_restarts
from toolkit.launch.nodes import doctor_command, name_machine, name_ranks, requested_nodes, wrong_first_machine
from toolkit.utils import versions
from toolkit.utils.log import logger
from toolkit.utils.timeouts import call_with_timeout

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store

_POLL_SECONDS, _LOG_SECONDS, _LOG_EXCHANGE_SECONDS, _CONNECT_SECONDS = 0.1, 5.0, 60.0, 5.0
# The other ranks wait this much longer for the verdict: rank 0 may have started later.
_VERDICT_SECONDS = 15.0
# Rank 0 waits this long for ranks that still have to read a fault; for a fault of rank 0 itself until they join.
_FAULT_SECONDS, _EARLY_FAULT_SECONDS = 3.0, 20.0


@dataclass(frozen=True)
class Peer(Place):
    """A process of the run: the hello that it writes to the store."""

    host: str
    node: str
    """See `network.node_id`."""
    pid: int
    number: str
    """Random, unique to the process."""
    address: str | None = None
    """Its source address for connections to rank 0."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    failure: str = ""
    """Why it cannot join."""
    failure_detector: str = "on"
    attempt: int = 0
    restarts_left: int = 0


class RendezvousError(UserError):
    """The ranks cannot start together."""

    def __init__(self, fault: str, missing: Sequence[int] = (), why: network.UnreachableError | None = None) -> None:
        super().__init__(printable(fault, 10_000))  # any program can write to the store
        self.missing, self.unreachable = list(missing), why


class Rendezvous:
    """One rank's part of the rendezvous. After `join`, `peers` lists all ranks in order."""

    store: PrefixStore
    """The store, with a prefix of this rendezvous."""

    def __init__(self, me: Peer, seconds: float) -> None:
        """The ranks wait `seconds` for each other."""
        self.me, self.seconds, self.peers = me, seconds, list[Peer]()
        self.address, self.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._who, self._deadline = f"rank {me.rank} on {me.host}", time.monotonic() + seconds
        self._serves = me.rank == 0 and not launcher_serves_store()
        self._logged = me.local_rank > 0
        self._exchanges = 0

    def exchange(self, value: Any, seconds: float, what: str = "") -> list[Any]:
        """An all-gather of JSON values, ordered by rank; all ranks call it equally often. Rank 0 logs every minute for
        which ranks it waits, and for `what`.

        Raises RendezvousError, naming the ranks that did not answer within `seconds`.
        """
        self._exchanges += 1
        keys = [f"exchange {self._exchanges}/{rank}" for rank in range(self.me.world_size)]
        self.store.set(keys[self.me.rank], json.dumps(value))
        started = logged = time.monotonic()
        while missing := [rank for rank, key in enumerate(keys) if not self.store.check([key])]:
            now = time.monotonic()
            if now - started > seconds:
                raise RendezvousError(f"no answer from {name_ranks(missing)} in {seconds:.0f} s", missing)
            if self.me.rank == 0 and now - logged > _LOG_EXCHANGE_SECONDS:
                logged = now
                logger.info(f"waiting for {name_ranks(missing)}, for {now - started:.0f} s: {what}")
            time.sleep(min(0.5, 0.01 + (now - started) / 10))
        return [read(self.store, key) for key in keys]

    def join(self) -> None:
        """Raises RendezvousError, within `seconds` and a little more."""
        rank_0 = f"rank 0 at {self.address}:{self.port}"
        while True:
            try:
                return call_with_timeout(max(0.0, self._deadline - time.monotonic()) + _VERDICT_SECONDS, self._join)
            except TimeoutError as error:
                fault = f"{self._who} got no answer from {rank_0}: it is not running, or another program uses that port"
                raise RendezvousError(f"{fault} (pass another --main_process_port)", [0]) from error
            except (LookupError, TypeError, ValueError) as error:
                fault = f"{self._who} cannot parse another rank's hello: does it run another version of the toolkit?"
                raise RendezvousError(fault) from error
            except RuntimeError as error:  # the process that serves the store has exited
                if self._serves or not max_restarts() or time.monotonic() > self._deadline:
                    raise RendezvousError(f"{self._who} was connected to {rank_0}, which has exited", [0]) from error
                time.sleep(0.5)

    def _join(self) -> None:
        from torch.distributed import PrefixStore

        self._server = self._open_store()  # kept alive: this process may serve it
        common = PrefixStore("toolkit/rendezvous", self._server)
        hello, coordinator = json.dumps(asdict(self.me)), ""
        if self._serves:  # a second rank 0 may have come first
            common.compare_set("coordinator", "", hello)
        elif self.me.rank == 0:  # in a launcher's store another coordinator is one of an earlier attempt
            common.set("coordinator", hello)
        while True:
            if common.check(["coordinator"]) and (first := Peer(**read(common, "coordinator"))).number != coordinator:
                coordinator, self.store = first.number, PrefixStore(first.number, common)
                if coordinator != self.me.number:
                    self.store.append("hellos", f"{hello}\n")  # type: ignore[attr-defined]  # torch's stubs lack it
                    self._raise_any(_conflict([first, self.me]))
            if coordinator == self.me.number:
                self._judge()
            if coordinator and self.store.check(["verdict"]):
                verdict = read(self.store, "verdict")
                self._raise_any(verdict["fault"])
                peers = [Peer(**peer) for peer in verdict["peers"]]
                if self.me in peers:  # not an earlier attempt's
                    self.peers = peers
                    return
            time.sleep(_POLL_SECONDS)

    def _log_once(self, line: str) -> None:
        """Logs the first line that comes after some seconds of waiting, on local rank 0."""
        if not self._logged and self._deadline - time.monotonic() < self.seconds - _LOG_SECONDS:
            self._logged = True
            logger.info(printable(line))

    def _open_store(self) -> Store:
        """Opens the store that torch's own rendezvous will use: the stores of one process share a server."""
        from torch.distributed import TCPStore

        timeout, address = timedelta(seconds=max(10.0, self._deadline - time.monotonic())), self.address
        if not self._serves:
            self._wait_for_server()
            return TCPStore(address, self.port, None, False, timeout)
        try:
            listener = network.listen(self.port, network.address_to_bind(address, self.me.is_local))
            self._wait_for_server()  # by the address of the others, which torch would try with pages of warnings
            return network.serve_store(address, listener, timeout)
        except (RuntimeError, OSError, RendezvousError) as error:
            if not network.is_this_machine(address):
                raise RendezvousError(f"{self._who} cannot serve the store: {wrong_first_machine(address)}") from error
            holder = network.process_listening_on(self.port) or ("PID", f"a process of another user ({error})")
            raise RendezvousError(
                f"port {self.port} of {self.me.host} is taken by {holder[1]}: `kill {holder[0]}` if it is of an old "
                "run, or choose another port: --main_process_port (accelerate, or after the script, on every "
                "machine), --master_port (deepspeed, torchrun), MASTER_PORT (mpirun, srun)"
            ) from error

    def _wait_for_server(self) -> None:
        """Waits until rank 0 listens. torch would wait too, with a warning for every failed connection."""
        hint = ""
        if not self.me.is_local and network.is_this_machine(self.address):
            source = nodes.rank_source if (nodes := requested_nodes()) else "RANK"
            hint = f". {self.address} is an address of this machine ({source}): is it the first one?"
        while True:
            remaining = self._deadline - time.monotonic()
            try:
                return network.connect(self.address, self.port, max(1.0, min(_CONNECT_SECONDS, remaining))).close()
            except network.UnreachableError as error:
                self._log_once(f"{self._who}: no connection to rank 0 yet: {error}{hint}")
                if remaining < 0:
                    fault = f"{self._who} could not reach rank 0 within {self.seconds:.0f} s: {error}"
                    doctor = doctor_command(self.address, network.source_address_for(self.address))
                    raise RendezvousError(f"{fault}. To do: {error.remedy}{hint}. {doctor}", [0], error) from error
            time.sleep(_POLL_SECONDS)

    def _judge(self) -> None:
        """Compares the hellos that have come; writes the verdict if it is clear."""
        lines = self.store.get("hellos").decode().splitlines() if self.store.check(["hellos"]) else []
        peers = [self.me, *(Peer(**json.loads(line)) for line in lines)]
        by_rank = {peer.rank: peer for peer in peers}
        self.peers = [by_rank[rank] for rank in sorted(by_rank)]
        faults = (_conflict(peers[:count]) or peers[count - 1].failure for count in range(1, len(peers) + 1))
        self._raise_any(next(filter(None, faults), ""))
        missing = [rank for rank in range(self.me.world_size) if rank not in by_rank]
        if missing and time.monotonic() < self._deadline:
            ours = requested_nodes() is not None and not self.me.is_local
            first = f", with --main_process_ip {self.address} there too" * ours
            self._log_once(f"waiting for {name_ranks(missing)}: start the same command there{first}")
            return
        self._raise_any(self._name_missing(missing) if missing else _difference(self.peers), missing)
        self.store.set("verdict", json.dumps({"fault": "", "peers": [asdict(peer) for peer in self.peers]}))

    def _raise_any(self, fault: str, missing: Sequence[int] = ()) -> None:
        """Raises RendezvousError if there is a fault; on rank 0, which may serve the store, when all have read it."""
        if not fault:
            return
        readers = self.me.world_size if time.monotonic() < self._deadline else len(self.peers)
        last = self._deadline if self.me.failure else time.monotonic() + _FAULT_SECONDS
        with contextlib.suppress(RuntimeError):  # another rank 0, which serves the store, has exited
            if self.me.rank:
                self.store.add("readers", 1)
            else:
                self.store.set("verdict", json.dumps({"fault": fault}))
            while self.me.rank == 0 and self.store.add("readers", 0) < readers - 1 and time.monotonic() < last:
                time.sleep(_POLL_SECONDS)
        raise RendezvousError(fault, missing)

    def _name_missing(self, missing: Sequence[int]) -> str:
        hosts = {peer.rank: peer.host for peer in self.peers}
        connected = [f"{name_ranks(ranks)} on {hosts[ranks[0]]}" for ranks in nodes_of(self.peers).values()]
        nodes = requested_nodes()
        fault = (
            f"{name_ranks(missing)} of {self.me.world_size} did not connect to {self.address}:{self.port} within "
            f"{self.seconds:.0f} s (connected: {'; '.join(connected)})"
        )
        if nodes and not network.is_this_machine(self.address):
            return f"{fault}: {wrong_first_machine(self.address)}"
        doctor = doctor_command(*(nodes.addresses if nodes else (self.address,)))
        return (
            f"{fault}: start them too, with the same command and number of processes. If they were started, see their "
            "output: a firewall (`sudo ufw allow from THAT_MACHINE` here), an address other than this one (a machine "
            "that names its own is machine 0, too), or an earlier error. "
            f"--rendezvous_timeout SECONDS waits longer. {doctor}"
        )


def read(store: Store, key: str) -> Any:
    """Reads a JSON value; waits until the key is set."""
    return json.loads(store.get(key))


def _conflict(peers: Sequence[Peer]) -> str:
    """Why the last peer cannot join those before it; empty if it can."""
    first, last = peers[0], peers[-1]
    if first.world_size != last.world_size:
        return (
            f"the world size is {first.world_size} for rank 0 on {first.host} and {last.world_size} for rank "
            f"{last.rank} on {last.host}: start all with the same --num_processes, perhaps "
            f"{min(first.world_size, last.world_size)} (by default it follows the devices that a machine sees)"
        )
    twins = (peer for peer in peers[:-1] if peer.rank == last.rank)
    # one of an earlier attempt has ended meanwhile
    if twin := next((peer for peer in twins if peer.node != last.node or peer.attempt >= last.attempt), None):
        return (
            f"two processes have rank {last.rank}, on {twin.host} and {last.host}: give each its own RANK "
            "(and NODE_RANK or --machine_rank to each machine)"
        )
    return ""


def _difference(peers: Sequence[Peer]) -> str:
    """Which versions of the libraries or the code differ; empty for none."""
    unclear = len({peer.host for peer in peers}) < len({peer.node for peer in peers})  # nodes share a host name
    of_hosts = [(f"{peer.host} ({peer.node})" if unclear else peer.host, peer.versions) for peer in peers]
    if not (differences := versions.describe_differences(of_hosts)):
        return ""
    remedy = versions.remedy(of_hosts)
    return f"the machines run different versions: {differences}. {remedy}; nothing was read or trained"


# --- the ranks of a run

# A global, as torch's default group is: a second accelerator uses it.
current: Rendezvous | None = None


def join_ranks(place: Place, script: str, seconds: float, failure: str = "", device: str = "cpu") -> Rendezvous | None:
    """Joins the rendezvous; None for a single process.

    Raises RendezvousError, naming the missing ranks or what differs between them. `failure` is why this process cannot
    join: all others raise it. `device`: its type; gloo on one rank and NCCL on another would wait for each other.
    """
    global current
    is_single = place.world_size == 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if current is not None or is_single:
        return current
    me = Peer(
        **asdict(place),
        host=socket.gethostname(),
        node=network.node_id(),
        pid=os.getpid(),
        number=secrets.token_hex(8),
        address=network.source_address_for(os.environ["MASTER_ADDR"]),
        versions={"device": device, **versions.comparable_versions(script)},
        failure=failure,
        failure_detector=os.environ.get(FAILURE_DETECTOR, "on"),
        attempt=attempt(),
        restarts_left=max_restarts() - attempt(),
    )
    rendezvous = Rendezvous(me, seconds)
    rendezvous.join()
    current = rendezvous
    if launcher_serves_store():  # launchers of several nodes may disagree on the count
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(current.peers[0].attempt)
        if current.peers[0].attempt:  # torch would read the addresses of the last attempt from it (pytorch#167288)
            port = network.free_port() if me.rank == 0 else 0
            os.environ["MASTER_PORT"] = str(current.exchange(port, seconds)[0])
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    network.choose_interface(_node_address(current), device)
    return current


def announce_early_failure(place: Place, message: str) -> None:
    """Reports a failure before the rendezvous (a setting, a file) to the other nodes. It takes seconds."""
    if not place.is_local and current is None and os.environ.get("MASTER_ADDR"):
        failure = f"rank {place.rank} on {socket.gethostname()} failed: {message}"
        with contextlib.suppress(Exception):  # the failure has been reported here
            join_ranks(place, "", _EARLY_FAULT_SECONDS, failure)


def list_machines() -> list[str]:
    """`hostA (ranks 0, 1)` for each machine; empty if there is one."""
    peers = current.peers if current else []
    nodes = nodes_of(peers).values()
    return [name_machine(printable(peers[ranks[0]].host), ranks) for ranks in nodes] if len(nodes) > 1 else []


def nodes_of(peers: Sequence[Peer]) -> dict[str, list[int]]:
    """Node -> its ranks."""
    nodes: dict[str, list[int]] = {}
    for peer in peers:
        nodes.setdefault(peer.node, []).append(peer.rank)
    return nodes


def _node_address(rendezvous: Rendezvous) -> str:
    """This node's address on the way to the other nodes; the loopback address if there is one node."""
    others = [peer.address for peer in rendezvous.peers if peer.node != rendezvous.me.node]
    if not others:
        return network.LOOPBACK
    routes = (network.source_address_for(address) for address in (rendezvous.address, *others) if address)
    return next((address for address in routes if address and not network.is_loopback(address)), "")
