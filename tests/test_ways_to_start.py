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

from tests.runs import Finished, begin, failed, fork, losses_of, recipe, slow_but, start

COMMANDS: dict[str, tuple[list[str], int, str]] = {
    # name -> (the words before the settings, processes, distributed type)
    "python and a file": (
        ["recipes/cls.py", "--config_file", "accelerate_configs/zero3.yaml"], 2, "DEEPSPEED"),
    "deepspeed x2, another config": (
        ["deepspeed", "--num_gpus", "2", "recipes/cls.py", "--deepspeed_config", "ds_configs/zero3.json"],
        2, "DEEPSPEED"),
    "torchrun": (["torchrun", "--nproc_per_node", "2", "recipes/cls.py"], 2, "MULTI_CPU"),
    "accelerate, file before the script": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml", "recipes/cls.py"], 2, "DEEPSPEED"),
    "deepspeed": (["deepspeed", "recipes/cls.py"], 1, "DEEPSPEED"),
    "torchrun and a file": (
        ["torchrun", "--nproc_per_node", "2", "recipes/cls.py", "--config_file", "accelerate_configs/zero1.yaml"],
        2, "DEEPSPEED"),
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(tiny_job: list[str]) -> list[str]:
    return [*tiny_job, "--max_steps", "3", "--global_batch_size", "12"]


def assert_run(
    finished: Finished, folder: Path, reference: Path, processes: int, kind: str
) -> None:
    finished.succeeded()
    world = json.loads((folder / "config.json").read_text())["world"]
    assert (world["num_processes"], world["distributed_type"]) == (processes, kind)
    assert losses_of(folder) == pytest.approx(losses_of(reference), rel=1e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", slow_but(COMMANDS, *list(COMMANDS)[:5]))
def test_command(name: str, settings: list[str], reference: Path, tmp_path: Path) -> None:
    words, processes, kind = COMMANDS[name]
    command = [*words, *settings, "--output_dir", tmp_path / "run"]
    fresh = name == "deepspeed x2, another config"  # as typed: two interpreters share no state
    finished = start(command, fresh=fresh) if words[0] != "recipes/cls.py" else recipe(*command[1:])
    assert_run(finished, tmp_path / "run", reference, processes, kind)
    if "deepspeed" in name:
        world = json.loads((tmp_path / "run" / "config.json").read_text())["world"]
        assert world["deepspeed"]["zero_optimization"]["stage"] == (3 if "another" in name else 2)


@pytest.mark.parametrize(
    "text", ['{"zero_optimization": {"stage": 2,}}', "{}"], ids=["no JSON", "no ZeRO"]
)
def test_deepspeed_config_that_is_not_valid(text: str, settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    words = ["--deepspeed_config", tmp_path / "ds.json", "--output_dir", tmp_path / "run"]
    assert failed(*settings, *words).startswith(f"{tmp_path / 'ds.json'}: ")


@pytest.mark.multiprocess
def test_schedulers_variables(settings: list[str], reference: Path, tmp_path: Path) -> None:
    """Two processes with only the variables that Slurm sets for a task of `srun --ntasks 2` on one node join."""
    command = ["recipes/cls.py", *settings, "--output_dir", tmp_path / "run"]
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_TASKS_PER_NODE": "2",
              "SLURM_STEP_NODELIST": socket.gethostname()}  # fmt: skip
    ranks = [common | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    for process in [fork(command, variables) for variables in ranks]:
        assert_run(process.finish(200), tmp_path / "run", reference, 2, "MULTI_CPU")


@pytest.mark.multiprocess
@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed (apt-get install openmpi-bin)"
)
def test_mpirun(settings: list[str], reference: Path, tmp_path: Path) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    words = ["mpirun", *root, "--oversubscribe", "-np", "2", sys.executable, "recipes/cls.py"]
    finished = start([*words, *settings, "--output_dir", tmp_path / "run"])
    assert_run(finished, tmp_path / "run", reference, 2, "MULTI_CPU")


@pytest.mark.multiprocess
def test_file_after_the_script_and_a_taken_port(
    settings: list[str], reference: Path, tmp_path: Path
) -> None:
    """A second job on the machine uses another port. `--num_processes` after the script overrides the file."""
    with socket.create_server(("", 0)) as taken:
        way = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "3", "--main_process_port",
               str(taken.getsockname()[1])]  # fmt: skip
        script = ["recipes/cls.py", *settings, "--output_dir", tmp_path / "run"]
        finished = start(["accelerate", "launch", *script, *way])
    assert_run(finished, tmp_path / "run", reference, 3, "MULTI_CPU")


MULTI_CPU = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 1
num_processes: 2
use_cpu: true
"""


@pytest.mark.multiprocess
def test_launcher_that_starts_too_few_processes(settings: list[str], tmp_path: Path) -> None:
    """`accelerate launch` silently starts one process for this file."""
    config, output = tmp_path / "cpu.yaml", tmp_path / "run"
    config.write_text(MULTI_CPU)
    words = ["accelerate", "launch", "--config_file", config, "recipes/cls.py"]
    done = start([*words, *settings, "--output_dir", output], fresh=True)
    assert done.code != 0
    assert "asks for 2 processes, and 1 joined" in done.error_lines[0]
    assert not output.exists()


def _imports_torch(process: psutil.Process) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    except ProcessLookupError:  # it has exited, as some helpers of a launcher do
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("who", ["one process", "the launcher", "its processes"])
def test_ctrl_c_during_imports(who: str, tmp_path: Path) -> None:
    """Sent to all processes, as by a terminal."""
    way = [] if who == "one process" else ["--config_file", "accelerate_configs/ddp.yaml"]
    command = [sys.executable, "recipes/cls.py", "--output_dir", str(tmp_path / "run"), *way]
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
