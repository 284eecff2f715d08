"""Runs recipes/cls.py and ends, stops or limits one of its processes. Its tracker `trackio` is a fake that writes its
steps when it is closed, not before.

    python tests/failing_worker.py HOW RANK ARGUMENTS_OF_THE_RECIPE

HOW: one of WAYS, after step 4; `has little memory`: from its first step on it may take 16 MiB more, and RANK may be
`all`. Or a number: killed at this of its calls that open, rename or remove something under checkpoints/.
"""

import os
import resource
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
_WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "shutil.rmtree")


def fail() -> None:
    raise ValueError("a bug in the recipe")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(3.1)
    signal.raise_signal(signal.SIGINT)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 16 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


WAYS: dict[str, Callable[[], object]] = {
    "fails": fail,
    "is killed": kill,
    "exits": lambda: os._exit(0),
    "is interrupted twice": interrupt_twice,
    "has little memory": limit_memory,
    "stands still": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def kill_at(event: int) -> None:
    seen = 0

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if name in _WATCHED and any("/checkpoints/" in str(argument) for argument in arguments[:2]):
            seen += 1
            if seen == event:
                kill()

    sys.addaudithook(hook)


def act_after_some_steps(how: str, is_chosen: bool) -> None:
    import torch

    from toolkit.training.steps import Step

    micro_batches, steps = Step.micro_batches, 0 if how == "has little memory" else STEPS

    def acting(step: Any, model: Any) -> Iterator[Any]:
        if step.number == steps + 1:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # rank 0 has logged the steps
            if is_chosen:
                WAYS[how]()
        yield from micro_batches(step, model)

    Step.micro_batches = acting


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


if __name__ == "__main__":
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from recipes import cls
    from toolkit import launch

    how, rank = sys.argv[1:3]
    if "--config_file" not in sys.argv:  # otherwise this is the launcher
        del sys.argv[1:3]
        sys.modules["trackio"] = ModuleType("trackio")
        sys.modules["trackio"].__spec__ = ModuleSpec("trackio", None)
        LOGGER_TYPE_TO_CLASS["trackio"] = LateTracker
        is_chosen = rank in ("all", os.environ.get("RANK", "0"))
        if how in WAYS:
            act_after_some_steps(how, is_chosen)
        elif is_chosen:
            kill_at(int(how))
    launch.run(cls.main)
