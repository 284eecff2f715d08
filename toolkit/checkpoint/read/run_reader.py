"""A run's own checkpoint (docs/checkpoints.md) as a `CheckpointReader`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.checksum import crc32_by_parts
from toolkit.checkpoint.folder import MANIFEST, complete, fault_of, half_of, read_manifest
from toolkit.checkpoint.read.deepspeed_files import find_tag_folder
from toolkit.checkpoint.read.deepspeed_reader import open_deepspeed
from toolkit.checkpoint.read.torch_file import zip_members
from toolkit.checkpoint.reader import CheckpointReader, Scalar, Span, TensorIndex
from toolkit.checkpoint.tensors_file import Header, read_header
from toolkit.errors import UserError

_ENGINE_DTYPES = {"no": "F32", "bf16": "BF16", "fp16": "F16"}


def newest_complete(checkpoints: Path) -> Path | None:
    """The checkpoint whose manifest was written last, in a run's folder of checkpoints: the one that
    `--resume auto` takes."""
    return next(iter(complete(checkpoints)), None)


def open_run_checkpoint(path: Path, folder: Path) -> CheckpointReader:
    """Opens a folder with a manifest. `path`: as the user named it.

    Raises UserError where a file is missing or of another size than the manifest says, or is damaged; where all
    that is missing lies on other machines' disks, with the command that brings it.
    """
    manifest = read_manifest(folder)
    if half := half_of(folder):
        raise UserError(half)
    if fault := fault_of(folder):
        raise UserError(f"{fault}; copy the checkpoint again or take another one")
    _refuse_foreign_files(folder, manifest)
    state = manifest.get("state")
    if state == "deepspeed":
        reader = _deepspeed(path, folder)
    elif state in ("whole", "slices"):
        reader = (_open_whole if state == "whole" else _open_sharded)(path, folder, manifest)
    else:
        raise UserError(f"{folder / MANIFEST}: its state {state!r} is none of whole, slices and deepspeed")
    most, step = max(reader.step_counts().values(), default=0), manifest.get("step")
    if isinstance(step, int) and most > step:
        raise UserError(
            f"{folder / MANIFEST} is of optimizer step {step} and the optimizer's state of step {most:g}: "
            "files of two checkpoints are mixed; copy the checkpoint again or take another one"
        )
    return _as_the_manifest_says(reader, folder, manifest)


def _refuse_foreign_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """A file of another save has its size and sound checksums of its own: the manifest's CRC32 tells it.

    It is put together from the checksums inside the file, so that nothing has to be read for it.
    """
    for name, entry in manifest["files"].items():
        file = folder / name
        if file.suffix == ".safetensors":
            members = [span.member for stored in read_header(file).tensors.values() for span in stored.spans]
        elif file.suffix == ".pt":
            members = list(zip_members(file).values())
        else:
            continue
        parts = {member.offset: (member.offset, member.size, member.crc32) for member in members if member.size}
        known = [(offset, size, crc) for offset, size, crc in parts.values() if crc is not None]
        if len(known) == len(parts) and f"{crc32_by_parts(file, known):08x}" != entry["crc32"]:
            raise UserError(
                f"{file} is not the file that {folder / MANIFEST} was written for: it is of another save, or "
                "damaged; copy the checkpoint again or take another one"
            )


def _as_the_manifest_says(reader: CheckpointReader, folder: Path, manifest: Mapping[str, Any]) -> CheckpointReader:
    model = folder / "model"
    excluded = {name: tuple(shape) for name, shape in (manifest.get("excluded") or {}).items()}
    keys = ("epoch", "position", "mixed_precision", "base_model", "versions", "metrics", "best")
    return dataclasses.replace(
        reader,
        strategy=str(manifest.get("strategy", reader.strategy)),
        world=int(manifest.get("world", reader.world)),
        step=manifest.get("step", reader.step),
        tied={**reader.tied, **(manifest.get("tied") or {})},
        frozen=reader.frozen | {name for name in manifest.get("frozen") or () if name in reader.weights},
        excluded={**reader.excluded, **excluded},
        optimizer=manifest.get("optimizer") or {},
        model_folder=model if model.is_dir() else None,
        details={**reader.details, **{key: manifest[key] for key in keys if key in manifest}},
    )


def _deepspeed(path: Path, folder: Path) -> CheckpointReader:
    tag = find_tag_folder(folder)
    if tag is None:
        raise UserError(f"{folder} holds no folder of DeepSpeed's files: copy the checkpoint again")
    return open_deepspeed(path, tag)


# one file of whole tensors


def _open_whole(path: Path, folder: Path, manifest: Mapping[str, Any]) -> CheckpointReader:
    weights = read_header(folder / "weights.safetensors").tensors
    optimizer = folder / "optimizer.safetensors"
    state = read_header(optimizer) if optimizer.is_file() else Header({}, {})
    return _reader(path, manifest, weights, state.tensors, _numbers(optimizer, state))


def _reader(
    path: Path,
    manifest: Mapping[str, Any],
    tensors: Mapping[str, TensorIndex],
    state: Mapping[str, TensorIndex],
    numbers: Mapping[str, Mapping[str, Any]],
) -> CheckpointReader:
    kept: dict[str, dict[str, TensorIndex]] = {}
    scalars = {name: {key: Scalar(value) for key, value in found.items()} for name, found in numbers.items()}
    for entry, stored in state.items():
        key, _, name = entry.partition(".")
        if key == "step" or (not stored.shape and tensors[name].shape):
            scalars.setdefault(name, {})[key] = Scalar(stored.number(), stored.dtype)
        else:
            kept.setdefault(name, {})[key] = dataclasses.replace(stored, name=name)
    named = set(manifest.get("buffers") or ())
    return CheckpointReader(
        path=path,
        strategy="single",
        world=1,
        step=None,
        weights={name: stored for name, stored in tensors.items() if name not in named},
        buffers={name: stored for name, stored in tensors.items() if name in named},
        optimizer_state=kept,
        optimizer_scalars=scalars,
        engine_dtype=_ENGINE_DTYPES.get(str(manifest.get("mixed_precision", "no")), "F32"),
    )


# a file of shards per process


def _open_sharded(path: Path, folder: Path, manifest: Mapping[str, Any]) -> CheckpointReader:
    files = sorted(folder.glob("slices-rank-*.safetensors"))
    world = manifest.get("world")
    if len(files) != world:
        raise UserError(f"{folder} holds {len(files)} files of slices and was written by {world} processes")
    parts: dict[str, list[tuple[int, tuple[int, ...], TensorIndex]]] = defaultdict(list)
    scalars: dict[str, TensorIndex] = {}
    numbers: dict[str, Any] = {}
    for file in files:
        header = read_header(file)
        places = _places(file, header)
        numbers |= _numbers(file, header)
        for key, stored in header.tensors.items():
            start, shape = places.get(key, (0, ()))
            if shape or key.startswith(("weight.", "buffer.")):
                parts[key].append((start, shape, stored))
            else:
                _check_scalar(key, scalars.setdefault(key, stored), stored)
    whole = {key: _joined(folder, key, pieces) for key, pieces in parts.items()}
    state = {key: stored for key, stored in whole.items() if not key.startswith(("weight.", "buffer."))}
    weights = _named(whole, "weight.")
    scalars = {key: dataclasses.replace(stored, shape=()) for key, stored in scalars.items()}
    reader = _reader(path, manifest, weights, {**state, **scalars}, numbers)
    return dataclasses.replace(reader, weights=weights, buffers=_named(whole, "buffer."))


def _numbers(file: Path, header: Header) -> dict[str, dict[str, Any]]:
    """Parameter -> what the optimizer keeps of it that is no tensor."""
    try:
        return {name: dict(found) for name, found in json.loads(header.metadata.get("numbers", "{}")).items()}
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{file}: the optimizer's numbers in its header cannot be read: damaged") from None


def _check_scalar(key: str, first: TensorIndex, other: TensorIndex) -> None:
    if first.number() != other.number():
        what = "optimizer step" if key.startswith("step.") else key
        raise UserError(
            f"{other.spans[0].member.file} is of {what} {other.number()} and {first.spans[0].member.file} of "
            f"{what} {first.number()}: they are of different saves; copy the checkpoint again or take another one"
        )


def _named(whole: Mapping[str, TensorIndex], prefix: str) -> dict[str, TensorIndex]:
    return {stored.name: stored for key, stored in whole.items() if key.startswith(prefix)}


def _places(file: Path, header: Header) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Tensor -> (its first element, the whole tensor's shape)."""
    try:
        said = json.loads(header.metadata.get("slices", "{}"))
        places = {key: (int(place["start"]), tuple(map(int, place["shape"]))) for key, place in said.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{file}: the table of slices in its header cannot be read: damaged") from None
    missing = next((key for key in header.tensors if key not in places and not key.startswith("step.")), None)
    if missing:
        raise UserError(f"{file}: its header does not say which slice of {missing} it holds: damaged")
    return places


def _joined(folder: Path, key: str, pieces: list[tuple[int, tuple[int, ...], TensorIndex]]) -> TensorIndex:
    """The whole of a tensor from its shards. Raises UserError unless each element is there once."""
    pieces = sorted(pieces, key=lambda piece: (piece[0], piece[2].count))
    shape, dtype, place = pieces[0][1], pieces[0][2].dtype, 0
    spans: list[Span] = []
    for start, whole, stored in pieces:
        if stored.count == 0:
            continue
        if start != place or whole != shape or stored.dtype != dtype:
            raise UserError(f"{stored.spans[0].member.file}: its slice of {key} does not fit those of the other files")
        spans.extend(stored.spans)
        place += stored.count
    if place != math.prod(shape):
        raise UserError(f"{folder}: its files hold {place:,} of the {math.prod(shape):,} elements of {key}")
    return TensorIndex(key.partition(".")[2], shape, dtype, tuple(spans))
