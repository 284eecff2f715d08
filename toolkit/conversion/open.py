"""Recognises a checkpoint by its files, and opens a run's own and those of Hugging Face."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from toolkit.checkpoint.safetensors_writer import DTYPE_NAMES
from toolkit.conversion.deepspeed import find_tag_folder, is_tag_folder, open_deepspeed
from toolkit.conversion.distributed import METADATA, open_distributed
from toolkit.conversion.model_class import CONFIG
from toolkit.conversion.stored import Checkpoint, Stored
from toolkit.conversion.torch_files import open_torch_file
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.utils.files import read_table, refuse_lfs_pointer

STATE = "state.json"
_EXPECTED = (
    "a run or its checkpoint, a folder of DeepSpeed's save_checkpoint, of accelerator.save_state or of "
    "torch.distributed.checkpoint, a file of torch.save, or a Hugging Face model"
)
# in the order in which transformers looks for them
_MODEL_FILES = (
    "pytorch_model_fsdp.bin", "model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin"
)  # fmt: skip
_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
_NO_MODEL = re.compile(r"optim|sched|rng_|random_|scaler|training_args")
_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint: reads the structure of its files, and no tensor.

    Args:
        path: a run's folder, its `checkpoints`, one of them, or the links `best` and `last`; a folder of DeepSpeed's
            save_checkpoint or a tag in it; a folder of accelerator.save_state or of torch.distributed.checkpoint; a
            Hugging Face model; a folder with one `checkpoint-N` or one file of a model's state; a file of torch.save or
            safetensors.

    Raises:
        UserError: `path` is none of these, or a file is missing, damaged, of another save, or would execute code.
    """
    if not path.exists():
        siblings = [entry.name for entry in path.parent.glob("*")]
        raise UserError(f"{path} does not exist{did_you_mean(path.name, siblings)}; expected {_EXPECTED}")
    if path.is_file():
        return _with_config(_open_file(path), path.parent)
    if run := _run_checkpoint(path):
        return _open_run(path, run)
    if any(path.rglob("zero/optimizer_state.pt")):
        raise UserError(f"{path} is in DeepSpeed's universal format: name the checkpoint it was made from")
    if is_tag_folder(path):
        return _with_config(open_deepspeed(path, path), path, path.parent)
    if tag := find_tag_folder(path):
        return _with_config(open_deepspeed(path, tag), path)
    for folder in (path, path / "pytorch_model_fsdp_0"):
        if (folder / METADATA).is_file() or any(folder.glob("*.distcp")):
            return _with_config(open_distributed(path, folder), folder, folder.parent)
    for name in _MODEL_FILES:
        if (path / name).is_file() or (path / f"{name}.index.json").is_file():
            return _with_config(_open_model(path, name), path)
    return open_checkpoint(_only_checkpoint_in(path))


def _with_config(checkpoint: Checkpoint, *folders: Path) -> Checkpoint:
    """With the first of the folders that has a config."""
    model_folder = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    return replace(checkpoint, model_folder=model_folder)


def _only_checkpoint_in(path: Path) -> Path:
    """The only `checkpoint-N` of transformers' Trainer, or file of a model's state. Raises UserError."""
    entries = sorted(path.iterdir(), key=lambda entry: (len(entry.name), entry.name))
    choices = [entry for entry in entries if re.match("checkpoint[-_]", entry.name) and entry.is_dir()]
    if not choices:
        choices = [entry for entry in entries if entry.suffix in _SUFFIXES and not _NO_MODEL.match(entry.name)]
    if len(choices) == 1:
        return choices[0]
    if choices:
        raise UserError(f"{path} contains several checkpoints; name one of them: {listing(choices, 5)}")
    names = listing((entry.name for entry in entries), 5) or "nothing"
    if (path / "model" / CONFIG).is_file():
        names += f"; its trained model, a Hugging Face folder, is {path / 'model'}"
    raise UserError(f"{path} is not a checkpoint; expected {_EXPECTED}; it contains {names}")


# ---- a run's own


def _run_checkpoint(path: Path) -> Path | None:
    """The folder of a run's checkpoint that `path` is, or the newest that it has."""
    steps = sorted([*path.glob("step-*"), *path.glob("checkpoints/step-*")], reverse=True)
    choices = [path, path / "last", path / "checkpoints" / "last", *steps]
    return next((folder for folder in choices if (folder / STATE).is_file()), None)


def _open_run(path: Path, folder: Path) -> Checkpoint:
    state = read_table(folder / STATE, {})
    if state.get("format") != 2:
        raise UserError(f"{folder / STATE} has the format {state.get('format')!r}, not 2: use another version")
    files: dict[str, str] = state["files"]
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise UserError(f"{folder} lacks {listing(missing)}: copy it again or take another checkpoint")
    checks = [functools.partial(_check_digest, folder / name, digest) for name, digest in files.items()]
    return Checkpoint(
        path=path,
        kind="a run's checkpoint",
        tensors=_safetensors(folder / "weights.safetensors"),
        tied=state.get("tied") or {},
        step=state["step"],
        model_folder=folder / "model",
        excluded=state.get("excluded") or {},
        base_model=str(state.get("base_model") or ""),
        checks=tuple(checks),
    )


def _check_digest(path: Path, expected: str) -> None:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise UserError(f"{path} is damaged: its checksum is wrong; copy it again or take another checkpoint")


# ---- Hugging Face's


def _open_file(path: Path) -> Checkpoint:
    """A file that is a whole model's state."""
    is_shard = re.search(r"-\d{5}-of-\d{5}\.|\.distcp$", path.name)
    if is_shard or is_tag_folder(path.parent) or (path.parent / STATE).is_file():
        raise UserError(f"{path} is not a complete checkpoint: name its folder, {path.parent}")
    return _open_state(path)


def _open_state(path: Path) -> Checkpoint:
    if path.suffix != ".safetensors":
        return open_torch_file(path)
    return Checkpoint(path, "a file of safetensors", _safetensors(path))


def _open_model(folder: Path, name: str) -> Checkpoint:
    """One file, or several with an index. Raises UserError if a file or a weight is missing."""
    second = folder / name.replace(".", "_1.", 1)
    if second.is_file():
        raise UserError(f"{folder} has several models (also {second.name}): put each into its own folder")
    if (folder / name).is_file():
        return replace(_open_state(folder / name), path=folder)
    index = folder / f"{name}.index.json"
    weight_map: dict[str, str] = read_table(index, {}).get("weight_map") or {}
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise UserError(f"{index} names {listing(missing)}, which is missing: copy the folder again")
    tensors: dict[str, Stored] = {}
    tied: dict[str, str] = {}
    checks: list[Callable[[], None]] = []
    for file in files:
        part = _open_state(folder / file)
        tensors |= part.tensors
        tied |= part.tied
        checks += part.checks
    if lacks := [name for name in weight_map if name not in tensors and name not in tied]:
        raise UserError(f"{index} names {listing(lacks)}, which its files lack: copy the folder again")
    return Checkpoint(folder, f"a model in {len(files)} files", tensors, tied, checks=tuple(checks))


def _safetensors(path: Path) -> dict[str, Stored]:
    """Raises UserError for a file that is truncated, or damaged in its header."""
    try:
        refuse_lfs_pointer(path)
        file: Any = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged, or not a file of safetensors: {error}; copy it again") from None
    tensors = {}
    for name in file.keys():  # noqa: SIM118 (not a dict)
        header = file.get_slice(name)
        if (kind := header.get_dtype()) not in _DTYPES:
            raise UserError(f"{path}: {name} has the dtype {kind}, which cannot be converted")
        read = functools.partial(file.get_tensor, name)
        tensors[name] = Stored(tuple(header.get_shape()), _DTYPES[kind], read)
    return tensors
