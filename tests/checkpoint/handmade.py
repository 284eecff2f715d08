"""Small checkpoints written by hand, for what does not need real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from toolkit.checkpoint.checksum import crc32
from toolkit.checkpoint.tensors_file import lay_out

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
         torch.int64: "I64", torch.bool: "BOOL"}  # fmt: skip


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write_run(folder: Path, tensors: Mapping[str, torch.Tensor], **manifest: Any) -> Path:
    """A run's checkpoint of one process that holds `tensors`."""
    (folder / "model").mkdir(parents=True)
    contents = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    described = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    layout = lay_out(described, {"format": "pt"}, checksums=True)
    header = layout.header({name: crc32(content) for name, content in contents.items()})
    data = header + b"".join(contents[name] for name in layout.tensors)
    (folder / "weights.safetensors").write_bytes(data)
    files = {"weights.safetensors": {"bytes": len(data), "crc32": f"{crc32(data):08x}"}}
    content = {"format": 1, "step": 7, "state": "whole", "strategy": "single", "world": 1, "mixed_precision": "no",
               "tied": {}, "frozen": [], "excluded": {}, "files": files, **manifest}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
