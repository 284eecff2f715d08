"""FSDP folders of `accelerator.save_state`: a whole file, or torch.distributed.checkpoint's shards.

A sharded folder holds `.metadata`, a pickle that says which rectangle of which tensor lies where, and
`__RANK_N.distcp` files, each a row of small files of torch.save. Parameters and buffers have no mark that
would tell them apart: all are `weights`. The optimizer's state is left alone: only a run's own checkpoints are resumed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.torch_file import open_torch_file
from toolkit.checkpoint.read.unpickle import MOST_BYTES, Inert, Tensor, unpickle
from toolkit.checkpoint.read.weights_reader import main_dtype, torch_tensors
from toolkit.checkpoint.reader import CheckpointReader, TensorIndex, joined
from toolkit.errors import UserError, listing

FULL = "pytorch_model_fsdp.bin"
SHARDED = "pytorch_model_fsdp_0"
_PREFIX = "model."

# (tensor, offsets of a chunk) -> (file, first byte, bytes).
_Places = Mapping[tuple[str, tuple[int, ...]], tuple[Path, int, int]]


def is_fsdp_folder(folder: Path) -> bool:
    return (folder / FULL).is_file() or (folder / SHARDED).is_dir() or any(folder.glob("pytorch_model_fsdp_*rank*.bin"))


def open_fsdp(folder: Path) -> CheckpointReader:
    """Opens FULL_STATE_DICT and SHARDED_STATE_DICT. Raises UserError where a file is missing or damaged."""
    tied: dict[str, str] = {}
    if (folder / SHARDED).is_dir():
        weights = _sharded(folder / SHARDED)
    elif (folder / FULL).is_file():
        weights, tied = torch_tensors(folder / FULL)
    else:
        raise UserError(
            f"{folder}: FSDP's local state of each process (pytorch_model_fsdp_*_rank*.bin) is not supported; "
            "save with fsdp_state_dict_type SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    if not weights:
        raise UserError(f"{folder}: its files hold no tensors under `model`, as accelerate writes them")
    writers = {span.member.file for stored in weights.values() for span in stored.spans}
    return CheckpointReader(
        path=folder,
        strategy="fsdp2",
        world=len(list(folder.glob("random_states_*.pkl"))) or max(1, len(writers)),
        weights=weights,
        tied=tied,
        engine_dtype=main_dtype(stored.dtype for stored in weights.values()),
        model_folder=folder if (folder / "config.json").is_file() else None,
        details={"sharded": (folder / SHARDED).is_dir()},
    )


def _sharded(folder: Path) -> dict[str, TensorIndex]:
    """The model's tensors of torch.distributed.checkpoint."""
    metadata = folder / ".metadata"
    if not metadata.is_file():
        raise UserError(f"{metadata} is missing, without which the shards cannot be read; copy the folder again")
    with metadata.open("rb") as opened:
        structure = opened.read(MOST_BYTES + 1)  # more are refused
    try:
        content = unpickle(structure, metadata).state
        places = _places(folder, content["storage_data"])
        return {
            name.removeprefix(_PREFIX): _whole(folder, name, entry.state, places)
            for name, entry in content["state_dict_metadata"].items()
            if entry.name.endswith(".TensorStorageMetadata") and name.startswith(_PREFIX)
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{metadata} is damaged, or of a version that is not known ({type(error).__name__}: {error})"
        ) from None


def _places(folder: Path, storage: Mapping[Inert, Inert]) -> _Places:
    places = {}
    for index, info in storage.items():
        name = info.state["relative_path"]
        if Path(name).name != name or info.state.get("transform_descriptors"):
            raise ValueError(f"a shard {name} that is elsewhere or compressed")
        key = index.state["fqn"], tuple(index.state.get("offset") or ())
        places[key] = folder / name, info.state["offset"], info.state["length"]
    if missing := sorted({file for file, _, _ in places.values() if not file.is_file()}):
        path = shlex.quote(str(folder.resolve()))
        raise UserError(
            f"{listing(missing)} {'are' if len(missing) > 1 else 'is'} missing: copy the folder again; where machines "
            "share no disk each has the files of its own processes (__RANK_...), to be brought together here: "
            f"`rsync -a OTHER_MACHINE:{path}/ {path}/`"
        )
    return places


def _whole(folder: Path, name: str, entry: Mapping[str, Any], places: _Places) -> TensorIndex:
    """A tensor of its chunks. Raises ValueError where it is sharded along other dimensions than the first."""
    shape, parts = entry["size"], []
    for chunk in entry["chunks"]:
        offsets, sizes = chunk.state["offsets"], chunk.state["sizes"]
        if not math.prod(sizes):
            continue
        if any(offsets[1:]) or sizes[1:] != shape[1:]:
            raise ValueError(f"{name} is sharded along other dimensions than the first")
        file, start, length = places[name, offsets]
        opened = open_torch_file(file, start=start, size=length)
        if type(opened.content) is not Tensor or opened.content.shape != sizes:
            raise UserError(f"{file}: at byte {start} it has something else than a chunk of {name}: damaged")
        parts.append(((offsets or (0,))[0] * math.prod(shape[1:]), opened.stored(name, opened.content)))
    return joined(folder, name.removeprefix(_PREFIX), shape, parts)
