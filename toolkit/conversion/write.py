"""Writes the folder: safetensors files tensor by tensor, config, tokenizer."""

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
from toolkit.utils.files import read_table, write_new

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DECISIONS = "decisions.json"
# what belongs to a model beside its weights and config
_FILES = (
    "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "spm*", "*.vocab", "*.py",
    "chat_template*", "*preprocessor_config.json", "processor_config.json", "*labels*",
    "config_sentence_transformers.json", "sentence_*_config.json", "modules.json",
    "[0-9]_[A-Z]*/config.json",
)  # fmt: skip
# what belongs to the weights of one checkpoint: thresholds, the layers that sentence-transformers adds
_OWN_FILES = (DECISIONS, "[0-9]_[A-Z]*/model.safetensors", "[0-9]_[A-Z]*/pytorch_model.bin")


def write_tensors(folder: Path, tensors: Mapping[str, Stored], dtype: torch.dtype, max_bytes: float, stem: str) -> str:
    """Writes STEM.safetensors, or files of at most `max_bytes` and their index; floating tensors in `dtype`. Returns
    their size, for people. Raises UserError for a tensor that is damaged, or too large for `dtype`."""
    layout = {}
    for name, tensor in tensors.items():
        layout[name] = (dtype if tensor.dtype.is_floating_point else tensor.dtype, tensor.shape)
    sizes = {name: math.prod(shape) * kind.itemsize for name, (kind, shape) in layout.items()}
    shards = _split(sizes, max_bytes)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = f"{stem}.safetensors"
        with SafetensorsWriter(folder / file, {name: layout[name] for name in names}) as writer:
            for name in writer.names:
                kind = layout[name][0]
                writer.write_pieces(name, (_cast(name, piece, kind) for piece in tensors[name].pieces()))
        files |= dict.fromkeys(names, file)
    total = sum(sizes.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_new(folder / f"{stem}.safetensors.index.json", json.dumps(index, ensure_ascii=False, indent=2) + "\n")
    return size_text(total)


def _split(sizes: Mapping[str, int], max_bytes: float) -> list[list[str]]:
    """Names of at most `max_bytes` each, in the model's order; a larger tensor is alone."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if cast is not tensor and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise UserError(f"{name} has a number that is infinite in {dtype}: pass --dtype bf16 or fp32")
    return cast


def write_config(folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """With the dtype of the weights, in which `from_pretrained` loads them."""
    content = {**config, "dtype": str(dtype).removeprefix("torch.")}
    content.pop("torch_dtype", None)
    write_new(folder / CONFIG, json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def copy_files(source: Path, folder: Path, is_own: bool) -> None:
    """Copies the tokenizer and what else belongs to a model. `is_own`: `source` is the checkpoint's own folder."""
    patterns: tuple[str, ...] = _FILES
    if is_own:
        patterns += _OWN_FILES
    for path in {path for pattern in patterns for path in source.glob(pattern)}:
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def copy_decisions(source: Path, folder: Path, step: int | None) -> None:
    """Copies the thresholds of the run's model (RUN/model) to that of a checkpoint (RUN/checkpoints/STEP/model), if
    they were tuned on the weights of this step."""
    path = source.resolve() / "../../../model" / DECISIONS
    if path.is_file() and read_table(path, {}).get("step") == step:
        shutil.copyfile(path, folder / DECISIONS)
