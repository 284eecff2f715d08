"""Folders of weights as a `CheckpointReader`: Hugging Face's, and `accelerator.save_state`'s of one process or DDP."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path

from toolkit.checkpoint.read.torch_file import open_torch_file
from toolkit.checkpoint.read.unpickle import Tensor
from toolkit.checkpoint.reader import ITEM_BYTES, CheckpointReader, TensorIndex
from toolkit.checkpoint.tensors_file import read_header
from toolkit.errors import UserError, listing

# In the order in which transformers looks for them. An adapter's come last: a folder may hold both.
SINGLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*SINGLE, *INDEXES))


def open_weights(folder: Path) -> CheckpointReader:
    """Opens a folder of weights. The parameters' order in an optimizer's file is not known, so it is left alone.

    Raises UserError where a file is missing or damaged, or tensors are in two files.
    """
    tensors: dict[str, TensorIndex] = {}
    tied: dict[str, str] = {}
    files, named = _files(folder)
    for file in files:
        found, aliases = _safetensors(file) if file.suffix == ".safetensors" else torch_tensors(file)
        twice = [name for name in found if name in tensors]
        if twice:
            raise UserError(f"{file}: {listing(twice)} are in another file of {folder} too: copy the folder again")
        tensors |= found
        tied |= aliases
    if missing := [name for name in named if name not in tensors]:
        raise UserError(f"the index of {folder} names {listing(missing)}, which its files do not hold; copy it again")
    states = len(list(folder.glob("random_states_*.pkl")))
    saved_state = states or (folder / "optimizer.bin").is_file()
    return CheckpointReader(
        path=folder,
        strategy="ddp" if states > 1 else "single" if saved_state else "model",
        world=max(states, 1),
        weights=tensors,
        tied=tied,
        engine_dtype=main_dtype(stored.dtype for stored in tensors.values()),
        model_folder=folder if (folder / "config.json").is_file() else None,
        details={"files": len(files)},
    )


def _files(folder: Path) -> tuple[list[Path], Iterable[str]]:
    """(the files of the first form of weights that is there, tensors that an index of them names)."""
    for single, index in zip_longest(SINGLE, INDEXES):
        if (folder / single).is_file():
            second = (folder / single).with_stem(f"{Path(single).stem}_1")  # as accelerate names them
            if second.is_file():
                raise UserError(
                    f"{folder} holds several models ({single}, {second.name}): put each into its own folder"
                )
            return [folder / single], ()
        if index and (folder / index).is_file():
            return _of_index(folder / index)
    raise UserError(f"{folder} holds no weights")


def _of_index(index: Path) -> tuple[list[Path], Iterable[str]]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(found.values()))
        if not names or not all(name not in ("", "..") and Path(name).name == name for name in names):
            raise ValueError("weight_map")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index} is not an index of weights (it has no weight_map of file names)") from None
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index} names {listing(missing)}, missing there; copy the folder again")
    return [index.parent / name for name in names], found


def _safetensors(file: Path) -> tuple[dict[str, TensorIndex], dict[str, str]]:
    header = read_header(file)
    # safetensors' save_model notes the tied names that it left out, {left out: kept}; accelerate does not
    tied = {name: kept for name, kept in header.metadata.items() if kept in header.tensors and name != "format"}
    return dict(header.tensors), tied


def torch_tensors(file: Path) -> tuple[dict[str, TensorIndex], dict[str, str]]:
    """(tensors by name, other name -> name) of a state dict that torch.save wrote."""
    opened = open_torch_file(file)
    tensors = opened.tensors(opened.content) if type(opened.content) is dict else {}
    if not tensors:
        raise UserError(f"{file} holds no tensors by name: not a model's state")
    tied = tied_tensors(tensors)
    return {name: opened.stored(name, tensor) for name, tensor in tensors.items() if name not in tied}, tied


def tied_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Other name -> first name of tensors that are the same elements of the same storage."""
    first: dict[object, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        if tensor.count * ITEM_BYTES[tensor.dtype]:
            place = (tensor.storage.key, tensor.offset, tensor.shape, tensor.stride, tensor.dtype)
            if first.setdefault(place, name) != name:
                tied[name] = first[place]
    return tied


def main_dtype(dtypes: Iterable[str]) -> str:
    """F32, BF16 or F16, whichever most tensors have."""
    counts = Counter(dtype for dtype in dtypes if dtype in ("F32", "BF16", "F16"))
    return counts.most_common(1)[0][0] if counts else "F32"
