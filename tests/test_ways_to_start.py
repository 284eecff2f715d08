"""Promises: every way to start a run starts the requested world, with the same losses; Ctrl-C is one line."""

import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.matrix import REVIEWS, runs
from tests.runs import WAYS, Finished, begin, failed, fork, losses_of, recipe, slow_but, start

SCRIPT = "recipes/cls.py"
SETTINGS = [*REVIEWS, "--max_steps", 3, "--per_device_batch_size", 4]
TORCHRUN = ["torchrun", "--nproc_per_node", "2", SCRIPT]
ZERO1, ZERO2, ZERO3, DDP = (WAYS[f"{name} x2"] for name in ("zero1", "zero2", "zero3", "ddp"))
STAGE_3 = ["--deepspeed_config", "ds_configs/zero3.json"]
# name -> (the words before the settings, processes, stage of ZeRO)
COMMANDS: dict[str, tuple[list[str], int, int]] = {
    "python and a file": ([sys.executable, SCRIPT, *ZERO3], 2, 3),
    "deepspeed, another config": (["deepspeed", "--num_gpus", "2", SCRIPT, *STAGE_3], 2, 3),
    "torchrun": (TORCHRUN, 2, 0),
    "accelerate, the file before": (["accelerate", "launch", *ZERO2, SCRIPT], 2, 2),
    "deepspeed": (["deepspeed", SCRIPT], 1, 2),
    "torchrun and a file": ([*TORCHRUN, *ZERO1], 2, 1),
}


def assert_run(done: Finished, run: Path, processes: int, stage: int = 0) -> None:
    done.succeeded()
    world = json.loads((run / "config.json").read_text())["world"]
    assert world["num_processes"] == processes
    assert world["distributed_type"] == ("DEEPSPEED" if stage else "MULTI_CPU")
    assert not stage or world["deepspeed"]["zero_optimization"]["stage"] == stage
    expected = runs("single").run("each way to start", "recipes.cls", SETTINGS)
    assert losses_of(run) == pytest.approx(losses_of(expected), rel=1e-5)


@pytest.mark.parametrize("name", slow_but(COMMANDS, *list(COMMANDS)[:5]))
def test_command(name: str, tmp_path: Path) -> None:
    (program, *words), processes, stage = COMMANDS[name]
    words += [*SETTINGS, "--output_dir", str(tmp_path / "run")]
    if program == sys.executable:
        done = recipe(*words[1:])
    else:
        # one as typed: two interpreters share no state
        done = start([program, *words], fresh=name == "deepspeed, another config")
    assert_run(done, tmp_path / "run", processes, stage)


@pytest.mark.parametrize("text", ['{"zero_optimization": {"stage": 2,}}', "{}"])
def test_deepspeed_config_that_is_not_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    words = ["--deepspeed_config", tmp_path / "ds.json", "--output_dir", tmp_path / "run"]
    assert failed(*SETTINGS, *words).startswith(f"{tmp_path / 'ds.json'}: ")


def test_schedulers_variables(tmp_path: Path) -> None:
    """Two processes with only the variables that Slurm sets for a task of `srun --ntasks 2` on one node join."""
    command = [SCRIPT, *SETTINGS, "--output_dir", tmp_path / "run"]
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_TASKS_PER_NODE": "2",
              "SLURM_STEP_NODELIST": socket.gethostname()}  # fmt: skip
    ranks = [common | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    for process in [fork(command, variables) for variables in ranks]:
        assert_run(process.finish(200), tmp_path / "run", 2)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs mpirun (apt-get install openmpi-bin)")
def test_mpirun(tmp_path: Path) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    words = ["mpirun", *root, "--oversubscribe", "-np", "2", sys.executable, SCRIPT]
    finished = start([*words, *SETTINGS, "--output_dir", tmp_path / "run"])
    assert_run(finished, tmp_path / "run", 2)


def test_file_after_the_script_and_a_taken_port(tmp_path: Path) -> None:
    """A second job on the machine uses another port. `--num_processes` after the script overrides the file."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        way = [*DDP, "--num_processes", "3", "--main_process_port", port]
        script = [SCRIPT, *SETTINGS, "--output_dir", tmp_path / "run"]
        finished = start(["accelerate", "launch", *script, *way])
    assert_run(finished, tmp_path / "run", 3)


def _imports_torch(process: psutil.Process) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    except ProcessLookupError:  # it has exited, as some helpers of a launcher do
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("who", ["one process", "the launcher", "its processes"])
def test_ctrl_c_during_imports(who: str, tmp_path: Path) -> None:
    """Sent to all processes, as by a terminal."""
    way = [] if who == "one process" else DDP
    command = [sys.executable, SCRIPT, "--output_dir", str(tmp_path / "run"), *way]
    started = begin(command)
    first, watched = psutil.Process(started.pid), []
    while sum(map(_imports_torch, watched)) < (2 if who == "its processes" else 1):
        time.sleep(0.01)
        assert started.poll() is None
        watched = first.children() if who == "its processes" else [first]
    os.killpg(started.pid, signal.SIGINT)
    done = started.finish(60)
    assert done.code in (130, -signal.SIGINT), done.err  # a shell shows 130 for both
    assert done.err in ("", "interrupted\n")
