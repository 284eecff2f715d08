"""recipes/cls.py, which counts the bytes that the collectives of each step send.

    python tests/ranks_worker.py [settings and launch options of recipes/cls.py]

In the run's folder it writes `sent.jsonl`, a line per step from the second on: the bytes that a ring sends from
one rank for each kind of collective (Patarasu and Yuan 2009).
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes import cls
from toolkit import launch
from toolkit.run import Run

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
    if run._steps.done == 1:
        _collectives.__enter__()  # to the end of the run
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        with (run.folder.path / "sent.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(_collectives.bytes) + "\n")
    _collectives.bytes.clear()


def main() -> None:
    with mock.patch.object(Run, "_log_steps", log_and_count):
        cls.main()
    _collectives.__exit__(None, None, None)


if __name__ == "__main__":
    launch.run(main)
