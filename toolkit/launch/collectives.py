"""What torch knows of collectives: how many this process has begun, whether it waits in one, and NCCL's errors; and
where a main thread is."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MAX_FRAMES = 6
_LIBRARY = re.compile("^(?!.*-packages/toolkit/).*(/lib/python[0-9]|-packages/)|^<frozen|/toolkit/launch/failure.py$")
_COLLECTIVES = re.compile("-packages/(torch/distributed/|deepspeed/|torch/nn/parallel/distributed.py)")
_BACKWARD = "torch/autograd/graph.py"  # from C++ DDP reduces gradients in it
_Call = tuple[str, int, str]  # file, line, function


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
    """Whether this process waits in a collective: its main thread is in one (gloo, whose record is not in order), or in
    DDP's backward and computes nothing, or NCCL has not finished one that it has begun."""
    file = next((file for file, *_ in _main_thread_calls()), "")
    if _COLLECTIVES.search(file):
        return True
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace_json", lambda _: "{}")
    with contextlib.suppress(RuntimeError, ValueError, LookupError):  # torch may change its private record
        groups = json.loads(dump(False)).get("pg_status") or {}  # False: without its 2000 collectives, which take 0.2 s
        states = [(group["last_enqueued_collective"], group["last_completed_collective"]) for group in groups.values()]
        if states:
            return any(int(begun) > int(completed) for begun, completed in states)
    return file.endswith(_BACKWARD) and _main_thread_is_idle()


def _main_thread_is_idle() -> bool:
    if sys.platform != "linux":
        return False
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(0.05)
    return time.clock_gettime(clock) - before < 0.005


def main_thread_position() -> str:
    return _format(_main_thread_calls())


def _main_thread_calls() -> list[_Call]:
    """Innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = list[_Call]()
    with contextlib.suppress(AttributeError):  # a frame that returns meanwhile may have another object as its caller
        for each, line in traceback.walk_stack(frame):
            calls.append((each.f_code.co_filename, line, each.f_code.co_name))
    return calls


def position_of(error: BaseException) -> str:
    calls = traceback.walk_tb(error.__traceback__)
    return _format([(each.f_code.co_filename, line, each.f_code.co_name) for each, line in calls][::-1])


def describe_crash(dump: str) -> str:
    """`crashed (Fatal Python error: Aborted) at cls.py:31 main`, from a dump of `faulthandler`: its last thread is the
    main one. Empty without a dump."""
    calls = _crashed_calls(dump)
    return f"crashed ({dump.splitlines()[0]}) at {_format(calls)}" if calls else ""


def is_in_collective(dump: str) -> bool:
    return any(_COLLECTIVES.search(file) or file.endswith(_BACKWARD) for file, *_ in _crashed_calls(dump)[:1])


def _crashed_calls(dump: str) -> list[Any]:
    threads = dump.partition("Current thread's C stack trace")[0].split("(most recent call first):")  # Python 3.14
    return re.findall(r'File "(.+)", line (\d+) in (.+)', threads[-1])


def _format(calls: Sequence[_Call]) -> str:
    """`distributed_c10d.py:70 all_reduce < cls.py:31 main`: of libraries the innermost call alone, and of a long stack
    the script's line, too."""
    ours = [call for call in calls[1:] if not _LIBRARY.search(call[0])]
    script = [call for call in ours[_MAX_FRAMES - 1 :] if Path(call[0]).name == Path(sys.argv[0]).name]
    shown = [*calls[:1], *ours[: _MAX_FRAMES - 1], *script[:1]]
    return " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in shown) or "its end"
