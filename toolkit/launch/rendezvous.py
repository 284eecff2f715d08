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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, plain
from toolkit.launch import network
from toolkit.launch.environment import FAILURE_DETECTOR, Place
from toolkit.launch.nodes import doctor_command, name_machine, name_ranks, not_of_this_machine, requested_nodes
from toolkit.launch.restarts import attempt, launcher_keeps_store, most_restarts
from toolkit.utils import versions
from toolkit.utils.log import logger
from toolkit.utils.within import within

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store

Hello = dict[str, Any]
_POLL_SECONDS, _MENTION_SECONDS, _CONNECT_SECONDS = 0.1, 5.0, 5.0
# The verdict comes so much later at most: rank 0 may have started later.
_VERDICT_SECONDS = 15.0
# Rank 0 stays so long for ranks that have still to read a fault; where the fault is its own, until they come.
_FAULT_SECONDS, _EARLY_FAULT_SECONDS = 3.0, 20.0


class RendezvousError(UserError):
    """The ranks cannot start together."""

    def __init__(self, fault: str, missing: Sequence[int] = (), why: network.UnreachableError | None = None) -> None:
        super().__init__(plain(fault, 10_000))  # whoever reaches the store can write there
        self.missing, self.unreachable = list(missing), why


@dataclass(frozen=True)
class Peer:
    """A process of the run."""

    rank: int
    host: str
    node: str
    """See `network.node_id`."""
    local_rank: int
    pid: int


class Rendezvous:
    """How a rank joins the others; once it has, it knows the `hellos` of all, in the order of ranks."""

    store: PrefixStore
    """Its keys are those of this rendezvous alone."""

    def __init__(self, place: Place, hello: Hello, seconds: float) -> None:
        """`seconds`: how long the ranks wait for each other."""
        peer = Peer(place.rank, socket.gethostname(), network.node_id(), place.local_rank, os.getpid())
        self.place, self.rank, self.world_size, self.seconds = place, place.rank, place.world_size, seconds
        self.address, self.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.hello = {**hello, "rank": self.rank, "world_size": self.world_size, "host": peer.host,
                      "peer": asdict(peer), "id": secrets.token_hex(8), "attempt": attempt()}  # fmt: skip
        self.hellos: list[Hello] = []
        self.attempt = 0
        """Rank 0's (`--max_restarts`)."""
        self._me, self._deadline = f"rank {self.rank} on {peer.host}", time.monotonic() + seconds
        self._serves = self.rank == 0 and not launcher_keeps_store()
        self._mentioned = place.local_rank > 0
        self._exchanges = 0

    @property
    def peers(self) -> list[Peer]:
        return [Peer(**hello["peer"]) for hello in self.hellos]

    def exchange(self, value: Any, seconds: float) -> list[Any]:
        """An all-gather of JSON values, in the order of ranks; each rank calls it equally often.

        Raises RendezvousError, naming the ranks that did not answer within `seconds`.
        """
        self._exchanges += 1
        keys = [f"exchange {self._exchanges}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(value))
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
                return within(max(0.0, self._deadline - time.monotonic()) + 2 * _VERDICT_SECONDS, self._join)
            except TimeoutError as error:
                fault = f"{self._me} got no answer at {self.address}:{self.port}: another program's port? Another one: "
                raise RendezvousError(f"{fault}--main_process_port", [0]) from error
            except (LookupError, TypeError, ValueError) as error:
                fault = f"{self._me} cannot read what another rank wrote: another version of this toolkit there?"
                raise RendezvousError(fault) from error
            except RuntimeError as error:  # the process that serves the store has ended
                if self._serves or not most_restarts() or time.monotonic() > self._deadline:
                    fault = f"{self._me} had reached rank 0 at {self.address}:{self.port}, which has ended since"
                    raise RendezvousError(fault, [0]) from error
                time.sleep(0.5)

    def _join(self) -> None:
        from torch.distributed import PrefixStore

        self._server = self._open_store()  # as long as this process lives, where it serves it
        common = PrefixStore("toolkit/rendezvous", self._server)
        self._coordinate(common) if self.rank == 0 else self._follow(common)

    def _mention(self, line: str) -> None:
        waited = self.seconds - (self._deadline - time.monotonic())
        if not self._mentioned and waited > _MENTION_SECONDS:
            self._mentioned = True
            logger.info(plain(line))

    def _open_store(self) -> Store:
        """The store that torch's own rendezvous will use: the stores of one process share a server."""
        from torch.distributed import DistNetworkError, TCPStore

        if not self._serves:
            self._await_server()
        timeout, address = timedelta(seconds=max(10.0, self._deadline - time.monotonic())), self.address
        try:
            if not self._serves:
                return TCPStore(address, self.port, None, False, timeout)
            listener = network.listen(self.port, network.address_to_listen(address, self.place.is_local))
            return network.serve_store(address, listener, timeout)
        except (DistNetworkError, OSError) as error:
            if self._serves and not network.is_own(address):
                raise RendezvousError(f"{self._me} reached nobody at {not_of_this_machine(address)}") from error
            if not self._serves:
                raise
            holder = network.holder_of(self.port) or ("PID", f"a process of another user ({error})")
            raise RendezvousError(
                f"port {self.port} of {self.hello['host']} is taken by {holder[1]}: `kill {holder[0]}` if it is left "
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
                self._mention(f"{self._me}: rank 0 is not there yet: {error}")
                if remaining < 0:
                    fault, hint = f"{self._me} found no rank 0 within {self.seconds:.0f} s: {error}", ""
                    if network.is_own(self.address) and not self.place.is_local:
                        how = nodes.how if (nodes := requested_nodes()) else "RANK"
                        hint = f". {self.address} is an address of this very machine ({how}): is it the first one?"
                    doctor = doctor_command(self.address, network.address_towards(self.address))
                    fault = f"{fault}. To do: {error.remedy}{hint}. {doctor}"
                    raise RendezvousError(fault, [0], error) from error
            time.sleep(_POLL_SECONDS)

    def _coordinate(self, common: Store) -> None:
        from torch.distributed import PrefixStore

        self.store, hellos = PrefixStore(self.hello["id"], common), [self.hello]
        missing = list(range(1, self.world_size))
        common.set("coordinator", json.dumps(self.hello))
        fault = _difference(hellos)
        while missing and not fault:
            lines = self.store.get("hellos").decode().splitlines() if self.store.check(["hellos"]) else []
            if len(lines) >= len(hellos):
                hellos.append(json.loads(lines[len(hellos) - 1]))
                missing = [rank for rank in missing if rank != hellos[-1]["rank"]]
                fault = _conflict(hellos) or _difference(hellos)
            elif (other := read(common, "coordinator"))["id"] != self.hello["id"]:  # a second rank 0 reached this store
                fault = _conflict([self.hello, other])
                PrefixStore(other["id"], common).set("verdict", json.dumps({"fault": fault}))
            elif self.store.check(["verdict"]):  # by that one
                raise RendezvousError(read(self.store, "verdict")["fault"])
            elif time.monotonic() > self._deadline:
                fault = self._name_missing(missing, hellos)
            else:
                self._mention(f"waiting for {name_ranks(missing)}: start the same there")
                time.sleep(_POLL_SECONDS)
        self.hellos, self.attempt = sorted(hellos, key=lambda hello: int(hello["rank"])), self.hello["attempt"]
        verdict = json.dumps({"fault": fault, "hellos": self.hellos})
        if not fault:
            self.store.set("verdict", verdict)
            return
        readers = self.world_size if time.monotonic() < self._deadline else len(hellos)
        last = self._deadline if self.hello["failure"] else time.monotonic() + _FAULT_SECONDS
        with contextlib.suppress(RuntimeError):  # a second rank 0, which serves the store, has ended
            self.store.set("verdict", verdict)
            while self.store.add("readers", 0) < readers - 1 and time.monotonic() < last:
                time.sleep(_POLL_SECONDS)
        raise RendezvousError(fault, missing)

    def _follow(self, common: Store) -> None:
        from torch.distributed import PrefixStore

        coordinator: Hello = {"id": ""}
        while time.monotonic() < self._deadline + _VERDICT_SECONDS:
            if common.check(["coordinator"]) and (now := read(common, "coordinator"))["id"] != coordinator["id"]:
                coordinator, self.store = now, PrefixStore(now["id"], common)
                self.store.append("hellos", f"{json.dumps(self.hello)}\n")  # type: ignore[attr-defined]  # torch's stubs lack it
                if fault := _conflict([coordinator, self.hello]):
                    raise RendezvousError(fault)
            if coordinator["id"] and self.store.check(["verdict"]):
                verdict = read(self.store, "verdict")
                if verdict["fault"]:
                    with contextlib.suppress(RuntimeError):  # rank 0 has ended meanwhile
                        self.store.add("readers", 1)
                    raise RendezvousError(verdict["fault"])
                if any(hello["id"] == self.hello["id"] for hello in verdict["hellos"]):  # not an earlier attempt's
                    self.hellos, self.attempt = verdict["hellos"], coordinator["attempt"]
                    return
            time.sleep(_POLL_SECONDS)
        fault = (
            f"{self._me} reached {self.address}:{self.port} but no verdict of rank 0: it did not start, or has ended"
        )
        raise RendezvousError(fault, [0])

    def _name_missing(self, missing: Sequence[int], hellos: Sequence[Hello]) -> str:
        hosts: dict[str, list[int]] = {}
        for hello in sorted(hellos, key=lambda hello: int(hello["rank"])):
            hosts.setdefault(hello["host"], []).append(hello["rank"])
        came, nodes = "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items()), requested_nodes()
        fault = (
            f"{name_ranks(missing)} of {self.world_size} did not come within {self.seconds:.0f} s to {self.address}:"
            f"{self.port} (those that came: {came})"
        )
        if nodes and not network.is_own(self.address):
            return f"{fault}: {not_of_this_machine(self.address)}"
        doctor = doctor_command(*(nodes.addresses if nodes else (self.address,)))
        return (
            f"{fault}: start them too, with the same command and number of processes. If they were started, they say "
            "what stopped them: a firewall (`sudo ufw allow from THAT_MACHINE` here), another address, or an earlier "
            f"error. Longer: --rendezvous_timeout SECONDS. {doctor}"
        )


def read(store: Store, key: str) -> Any:
    """A JSON value; waits for it."""
    return json.loads(store.get(key))


def _conflict(hellos: Sequence[Hello]) -> str:
    """Of the last one with one that came before it."""
    first, last = hellos[0], hellos[-1]
    rank, host, one, other = last["rank"], last["host"], first["world_size"], last["world_size"]
    if one != other:
        return (
            f"rank 0 on {first['host']} counts {one} processes and rank {rank} on {host} {other}: start all of them "
            f"with the same number, --num_processes {min(one, other)} perhaps (without it, it is the devices that a "
            "machine sees)"
        )
    if twin := next((hello for hello in hellos[:-1] if hello["rank"] == rank), None):
        return (
            f"two processes say that they are rank {rank}, on {twin['host']} and {host}: give each its own RANK (and "
            "NODE_RANK or --machine_rank to each machine)"
        )
    return ""


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
    if os.environ.get("TOOLKIT_TOKEN") and place.rank == 0 and not place.is_local:
        logger.warning("TOOLKIT_TOKEN has no effect any more: train in a network you trust (SECURITY.md)")
    hello = {"address": network.address_towards(os.environ["MASTER_ADDR"]), "versions": versions.comparable(script),
             "failure": failure, "restarts_left": most_restarts() - attempt(),
             "failure_detector": os.environ.get(FAILURE_DETECTOR, "on")}  # fmt: skip
    rendezvous = Rendezvous(place, hello, seconds)
    rendezvous.join()
    current = rendezvous
    if launcher_keeps_store():  # the launchers of several machines may count differently, and torch's keys carry it
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(current.attempt)
    network.choose_interface(_own_address(current))
    return current


def announce_early_failure(place: Place, message: str) -> None:
    """To the other nodes, from a process that fails before the rendezvous: a setting, a file. It takes seconds."""
    if not place.is_local and current is None and os.environ.get("MASTER_ADDR"):
        with contextlib.suppress(Exception):  # it has been reported here
            find_ranks(
                place, "", _EARLY_FAULT_SECONDS, f"rank {place.rank} on {socket.gethostname()} failed: {message}"
            )


def named_machines() -> list[str]:
    """`hostA (ranks 0, 1)` of each machine, where there are several."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for peer in current.peers if current else ():
        ranks.setdefault((peer.node, plain(peer.host)), []).append(peer.rank)
    return [name_machine(host, of_node) for (_, host), of_node in ranks.items()] if len(ranks) > 1 else []


def _difference(hellos: Sequence[Hello]) -> str:
    """A failure before the rendezvous, or other versions, once all are there."""
    if failure := hellos[-1]["failure"]:
        return str(failure)
    if len(hellos) < hellos[0]["world_size"]:
        return ""
    peers = [hello["peer"] for hello in hellos]
    unclear = len({peer["host"] for peer in peers}) < len({peer["node"] for peer in peers})  # nodes of one name
    names = [f"{peer['host']} ({peer['node']})" if unclear else peer["host"] for peer in peers]
    of_hosts = list(zip(names, (hello["versions"] for hello in hellos), strict=True))
    if not (differences := versions.differences(of_hosts)):
        return ""
    return f"the machines do not run the same: {differences}. {versions.remedy(of_hosts)}; nothing was read or trained"


def _own_address(rendezvous: Rendezvous) -> str:
    """This node's, by which the nodes reach each other; the loopback's where there is one node."""
    peers = rendezvous.peers
    others = [hello["address"] for hello, peer in zip(rendezvous.hellos, peers, strict=True)
              if peer.node != peers[rendezvous.rank].node]  # fmt: skip
    if not others:
        return network.LOOPBACK
    routes = (network.address_towards(str(address)) for address in (rendezvous.address, *others) if address)
    return next((address for address in routes if address and not network.is_loopback(address)), "")
