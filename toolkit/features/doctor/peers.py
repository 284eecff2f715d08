"""Checks between machines: the rendezvous of a run, and an all-reduce with its bandwidth and latency."""

from __future__ import annotations

import functools
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from toolkit.errors import first_line, printable
from toolkit.features.doctor.finding import Areas, Finding
from toolkit.features.doctor.job import Job
from toolkit.launch import network
from toolkit.launch.environment import MARKER, Place
from toolkit.launch.nodes import Nodes
from toolkit.launch.rendezvous import Rendezvous, RendezvousError, join_ranks
from toolkit.utils.timeouts import call_with_timeout

_CONNECT_SECONDS = 4.0  # ARP for an unused address fails after 3 s
_EXCHANGE_SECONDS, _REDUCE_SECONDS = 25.0, 20.0  # the first on a GPU includes the start of CUDA and of NCCL
_LATENCY_REPEATS, _BANDWIDTH_REPEATS, _BANDWIDTH_BYTES = 10, 3, 16 << 20
_SLOW = 125.0  # MB/s: 1 Gbit/s
_SOMEWHERE = "THAT_MACHINE"


AllReduce = dict[str, list[dict[str, Any]]]
"""Backend -> {ok, latency_ms, mbytes_per_second} or {ok, error} of each machine."""


def check(job: Job, uses_nccl: bool) -> tuple[Areas, AllReduce]:
    """The findings are the same on all machines. A remedy never contains text that another machine sent."""
    nodes = job.nodes
    os.environ.update({"RANK": str(nodes.rank), "WORLD_SIZE": str(nodes.count), "LOCAL_RANK": "0",
                       "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": nodes.first, "MASTER_PORT": str(nodes.port),
                       MARKER: json.dumps({"nodes": asdict(nodes)})})  # fmt: skip
    try:
        place = Place("doctor", nodes.rank, nodes.count, 0, 1)
        rendezvous = join_ranks(place, str(job.script or ""), job.options.timeout)
        assert rendezvous is not None  # several ranks
        hosts = [printable(peer.host, 100) for peer in rendezvous.peers]
        text = f"{', '.join(hosts)} found each other, with the same Python, libraries and code"
        results = _all_reduce(rendezvous, uses_nccl)
        findings = [_check_backend(backend, results[backend], hosts, nodes) for backend in results]
        rendezvous.exchange("done", _EXCHANGE_SECONDS)
        time.sleep(0.5 * (nodes.rank == 0))  # rank 0 hosts the store, from which the others read the last reply
        return {"machines": [Finding("rendezvous", "ok", text)], "all-reduce": findings}, results
    except RendezvousError as error:
        remedy = "type the same command on all machines, with the machines in the same order"
        findings = [_explain_missing(error, rank, job) for rank in error.missing]
        return {"machines": findings or [Finding("rendezvous", "fail", str(error), remedy)]}, {}
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        why = printable(first_line(error))
        text = f"the connection was lost, or a machine runs another version of this toolkit: {why}"
        return {"machines": [Finding("rendezvous", "fail", text)]}, {}


def _explain_missing(error: RendezvousError, rank: int, job: Job) -> Finding:
    """Why a machine is missing: a rank can tell whether the port of rank 0 drops or refuses packets, rank 0 only
    whether a machine answers at all."""
    nodes, obstacle = job.nodes, error.unreachable
    address = nodes.address_of(rank)
    if rank and address:
        try:
            network.connect(address, nodes.port, _CONNECT_SECONDS).close()
        except network.UnreachableError as unreachable:
            obstacle = unreachable
    text = f"{nodes.name_of(rank)} did not connect within {job.options.timeout:.0f} s"
    remedy = f"on it type: {job.command_for(rank)}"
    if rank and (obstacle is None or obstacle.kind == "refused"):  # only rank 0 listens
        text += "; the machine answers" if address else ""
        remedy += f"; if it runs there, a firewall here may block it: sudo ufw allow from {_SOMEWHERE}"
    elif obstacle is not None:
        text, remedy = f"{text}: {obstacle}", f"{remedy}; {obstacle.remedy}"
    else:
        text = str(error)
    return Finding(f"machine {rank}", "fail", text, remedy)


def _all_reduce(rendezvous: Rendezvous, uses_nccl: bool) -> AllReduce:
    """Runs an all-reduce with gloo, then with NCCL if gloo worked and every machine has GPUs."""
    results: AllReduce = {}
    with_nccl = all(rendezvous.exchange(uses_nccl, _EXCHANGE_SECONDS))
    for backend in ("gloo", "nccl") if with_nccl else ("gloo",):
        if all(result["ok"] for of_backend in results.values() for result in of_backend):
            try:
                result = call_with_timeout(_REDUCE_SECONDS + 1, functools.partial(_measure, rendezvous, backend))
            except Exception as error:
                result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
            results[backend] = rendezvous.exchange(result, _EXCHANGE_SECONDS)
    return results


def _measure(rendezvous: Rendezvous, backend: str) -> dict[str, Any]:
    """Latency, and the bus bandwidth of a ring as nccl-tests define it: 2 (n - 1) / n bytes sent per byte."""
    import torch
    from torch import distributed

    world, timeout = rendezvous.me.world_size, timedelta(seconds=_REDUCE_SECONDS)
    if not distributed.is_initialized():
        store = distributed.PrefixStore("group", rendezvous.store)
        distributed.init_process_group("gloo", store=store, rank=rendezvous.me.rank, world_size=world, timeout=timeout)
    group = distributed.new_group(backend=backend, timeout=timeout)
    device = "cuda:0" if backend == "nccl" else "cpu"

    def fastest(numel: int, repeats: int) -> float:
        durations = []
        for _ in range(1 + repeats):  # the first one sets up connections
            numbers = torch.full((numel,), float(rendezvous.me.rank + 1), device=device)
            float(numbers[0])  # synchronises the device
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


def _check_backend(backend: str, results: Sequence[Mapping[str, Any]], hosts: Sequence[str], nodes: Nodes) -> Finding:
    faults = [f"{host}: {printable(result.get('error', ''), 300)}"
              for host, result in zip(hosts, results, strict=True) if not result["ok"]]  # fmt: skip
    if faults:  # all ports must be open, the right interface chosen, and its MTU small enough
        other = shlex.quote(next(iter(nodes.others()), _SOMEWHERE))
        remedy = f"on each machine: sudo ufw allow from {_SOMEWHERE}; export {backend.upper()}_SOCKET_IFNAME=NAME; "
        remedy += f"`ping -M do -s 1472 {other}` shows whether large packets pass (else a smaller MTU)"
        remedy += "; export NCCL_IB_DISABLE=1; `NCCL_DEBUG=INFO` logs more" * (backend == "nccl")
        return Finding(backend, "fail", f"failed between the machines ({'; '.join(faults)})", remedy)
    latency = max(float(result["latency_ms"]) for result in results)
    rate = min(float(result["mbytes_per_second"]) for result in results)
    text = f"16 MB summed over {len(hosts)} machines at {rate / 125:.1f} Gbit/s, a single number in {latency:.2f} ms"
    if rate >= _SLOW:
        return Finding(backend, "ok", text)
    faster = "`export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME` on all machines"
    return Finding(backend, "warn", text, f"choose a faster interface, if there is one: {faster}")
