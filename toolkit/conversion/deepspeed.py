"""DeepSpeed's folders, of `save_checkpoint` and of `accelerator.save_state`: where each parameter lies in the flat
fp32 buffers of the ranks' optimizer files.

Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py, bf16_optimizer.py): a parameter group is one buffer of its
parameters in the order of `param_shapes`, with gaps under `parameter_alignment`; each rank has an equal part of it, and
saves it without the padding at the buffer's end (BF16_Optimizer with it).

Stage 3 (stage3.py): each parameter is split into equal parts, the last ones padded; a rank's buffer of a sub-group has
its parts in the order of `param_shapes`.

DeepSpeed's own zero_to_fp32.py drops what was frozen under stage 1 and does not notice ranks of different steps.
"""

from __future__ import annotations

import functools
import math
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.conversion.stored import Checkpoint, Stored
from toolkit.conversion.torch_files import check_zip, load, stored
from toolkit.errors import UserError, listing

Pieces = Sequence[torch.Tensor]
"""Consecutive elements of a parameter, in order: flat views of the ranks' files."""
Shapes = Mapping[str, torch.Size]

_FILE = re.compile(
    r"((bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<tensor>\d+)_?(?P<kind>model|optim)_states\.pt"
)
_OTHER_PARALLELISM = re.compile(
    r"layer_\d+.*-model_(\d+-)?(states|\d+).*\.pt|(layer_\d+_)?expert_\d+_.*_states\.pt|expp_rank_.*"
)
_SAME = ("ds_version", "global_steps", "global_samples", "skipped_steps", "param_shapes")
"""What the model's files of all ranks must agree on."""
_SMALL = 1 << 16
"""Elements of a parameter that is cheap to compare."""


def is_tag_folder(folder: Path) -> bool:
    return folder.is_dir() and any(_FILE.fullmatch(entry.name) for entry in folder.iterdir())


def find_tag_folder(root: Path) -> Path | None:
    """The folder that `latest` names; None without that file. Raises UserError for another name."""
    latest = root / "latest"
    if not latest.is_file():
        return None
    folder = root / latest.read_text(errors="replace").strip(" \n\0/")
    several = (root / "pytorch_model_1").is_dir()  # of accelerate, where `latest` names the last model
    if several or ".." in folder.parts or not is_tag_folder(folder):
        choices = listing(entry for entry in sorted(root.iterdir()) if is_tag_folder(entry))
        raise UserError(f"{latest} does not name the one checkpoint in {root}; name yours: {choices}")
    return folder


def open_deepspeed(path: Path, folder: Path) -> Checkpoint:
    """Opens a tag's folder, of ZeRO stage 0 to 3. `path`: as the user named it.

    Raises UserError if a rank's file is missing, damaged or of another save.
    """
    models, ranks = _load(folder)
    first = models[0]
    groups: list[Shapes] = first.get("param_shapes") or []
    trained = _trained_parameters(ranks, groups)
    tied = {}
    for one, other in (first.get("shared_params") or {}).items():
        if one in trained:
            one, other = other, one
        tied[one] = other
    pieces = {**trained, **_fragments(models)}
    shapes = {name: tuple(shape) for shapes in groups for name, shape in shapes.items()}
    shapes |= {name: tuple(shape) for name, shape in (first.get("frozen_param_shapes") or {}).items()}
    tensors = {name: _join(parts, shapes[name]) for name, parts in pieces.items()}
    tensors |= stored(_whole_tensors(first, [*pieces, *tied]))
    tensors |= {other: tensors[name] for other, name in tied.items() if name in tensors}
    checks = [functools.partial(check_zip, each) for each in sorted(folder.glob("*_states.pt"))]
    return Checkpoint(
        path,
        {name: tensors[name] for name in {**first["module"], **tensors} if name in tensors},
        step=first["global_steps"],
        checks=(*checks, functools.partial(_check_copies, folder, first["module"], trained)),
    )


def _join(pieces: Pieces, shape: tuple[int, ...]) -> Stored:
    return Stored(shape, pieces[0].dtype, lambda: torch.cat(list(pieces)).view(shape))


def _whole_tensors(model: Any, others: Collection[str]) -> dict[str, torch.Tensor]:
    """What is in `module` alone: buffers, under stage 0 all parameters, under stage 1 the frozen ones. Stage 3 leaves
    parameters empty."""
    buffers = model.get("buffer_names") or ()
    return {
        name: tensor
        for name, tensor in model["module"].items()
        if name in buffers or (name not in others and tensor.numel())
    }


def _fragments(models: Sequence[Any]) -> dict[str, Pieces]:
    """Frozen parameters: whole under stage 2, under stage 3 a part in each rank's file, the last ones padded."""
    frozen: dict[str, Pieces] = {}
    if models[0].get("frozen_param_fragments"):
        for name, shape in models[0]["frozen_param_shapes"].items():
            parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
            frozen[name] = _without_padding(parts, shape.numel())
    return frozen


def _check_copies(folder: Path, module: Mapping[str, torch.Tensor], trained: Mapping[str, Pieces]) -> None:
    """Under stages 1 and 2 the model's file has each parameter in the engine's dtype: compares small ones, which all
    steps change. Raises UserError if one differs."""
    for name, pieces in trained.items():
        copy = module.get(name)
        if copy is not None and 0 < copy.numel() <= _SMALL:
            master = torch.cat(list(pieces)).to(copy.dtype)
            if not torch.equal(master, copy.reshape(-1)):
                raise UserError(f"{folder} has files of different saves: {name} differs; copy it again")


class _Rank:
    """A rank's optimizer file. Raises UserError if it is not one of ZeRO."""

    def __init__(self, path: Path) -> None:
        state = _load_file(path, "optimizer_state_dict")["optimizer_state_dict"]
        self.path = path
        self.stage = state.get("zero_stage", 1)  # BF16_Optimizer does not write it
        masters = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        if masters not in state:
            raise UserError(f"{path} has no {masters}: it is not a file of ZeRO")
        self.masters: list[torch.Tensor] = state[masters]
        """By group: the flat fp32 elements of this rank."""
        self.sizes = [master.numel() for master in self.masters]
        """By group: elements of this rank's part of the buffer, with its padding."""
        if "zero_stage" in state:
            for number, padding in enumerate(state.get("group_paddings") or ()):
                self.sizes[number] += max(0, padding)
        self.gaps = state.get("param_alignment_paddings")
        """By group and parameter: elements between it and the next one."""
        self.steps = set(_steps(state))
        self.facts = {
            "their ZeRO stages": self.stage,
            "the numbers of ranks": state.get("partition_count"),
            "their steps": self.steps,
            "their parts of the parameters": (self.sizes, self.gaps),
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


def _load(folder: Path) -> tuple[list[Any], list[_Rank]]:
    """(the model's files, one under stages 0 to 2; the optimizer's by rank, none under stage 0).

    Raises UserError if files are missing, damaged, or of different saves.
    """
    model_paths, optimizer_paths = _paths_by_rank(folder, "model"), _paths_by_rank(folder, "optim")
    models = {path: _load_file(path, "module") for path in model_paths.values()}
    if not models:
        raise UserError(f"{folder} lacks the model's files *_model_states.pt: copy it again")
    path, first = next(iter(models.items()))
    world = first.get("dp_world_size", 1)
    _require_ranks(folder, model_paths, world if path.name.startswith("zero_") else 1)
    _require_ranks(folder, optimizer_paths, world if first.get("param_shapes") else 0)
    _require_same({path: {key: model.get(key) for key in _SAME} for path, model in models.items()})
    ranks = [_Rank(path) for path in optimizer_paths.values()]
    _require_same({rank.path: rank.facts for rank in ranks})
    steps = {step for rank in ranks for step in rank.steps}
    if max(steps, default=0) > first["global_steps"]:
        raise _mixed(ranks[0].path, f"the steps ({max(steps):g} and {first['global_steps']})")
    return list(models.values()), ranks


def _paths_by_rank(folder: Path, kind: str) -> dict[int, Path]:
    """Raises UserError for parallelism that we do not read, and for files of two saves."""
    ranks: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if _OTHER_PARALLELISM.fullmatch(path.name) or (match and int(match["tensor"])):
            raise UserError(f"{path}: tensor, pipeline and expert parallelism are not supported")
        if match and match["kind"] == kind:
            ranks[int(match["rank"] or 0)] = path
            if len({re.sub(r"rank_\d+", "", each.name) for each in ranks.values()}) > 1:
                raise _mixed(path, "their names")
    return dict(sorted(ranks.items()))


def _load_file(path: Path, key: str) -> Any:
    """Raises UserError if it is damaged, has not this key, or was written under another name."""
    content = load(path)
    with zipfile.ZipFile(path) as file:
        written_as = file.namelist()[0].partition("/")[0] + ".pt"
    if written_as != path.name and _FILE.fullmatch(written_as):
        raise UserError(f"{path} was written as {written_as}: ranks were exchanged; copy the folder again")
    if not isinstance(content, dict) or key not in content:
        raise UserError(f"{path} is not a file of DeepSpeed's save_checkpoint: it has no {key}")
    return content


def _require_ranks(folder: Path, paths: Mapping[int, Path], count: int) -> None:
    """Raises UserError naming all ranks whose file is missing, or left of another save."""
    missing = [rank for rank in range(count) if rank not in paths]
    surplus = [path.name for rank, path in paths.items() if rank >= count]
    if missing:
        names = re.sub(r"rank_\d+_mp", "rank_*_mp", next(iter(paths.values()), folder / "*_optim_states.pt").name)
        raise UserError(
            f"{folder} lacks {names} of ranks {listing(missing, 16)} ({count} ranks saved it): copy it again; where "
            f"machines share no disk, from each of them: `rsync -a OTHER_MACHINE:{folder}/ {folder}/`"
        )
    if surplus:
        raise UserError(f"{folder} has {listing(surplus)} of another save, with more ranks: remove that save's files")


def _require_same(facts: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raises UserError naming the first file of which a fact is not that of the first file."""
    for path, values in facts.items():
        for what, expected in next(iter(facts.values())).items():
            if values[what] != expected:
                raise _mixed(path, what)


def _mixed(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} is of another save than the files beside it: {what} differ; copy the checkpoint again, or take another"
    )


def _trained_parameters(ranks: Sequence[_Rank], groups: Sequence[Shapes]) -> dict[str, Pieces]:
    """Raises UserError if the ranks' buffers do not hold exactly these parameters."""
    parameters: dict[str, Pieces] = {}
    for rank in ranks:
        if len(rank.masters) != len(groups):
            raise _mixed(rank.path, "the numbers of groups")
    for number, shapes in enumerate(groups):
        split = _split_stage3 if ranks[0].stage == 3 else _split_buffer
        parameters |= split(ranks, number, shapes)
    return parameters


def _split_buffer(ranks: Sequence[_Rank], number: int, shapes: Shapes) -> dict[str, Pieces]:
    """Stages 1 and 2: each parameter's range of the buffer, cut where a rank's part of it ends."""
    size = ranks[0].sizes[number]
    gaps = ranks[0].gaps[number] if ranks[0].gaps else [0] * len(shapes)
    parameters: dict[str, Pieces] = {}
    start = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = start + shape.numel()
        parts = []
        for index, rank in enumerate(ranks):
            low, high = (min(max(place - index * size, 0), size) for place in (start, end))
            parts.append(rank.masters[number][low:high])
        parameters[name] = parts
        start = end + gap
    total = sum(rank.masters[number].numel() for rank in ranks)
    if not start <= total < start + 2 * len(ranks):  # padded to a multiple of 2 x ranks
        raise _mixed(ranks[0].path, f"the elements of group {number} ({total:,} and {start:,})")
    return parameters


def _split_stage3(ranks: Sequence[_Rank], number: int, shapes: Shapes) -> dict[str, Pieces]:
    """Stage 3: each parameter's equal parts, the last ones without their padding."""
    parameters: dict[str, Pieces] = {}
    start = 0
    for name, shape in shapes.items():
        size = math.ceil(shape.numel() / len(ranks))
        parts = [rank.masters[number][start : start + size] for rank in ranks]
        parameters[name] = _without_padding(parts, shape.numel())
        start += size
    if ranks[0].sizes[number] != start:
        raise _mixed(ranks[0].path, f"the elements of sub-group {number} (or they were offloaded to NVMe)")
    return parameters


def _without_padding(parts: Pieces, count: int) -> Pieces:
    """The first `count` elements."""
    pieces = []
    for part in parts:
        pieces.append(part[:count])
        count -= pieces[-1].numel()
    return pieces
