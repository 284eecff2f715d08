"""What a universal checkpoint says besides the tensors: settings of the optimizer, loss scale, counts.

Read from deepspeed 0.19.8 (runtime/base_optimizer.py, runtime/zero/stage_1_and_2.py and stage3.py,
runtime/engine.py) and tried: stages 1 and 2 take `param_groups` group by group, stage 3 gives the first of
`optimizer_state_dict.param_groups` to all its groups. Each looks at its own key, so that one file serves both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint.convert.torch_writer import new_tensor
from toolkit.checkpoint.read.archive import verify_member
from toolkit.checkpoint.read.deepspeed_files import Files, open_files, optimizer_of
from toolkit.checkpoint.read.pickled_names import Tensor
from toolkit.checkpoint.read.torch_file import TorchFile
from toolkit.checkpoint.read.unpickle import Thing
from toolkit.checkpoint.reader import ITEM_BYTES, CheckpointReader
from toolkit.errors import UserError

# What is divided among the ranks, and is written by parameter instead.
_DIVIDED = frozenset(
    {"base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings", "optimizer_state_dict",
     "fp32_flat_groups"}
)  # fmt: skip
_MOST_BYTES = 1 << 20  # of a tensor among the settings
# Stages 1 and 2 pass over a group of the engine for which there are no settings, its weights included. Empty ones
# let it load the weights and keep the settings of the script.
_SPARE_GROUPS = 64
_VERSION = "0.19.8"  # whose loader was tried; it asks for 0.3.17 at least


@dataclass
class Content:
    """The value of a small file, and the bytes of its tensors."""

    value: Any = None
    blobs: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class State:
    """What is known of the optimizer as a whole."""

    files: Files | None
    """DeepSpeed's own, where they are the reader."""
    optimizer: Content
    """zero/optimizer_state.pt"""
    differing: tuple[str, ...]
    """Settings that are not the same in all groups: one set for all, as stage 3 reads it, cannot hold them."""
    has_settings: bool
    """Whether the reader holds the settings of the parameter groups."""
    step_dtype: str | None
    """Of the tensor that each parameter's step is; `int` for a plain number, None where the groups hold it."""


def state_of(reader: CheckpointReader) -> State:
    """Reads the settings. Raises UserError where their file is damaged."""
    folder = reader.details.get("folder")
    if not isinstance(folder, Path):
        return _state(reader, None, {}, [], "F32")
    files = open_files(folder)
    opened = files.optimizers[0]
    kept = Content({})
    for key, value in optimizer_of(opened).items():
        if key not in _DIVIDED and _small(value):
            kept.value[key] = _embedded(value, opened, kept.blobs)
    groups = _embedded(_groups_in(opened), opened, kept.blobs)
    return _state(reader, files, kept.value, groups, _step_dtype(files), kept.blobs)


def _state(
    reader: CheckpointReader,
    files: Files | None,
    kept: dict[str, Any],
    groups: list[dict[str, Any]],
    step_dtype: str | None,
    blobs: list[bytes] | None = None,
) -> State:
    blobs = [] if blobs is None else blobs
    common, differing = _common(groups)
    step = step_value(max(reader.step_counts().values(), default=0.0), step_dtype, blobs)
    value = {
        "ds_version": _VERSION,
        **kept,
        "param_groups": [*groups, *({} for _ in range(_SPARE_GROUPS))],
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [common]},
    }
    return State(files, Content(value, blobs), differing, bool(groups), step_dtype)


def step_value(step: float, dtype: str | None, blobs: list[bytes]) -> Any:
    """A step as the optimizer keeps it: torch's as a tensor of one number, DeepSpeed's as a whole number."""
    if dtype not in ("F32", "F64", "I64", "I32"):
        return int(step)
    import struct

    blobs.append(struct.pack({"F32": "<f", "F64": "<d"}.get(dtype, "<q" if dtype == "I64" else "<i"), _as(step, dtype)))
    return new_tensor(str(len(blobs) - 1), dtype, ())


def _as(step: float, dtype: str) -> float | int:
    return int(step) if dtype.startswith("I") else step


def _groups_in(opened: TorchFile) -> list[dict[str, Any]]:
    """The settings of each parameter group; none where the file does not hold them (elastic_checkpoint)."""
    state = optimizer_of(opened)
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups = inner.get("param_groups") if type(inner) is dict else None
    if type(groups) is not list or not all(type(group) is dict for group in groups):
        return []
    return groups


def _common(groups: list[dict[str, Any]]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the settings that all groups share, the names of the others)."""
    if not groups:
        return {"params": []}, ()
    first, others = groups[0], groups[1:]
    same = {key: value for key, value in first.items() if all(other.get(key, other) == value for other in others)}
    differing = {key for group in groups for key in group if key not in same and key != "params"}
    return {**same, "params": []}, tuple(sorted(map(str, differing)))


def _step_dtype(files: Files) -> str | None:
    for opened in files.optimizers:
        state = optimizer_of(opened)
        inner: Any = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        held = inner if type(inner) is list else list((inner.get("state") or {}).values())  # elastic_checkpoint: a list
        for step in (group.get("step") for group in held):
            if step is not None:
                return step.dtype if type(step) is Tensor else "int"
    return None


def _small(value: Any) -> bool:
    """Whether it holds no tensor of a model's size."""
    if type(value) is Tensor:
        return value.count * ITEM_BYTES[value.dtype] <= _MOST_BYTES
    return all(_small(inner) for inner in _inside(value))


def _inside(value: Any) -> list[Any]:
    if type(value) is Thing:
        return [value.arguments, value.state]
    if type(value) is dict:
        return [*value.values()]
    return list(value) if type(value) in (list, tuple, set) else []


def _embedded(value: Any, opened: TorchFile, blobs: list[bytes]) -> Any:
    """The value with tensors that lie in `blobs`. Raises UserError where the bytes of one are damaged."""
    if type(value) is Tensor:
        return _embedded_tensor(value, opened, blobs)
    if type(value) is Thing:
        arguments, state = (_embedded(part, opened, blobs) for part in (value.arguments, value.state))
        return replace(value, arguments=arguments, state=state)
    if type(value) is dict:
        return {key: _embedded(inner, opened, blobs) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_embedded(inner, opened, blobs) for inner in value)
    return value


def _embedded_tensor(tensor: Tensor, opened: TorchFile, blobs: list[bytes]) -> Tensor:
    stored = opened.stored("a setting of the optimizer", tensor)
    if stored.size > _MOST_BYTES:
        raise UserError(f"{opened.file}: a setting of the optimizer holds {stored.size:,} bytes: damaged?")
    for span in stored.spans:
        verify_member(span.member)
    blobs.append(bytes(stored.read()))
    return new_tensor(str(len(blobs) - 1), tensor.dtype, tensor.shape)


def model_state(reader: CheckpointReader) -> Content:
    """The file of model states that the loader asks for, where the reader has none of DeepSpeed's.

    It takes counts from it, and no weights.
    """
    shapes: Mapping[str, tuple[int, ...]] = {name: reader.weights[name].shape for name in reader.optimizer_state}
    return Content(
        {
            "module": {},
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [shapes],
            "frozen_param_shapes": None,
            "shared_params": dict(reader.tied),
            "frozen_param_fragments": None,
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": [],
            "skipped_steps": 0,
            "global_steps": reader.step or 0,
            "dp_world_size": reader.world,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": _VERSION,
        }
    )
