"""Model FLOPs utilization: what part of its device's peak a step's useful arithmetic is.

Counted as in Chowdhery et al. 2022, "PaLM", appendix B: a parameter takes 6 operations per token (2 forward, 4
backward), attention 12 x layers x hidden size x length per token; nothing is counted for padding, for embeddings, which
are looked up, and for activations that are computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from toolkit.pretrained import full_attention_up_to
from toolkit.utils.modules import unwrapped

# Dense bf16 or fp16 operations a second, as NVIDIA's data sheets have them (without sparsity).
_PEAK_TERAFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148,
    "A100": 312, "A800": 312, "A10G": 70, "A10": 125, "A30": 165, "A40": 150, "L40S": 362, "L40": 181, "L4": 121,
    "V100": 125, "T4": 65, "RTX 4090": 165, "RTX 3090": 71, "RTX A6000": 155,
}  # fmt: skip


def peak_flops(device_name: str, mixed_precision: str) -> float | None:
    """Of one device; None where it is not known, and in float32."""
    words = device_name.replace("-", " ")
    known = (peak for name, peak in _PEAK_TERAFLOPS.items() if f" {name} " in f" {words} ")
    return next(known, 0) * 1e12 or None if mixed_precision in ("bf16", "fp16") else None


def training_flops(model: torch.nn.Module) -> Callable[[np.ndarray], float] | None:
    """Lengths of texts -> operations of a training step on them; None where the config does not say how many layers
    read how much (an encoder-decoder, a model of one's own). All layers are taken to attend to the whole text, a
    BigBird's to its blocks."""
    config: Any = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size")]
    if None in sizes or getattr(config, "is_encoder_decoder", False):
        return None
    layers, hidden = (int(size) for size in sizes if size is not None)
    looked_up = {id(weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)
                 for weight in part.parameters()}  # fmt: skip
    # a frozen weight has no gradient of its own; ds_numel: under ZeRO-3 a parameter may be empty here
    per_token = sum((6 if weight.requires_grad else 4) * getattr(weight, "ds_numel", weight.numel())
                    for weight in model.parameters() if id(weight) not in looked_up)  # fmt: skip
    sparse = getattr(config, "attention_type", "") == "block_sparse"

    def count(lengths: np.ndarray) -> float:  # (samples,)
        read = lengths.astype(float)
        if sparse:
            short = lengths <= full_attention_up_to(config.block_size, config.num_random_blocks)
            read = np.where(short, read, (5 + config.num_random_blocks) * config.block_size)
        return float((lengths * (per_token + 12 * layers * hidden * read)).sum())

    return count


def utilization(accelerator: Accelerator, model: torch.nn.Module) -> Callable[[np.ndarray, float], float] | None:
    """(lengths of a step's texts, its seconds) -> its MFU over all devices; None where it cannot be known."""
    name = torch.cuda.get_device_name(accelerator.device) if accelerator.device.type == "cuda" else ""
    peak, count = peak_flops(name, accelerator.mixed_precision), training_flops(unwrapped(model))
    if peak is None or count is None:
        return None
    available = peak * accelerator.num_processes
    return lambda lengths, seconds: count(lengths) / seconds / available


def describe(steps: Iterable[Mapping[str, Any]]) -> str:
    """Lines of metrics.jsonl -> what part of all tokens was padding, and the MFU; nothing for those of older runs."""
    found = [line for line in steps if "padding" in line]
    if not found:
        return ""
    tokens = sum(line["tokens"] for line in found)
    padded = sum(line["tokens"] / (1 - line["padding"]) for line in found)
    seconds = [line["samples"] / line["samples_per_second"] for line in found]
    used = sum((line.get("mfu") or 0) * each for line, each in zip(found, seconds, strict=True)) / sum(seconds)
    mfu = f"; {used:.1%} of the devices' peak arithmetic used (MFU)" if any(line.get("mfu") for line in found) else ""
    return f"training: {1 - tokens / padded:.1%} of all tokens were padding{mfu}"
