"""Runs recipes/cls.py and ends or stops one of its processes after step 4. Its tracker `trackio` is a fake that writes
its steps when it is closed, not before.

python tests/failing_worker.py HOW RANK ARGUMENTS_OF_THE_RECIPE
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
STEPS = 4


def fail() -> None:
    raise ValueError("a bug in the recipe")


def interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(3.1)
    signal.raise_signal(signal.SIGINT)


class LateTracker:
    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, name: str) -> None:
        self.path, self.steps = Path(run_name), list[str]()  # the project is the file

    def start(self) -> None:
        pass

    def store_init_configuration(self, values: Any) -> None:
        pass

    def log(self, values: Any, step: int) -> None:
        self.steps.append(f"{step}\n")

    def finish(self) -> None:
        self.path.write_text("".join(self.steps), encoding="utf-8")


WAYS: dict[str, Callable[[], object]] = {
    "fails": fail,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(0),
    "is interrupted twice": interrupt_twice,
    "stands still": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}

if __name__ == "__main__":
    import torch
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from recipes import cls
    from toolkit import launch
    from toolkit.training.steps import Step

    how, rank = sys.argv[1:3]
    if "--config_file" not in sys.argv:
        del sys.argv[1:3]
        sys.modules["trackio"] = ModuleType("trackio")
        sys.modules["trackio"].__spec__ = ModuleSpec("trackio", None)
        LOGGER_TYPE_TO_CLASS["trackio"] = LateTracker  # type: ignore[assignment]
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
