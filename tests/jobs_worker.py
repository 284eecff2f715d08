"""Runs recipes several times in one group of processes. Tests call `run_jobs`; those of tests/matrix.py share processes
with other files.

    python tests/jobs_worker.py JOBS.json [--config_file ...]     a list of lists: a module with a `main`, its arguments
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.matrix_rank import reset
from tests.runs import Finished, recipe
from toolkit import launch


def run_jobs(
    folder: Path, way: Sequence[str], jobs: Sequence[Sequence[Any]], seconds: float = 300, **options: Any
) -> Finished:  # fmt: skip
    """Runs all jobs in the processes of `way`; each must succeed. Writes jobs.json to `folder`."""
    words = [write_jobs(folder, jobs), *way]
    return recipe(*words, script="tests/jobs_worker.py", seconds=seconds, **options).succeeded()


def write_jobs(folder: Path, jobs: Sequence[Sequence[Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "jobs.json"
    path.write_text(json.dumps([[str(word) for word in job] for job in jobs]), encoding="utf-8")
    return path


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))  # recipes written by tests
    for module, *arguments in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.argv = [f"{module.replace('.', '/')}.py", *arguments]
        importlib.import_module(module).main()
        reset()


if __name__ == "__main__":
    launch.run(main)
