"""A run's own checkpoint (docs/checkpoints.md) as a `CheckpointReader`."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.checksum import combine, crc32_of_range
from toolkit.checkpoint.folder import MANIFEST, fault_of, read_manifest
from toolkit.checkpoint.read.deepspeed_files import find_tag_folder
from toolkit.checkpoint.read.deepspeed_reader import open_deepspeed
from toolkit.checkpoint.read.torch_file import zip_members
from toolkit.checkpoint.reader import CheckpointReader, Member, Scalar, TensorIndex, joined, split_state
from toolkit.checkpoint.tensors_file import Header, read_header
from toolkit.errors import UserError

_ENGINE_DTYPES = {"no": "F32", "bf16": "BF16", "fp16": "F16"}


def open_run_checkpoint(path: Path, folder: Path) -> CheckpointReader:
    """Opens a folder with a manifest. `path`: as the user named it.

    Raises UserError where a file is missing, damaged, or of another size than the manifest says.
    """
    manifest = read_manifest(folder)
    if fault := fault_of(folder):
        raise UserError(f"{fault}; copy the checkpoint again or take another one")
    _refuse_foreign_files(folder, manifest)
    state = manifest.get("state")
    if state == "whole":
        reader = _open_whole(path, folder, manifest)
    elif state == "slices":
        reader = _open_sharded(path, folder, manifest)
    elif state == "deepspeed" and (tag := find_tag_folder(folder)):
        reader = open_deepspeed(path, tag)
    else:
        raise UserError(
            f"{folder / MANIFEST}: its state {state!r} is none of whole, slices and deepspeed, or the files of it are "
            "missing: copy the checkpoint again"
        )
    return _as_the_manifest_says(reader, folder, manifest)


def _refuse_foreign_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """A file of another save has its size and sound checksums of its own: the manifest's CRC32 tells it.

    It is put together from the checksums inside the file: only what lies between its members is read for it.
    """
    for name, entry in manifest["files"].items():
        file, value, place = folder / name, 0, 0
        if file.suffix == ".safetensors":
            members = [span.member for stored in read_header(file).tensors.values() for span in stored.spans]
        else:
            members = list(zip_members(file).values()) if file.suffix == ".pt" else []
        found = {member.offset: member for member in members if member.size}
        for offset, member in [*sorted(found.items()), (file.stat().st_size, Member(file, "", 0, 0, 0))]:
            value = combine(value, crc32_of_range(file, place, offset - place), offset - place) if members else 0
            value, place = combine(value, member.crc32 or 0, member.size), offset + member.size
        if members and all(each.crc32 is not None for each in members) and f"{value:08x}" != entry["crc32"]:
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


# one file of whole tensors, or a file of shards per process


def _open_whole(path: Path, folder: Path, manifest: Mapping[str, Any]) -> CheckpointReader:
    tensors = read_header(folder / "weights.safetensors").tensors
    named, optimizer = set(manifest.get("buffers") or ()), folder / "optimizer.safetensors"
    found = {("buffer." if name in named else "weight.") + name: stored for name, stored in tensors.items()}
    header = read_header(optimizer) if optimizer.is_file() else Header({}, {})
    return _reader(path, manifest, {**found, **header.tensors}, _table(optimizer, header, "numbers"))


def _open_sharded(path: Path, folder: Path, manifest: Mapping[str, Any]) -> CheckpointReader:
    files = sorted(folder.glob("slices-rank-*.safetensors"))
    if len(files) != manifest.get("world"):
        raise UserError(
            f"{folder} holds {len(files)} files of slices and was written by {manifest.get('world')} processes"
        )
    parts: dict[str, list[tuple[int, TensorIndex]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    whole: dict[str, TensorIndex] = {}
    numbers: dict[str, Any] = {}
    for file in files:
        header = read_header(file)
        numbers |= _table(file, header, "numbers")
        places = _table(file, header, "slices")
        for key, stored in header.tensors.items():
            place = places.get(key, {"shape": [], "start": 0}) if key.startswith("step.") else places[key]
            if place["shape"] or key.startswith(("weight.", "buffer.")):
                parts[key].append((int(place["start"]), stored))
                if shapes.setdefault(key, tuple(map(int, place["shape"]))) != tuple(place["shape"]):
                    raise UserError(f"{file}: its slice of {key} is of another shape than in the other files")
            else:
                _check_scalar(key, whole.setdefault(key, dataclasses.replace(stored, shape=())), stored)
    whole |= {key: joined(folder, key, shapes[key], found) for key, found in parts.items()}
    return _reader(path, manifest, whole, numbers)


def _reader(
    path: Path, manifest: Mapping[str, Any], found: Mapping[str, TensorIndex], numbers: Mapping[str, Mapping[str, Any]]
) -> CheckpointReader:
    """`found`: by `KIND.PARAMETER`; `numbers`: parameter -> what the optimizer keeps of it that is no tensor."""
    kinds: dict[str, dict[str, TensorIndex]] = defaultdict(dict)
    for key, stored in found.items():
        kind, _, name = key.partition(".")
        kinds[kind][name] = dataclasses.replace(stored, name=name)
    weights, buffers = kinds.pop("weight", {}), kinds.pop("buffer", {})
    entries = ((name, kind, stored) for kind, tensors in kinds.items() for name, stored in tensors.items())
    kept, scalars = split_state(entries, weights)
    for name, values in numbers.items():
        scalars[name] = {key: Scalar(value) for key, value in values.items()} | scalars.get(name, {})
    return CheckpointReader(
        path=path,
        weights=weights,
        buffers=buffers,
        optimizer_state=kept,
        optimizer_scalars=scalars,
        engine_dtype=_ENGINE_DTYPES.get(str(manifest.get("mixed_precision", "no")), "F32"),
    )


def _table(file: Path, header: Header, name: str) -> dict[str, dict[str, Any]]:
    """A table by names that we wrote into a header."""
    try:
        return {key: dict(found) for key, found in json.loads(header.metadata.get(name, "{}")).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{file}: the table of {name} in its header cannot be read: damaged") from None


def _check_scalar(key: str, first: TensorIndex, other: TensorIndex) -> None:
    one, two = first.number(), other.number()
    if one != two:
        what = "optimizer step" if key.startswith("step.") else key
        raise UserError(
            f"{other.spans[0].member.file} is of {what} {two} and {first.spans[0].member.file} of {what} {one}: "
            "they are of different saves; copy the checkpoint again or take another one"
        )
