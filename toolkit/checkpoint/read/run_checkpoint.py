"""A run's own checkpoint (docs/checkpoints.md) as a `CheckpointReader`."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.folder import MANIFEST, fault_of, read_manifest
from toolkit.checkpoint.read.deepspeed import find_tag_folder, open_deepspeed
from toolkit.checkpoint.safetensors_header import Header, read_header
from toolkit.checkpoint.tensor_index import (
    CheckpointReader,
    Member,
    Scalar,
    TensorIndex,
    combine,
    crc32_of_range,
    join_shards,
    mixed_saves,
)
from toolkit.errors import UserError

_WEIGHTS, _OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
_ENGINE_DTYPES = {"no": "F32", "bf16": "BF16", "fp16": "F16"}
_DETAILS = ("epoch", "position", "mixed_precision", "base_model", "versions", "metrics", "best")


def open_run_checkpoint(path: Path, folder: Path) -> CheckpointReader:
    """Opens a folder with a manifest. `path`: as the user named it.

    Raises UserError where a file is missing, damaged, or of another size than in the manifest.
    """
    manifest = read_manifest(folder)
    if fault := fault_of(folder):
        raise UserError(f"{fault}; copy the checkpoint again or take another one")
    state, world, model = manifest.get("state"), manifest.get("world"), folder / "model"
    slices = sorted(folder.glob("slices-rank-*.safetensors"))
    if state == "deepspeed" and (tag := find_tag_folder(folder)):
        reader = open_deepspeed(path, tag)
    elif state == "whole":
        files = [folder / _WEIGHTS, folder / _OPTIMIZER]
        reader = _open_ours(path, [file for file in files if file.name == _WEIGHTS or file.is_file()], manifest)
    elif state == "slices" and len(slices) == world:
        reader = _open_ours(path, slices, manifest)
    else:
        files_there = f"{folder} holds {len(slices)} files of slices of {world} processes (state {state!r})"
        raise UserError(f"{files_there}: not all files are there; copy the checkpoint again")
    excluded = {name: tuple(shape) for name, shape in (manifest.get("excluded") or {}).items()}
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
        details={**reader.details, **{key: manifest[key] for key in _DETAILS if key in manifest}},
    )


def check_files(reader: CheckpointReader, folder: Path) -> None:
    """Raises UserError for a file of another save, which has its size and sound checksums of its own.

    The CRC32 to compare with the manifest's is combined from the checksums inside the file: only what lies between its
    members is read for it.
    """
    by_file: dict[Path, dict[int, Member]] = defaultdict(dict)
    for member in reader.members:
        by_file[member.file][member.offset] = member
    for name, entry in read_manifest(folder)["files"].items():
        file, value, place = folder / name, 0, 0
        members = [member for _, member in sorted(by_file[file].items()) if member.size]
        if not members or any(member.crc32 is None for member in members):
            continue
        for member in [*members, Member(file, "", file.stat().st_size, 0, 0)]:
            between = member.offset - place
            value = combine(value, crc32_of_range(file, place, between), between)
            value, place = combine(value, member.crc32 or 0, member.size), member.offset + member.size
        if f"{value:08x}" != entry["crc32"]:
            raise mixed_saves(file, folder / MANIFEST, "the file's checksum")


def _open_ours(path: Path, files: list[Path], manifest: Mapping[str, Any]) -> CheckpointReader:
    """Files of whole tensors, or one of shards per process. A tensor is KEY.PARAMETER, but in weights.safetensors."""
    shards: dict[tuple[str, str], list[tuple[int, TensorIndex]]] = defaultdict(list)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    scalars: dict[str, dict[str, Scalar]] = defaultdict(dict)
    headers = {file: read_header(file) for file in files}
    for file, header in headers.items():
        places = _table(file, header, "slices")
        for parameter, numbers in _table(file, header, "numbers").items():
            scalars[parameter] |= {key: Scalar(value) for key, value in numbers.items()}
        for name, tensor in header.tensors.items():
            key, _, parameter = name.partition(".")
            if file.name == _WEIGHTS:
                key, parameter = "buffer" if name in (manifest.get("buffers") or ()) else "weight", name
            place = places.get(name, {"shape": () if places else tensor.shape, "start": 0})
            shape, others = tuple(map(int, place["shape"])), shards[key, parameter]
            if shapes.setdefault((key, parameter), shape) != shape:
                raise UserError(f"{file}: its slice of {name} is of another shape than in the other files")
            if shape or not others:
                others.append((int(place["start"]), tensor))
            else:  # what each process has
                _compare_scalars(name, others[0][1], tensor)
    tensors: dict[str, dict[str, TensorIndex]] = defaultdict(dict)
    for (key, parameter), parts in shards.items():
        tensors[key][parameter] = join_shards(path, parameter, shapes[key, parameter], parts)
    weights, buffers = tensors.pop("weight", {}), tensors.pop("buffer", {})
    state: dict[str, dict[str, TensorIndex]] = defaultdict(dict)
    for key, by_parameter in tensors.items():
        for parameter, tensor in by_parameter.items():
            if key == "step" or (not tensor.shape and weights[parameter].shape):
                scalars[parameter][key] = Scalar(tensor.number(), tensor.dtype)
            else:
                state[parameter][key] = tensor
    return CheckpointReader(
        path=path,
        members=tuple(
            span.member for header in headers.values() for tensor in header.tensors.values() for span in tensor.spans
        ),
        weights=weights,
        buffers=buffers,
        optimizer_state=dict(state),
        optimizer_scalars=dict(scalars),
        engine_dtype=_ENGINE_DTYPES.get(str(manifest.get("mixed_precision", "no")), "F32"),
    )


def _table(file: Path, header: Header, name: str) -> dict[str, dict[str, Any]]:
    """A table by names that we wrote into a header."""
    try:
        return {key: dict(entry) for key, entry in json.loads(header.metadata.get(name, "{}")).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{file}: the table of {name} in its header cannot be read: damaged") from None


def _compare_scalars(name: str, first: TensorIndex, other: TensorIndex) -> None:
    one, two = other.number(), first.number()
    if one != two:
        key = "the optimizer step" if name.startswith("step.") else name
        raise mixed_saves(other.spans[0].member.file, first.spans[0].member.file, f"{key} ({one} and {two})")
