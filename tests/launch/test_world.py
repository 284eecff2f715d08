"""Promises: the processes are those that were requested; configs that this toolkit does not support are errors; each
process has its cores and its GPU; all compute in the precision that this hardware computes fast."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.commands.config import config_args
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.faults import refusal
from tests.runs import CONFIGS, fork, free_port, start
from toolkit.launch import environment, precision, strategy, world
from toolkit.launch.environment import MARKER, Place
from toolkit.launch.strategy import requested_processes
from toolkit.launch.world import verify_world

pytestmark = pytest.mark.usefixtures("no_launcher")
ALONE = Place("python", 0, 1, 0, 1)
DDP, SINGLE = str(CONFIGS / "ddp.yaml"), str(CONFIGS / "single.yaml")


def test_requested_processes(monkeypatch: Any) -> None:
    for default, line, requested in (
        (DDP, "python /bin/accelerate launch --num-processes=3 --multi_gpu -m toolkit", 3),
        (DDP, f"python -m accelerate.commands.launch --config_file={SINGLE} cls.py", 1),
        (DDP, f"/bin/accelerate-launch --config_file {SINGLE} --num_processes 5 cls.py", 5),
        # after the script: the script's own
        (DDP, f"python /bin/accelerate launch cls.py --config_file {SINGLE}", 2),
        (DDP, "python launch --num_processes 2 cls.py", 1),
    ):
        monkeypatch.setattr(config_args, "default_config_file", default or "none.yaml")
        parent = SimpleNamespace(cmdline=line.split)
        monkeypatch.setattr(environment.psutil, "Process", {os.getppid(): parent}.get)
        assert requested_processes(ALONE)[0] == requested


def test_wrong_world_size(accelerator: Accelerator, monkeypatch: Any) -> None:
    """`accelerate launch` silently starts one process for a config file for CPUs."""
    verify_world(ALONE)
    monkeypatch.setenv(MARKER, json.dumps({"num_processes": 4, "config_file": "my.yaml"}))
    refusal(verify_world, ALONE, match=r"my\.yaml asks for 4 processes, and 1 joined")


ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
USES, FILE = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE"
ZERO3 = {"TOOLKIT_DEEPSPEED_CONFIG": "ds_configs/zero3.json"}
MINE = {USES: "true", FILE: "ds_configs/zero1.json", ACCUMULATION: "auto"}


@pytest.mark.parametrize(
    ("env", "chosen"), [({}, "zero2"), (ZERO3, "zero3"), (MINE, "zero1"), (MINE | ZERO3, "zero3")]
)
def test_deepspeed_config_after_a_script(env: dict[str, str], chosen: str) -> None:
    os.environ.update(env)
    launcher = "accelerate" if USES in env else "deepspeed"
    for _ in range(2):  # each model of the process
        assert strategy.set_deepspeed_variables(Place(launcher, 0, 1, 0, 1), "cpu")
        assert Path(os.environ[FILE]).stem == chosen
        assert (os.environ[USES], os.environ.get(ACCUMULATION)) == ("true", None)
        os.environ.pop("TOOLKIT_DEEPSPEED_CONFIG", None)


def test_a_valid_fsdp_config(accelerator: Accelerator) -> None:
    """`accelerate config` writes fsdp_cpu_ram_efficient_loading: true."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
    strategy.set_fsdp_variables()
    plugin = FullyShardedDataParallelPlugin()
    assert not plugin.cpu_ram_efficient_loading
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("FSDP_VERSION", "1", "fsdp_version: 2"),
        ("FSDP_IGNORED_MODULES", "bert.embeddings", "fsdp_ignored_modules"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "--gradient_checkpointing true"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "parallelism_config"),
    ],
)
def test_unsupported_configs(name: str, value: str, says: str) -> None:
    os.environ.update({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", name: value})
    refusal(strategy.refuse_unsupported, match=says)


def test_fsdp_with_what_it_cannot_do(accelerator: Accelerator, monkeypatch: Any) -> None:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_OFFLOAD_PARAMS="true", **ZERO3)
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    refusal(world._set_sharded_type, PartialState(), True, says=["fsdp_offload_params", "false"])
    refusal(strategy.set_deepspeed_variables, ALONE, "cpu", says=["DeepSpeed", "FSDP"])


def test_cores_per_process(monkeypatch: Any) -> None:
    """Four processes; with SLURM_CPUS_PER_TASK srun has bound each to its own cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    by_torchrun, by_srun = (Place(launcher, 0, 4, 0, 4) for launcher in ("torchrun", "srun"))
    assert world._cores_per_process(by_srun) == 2
    os.environ["SLURM_CPUS_PER_TASK"] = "8"
    assert world._cores_per_process(by_srun) == 8
    assert world._cores_per_process(by_torchrun) == 2


def test_more_processes_than_gpus() -> None:
    world._choose_gpu(Place("torchrun", 3, 4, 3, 4), 4)
    for place in Place("torchrun", 3, 4, 3, 4), Place("mpirun", 7, 8, 3, 4):  # one, two machines
        refusal(world._choose_gpu, place, 2, says=["4 processes", "2 GPUs", "--ntasks"])
    world._choose_gpu(Place("srun", 1, 2, 1, 2), 1)  # a scheduler shows each process one
    assert os.environ["LOCAL_RANK"] == "0"


XEON, AMD = "Intel(R) Xeon(R) Platinum 8481C", "AMD EPYC 9B14"


def test_a_gpu(monkeypatch: Any) -> None:
    table = {(8, 0): "bf16", (7, 5): "fp16", (7, 0): "fp16", (6, 1): "no"}
    for capability, chosen in table.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda each=capability: each)
        assert precision.auto_precision("cuda") == chosen


@pytest.mark.parametrize(
    ("name", "able", "chosen"),
    [
        (AMD, ["avx512_bf16"], "bf16"),  # 2.1 times as fast as fp32
        (XEON, ["avx512_bf16", "amx_bf16"], "bf16"),
        (XEON, ["avx512_bf16"], "no"),  # 1.4 times as slow
    ],
)
def test_a_cpu(name: str, able: list[str], chosen: str, monkeypatch: Any) -> None:
    capabilities = {"cpu_name": name, "num_sockets": 1, **dict.fromkeys(able, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert precision.auto_precision("cpu") == chosen
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # what launchers set by default
    assert precision.auto_precision("cpu") == chosen
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # by a config file
    assert precision.auto_precision("cpu") == "fp16"


@pytest.mark.parametrize(
    ("device", "setting", "matmul"),
    [("cuda", "bf16", "high"), ("cuda", "no", "highest"), ("cpu", "bf16", "highest")],
)
def test_tf32_in_16_bit_runs_on_a_gpu(device: str, setting: str, matmul: str) -> None:
    accelerator: Any = SimpleNamespace(device=torch.device(device), mixed_precision=setting)
    try:
        precision.choose_matmul_precision(accelerator)
        assert torch.get_float32_matmul_precision() == matmul
        assert device == "cpu" or torch.backends.cudnn.allow_tf32 is (matmul == "high")
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


SCRIPT = """
import os, sys
from toolkit import launch
import torch

torch.cpu.get_capabilities = lambda: {"amx_bf16": os.environ.get("RANK") == "0"}
launch.run(lambda: print(launch.make_accelerator(sys.argv[1]).mixed_precision))
"""


@pytest.mark.parametrize(
    ("settings", "chosen"), [(("auto", "auto"), "bf16"), (("no", "auto"), "no")]
)
def test_rank_0_decides(settings: tuple[str, str], chosen: str, tmp_path: Path) -> None:
    """Its hardware, or the checkpoint on its disk."""
    (tmp_path / "script.py").write_text(SCRIPT)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, setting in enumerate(settings):
        env = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(fork([tmp_path / "script.py", setting], env))
    assert [rank.finish().succeeded().out.split()[-1] for rank in ranks] == [chosen] * 2


def test_deepspeeds_json_that_enables_another(tmp_path: Path) -> None:
    """Accelerate would compute in bf16 for `no`."""
    script, file = tmp_path / "script.py", tmp_path / "ds.json"
    script.write_text(SCRIPT)
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    file.write_text(json.dumps(config | {"train_micro_batch_size_per_gpu": 1}))
    done = start(["python", script, "no", "--deepspeed_config", file])
    assert done.code == 1
    assert str(file) in done.error_lines[0]
    assert "bf16" in done.error_lines[0]
