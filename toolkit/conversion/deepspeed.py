"""DeepSpeed's folders, of `save_checkpoint` and of `accelerator.save_state`: where each parameter
lies in the flat fp32 buffers of the ranks' optimizer files.

Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py, bf16_optimizer.py): a parameter group is
one buffer of its parameters in the order of `param_shapes`, with gaps under `parameter_alignment`;
each rank has an equal part of it, and saves it without the padding at the buffer's end
(BF16_Optimizer with it).

Stage 3 (stage3.py): each parameter is split into equal parts, the last ones padded; a rank's buffer
of a sub-group has its parts in the order of `param_shapes`.

DeepSpeed's own zero_to_fp32.py drops what was frozen under stage 1 and does not notice ranks of
different steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.conversion.stored import Check, Checkpoint, Stored
from toolkit.conversion.torch_files import check_tensors, flattened, load, stored
from toolkit.errors import UserError, listing

Shapes = Mapping[str, torch.Size]

_MODEL, _OPTIMIZER = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"
_SAME = ("global_steps", "global_samples", "skipped_steps", "param_shapes")
"""What the model's files of all ranks must agree on."""
_SMALL = 1 << 16
"""Elements of a parameter that is cheap to compare."""


def is_tag_folder(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*mp_rank_*_states.pt"))


def find_tag_folder(path: Path) -> Path | None:
    """`path` itself or the folder that its file `latest` names; None for other checkpoints. Raises
    UserError if there is no such folder."""
    if is_tag_folder(path):
        return path
    latest = path / "latest"
    if not latest.is_file():
        return None
    folder = path / latest.read_text(errors="replace").strip()
    if not is_tag_folder(folder):
        raise UserError(
            f"{latest} does not name a checkpoint in {path}: name its folder yourself"
        )
    return folder


def open_deepspeed(path: Path, folder: Path) -> Checkpoint:
    """Opens a tag's folder, of ZeRO stage 0 to 3. `path`: as the user named it.

    Raises UserError if a rank's file is missing, damaged or of another save.
    """
    stage3 = not (folder / _MODEL).is_file()
    models, ranks = _load(folder, stage3)
    first = next(iter(models.values()))
    split = _split_stage3 if stage3 else _split_buffer
    trained: dict[str, Stored] = {}
    for number, shapes in enumerate(first.get("param_shapes") or []):
        trained |= split(ranks, number, shapes)
    checks: list[Check] = []
    for rank in ranks:
        checks.append(functools.partial(check_tensors, rank.path, rank.masters))
    for file, content in models.items():
        tensors = [tensor for _, tensor in flattened((), content)]
        checks.append(functools.partial(check_tensors, file, tensors))
    checks.append(functools.partial(_check_copies, folder, first["module"], trained))
    named = _named_tensors(list(models.values()), trained)
    return Checkpoint(path, named, step=first["global_steps"], checks=tuple(checks))


def _named_tensors(
    models: Sequence[Any], trained: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Parameters and buffers; tied ones are one object."""
    first = models[0]
    tensors = {**trained, **_frozen(models)}
    # buffers, under stage 0 all parameters, under stage 1 the frozen ones; stage 3 leaves
    # parameters empty there
    others = {}
    for name, tensor in first["module"].items():
        if name not in tensors and tensor.numel():
            others[name] = tensor
    for one, other in (first.get("shared_params") or {}).items():
        if one in tensors:
            tensors.setdefault(other, tensors[one])
        elif other in tensors:
            tensors[one] = tensors[other]
    return {**stored(others), **tensors}


def _frozen(models: Sequence[Any]) -> dict[str, Stored]:
    """Frozen parameters: whole under stage 2, under stage 3 a part in each rank's file, the last
    ones padded."""
    if not models[0].get("frozen_param_fragments"):
        return {}
    frozen = {}
    for name, shape in models[0]["frozen_param_shapes"].items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        frozen[name] = _elements(parts, 0, shape)
    return frozen


def _check_copies(
    folder: Path,
    module: Mapping[str, torch.Tensor],
    trained: Mapping[str, Stored],
) -> None:
    """Under stages 1 and 2 the model's file has each parameter in the engine's dtype: compares
    small ones, which all steps change. Raises UserError if one differs."""
    for name, master in trained.items():
        copy = module.get(name)
        if copy is None or not 0 < copy.numel() <= _SMALL:
            continue
        if not torch.equal(master.read().to(copy.dtype), copy):
            raise UserError(
                f"{folder} has files of several saves: {name} differs; copy again"
            )


class _Rank:
    """A rank's optimizer file. Raises UserError if it is not one of ZeRO."""

    def __init__(self, path: Path, stage3: bool) -> None:
        state = load(path)["optimizer_state_dict"]
        masters = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        if masters not in state:
            raise _mixed(path)
        self.path = path
        self.masters: list[torch.Tensor] = state[masters]
        """By group: the flat fp32 elements of this rank."""
        self.gaps = state.get("param_alignment_paddings")
        """By group and parameter: elements between it and the next one."""
        self.steps = set(_steps(state))


def _steps(state: Any) -> Iterator[float]:
    """The steps that an optimizer's state has counted."""
    if isinstance(state, list):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        for key, value in state.items():
            if str(key).endswith("step") and value is not None:
                yield float(value)
            else:
                yield from _steps(value)


def _load(folder: Path, stage3: bool) -> tuple[dict[Path, Any], list[_Rank]]:
    """(the model's files, one under stages 0 to 2; the optimizer's by rank, none under stage 0).

    Raises UserError if files are missing, damaged, or of different saves.
    """
    model_names = [f"zero_pp_rank_0_{_MODEL}" if stage3 else _MODEL]
    first = load(folder / model_names[0])
    ranks = range(first.get("dp_world_size", 1))
    if stage3:
        model_names = [f"zero_pp_rank_{rank}_{_MODEL}" for rank in ranks]
    optimizer_names = []
    if first.get("param_shapes"):
        present = next((path.name for path in sorted(folder.glob(f"*{_OPTIMIZER}"))), "")
        precision = present.partition("zero_pp")[0]  # "", bf16_ or fp16_
        optimizer_names = [f"{precision}zero_pp_rank_{rank}_{_OPTIMIZER}" for rank in ranks]
    _require_files(folder, [*model_names, *optimizer_names])
    models = {folder / name: load(folder / name) for name in model_names}
    optimizers = [_Rank(folder / name, stage3) for name in optimizer_names]
    for path, model in models.items():
        if any(model.get(key) != first.get(key) for key in _SAME):
            raise _mixed(path)
    for rank in optimizers:
        is_later = max(rank.steps, default=0) > first["global_steps"]
        if is_later or rank.steps != optimizers[0].steps:
            raise _mixed(rank.path)
        if len(rank.masters) != len(first["param_shapes"]):
            raise _mixed(rank.path)
    return models, optimizers


def _require_files(folder: Path, expected: Sequence[str]) -> None:
    """Raises UserError naming all files that are missing, and those that this save did not
    write."""
    present = {path.name for path in folder.glob("*_states.pt")}
    missing = [name for name in expected if name not in present]
    if missing:
        raise UserError(
            f"{folder} lacks {listing(missing, 16)}: copy it again; where machines share no disk, "
            f"from each of them: `rsync -a OTHER_MACHINE:{folder}/ {folder}/`"
        )
    surplus = sorted(present.difference(expected))
    if surplus:
        raise UserError(
            f"{folder} has {listing(surplus)}: of another save, or of tensor, pipeline or expert "
            "parallelism, which are not supported"
        )


def _mixed(path: Path) -> UserError:
    fault = "is of another save than the files beside it"
    return UserError(f"{path} {fault}; copy the checkpoint again, or take another")


def _split_buffer(ranks: Sequence[_Rank], number: int, shapes: Shapes) -> dict[str, Stored]:
    """Stages 1 and 2: each parameter's range of the buffer, which the ranks' parts make
    together."""
    masters = [rank.masters[number] for rank in ranks]
    gaps = ranks[0].gaps[number] if ranks[0].gaps else [0] * len(shapes)
    parameters = {}
    start = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        parameters[name] = _elements(masters, start, shape)
        start += shape.numel() + gap
    total = sum(master.numel() for master in masters)
    if not start <= total < start + 2 * len(ranks):  # padded to a multiple of 2 x ranks
        raise _mixed(ranks[0].path)
    return parameters


def _split_stage3(ranks: Sequence[_Rank], number: int, shapes: Shapes) -> dict[str, Stored]:
    """Stage 3: each parameter's equal parts, the last ones padded."""
    parameters = {}
    start = 0
    for name, shape in shapes.items():
        size = math.ceil(shape.numel() / len(ranks))
        parts = [rank.masters[number][start : start + size] for rank in ranks]
        parameters[name] = _elements(parts, 0, shape)
        start += size
    for rank in ranks:
        if rank.masters[number].numel() != start:
            raise _mixed(rank.path)
    return parameters


def _elements(parts: Sequence[torch.Tensor], start: int, shape: torch.Size) -> Stored:
    """The tensor of this shape that begins at element `start` of the parts together."""
    end = start + shape.numel()
    pieces = []
    for part in parts:
        pieces.append(part[max(start, 0) : max(end, 0)])
        start, end = start - part.numel(), end - part.numel()
    return Stored(tuple(shape), parts[0].dtype, functools.partial(list, pieces))
