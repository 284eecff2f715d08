"""Promises: every launcher's variables give torch's, with one address and port; each process computes with its share of
the cores; what follows the script overrides the config file. What is incomplete, would be ignored, or would start
another world, is an error."""

import os
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.faults import refusal
from tests.launch.test_machines import ELSEWHERE, FIRST, pretend_network
from tests.runs import CONFIGS, ROOT, start
from toolkit.launch import environment
from toolkit.launch import options as launch_options
from toolkit.launch.environment import TIMEOUTS, Place, place_of, set_torch_variables
from toolkit.launch.machines import DEFAULT_PORT, PLACEHOLDER
from toolkit.launch.options import Request, plan_launch, split_arguments, take_options

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


def test_place_of_each_launcher() -> None:
    for env, place in (
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
    ):
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


def test_a_port_for_each_job() -> None:
    """The same in all of its tasks; an address and a port that are set stay."""
    for task, other in (
        (SRUN | {"MASTER_ADDR": "gpu03"}, {"SLURM_STEP_ID": "1"}),
        (SRUN | ONE_NODE, {"SLURM_STEP_ID": "1"}),
        (SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMIX_NAMESPACE": "prterun-2@1"}),
    ):
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


def test_invalid_or_incomplete_variables() -> None:
    """Each process would train a model of its own."""
    for env, name in (
        (TORCHRUN | {"RANK": "x"}, "RANK"),
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK"),
        (OPEN_MPI, "MASTER_ADDR"),
        (SRUN, "MASTER_ADDR"),
        (BY_HAND | {"MASTER_PORT": "29500"}, "MASTER_ADDR"),
        (BY_HAND | {"MASTER_ADDR": "gpu1"}, "MASTER_PORT"),
    ):
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
     (ONE | TORCHRUN | {environment.MARKER: "{}"}, 1), (ONE | DEEPSPEED, 1)],
)  # fmt: skip
def test_user_threads(env: dict[str, str], expected: int | None) -> None:
    """torchrun and accelerate set 1 where the user has set nothing."""
    assert environment.user_threads(env) == expected
    kept = env.get("OMP_NUM_THREADS") if expected else None
    remaining = dict(env)
    launch_options.clean_environment(remaining)
    assert remaining.get("OMP_NUM_THREADS") == kept


RECIPE = str(ROOT / "recipes" / "cls.py")
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
by_name = attrgetter("name")
DDP = "--config_file accelerate_configs/ddp.yaml"
TWO_NODES = f"--config_file accelerate_configs/2node.yaml --main_process_ip {FIRST}"


def planned(path: Path | str, words: str = "") -> Request:
    parsed, _ = split_arguments(["--config_file", str(path), *words.split()])
    return plan_launch(parsed, [RECIPE, "--seed", "3"], {})


@pytest.fixture(autouse=True)
def _environment(monkeypatch: Any, no_launcher: None) -> None:
    """Nothing was launched, no host name is resolved outside, and `FIRST` is another machine's address."""
    pretend_network(monkeypatch, [ELSEWHERE])
    for name in ("NODE_RANK", "SLURM_NODEID", *map(environment.timeout_variable, TIMEOUTS)):
        monkeypatch.delenv(name, raising=False)


def test_split() -> None:
    for argv, options, rest in (
        ("a.yaml --config-file=x.yaml --seed 3", {"config_file": "x.yaml"}, "a.yaml --seed 3"),
        ("--main-process-port 5", {"main_process_port": "5"}, ""),
        ("num_processes --train_file config_file", {}, "num_processes --train_file config_file"),
        ("--config_file a --config_file b", {"config_file": "b"}, ""),
    ):
        parsed, remaining = split_arguments(argv.split())
        assert {name: value for name, value in vars(parsed).items() if value is not None} == options
        assert remaining == rest.split()


@pytest.mark.parametrize("path", SHIPPED, ids=by_name)
def test_plan_of_each_shipped_file(path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # files are found from another folder
    config = load_config_from_file(str(path))  # accelerate itself accepts it
    assert "mixed_precision" not in yaml.safe_load(path.read_text())  # the hardware decides
    machines, words = 1, ""
    if path.name.startswith("2node"):
        assert (config.main_process_ip, config.main_process_port) == (PLACEHOLDER, DEFAULT_PORT)
        machines, words = 2, "--main_process_ip gpu1 --machine_rank 1 --num_processes 16"
    request = planned(f"accelerate_configs/{path.name}", words)
    assert (request.config_file, request.command()[2:]) == (path, [RECIPE, "--seed", "3"])
    assert (request.machines.count, request.machines.rank) == (machines, machines - 1)
    assert request.processes == (16 if machines == 2 else 1 if path.stem == "single" else 2)
    strategy = path.stem.removeprefix("2node").removeprefix("_")
    env = launch_options.accelerate_environment(request)
    file = f"ds_configs/{strategy}.json" if strategy.startswith("zero") else None
    assert env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") == file
    if file:
        assert ("offload_optimizer" in (ROOT / file).read_text()) == ("offload" in strategy)
    assert ("ACCELERATE_USE_DEEPSPEED" in env) == bool(file)
    assert ("ACCELERATE_USE_FSDP" in env) == (strategy == "fsdp2")


def test_default_processes(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    count, options = launch_options.count_processes, split_arguments([])[0]
    cases = ("MULTI_GPU", 1, 8), ("DEEPSPEED", 2, 16), ("MULTI_CPU", 2, 2), ("NO", 1, 1)
    for kind, machines, processes in cases:
        config = {"distributed_type": kind}
        assert count(options, config, Path("mine.yaml"), machines) == processes


def test_refused_before_a_launch() -> None:
    for words, match in (
        (f"{DDP} --main_process_ip {FIRST}", "--main_process_ip"),
        (f"{DDP} --machine_rank 1", "--machine_rank"),
        (f"{TWO_NODES} --machine_rank 0 --num_processes 5", "cannot be divided.*--num_processes"),
        (f"{TWO_NODES} --machine_rank 0 --num_processes 1", "cannot be divided"),
        (f"{DDP} --num_processes 0", "num_processes"),
        (f"{DDP} --main_process_port 0", "main_process_port"),
        (f"{DDP} --max_restarts -1", "max_restarts.*-1"),
        ("--config_file accelerate_configs/zzz.yaml", r"zzz.*2node_zero3\.yaml"),
        ("--max_restarts", "max_restarts.*expected one argument"),
        ("--num_processes=2", "num_processes.*add --config_file"),
        ("--rendezvous_timeout=0", "rendezvous_timeout.*0"),
        ("--ddp_timeout=x", "ddp_timeout.*x"),
    ):
        refusal(take_options, [RECIPE, *words.split()], match=match)


@pytest.mark.parametrize(
    "line", ["- a", "a: [", "num_processes: 2", "distributed_type: MEGATRON_LM"]
)
def test_invalid_config_files(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(line)
    refusal(planned, path, says=[str(path)])


TORCHRUN_8 = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
BY_ACCELERATE = TORCHRUN_8 | {"ACCELERATE_USE_CPU": "no"}


@pytest.mark.parametrize(
    ("outer", "before", "behind", "says"),
    [
        # a config file for one machine, and several started
        (SRUN | {"SLURM_PROCID": "0"}, "", DDP, "2node.yaml"),
        # another number of processes
        (TORCHRUN_8, "", DDP, "--num_processes"),
        (TORCHRUN_8 | {"CROSS_SIZE": "1"}, "", DDP, "deepspeed started 8"),
        (TORCHRUN_8, "", f"{DDP} --num_processes 8", ""),
        (BY_ACCELERATE, "", DDP, ""),  # its default
        # options that the config file after the script replaces
        (BY_ACCELERATE, "--num-processes=4", DDP, "--num_processes"),
        (BY_ACCELERATE, "--use_fsdp", DDP, "--use_fsdp"),
        ({}, "--num_cpu_threads_per_process 2", f"{DDP} --num_processes 4", ""),
        ({}, "", TWO_NODES, ""),
    ],
)
def test_what_would_have_no_effect(
    monkeypatch: Any, outer: dict[str, str], before: str, behind: str, says: str
) -> None:
    """Each would silently train another way than requested, or a model per machine."""
    words = [RECIPE, *behind.split()]
    line = ["python", "/bin/accelerate", "launch", *before.split(), *words]
    parent = SimpleNamespace(cmdline=lambda: line)
    monkeypatch.setattr(environment.psutil, "Process", lambda _: parent)
    os.environ.update(outer)
    if says:
        refusal(take_options, words, says=[says])
    else:
        assert take_options(words)[1] is not None


@pytest.mark.parametrize("option", TIMEOUTS)
def test_timeouts_reach_the_processes(option: str) -> None:
    assert environment.timeout_seconds(option) == TIMEOUTS[option]
    words = [RECIPE, f"--{option}", "77", "--seed", "3"]
    assert take_options(words) == ([RECIPE, "--seed", "3"], None)
    assert environment.timeout_seconds(option) == 77
