"""recipes/cls.py, which notes what a process waits for in each step; a job of tests/matrix.py.

In the run's folder notes.jsonl has a line per step. Part of the step ("computing", "clipping", "logging", "after") ->
the collectives and the numbers read by the host, each as [operator, the bytes that a ring sends from one rank].
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from recipes import cls
from toolkit.training.steps import Steps


class Waits(TorchDispatchMode):
    noted: list[tuple[str, int]]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.name()
        if name.startswith("c10d::"):
            self.noted.append((name, sent_bytes(name, arguments)))
        elif "local_scalar_dense" in name:
            self.noted.append((name, 0))
        return function(*arguments, **(options or {}))


def sent_bytes(name: str, arguments: Any) -> int:
    """From one rank of a ring (Patarasu and Yuan 2009)."""
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
    sizes = [tensor.nbytes for tensor in tensors]
    whole = max(sizes, default=0) if "gather" in name or "scatter" in name else sum(sizes)
    world = torch.distributed.get_world_size()
    return int(whole * (world - 1) / world * (2 if "allreduce" in name else 1))


def main() -> None:
    notes: list[dict[str, list[tuple[str, int]]]] = []
    waits = Waits()
    begin, finish, clip = Steps.__iter__, Steps.finish, Accelerator.clip_grad_norm_

    def noting_begin(steps: Steps) -> Iterator[Any]:
        with waits:
            for step in begin(steps):
                notes.append({"computing": [], "clipping": [], "logging": [], "after": []})
                waits.noted = notes[-1]["computing"]
                yield step

    def noting_clip(*arguments: Any) -> Any:
        waits.noted = notes[-1]["clipping"]
        norm = clip(*arguments)
        waits.noted = notes[-1]["computing"]
        return norm

    def noting_finish(steps: Steps, step: Any) -> Iterator[Any]:
        waits.noted = notes[-1]["logging"]
        yield from finish(steps, step)
        waits.noted = notes[-1]["after"]

    with (
        mock.patch.object(Steps, "__iter__", noting_begin),
        mock.patch.object(Steps, "finish", noting_finish),
        mock.patch.object(Accelerator, "clip_grad_norm_", noting_clip),
        # as on a GPU, where a mask is not looked at
        mock.patch.object(masking_utils, "_ignore_bidirectional_mask_sdpa", return_value=False),
    ):
        cls.main()
    if torch.distributed.get_rank() == 0:
        path = Path(sys.argv[sys.argv.index("--output_dir") + 1]) / "notes.jsonl"
        path.write_text("".join(json.dumps(note) + "\n" for note in notes))
