"""What torch sees of this machine, and a small all-reduce with the other ones, in threads that may hang."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from toolkit.launch import network
from toolkit.launch.rank_rendezvous import serve_store

_LATENCY_REPEATS, _BANDWIDTH_REPEATS = 10, 3
_BANDWIDTH_BYTES = 16 << 20
NO_ANSWER = "no answer in"
Found = TypeVar("Found")


def in_time(seconds: float, work: Callable[[], Found], failed: Callable[[str], Found]) -> Found:
    """The value of `work`, or of `failed` with the error's text; what does not end goes on unheeded."""
    found: list[Found] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(failed(f"{type(error).__name__}: {error}"[:1000]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else failed(f"{NO_ANSWER} {seconds:.0f} s")


def see() -> dict[str, Any]:
    """What torch sees of this machine."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        import torch

        available = torch.cuda.is_available()
    distributed = torch.distributed.is_available()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if available else 0)]
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "accelerator": str(torch.accelerator.current_accelerator() or "cpu"),
        "devices": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus and torch.version.cuda and distributed else None,
        "gloo": distributed and torch.distributed.is_gloo_available(),
        "warnings": [str(warning.message)[:500] for warning in heard if "CUDA" in str(warning.message)],
    }


def all_reduce(
    rank: int, world: int, address: str, port: int, backends: Sequence[str], seconds: float
) -> dict[str, dict[str, Any]]:
    """Backend -> {ok, latency_ms, mbytes_per_second, error}; the next one is tried where one worked.

    `seconds` are for each backend.
    """
    found: dict[str, dict[str, Any]] = {}
    for backend in backends:
        if all(said["ok"] for said in found.values()):
            work = functools.partial(_all_reduce, rank, world, address, port, backend, timedelta(seconds=seconds))
            found[backend] = in_time(seconds + 1.0, work, lambda why: {"ok": False, "error": why})
    return found


def _all_reduce(rank: int, world: int, address: str, port: int, backend: str, timeout: timedelta) -> dict[str, Any]:
    """The bandwidth is that of a machine's line in a ring, as nccl-tests have it: 2 (n - 1) / n bytes sent per byte."""
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        if rank == 0:
            store = serve_store(address, network.listen(port, network.address_to_listen(address, local=False)), timeout)
        else:
            store = distributed.TCPStore(address, port, None, False, timeout)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    group = distributed.new_group(backend=backend, timeout=timeout)
    device = "cuda:0" if backend == "nccl" else "cpu"

    def fastest(numel: int, repeats: int) -> float:
        durations = []
        for _ in range(1 + repeats):  # the first one connects
            numbers = torch.full((numel,), float(rank + 1), device=device)
            float(numbers[0])  # waits for the device
            begun = time.perf_counter()
            distributed.all_reduce(numbers, group=group)
            total = float(numbers[-1])
            durations.append(time.perf_counter() - begun)
            if total != world * (world + 1) / 2:
                raise ArithmeticError(f"the sum over {world} machines is {total}, not {world * (world + 1) / 2}")
        return min(durations[1:])

    latency, duration = fastest(1, _LATENCY_REPEATS), fastest(_BANDWIDTH_BYTES // 4, _BANDWIDTH_REPEATS)
    rate = 2 * (world - 1) / world * _BANDWIDTH_BYTES / duration / 1e6
    return {"ok": True, "latency_ms": latency * 1000, "mbytes_per_second": rate}
