"""Runs recipes/cls.py, in which one of the processes comes to harm.

    python tests/failing_worker.py HOW RANK ARGUMENTS_OF_THE_RECIPE

HOW is what that rank does after step 4 (WAYS). Its tracker writes a file `late` with its steps when it is closed, not
before. Or HOW is a number, and the rank is killed at this event of those that change checkpoints/; or `little memory`:
from the first step on the rank (`all` for each of them) may take 16 MiB more.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
STEPS = 4
_CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "shutil.rmtree")


def fail() -> None:
    raise ValueError("a bug in the recipe")


def interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(3.1)
    signal.raise_signal(signal.SIGINT)


def exit_once() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(7)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: dict[str, Callable[[], object]] = {
    "fails": fail,
    "is killed": kill,
    "exits": lambda: os._exit(0),
    "exits once": exit_once,
    "is interrupted twice": interrupt_twice,
    "stands still": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def log_late() -> None:
    from accelerate.tracking import TensorBoardTracker

    steps: list[Any] = []

    def finish(tracker: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            Path(tracker.logging_dir, "late").write_text(json.dumps(steps), encoding="utf-8")

    TensorBoardTracker.log = lambda tracker, values, step: steps.append(step)  # type: ignore
    TensorBoardTracker.finish = finish  # type: ignore[method-assign]


def kill_at(event: int) -> None:
    seen = 0

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if name in _CHANGES and any("/checkpoints/" in str(argument) for argument in arguments[:2]):
            seen += 1
            if seen == event:
                kill()

    sys.addaudithook(hook)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 16 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def come_to_harm(how: str, is_rank: bool) -> None:
    """Patches the loop of this process, which is the rank or not."""
    import torch

    from toolkit.training.steps import Step, Steps

    begin, micro_batches = Steps.__iter__, Step.micro_batches

    def limited(steps: Steps) -> Iterator[Step]:
        if how == "little memory" and is_rank:
            limit_memory()
        return begin(steps)

    def ending(step: Any, model: Any) -> Iterator[Any]:
        if how in WAYS and step.number == STEPS + 1:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # rank 0 has logged step 4
            if is_rank:
                WAYS[how]()
        yield from micro_batches(step, model)

    Steps.__iter__, Step.micro_batches = limited, ending  # type: ignore[method-assign]


if __name__ == "__main__":
    from recipes import cls
    from toolkit import launch

    how, rank = sys.argv[1:3]
    if "--config_file" not in sys.argv:
        del sys.argv[1:3]
        is_rank = rank in ("all", os.environ.get("RANK", "0"))
        if how.isdigit() and is_rank:
            kill_at(int(how))
        log_late()
        come_to_harm(how, is_rank)
    launch.run(cls.main)
