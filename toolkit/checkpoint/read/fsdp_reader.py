"""FSDP folders of `accelerator.save_state`: a whole file, or torch.distributed.checkpoint's shards.

A sharded folder holds `.metadata`, a pickle that says which rectangle of which tensor lies where, and
`__RANK_N.distcp` files, each a row of small files of torch.save. Parameters and buffers have no mark that
would tell them apart: all are `weights`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.torch_file import open_torch_file
from toolkit.checkpoint.read.unpickle import DISTRIBUTED, MOST_BYTES, Inert, Tensor, unpickle
from toolkit.checkpoint.read.weights_reader import main_dtype, torch_tensors
from toolkit.checkpoint.reader import CheckpointReader, Scalar, Span, TensorIndex
from toolkit.errors import UserError, listing

FULL = "pytorch_model_fsdp.bin"
SHARDED = "pytorch_model_fsdp_0"
_METADATA = ".metadata"


def is_fsdp_folder(folder: Path) -> bool:
    return (folder / FULL).is_file() or (folder / SHARDED).is_dir() or any(folder.glob("pytorch_model_fsdp_*rank*.bin"))


def open_fsdp(path: Path, folder: Path) -> CheckpointReader:
    """Opens FULL_STATE_DICT and SHARDED_STATE_DICT. Raises UserError where a file is missing or damaged."""
    tied: dict[str, str] = {}
    if (folder / SHARDED).is_dir():
        weights = _sharded(folder / SHARDED, "model.")
        state = _sharded(folder / "optimizer_0", "optimizer.state.") if (folder / "optimizer_0").is_dir() else {}
    elif (folder / FULL).is_file():
        weights, tied = torch_tensors(folder / FULL)
        state = _optimizer(folder / "optimizer.bin") if (folder / "optimizer.bin").is_file() else {}
    else:
        raise UserError(
            f"{folder}: FSDP's local state of each process (pytorch_model_fsdp_*_rank*.bin) is not supported; "
            "save with fsdp_state_dict_type SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    if not weights:
        raise UserError(f"{folder}: its files hold no tensors under `model`, as accelerate writes them")
    kept, scalars = _optimizer_state(state, weights)
    return CheckpointReader(
        path=path,
        strategy="fsdp2",
        world=len(list(folder.glob("random_states_*.pkl"))) or _writers(weights),
        step=None,
        weights=weights,
        tied=tied,
        optimizer_state=kept,
        optimizer_scalars=scalars,
        engine_dtype=main_dtype(weights.values()),
        model_folder=folder if (folder / "config.json").is_file() else None,
        details={"sharded": (folder / SHARDED).is_dir()},
    )


def _writers(weights: Mapping[str, TensorIndex]) -> int:
    return max(1, len({span.member.file for stored in weights.values() for span in stored.spans}))


def _optimizer_state(
    state: Mapping[str, TensorIndex], weights: Mapping[str, TensorIndex]
) -> tuple[dict[str, dict[str, TensorIndex]], dict[str, dict[str, Scalar]]]:
    """Of `NAME.exp_avg`, `NAME.step`, ... those whose name and shape are a weight's."""
    kept: dict[str, dict[str, TensorIndex]] = {}
    scalars: dict[str, dict[str, Scalar]] = {}
    for key, stored in state.items():
        name, _, kind = key.rpartition(".")
        if name in weights and (kind == "step" or (not stored.shape and weights[name].shape)) and stored.count == 1:
            scalars.setdefault(name, {})[kind] = Scalar(stored.number(), stored.dtype)
        elif name in weights and stored.shape == weights[name].shape:
            kept.setdefault(name, {})[kind] = TensorIndex(name, stored.shape, stored.dtype, stored.spans)
    return kept, scalars


def _optimizer(file: Path) -> dict[str, TensorIndex]:
    """`NAME.exp_avg`, ... of a whole optimizer, whose state FSDP keeps by name."""
    opened = open_torch_file(file)
    state = opened.content.get("state") if type(opened.content) is dict else None
    if type(state) is not dict:
        raise UserError(f"{file}: it has no state of an optimizer; copy the folder again")
    return {
        f"{name}.{kind}": opened.stored(f"{name}.{kind}", value)
        for name, kinds in state.items()
        if type(name) is str and type(kinds) is dict
        for kind, value in kinds.items()
        if type(value) is Tensor
    }


# torch.distributed.checkpoint


@dataclass(frozen=True)
class _Place:
    """Where a chunk lies: `length` bytes of `file` from `offset` on."""

    file: Path
    offset: int
    length: int


def _sharded(folder: Path, prefix: str) -> dict[str, TensorIndex]:
    """The tensors whose names begin with `prefix`, without it."""
    metadata = folder / _METADATA
    if not metadata.is_file():
        raise UserError(f"{metadata} is missing, without which the shards cannot be read; copy the folder again")
    if metadata.stat().st_size > MOST_BYTES:
        raise UserError(f"{metadata} holds {metadata.stat().st_size:,} bytes, more than is believable: damaged?")
    try:
        content = unpickle(metadata.read_bytes(), metadata, DISTRIBUTED).state
        places = _places(folder, content["storage_data"])
        tensors = {
            name: _chunks(entry.state)
            for name, entry in content["state_dict_metadata"].items()
            if entry.name.endswith(".TensorStorageMetadata")
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{metadata} is damaged, or of a version that is not known ({type(error).__name__}: {error})"
        ) from None
    return {
        name.removeprefix(prefix): _stored(metadata, name, prefix, shape, chunks, places)
        for name, (shape, chunks) in tensors.items()
        if name.startswith(prefix)
    }


_Chunk = tuple[tuple[int, ...], tuple[int, ...]]


def _chunks(state: Mapping[str, Any]) -> tuple[tuple[int, ...], list[_Chunk]]:
    """(shape, [(offsets, sizes)]) of a tensor."""
    shape = state["size"]
    chunks = [(chunk.state["offsets"], chunk.state["sizes"]) for chunk in state["chunks"]]
    if any(len(part) != len(shape) for chunk in chunks for part in chunk):
        raise ValueError("a chunk of another number of dimensions than its tensor")
    return shape, chunks


def _places(folder: Path, storage: Mapping[Inert, Inert]) -> dict[tuple[str, tuple[int, ...]], _Place]:
    """(tensor, offsets of a chunk) -> where it lies."""
    places: dict[tuple[str, tuple[int, ...]], _Place] = {}
    for index, info in storage.items():
        name = info.state["relative_path"]
        if Path(name).name != name or info.state.get("transform_descriptors"):
            raise ValueError(f"a shard {name} that is elsewhere or compressed")
        place = _Place(folder / name, info.state["offset"], info.state["length"])
        places[index.state["fqn"], tuple(index.state.get("offset") or ())] = place
    _refuse_missing(folder, sorted({place.file for place in places.values() if not place.file.is_file()}))
    return places


def _refuse_missing(folder: Path, missing: list[Path]) -> None:
    """`__1_0.distcp` is of rank 1."""
    if not missing:
        return
    path = shlex.quote(str(folder.resolve()))
    raise UserError(
        f"{listing(missing)} {'are' if len(missing) > 1 else 'is'} missing: copy the folder again; where machines "
        "share no disk each has the files of its own processes (__RANK_...), to be brought together here: "
        f"`rsync -a OTHER_MACHINE:{path}/ {path}/`"
    )


def _stored(
    metadata: Path,
    name: str,
    prefix: str,
    shape: tuple[int, ...],
    chunks: list[_Chunk],
    places: Mapping[tuple[str, tuple[int, ...]], _Place],
) -> TensorIndex:
    if not all(offsets[1:] == (0,) * len(offsets[1:]) and sizes[1:] == shape[1:] for offsets, sizes in chunks):
        raise UserError(f"{metadata}: {name} is sharded along other dimensions than the first, which is not supported")
    spans, dtypes, rows = [], set(), 0
    for offsets, sizes in sorted(chunk for chunk in chunks if math.prod(chunk[1])):
        if offsets and offsets[0] != rows:
            break
        span, dtype = _open_chunk(metadata, name, sizes, places.get((name, offsets)))
        spans.append(span)
        dtypes.add(dtype)
        rows += sizes[0] if sizes else 1
    if sum(span.count for span in spans) != math.prod(shape) or len(dtypes) > 1:
        raise UserError(f"{metadata}: the chunks of {name} do not make its shape {list(shape)}: damaged")
    return TensorIndex(name.removeprefix(prefix), shape, next(iter(dtypes), "F32"), tuple(spans))


def _open_chunk(metadata: Path, name: str, sizes: tuple[int, ...], place: _Place | None) -> tuple[Span, str]:
    if place is None:
        raise UserError(f"{metadata}: it does not say where a chunk of {name} lies: damaged")
    opened = open_torch_file(place.file, start=place.offset, size=place.length)
    if type(opened.content) is not Tensor or opened.content.shape != sizes:
        raise UserError(f"{place.file}: at byte {place.offset} it has something else than a chunk of {name}: damaged")
    return opened.span(opened.content, name), opened.content.dtype
