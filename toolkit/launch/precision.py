"""Autocast, kernels, and `--mixed_precision auto`: what the config file enables, or what this
hardware computes fast.

A CPU computes bf16 faster than fp32 if it has AMX, or if it is AMD's with avx512_bf16; a Xeon with
avx512_bf16 and no AMX took 1.4 times as long in bf16 as in fp32.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

# CUDA capabilities: RTX 30, A10 and A100 have bf16; V100, T4 and RTX 20 have fast fp16 only
_HAS_BF16, _HAS_FAST_FP16 = (8, 0), (7, 0)


def autocast(accelerator: Accelerator) -> torch.autocast:
    """`accelerator.autocast()`, which does nothing under DeepSpeed."""
    import torch

    precision = accelerator.mixed_precision
    if precision not in ("bf16", "fp16"):
        return torch.autocast("cpu", enabled=False)  # not every device has autocast
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast(accelerator.device.type, dtype)


def auto_precision(device: str) -> str:
    """no, bf16 or fp16: what the accelerate config enables, or else this process's device computes
    fast. `device`: its type.

    Its `no` counts for nothing: launchers set it by default.
    """
    import torch

    enabled = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if enabled != "no":
        return enabled
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        if torch.version.hip or capability >= _HAS_BF16:
            return "bf16"
        if capability >= _HAS_FAST_FP16:
            return "fp16"
    if device == "cpu":
        able = torch.cpu.get_capabilities()
        is_amd = "AMD" in str(able.get("cpu_name"))
        if able.get("amx_bf16") or (is_amd and able.get("avx512_bf16")):
            return "bf16"
    return "no"


def choose_matmul_precision(accelerator: Accelerator) -> None:
    """TF32 for the fp32 products and convolutions of a bf16 or fp16 run on a GPU; nowhere else.

    And torch's own attention kernels in place of cuDNN's, which plan for each new shape of a batch:
    with texts of up to 512 tokens Trainer took about 2.7 times as long with cuDNN's on an H100.
    """
    import torch

    on_gpu = accelerator.device.type == "cuda"
    use_tf32 = on_gpu and accelerator.mixed_precision != "no"
    torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
    if not on_gpu:
        return
    # torch.compile does not accept the newer name
    with warnings.catch_warnings(action="ignore"):
        # by default fp32 convolutions use it, too
        torch.backends.cudnn.allow_tf32 = use_tf32
    torch.backends.cuda.enable_cudnn_sdp(False)
