"""Recognises a checkpoint by its files, and opens a run's own and those of Hugging Face."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.checkpoint.safetensors_writer import DTYPES_BY_NAME
from toolkit.conversion.deepspeed import find_tag_folder, is_tag_folder, open_deepspeed
from toolkit.conversion.stored import Check, Checkpoint, Stored
from toolkit.conversion.torch_files import open_torch_file
from toolkit.errors import UserError, explain_errors, listing
from toolkit.utils.files import read_json_object, refuse_lfs_pointer

STATE = "state.json"
_EXPECTED = (
    "a run or its checkpoint, a folder of DeepSpeed's save_checkpoint, of accelerator.save_state "
    "or of torch.distributed.checkpoint, a file of torch.save, or a Hugging Face model"
)
# in the order in which transformers looks for them
_MODEL_FILES = (
    "pytorch_model_fsdp.bin", "model.safetensors", "pytorch_model.bin",
    "adapter_model.safetensors", "adapter_model.bin",
)  # fmt: skip


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint: reads the structure of its files, and no tensor.

    Args:
        path: a run's folder (its newest checkpoint), its `checkpoints`, one of them, or the links
            `best` and `last`; a folder of DeepSpeed's save_checkpoint or a tag in it; a folder of
            accelerator.save_state or of torch.distributed.checkpoint; a Hugging Face model; a file
            of torch.save or safetensors.

    Raises:
        UserError: `path` is none of these, or a file is missing, damaged, of another save, or would
            execute code.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; expected {_EXPECTED}")
    if path.is_file():
        return _open_file(path)
    run = _run_checkpoint(path)
    if run is not None:
        return _open_run(path, run)
    tag = find_tag_folder(path)
    if tag is not None:
        return open_deepspeed(path, tag)
    for folder in (path, path / "pytorch_model_fsdp_0"):
        if (folder / ".metadata").is_file():
            from toolkit.conversion.distributed import open_distributed  # takes a second

            return open_distributed(path, folder)
    for name in _MODEL_FILES:
        if (path / name).is_file() or (path / f"{name}.index.json").is_file():
            return _open_model(path, name)
    if (path / "model/model.safetensors").is_file():
        raise UserError(f"{path} has no checkpoint: its model is {path / 'model'}")
    entries = listing(sorted(entry.name for entry in path.iterdir())) or "nothing"
    raise UserError(
        f"{path} is not a checkpoint; expected {_EXPECTED}; it contains {entries}"
    )


# ---- a run's own


def _run_checkpoint(path: Path) -> Path | None:
    """The folder of a run's checkpoint that `path` is, or the newest that it has."""
    steps = sorted([*path.glob("step-*"), *path.glob("checkpoints/step-*")], reverse=True)
    for folder in (path, path / "last", path / "checkpoints" / "last", *steps):
        if (folder / STATE).is_file():
            return folder
    return None


def _open_run(path: Path, folder: Path) -> Checkpoint:
    from toolkit.checkpoint import folder as folders  # imports what trains

    state = folders.read_state(folder)
    tensors = _safetensors(folder / folders.WEIGHTS_FILE)
    tensors |= {
        other: tensors[name] for other, name in state["tied"].items() if name in tensors
    }
    if state["settings"].get("ema_decay") is not None:  # as the run's model/ has them
        moments = _safetensors(folder / folders.OPTIMIZER_FILE)
        tensors |= {
            name: moments[f"ema.{name}"] for name in tensors if f"ema.{name}" in moments
        }

    base_model = ""
    if state["excluded"]:
        base_model = state["base_model"] or "the recipe's"

    def check() -> None:
        if fault := folders.find_fault(folder):
            raise UserError(f"{fault}; copy {folder} again, or take another checkpoint")

    return Checkpoint(
        path=path,
        tensors=tensors,
        step=state["step"],
        model_folder=folder / "model",
        base_model=base_model,
        checks=(check,),
    )


# ---- Hugging Face's


def _open_file(path: Path) -> Checkpoint:
    """A file that is a whole model's state."""
    is_shard = re.search(r"-of-\d{5}\.|\.distcp$", path.name)
    if is_shard or is_tag_folder(path.parent) or (path.parent / STATE).is_file():
        raise UserError(
            f"{path} is not a complete checkpoint: name its folder, {path.parent}"
        )
    return _open_state(path)


def _open_state(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        return Checkpoint(path, _safetensors(path))
    return open_torch_file(path)


def _open_model(folder: Path, name: str) -> Checkpoint:
    """One file, or several with an index. Raises UserError if a file or a weight is missing."""
    second = folder / name.replace(".", "_1.", 1)
    if second.is_file():
        raise UserError(f"{folder} has several models (also {second.name}): name a file")
    if (folder / name).is_file():
        return replace(_open_state(folder / name), path=folder)
    index = folder / f"{name}.index.json"
    with explain_errors(f"{index} is damaged"):
        weight_map = read_json_object(index)["weight_map"]
        files = sorted({Path(file).name for file in weight_map.values()})
    tensors: dict[str, Stored] = {}
    checks: list[Check] = []
    for file in files:
        state = _open_state(folder / file)
        tensors |= state.tensors
        checks += state.checks
    missing = weight_map.keys() - tensors.keys()
    if missing:
        names = listing(sorted(missing))
        raise UserError(f"{folder} lacks {names}, which its index names: copy it again")
    return Checkpoint(folder, tensors, checks=tuple(checks))


def _safetensors(path: Path) -> dict[str, Stored]:
    """Raises UserError for a file that is truncated, or damaged in its header."""
    try:
        refuse_lfs_pointer(path)
        file: Any = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged: {error}; copy it again") from None
    tensors = {}
    for name in list(file.keys()):
        header = file.get_slice(name)
        kind = header.get_dtype()
        if kind not in DTYPES_BY_NAME:
            raise UserError(
                f"{path}: {name} has the dtype {kind}, which cannot be converted"
            )
        read = functools.partial(_read, file, name)
        tensors[name] = Stored(tuple(header.get_shape()), DTYPES_BY_NAME[kind], read)
    return tensors


def _read(file: Any, name: str) -> list[torch.Tensor]:
    return [file.get_tensor(name)]
