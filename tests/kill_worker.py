"""Runs recipes/cls.py and kills one of its processes (SIGKILL) at a chosen moment inside the saving.

    python tests/kill_worker.py EVENT RANK ARGUMENTS_OF_THE_RECIPE

EVENT counts what the process of that RANK does to files under checkpoints/: opening, renaming, removing.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

_WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "shutil.rmtree")


def kill_at(event: int) -> None:
    seen = 0

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if name in _WATCHED and any("/checkpoints/" in str(argument) for argument in arguments[:2]):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    from recipes import cls
    from toolkit import launch

    event, rank = sys.argv[1:3]
    del sys.argv[1:3]
    if os.environ.get("RANK", "0") == rank and "--config_file" not in sys.argv:
        kill_at(int(event))
    launch.run(cls.main)
