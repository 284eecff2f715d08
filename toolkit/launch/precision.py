"""`--mixed_precision auto`: the config file's value, or what the hardware computes fast (on a CPU see `trial`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

AUTO = "auto"
# CUDA capabilities: RTX 30, A10 and A100 have bf16; V100, T4 and RTX 20 have fast fp16, older GPUs do not
_HAS_BF16, _HAS_FAST_FP16 = (8, 0), (7, 0)


def auto_precision(launch_config: Mapping[str, Any] | None, device: int | None) -> tuple[str, str]:
    """(no, bf16 or fp16, why) by a config file, or else by this process's GPU. (auto, "") for a CPU (`device` None): it
    needs a trial.

    `launch_config` is the config of the `accelerate launch` that started this process, or None.
    """
    if enabled := enabled_in_deepspeed_config():
        return enabled, "the DeepSpeed config says so"
    setting = os.environ.get("ACCELERATE_MIXED_PRECISION")
    # accelerate's launcher sets `no` by default
    if setting == "no" and launch_config is not None and launch_config.get("mixed_precision") is None:
        setting = None
    if setting:
        return setting, "the accelerate config says so"
    return (AUTO, "") if device is None else _of_gpu(device)


def enabled_in_deepspeed_config() -> str | None:
    """The precision that this launch's DeepSpeed config enables by `true` (not "auto"), or None."""
    file = os.environ.get("TOOLKIT_DEEPSPEED_CONFIG") or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    config = json.loads(Path(file).read_text(encoding="utf-8")) if file and Path(file).is_file() else {}
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), None)


def _of_gpu(device: int) -> tuple[str, str]:
    import torch

    if not torch.cuda.is_available():
        return "no", f"unknown device {torch.accelerator.current_accelerator()}"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip or capability >= _HAS_BF16:
        return "bf16", f"{name} supports it"
    if capability >= _HAS_FAST_FP16:
        return "fp16", f"{name} has no bf16"
    return "no", f"{name} is fast in neither bf16 nor fp16"


def choose_matmul_precision(accelerator: Accelerator) -> None:
    """TF32 for the fp32 products of a bf16 or fp16 run on a GPU; nowhere else."""
    import torch

    coarse = accelerator.device.type == "cuda" and accelerator.mixed_precision != "no"
    torch.set_float32_matmul_precision("high" if coarse else "highest")
