"""Measures the pages of benchmarks/results again, on one machine, from one commit.

    make benchmarks                                         about two hours on two idle cores
    python benchmarks/every_page.py against_trainer start   these only

A page whose command fails keeps its old content, and the exit code is 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = "{folder}/run"
COMMANDS: dict[str, list[list[str]]] = {
    "start": [["start", "--write"]],
    "sameness": [["sameness", "--write"]],
    "checkpoints": [["checkpoints"]],
    "convert": [["convert", "--write"]],
    "against_trainer": [["against_trainer", "--write"]],
    "bigbird": [["bigbird", "--rounds", "2", "--repeats", "3", "--write"]],
    "data": [["data", "--rows", "1000000", "10000000"]],
    "predict": [
        ["../recipes/cls", "--output_dir", RUN, "--num_train_epochs", "1"],
        ["predict", f"{RUN}/model", "--rows", "5000", "--write"],
    ],
    "models": [["models"]],
    # hours where the CPU emulates fp16: only by name
    "precision": [["precision", "--write"]],
}


def main() -> int:
    pages = sys.argv[1:] or [page for page in COMMANDS if page != "precision"]
    unknown = [page for page in pages if page not in COMMANDS]
    if unknown or any(page.startswith("-") for page in pages):
        print(f"{__doc__}\nPages: {', '.join(COMMANDS)}")
        return 2
    failed = [page for page in pages if not make(page)]
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def make(page: str) -> bool:
    """Runs a page's commands. Returns False where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        for script, *words in COMMANDS[page]:
            command = [f"benchmarks/{script}.py", *(word.format(folder=folder) for word in words)]
            print(f"$ python {' '.join(command)}", flush=True)
            if subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode:
                return False
    return True


if __name__ == "__main__":
    sys.exit(main())
