"""Runs recipes/cls.py and ends one of its processes after step 4.

python tests/failing_worker.py HOW RANK ARGUMENTS_OF_THE_RECIPE
"""

from __future__ import annotations

import os
import signal
import sys
import threading
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


def hang_when_stopped() -> None:
    signal.raise_signal(signal.SIGTERM)
    threading.Event().wait()


WAYS: dict[str, Callable[[], object]] = {
    "fails": fail,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is interrupted twice": interrupt_twice,
    "hangs when it is stopped": hang_when_stopped,
}

if __name__ == "__main__":
    from recipes import cls
    from toolkit import launch
    from toolkit.training.steps import Step

    how, rank = sys.argv[1:3]
    if "--config_file" not in sys.argv:
        del sys.argv[1:3]
        micro_batches = Step.micro_batches

        def ending(step: Any, model: Any) -> Iterator[Any]:
            if step.number == STEPS + 1 and os.environ.get("RANK", "0") == rank:
                WAYS[how]()
            yield from micro_batches(step, model)

        Step.micro_batches = ending  # type: ignore[method-assign]
    launch.run(cls.main)
