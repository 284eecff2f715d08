"""Started by tests/utils/test_memory.py: recipes/cls.py in processes that have little memory left once they train.

From its first step on, the process of LIMITED_RANK (`all` for each of them) may take 16 MiB more.
"""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes import cls
from toolkit import launch
from toolkit.training.steps import Step, Steps

_MORE_BYTES = 16 * 2**20
_steps = Steps.__iter__


def limited_steps(steps: Steps) -> Iterator[Step]:
    if os.environ["LIMITED_RANK"] in ("all", str(steps.accelerator.process_index)):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return _steps(steps)


if __name__ == "__main__":
    Steps.__iter__ = limited_steps  # type: ignore[method-assign]
    launch.run(cls.main)
