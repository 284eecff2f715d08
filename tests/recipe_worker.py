"""Runs recipes/cls.py several times in one group of processes, since starting them is what takes long.

    python tests/recipe_worker.py JOBS.json [--config_file ...]

JOBS.json is a list of lists of the recipe's arguments.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes import cls
from toolkit import launch


def main() -> None:
    from accelerate.state import AcceleratorState, GradientState

    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for arguments in jobs:
        sys.argv = ["recipes/cls.py", *arguments]
        cls.main()
        gc.collect()
        AcceleratorState._reset_state(reset_partial_state=False)  # the processes stay together
        GradientState._reset_state()


if __name__ == "__main__":
    launch.run(main)
