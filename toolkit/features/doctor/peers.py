"""The machines together: rendezvous, a call each way between every two, and a small all-reduce."""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from toolkit.errors import plain
from toolkit.features.doctor import torch_checks
from toolkit.features.doctor.compare import Node
from toolkit.features.doctor.finding import Finding, Level
from toolkit.launch import network
from toolkit.launch.channel import ChannelError, Listener, TokenError, dial, remedy_for
from toolkit.launch.nodes import Nodes
from toolkit.launch.rendezvous import UNREADABLE, Rendezvous, call_peer, coordinate, join

_DIAL_SECONDS = 4.0  # an address that nobody has shows after 3 s, while the kernel asks for it
_EXCHANGE_SECONDS = 25.0
"""How much later than this machine another may be done with the all-reduce."""
_REDUCE_SECONDS = 12.0
_SAY_AFTER_SECONDS = 2.0
_SLOW = 125.0
"""10^6 bytes per second: 1 Gbit/s."""
_EXAMPLE_BYTES = 4 * 110e6
"""The gradients of a model with 110 million parameters in fp32."""
_SAME_LINE = "type the same on all machines, with the machines in the same order"


@dataclass(frozen=True)
class Link:
    """A call from one machine to another."""

    ok: bool = False
    kind: str = ""
    """Of what stands in the way: see `UnreachableError`, or token, stranger, absent."""
    detail: str = ""
    latency_ms: float | None = None
    clock_offset_seconds: float = 0.0
    """What the other clock shows more than this one's."""


@dataclass
class Cluster:
    """What is known of all machines in the end; the same on every one that came."""

    nodes: list[Node] = field(default_factory=list)
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    reduced: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Machine -> backend -> how the all-reduce went there."""
    not_reduced: str = ""
    """Why no all-reduce was tried."""
    fault: str = ""
    """Why the machines cannot be looked at together."""

    def link(self, one: int, other: int) -> Link:
        return self.links.get((one, other), Link())


def meet(own: Node, machines: Nodes, token: str, seconds: float, line: str) -> Cluster:
    """Meets the other machines within `seconds`, and asks and tells all there is to know.

    `line` is what to type there. A machine that does not come, or leaves on the way, is no error; one that sends what
    cannot be read is UNREADABLE.
    """
    with contextlib.ExitStack() as closing:
        listener = None
        with contextlib.suppress(OSError):  # the port is taken, as the findings say; this machine can still call
            own_name = machines.address_of(machines.rank) or network.address_towards(machines.first) or ""
            server = network.listen(machines.port, network.address_to_listen(own_name, local=False))
            listener = closing.enter_context(Listener(server, token, machines.allowed()))
        try:
            rendezvous = closing.enter_context(_rendezvous(own, machines, token, seconds, listener, line))
        except ChannelError as error:
            return Cluster([own], {(machines.rank, 0): _trouble(error)})
        if rendezvous.fault:
            return Cluster([own], fault=rendezvous.fault)
        return _talk(machines, token, listener, rendezvous)


def _rendezvous(
    own: Node, machines: Nodes, token: str, seconds: float, listener: Listener | None, line: str
) -> Rendezvous:
    hello = {"number": machines.rank, "id": secrets.token_hex(8), "node": asdict(own)}
    hello |= {"names": list(machines.addresses), "count": machines.count}
    said: list[str] = []

    def waiting(rank: int, waited: float) -> str:
        if waited > _SAY_AFTER_SECONDS and not said:
            said.append(f"waiting up to {seconds - waited:.0f} s for {machines.name_of(rank)}; there: {line}")
            print(said[0], file=sys.stderr, flush=True)
        return ""

    if machines.rank:
        where = (machines.first, machines.port, token, hello, seconds)
        return join(*where, lambda _, waited: waiting(0, waited), listener)
    if listener is None:
        return Rendezvous({0: hello})
    for address in machines.addresses[1:]:
        call_peer(listener, hello, address, machines.port, token)
    found = coordinate(
        listener, hello, machines.count, seconds, _conflict, lambda absent, _, waited: waiting(absent[0], waited)
    )
    if found.fault:
        time.sleep(1.0)  # two that both say they are machine 0 call each other
    return found


def _conflict(hellos: Sequence[Mapping[str, Any]]) -> str:
    """Why those that came cannot be the machines of one run; one that came over two channels is one."""
    first, count = hellos[0], hellos[0]["count"]
    known: dict[object, object] = {}
    for hello in hellos:
        who, number = f"{hello['node']['host']} ({hello.get('address', 'here')})", hello["number"]
        if known.setdefault(number, hello["id"]) != hello["id"]:
            return f"{who} says that it is machine {number}, as another one does: {_SAME_LINE}, or pass --machine_rank"
        if (count, first["names"]) != (hello["count"], hello["names"]) or not 0 <= number < count:
            lists = [", ".join(map(str, one["names"])) for one in (first, hello)]
            return f"{first['node']['host']} was given the machines {lists[0]}, and {who} {lists[1]}: {_SAME_LINE}"
    return ""


def _talk(machines: Nodes, token: str, listener: Listener | None, rendezvous: Rendezvous) -> Cluster:
    """Calls the others, learns of their calls, and sums with them."""
    if listener is not None:
        threading.Thread(target=_answer, args=(listener, machines.rank), daemon=True).start()
    addresses = {rank: str(hello.get("address") or machines.first) for rank, hello in rendezvous.hellos.items()}
    links = _call_all(machines, token, {**addresses, **dict(enumerate(machines.addresses))}, listener)
    told = {str(other): asdict(link) for other, link in links.items()}
    heard = rendezvous.exchange(told, _EXCHANGE_SECONDS) or {machines.rank: told}
    if listener is not None:
        listener.close()  # the all-reduce needs the port
    found = Cluster()
    found.links = {(rank, int(other)): Link(**link) for rank, said in heard.items() for other, link in said.items()}
    found.nodes = [replace(node, clock_offset_seconds=_clock(node.rank, found))
                   for node in _nodes(rendezvous.hellos) if node.rank in heard]  # fmt: skip
    found.not_reduced = _why_not(found, machines)
    if not found.not_reduced:
        network.choose_interface(rendezvous.own_address())
        nccl = all(node.backend.startswith("NCCL") for node in found.nodes)
        where = (machines.rank, machines.count, machines.first, machines.port)
        said = torch_checks.all_reduce(*where, ["gloo", "nccl"] if nccl else ["gloo"], _REDUCE_SECONDS)
        found.reduced = rendezvous.exchange(said, _EXCHANGE_SECONDS)
    return found


def _nodes(hellos: Mapping[int, Mapping[str, Any]]) -> list[Node]:
    """What the machines say of themselves, each with a host's name of its own."""
    names = [str(hello["node"]["host"]) for hello in hellos.values()]
    found = []
    for rank, hello in hellos.items():
        node = Node(**{**hello["node"], "rank": rank})
        interface = (
            node.interface if re.fullmatch(r"[\w.-]{1,15}", node.interface) else ""
        )  # it becomes part of a command
        host = f"{node.host} ({node.address or rank})" if names.count(node.host) > 1 else node.host
        found.append(replace(node, host=re.sub(r"[^\w .()-]", "?", host), interface=interface))
    return found


def _told(sent: Mapping[str, Any], host: str) -> Finding:
    """Another machine's finding; it may have sent anything, so that no line of its own is shown as one to type."""
    found = Finding(**{name: plain(value) for name, value in sent.items()})  # type: ignore[arg-type]
    level = found.level if found.level in get_args(Level) else "note"
    return replace(
        found, host=host, level=level, remedy=f"the doctor on {host} has the line to type" * bool(found.remedy)
    )


# --- a call each way between every two


def _answer(listener: Listener, rank: int) -> None:
    while not listener.closed:
        if (arrived := listener.accept(0.5)) is not None:
            with arrived[1] as channel, contextlib.suppress(ChannelError):
                if "call" in arrived[0]:
                    channel.send({"number": rank, "time": time.time()}, _DIAL_SECONDS)


def _call_all(machines: Nodes, token: str, addresses: Mapping[int, str], listener: Listener | None) -> dict[int, Link]:
    """Calls every other machine, all at once; whose address is not known has to call itself."""
    found = [rank for rank in range(machines.count) if rank != machines.rank]

    def call(rank: int) -> Link:
        if rank not in addresses:
            return Link(False, "absent", "it has not called, and its address is not known here")
        refused = listener.refused if listener else {}
        why = next((refused[known] for known in network.addresses_of(addresses[rank]) if known in refused), "")
        link = _call(rank, addresses[rank], machines.port, token)
        return _trouble(TokenError(why)) if not link.ok and "token" in why else link

    with ThreadPoolExecutor(len(found)) as pool:
        return dict(zip(found, pool.map(call, found), strict=True))


def _call(rank: int, address: str, port: int, token: str) -> Link:
    try:
        with dial(address, port, token, _DIAL_SECONDS) as channel:
            clock, began = time.time(), time.perf_counter()
            channel.send({"call": True}, _DIAL_SECONDS)
            said = channel.receive(_DIAL_SECONDS)
            trip = time.perf_counter() - began
            if said.get("number") == rank:
                return Link(True, "", "", trip * 1000, float(said["time"]) - clock - trip / 2)
    except ChannelError as error:
        return _trouble(error)
    except UNREADABLE:
        said = {}
    return Link(False, "stranger", f"it says that it is machine {plain(said.get('number'), 20)}, not {rank}")


def _trouble(error: ChannelError) -> Link:
    return Link(False, error.kind, getattr(error, "detail", str(error)))


def _remedy(link: Link, address: str, port: int) -> str:
    """By this machine's own account: other machines send what stands in the way, and no line to type."""
    if link.kind != "absent":
        return remedy_for(link.kind, address or "THAT_MACHINE", port)
    mend = "if it was typed there, a firewall may drop it (here: sudo ufw allow from THAT_MACHINE to any port "
    return f"{mend}{port} proto tcp); --machines A,B tells more"


def _clock(rank: int, found: Cluster) -> float | None:
    """What a machine's clock shows more than machine 0's, by either's call."""
    there, back = found.link(0, rank), found.link(rank, 0)
    if rank == 0 or there.ok:
        return there.clock_offset_seconds
    return -back.clock_offset_seconds if back.ok else None


def _why_not(found: Cluster, machines: Nodes) -> str:
    """Why no all-reduce is tried; empty where it is."""
    if len(found.nodes) < machines.count:
        return "not every machine is there"
    if broken := [node.host for node in found.nodes if not node.backend]:
        return f"torch does not work on {', '.join(broken)}"
    if deaf := [node.host for node in found.nodes[1:] if not found.link(node.rank, 0).ok]:
        return f"{', '.join(deaf)} cannot reach {found.nodes[0].host}"
    return ""


# --- what it means


def check(found: Cluster, machines: Nodes, lines: Mapping[int, str], seconds: float) -> list[Finding]:
    """`lines`: machine -> what to type on it; `seconds` were waited for all of them."""
    if found.fault:
        return [Finding("machines", "rendezvous", "fail", found.fault, _SAME_LINE)]
    findings = [_told(sent, node.host) for node in found.nodes if node.rank != machines.rank for sent in node.findings]
    here = [node.rank for node in found.nodes]
    # the others are met through machine 0
    absent = [0] if 0 not in here else [rank for rank in range(machines.count) if rank not in here]
    findings += [_check_missing(rank, found, machines, lines[rank], seconds) for rank in absent]
    for one, other in itertools.combinations(found.nodes, 2):
        findings += _check_pair(one, other, found, machines)
    return [*findings, *(_check_reduced(found, machines) if len(here) > 1 else [])]


def _check_missing(rank: int, found: Cluster, machines: Nodes, line: str, seconds: float) -> Finding:
    calls = {node.host: found.links[node.rank, rank] for node in found.nodes if (node.rank, rank) in found.links}
    why = "; ".join(f"{caller} says: {link.detail}" for caller, link in calls.items())
    text = f"{machines.name_of(rank)} did not come within {seconds:.0f} s{f'. {why}' if why else ''}"
    mend = next((f"; {_remedy(link, machines.address_of(rank), machines.port)}" for link in calls.values()), "")
    return Finding("links", f"machine {rank}", "fail", text, f"on it type: {line}{mend}")


def _check_pair(one: Node, other: Node, found: Cluster, machines: Nodes) -> list[Finding]:
    there, back = found.link(one.rank, other.rank), found.link(other.rank, one.rank)
    if there.ok and back.ok:
        text = f"{one.host} and {other.host} reach each other, {there.latency_ms or 0:.2f} ms there and back"
        return [Finding("links", f"{one.rank} <-> {other.rank}", "ok", text)]
    works = ", although the other way works" if there.ok or back.ok else ""
    lines = []
    for caller, called, link in ((one, other, there), (other, one, back)):
        if not link.ok:
            address = machines.address_of(called.rank) or called.address
            text = f"{caller.host} does not reach {called.host} at {address}:{machines.port}{works}. "
            text += f"{caller.host} says: {link.detail}"
            mend = _mend(caller, called, link, machines)
            lines.append(Finding("links", f"{caller.rank} -> {called.rank}", "fail", text, mend))
    return lines


def _mend(caller: Node, called: Node, link: Link, machines: Nodes) -> str:
    here, port = f"on {called.host}: ", machines.port
    source = shlex.quote(machines.address_of(caller.rank) or "THAT_MACHINE")
    if link.kind == "stranger" or not called.listens:
        return f"{here}`sudo ss -ltnp 'sport = :{port}'` shows what holds the port; or another --main_process_port"
    if link.kind in ("silent", "refused"):
        way = "drops" if link.kind == "silent" else "rejects"
        every = f"(a firewall {way} it; a run needs every port: sudo ufw allow from {source})"
        return f"{here}sudo ufw allow from {source} to any port {port} proto tcp  {every}"
    return f"on {caller.host}: {_remedy(link, machines.address_of(called.rank), port)}"


def _check_reduced(found: Cluster, machines: Nodes) -> list[Finding]:
    if found.not_reduced:
        return [Finding("all-reduce", "gloo", "note", f"not tried: {found.not_reduced}")]
    said = [found.reduced.get(node.rank) or {} for node in found.nodes]
    return [
        _check_backend(backend, found.nodes, [one.get(backend) or {} for one in said], machines)
        for backend in ("gloo", "nccl")
        if any(backend in one for one in said)
    ]


def _check_backend(backend: str, nodes: Sequence[Node], said: Sequence[Mapping[str, Any]], machines: Nodes) -> Finding:
    """`said`: how the all-reduce went on each machine."""
    wrong = [f"{node.host}: {plain(one.get('error', 'no word'), 300)}"
             for node, one in zip(nodes, said, strict=True) if one.get("ok") is not True]  # fmt: skip
    if wrong:
        text = f"failed between the machines ({'; '.join(wrong)})"
        return Finding("all-reduce", backend, "fail", text, _mend_all_reduce(backend, nodes, machines))
    latency = max(one["latency_ms"] for one in said)
    slowest = min(one["mbytes_per_second"] for one in said)
    text = f"16 MB summed over {len(nodes)} machines at {slowest / 125:.1f} Gbit/s, a single number in {latency:.2f} ms"
    if slowest >= _SLOW:
        return Finding("all-reduce", backend, "ok", text)
    seconds = 2 * (len(nodes) - 1) / len(nodes) * _EXAMPLE_BYTES / (slowest * 1e6)
    text += f": each step of a model with 110M parameters in fp32 takes {seconds:.1f} s for its all-reduce alone"
    faster = "`export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME` on all machines"
    return Finding("all-reduce", backend, "warn", text, f"a faster interface, if there is one: {faster}")


def _mend_all_reduce(backend: str, nodes: Sequence[Node], machines: Nodes) -> str:
    """Every port is needed, over the interface that leads to the others, in packets that pass."""
    other, interface = machines.address_of(nodes[1].rank) or "THAT_MACHINE", nodes[0].interface or "NAME"
    other, interface = shlex.quote(other), shlex.quote(interface)
    mend = f"on {nodes[0].host}: sudo ufw allow from {other}, and so on each for all others; "
    mend += f"export {backend.upper()}_SOCKET_IFNAME={interface}; "
    mend += f"`ping -M do -s 1472 {other}` shows whether large packets pass (else a smaller MTU)"
    return mend if backend == "gloo" else f"{mend}; export NCCL_IB_DISABLE=1; `NCCL_DEBUG=INFO` says more"
