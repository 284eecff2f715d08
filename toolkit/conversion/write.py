"""Writes the folder: a safetensors file tensor by tensor, config, tokenizer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.safetensors_writer import SafetensorsWriter
from toolkit.conversion.model_class import CONFIG
from toolkit.conversion.stored import Stored
from toolkit.errors import UserError, size_text
from toolkit.utils.files import write_new

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# what belongs to a model beside its weights and config
_FILES = (
    "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "spm*", "*.vocab",
    "*.py", "chat_template*", "*preprocessor_config.json", "processor_config.json", "*labels*",
)  # fmt: skip
_DECISIONS = "decisions.json"
"""Thresholds, which belong to the weights of one checkpoint."""


def write_tensors(path: Path, tensors: Mapping[str, Stored], dtype: torch.dtype) -> str:
    """Writes a safetensors file, floating tensors in `dtype`. Returns their size, for people.
    Raises UserError for a tensor that is damaged, or too large for `dtype`."""
    layout = {}
    for name, tensor in tensors.items():
        kind = dtype if tensor.dtype.is_floating_point else tensor.dtype
        layout[name] = (kind, tensor.shape)
    with SafetensorsWriter(path, layout) as writer:
        for name in writer.names:
            kind = layout[name][0]
            pieces = tensors[name].pieces()
            writer.write_pieces(name, (_cast(name, piece, kind) for piece in pieces))
    return size_text(sum(math.prod(shape) * kind.itemsize for kind, shape in layout.values()))


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if cast is not tensor and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise UserError(f"{name} has a number that is infinite in {dtype}: pass --dtype bf16")
    return cast


def write_config(folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """With the dtype of the weights, in which `from_pretrained` loads them."""
    content = {**config, "dtype": str(dtype).removeprefix("torch.")}
    content.pop("torch_dtype", None)
    write_new(folder / CONFIG, json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def copy_files(source: Path, folder: Path, is_own: bool) -> None:
    """Copies the tokenizer and what else belongs to a model.

    `is_own`: `source` is the checkpoint's own folder."""
    patterns: tuple[str, ...] = _FILES
    if is_own:
        patterns += (_DECISIONS,)
    for path in {path for pattern in patterns for path in source.glob(pattern)}:
        shutil.copyfile(path, folder / path.name)
