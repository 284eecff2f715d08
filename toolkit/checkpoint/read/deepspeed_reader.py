"""A DeepSpeed checkpoint as a `CheckpointReader`: from the flat buffers of the ranks' files to named tensors.

Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py, bf16_optimizer.py): each parameter group is one flat buffer,
its parameters one after the other in the order of `param_shapes`, with gaps under `parameter_alignment`. It is cut
into equal partitions, one for each rank. The masters are saved without the padding at the buffer's end, the
optimizer's state with it (or without it under `elastic_checkpoint`).

Stage 3 (stage3.py): each parameter is cut into equal partitions, the last ones padded. Those of a rank lie one after
the other in the order of `param_shapes`, cut into sub-groups between parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.deepspeed_files import Files, is_sharded, open_files, optimizer_of, partition_counts
from toolkit.checkpoint.read.torch_file import TorchFile, verify_member
from toolkit.checkpoint.read.unpickle import Tensor
from toolkit.checkpoint.read.weights_reader import main_dtype, tied_tensors
from toolkit.checkpoint.reader import CheckpointReader, Scalar, TensorIndex, joined
from toolkit.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]
# By parameter name: (rank, first element in that rank's part of the group, elements), in order.
Pieces = Mapping[str, list[tuple[int, int, int]]]
_COPY_AGAIN = "they are of different saves; copy the folder again or take another checkpoint"


def open_deepspeed(path: Path, tag_folder: Path, model_folder: Path | None = None) -> CheckpointReader:
    """Opens a tag folder of save_checkpoint (ZeRO stage 0 to 3). `path`: as the user named it.

    Raises UserError where a file is missing, damaged, of another save, or the sizes do not add up.
    """
    files = open_files(tag_folder)
    stage, model = _stage(files), files.models[0]
    tensors, scalars = _owned_by_optimizer(files, stage) if stage else ({}, {})
    masters = {name: kept.pop("") for name, kept in tensors.items()}
    module, content = model.tensors(model.content["module"]), model.content
    buffers = {name: module.pop(name) for name in content.get("buffer_names") or () if name in module}
    tied = _tied(model, module, masters)
    frozen, excluded = _frozen(files.models, module, {*masters, *tied})
    weights = {**masters, **frozen}
    for other, name in tied.items():
        if name not in weights and name not in excluded:
            raise UserError(f"{model.file}: {other} is tied to {name}, which is not there: damaged?")
    return CheckpointReader(
        path=path,
        strategy=f"zero{stage}" if stage else "ddp" if files.world > 1 else "single",
        world=files.world,
        step=content.get("global_steps") if type(content.get("global_steps")) is int else None,
        # as the model names them, whatever order the groups have
        weights={name: weights[name] for name in (*module, *weights) if name in weights},
        buffers={name: model.stored(name, tensor) for name, tensor in buffers.items()},
        tied=tied,
        frozen=frozenset(frozen if stage else ()),
        excluded=excluded,
        optimizer_state={name: kept for name, kept in tensors.items() if kept},
        optimizer_scalars=scalars,
        engine_dtype=main_dtype(module[name].dtype for name in masters or weights if name in module),
        model_folder=model_folder,
        details={
            "zero_stage": stage,
            "ds_version": content.get("ds_version"),
            "groups": [len(group) for group in content.get("param_shapes") or []],
            "files": len(files.models) + len(files.optimizers),
        },
    )


def _stage(files: Files) -> int:
    """ZeRO's, alike in all files. Raises UserError."""
    found: set[int] = set()
    for opened in files.optimizers:
        state, counts = optimizer_of(opened), partition_counts(opened)
        plain: Any = 1 if "single_partition_of_fp32_groups" in state else None  # BF16_Optimizer does not say
        stage = state.get("zero_stage", plain)
        if stage not in (1, 2, 3):
            raise UserError(f"{opened.file}: its ZeRO stage is {str(stage)[:20]!r}: not a ZeRO file, or damaged")
        if any(count != files.world for count in counts):
            raise UserError(
                f"{opened.file} was saved by {counts[:4]} processes and {files.world} optimizer files are there: some "
                "are missing, or files of two saves lie in one folder (or experts are divided otherwise, which is not "
                "supported)"
            )
        found.add(stage)
    stage = max(found, default=0)
    if stage == 0 and files.models[0].content.get("param_shapes") is not None:
        raise UserError(f"{files.folder}: the optimizer files *_optim_states.pt are missing; copy the folder again")
    if len(found) > 1 or (stage == 3) != is_sharded(files.models[0]):
        raise UserError(f"{files.folder} holds files of several ZeRO stages: two saves lie in one folder")
    return stage


# what the optimizer owns


class _Rank:
    """One rank's flat groups: the masters, and the optimizer's state of each."""

    def __init__(self, opened: TorchFile, stage: int) -> None:
        self.opened, self.file, self.content = opened, opened.file, optimizer_of(opened)
        masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        groups = self.content.get(masters)
        if type(groups) is not list or not all(type(group) is Tensor for group in groups):
            raise UserError(f"{self.file}: it has no {masters}, the weights: not a ZeRO file, or damaged")
        states = self._states(self.content.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state"))
        self.groups = [{"": group, **states.get(number, {})} for number, group in enumerate(groups)]
        # taken off the masters at the buffer's end; BF16_Optimizer leaves them on
        paddings = (self.content.get("group_paddings") or []) if "zero_stage" in self.content else []
        paddings = [*paddings, *[0] * len(groups)]
        self.parts = [group.count + max(0, padding) for group, padding in zip(groups, paddings, strict=False)]

    def _states(self, found: Any) -> dict[int, dict[str, Any]]:
        """Group number -> the optimizer's state of it."""
        if type(found) is list:  # elastic_checkpoint
            steps = dict.fromkeys(range(len(found)), self.content.get("base_optimizer_state_step"))
            states = dict(enumerate(found))
        else:
            groups, states = (found or {}).get("param_groups") or [], (found or {}).get("state") or {}
            steps = {index: group.get("step") for group in groups for index in group["params"]}
        told = {index: {} if step is None else {"step": step} for index, step in steps.items()}
        return {index: told[index] | states[index] for index in steps if index in states}

    def flat(self, number: int, key: str) -> TensorIndex:
        """A group's flat buffer: of the masters (key "") or of a state. Empty where the rank holds padding alone."""
        tensor, masters = self.groups[number].get(key), self.groups[number][""]
        if tensor is None:
            return TensorIndex(key, (0,), masters.dtype, ())
        flat = self.opened.stored(f"group {number}", tensor)
        if flat.shape not in ((self.parts[number],), masters.shape):
            raise UserError(
                f"{self.file}: group {number} has {flat.count:,} elements of {key} and {self.parts[number]:,} "
                "weights: damaged?"
            )
        return flat

    def addresses(self, number: int) -> dict[str, tuple[int, int]]:
        """Parameter -> (first element, elements) in this rank's part of a group, where the file says it."""
        zero = (self.opened.content.get("ds_config") or {}).get("zero_optimization") or {}
        mappings = self.content.get("param_slice_mappings") or []
        # the mappings of 0.19.8 do not know that round_robin_gradients puts parameters in another order
        if not zero or zero.get("round_robin_gradients") or number >= len(mappings):
            return {}
        return {name: (each.state["start"], each.state["numel"]) for name, each in mappings[number].items()}


def _owned_by_optimizer(
    files: Files, stage: int
) -> tuple[dict[str, dict[str, TensorIndex]], dict[str, dict[str, Scalar]]]:
    """(tensors, scalars) by parameter that is trained and key of its state, "" for its master.

    Raises UserError where sizes do not add up.
    """
    model = files.models[0]
    groups = model.content.get("param_shapes") or []  # by sub-group under stage 3
    names = [name for group in groups for name in group]
    if not groups or len(set(names)) < len(names):
        raise UserError(f"{model.file}: its param_shapes are missing, or name a parameter twice: damaged?")
    ranks = [_Rank(opened, stage) for opened in files.optimizers]
    for rank in ranks:
        if len(rank.groups) != len(groups):
            raise UserError(
                f"{rank.file} holds {len(rank.groups)} groups and {model.file} names parameters of {len(groups)}: "
                f"{_COPY_AGAIN}"
            )
    tensors: dict[str, dict[str, TensorIndex]] = {name: {} for name in names}
    scalars: dict[str, dict[str, Scalar]] = {}
    pieces_of = _pieces_of_stage_3 if stage == 3 else _pieces_of_stage_1_or_2
    for number, shapes in enumerate(groups):
        for name, key, tensor in _group(ranks, shapes, number, pieces_of(ranks, number, shapes)):
            tensors[name][key] = tensor
        scalars.update(dict.fromkeys(shapes, _scalars(ranks, number)))
    return tensors, scalars


def _pieces_of_stage_1_or_2(ranks: list[_Rank], number: int, shapes: Shapes) -> Pieces:
    """Each parameter's place in the flat buffer, cut where a rank's part of the buffer ends."""
    first, part = ranks[0], ranks[0].parts[number]
    gaps = first.content.get("param_alignment_paddings")
    for rank in ranks[1:]:
        if rank.content.get("param_alignment_paddings") != gaps or rank.parts[number] != part:
            raise UserError(
                f"{rank.file} holds {rank.parts[number]:,} elements of group {number} and {first.file} {part:,}, "
                f"or pads them otherwise, where all ranks have equal parts: {_COPY_AGAIN}"
            )
    gaps = gaps[number] if type(gaps) is list and number < len(gaps) else [0] * len(shapes)
    if min(gaps, default=0) < 0:
        raise ValueError("param_alignment_paddings below 0")
    pieces, place = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = place + math.prod(shape)
        owners = range(place // part, min(-(-end // part), len(ranks))) if end > place else range(0)
        cuts = [(order, max(place, order * part), min(end, (order + 1) * part)) for order in owners]
        pieces[name] = [(order, low - order * part, high - low) for order, low, high in cuts]
        place = end + gap
    found = sum(rank.groups[number][""].count for rank in ranks)
    # padding of the buffer to a multiple of 2 x world may be left on
    if not place <= found < place + 2 * len(ranks):
        raise UserError(
            f"{first.file} and its {len(ranks) - 1} siblings hold {found:,} elements in group {number} where the "
            f"parameters of the model file need {place:,}: they are of different saves, or one is damaged"
        )
    for order, rank in enumerate(ranks):  # a second opinion on the layout
        for name, (start, count) in rank.addresses(number).items():
            if count and (order, start, count) not in pieces.get(name, []):
                raise UserError(
                    f"{rank.file}: it has {name} in another place than the parameters of the model file say: "
                    f"{_COPY_AGAIN}"
                )
    return pieces


def _pieces_of_stage_3(ranks: list[_Rank], number: int, shapes: Shapes) -> Pieces:
    """Each parameter's equal parts, the last ones without their padding."""
    pieces, place = {}, 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        part = -(-count // len(ranks))
        pieces[name] = [(order, place, max(0, min(part, count - order * part))) for order in range(len(ranks))]
        place += part
    for rank in ranks:
        if (found := rank.groups[number][""].count) != place:
            swapped = (rank.file.parent / "offloaded_tensors").is_dir()
            why = (
                "the optimizer was offloaded to NVMe, whose swap files are not read: load the checkpoint in the run "
                "that wrote it and save it with offload_optimizer on cpu"
            )
            raise UserError(
                f"{rank.file} holds {found:,} elements in sub-group {number} where its parameters need {place:,}: "
                + (why if swapped else _COPY_AGAIN)
            )
    return pieces


def _group(ranks: list[_Rank], shapes: Shapes, number: int, pieces: Pieces) -> Iterator[tuple[str, str, TensorIndex]]:
    """(parameter, state's key or "", tensor) of a group."""
    held = [item for rank in ranks for item in rank.groups[number].items()]
    for key in dict.fromkeys(key for key, value in held if type(value) is Tensor and (value.shape or not key)):
        flats = [rank.flat(number, key) for rank in ranks]
        for name, shape in shapes.items():
            ends = itertools.accumulate((count for _, _, count in pieces[name]), initial=0)
            parts = [flats[order].cut(start, count) for order, start, count in pieces[name]]
            yield name, key, joined(ranks[0].file.parent, name, shape, zip(ends, parts, strict=False))


def _scalars(ranks: list[_Rank], number: int) -> dict[str, Scalar]:
    """What the optimizer keeps once for a whole group: of each rank, where they differ. They do not in steps."""
    found: dict[str, list[Scalar]] = {}
    for rank in ranks:
        for key, value in rank.groups[number].items():
            if scalar := _scalar(rank, key, value):
                found.setdefault(key, []).append(scalar)
                first = found[key][0].value
                if key == "step" and scalar.value != first:
                    raise UserError(
                        f"{rank.file} is of optimizer step {scalar.value:g} and {ranks[0].file} of step {first:g}: "
                        f"{_COPY_AGAIN}"
                    )
    values = {key: tuple(scalar.value for scalar in scalars) for key, scalars in found.items()}
    return {
        key: Scalar(values[key], one.dtype) if len(set(values[key])) > 1 else one for key, (one, *_) in found.items()
    }


def _scalar(rank: _Rank, key: str, value: Any) -> Scalar | None:
    if type(value) is Tensor and not value.shape:
        stored = rank.opened.stored(key, value)
        if stored.spans[0].member.size < 1000:  # its few bytes are read anyway
            verify_member(stored.spans[0].member)
        return Scalar(stored.number(), stored.dtype)
    return Scalar(value) if type(value) in (bool, int, float, str, type(None)) else None


# all that the optimizer does not own


def _tied(model: TorchFile, module: Mapping[str, Tensor], owned: Collection[str]) -> dict[str, str]:
    """Other name -> name."""
    shared = model.content.get("shared_params")
    if type(shared) is not dict:
        return tied_tensors(module)
    return {b if a in owned and b not in owned else a: a if a in owned else b for a, b in shared.items()}


def _frozen(
    models: list[TorchFile], module: Mapping[str, Tensor], known: Collection[str]
) -> tuple[dict[str, TensorIndex], dict[str, tuple[int, ...]]]:
    """(parameters that are neither `known` nor owned by the optimizer, the shapes of those that are left out)."""
    shapes: Shapes = models[0].content.get("frozen_param_shapes") or {}
    fragments = [model.content.get("frozen_param_fragments") for model in models]
    left_out = fragments[0] is None
    found = {} if left_out else {name: _fragment(name, shape, models, fragments) for name, shape in shapes.items()}
    for name, tensor in module.items():  # in `module` alone: all under stage 0, frozen ones under stage 1
        if name not in known and name not in shapes:
            if len(models) > 1 and tensor.shape == (0,):
                raise UserError(f"{models[0].file}: {name} is a placeholder, and no file holds its part")
            found[name] = models[0].stored(name, tensor)
    return found, dict(shapes) if left_out else {}


def _fragment(name: str, shape: tuple[int, ...], models: list[TorchFile], fragments: list[Any]) -> TensorIndex:
    """A frozen parameter as stages 2 (whole) and 3 (a part in each rank's file, the last ones padded) write it."""
    parts, place = [], 0
    for model, held in zip(models, fragments, strict=True):
        part = model.stored(name, held.get(name)).cut(0, math.prod(shape) - place)
        parts.append((place, part))
        place += part.count
    return joined(models[0].file.parent, name, shape, parts)
