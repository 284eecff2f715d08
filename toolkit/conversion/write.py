"""Writes the folder: a safetensors file tensor by tensor, config, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from toolkit.checkpoint.safetensors_writer import write_in_dtype
from toolkit.conversion.model_class import ModelClass
from toolkit.conversion.stored import Stored
from toolkit.errors import size_text
from toolkit.utils.files import read_json_object, write_new

# what belongs to a model beside its weights and config
_FILES = (
    "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "spm*", "*.vocab",
    "*.py", "chat_template*", "*preprocessor_config.json", "processor_config.json", "*labels*",
    "sentence_bert_config.json",
)  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Stored], dtype: torch.dtype) -> str:
    """Writes a safetensors file, floating tensors in `dtype`. Returns their size, for people.
    Raises UserError for a tensor that is damaged, or too large for `dtype`."""
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write_in_dtype(path, shapes, dtype, lambda name: tensors[name].pieces())
    return size_text(path.stat().st_size)


def copy_files(source: Path, folder: Path, is_own: bool) -> None:
    """Copies the tokenizer and what else belongs to a model. `is_own`: the weights are `source`'s,
    and so the thresholds that were tuned on them are copied, too."""
    patterns = [*_FILES]
    if is_own:
        patterns.append("decisions.json")
    for path in {path for pattern in patterns for path in source.glob(pattern)}:
        shutil.copyfile(path, folder / path.name)


def write_config(
    source: Path, path: Path, dtype: torch.dtype, model: ModelClass | None
) -> None:
    """Writes a config with the class and the sizes of the model, and the dtype of its weights, in
    which `from_pretrained` loads them."""
    config = read_json_object(source)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if model is not None:
        config |= model.changes_of(config)
    write_new(path, json.dumps(config, indent=2) + "\n")
