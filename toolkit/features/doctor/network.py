"""Checks between machines: they meet as the launchers of a run do, and sum numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

from toolkit.errors import UserError, first_line, printable
from toolkit.features.doctor.machine import Finding
from toolkit.launch import network
from toolkit.launch.machines import Machines
from toolkit.launch.meet import meet_launchers
from toolkit.utils.timeouts import call_with_timeout
from toolkit.utils.versions import comparable_versions

_REDUCE_SECONDS = 20.0  # the first on a GPU includes the start of CUDA and of NCCL
_REPEATS, _BYTES = 4, 16 << 20
_SLOW_GBITS = 1.0


def check(machines: Machines, timeout: float) -> Iterator[Finding]:
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    interface = network.local_addresses().get(network.source_address_for(machines.first))
    if interface:  # otherwise the machines do not meet, which is an error with its reason
        yield Finding("interface", "ok", f"{interface}, by the route to {machines.first}")
    try:
        facts = {**comparable_versions(), "backend": backend}
        store, names = meet_launchers(machines, facts, timeout)
    except UserError as error:
        yield Finding("machines", "FAIL", str(error))
        return
    hosts = ", ".join(printable(host, 100) for host in names)
    yield Finding(
        "machines", "ok", f"{hosts} found each other, with the same libraries and code"
    )
    try:
        measure = partial(_measure, store, machines, backend)
        gbits = call_with_timeout(2 * _REDUCE_SECONDS, measure)
    except Exception as error:
        why = printable(first_line(error), 300)
        yield Finding(backend, "FAIL", f"the sum failed: {why}", _remedy(backend))
        return
    text = f"16 MB summed over {machines.count} machines at {gbits:.1f} Gbit/s"
    if gbits >= _SLOW_GBITS:
        yield Finding(backend, "ok", text)
    else:
        remedy = (
            "another interface: `export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME`"
        )
        yield Finding(backend, "warn", text, f"{remedy} on all machines")


def _measure(store: Any, machines: Machines, backend: str) -> float:
    """Gbit/s of the fastest all-reduce: the bus bandwidth of a ring as nccl-tests define it,
    2 (n - 1) / n bytes sent per byte."""
    import torch
    from torch import distributed

    world = machines.count
    distributed.init_process_group(
        backend,
        store=store,
        rank=machines.rank,
        world_size=world,
        timeout=timedelta(seconds=_REDUCE_SECONDS),
    )
    device = "cuda:0" if backend == "nccl" else "cpu"
    seconds = []
    for _ in range(_REPEATS):  # the first one sets up connections
        numbers = torch.full((_BYTES // 4,), machines.rank + 1.0, device=device)
        numbers[0].item()  # waits for the device
        started = time.perf_counter()
        distributed.all_reduce(numbers)
        total = numbers[-1].item()
        seconds.append(time.perf_counter() - started)
        expected = world * (world + 1) / 2
        if total != expected:
            raise ArithmeticError(
                f"the sum over {world} machines is {total}, not {expected}"
            )
    distributed.barrier()
    sent = 2 * (world - 1) / world * _BYTES
    return 8 * sent / min(seconds) / 1e9


def _remedy(backend: str) -> str:
    """All ports must be open, the right interface chosen, and its MTU small enough."""
    return (
        "on each machine: `sudo ufw allow from THAT_MACHINE`; "
        f"`export {backend.upper()}_SOCKET_IFNAME=NAME`; `ping -M do -s 1472 THAT_MACHINE` shows "
        "whether large packets pass (else a smaller MTU); `NCCL_DEBUG=INFO` logs more"
    )
