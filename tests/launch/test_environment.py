"""Promises: every launcher's variables give torch's, with one address and port; what is incomplete
is an error; each process computes with its share of the cores."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from tests.runs import CONFIGS, start
from toolkit.launch.environment import MARKER, Place, place_of, set_torch_variables, user_threads
from toolkit.launch.options import clean_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu1",
            "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1"}  # fmt: skip
DEEPSPEED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-1@1"}  # fmt: skip
BY_HAND = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]",
        "SLURM_JOB_NODELIST": "gpu[01-09]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}  # fmt: skip
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
NOTEBOOK = BY_HAND | {"NODE_RANK": "0", "ACCELERATE_USE_CPU": "yes"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, Place("python", 0, 1, 0, 1)),
        (TORCHRUN, Place("torchrun", 3, 4, 1, 2)),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, Place("accelerate", 3, 4, 1, 2)),
        (DEEPSPEED, Place("deepspeed", 1, 2, 1, 2)),
        (OPEN_MPI, Place("mpirun", 1, 4, 1, 2)),
        (SRUN, Place("srun", 2, 4, 0, 2)),
        (BATCH_SCRIPT, Place("python", 0, 1, 0, 1)),  # no srun: one process, whatever was allocated
        (BY_HAND, Place("environment", 3, 8, 3, 8)),
        (BY_HAND | {"TOOLKIT_LAUNCH": "{}"}, Place("toolkit", 3, 8, 3, 8)),
        (NOTEBOOK, Place("accelerate", 3, 8, 3, 8)),
        # mpirun and torchrun inside a Slurm step: the inner launcher counts
        (SRUN | OPEN_MPI, Place("mpirun", 1, 4, 1, 2)),
        (SRUN | TORCHRUN, Place("torchrun", 3, 4, 1, 2)),
        # `srun --mpi=pmi2` sets these two, without MPI_LOCALRANKID (mpi_pmi2.c)
        (SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}, Place("srun", 2, 4, 0, 2)),
    ],
)
def test_place_of_each_launcher(env: dict[str, str], place: Place) -> None:
    assert place_of(env) == place


def test_environments_with_or_without_a_group() -> None:
    for env in ({}, TORCHRUN, BATCH_SCRIPT):
        settled = dict(env)
        assert set_torch_variables(settled) == place_of(env)
        assert settled == env
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert set_torch_variables(env) == Place("environment", 0, 1, 0, 1)
    assert env == {}  # with them accelerate would wait for a group


ONE_NODE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("task", "other"),
    [
        (SRUN | {"MASTER_ADDR": "gpu03"}, {"SLURM_STEP_ID": "1"}),
        (SRUN | {"MASTER_ADDR": "gpu03"}, {"SLURM_JOB_ID": "78"}),
        (SRUN | ONE_NODE, {"SLURM_STEP_ID": "1"}),
        (SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMIX_NAMESPACE": "prterun-2@1"}),
    ],
)
def test_a_port_for_each_job(task: dict[str, str], other: dict[str, str]) -> None:
    """The same in all of its tasks; an address and a port that are set stay."""
    ports = []
    for changes in ({}, {"SLURM_PROCID": "3"}, other):
        env = task | changes
        assert set_torch_variables(env).is_local == (env["MASTER_ADDR"] == "127.0.0.1")
        assert 20000 <= int(env["MASTER_PORT"]) < 32000
        ports.append(env["MASTER_PORT"])
    assert ports[0] == ports[1] != ports[2]
    env = task | {"MASTER_ADDR": "first", "MASTER_PORT": "12345"}
    set_torch_variables(env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("first", "12345")


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (TORCHRUN | {"RANK": "x"}, "RANK"),
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK"),
        (OPEN_MPI, "MASTER_ADDR"),
        (SRUN, "MASTER_ADDR"),
        (BY_HAND | {"MASTER_PORT": "29500"}, "MASTER_ADDR"),
        (BY_HAND | {"MASTER_ADDR": "gpu1"}, "MASTER_PORT"),
    ],
)
def test_invalid_or_incomplete_variables(env: dict[str, str], name: str) -> None:
    """Each process would train a model of its own."""
    refusal(set_torch_variables, dict(env), match=name)


SCRIPT = """
import os, torch
from toolkit import launch
from toolkit.launch.environment import place_of
from toolkit.launch.world import _set_threads
def main():
    os.sched_getaffinity = lambda _: set(range(8))
    _set_threads(place_of(os.environ))
    os.write(1, f"{torch.get_num_threads()} threads\\n".encode())
launch.run(main)
"""
TORCHRUN_2 = ["torchrun", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(
    ("variable", "launcher", "threads"),
    [("-uOMP_NUM_THREADS", TORCHRUN_2, 4), ("OMP_NUM_THREADS=1", [sys.executable], 1)],
)
def test_launchers_threads(variable: str, launcher: Any, threads: int, tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(SCRIPT)
    file = [] if launcher is TORCHRUN_2 else ["--config_file", CONFIGS / "ddp.yaml"]
    command = ["env", variable, *launcher, tmp_path / "threads.py", *file]
    finished = start(command, fresh=True).succeeded()
    assert finished.out.count(f"{threads} threads") == 2, finished


ONE = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, None), ({"OMP_NUM_THREADS": ""}, None), ({"OMP_NUM_THREADS": "many"}, None), (ONE, 1),
     (TORCHRUN | {"OMP_NUM_THREADS": "4"}, 4), (ONE | TORCHRUN, None), (ONE | {"ACCELERATE_X": "x"}, None),
     (ONE | TORCHRUN | {MARKER: "{}"}, 1), (ONE | DEEPSPEED, 1)],
)  # fmt: skip
def test_user_threads(env: dict[str, str], expected: int | None) -> None:
    """torchrun and accelerate set 1 where the user has set nothing."""
    assert user_threads(env) == expected
    kept = env.get("OMP_NUM_THREADS") if expected else None
    assert clean_environment(env).get("OMP_NUM_THREADS") == kept
