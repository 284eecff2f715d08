"""Folders of weights as a `CheckpointReader`: Hugging Face's, and `accelerator.save_state`'s of one process or DDP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path

from toolkit.checkpoint.read.deepspeed_reader import tied_tensors
from toolkit.checkpoint.read.torch_file import open_torch_file
from toolkit.checkpoint.read.unpickle import Tensor
from toolkit.checkpoint.reader import CheckpointReader, TensorIndex
from toolkit.checkpoint.tensors_file import read_header
from toolkit.errors import UserError, listing

# In the order in which transformers looks for them. An adapter's come last: a folder may hold both.
SINGLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# in a folder of save_state
_OPTIMIZER = "optimizer.bin"


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*SINGLE, *INDEXES))


def open_weights(path: Path, folder: Path) -> CheckpointReader:
    """Opens a folder of weights. The parameters' order in an optimizer's file is not known, so it is left alone.

    Raises UserError where a file is missing or damaged, or tensors are in two files.
    """
    files = _files(folder)
    tensors: dict[str, TensorIndex] = {}
    tied: dict[str, str] = {}
    for file in files:
        found, aliases = _safetensors(file) if file.suffix == ".safetensors" else torch_tensors(file)
        twice = [name for name in found if name in tensors]
        if twice:
            raise UserError(f"{file}: {listing(twice)} are in another file of {folder} too: copy the folder again")
        tensors |= found
        tied |= aliases
    _check_index(folder, files, tensors)
    saved_state = any(folder.glob("random_states_*.pkl")) or (folder / _OPTIMIZER).is_file()
    states = len(list(folder.glob("random_states_*.pkl")))
    return CheckpointReader(
        path=path,
        strategy=_strategy(saved_state, states),
        world=max(states, 1),
        step=None,
        weights=tensors,
        tied=tied,
        engine_dtype=main_dtype(tensors.values()),
        model_folder=folder if (folder / "config.json").is_file() else None,
        details={"files": len(files), "optimizer_left_out": saved_state},
    )


def _strategy(saved_state: bool, processes: int) -> str:
    if not saved_state:
        return "model"
    return "ddp" if processes > 1 else "single"


def _files(folder: Path) -> list[Path]:
    """Of the first form of weights that is there."""
    for single, index in zip_longest(SINGLE, INDEXES):
        if (folder / single).is_file():
            second = (folder / single).with_stem(f"{Path(single).stem}_1")  # as accelerate names them
            if second.is_file():
                raise UserError(
                    f"{folder} holds several models ({single}, {second.name}): put each into its own folder"
                )
            return [folder / single]
        if index and (folder / index).is_file():
            return _of_index(folder / index)
    raise UserError(f"{folder} holds no weights")


def _of_index(index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index} names {listing(missing)}, missing there; copy the folder again")
    return [index.parent / name for name in names]


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not found or not all(_is_file_name(name) for name in found.values()):
            raise ValueError("weight_map")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is not an index of weights (it has no weight_map of file names)") from None
    return dict(found)


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def _check_index(folder: Path, files: list[Path], tensors: Mapping[str, TensorIndex]) -> None:
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    if index is None or files[0].name in SINGLE:
        return
    wanted = _weight_map(index)
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise UserError(f"{index} names {listing(missing)}, which its files do not hold; copy the folder again")


def _safetensors(file: Path) -> tuple[dict[str, TensorIndex], dict[str, str]]:
    header = read_header(file)
    # safetensors' save_model notes the tied names that it left out, {left out: kept}; accelerate does not
    tied = {name: kept for name, kept in header.metadata.items() if kept in header.tensors and name != "format"}
    return dict(header.tensors), tied


def torch_tensors(file: Path) -> tuple[dict[str, TensorIndex], dict[str, str]]:
    """(tensors by name, other name -> name) of a state dict that torch.save wrote."""
    opened = open_torch_file(file)
    content = opened.content
    if type(content) is not dict or not any(type(value) is Tensor for value in content.values()):
        raise UserError(f"{file} holds no tensors by name: not a model's state")
    tensors = {str(name): value for name, value in content.items() if type(value) is Tensor}
    tied = tied_tensors(tensors)
    return {name: opened.stored(name, tensor) for name, tensor in tensors.items() if name not in tied}, tied


def main_dtype(tensors: Iterable[TensorIndex]) -> str:
    """F32, BF16 or F16, whichever most elements have."""
    sizes: dict[str, int] = {}
    for stored in tensors:
        if stored.dtype in ("F32", "BF16", "F16"):
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.count
    return max(sizes, key=lambda dtype: sizes[dtype], default="F32")
