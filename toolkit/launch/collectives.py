"""What torch knows of collectives: how many this process has begun, whether it waits in one, and NCCL's errors."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any


def count() -> int:
    """How many collectives this process has begun, over all groups of all ranks."""
    with contextlib.suppress(RuntimeError):  # a group is being created or destroyed
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends())
    return 0


def nccl_error() -> str:
    """TIMEOUT or COMM_ERROR after one, in which the main thread waits forever; otherwise empty."""
    with contextlib.suppress(RuntimeError):
        errors = [each.get_error().name for each in backends() if hasattr(each, "get_error")]  # gloo raises them
        return next((error for error in errors if error != "SUCCESS"), "")
    return ""


def backends() -> set[Any]:
    """Backends of the groups of all ranks: under FSDP2 on GPUs NCCL for tensors, gloo for objects."""
    distributed: Any = sys.modules.get("torch.distributed")
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):  # no groups; one is being created or destroyed
        world = distributed.get_world_size()
        groups = [group for group in list(distributed.distributed_c10d._world.pg_map) if group.size() == world]
        return {group._get_backend(device) for group in groups for device in group._device_types}
    return set()


def waits() -> bool:
    """Whether NCCL has not finished a collective that this process has begun. gloo's record is not in order."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace_json", lambda _: "{}")
    with contextlib.suppress(RuntimeError, ValueError, LookupError):  # torch may change its private record
        groups = json.loads(dump(False)).get("pg_status") or {}  # False: without its 2000 collectives, which take 0.2 s
        states = [(group["last_enqueued_collective"], group["last_completed_collective"]) for group in groups.values()]
        return any(int(begun) > int(completed) for begun, completed in states)
    return False
