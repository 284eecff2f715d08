"""Model FLOPs utilization (MFU): a step's useful operations per second, relative to the peak of its devices.

Counted as in Chowdhery et al. 2022, "PaLM", appendix B: 6 operations per parameter and token (2 forward, 4 backward),
and 12 x layers x hidden size x length per token for attention. Padding, embeddings (which are looked up) and recomputed
activations do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from toolkit.pretrained import full_attention_up_to

# Dense bf16 or fp16 operations per second, from NVIDIA's data sheets (without sparsity).
_PEAK_TERAFLOPS = {
    "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "H800 PCIe": 756, "H800": 989, "H20": 148, "A100": 312, "A800": 312, "A10G": 70, "A10": 125, "A30": 165,
    "A40": 150, "L40S": 362, "L40": 181, "L4": 121, "V100": 125, "T4": 65, "RTX 4090": 165, "RTX 3090": 71,
    "RTX A6000": 155,
}  # fmt: skip


def peak_flops(device_name: str, mixed_precision: str) -> float | None:
    """Operations per second of one device; None for an unknown device, a laptop's, a slice (MIG), and in float32."""
    words = device_name.replace("-", " ")
    # the peaks of an RTX 4090 D and a 3090 Ti are others, too
    if not {"Laptop", "MIG", "D", "Ti"}.isdisjoint(words.split()):
        return None
    peaks = (peak for name, peak in _PEAK_TERAFLOPS.items() if f" {name} " in f" {words} ")
    return next(peaks, 0) * 1e12 or None if mixed_precision in ("bf16", "fp16") else None


def training_flops(model: torch.nn.Module) -> Callable[[np.ndarray], float] | None:
    """Returns a function (lengths of texts) -> operations of a training step; None if the config lacks
    `num_hidden_layers` or `hidden_size`, and for an encoder-decoder. Assumes that all layers attend to the whole text,
    and a BigBird's to its blocks."""
    config: Any = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size")]
    if None in sizes or getattr(config, "is_encoder_decoder", False):
        return None
    layers, hidden = (int(size) for size in sizes if size is not None)
    embeddings = {id(weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)
                 for weight in part.parameters()}  # fmt: skip
    # a frozen weight needs no gradient; ds_numel: ZeRO-3 may have emptied the parameter
    per_token = sum((6 if weight.requires_grad else 4) * getattr(weight, "ds_numel", weight.numel())
                    for weight in model.parameters() if id(weight) not in embeddings)  # fmt: skip
    sparse = getattr(config, "attention_type", "") == "block_sparse"

    def count(lengths: np.ndarray) -> float:  # (samples,)
        context = lengths.astype(float)  # the tokens that each token attends to
        if sparse:
            short = lengths <= full_attention_up_to(config.block_size, config.num_random_blocks)
            context = np.where(short, context, (5 + config.num_random_blocks) * config.block_size)
        return float((lengths * (per_token + 12 * layers * hidden * context)).sum())

    return count
