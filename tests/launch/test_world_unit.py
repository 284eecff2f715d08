"""toolkit/launch/world.py: what was asked for, and the checks that need no second process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config import config_args

from tests.conftest import REPOSITORY
from toolkit.errors import UserError
from toolkit.launch import same_everywhere, wait_for_all, world
from toolkit.launch.environment import MARKER, Place
from toolkit.launch.world import _check_devices, _launch_of, how_launched, requested_processes, verify_world

DDP = str(REPOSITORY / "accelerate_configs" / "ddp.yaml")
SINGLE = str(REPOSITORY / "accelerate_configs" / "single.yaml")
ALONE = Place("python", 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("python /bin/accelerate launch --num_processes 2 cls.py", 2),
        ("python /bin/accelerate launch --num_processes=3 --multi_gpu cls.py", 3),
        ("python /bin/accelerate launch --num-processes 4 cls.py", 4),
        (f"python /bin/accelerate launch --config_file {DDP} cls.py", 2),
        (f"python /bin/accelerate launch --config_file={SINGLE} cls.py", 1),
        (f"python /bin/accelerate launch --config_file {SINGLE} --num_processes 5 cls.py", 5),
        ("python /bin/accelerate launch --num_processes 2 -m toolkit", 2),
        ("python -m accelerate.commands.launch --num_processes 2 cls.py", 2),
        ("/bin/accelerate-launch --num_processes 2 cls.py", 2),
        # after the script: the script's own
        ("python /bin/accelerate launch cls.py --num_processes 2", None),
        (f"python /bin/accelerate launch cls.py --config_file {DDP}", None),
        ("python /bin/accelerate launch cls.py", None),
        ("python /bin/accelerate launch --config_file nowhere.yaml cls.py", None),
        ("python /bin/accelerate launch --num_processes two cls.py", None),
    ],
)
def test_what_a_launchers_command_line_asks_for(
    line: str, asked: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none.yaml"))  # the user's own
    assert (_launch_of(line.split()) or {}).get("num_processes") == asked


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("python /bin/accelerate launch cls.py", (2, DDP)),
        (f"python /bin/accelerate launch --config_file {SINGLE} cls.py", (1, SINGLE)),
        ("python /bin/accelerate launch --num_processes 5 cls.py", (5, "accelerate launch --num_processes")),
    ],
)
def test_the_users_own_file_counts_where_nothing_is_named(
    line: str, asked: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_args, "default_config_file", DDP)
    found = _launch_of(line.split()) or {}
    assert (found["num_processes"], found["source"]) == asked


def test_without_a_launcher_one_process_is_requested_processes(no_launcher: None) -> None:
    assert requested_processes(ALONE) == (1, "python")
    assert how_launched()["config_file"] is None


class _Parent:
    """A process above this one."""

    def __init__(self, line: str) -> None:
        self.line = line.split()

    def cmdline(self) -> list[str]:
        return self.line


@pytest.mark.parametrize(
    ("lines", "asked"),
    [
        (["bash", "python /bin/accelerate launch --num_processes 2 cls.py"], (2, "accelerate launch --num_processes")),
        (["python launch --num_processes 2 cls.py"], (1, "python")),
        (["python cls.py", "bash"], (1, "python")),
    ],
)
def test_an_accelerate_launch_above_this_process_is_seen(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], asked: tuple[int, str]
) -> None:
    class Process:
        def parents(self) -> list[_Parent]:
            return [_Parent(line) for line in lines]

    monkeypatch.delenv(MARKER, raising=False)
    monkeypatch.setattr(world.psutil, "Process", Process)
    assert requested_processes(ALONE) == asked


@pytest.fixture
def accelerator(no_launcher: None) -> Accelerator:
    return Accelerator(cpu=True)


def test_a_world_that_is_the_one_requested(accelerator: Accelerator) -> None:
    verify_world(accelerator, ALONE)


def test_a_world_that_is_not_the_one_requested(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARKER, json.dumps({"num_processes": 4, "config_file": "my.yaml"}))
    with pytest.raises(UserError, match=r"my\.yaml asks for 4 processes, and 1 joined"):
        verify_world(accelerator, ALONE)


def test_one_process_waits_for_nobody(accelerator: Accelerator) -> None:
    wait_for_all(accelerator, "nothing", patience_seconds=0)
    same_everywhere(accelerator, "nothing", "x")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.mark.parametrize("count", [0, 4, 8])
def test_enough_gpus(gpus: Callable[[int], None], count: int) -> None:
    gpus(count)
    _check_devices(Place("torchrun", 3, 4, 3, 4))


def test_more_processes_than_gpus(gpus: Callable[[int], None]) -> None:
    gpus(2)
    with pytest.raises(UserError, match=r"4 processes .* 2 GPUs: pass --num_processes 2"):
        _check_devices(Place("torchrun", 3, 4, 3, 4))


def test_a_scheduler_that_shows_each_process_its_own_gpu(
    gpus: Callable[[int], None], no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    _check_devices(Place("srun", 1, 2, 1, 2))
    assert world.os.environ["LOCAL_RANK"] == "0"
    _check_devices(Place("srun", 0, 2, 0, 2))  # the first one sees one GPU too, and that is no fault


def test_gpus_do_not_count_on_the_cpu(gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_cpu: true` in the config file."""
    gpus(1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    _check_devices(Place("accelerate", 1, 2, 1, 2))
