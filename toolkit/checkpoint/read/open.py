"""Opens any checkpoint as a `CheckpointReader`; its format is recognised by its files. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.read.deepspeed import find_tag_folder, is_tag_folder, open_deepspeed
from toolkit.checkpoint.read.weights import SUFFIXES, open_weights
from toolkit.checkpoint.safetensors_header import read_header
from toolkit.checkpoint.tensor_index import (
    CheckpointReader,
    Member,
    Scalar,
    TensorIndex,
    crc32_combine,
    crc32_of_range,
    join_shards,
    mixed_saves,
)
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.utils.files import refuse_link_out

_EXPECTED = (
    "a run or its checkpoint, a folder of DeepSpeed's save_checkpoint, of accelerator.save_state or of "
    "torch.distributed.checkpoint, a file of torch.save, or a Hugging Face model"
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
_NO_MODEL = re.compile(r"optim|sched|rng_|random_|scaler|training_args")  # other files of Trainer and accelerate
_DETAILS = ("epoch", "position", "mixed_precision", "base_model", "versions", "metrics", "best", "settings", "identity")


def open_checkpoint(path: Path) -> CheckpointReader:
    """Opens a checkpoint: reads the structure of its files, none of the data.

    Args:
        path: a run's folder (its newest complete checkpoint is taken), its `checkpoints`, or one of them (or the links
            `best` and `last`); a folder of DeepSpeed's save_checkpoint or a tag in it; a folder of
            accelerator.save_state or of torch.distributed.checkpoint; a folder with a Hugging Face model, one
            `checkpoint-N` or one file with a model's state; a file of torch.save or safetensors.

    Raises:
        UserError: `path` is none of these, or a file is missing, damaged, of another save, or would execute code.
    """
    try:
        reader, folder = _open(path)
        _check(reader, folder)
        return reader
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from None
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        # valid files, with content that no known version writes
        fault = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: its files are damaged, or of an unknown version ({fault})") from error


def _open(path: Path) -> tuple[CheckpointReader, Path]:
    """(the reader, the folder that must contain all its files)."""
    if path.is_file():
        is_part = (path.parent / folders.MANIFEST).is_file() or is_tag_folder(path.parent) or _SHARD.search(path.name)
        if is_part or path.suffix == ".distcp" or not (path.suffix in SUFFIXES or zipfile.is_zipfile(path)):
            raise UserError(f"{path} is not a complete checkpoint: name its folder, {path.parent}")
        reader = open_weights(path)
        assert reader is not None
        return reader, path.resolve().parent  # the user may name a link to anywhere
    if not path.exists():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path} does not exist{did_you_mean(path.name, names)}; expected {_EXPECTED}")
    if (path / folders.MANIFEST).is_file() or folders.step_number(path) is not None:
        return _open_run_checkpoint(path, path), path
    # DeepSpeed's universal format uses file names of `save_checkpoint` for other content
    if (path / "zero" / "optimizer_state.pt").is_file() or any(path.glob("*/zero/optimizer_state.pt")):
        raise UserError(f"{path} is in DeepSpeed's universal format: name the checkpoint it was made from")
    if is_tag_folder(path):
        return open_deepspeed(path, path, folders.first_with("config.json", path, path.parent)), path
    for checkpoints in (path / "checkpoints", path):
        if checkpoints.is_dir() and (newest := folders.complete(checkpoints)[:1]):
            return _open_run_checkpoint(path, newest[0]), newest[0]
    if tag := find_tag_folder(path):
        return open_deepspeed(path, tag, folders.first_with("config.json", path)), path
    if weights := open_weights(path):
        return weights, path
    return _open(_only_checkpoint_in(path))


def _only_checkpoint_in(path: Path) -> Path:
    """The only `checkpoint-N` of transformers' Trainer, `checkpoint_N` of accelerate, or file that may be a model's
    state. Raises UserError if there is none, or several."""
    if any((path / "model").glob("*.safetensors")):
        raise UserError(
            f"{path} is a run without a complete checkpoint (--checkpoint_every N saves them): its trained model, a "
            f"Hugging Face folder, is {path / 'model'}"
        )
    entries = sorted(path.iterdir(), key=lambda entry: (len(entry.name), entry.name))
    inside = [entry for entry in entries if entry.name.startswith(("checkpoint-", "checkpoint_")) and entry.is_dir()]
    inside = inside or [entry for entry in entries if entry.suffix in SUFFIXES and not _NO_MODEL.match(entry.name)]
    if len(inside) > 1:
        raise UserError(f"{path} contains several checkpoints; name one of them: {listing(inside, 5)}")
    if not inside:
        names = listing((entry.name for entry in entries), 5)
        raise UserError(f"{path} is not a checkpoint; expected {_EXPECTED}; it contains {names or 'nothing'}")
    return inside[0]


def _check(reader: CheckpointReader, folder: Path) -> None:
    """Raises UserError if files are of different saves, or one is outside the folder."""
    files = {span.member.file for tensor in reader.tensors() for span in tensor.spans} | {reader.model_folder or folder}
    for file in sorted(file for file in files if file.is_relative_to(folder)):
        refuse_link_out(file, folder)
    if invalid := [name for name in reader.names() if not name.isprintable()]:  # a lone surrogate, an escape code
        raise UserError(f"{reader.path}: {invalid[0][:100]!a} is not a parameter's name: its files are damaged")
    if (folder / folders.MANIFEST).is_file():
        _check_files(reader, folder)
    most = max(reader.step_counts().values(), default=0)
    if reader.step is not None and most > reader.step:
        steps = f"{reader.path} is of optimizer step {reader.step} and the optimizer's state of step {most:g}"
        raise UserError(f"{steps}: files of two checkpoints are mixed; copy it again or take another one")


def _check_files(reader: CheckpointReader, folder: Path) -> None:
    """Raises UserError for a file with another CRC32 than in the manifest: it may be intact, and of another save.

    A file's CRC32 is combined from those of its members: only the bytes between them, and files without any, are read.
    """
    by_file: dict[Path, list[Member]] = defaultdict(list)
    for member in sorted(reader.members, key=lambda member: member.offset):
        by_file[member.file] += [member] if member.size else []
    for name, entry in folders.read_manifest(folder)["files"].items():
        file, value, end = folder / name, 0, 0
        if any(member.crc32 is None for member in by_file[file]):
            continue
        for member in [*by_file[file], Member(file, "", file.stat().st_size, 0, 0)]:
            value = crc32_of_range(file, end, member.offset - end, value)
            value, end = crc32_combine(value, member.crc32 or 0, member.size), member.offset + member.size
        if f"{value:08x}" != entry["crc32"]:
            raise mixed_saves(file, folder / folders.MANIFEST, "the file's checksum")


def _open_run_checkpoint(path: Path, folder: Path) -> CheckpointReader:
    """Opens a run's checkpoint (docs/checkpoints.md). `path`: as the user passed it. Raises UserError."""
    manifest = folders.read_manifest(folder)
    if fault := folders.find_fault(folder):
        raise UserError(f"{fault}; copy the checkpoint again or take another one")
    state, world, model = manifest.get("state"), manifest.get("world"), folder / "model"
    slices = sorted(folder.glob("slices-rank-*.safetensors"))
    if state == "deepspeed" and (tag := find_tag_folder(folder)):
        reader = open_deepspeed(path, tag)
    elif state == "whole":
        optimizer = filter(Path.is_file, [folder / folders.OPTIMIZER_FILE])
        reader = _open_files(path, [folder / folders.WEIGHTS_FILE, *optimizer], manifest)
    elif state == "slices" and len(slices) == world:
        reader = _open_files(path, slices, manifest)
    else:
        count = f"{folder} has {len(slices)} slices-rank-* files of {world} processes (state {state!r})"
        raise UserError(f"{count}: files are missing; copy the checkpoint again")
    return dataclasses.replace(
        reader,
        strategy=str(manifest.get("strategy", reader.strategy)),
        world=int(manifest.get("world", reader.world)),
        step=manifest.get("step", reader.step),
        tied={**reader.tied, **(manifest.get("tied") or {})},
        frozen=reader.frozen | {name for name in manifest.get("frozen") or () if name in reader.weights},
        excluded={name: tuple(shape) for name, shape in (manifest.get("excluded") or {}).items()},
        optimizer=manifest.get("optimizer") or {},
        model_folder=model if model.is_dir() else None,
        details={**reader.details, **{key: manifest[key] for key in _DETAILS if key in manifest}},
    )


def _open_files(path: Path, files: list[Path], manifest: Mapping[str, Any]) -> CheckpointReader:
    """Opens weights.safetensors and optimizer.safetensors, or each rank's slices. Tensors are named KEY.PARAMETER; in
    weights.safetensors PARAMETER."""
    shards: dict[tuple[str, str], list[tuple[int, TensorIndex]]] = defaultdict(list)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    scalars: dict[str, dict[str, Scalar]] = defaultdict(dict)
    headers = {file: read_header(file) for file in files}
    for file, (stored, metadata) in headers.items():
        places, parameters = (json.loads(metadata.get(table, "{}")) for table in ("slices", "numbers"))
        for parameter, numbers in parameters.items():
            scalars[parameter] |= {key: Scalar(value) for key, value in numbers.items()}
        for name, tensor in stored.items():
            key, _, parameter = name.partition(".")
            if file.name == folders.WEIGHTS_FILE:
                key, parameter = "weight", name
            place = places.get(name, {"shape": () if places else tensor.shape, "start": 0})
            shape, others = tuple(map(int, place["shape"])), shards[key, parameter]
            if shapes.setdefault((key, parameter), shape) != shape:
                raise UserError(f"{file}: {name} has another shape than in the other files")
            if shape or not others:
                others.append((int(place["start"]), tensor))
            elif (one := tensor.number()) != (two := others[0][1].number()):
                what = "the optimizer step" if key == "step" else name
                raise mixed_saves(file, others[0][1].spans[0].member.file, f"{what} ({one} and {two})")
    weights: dict[str, TensorIndex] = {}
    state: dict[str, dict[str, TensorIndex]] = defaultdict(dict)
    for (key, parameter), parts in shards.items():
        tensor = join_shards(path, parameter, shapes[key, parameter], parts)
        if key in ("weight", "buffer"):
            weights[parameter] = tensor
        elif key == "step" or (not tensor.shape and shapes["weight", parameter]):
            scalars[parameter][key] = Scalar(tensor.number(), tensor.dtype)
        else:
            state[parameter][key] = tensor
    return CheckpointReader(
        path=path,
        members=tuple(tensor.spans[0].member for stored, _ in headers.values() for tensor in stored.values()),
        weights=weights,
        buffers=frozenset(weights) & frozenset(manifest.get("buffers") or ()),
        optimizer_state=dict(state),
        optimizer_scalars=dict(scalars),
        engine_dtype={"bf16": "BF16", "fp16": "F16"}.get(str(manifest.get("mixed_precision")), "F32"),
    )
