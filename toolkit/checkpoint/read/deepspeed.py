"""Opens DeepSpeed's checkpoints as a `CheckpointReader`: finds named tensors in the flat buffers of the ranks' files.

Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py, bf16_optimizer.py): each parameter group is one flat buffer of
its parameters, in the order of `param_shapes`, with gaps under `parameter_alignment`. Each rank has an equal partition
of it. The masters are saved without the padding at the buffer's end, the optimizer's state with it (or without it
under `elastic_checkpoint`).

Stage 3 (stage3.py): each parameter is split into equal partitions, the last ones padded. A rank's partitions are
concatenated in the order of `param_shapes`, in sub-groups of complete partitions.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.torch_archive import TorchArchive, open_torch_archive
from toolkit.checkpoint.read.unpickle import Tensor
from toolkit.checkpoint.tensor_index import (
    CheckpointReader,
    Scalar,
    TensorIndex,
    join_shards,
    missing_files,
    mixed_saves,
)
from toolkit.errors import UserError, listing

Shapes = Mapping[str, tuple[int, ...]]
# By parameter name: (rank, first element in that rank's partition of the group, elements), in order.
Shards = Mapping[str, list[tuple[int, int, int]]]

_FILE = re.compile(
    r"((bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<tensor>\d+)_?(?P<kind>model|optim)_states\.pt"
)
_PIPELINE_OR_EXPERT = re.compile(
    r"layer_\d+.*-model_(\d+-)?(states|\d+).*\.pt|(layer_\d+_)?expert_\d+_.*_states\.pt|expp_rank_.*_states\.pt"
)
_MAX_PROCESSES = 1 << 20  # a larger number means a damaged file


def is_tag_folder(folder: Path) -> bool:
    return folder.is_dir() and any(_FILE.fullmatch(entry.name) for entry in folder.iterdir())


def find_tag_folder(root: Path) -> Path | None:
    """The folder that `latest` names; None if there are no tags. Raises UserError if `latest` names none of them."""
    tags = sorted(entry.name for entry in root.iterdir() if is_tag_folder(entry))
    choices, latest = listing(root / tag for tag in tags), root / "latest"
    if not latest.is_file():
        if not tags:
            return None
        raise UserError(f"{root} has no file `latest` with the name of the newest checkpoint; name one: {choices}")
    if {"pytorch_model", "pytorch_model_1"} <= set(tags):  # accelerate's, where `latest` names the last model
        raise UserError(f"{root} has several models; name one: {choices}")
    tag = latest.read_bytes()[:1000].decode("utf-8", "replace").strip()
    # a tag may have a slash, as epoch-1/step-100
    if {"", "..", "/"} & {tag, *Path(tag).parts} or not is_tag_folder(root / tag):
        hint = f"name an existing one: {choices}" if tags else "and there is no other"
        raise UserError(f"{latest} names {tag!r}, which is not a checkpoint in {root}; {hint}")
    return root / tag


def open_deepspeed(path: Path, tag_folder: Path, model_folder: Path | None = None) -> CheckpointReader:
    """Opens a tag folder of save_checkpoint (ZeRO stage 0 to 3). `path`: as the user passed it.

    Raises UserError if a file is missing, damaged or of another save.
    """
    models, optimizers, stage, world = _open_files(tag_folder)
    model, content = models[0], models[0].content
    ranks = [_Rank(each, stage) for each in optimizers]
    tensors, scalars = _trained_parameters(model, ranks, stage) if stage else ({}, {})
    masters = {name: state.pop("") for name, state in tensors.items()}
    module = model.tensors(content["module"])
    buffers = {name: module.pop(name) for name in content.get("buffer_names") or () if name in module}
    tied = _tied_names(model, module, masters)
    frozen = _frozen_parameters(models, module, {*masters, *tied})
    weights = {name: model.index(name, tensor) for name, tensor in buffers.items()} | masters | frozen
    dtypes = [module[name].dtype for name in masters or weights if name in module]
    return CheckpointReader(
        path=path,
        strategy=f"zero{stage}" if stage else "ddp" if world > 1 else "single",
        world=world,
        step=content.get("global_steps") if type(content.get("global_steps")) is int else None,
        members=tuple(member for opened in (*models, *optimizers) for member in opened.members.values()),
        # in the model's order
        weights={name: weights[name] for name in (*module, *weights) if name in weights},
        buffers=frozenset(buffers),
        # a frozen parameter may be left out, and DeepSpeed then saves its other names all the same
        tied={other: name for other, name in tied.items() if name in weights},
        frozen=frozenset(frozen if stage else ()),
        optimizer_state={name: state for name, state in tensors.items() if state},
        optimizer_scalars=scalars,
        engine_dtype=max(("F32", "BF16", "F16"), key=dtypes.count),
        model_folder=model_folder,
        details={
            "zero_stage": stage,
            "ds_version": content.get("ds_version"),
            "groups": [len(group) for group in content.get("param_shapes") or []],
            "files": len(models) + len(optimizers),
        },
    )


def _open_files(folder: Path) -> tuple[list[TorchArchive], list[TorchArchive], int, int]:
    """(model files: one under stages 0 to 2, by rank under stage 3; optimizer files by rank, none under stage 0; the
    ZeRO stage; the world size). Raises UserError if files are missing, damaged or of different saves."""
    paths = _files_by_rank(folder)
    models = [_open(path, "module") for path in paths["model"].values()]
    optimizers = [_open(path, "optimizer_state_dict") for path in paths["optimizer"].values()]
    stages = [_stage_of(each) for each in optimizers]
    counts = [*(model.content.get("dp_world_size") for model in models), *(_partition_counts(o)[0] for o in optimizers)]
    plausible = (count for count in counts if type(count) is int and 0 < count <= _MAX_PROCESSES)
    world = next(plausible, max([*paths["model"], *paths["optimizer"]]) + 1)
    # under stage 3 each rank has a model file
    sharded = models[0].file.name.startswith("zero_pp_rank_") if models else set(stages) == {3}
    _check_ranks(folder, paths, {"model": world if sharded else 1, "optimizer": world if optimizers else 0})
    _check_same([*models, *optimizers], "ds_version")
    for key in ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "param_shapes"):
        _check_same(models, key)
    for opened in optimizers:
        if any(count != world for count in _partition_counts(opened)):
            raise UserError(
                f"{opened.file} was saved by {_partition_counts(opened)[:4]} processes, and {world} optimizer files "
                "exist: some are missing, or of another save (sharded experts are not supported)"
            )
    stage = max(stages, default=0)
    if stage == 0 and models[0].content.get("param_shapes") is not None:
        raise UserError(f"{folder}: the optimizer files *_optim_states.pt are missing; copy the folder again")
    if len(set(stages)) > 1 or (stage == 3) != sharded:
        raise UserError(f"{folder} has files of several ZeRO stages: they are of two saves")
    return models, optimizers, stage, world


def _files_by_rank(folder: Path) -> dict[str, dict[int, Path]]:
    """Files by kind (model, optimizer) and rank."""
    files: dict[str, dict[int, Path]] = {"model": {}, "optimizer": {}}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if _PIPELINE_OR_EXPERT.fullmatch(path.name) or (match and int(match["tensor"])):
            raise UserError(
                f"{path}: {'tensor' if match else 'pipeline or expert'} parallelism is not supported; DeepSpeed's "
                "ds_to_universal.py reads it"
            )
        if match:
            ranks = files["model" if match["kind"] == "model" else "optimizer"]
            other, first = ranks.setdefault(int(match["rank"] or 0), path), ranks[min(ranks)]
            if other != path or path.name.startswith("bf16_") != first.name.startswith("bf16_"):
                raise mixed_saves(other if other != path else first, path, "their file names")
    return {kind: dict(sorted(ranks.items())) for kind, ranks in files.items()}


def _open(path: Path, key: str) -> TorchArchive:
    """Opens a file. `key`: of the state that it must have."""
    opened = open_torch_archive(path)
    name = f"{opened.archive}.pt"
    if name != path.name and _FILE.fullmatch(name):
        raise UserError(f"{path} was written as {name}: the ranks' files are swapped; copy the folder again")
    if type(opened.content) is not dict or type(opened.content.get(key)) is not dict:
        raise UserError(f"{path} is not a file of DeepSpeed's save_checkpoint: it has no {key}")
    return opened


def _stage_of(optimizer: TorchArchive) -> int:
    state = optimizer.content["optimizer_state_dict"]
    # BF16_Optimizer does not write it
    stage = state.get("zero_stage", 1 if "single_partition_of_fp32_groups" in state else None)
    if stage not in (1, 2, 3):
        raise UserError(f"{optimizer.file} has the ZeRO stage {str(stage)[:20]!r}: not a ZeRO file, or damaged")
    return int(stage)


def _partition_counts(optimizer: TorchArchive) -> list[Any]:
    """The number of partitions of each parameter group."""
    counts = optimizer.content["optimizer_state_dict"].get("partition_count")
    return counts if type(counts) is list and counts else [counts]


def _check_ranks(folder: Path, paths: dict[str, dict[int, Path]], counts: dict[str, int]) -> None:
    """Raises UserError naming all ranks whose files are missing, or files that are left of another save."""
    lines = []
    for kind, files in paths.items():
        if surplus := [path.name for rank, path in files.items() if rank >= counts[kind]]:
            saved = f"{folder} was saved by {counts['optimizer']} processes"
            raise UserError(f"{saved}, and {listing(surplus)} is of another save: remove that save's files")
        if missing := [rank for rank in range(counts[kind]) if rank not in files]:
            lines.append(f"{kind} files of ranks {listing(missing, 16)}")
    if lines:
        processes = f"{max(counts.values())} processes saved it"
        raise missing_files(folder, f"{folder} lacks the {' and the '.join(lines)} ({processes})")


def _check_same(files: Collection[TorchArchive], key: str) -> None:
    first, *others = files
    for other in others:
        one, two = other.content.get(key), first.content.get(key)
        if one != two:
            values = f" ({one!r} and {two!r})" if type(two) in (int, str) else ""
            raise mixed_saves(other.file, first.file, f"{key}{values}")


class _Rank:
    """A rank's optimizer file: by group the flat masters (key ""), and the optimizer's state of them."""

    def __init__(self, opened: TorchArchive, stage: int) -> None:
        self.opened, self.file = opened, opened.file
        self.content: dict[str, Any] = opened.content["optimizer_state_dict"]
        masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        groups = self.content[masters]
        states = self._states(self.content.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state"))
        self.groups = [{"": group, **states.get(number, {})} for number, group in enumerate(groups)]
        # the masters are saved without the padding at the buffer's end, BF16_Optimizer's with it
        paddings = (self.content.get("group_paddings") or []) if "zero_stage" in self.content else []
        paddings = [*paddings, *[0] * len(groups)]
        self.sizes = [group.count + max(0, padding) for group, padding in zip(groups, paddings, strict=False)]

    def _states(self, saved: Any) -> dict[int, dict[str, Any]]:
        """Group number -> the optimizer's state of it."""
        if type(saved) is list:  # elastic_checkpoint
            steps = dict.fromkeys(range(len(saved)), self.content.get("base_optimizer_state_step"))
            states = dict(enumerate(saved))
        else:
            groups, states = (saved or {}).get("param_groups") or [], (saved or {}).get("state") or {}
            steps = {index: group.get("step") for group in groups for index in group["params"]}
        counts = {index: {} if step is None else {"step": step} for index, step in steps.items()}
        return {index: counts[index] | states[index] for index in steps if index in states}

    def flat(self, number: int, key: str) -> TensorIndex:
        """A group's flat buffer of masters (key "") or of a state; empty if the rank has only padding."""
        tensor, masters = self.groups[number].get(key), self.groups[number][""]
        if tensor is None:
            return TensorIndex(key, (0,), masters.dtype, ())
        flat = self.opened.index(f"group {number}", tensor)
        if flat.shape not in ((self.sizes[number],), masters.shape):
            counts = f"{flat.count:,} elements of {key} and {self.sizes[number]:,} weights"
            raise UserError(f"{self.file}: group {number} has {counts}: damaged?")
        return flat

    def addresses(self, number: int) -> dict[str, tuple[int, int]]:
        """Parameter -> (first element, elements) in this rank's partition of a group, if the file has them."""
        zero = (self.opened.content.get("ds_config") or {}).get("zero_optimization") or {}
        mappings = self.content.get("param_slice_mappings") or []
        # those of 0.19.8 are wrong under round_robin_gradients, which reorders parameters
        if not zero or zero.get("round_robin_gradients") or number >= len(mappings):
            return {}
        return {name: (each.state["start"], each.state["numel"]) for name, each in mappings[number].items()}


def _trained_parameters(
    model: TorchArchive, ranks: list[_Rank], stage: int
) -> tuple[dict[str, dict[str, TensorIndex]], dict[str, dict[str, Scalar]]]:
    """(tensors, scalars) by parameter and key of its state, "" for its master. Raises UserError for wrong sizes."""
    groups = model.content.get("param_shapes") or []  # by sub-group under stage 3
    names = [name for group in groups for name in group]
    if not groups or len(set(names)) < len(names):
        raise UserError(f"{model.file}: its param_shapes are missing, or have a parameter twice: damaged?")
    for rank in ranks:
        if len(rank.groups) != len(groups):
            raise mixed_saves(rank.file, model.file, f"their groups ({len(rank.groups)} and {len(groups)})")
    tensors: dict[str, dict[str, TensorIndex]] = {name: {} for name in names}
    scalars: dict[str, dict[str, Scalar]] = {}
    shards_of = _shards_of_parameters if stage == 3 else _shards_of_buffer
    for number, shapes in enumerate(groups):
        for name, key, tensor in _tensors_of_group(ranks, shapes, number, shards_of(ranks, number, shapes)):
            tensors[name][key] = tensor
        scalars.update(dict.fromkeys(shapes, _scalars(ranks, number)))
    return tensors, scalars


def _shards_of_buffer(ranks: list[_Rank], number: int, shapes: Shapes) -> Shards:
    """Stages 1 and 2: each parameter's range in the flat buffer, split where a rank's partition of the buffer ends."""
    first, size = ranks[0], ranks[0].sizes[number]
    gaps = first.content.get("param_alignment_paddings")
    for rank in ranks[1:]:
        if rank.content.get("param_alignment_paddings") != gaps or rank.sizes[number] != size:
            sizes = f"{rank.sizes[number]:,} and {size:,} elements"
            raise mixed_saves(rank.file, first.file, f"their partition of group {number} ({sizes}), or its padding")
    gaps = gaps[number] if type(gaps) is list and number < len(gaps) else [0] * len(shapes)
    if min(gaps, default=0) < 0:
        raise ValueError("param_alignment_paddings below 0")
    shards, start = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = start + math.prod(shape)
        owners = range(start // size, min(-(-end // size), len(ranks))) if end > start else range(0)
        ranges = [(index, max(start, index * size), min(end, (index + 1) * size)) for index in owners]
        shards[name] = [(index, low - index * size, high - low) for index, low, high in ranges]
        start = end + gap
    count = sum(rank.groups[number][""].count for rank in ranks)
    # the padding of the buffer to a multiple of 2 x world may be saved
    if not start <= count < start + 2 * len(ranks):
        raise _wrong_count(first, number, count, start)
    for index, rank in enumerate(ranks):  # compared with the addresses that DeepSpeed saves
        for name, (address, count) in rank.addresses(number).items():
            if count and (index, address, count) not in shards.get(name, []):
                raise mixed_saves(rank.file, first.file, f"the address of {name}")
    return shards


def _shards_of_parameters(ranks: list[_Rank], number: int, shapes: Shapes) -> Shards:
    """Stage 3: each parameter's equal partitions, the last ones without their padding."""
    shards, start = {}, 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        size = -(-count // len(ranks))
        shards[name] = [(index, start, max(0, min(size, count - index * size))) for index in range(len(ranks))]
        start += size
    for rank in ranks:
        if (count := rank.groups[number][""].count) != start:
            raise _wrong_count(rank, number, count, start)
    return shards


def _wrong_count(rank: _Rank, number: int, count: int, expected: int) -> UserError:
    counts = f"group {number} has {count:,} elements and should have {expected:,}"
    return UserError(f"{rank.file}: {counts}: files of different saves are mixed, one is damaged, or offloaded to NVMe")


def _tensors_of_group(
    ranks: list[_Rank], shapes: Shapes, number: int, shards: Shards
) -> Iterator[tuple[str, str, TensorIndex]]:
    """(parameter, state's key or "", tensor)."""
    entries = [entry for rank in ranks for entry in rank.groups[number].items()]
    for key in dict.fromkeys(key for key, value in entries if type(value) is Tensor and (value.shape or not key)):
        flats = [rank.flat(number, key) for rank in ranks]
        for name, shape in shapes.items():
            starts = itertools.accumulate((count for _, _, count in shards[name]), initial=0)
            parts = [flats[index].cut(start, count) for index, start, count in shards[name]]
            yield name, key, join_shards(ranks[0].file.parent, name, shape, zip(starts, parts, strict=False))


def _scalars(ranks: list[_Rank], number: int) -> dict[str, Scalar]:
    """The optimizer's values for a whole group, by rank if they differ. Raises UserError for different steps."""
    by_key: dict[str, list[Scalar]] = {}
    for rank in ranks:
        for key, value in rank.groups[number].items():
            if scalar := _scalar(rank, key, value):
                by_key.setdefault(key, []).append(scalar)
                first = by_key[key][0].value
                if key == "step" and scalar.value != first:
                    steps = f"{scalar.value:g} and {first:g}"
                    raise mixed_saves(rank.file, ranks[0].file, f"the optimizer step ({steps})")
    scalars = {}
    for key, (first, *others) in by_key.items():
        values = (first.value, *(other.value for other in others))
        scalars[key] = Scalar(values, first.dtype) if len(set(values)) > 1 else first
    return scalars


def _scalar(rank: _Rank, key: str, value: Any) -> Scalar | None:
    if type(value) is Tensor and not value.shape:
        tensor = rank.opened.index(key, value)
        if tensor.spans[0].member.size < 1000:  # cheap to verify
            tensor.spans[0].member.verify()
        return Scalar(tensor.number(), tensor.dtype)
    return Scalar(value) if type(value) in (bool, int, float, str, type(None)) else None


def _tied_names(model: TorchArchive, module: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, str]:
    """Other name -> name."""
    shared = model.content.get("shared_params")
    if type(shared) is not dict:
        return model.tied(module)
    return {b if a in trained and b not in trained else a: a if a in trained else b for a, b in shared.items()}


def _frozen_parameters(
    models: list[TorchArchive], module: Mapping[str, Tensor], others: Collection[str]
) -> dict[str, TensorIndex]:
    """The parameters that are not in `others`."""
    shapes: Shapes = models[0].content.get("frozen_param_shapes") or {}
    frozen: dict[str, TensorIndex] = {}
    for name, shape in shapes.items():
        # stage 2 has the full parameter, stage 3 a shard in each rank's file, the last ones padded
        shards, start = [], 0
        for model in models:
            shard = model.index(name, model.content["frozen_param_fragments"][name]).cut(0, math.prod(shape) - start)
            shards.append((start, shard))
            start += shard.count
        frozen[name] = join_shards(models[0].file.parent, name, shape, shards)
    for name, tensor in module.items():  # only in `module`: all under stage 0, frozen ones under stage 1
        if name not in others and name not in shapes:
            if len(models) > 1 and tensor.shape == (0,):
                raise UserError(f"{models[0].file}: {name} is a placeholder, and no file has its shard")
            frozen[name] = models[0].index(name, tensor)
    return frozen
