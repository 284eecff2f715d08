"""Where ZeRO puts each parameter: from the flat buffers of the ranks' files to named tensors.

Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py, bf16_optimizer.py): each parameter group is one flat buffer,
its parameters one after the other in the order of `param_shapes`, with gaps under `parameter_alignment`. It is cut
into equal partitions, one for each rank. The masters are saved without the padding at the buffer's end, the
optimizer's state with it (or without it under `elastic_checkpoint`).

Stage 3 (stage3.py): each parameter is cut into equal partitions, the last ones padded. Those of a rank lie one after
the other in the order of `param_shapes`, cut into sub-groups between parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.checkpoint.read.deepspeed_files import Files, optimizer_of
from toolkit.checkpoint.read.torch_file import TorchFile, verify_member
from toolkit.checkpoint.read.unpickle import Tensor
from toolkit.checkpoint.reader import ITEM_BYTES, Scalar, Span, TensorIndex
from toolkit.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]
# By parameter name: (rank, first element in that rank's part of the group, elements), in order.
Pieces = Mapping[str, list[tuple[int, int, int]]]
_COPY_AGAIN = "they are of different saves; copy the folder again or take another checkpoint"


@dataclass
class Owned:
    """What the optimizer owns, by parameter name."""

    weights: dict[str, TensorIndex] = field(default_factory=dict)
    kept: dict[str, dict[str, TensorIndex]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)


def owned_by_optimizer(files: Files, stage: int) -> Owned:
    """Masters and optimizer state of the parameters that are trained. Raises UserError where sizes do not add up."""
    if stage == 3:
        masters, state, pieces_of = "fp32_flat_groups", "optimizer_state_dict", _pieces_of_stage_3
    else:
        masters, state = "single_partition_of_fp32_groups", "base_optimizer_state"
        pieces_of = _pieces_of_stage_1_or_2
    owned, groups = Owned(), files.model.content.get("param_shapes") or []  # by sub-group under stage 3
    names = [name for group in groups for name in group]
    if not groups or len(set(names)) < len(names):
        raise UserError(f"{files.model.file}: its param_shapes are missing, or name a parameter twice: damaged?")
    ranks = [_Rank(opened, masters, state) for opened in files.optimizers]
    for rank in ranks:
        if len(rank.groups) != len(groups):
            raise UserError(
                f"{rank.file} holds {len(rank.groups)} groups and {files.model.file} names parameters of "
                f"{len(groups)}: {_COPY_AGAIN}"
            )
    for number, shapes in enumerate(groups):
        _add_group(owned, ranks, number, shapes, pieces_of(ranks, number, shapes))
    return owned


class _Rank:
    """One rank's flat groups and their optimizer state."""

    def __init__(self, opened: TorchFile, masters: str, state: str) -> None:
        self.opened, self.file, self.content = opened, opened.file, optimizer_of(opened)
        groups = self.content.get(masters)
        if type(groups) is not list or not all(type(group) is Tensor for group in groups):
            raise UserError(f"{self.file}: it has no {masters}, the weights: not a ZeRO file, or damaged")
        self.groups: list[Tensor] = groups
        self.states = self._states(self.content.get(state))

    def _states(self, found: Any) -> dict[int, dict[str, Any]]:
        """Group number -> the optimizer's state of it."""
        if type(found) is list:  # elastic_checkpoint
            step = self.content.get("base_optimizer_state_step")
            return {number: _with_step(state, step) for number, state in enumerate(found)}
        if not found or not found.get("param_groups"):
            return {}
        states = found.get("state", {})
        indexes = [(index, group.get("step")) for group in found["param_groups"] for index in group["params"]]
        return {index: _with_step(states[index], step) for index, step in indexes if index in states}

    def state_of(self, number: int) -> dict[str, Any]:
        return self.states.get(number, {})

    def part(self, number: int) -> int:
        """Elements of a group that this rank owns: of the master, and of the padding that was taken off its end."""
        paddings = self.content.get("group_paddings") if "zero_stage" in self.content else None
        # BF16_Optimizer leaves them on
        return self.groups[number].count + (max(0, paddings[number]) if paddings and number < len(paddings) else 0)

    def addresses(self, number: int) -> dict[str, tuple[int, int]]:
        """Parameter -> (first element, elements) in this rank's part of a group, where the file says it."""
        zero = (self.opened.content.get("ds_config") or {}).get("zero_optimization") or {}
        mappings = self.content.get("param_slice_mappings") or []
        # the mappings of 0.19.8 do not know that round_robin_gradients puts parameters in another order
        if not zero or zero.get("round_robin_gradients") or number >= len(mappings):
            return {}
        return {name: (each.state["start"], each.state["numel"]) for name, each in mappings[number].items()}


def _with_step(state: dict[str, Any], step: Any) -> dict[str, Any]:
    return state if "step" in state or step is None else {**state, "step": step}


def _pieces_of_stage_1_or_2(ranks: list[_Rank], number: int, shapes: Shapes) -> Pieces:
    """Each parameter's place in the flat buffer, cut where a rank's part of the buffer ends."""
    first, part = ranks[0], ranks[0].part(number)
    for rank in ranks[1:]:
        if rank.content.get("param_alignment_paddings") != first.content.get("param_alignment_paddings"):
            raise UserError(f"param_alignment_paddings of {rank.file} and {first.file} differ: {_COPY_AGAIN}")
        if rank.part(number) != part:
            raise UserError(
                f"{rank.file} holds {rank.part(number):,} elements of group {number} and {first.file} {part:,}, "
                f"where all ranks have equal parts: {_COPY_AGAIN}"
            )
    gaps = first.content.get("param_alignment_paddings")
    gaps = gaps[number] if type(gaps) is list and number < len(gaps) else [0] * len(shapes)
    if min(gaps, default=0) < 0:
        raise ValueError("param_alignment_paddings below 0")
    pieces, place = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = place + math.prod(shape)
        # one rank too many is noticed when it is read
        owners = range(place // part, min(-(-end // part), len(ranks) + 1)) if end > place else range(0)
        cuts = [(order, max(place, order * part), min(end, (order + 1) * part)) for order in owners]
        pieces[name] = [(order, low - order * part, high - low) for order, low, high in cuts]
        place = end + gap
    _check_total(ranks, number, place)
    _check_addresses(ranks, number, pieces)
    return pieces


def _check_total(ranks: list[_Rank], number: int, needed: int) -> None:
    found = sum(rank.groups[number].count for rank in ranks)
    # padding of the buffer to a multiple of 2 x world may be left on
    if not needed <= found < needed + 2 * len(ranks):
        raise UserError(
            f"{ranks[0].file} and its {len(ranks) - 1} siblings hold {found:,} elements in group {number} where the "
            f"parameters of the model file need {needed:,}: they are of different saves, or one is damaged"
        )


def _check_addresses(ranks: list[_Rank], number: int, pieces: Pieces) -> None:
    """Each rank's file also says which part of which parameter it holds: a second opinion on the layout."""
    for order, rank in enumerate(ranks):
        for name, (start, count) in rank.addresses(number).items():
            if count and (order, start, count) not in pieces.get(name, []):
                raise UserError(
                    f"{rank.file}: it has {name} in another place than the parameters of the model file say: "
                    f"{_COPY_AGAIN}"
                )


def _pieces_of_stage_3(ranks: list[_Rank], number: int, shapes: Shapes) -> Pieces:
    """Each parameter's equal parts, the last ones without their padding."""
    pieces, place = {}, 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        part = -(-count // len(ranks))
        cuts = [(order, place, min(part, count - order * part)) for order in range(len(ranks))]
        pieces[name] = [cut for cut in cuts if cut[2] > 0]
        place += part
    for rank in ranks:
        if (found := rank.groups[number].count) != place:
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


def _add_group(owned: Owned, ranks: list[_Rank], number: int, shapes: Shapes, pieces: Pieces) -> None:
    keys = [key for rank in ranks for key, value in rank.state_of(number).items() if type(value) is Tensor]
    masters = [rank.groups[number] for rank in ranks]
    buffers = {"": masters} | {key: [rank.state_of(number).get(key) for rank in ranks] for key in keys}
    for key, tensors in buffers.items():
        if not any(type(tensor) is Tensor and tensor.shape for tensor in tensors):
            continue  # a scalar
        dtype, spans = _flat(ranks, number, key, tensors)
        for name, shape in shapes.items():
            stored = TensorIndex(name, shape, dtype, tuple(_cut(ranks, spans, dtype, name, pieces[name])))
            if key:
                owned.kept.setdefault(name, {})[key] = stored
            else:
                owned.weights[name] = stored
    owned.scalars.update(dict.fromkeys(shapes, _scalars(ranks, number)))


def _flat(ranks: list[_Rank], number: int, key: str, tensors: list[Any]) -> tuple[str, list[Span | None]]:
    """(dtype, each rank's span) of a flat buffer; None where a rank has nothing, as its part is padding."""
    spans: list[Span | None] = []
    for rank, tensor in zip(ranks, tensors, strict=True):
        if type(tensor) is Tensor and tensor.shape not in ((rank.part(number),), rank.groups[number].shape):
            raise UserError(
                f"{rank.file}: group {number} has {tensor.count:,} elements of {key} and {rank.part(number):,} "
                "weights: damaged?"
            )
        spans.append(rank.opened.span(tensor, f"group {number}") if type(tensor) is Tensor else None)
    dtypes = sorted({tensor.dtype for tensor in tensors if type(tensor) is Tensor})
    if len(dtypes) > 1:
        raise UserError(f"{ranks[0].file} and its siblings hold group {number} in {dtypes}: {_COPY_AGAIN}")
    return dtypes[0], spans


def _cut(
    ranks: list[_Rank], spans: list[Span | None], dtype: str, name: str, pieces: list[tuple[int, int, int]]
) -> Iterator[Span]:
    for order, start, count in pieces:
        span = spans[order] if order < len(spans) else None
        if span is None or start + count > span.count:
            raise UserError(f"{ranks[0].file} and its siblings do not hold all of {name}: {_COPY_AGAIN}")
        yield Span(span.member, span.start + start * ITEM_BYTES[dtype], count)


def _scalars(ranks: list[_Rank], number: int) -> dict[str, Scalar]:
    """What the optimizer keeps once for a whole group: of each rank, where they differ. They do not in steps."""
    found: dict[str, list[tuple[_Rank, Scalar]]] = {}
    for rank in ranks:
        for key, value in rank.state_of(number).items():
            if scalar := _scalar(rank, str(key), value):
                found.setdefault(str(key), []).append((rank, scalar))
    return {key: _agreed(key, scalars) for key, scalars in found.items()}


def _scalar(rank: _Rank, key: str, value: Any) -> Scalar | None:
    if type(value) is Tensor and not value.shape:
        stored = rank.opened.stored(key, value)
        if stored.spans[0].member.size < 1000:  # its few bytes are read anyway
            verify_member(stored.spans[0].member)
        return Scalar(stored.number(), stored.dtype)
    return Scalar(value) if type(value) in (bool, int, float, str, type(None)) else None


def _agreed(key: str, scalars: list[tuple[_Rank, Scalar]]) -> Scalar:
    first, one = scalars[0]
    for rank, other in scalars:
        if key == "step" and other.value != one.value:
            raise UserError(
                f"{rank.file} is of optimizer step {other.value:g} and {first.file} of step {one.value:g}: "
                f"{_COPY_AGAIN}"
            )
    values = tuple(scalar.value for _, scalar in scalars)
    return one if len(set(values)) == 1 else Scalar(values, one.dtype)
