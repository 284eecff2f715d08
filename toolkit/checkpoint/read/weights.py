"""Opens weights without an optimizer as a `CheckpointReader`: Hugging Face's folders, those of `accelerator.save_state`
under one process, DDP and FSDP, files of torch.save (Lightning's `.ckpt` too), folders of torch.distributed.checkpoint.

The last have a pickled `.metadata` with the offsets of each tensor's chunks, and `__RANK_N.distcp` files, each several
small files of torch.save. The model's tensors are often in a nested dict (`model`, `state_dict`): the one dict that
contains tensors is taken. With several, a tensor's name begins with its dict's key, and `details["states"]` lists them.
Parameters and buffers are not distinguished: all are `weights`. The optimizer's state is ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.folder import first_with
from toolkit.checkpoint.lora import live_name
from toolkit.checkpoint.read.torch_archive import open_torch_archive, read_member
from toolkit.checkpoint.read.unpickle import MAX_BYTES, Inert, Tensor, unpickle
from toolkit.checkpoint.safetensors_header import read_header
from toolkit.checkpoint.tensor_index import FLOATS, CheckpointReader, Member, TensorIndex, join_shards, missing_files
from toolkit.errors import UserError, listing
from toolkit.utils.files import read_table

# In the order in which transformers looks for them; an adapter last, since a folder may have both.
SINGLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
FSDP_FULL, FSDP_SHARDED, DCP_METADATA = "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0", ".metadata"
SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
"""Suffixes of files that may be a model's state."""

_Chunks = Mapping[tuple[str, tuple[int, ...]], tuple[Path, int, int]]
"""(tensor, offsets of a chunk) -> (file, first byte, bytes)."""


def open_weights(path: Path) -> CheckpointReader | None:
    """Opens a file or a folder of weights; None for a folder without any. Raises UserError."""
    folder = path if path.is_dir() else path.parent
    processes = len(list(folder.glob("random_states_*.pkl")))
    strategy = "model"
    if path.is_file():
        reader, processes = _open_file(path), 1
    elif fsdp := _open_fsdp(folder):
        reader, strategy = fsdp, "fsdp2"
    elif model := _open_model(folder):
        reader = model
        if processes or (folder / "optimizer.bin").is_file():
            strategy = "ddp" if processes > 1 else "single"
    else:
        return None
    dtypes = [tensor.dtype for tensor in reader.weights.values()]
    files_read = len({span.member.file for tensor in reader.weights.values() for span in tensor.spans})
    # accelerate saves shards in a subfolder
    model_folders = (folder, folder.parent) if (folder / DCP_METADATA).is_file() else (folder,)
    return dataclasses.replace(
        reader,
        path=path,
        strategy=strategy,
        world=processes or (files_read if strategy == "fsdp2" else 1),
        engine_dtype=max(("F32", "BF16", "F16"), key=dtypes.count),
        model_folder=first_with("config.json", *model_folders),
        details={**reader.details, "files": files_read},
    )


def _open_model(folder: Path) -> CheckpointReader | None:
    """The first existing kind of `SINGLE`, as one file or several with an index."""
    for file in (folder / name for name in SINGLE):
        if file.is_file():
            second = file.with_stem(f"{file.stem}_1")  # as accelerate names them
            if second.is_file():
                raise UserError(f"{folder} has several models ({file.name}, {second.name}): put each in its own folder")
            return _open_file(file)
        if (index := Path(f"{file}.index.json")).is_file():
            return _open_index(index)
    return None


def _open_index(index: Path) -> CheckpointReader:
    weight_map = read_table(index, {}).get("weight_map")
    if not weight_map:
        raise UserError(f"{index} is not an index of weights: it has no weight_map")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{index} names {listing(missing)}, missing in its folder; copy the folder again")
    tensors: dict[str, TensorIndex] = {}
    tied: dict[str, str] = {}
    for file in files:
        opened = _open_file(file)
        if repeated := [name for name in opened.weights if name in tensors]:
            raise UserError(f"{file}: {listing(repeated)} are in another file of its folder too: copy the folder again")
        tensors |= opened.weights
        tied |= opened.tied
    if missing := [name for name in weight_map if name not in tensors and name not in tied]:
        raise UserError(f"{index} names {listing(missing)}, which its files lack; copy the folder again")
    return CheckpointReader(path=index, weights=tensors, tied=tied)


def _open_file(file: Path) -> CheckpointReader:
    """A file of safetensors or torch.save; an adapter's tensors by their names in a live model."""
    if file.suffix == ".safetensors":
        tensors, metadata = read_header(file)
        # safetensors' save_model lists tied names in the metadata, {omitted: written}; accelerate does not
        tied = {name: other for name, other in metadata.items() if other in tensors and name != "format"}
        reader = CheckpointReader(path=file, weights=tensors, tied=tied)
    else:
        reader = _open_archive(file)
    return dataclasses.replace(reader, weights={live_name(name): each for name, each in reader.weights.items()})


def _open_archive(file: Path) -> CheckpointReader:
    """A file of torch.save: a state dict, or nested dicts with one."""
    opened = open_torch_archive(file)
    content = opened.content if type(opened.content) is dict else {}
    if "pytorch-lightning_version" in content:  # the model's keys
        content = {key: content.get(key) for key in ("state_dict", "global_step")}
    tables = _model_states(content, lambda each: type(each) is Tensor and each.dtype in FLOATS and each.shape)
    if not tables:
        raise UserError(f"{file} has no named tensors: not a model's state")
    weights: dict[str, TensorIndex] = {}
    tied: dict[str, str] = {}
    for key, table in tables.items():
        tensors = {f"{key}{name}": tensor for name, tensor in opened.tensors(table).items()}
        tied |= (aliases := opened.tied(tensors))
        weights |= {name: opened.index(name, tensor) for name, tensor in tensors.items() if name not in aliases}
    step = content.get("global_step")
    step = step if type(step) is int else None
    return CheckpointReader(path=file, step=step, weights=weights, tied=tied, details=_details(tables))


def _model_states(content: Mapping[str, Any], is_weight: Callable[[Any], Any]) -> dict[str, Mapping[Any, Any]]:
    """Prefix for the tensors' names -> table of tensors by name. An optimizer's tables are skipped."""
    tables: dict[tuple[str, ...], Mapping[Any, Any]] = {}
    branches: list[tuple[tuple[str, ...], Mapping[Any, Any]]] = [((), content)]
    while branches:
        path, table = branches.pop()
        if any(is_weight(value) for value in table.values()):
            tables[path] = table
        elif "param_groups" not in table:
            inner = [(key, value) for key, value in table.items() if type(key) is str and not key.startswith("optim")]
            branches += [((*path, key), value) for key, value in inner if type(value) is dict]
    if len(tables) < 2:
        return dict(zip([""], tables.values(), strict=False))
    return {"".join(f"{key}." for key in path): table for path, table in sorted(tables.items())}


def _details(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {"states": list(tables)} if len(tables) > 1 else {}


def _open_fsdp(folder: Path) -> CheckpointReader | None:
    """FULL_STATE_DICT or SHARDED_STATE_DICT, or any folder of torch.distributed.checkpoint; None for others."""
    if others := sorted(path.name for path in folder.glob("pytorch_model_fsdp_[1-9]*")):
        raise UserError(f"{folder} has several models (also {others[0]}): put each in its own folder")
    if (folder / FSDP_SHARDED).is_dir():
        return _open_shards(folder / FSDP_SHARDED)
    if (folder / DCP_METADATA).is_file() or any(folder.glob("*.distcp")):
        return _open_shards(folder)
    if (folder / FSDP_FULL).is_file():
        return _open_archive(folder / FSDP_FULL)
    if any(folder.glob("pytorch_model_fsdp_*rank*.bin")):
        raise UserError(
            f"{folder}: FSDP's local state of each process (pytorch_model_fsdp_*_rank*.bin) is not supported; "
            "save with fsdp_state_dict_type SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    return None


def _open_shards(folder: Path) -> CheckpointReader:
    """The model's tensors of torch.distributed.checkpoint."""
    metadata = folder / DCP_METADATA
    if not metadata.is_file():
        raise UserError(f"{metadata} is missing, and the shards cannot be read without it; copy the folder again")
    structure = read_member(Member(metadata, metadata.name, 0, metadata.stat().st_size), MAX_BYTES)
    content = unpickle(structure, metadata).state
    chunks = _chunks(folder, content["storage_data"])
    tree: dict[str, Any] = {}  # the nested dicts that were saved, with flat names and metadata as tensors
    for name, entry in content["state_dict_metadata"].items():
        *keys, last = (content.get("planner_data") or {}).get(name) or (name,)
        table = tree
        for key in keys:
            table = table.setdefault(key, {})
        table[last] = (name, entry.state) if entry.name.endswith(".TensorStorageMetadata") else None
    tables = _model_states(tree, _is_weight)
    tensors = {
        f"{key}{name}": _joined_chunks(folder, value[0], value[1], chunks)
        for key, table in tables.items()
        for name, value in table.items()
        if type(value) is tuple
    }
    if not tensors:
        raise UserError(f"{metadata} lists no tensors of a model")
    return CheckpointReader(path=folder, weights=tensors, details=_details(tables))


def _is_weight(value: Any) -> bool:
    """Whether a flat name and its metadata are of a floating tensor with dimensions, as no counter or random state."""
    if type(value) is not tuple:
        return False
    return bool(value[1]["size"]) and "float" in value[1]["properties"].state[0].path


def _chunks(folder: Path, storage: Mapping[Inert, Inert]) -> _Chunks:
    chunks = {}
    for index, info in storage.items():
        name = info.state["relative_path"]
        if Path(name).name != name or info.state.get("transform_descriptors"):
            raise ValueError(f"a shard {name} that is compressed or in another folder")
        key = index.state["fqn"], tuple(index.state.get("offset") or ())
        chunks[key] = folder / name, info.state["offset"], info.state["length"]
    if missing := sorted({file for file, _, _ in chunks.values() if not file.is_file()}):
        raise missing_files(folder, f"{listing(missing)} {'are' if len(missing) > 1 else 'is'} missing")
    return chunks


def _joined_chunks(folder: Path, name: str, entry: Mapping[str, Any], chunks: _Chunks) -> TensorIndex:
    """Joins a tensor's chunks. Raises ValueError if it is not sharded along its first dimension."""
    shape, shards = entry["size"], []
    for chunk in entry["chunks"]:
        offsets, sizes = chunk.state["offsets"], chunk.state["sizes"]
        if not math.prod(sizes):
            continue
        if any(offsets[1:]) or sizes[1:] != shape[1:]:
            raise ValueError(f"{name} is not sharded along its first dimension")
        file, start, length = chunks[name, offsets]
        opened = open_torch_archive(file, start=start, size=length)
        if type(opened.content) is not Tensor or opened.content.shape != sizes:
            raise UserError(f"{file}: the bytes at {start} are not a chunk of {name}: damaged")
        shards.append(((offsets or (0,))[0] * math.prod(shape[1:]), opened.index(name, opened.content)))
    return join_shards(folder, name, shape, shards)
