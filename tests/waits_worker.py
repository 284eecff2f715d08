"""Runs recipes/cls.py and notes, step by step, what makes a process wait: collectives, and numbers read by the host.

NOTES=NOTES.json python tests/waits_worker.py ARGUMENTS_OF_THE_RECIPE
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from recipes import cls
from toolkit import launch
from toolkit.training.steps import Steps

STEPS: list[dict[str, list[str]]] = []
finish, begin, clip = Steps.finish, Steps.__iter__, Accelerator.clip_grad_norm_


class Waits(TorchDispatchMode):
    noted: list[str]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.name()
        if name.startswith("c10d::") or "local_scalar_dense" in name:
            self.noted.append(name)
        return function(*arguments, **(options or {}))


WAITS = Waits()


def noting_begin(steps: Steps) -> Iterator[Any]:
    with WAITS:
        for step in begin(steps):
            STEPS.append({"computing": [], "clipping": [], "logging": [], "after": []})
            WAITS.noted = STEPS[-1]["computing"]
            yield step

    if steps.accelerator.is_main_process:
        Path(os.environ["NOTES"]).write_text(json.dumps(STEPS))


def noting_clip(*given: Any) -> Any:
    WAITS.noted = STEPS[-1]["clipping"]
    norm = clip(*given)
    WAITS.noted = STEPS[-1]["computing"]
    return norm


def noting_finish(steps: Steps, step: Any) -> Iterator[Any]:
    WAITS.noted = STEPS[-1]["logging"]
    yield from finish(steps, step)
    WAITS.noted = STEPS[-1]["after"]


# as on a GPU, where a mask is not looked at
masking_utils._ignore_bidirectional_mask_sdpa = lambda *given: False
Steps.__iter__, Steps.finish = noting_begin, noting_finish  # type: ignore[method-assign]
Accelerator.clip_grad_norm_ = noting_clip

if __name__ == "__main__":
    launch.run(cls.main)
