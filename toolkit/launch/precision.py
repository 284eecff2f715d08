"""`--mixed_precision auto`: by a config file, or else what the hardware computes fast (a CPU: `trial`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

AUTO = "auto"
# CUDA capabilities: the RTX 30, A10 and A100 have bf16; V100, T4 and the RTX 20 are fast in fp16, older ones are not
_HAS_BF16, _HAS_FAST_FP16 = (8, 0), (7, 0)


def auto_precision(launch_config: Mapping[str, Any] | None, device: int | None) -> tuple[str, str]:
    """(no, bf16 or fp16, why): by a config file, or else what this process's GPU is fast in. Of a CPU (`device`
    None) its name does not tell: still auto, for a trial.

    `launch_config` is the file that `accelerate launch` was given; None where no such launcher started this process.
    """
    if enabled := enabled_in_deepspeed_config():
        return enabled, "the DeepSpeed config says so"
    setting = os.environ.get("ACCELERATE_MIXED_PRECISION")
    # accelerate's launcher writes `no` where nothing was set
    if setting == "no" and launch_config is not None and launch_config.get("mixed_precision") is None:
        setting = None
    if setting:
        return setting, "the accelerate config says so"
    return (AUTO, "") if device is None else _of_gpu(device)


def enabled_in_deepspeed_config() -> str | None:
    """What the DeepSpeed config of this launch turns on by itself, not by "auto"; None where there is no such file."""
    file = os.environ.get("TOOLKIT_DEEPSPEED_CONFIG") or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    config = json.loads(Path(file).read_text(encoding="utf-8")) if file and Path(file).is_file() else {}
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), None)


def _of_gpu(device: int) -> tuple[str, str]:
    import torch

    if not torch.cuda.is_available():
        return "no", f"nothing is known of {torch.accelerator.current_accelerator()}"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip or capability >= _HAS_BF16:
        return "bf16", f"{name} has it"
    if capability >= _HAS_FAST_FP16:
        return "fp16", f"{name} has no bf16"
    return "no", f"{name} is fast in neither bf16 nor fp16"


def choose_matmul_precision(accelerator: Accelerator) -> None:
    """On a GPU TF32 for what stays in fp32 beside bf16 or fp16, whoever chose that; nowhere else."""
    import torch

    coarse = accelerator.device.type == "cuda" and accelerator.mixed_precision != "no"
    torch.set_float32_matmul_precision("high" if coarse else "highest")
