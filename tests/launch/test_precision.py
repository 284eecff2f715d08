"""Promises: `--mixed_precision auto` is what this hardware computes fast, or what a config enables;
all ranks compute in the same precision."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runs import fork, free_port, start
from toolkit.launch import precision

XEON, AMD = "Intel(R) Xeon(R) Platinum 8481C", "AMD EPYC 9B14"


@pytest.fixture(autouse=True)
def _no_launcher(no_launcher: None) -> None:
    pass


@pytest.mark.parametrize(
    ("capability", "chosen"), [((8, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "no")]
)
def test_a_gpu(capability: tuple[int, int], chosen: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert precision.auto_precision("cuda") == chosen


@pytest.mark.parametrize(
    ("name", "able", "chosen"),
    [
        (AMD, ["avx512_bf16"], "bf16"),  # 2.1 times as fast as fp32
        (XEON, ["avx512_bf16", "amx_bf16"], "bf16"),
        (XEON, ["avx512_bf16"], "no"),  # 1.4 times as slow
        (AMD, ["avx2"], "no"),
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
