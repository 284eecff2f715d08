"""Checks between machines: they meet as the launchers of a run do, and sum numbers."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from toolkit.errors import UserError, first_line, printable
from toolkit.features.doctor.finding import Finding
from toolkit.launch import network
from toolkit.launch.machines import Machines
from toolkit.launch.meet import meet_launchers
from toolkit.utils.timeouts import call_with_timeout
from toolkit.utils.versions import comparable_versions

_CONNECT_SECONDS = 4.0  # ARP for an unused address fails after 3 s
_REDUCE_SECONDS = 20.0  # the first on a GPU includes the start of CUDA and of NCCL
_REPEATS, _BYTES = 4, 16 << 20


def check(machines: Machines, timeout: float, uses_nccl: bool) -> Iterator[Finding]:
    facts = {**comparable_versions(), "device": "cuda" if uses_nccl else "cpu"}
    try:
        met = meet_launchers(machines, facts, timeout)
    except UserError as error:
        yield Finding("machines", "fail", str(error))
        yield from _why_missing(machines)
        return
    hosts = ", ".join(printable(host, 100) for host in met.hosts)
    yield Finding(
        "machines", "ok", f"{hosts} found each other, with the same Python, libraries and code"
    )
    for backend in ("gloo", "nccl") if uses_nccl else ("gloo",):
        measure = functools.partial(_measure, met.store, machines, backend)
        try:
            yield _judge(backend, machines.count, call_with_timeout(_REDUCE_SECONDS + 5, measure))
        except Exception as error:
            why = printable(first_line(error), 300)
            yield Finding(backend, "fail", f"the sum failed: {why}", _remedy(backend))
            return


def _why_missing(machines: Machines) -> Iterator[Finding]:
    """Whether machine 0 can be reached from here."""
    if machines.rank == 0:
        return
    try:
        network.connect(machines.first, machines.port, _CONNECT_SECONDS).close()
    except network.UnreachableError as error:
        yield Finding("machine 0", "fail", str(error), error.remedy)


def _measure(store: Any, machines: Machines, backend: str) -> float:
    """Gbit/s. The bus bandwidth of a ring as nccl-tests define it: 2 (n - 1) / n bytes sent per byte."""
    import torch
    from torch import distributed

    world, timeout = machines.count, timedelta(seconds=_REDUCE_SECONDS)
    if not distributed.is_initialized():
        group_store = distributed.PrefixStore("group", store)
        distributed.init_process_group(
            "gloo", store=group_store, rank=machines.rank, world_size=world, timeout=timeout
        )
    group: Any = distributed.new_group(backend=backend, timeout=timeout)
    device, expected, durations = (
        "cuda:0" if backend == "nccl" else "cpu",
        world * (world + 1) / 2,
        [],
    )
    for _ in range(_REPEATS):  # the first one sets up connections
        numbers = torch.full((_BYTES // 4,), float(machines.rank + 1), device=device)
        float(numbers[0])  # synchronises the device
        started = time.perf_counter()
        distributed.all_reduce(numbers, group=group)
        total = float(numbers[-1])
        durations.append(time.perf_counter() - started)
        if total != expected:
            raise ArithmeticError(f"the sum over {world} machines is {total}, not {expected}")
    distributed.barrier(group=group)
    return 8 * 2 * (world - 1) / world * _BYTES / min(durations) / 1e9


def _judge(backend: str, count: int, rate: float) -> Finding:
    text = f"16 MB summed over {count} machines at {rate:.1f} Gbit/s"
    if rate >= 1:
        return Finding(backend, "ok", text)
    faster = "`export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME` on all machines"
    return Finding(backend, "warn", text, f"choose a faster interface, if there is one: {faster}")


def _remedy(backend: str) -> str:
    """All ports must be open, the right interface chosen, and its MTU small enough."""
    remedy = (
        f"on each machine: `sudo ufw allow from THAT_MACHINE`; `export {backend.upper()}_SOCKET_IFNAME=NAME`; "
        f"`ping -M do -s 1472 THAT_MACHINE` shows whether large packets pass (else a smaller MTU)"
    )
    return f"{remedy}; `NCCL_DEBUG=INFO` logs more" if backend == "nccl" else remedy
