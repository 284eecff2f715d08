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
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.conversion.stored import Check, Checkpoint, Stored
from toolkit.conversion.torch_files import check_tensors, flattened, load, stored
from toolkit.errors import UserError, listing

Pieces = Sequence[torch.Tensor]
"""Consecutive elements of a parameter, in order: flat views of the ranks' files."""
Shapes = Mapping[str, torch.Size]

_MODEL, _OPTIMIZER = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"
_SAME = ("ds_version", "global_steps", "global_samples", "skipped_steps", "param_shapes")
"""What the model's files of all ranks must agree on."""
_SMALL = 1 << 16
"""Elements of a parameter that is cheap to compare."""


def is_tag_folder(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*mp_rank_*_states.pt"))


def find_tag_folder(root: Path) -> Path | None:
    """The folder that `latest` names; None without that file. Raises UserError for another name."""
    latest = root / "latest"
    if not latest.is_file():
        return None
    folder = root / latest.read_text(errors="replace").strip()
    several = (root / "pytorch_model_1").is_dir()  # accelerate's, where it names the last model
    if several or not is_tag_folder(folder):
        choices = listing(entry for entry in sorted(root.iterdir()) if is_tag_folder(entry))
        raise UserError(f"{latest} does not name the one checkpoint in {root}; name {choices}")
    return folder


def open_deepspeed(path: Path, folder: Path) -> Checkpoint:
    """Opens a tag's folder, of ZeRO stage 0 to 3. `path`: as the user named it.

    Raises UserError if a rank's file is missing, damaged or of another save.
    """
    stage3 = not (folder / _MODEL).is_file()
    files, ranks = _load(folder, stage3)
    models = list(files.values())
    split = _split_stage3 if stage3 else _split_buffer
    trained: dict[str, Pieces] = {}
    for number, shapes in enumerate(models[0].get("param_shapes") or []):
        trained |= split(ranks, number, shapes)
    checks: list[Check] = []
    for rank in ranks:
        checks.append(functools.partial(check_tensors, rank.path, rank.masters))
    for file, content in files.items():
        used = [tensor for _, tensor in flattened((), content)]
        checks.append(functools.partial(check_tensors, file, used))
    checks.append(functools.partial(_check_copies, folder, models[0]["module"], trained))
    tensors = _named_tensors(models, trained, stage3)
    return Checkpoint(path, tensors, step=models[0]["global_steps"], checks=tuple(checks))


def _named_tensors(
    models: Sequence[Any],
    trained: Mapping[str, Pieces],
    stage3: bool,
) -> dict[str, Stored]:
    """Parameters and buffers; tied ones are one object."""
    first = models[0]
    frozen = first.get("frozen_param_shapes") or {}
    shapes = dict(frozen)
    for group in first.get("param_shapes") or ():
        shapes |= group
    pieces = {**trained, **_fragments(models, frozen)}
    # buffers, under stage 0 all parameters, under stage 1 the frozen ones; stage 3 leaves
    # parameters empty there
    buffers = first.get("buffer_names") or ()
    module = {}
    for name, tensor in first["module"].items():
        if name not in pieces and (name in buffers or not stage3):
            module[name] = tensor
    tensors = stored(module)
    for name, parts in pieces.items():
        tensors[name] = _join(parts, shapes[name])
    for pair in (first.get("shared_params") or {}).items():
        for one, other in (pair, pair[::-1]):
            if one in pieces and other not in pieces:
                tensors[other] = tensors[one]
    return tensors


def _join(pieces: Pieces, shape: torch.Size) -> Stored:
    return Stored(tuple(shape), pieces[0].dtype, lambda: pieces)


def _fragments(models: Sequence[Any], shapes: Shapes) -> dict[str, Pieces]:
    """Frozen parameters: whole under stage 2, under stage 3 a part in each rank's file, the last
    ones padded."""
    if not models[0].get("frozen_param_fragments"):
        return {}
    frozen: dict[str, Pieces] = {}
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        frozen[name] = _elements(parts, 0, shape.numel())
    return frozen


def _check_copies(
    folder: Path,
    module: Mapping[str, torch.Tensor],
    trained: Mapping[str, Pieces],
) -> None:
    """Under stages 1 and 2 the model's file has each parameter in the engine's dtype: compares
    small ones, which all steps change. Raises UserError if one differs."""
    for name, pieces in trained.items():
        copy = module.get(name)
        if copy is not None and 0 < copy.numel() <= _SMALL:
            master = torch.cat(list(pieces)).to(copy.dtype)
            if not torch.equal(master, copy.reshape(-1)):
                raise UserError(f"{folder} has files of several saves: {name} differs; copy again")


class _Rank:
    """A rank's optimizer file. Raises UserError if it is not one of ZeRO."""

    def __init__(self, path: Path, stage3: bool) -> None:
        state = _load_file(path)["optimizer_state_dict"]
        masters = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        if masters not in state:
            raise _mixed(path, "the ZeRO stages")
        self.path = path
        self.masters: list[torch.Tensor] = state[masters]
        """By group: the flat fp32 elements of this rank."""
        self.gaps = state.get("param_alignment_paddings")
        """By group and parameter: elements between it and the next one."""
        self.steps = set(_steps(state))
        self.facts = {
            "the numbers of ranks": state.get("partition_count"),
            "their steps": self.steps,
        }


def _steps(state: Any) -> Iterator[float]:
    """The steps that an optimizer's state has counted."""
    if isinstance(state, dict):
        for key, value in state.items():
            if str(key).endswith("step") and value is not None:
                yield float(value)
            else:
                yield from _steps(value)
    elif isinstance(state, list):
        for value in state:
            yield from _steps(value)


def _load(folder: Path, stage3: bool) -> tuple[dict[Path, Any], list[_Rank]]:
    """(the model's files, one under stages 0 to 2; the optimizer's by rank, none under stage 0).

    Raises UserError if files are missing, damaged, or of different saves.
    """
    model_names = [f"zero_pp_rank_0_{_MODEL}" if stage3 else _MODEL]
    first = _load_file(folder / model_names[0])
    ranks = range(first.get("dp_world_size", 1))
    if stage3:
        model_names = [f"zero_pp_rank_{rank}_{_MODEL}" for rank in ranks]
    optimizer_names = []
    if first.get("param_shapes"):
        precision = next((path.name for path in sorted(folder.glob(f"*{_OPTIMIZER}"))), "")
        precision = precision.partition("zero_pp")[0]  # "", bf16_ or fp16_
        optimizer_names = [f"{precision}zero_pp_rank_{rank}_{_OPTIMIZER}" for rank in ranks]
    _require_files(folder, [*model_names, *optimizer_names])
    models = {folder / name: _load_file(folder / name) for name in model_names}
    files = [_Rank(folder / name, stage3) for name in optimizer_names]
    _require_same({path: {key: model.get(key) for key in _SAME} for path, model in models.items()})
    _require_same({file.path: file.facts for file in files})
    for file in files:
        if len(file.masters) != len(first["param_shapes"]):
            raise _mixed(file.path, "the numbers of groups")
        if max(file.steps, default=0) > first["global_steps"]:
            raise _mixed(file.path, "the steps")
    return models, files


def _require_files(folder: Path, expected: Sequence[str]) -> None:
    """Raises UserError naming all files that are missing, and those that this save did not
    write."""
    present = {path.name for path in folder.glob("*_states.pt")}
    if missing := [name for name in expected if name not in present]:
        raise UserError(
            f"{folder} lacks {listing(missing, 16)}: copy it again; where machines share no disk, "
            f"from each of them: `rsync -a OTHER_MACHINE:{folder}/ {folder}/`"
        )
    if surplus := sorted(present.difference(expected)):
        raise UserError(
            f"{folder} has {listing(surplus)}: of another save, or of tensor, pipeline or expert "
            "parallelism, which are not supported"
        )


def _load_file(path: Path) -> Any:
    """Raises UserError if it is damaged, or was written as another rank's."""
    content = load(path)
    with zipfile.ZipFile(path) as file:
        written_as = file.namelist()[0].partition("/")[0] + ".pt"
    if written_as != path.name and path.with_name(written_as).is_file():
        raise UserError(f"{path} was written as {written_as}: copy the folder again")
    return content


def _require_same(facts: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raises UserError naming the first file of which a fact is not that of the first file."""
    for path, values in facts.items():
        for what, expected in next(iter(facts.values())).items():
            if values[what] != expected:
                raise _mixed(path, what)


def _mixed(path: Path, what: str) -> UserError:
    fault = f"of another save than the files beside it: {what} differ"
    return UserError(f"{path} is {fault}; copy the checkpoint again, or take another")


def _split_buffer(ranks: Sequence[_Rank], number: int, shapes: Shapes) -> dict[str, Pieces]:
    """Stages 1 and 2: each parameter's range of the buffer, which the ranks' parts make
    together."""
    masters = [rank.masters[number] for rank in ranks]
    gaps = ranks[0].gaps[number] if ranks[0].gaps else [0] * len(shapes)
    parameters: dict[str, Pieces] = {}
    start = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        parameters[name] = _elements(masters, start, start + shape.numel())
        start += shape.numel() + gap
    total = sum(master.numel() for master in masters)
    if not start <= total < start + 2 * len(ranks):  # padded to a multiple of 2 x ranks
        raise _mixed(ranks[0].path, f"the elements of group {number} ({total:,} and {start:,})")
    return parameters


def _split_stage3(ranks: Sequence[_Rank], number: int, shapes: Shapes) -> dict[str, Pieces]:
    """Stage 3: each parameter's equal parts, the last ones padded."""
    parameters: dict[str, Pieces] = {}
    start = 0
    for name, shape in shapes.items():
        size = math.ceil(shape.numel() / len(ranks))
        parts = [rank.masters[number][start : start + size] for rank in ranks]
        parameters[name] = _elements(parts, 0, shape.numel())
        start += size
    for rank in ranks:
        if rank.masters[number].numel() != start:
            raise _mixed(rank.path, f"the elements of sub-group {number} (or NVMe has them)")
    return parameters


def _elements(parts: Pieces, start: int, end: int) -> Pieces:
    """Elements `start` to `end` of the parts together."""
    pieces = []
    for part in parts:
        pieces.append(part[max(start, 0) : max(end, 0)])
        start, end = start - part.numel(), end - part.numel()
    return pieces
