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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.checkpoint.read.deepspeed_files import Files, optimizer_of
from toolkit.checkpoint.read.torch_file import TorchFile, verify_member
from toolkit.checkpoint.read.unpickle import Tensor
from toolkit.checkpoint.reader import ITEM_BYTES, Scalar, Span, TensorIndex
from toolkit.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Owned:
    """What the optimizer owns, by parameter name."""

    weights: dict[str, TensorIndex] = field(default_factory=dict)
    kept: dict[str, dict[str, TensorIndex]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], spans: tuple[Span, ...], dtype: str, key: str = "") -> None:
        stored = TensorIndex(name, shape, dtype, spans)
        if key:
            self.kept.setdefault(name, {})[key] = stored
        else:
            self.weights[name] = stored


class FlatBuffer:
    """A long one-dimensional buffer of one dtype, in chunks that lie in several files; there may be gaps between."""

    def __init__(self, dtype: str, chunks: Iterable[tuple[int, Span]]) -> None:
        """`chunks`: (first element, its span), in order."""
        self.dtype = dtype
        self.chunks = [(start, span) for start, span in chunks if span.count]
        self.starts = [start for start, _ in self.chunks]

    @classmethod
    def of(cls, dtype: str, spans: Iterable[Span]) -> FlatBuffer:
        """Chunks that follow one another."""
        chunks, place = [], 0
        for span in spans:
            chunks.append((place, span))
            place += span.count
        return cls(dtype, chunks)

    @property
    def count(self) -> int:
        """Elements that there are."""
        return sum(span.count for _, span in self.chunks)

    def cut(self, start: int, count: int) -> tuple[Span, ...]:
        """The spans of elements [start, start + count). Raises LookupError where they are not all there."""
        spans, item = [], ITEM_BYTES[self.dtype]
        index = bisect_right(self.starts, start) - 1
        while count:
            if not 0 <= index < len(self.chunks):
                raise LookupError
            first, span = self.chunks[index]
            skipped = start - first
            taken = min(span.count - skipped, count)
            if skipped < 0 or taken <= 0:
                raise LookupError
            spans.append(Span(span.member, span.start + skipped * item, taken))
            start, count, index = start + taken, count - taken, index + 1
        return tuple(spans)


def shapes_of(files: Files) -> list[Shapes]:
    """Parameter name -> shape, by group (stage 3: by sub-group). Raises UserError where there are none."""
    groups = files.model.content.get("param_shapes")
    if type(groups) is not list or not all(_is_shapes(group) for group in groups):
        raise UserError(f"{files.model.file}: it has no param_shapes, which say where each parameter lies: damaged?")
    names = [name for group in groups for name in group]
    if len(set(names)) < len(names):
        raise UserError(f"{files.model.file}: its param_shapes name a parameter twice: damaged?")
    return groups


def _is_shapes(group: Any) -> bool:
    return type(group) is dict and all(type(name) is str and type(shape) is tuple for name, shape in group.items())


def owned_by_stage_1_or_2(files: Files) -> Owned:
    """Masters and optimizer state of the parameters that are trained."""
    return _owned(files, "single_partition_of_fp32_groups", "base_optimizer_state", _add_group)


def owned_by_stage_3(files: Files) -> Owned:
    """The same for stage 3."""
    return _owned(files, "fp32_flat_groups", "optimizer_state_dict", _add_sub_group)


def _owned(files: Files, masters: str, state: str, add: Callable[..., None]) -> Owned:
    """`add` puts one flat group of all ranks into what is returned."""
    owned = Owned()
    groups = shapes_of(files)
    ranks = [_Rank(opened, masters, state) for opened in files.optimizers]
    for rank in ranks:
        rank.expect_groups(len(groups), files.model)
    for number, shapes in enumerate(groups):
        add(owned, ranks, number, shapes)
    return owned


class _Rank:
    """One rank's flat groups and their optimizer state."""

    def __init__(self, opened: TorchFile, masters: str, state: str) -> None:
        self.opened, self.file = opened, opened.file
        self.content = optimizer_of(opened)
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
        if type(found) is not dict or type(found.get("param_groups")) is not list:
            return {}
        states, numbered = found.get("state", {}), {}
        for group in found["param_groups"]:
            for index in group["params"]:
                if index in states:
                    numbered[index] = _with_step(states[index], group.get("step"))
        return numbered

    def expect_groups(self, count: int, model: TorchFile) -> None:
        if len(self.groups) != count:
            raise UserError(
                f"{self.file} holds {len(self.groups)} groups and {model.file} names parameters of {count}: "
                "they are of different saves; copy the folder again"
            )

    def master(self, number: int) -> Tensor:
        return self.groups[number]

    def state_of(self, number: int) -> dict[str, Any]:
        return self.states.get(number, {})

    def span(self, tensor: Tensor, number: int) -> Span:
        return self.opened.span(tensor, f"group {number}")

    def addresses(self, number: int) -> dict[str, tuple[int, int]]:
        """Parameter -> (first element, elements) in this rank's part of a group, where the file says it."""
        config = self.opened.content.get("ds_config")
        zero = config.get("zero_optimization") if type(config) is dict else None
        mappings = self.content.get("param_slice_mappings")
        # the mappings of 0.19.8 do not know that round_robin_gradients puts parameters in another order
        if type(zero) is not dict or zero.get("round_robin_gradients") or type(mappings) is not list:
            return {}
        mapping = mappings[number] if number < len(mappings) else {}
        return {name: (address.state["start"], address.state["numel"]) for name, address in mapping.items()}

    def padding(self, number: int) -> int:
        """Elements that were taken off the end of the master."""
        paddings = self.content.get("group_paddings")
        if "zero_stage" not in self.content or type(paddings) is not list or len(paddings) <= number:
            return 0  # BF16_Optimizer leaves them on
        return int(paddings[number])


def _with_step(state: dict[str, Any], step: Any) -> dict[str, Any]:
    return state if "step" in state or step is None else {**state, "step": step}


# stages 1 and 2


def _add_group(owned: Owned, ranks: list[_Rank], number: int, shapes: Shapes) -> None:
    places, needed = _places(ranks, number, shapes)
    part = _part(ranks, number)
    buffers = {"": _flat_buffer(ranks, number, part, lambda rank: rank.master(number))}
    _check_total(ranks, number, buffers[""].count, needed)
    for key in _keys(ranks, number, part):
        buffers[key] = _flat_buffer(ranks, number, part, lambda rank, key=key: rank.state_of(number).get(key))
    scalars = _scalars(ranks, number)
    for name, shape in shapes.items():
        for key, buffer in buffers.items():
            owned.add(name, shape, _cut(ranks, buffer, places[name], math.prod(shape), name), buffer.dtype, key)
        owned.scalars[name] = scalars
    _check_addresses(ranks, number, shapes, places, part)


def _places(ranks: list[_Rank], number: int, shapes: Shapes) -> tuple[dict[str, int], int]:
    """(name -> first element in the flat buffer, elements the buffer must have)."""
    gaps = ranks[0].content.get("param_alignment_paddings")
    group = gaps[number] if type(gaps) is list and len(gaps) > number else [0] * len(shapes)
    if type(group) is not list or len(group) != len(shapes) or not all(type(gap) is int and gap >= 0 for gap in group):
        raise UserError(f"{ranks[0].file}: its param_alignment_paddings do not fit the parameters: of another save?")
    for rank in ranks[1:]:
        if rank.content.get("param_alignment_paddings") != gaps:
            raise _differs(rank, ranks[0], "param_alignment_paddings")
    places, place = {}, 0
    for (name, shape), gap in zip(shapes.items(), group, strict=True):
        places[name] = place
        place += math.prod(shape) + gap
    return places, place


def _part(ranks: list[_Rank], number: int) -> int:
    """Elements of the flat buffer that each rank owns, padding included."""
    counts = [rank.master(number).count + rank.padding(number) for rank in ranks]
    for rank, count in zip(ranks, counts, strict=True):
        if count != counts[0]:
            raise UserError(
                f"{rank.file} holds {count:,} elements of group {number} and {ranks[0].file} {counts[0]:,}, "
                "where all ranks have equal parts: they are of different saves; copy the folder again"
            )
    return counts[0]


def _check_total(ranks: list[_Rank], number: int, found: int, needed: int) -> None:
    # padding of the buffer to a multiple of 2 x world may be left on
    if not needed <= found < needed + 2 * len(ranks):
        raise UserError(
            f"{ranks[0].file} and its {len(ranks) - 1} siblings hold {found:,} elements in group {number} where the "
            f"parameters of the model file need {needed:,}: they are of different saves, or one is damaged"
        )


def _flat_buffer(ranks: list[_Rank], number: int, part: int, tensor_of: Any) -> FlatBuffer:
    tensors = [tensor_of(rank) for rank in ranks]
    dtype = next(tensor.dtype for tensor in tensors if type(tensor) is Tensor)
    chunks = []
    for order, (rank, tensor) in enumerate(zip(ranks, tensors, strict=True)):
        if type(tensor) is Tensor:
            if tensor.dtype != dtype:
                raise _differs(rank, ranks[0], "dtypes")
            chunks.append((order * part, rank.span(tensor, number)))
    return FlatBuffer(dtype, chunks)


def _keys(ranks: list[_Rank], number: int, part: int) -> list[str]:
    """The names of what the optimizer keeps per element, like exp_avg."""
    keys: dict[str, None] = {}
    for rank in ranks:
        for key, value in rank.state_of(number).items():
            if type(value) is not Tensor or not value.shape:
                continue
            if value.shape not in ((part,), rank.master(number).shape):
                raise UserError(
                    f"{rank.file}: group {number} has {value.count:,} elements of {key} and {part:,} weights: damaged?"
                )
            keys[str(key)] = None
    return list(keys)


def _check_addresses(ranks: list[_Rank], number: int, shapes: Shapes, places: dict[str, int], part: int) -> None:
    """Each rank's file also says which part of which parameter it holds: a second opinion on the layout."""
    for order, rank in enumerate(ranks):
        for name, address in rank.addresses(number).items():
            begin = max(places.get(name, -1), order * part)
            end = min(places.get(name, -1) + math.prod(shapes.get(name, ())), (order + 1) * part)
            if (begin - order * part, end - begin) != address:
                raise UserError(
                    f"{rank.file}: it has {name} in another place than the parameters of the model file say: "
                    "they are of different saves; copy the folder again or take another checkpoint"
                )


# stage 3


def _add_sub_group(owned: Owned, ranks: list[_Rank], number: int, shapes: Shapes) -> None:
    world = len(ranks)
    parts = {name: -(-math.prod(shape) // world) for name, shape in shapes.items()}
    needed = sum(parts.values())
    for rank in ranks:
        _check_sub_group(rank, number, needed)
    keys = ["", *_keys(ranks, number, needed)]
    buffers = {key: [_rank_buffer(rank, number, key) for rank in ranks] for key in keys}
    scalars, place = _scalars(ranks, number), 0
    for name, shape in shapes.items():
        for key in keys:
            spans = tuple(_stage_3_spans(ranks, buffers[key], place, parts[name], math.prod(shape), name))
            owned.add(name, shape, spans, buffers[key][0].dtype, key)
        owned.scalars[name] = scalars
        place += parts[name]


def _check_sub_group(rank: _Rank, number: int, needed: int) -> None:
    found = rank.master(number).count
    if found == needed:
        return
    swapped = (rank.file.parent / "offloaded_tensors").is_dir()
    why = (
        "the optimizer was offloaded to NVMe, whose swap files are not read: load the checkpoint in the run that "
        "wrote it and save it with offload_optimizer on cpu"
        if swapped
        else "they are of different saves, or one is damaged"
    )
    raise UserError(
        f"{rank.file} holds {found:,} elements in sub-group {number} where its parameters need {needed:,}: {why}"
    )


def _rank_buffer(rank: _Rank, number: int, key: str) -> FlatBuffer:
    tensor = rank.state_of(number).get(key) if key else rank.master(number)
    if type(tensor) is not Tensor:
        raise UserError(f"{rank.file}: it lacks {key} of sub-group {number}, which other ranks have: of another save?")
    return FlatBuffer.of(tensor.dtype, [rank.span(tensor, number)])


def _stage_3_spans(
    ranks: list[_Rank], buffers: list[FlatBuffer], place: int, part: int, count: int, name: str
) -> Iterator[Span]:
    for order, buffer in enumerate(buffers):
        yield from _cut(ranks, buffer, place, max(0, min(part, count - order * part)), name)


# both


def _cut(ranks: list[_Rank], buffer: FlatBuffer, start: int, count: int, name: str) -> tuple[Span, ...]:
    try:
        return buffer.cut(start, count)
    except LookupError:
        raise UserError(
            f"{ranks[0].file} and its siblings do not hold all of {name}: they are of different saves, or damaged"
        ) from None


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
                "they are of different saves; copy the folder again or take another checkpoint"
            )
    values = tuple(scalar.value for _, scalar in scalars)
    return one if len(set(values)) == 1 else Scalar(values, one.dtype)


def _differs(rank: _Rank, first: _Rank, what: str) -> UserError:
    return UserError(f"{rank.file} is of another save than {first.file}: their {what} differ; copy the folder again")
