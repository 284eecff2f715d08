"""How the tensors are divided among safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.convert.outputs import Output
from toolkit.checkpoint.tensors_file import Layout, lay_out
from toolkit.errors import UserError

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One safetensors file."""

    name: str
    layout: Layout
    outputs: list[Output]


def parse_size(text: str) -> int:
    """`5GB` (10^9), `500MiB` (2^20) -> bytes. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise UserError(f"--max_shard_size {text} is not a size: write 5GB, 500MB or 2GiB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if not match[2] and size < 10**6:
        raise UserError(f"--max_shard_size {text} is {size} bytes: did you mean {match[1]}GB?")
    return size


def divide(outputs: Iterable[Output], dtype: str, most: int, is_adapter: bool = False) -> list[Shard]:
    """Files of at most `most` bytes of tensors each, in the model's order; a larger tensor has one of its own."""
    groups: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        added = output.size(dtype)
        if groups[-1] and size + added > most and not is_adapter:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += added
    names = [_name(number, len(groups), is_adapter) for number in range(1, len(groups) + 1)]
    return [_shard(name, group, dtype) for name, group in zip(names, groups, strict=True)]


def _name(number: int, count: int, is_adapter: bool) -> str:
    if is_adapter:
        return ADAPTER
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _shard(name: str, outputs: list[Output], dtype: str) -> Shard:
    tensors = {output.name: (output.dtype(dtype), output.shape) for output in outputs}
    return Shard(name, lay_out(tensors, {"format": "pt"}), outputs)


def write_index(folder: Path, shards: list[Shard], dtype: str) -> None:
    """The file that tells `from_pretrained` where each tensor is; only for several shards."""
    if len(shards) == 1:
        return
    outputs = [output for shard in shards for output in shard.outputs]
    where: Mapping[str, str] = {output.name: shard.name for shard in shards for output in shard.outputs}
    metadata = {
        "total_parameters": sum(output.stored.count for output in outputs),
        "total_size": sum(output.size(dtype) for output in outputs),
    }
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(where.items()))}, ensure_ascii=False, indent=2)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")
