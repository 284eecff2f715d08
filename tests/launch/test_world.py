"""Promises: a world that is not the one asked for is an error, as is a config that is ignored, or trains otherwise."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.commands.config import config_args
from accelerate.state import PartialState
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.conftest import REPOSITORY
from tests.faults import refusal
from toolkit.launch import environment, launch_info, require_equal, strategy, world
from toolkit.launch.environment import MARKER, Place, accelerate_launch_words
from toolkit.launch.strategy import parse_launch
from toolkit.launch.world import verify_world
from toolkit.utils import memory

DDP = str(REPOSITORY / "accelerate_configs" / "ddp.yaml")
SINGLE = str(REPOSITORY / "accelerate_configs" / "single.yaml")
ALONE = Place("python", 0, 1, 0, 1)
OPTION = "accelerate launch --num_processes"


@pytest.mark.parametrize(
    ("line", "requested"),
    [
        ("python /bin/accelerate launch --num_processes 2 cls.py", (2, OPTION)),
        ("python /bin/accelerate launch --num-processes=3 --multi_gpu -m toolkit", (3, OPTION)),
        (f"python /bin/accelerate launch --config_file {DDP} cls.py", (2, DDP)),
        (f"python -m accelerate.commands.launch --config_file={SINGLE} cls.py", (1, SINGLE)),
        (f"/bin/accelerate-launch --config_file {SINGLE} --num_processes 5 cls.py", (5, OPTION)),
        # after the script: the script's own
        (f"python /bin/accelerate launch cls.py --num_processes 2 --config_file {SINGLE}", None),
        ("python /bin/accelerate launch cls.py", None),
        ("python /bin/accelerate launch --config_file nowhere.yaml cls.py", None),
        ("python launch --num_processes 2 cls.py", None),
    ],
)
@pytest.mark.parametrize(
    "own", ["none.yaml", DDP], ids=["no file of the user's", "the user's own file"]
)
def test_parse_launch(
    line: str, requested: tuple[int, str] | None, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_args, "default_config_file", own)
    monkeypatch.setattr(
        environment.psutil, "Process", lambda _: SimpleNamespace(cmdline=line.split)
    )
    config = parse_launch(accelerate_launch_words() or ["cls.py"])
    if own == DDP and requested is None and "nowhere" not in line:  # names no file
        requested = 2, DDP
    assert (config.get("num_processes"), config.get("source")) == (requested or (None, None))


def test_mixed_precision_of_a_launch(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n"
    )
    for option, precision in (("", "bf16"), ("--mixed_precision fp16", "fp16")):
        words = f"--config_file {tmp_path}/mine.yaml {option} cls.py".split()
        assert parse_launch(words)["mixed_precision"] == precision


def test_command_is_known_after_its_launcher_has_ended(
    no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`deepspeed` ends at Ctrl-C, and the run prints the command later."""
    lines = ("python3 -m deepspeed.launcher.launch long.py", "/bin/python /bin/deepspeed long.py",
             "timeout 60 deepspeed long.py")  # fmt: skip
    above = [SimpleNamespace(cmdline=line.split) for line in lines]
    monkeypatch.setattr(environment.sys, "argv", ["long.py", "--local_rank=0"])
    monkeypatch.setattr(
        environment.psutil, "Process", lambda: SimpleNamespace(parents=lambda: above)
    )
    launch_info.cache_clear()
    assert launch_info()["command"] == "python /bin/deepspeed long.py"
    del above[1:]  # cached
    assert launch_info()["command"] == "python /bin/deepspeed long.py"
    launch_info.cache_clear()


def test_wrong_world_size(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_world(ALONE)
    assert launch_info()["config_file"] is None
    monkeypatch.setenv(MARKER, json.dumps({"num_processes": 4, "config_file": "my.yaml"}))
    refusal(verify_world, ALONE, match=r"my\.yaml asks for 4 processes, and 1 joined")


ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
ZERO3 = {"TOOLKIT_DEEPSPEED_CONFIG": "ds_configs/zero3.json"}
BY_ACCELERATE = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "mine.json",
}


@pytest.mark.parametrize(
    ("env", "launcher", "chosen"),
    [({}, "deepspeed", "zero2.json"), (ZERO3, "deepspeed", "zero3.json"), (BY_ACCELERATE, "accelerate", "mine.json"),
     (BY_ACCELERATE | ZERO3, "accelerate", "zero3.json"),
     (BY_ACCELERATE | {"ACCELERATE_USE_DEEPSPEED": "1", ACCUMULATION: "auto"}, "accelerate", "mine.json")],
)  # fmt: skip
def test_deepspeed_config_after_the_script_is_used(
    env: dict[str, str],
    launcher: str,
    chosen: str,
    no_launcher: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # each model of the process
        assert strategy.use_deepspeed(Place(launcher, 0, 1, 0, 1), "cpu")
        assert Path(world.os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).name == chosen
        assert (
            world.os.environ["ACCELERATE_USE_DEEPSPEED"],
            world.os.environ.get(ACCUMULATION),
        ) == ("true", None)
        monkeypatch.delenv("TOOLKIT_DEEPSPEED_CONFIG", raising=False)


def test_keys_of_an_fsdp_config(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate config` writes fsdp_cpu_ram_efficient_loading: true."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "")  # so that it is unset after the test
    monkeypatch.delenv("FSDP_AUTO_WRAP_POLICY")
    strategy.check_config()
    plugin = FullyShardedDataParallelPlugin()
    assert not plugin.cpu_ram_efficient_loading
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    for name, value, says in (("IGNORED_MODULES", "bert.embeddings", "remove it"),
                              ("ACTIVATION_CHECKPOINTING", "true", "--gradient_checkpointing true")):  # fmt: skip
        monkeypatch.setenv(f"FSDP_{name}", value)
        refusal(strategy.check_config, says=[f"fsdp_{name.lower()}", says])
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")  # torch raises: it pins the memory for a GPU
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    refusal(world._set_sharded_type, PartialState(), True, says=["fsdp_offload_params", "false"])
    for name, value in ZERO3.items():
        monkeypatch.setenv(name, value)
    refusal(
        strategy.use_deepspeed,
        ALONE,
        "cpu",
        says=["--deepspeed_config ds_configs/zero3.json", "FSDP"],
    )
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    refusal(strategy.check_config, match="parallelism_config")


def test_a_second_accelerator_is_sharded_too(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs accelerate looks at the plugin where the type is MULTI_GPU, and then sets it to FSDP."""
    state = PartialState()
    monkeypatch.setattr(state, "distributed_type", DistributedType.FSDP)
    world._set_sharded_type(state, False)
    assert state.distributed_type == DistributedType.MULTI_GPU


@pytest.mark.parametrize(
    ("launcher", "limit", "per_task", "threads"),
    [("torchrun", None, "8", 2), ("torchrun", "max 100000", None, 2), ("torchrun", "350000 100000", None, 1),
     ("srun", None, None, 2), ("srun", None, "8", 8),
     ("srun", None, "2", 2), ("srun", "350000 100000", "8", 4)],
)  # fmt: skip
def test_cores_per_process(
    launcher: str, limit: str | None, per_task: str | None, threads: int, no_launcher: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Four processes, of which Slurm has bound this one to 8 cores; in a container with a limit."""
    monkeypatch.setattr(world.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    world.os.environ |= {"SLURM_CPUS_PER_TASK": per_task} if per_task else {}
    assert world._cores_per_process(Place(launcher, 0, 4, 0, 4)) == threads


def test_require_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        (f"rank {rank}", {"mixed precision": name}) for rank, name in ((1, "fp16"), (2, "bf16"))
    ]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [*mine, *others])
    several: Any = SimpleNamespace(num_processes=3, process_index=0)
    words = "mixed precision is bf16 on rank 0, rank 2 and fp16 on rank 1"
    refusal(require_equal, several, "--mixed_precision", {"mixed precision": "bf16"}, match=words)


def test_more_processes_than_gpus(no_launcher: None) -> None:
    place = Place("torchrun", 3, 4, 3, 4)
    for enough in (4, 8):
        world._check_number_of_gpus(place, enough)
    refusal(world._check_number_of_gpus, place, 2, match="4 processes .* 2 GPUs: start 2 in all")
    refusal(
        world._check_number_of_gpus, Place("mpirun", 7, 8, 3, 4), 2, match="start 4 in all"
    )  # on two machines
    world._check_number_of_gpus(Place("srun", 1, 2, 1, 2), 1)  # a scheduler shows each process one
    assert world.os.environ["LOCAL_RANK"] == "0"
