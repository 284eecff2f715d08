"""toolkit/launch/precision.py: the precision that `--mixed_precision auto` chooses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.launch.precision import auto_precision, choose_matmul_precision


@pytest.fixture(autouse=True)
def _no_precision(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [((9, 0), "bf16"), ((8, 6), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "no")],
)
def test_precision_of_a_gpu(capability: tuple[int, int], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    precision, why = auto_precision(None, 1)
    assert precision == chosen
    assert "GPU 1" in why


@pytest.mark.parametrize(
    ("launched", "variable", "chosen"),
    [
        (None, None, "auto"),
        (None, "no", "no"),  # the user's own variable
        ({"distributed_type": "MULTI_GPU"}, "no", "auto"),  # the default of accelerate's launcher
        ({"mixed_precision": False}, "no", "no"),  # `no` in YAML 1.1
        ({"mixed_precision": "no"}, "no", "no"),
        ({"mixed_precision": "bf16"}, "bf16", "bf16"),
        ({"mixed_precision": "fp16"}, "fp16", "fp16"),
    ],
)
def test_precision_of_a_launch_config(
    launched: dict[str, Any] | None, variable: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    assert auto_precision(launched, None)[0] == chosen


@pytest.mark.parametrize(("enabled", "chosen"), [(True, "bf16"), ("auto", "auto"), (False, "auto")])
def test_precision_of_a_deepspeed_config(
    enabled: bool | str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": enabled}, "fp16": {"enabled": "auto"}}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert auto_precision({}, None)[0] == chosen


@pytest.mark.parametrize(
    ("device", "precision", "matmul"),
    [("cuda", "bf16", "high"), ("cuda", "fp16", "high"), ("cuda", "no", "highest"), ("cpu", "bf16", "highest")],
)
def test_tf32_follows_the_final_precision(device: str, precision: str, matmul: str) -> None:
    """Whether auto, a resumed checkpoint or `--mixed_precision` chose it."""
    accelerator: Any = SimpleNamespace(device=torch.device(device), mixed_precision=precision)
    try:
        choose_matmul_precision(accelerator)
        assert torch.get_float32_matmul_precision() == matmul
    finally:
        torch.set_float32_matmul_precision("highest")
