"""recipes/cls.py, which counts the bytes that the collectives of each step send.

    python tests/ranks_worker.py [settings and launch options of recipes/cls.py]

In the run's folder it writes `first_step_seconds`, since the command started, and `sent-HOST.jsonl`, a line per step:
`asked`, the bytes that a ring sends from one rank for each kind of collective (Patarasu and Yuan 2009), and `sent`, the
bytes that this host's interfaces have sent so far, also between its own processes.
"""

import json
import os
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes import cls
from toolkit import launch
from toolkit.run import Run

_LAUNCHER = "TESTS_LAUNCHER_STARTED"
_log_steps = Run._log_steps


class Collectives(TorchDispatchMode):
    """Counts the bytes that a ring sends from one rank for each collective of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0].strip("_")
            sizes = [
                tensor.nbytes for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)
            ]
            world = torch.distributed.get_world_size()
            whole = max(sizes, default=0) if "gather" in name or "scatter" in name else sum(sizes)
            self.bytes[name] += int(whole * (world - 1) / world * (2 if "allreduce" in name else 1))
        return func(*args, **(kwargs or {}))


_collectives = Collectives()


def log_and_count(run: Run, finished: Any) -> None:
    _log_steps(run, finished)
    number = run._steps.done
    if number == 1:
        _collectives.__enter__()  # to the end of the run
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        sent = sum(one.bytes_sent for one in psutil.net_io_counters(pernic=True).values())
        line = {"step": number, "asked": dict(_collectives.bytes), "sent": sent}
        with (run.folder.path / f"sent-{socket.gethostname()}.jsonl").open(
            "a", encoding="utf-8"
        ) as file:
            file.write(json.dumps(line) + "\n")
    if number == 1 and run.accelerator.is_main_process:
        seconds = time.time() - float(os.environ[_LAUNCHER])
        (run.folder.path / "first_step_seconds").write_text(f"{seconds:.1f}")
    _collectives.bytes.clear()


def main() -> None:
    os.environ.setdefault(_LAUNCHER, str(psutil.Process().create_time()))
    with mock.patch.object(Run, "_log_steps", log_and_count):
        cls.main()
    _collectives.__exit__(None, None, None)


if __name__ == "__main__":
    os.environ.setdefault(_LAUNCHER, str(psutil.Process().create_time()))  # for its child processes
    launch.run(main)
