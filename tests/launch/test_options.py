"""Promises: what follows the script overrides the config file, and starts what both ask for;
whatever would be ignored, or start another world, is an error."""

import json
import os
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.conftest import REPOSITORY
from tests.faults import refusal
from tests.launch.test_environment import DEEPSPEED, OPEN_MPI, SRUN, TORCHRUN
from tests.launch.test_machines import ELSEWHERE, FIRST, pretend_network
from toolkit.launch import environment
from toolkit.launch.environment import TIMEOUTS, timeout_seconds, timeout_variable
from toolkit.launch.machines import DEFAULT_PORT, PLACEHOLDER
from toolkit.launch.options import (
    Request,
    accelerate_environment,
    clean_environment,
    count_processes,
    plan_launch,
    split_arguments,
    take_options,
)

SCRIPT = str(REPOSITORY / "recipes" / "cls.py")
CONFIGS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))
DEEPSPEED_FILES = sorted((REPOSITORY / "ds_configs").glob("*.json"))
by_name = attrgetter("name")


DDP = "--config_file accelerate_configs/ddp.yaml"
TWO_NODES = f"--config_file accelerate_configs/2node.yaml --main_process_ip {FIRST}"


def planned(path: Path | str, words: str = "") -> Request:
    parsed, _ = split_arguments(["--config_file", str(path), *words.split()])
    return plan_launch(parsed, [SCRIPT, "--seed", "3"], {})


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> None:
    """Nothing was launched, no host name is resolved outside, and `FIRST` is another machine's address."""
    pretend_network(monkeypatch, [ELSEWHERE])
    for name in ("NODE_RANK", "SLURM_NODEID", *map(timeout_variable, TIMEOUTS)):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("argv", "options", "rest"),
    [
        ("a.yaml --config-file=x.yaml --seed 3", {"config_file": "x.yaml"}, "a.yaml --seed 3"),
        ("--main-process-port 5", {"main_process_port": "5"}, ""),
        ("--local_rank=1 --train_file t", {"local_rank": "1"}, "--train_file t"),  # deepspeed's
        ("num_processes --train_file config_file", {}, "num_processes --train_file config_file"),
        ("--config_file a --config_file b", {"config_file": "b"}, ""),
    ],
)
def test_split(argv: str, options: dict[str, Any], rest: str) -> None:
    parsed, remaining = split_arguments(argv.split())
    assert {name: value for name, value in vars(parsed).items() if value is not None} == options
    assert remaining == rest.split()


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=by_name)
def test_deepspeed_files(path: Path) -> None:
    loaded = json.loads(path.read_text())
    zero = loaded["zero_optimization"]
    assert zero["stage"] == int(path.stem[4])
    assert ("offload_optimizer" in zero) == ("offload" in path.stem)
    assert ("offload_param" in zero) == (path.stem == "zero3_offload")
    assert not {"optimizer", "scheduler"} & set(loaded)
    line = f"deepspeed_config_file: ds_configs/{path.name}\n"
    assert [config for config in CONFIGS if line in config.read_text()]


@pytest.mark.parametrize("path", CONFIGS, ids=by_name)
def test_plan_of_each_shipped_file(path: Path) -> None:
    config = load_config_from_file(str(path))  # accelerate itself accepts it
    assert "mixed_precision" not in yaml.safe_load(path.read_text())  # the hardware decides
    machines, words = 1, ""
    if path.name.startswith("2node"):
        assert (config.main_process_ip, config.main_process_port) == (PLACEHOLDER, DEFAULT_PORT)
        machines, words = 2, "--main_process_ip gpu1 --machine_rank 1 --num_processes 16"
    request = planned(path, words)
    assert (request.config_file, request.command()[2:]) == (path, [SCRIPT, "--seed", "3"])
    assert (request.machines.count, request.machines.rank) == (machines, machines - 1)
    assert request.processes == (16 if machines == 2 else 1 if path.stem == "single" else 2)
    strategy = path.stem.removeprefix("2node").removeprefix("_")
    env = accelerate_environment(request)
    file = f"ds_configs/{strategy}.json" if strategy.startswith("zero") else None
    assert env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") == file
    assert ("ACCELERATE_USE_DEEPSPEED" in env) == bool(file)
    assert ("ACCELERATE_USE_FSDP" in env) == (strategy == "fsdp2")


@pytest.mark.parametrize(
    ("kind", "machines", "processes"),
    [("MULTI_GPU", 1, 8), ("DEEPSPEED", 2, 16), ("MULTI_CPU", 2, 2), ("NO", 1, 1)],
)
def test_default_processes(
    kind: str, machines: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    options, config = split_arguments([])[0], {"distributed_type": kind}
    assert count_processes(options, config, Path("mine.yaml"), machines) == processes


@pytest.mark.parametrize(
    ("words", "match"),
    [
        # each machine would silently train on its own
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
    ],
)
def test_refused_before_a_launch(words: str, match: str) -> None:
    refusal(take_options, [SCRIPT, *words.split()], match=match)


@pytest.mark.parametrize(
    "line", ["- a", "a: [", "num_processes: 2", "distributed_type: MEGATRON_LM"]
)
def test_invalid_config_files(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(line)
    refusal(planned, path, says=[str(path)])


def test_options_override_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # files are found from another folder
    file = "accelerate_configs/zero2.yaml"
    request = planned(file, "--num_processes 7 --max_restarts 3")
    assert request.config_file == REPOSITORY / file
    assert (request.processes, request.max_restarts) == (7, 3)


OTHERS = {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "NODE_RANK": "1"}


@pytest.mark.parametrize("outer", [TORCHRUN, DEEPSPEED, OPEN_MPI, SRUN])
def test_clean_environment(outer: dict[str, str]) -> None:
    cleaned = clean_environment(outer | OTHERS)
    assert environment.place_of(cleaned) == environment.Place("python", 0, 1, 0, 1)
    assert cleaned.items() >= OTHERS.items()


def test_a_file_for_cpus(tmp_path: Path) -> None:
    """`accelerate launch` would start one process."""
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    request = planned(path)
    assert request.processes == 2
    assert accelerate_environment(request)["ACCELERATE_USE_CPU"] == "true"


def test_only_local_rank_0_relaunches() -> None:
    os.environ.update(TORCHRUN)
    with pytest.raises(SystemExit) as left:
        take_options([SCRIPT, *DDP.split()])
    assert left.value.code == 0


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
    monkeypatch: pytest.MonkeyPatch, outer: dict[str, str], before: str, behind: str, says: str
) -> None:
    """Each would silently train another way than requested, or a model per machine."""
    words = [SCRIPT, *behind.split()]
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
    assert timeout_seconds(option) == TIMEOUTS[option]
    words = [SCRIPT, f"--{option}", "77", "--seed", "3"]
    assert take_options(words) == ([SCRIPT, "--seed", "3"], None)
    assert timeout_seconds(option) == 77
