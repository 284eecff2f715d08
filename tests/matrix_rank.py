"""A rank of a group of tests/matrix.py: runs the jobs that it reads from its standard input.

python tests/matrix_rank.py [CONFIG_FILE]     of accelerate: what `accelerate launch` would set is set
"""

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from toolkit.launch.options import accelerate_environment, plan_launch, split_arguments


def load(recipe: str) -> Any:
    """A module by its name, or by its path, which a test has written."""
    if not recipe.endswith(".py"):
        return importlib.import_module(recipe)
    spec: Any = importlib.util.spec_from_file_location(f"edited_{abs(hash(recipe))}", recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def run_job(recipe: str, *words: str) -> list[str]:
    """Runs it; returns its exception's class, text and traceback, or nothing."""
    sys.argv = [f"{recipe.removesuffix('.py').replace('.', '/')}.py", *words]
    try:
        load(recipe).main()
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            return [type(error).__name__, str(error) or repr(error), traceback.format_exc()]
    return []


def reset() -> None:
    """What a new process would begin with; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState

    gc.collect()
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


def use_cores(cores: list[int]) -> None:
    """Moves all threads to the cores of the worker that waits for the job."""
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        os.sched_setaffinity(int(thread.name), cores)


def main() -> None:
    rank = os.environ.get("RANK", "0")
    if len(sys.argv) > 1:
        options = split_arguments(["--config_file", sys.argv[1]])[0]
        os.environ.update(accelerate_environment(plan_launch(options, ["-"], {})))
    for line in sys.stdin:
        job = json.loads(line)
        reports = Path(job["reports"])
        log = os.open(reports / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        use_cores(job["cores"])
        # a hanging rank ends by itself
        faulthandler.dump_traceback_later(job["seconds"], exit=True, file=2)
        failure = run_job(*job["job"])
        reset()
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        draft = reports / f"rank{rank}.draft"
        draft.write_text(json.dumps(failure))
        draft.rename(reports / f"rank{rank}.json")
    os._exit(0)


if __name__ == "__main__":
    main()
