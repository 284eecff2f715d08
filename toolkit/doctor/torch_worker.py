"""A process that imports torch for the doctor: says what torch sees, then, if told to, takes part in an all-reduce.

Started as a file of its own (it imports nothing of this package), so that a torch that crashes on import or hangs in
a collective is a finding. It reads one line of JSON from its input and ends when that is closed; it writes lines of
JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

_MEGABYTE = 1 << 20
_REPEATS = 3


def main() -> None:
    """Ends with the process that started it, however that ends."""
    orders: list[dict[str, Any]] = []
    arrived = threading.Event()
    try:
        _say(_what_torch_sees())
    except BaseException:
        _say({"broken": traceback.format_exc()[-2000:]})
        _leave(1)
    threading.Thread(target=_listen, args=(orders, arrived), daemon=True).start()
    arrived.wait()
    for name, value in orders[0]["env"].items():
        os.environ.setdefault(name, value)
    for backend in orders[0]["backends"]:
        _say({"begun": backend})
        try:
            _say({"backend": backend, "ok": True, **_all_reduce(backend, orders[0])})
        except BaseException as error:
            _say({"backend": backend, "ok": False, "error": f"{type(error).__name__}: {error}"[:1000]})
    _leave(0)


def _listen(orders: list[dict[str, Any]], arrived: threading.Event) -> None:
    for line in sys.stdin:
        orders.append(json.loads(line))
        arrived.set()
    _leave(0)  # whoever started this is gone, or has no further use for it


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _leave(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)  # a process group that is broken can hang when it is taken down


def _what_torch_sees() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        import torch

        available = torch.cuda.is_available()
        distributed = torch.distributed.is_available()
        return {
            "version": str(torch.__version__),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "available": available,
            "accelerator": str(torch.accelerator.current_accelerator() or "cpu"),
            "devices": _devices(torch) if available else [],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if available and distributed else None,
            "gloo": distributed and torch.distributed.is_gloo_available(),
            "warnings": [str(warning.message)[:500] for warning in heard if "CUDA" in str(warning.message)],
        }


def _devices(torch: Any) -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": properties.name, "memory": properties.total_memory, "capability": capability})
    return found


def _all_reduce(backend: str, order: dict[str, Any]) -> dict[str, Any]:
    """Every machine gives ones; checks the sum, and says how many seconds the fastest of a few took."""
    import torch
    from torch import distributed

    rank, world, size = order["rank"], order["world_size"], order["megabytes"] * _MEGABYTE
    started = time.monotonic()
    patience = timedelta(seconds=order["seconds"])
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if not distributed.is_initialized():
        store = distributed.TCPStore(
            order["address"], order["port"], world, rank == 0, patience, wait_for_workers=False
        )
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
        group = None
    else:
        group = distributed.new_group(backend="nccl", timeout=patience)
    numbers = torch.empty(size // 4, dtype=torch.float32, device=device)
    durations = []
    for _ in range(1 + _REPEATS):
        numbers.fill_(float(rank + 1))
        begun = time.monotonic()
        distributed.all_reduce(numbers, group=group)
        total = float(numbers[-1])  # waits for the device
        durations.append(time.monotonic() - begun)
        if total != world * (world + 1) / 2:
            raise ArithmeticError(f"the sum over {world} machines is {total}, not {world * (world + 1) / 2}")
    return {"seconds": min(durations[1:]), "total_seconds": time.monotonic() - started, "megabytes": order["megabytes"]}


if __name__ == "__main__":
    main()
