"""`--mixed_precision auto`: what a config file says, or else what the hardware computes fast."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, listing

if TYPE_CHECKING:
    from accelerate import Accelerator

AUTO = "auto"
# CUDA capabilities: the RTX 30, A10 and A100 have bf16; V100, T4 and the RTX 20 are fast in fp16, older ones are not
_HAS_BF16, _HAS_FAST_FP16 = (8, 0), (7, 0)


def auto_precision(launch_config: Mapping[str, Any] | None, device: int | None) -> tuple[str, str]:
    """(no, bf16 or fp16, why): what a config file says, or else what this process's GPU (None: CPU) is fast in.

    `launch_config` is the file that `accelerate launch` was given; None where no such launcher started this process.
    """
    file = os.environ.get("TOOLKIT_DEEPSPEED_CONFIG") or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file and (said := _enabled_in(Path(file))):
        return said, f"{file} says so"
    said = os.environ.get("ACCELERATE_MIXED_PRECISION")
    # accelerate's launcher writes `no` where nobody said anything
    if said == "no" and launch_config is not None and launch_config.get("mixed_precision") is None:
        said = None
    if said:
        return said, "the accelerate config says so"
    return _of_cpu() if device is None else _of_gpu(device)


def _enabled_in(path: Path) -> str | None:
    """What a DeepSpeed config turns on by itself, not by "auto"."""
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True), None)


def _of_cpu() -> tuple[str, str]:
    """bf16 with AMX alone: without it, avx512_bf16 took 1.5 times as long as fp32 (benchmarks/results/predict.md)."""
    import torch

    if torch.cpu.get_capabilities().get("amx_bf16"):
        return "bf16", "this CPU has amx_bf16"
    return "no", "this CPU has no AMX"


def _of_gpu(device: int) -> tuple[str, str]:
    """With bf16, what is left in fp32 is multiplied in TF32."""
    import torch

    if not torch.cuda.is_available():
        return "no", f"nothing is known of {torch.accelerator.current_accelerator()}"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip or capability >= _HAS_BF16:
        torch.set_float32_matmul_precision("high")
        return "bf16", f"{name} has it"
    if capability >= _HAS_FAST_FP16:
        return "fp16", f"{name} has no bf16"
    return "no", f"{name} is fast in neither bf16 nor fp16"


def refuse_different(accelerator: Accelerator) -> None:
    """Raises UserError, in every process, where one computes in one precision and another in another."""
    from accelerate.utils import gather_object

    found: list[str] = gather_object([accelerator.mixed_precision])
    if len(set(found)) == 1:
        return
    ranks = {name: [rank for rank, each in enumerate(found) if each == name] for name in sorted(set(found))}
    weakest = next(name for name in ("no", "fp16", "bf16") if name in ranks)
    raise UserError(
        f"mixed precision is {', '.join(f'{name} on ranks {listing(listed)}' for name, listed in ranks.items())}: pass "
        f"--mixed_precision {weakest} everywhere"
    )
