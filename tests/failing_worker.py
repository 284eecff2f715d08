"""Runs recipes/cls.py and ends or stops one of its processes after step 4. Its tracker writes a file `late` with its
steps when it is closed, not before.

python tests/failing_worker.py HOW RANK ARGUMENTS_OF_THE_RECIPE
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
STEPS = 4


def fail() -> None:
    raise ValueError("a bug in the recipe")


def interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(3.1)
    signal.raise_signal(signal.SIGINT)


def exit_once() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(7)


def log_late() -> None:
    from accelerate.tracking import TensorBoardTracker

    steps: list[Any] = []

    def finish(tracker: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            Path(tracker.logging_dir, "late").write_text(json.dumps(steps), encoding="utf-8")

    TensorBoardTracker.log = lambda tracker, values, step: steps.append(step)  # type: ignore
    TensorBoardTracker.finish = finish  # type: ignore[method-assign]


WAYS: dict[str, Callable[[], object]] = {
    "fails": fail,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(0),
    "exits once": exit_once,
    "is interrupted twice": interrupt_twice,
    "stands still": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}

if __name__ == "__main__":
    import torch

    from recipes import cls
    from toolkit import launch
    from toolkit.training.steps import Step

    how, rank = sys.argv[1:3]
    if "--config_file" not in sys.argv:
        del sys.argv[1:3]
        log_late()
        micro_batches = Step.micro_batches

        def ending(step: Any, model: Any) -> Iterator[Any]:
            if step.number == STEPS + 1:
                if torch.distributed.is_initialized():
                    torch.distributed.barrier()  # rank 0 has logged step 4
                if os.environ.get("RANK", "0") == rank:
                    WAYS[how]()
            yield from micro_batches(step, model)

        Step.micro_batches = ending  # type: ignore[method-assign]
    launch.run(cls.main)
