"""The machines together: the rendezvous of a run, a connection each way between every two, and an all-reduce."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from toolkit.errors import plain
from toolkit.features.doctor.finding import Finding
from toolkit.launch import network
from toolkit.launch.environment import MARKER, Place
from toolkit.launch.network import UnreachableError, remedy_for
from toolkit.launch.nodes import Nodes
from toolkit.launch.rendezvous import Rendezvous, RendezvousError, find_ranks
from toolkit.utils.within import within

_CONNECT_SECONDS = 4.0  # an address that nobody has shows after 3 s, while the kernel asks for it
_EXCHANGE_SECONDS, _REDUCE_SECONDS = 25.0, 12.0
_LATENCY_REPEATS, _BANDWIDTH_REPEATS = 10, 3
_BANDWIDTH_BYTES = 16 << 20
_SLOW = 125.0
"""10^6 bytes per second: 1 Gbit/s."""
_EXAMPLE_BYTES = 4 * 110e6
"""The gradients of a model with 110 million parameters in fp32."""


def check(nodes: Nodes, script: str, seconds: float, uses_nccl: bool, lines: Mapping[int, str]) -> dict[str, Any]:
    """{"findings", "machines", "links", "allreduce"}. `lines`: machine -> what to type on it.

    No text of another machine becomes a part of a remedy.
    """
    report: dict[str, Any] = {"findings": [], "machines": [], "links": [], "allreduce": {}}
    os.environ.update({"RANK": str(nodes.rank), "WORLD_SIZE": str(nodes.count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                       "MASTER_ADDR": nodes.first, "MASTER_PORT": str(nodes.port),
                       MARKER: json.dumps({"nodes": asdict(nodes)})})  # fmt: skip
    try:
        rendezvous = find_ranks(Place("doctor", nodes.rank, nodes.count, 0, 1), script, seconds)
        assert rendezvous is not None
        hosts = [peer.host for peer in rendezvous.peers]
        text = f"{', '.join(hosts)} found each other, with the same Python, libraries and code"
        report["findings"].append(Finding("machines", "rendezvous", "ok", text))
        report["machines"] = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
        report["links"] = _try_links(rendezvous, nodes)
        report["findings"] += _check_links(report["links"], hosts, nodes)
        report["allreduce"] = _all_reduce(rendezvous, uses_nccl)
        report["findings"] += _check_reduced(report["allreduce"], hosts, nodes)
        rendezvous.exchange("done", _EXCHANGE_SECONDS)
        time.sleep(0.5 * (nodes.rank == 0))  # it serves the store: the others have read the last answer
    except RendezvousError as error:
        report["findings"] += _explain(error, nodes, seconds, lines)
    return report


def _explain(error: RendezvousError, nodes: Nodes, seconds: float, lines: Mapping[int, str]) -> list[Finding]:
    """Why the machines did not find each other."""
    if not error.missing:
        remedy = "" if "pip install" in str(error) else "type the same on all machines, in the same order"
        return [Finding("machines", "rendezvous", "fail", str(error), remedy)]
    findings = []
    for rank in error.missing:
        text = f"{nodes.name_of(rank)} did not come within {seconds:.0f} s"
        remedy = f"on it type: {lines[rank]}"
        if rank == 0:
            obstacle = error.unreachable
            text = f"{text}: {obstacle}" if obstacle else str(error)
        else:  # it calls this one; whether its machine answers at all shows which side to look at
            obstacle = _obstacle(nodes.address_of(rank), nodes.port)
            answers = obstacle is None or obstacle.kind == "refused"
            text += "; its machine answers" if answers else f": {obstacle}" if nodes.address_of(rank) else ""
            firewall = f"(here: sudo ufw allow from THAT_MACHINE to any port {nodes.port} proto tcp)"
            remedy += f"; if it runs there, it reports why it does not reach this one: a firewall here {firewall}?"
        if obstacle is not None and obstacle.kind != "refused":
            remedy += f"; {obstacle.remedy}"
        findings.append(Finding("links", f"machine {rank}", "fail", text, remedy))
    return findings


def _obstacle(address: str, port: int) -> UnreachableError | None:
    """Why no connection can be made; None where it can, or no address is known."""
    try:
        if address:
            network.connect(address, port, _CONNECT_SECONDS).close()
    except UnreachableError as error:
        return error
    return None


# --- each to each, as gloo and NCCL connect


def _try_links(rendezvous: Rendezvous, nodes: Nodes) -> list[dict[str, Any]]:
    """{from, to, ok, kind, detail, milliseconds}; every machine returns all of them."""
    own = nodes.address_of(nodes.rank) or network.address_towards(nodes.first) or ""
    with network.listen(0, network.address_to_listen(own, local=False)) as server:
        places = rendezvous.exchange([network.address_towards(nodes.first) if nodes.rank else nodes.first,
                                      server.getsockname()[1]], _EXCHANGE_SECONDS)  # fmt: skip
        links = []
        for rank, (address, port) in enumerate(places):
            if rank != nodes.rank:
                started = time.perf_counter()
                obstacle = _obstacle(nodes.address_of(rank) or str(address), int(port))
                latency_ms = None if obstacle else (time.perf_counter() - started) * 1000
                links.append({"from": nodes.rank, "to": rank, "ok": obstacle is None, "latency_ms": latency_ms,
                              "kind": obstacle.kind if obstacle else "",
                              "detail": obstacle.detail if obstacle else ""})  # fmt: skip
        return sum(rendezvous.exchange(links, _EXCHANGE_SECONDS), [])


def _check_links(links: Sequence[Mapping[str, Any]], hosts: Sequence[str], nodes: Nodes) -> list[Finding]:
    findings = []
    for link in links:
        caller, called = hosts[link["from"]], hosts[link["to"]]
        name = f"{link['from']} -> {link['to']}"
        if link["ok"]:
            text = f"{caller} reaches {called}, in {float(link['latency_ms']):.2f} ms"
            findings.append(Finding("links", name, "ok", text))
            continue
        source = nodes.address_of(link["from"]) or "THAT_MACHINE"
        if link["kind"] in ("silent", "refused", "no_route"):
            how = {"silent": "drops", "refused": "refuses", "no_route": "rejects"}[link["kind"]]
            remedy = f"on {called}: sudo ufw allow from {source}  (a firewall {how} it; a run needs every port)"
        else:
            remedy = f"on {caller}: {remedy_for(link['kind'], nodes.address_of(link['to']) or 'THAT_MACHINE', nodes.port)}"
        text = f"{caller} does not reach {called}: {plain(link['detail'], 200)}"
        findings.append(Finding("links", name, "fail", text, remedy))
    return findings


# --- an all-reduce


def _all_reduce(rendezvous: Rendezvous, uses_nccl: bool) -> dict[str, list[dict[str, Any]]]:
    """Backend -> {ok, latency_ms, mbytes_per_second} or {ok, error} of each machine; NCCL where gloo worked and every
    machine has GPUs."""
    results: dict[str, list[dict[str, Any]]] = {}
    with_nccl = all(rendezvous.exchange(uses_nccl, _EXCHANGE_SECONDS))
    for backend in ("gloo", "nccl") if with_nccl else ("gloo",):
        if all(result["ok"] for of_backend in results.values() for result in of_backend):
            try:
                result = within(_REDUCE_SECONDS + 1, lambda: _measure(rendezvous, backend))
            except Exception as error:
                result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
            results[backend] = rendezvous.exchange(result, _EXCHANGE_SECONDS)
    return results


def _measure(rendezvous: Rendezvous, backend: str) -> dict[str, Any]:
    """The bandwidth is that of a machine's line in a ring, as nccl-tests have it: 2 (n - 1) / n bytes sent per byte."""
    import torch
    from torch import distributed

    world, timeout = rendezvous.world_size, timedelta(seconds=_REDUCE_SECONDS)
    if not distributed.is_initialized():
        store = distributed.PrefixStore("group", rendezvous.store)
        distributed.init_process_group("gloo", store=store, rank=rendezvous.rank, world_size=world, timeout=timeout)
    group = distributed.new_group(backend=backend, timeout=timeout)
    device = "cuda:0" if backend == "nccl" else "cpu"

    def fastest(numel: int, repeats: int) -> float:
        durations = []
        for _ in range(1 + repeats):  # the first one connects
            numbers = torch.full((numel,), float(rendezvous.rank + 1), device=device)
            float(numbers[0])  # waits for the device
            started = time.perf_counter()
            distributed.all_reduce(numbers, group=group)
            total = float(numbers[-1])
            durations.append(time.perf_counter() - started)
            if total != world * (world + 1) / 2:
                raise ArithmeticError(f"the sum over {world} machines is {total}, not {world * (world + 1) / 2}")
        return min(durations[1:])

    latency, duration = fastest(1, _LATENCY_REPEATS), fastest(_BANDWIDTH_BYTES // 4, _BANDWIDTH_REPEATS)
    rate = 2 * (world - 1) / world * _BANDWIDTH_BYTES / duration / 1e6
    return {"ok": True, "latency_ms": latency * 1000, "mbytes_per_second": rate}


def _check_reduced(
    results: Mapping[str, Sequence[Mapping[str, Any]]], hosts: Sequence[str], nodes: Nodes
) -> list[Finding]:
    findings = []
    for backend, of_machines in results.items():
        faults = [f"{host}: {plain(result.get('error', ''), 300)}"
                  for host, result in zip(hosts, of_machines, strict=True) if not result["ok"]]  # fmt: skip
        if faults:
            text = f"failed between the machines ({'; '.join(faults)})"
            findings.append(Finding("all-reduce", backend, "fail", text, _mend_all_reduce(backend, nodes)))
            continue
        latency = max(float(result["latency_ms"]) for result in of_machines)
        rate = min(float(result["mbytes_per_second"]) for result in of_machines)
        text = f"16 MB summed over {len(hosts)} machines at {rate / 125:.1f} Gbit/s, a single number in {latency:.2f} ms"
        if rate >= _SLOW:
            findings.append(Finding("all-reduce", backend, "ok", text))
            continue
        seconds = 2 * (len(hosts) - 1) / len(hosts) * _EXAMPLE_BYTES / (rate * 1e6)
        text += f": each step of a model with 110M parameters in fp32 takes {seconds:.1f} s for its all-reduce alone"
        faster = "`export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME` on all machines"
        findings.append(Finding("all-reduce", backend, "warn", text, f"a faster interface, if there is one: {faster}"))
    return findings


def _mend_all_reduce(backend: str, nodes: Nodes) -> str:
    """Every port is needed, over the interface that leads to the others, in packets that pass."""
    other = next(iter(nodes.others()), "THAT_MACHINE")
    mend = "all TCP ports between the machines (`sudo ufw allow from THAT_MACHINE` on each); "
    mend += f"`ping -M do -s 1472 {other}` shows whether large packets pass (else a smaller MTU); "
    mend += f"export {backend.upper()}_SOCKET_IFNAME=NAME of the interface between them"
    return mend if backend == "gloo" else f"{mend}; export NCCL_IB_DISABLE=1; `NCCL_DEBUG=INFO` says more"
