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
from toolkit.checkpoint.reader import CheckpointReader, Member, Scalar, TensorIndex, joined
from toolkit.checkpoint.tensors_file import Header, read_header
from toolkit.errors import UserError

_WEIGHTS, _OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
_ENGINE_DTYPES = {"no": "F32", "bf16": "BF16", "fp16": "F16"}


def open_run_checkpoint(path: Path, folder: Path) -> CheckpointReader:
    """Opens a folder with a manifest. `path`: as the user named it.

    Raises UserError where a file is missing, damaged, or of another size than the manifest says.
    """
    manifest = read_manifest(folder)
    if fault := fault_of(folder):
        raise UserError(f"{fault}; copy the checkpoint again or take another one")
    _refuse_foreign_files(folder, manifest)
    state, world = manifest.get("state"), manifest.get("world")
    slices = sorted(folder.glob("slices-rank-*.safetensors"))
    if state == "deepspeed" and (tag := find_tag_folder(folder)):
        reader = open_deepspeed(path, tag)
    elif state == "whole":
        optimizer = folder / _OPTIMIZER
        reader = _open_ours(path, [folder / _WEIGHTS, *([optimizer] if optimizer.is_file() else [])], manifest)
    elif state == "slices" and len(slices) == world:
        reader = _open_ours(path, slices, manifest)
    else:
        raise UserError(
            f"{folder / MANIFEST}: its state is {state!r}, written by {world} processes, and the folder holds "
            f"{len(slices)} files of slices: not all files are there; copy the checkpoint again"
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
        if not members or any(each.crc32 is None for each in members):
            continue
        found = {member.offset: member for member in members if member.size}
        for offset, member in [*sorted(found.items()), (file.stat().st_size, Member(file, "", 0, 0, 0))]:
            value = combine(value, crc32_of_range(file, place, offset - place), offset - place)
            value, place = combine(value, member.crc32 or 0, member.size), offset + member.size
        if f"{value:08x}" != entry["crc32"]:
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


def _open_ours(path: Path, files: list[Path], manifest: Mapping[str, Any]) -> CheckpointReader:
    """Files of whole tensors, or one of shards per process. A tensor is KEY.PARAMETER, but in weights.safetensors."""
    parts: dict[tuple[str, str], list[tuple[int, TensorIndex]]] = defaultdict(list)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    scalars: dict[str, dict[str, Scalar]] = defaultdict(dict)
    for file in files:
        header = read_header(file)
        places = _table(file, header, "slices")
        for parameter, numbers in _table(file, header, "numbers").items():
            scalars[parameter] |= {key: Scalar(value) for key, value in numbers.items()}
        for name, stored in header.tensors.items():
            key, _, parameter = name.partition(".")
            if file.name == _WEIGHTS:
                key, parameter = "buffer" if name in (manifest.get("buffers") or ()) else "weight", name
            place = places.get(name, {"shape": () if places else stored.shape, "start": 0})
            shape, there = tuple(map(int, place["shape"])), parts[key, parameter]
            if shapes.setdefault((key, parameter), shape) != shape:
                raise UserError(f"{file}: its slice of {name} is of another shape than in the other files")
            if shape or not there:
                there.append((int(place["start"]), stored))
            else:  # what each process has
                _compare_scalars(name, there[0][1], stored)
    tensors: dict[str, dict[str, TensorIndex]] = defaultdict(dict)
    for (key, parameter), found in parts.items():
        tensors[key][parameter] = joined(path, parameter, shapes[key, parameter], found)
    weights, buffers = tensors.pop("weight", {}), tensors.pop("buffer", {})
    kept: dict[str, dict[str, TensorIndex]] = defaultdict(dict)
    for key, named in tensors.items():
        for parameter, stored in named.items():
            if key == "step" or (not stored.shape and weights[parameter].shape):
                scalars[parameter][key] = Scalar(stored.number(), stored.dtype)
            else:
                kept[parameter][key] = stored
    return CheckpointReader(
        path=path,
        weights=weights,
        buffers=buffers,
        optimizer_state=dict(kept),
        optimizer_scalars=dict(scalars),
        engine_dtype=_ENGINE_DTYPES.get(str(manifest.get("mixed_precision", "no")), "F32"),
    )


def _table(file: Path, header: Header, name: str) -> dict[str, dict[str, Any]]:
    """A table by names that we wrote into a header."""
    try:
        return {key: dict(found) for key, found in json.loads(header.metadata.get(name, "{}")).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{file}: the table of {name} in its header cannot be read: damaged") from None


def _compare_scalars(name: str, first: TensorIndex, other: TensorIndex) -> None:
    one, two = first.number(), other.number()
    if one != two:
        what = "optimizer step" if name.startswith("step.") else name
        raise UserError(
            f"{other.spans[0].member.file} is of {what} {two} and {first.spans[0].member.file} of {what} {one}: "
            "they are of different saves; copy the checkpoint again or take another one"
        )
