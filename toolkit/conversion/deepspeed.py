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
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.conversion.stored import Checkpoint, Stored
from toolkit.conversion.torch_files import check_zip, load, tied_names
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
"""What all of the model's files must agree on."""
_SMALL = 1 << 16
"""Elements of a parameter that is cheap to compare."""


def is_tag_folder(folder: Path) -> bool:
    return folder.is_dir() and any(_FILE.fullmatch(entry.name) for entry in folder.iterdir())


def find_tag_folder(root: Path) -> Path | None:
    """The folder that `latest` names; None if there are no tags. Raises UserError for another name."""
    tags = [entry for entry in sorted(root.iterdir()) if is_tag_folder(entry)]
    latest = root / "latest"
    tag = ""
    if latest.is_file():
        tag = latest.read_text(errors="replace").strip()
    elif not tags:
        return None
    several = any(folder.name == "pytorch_model_1" for folder in tags)  # accelerate's second model
    folder = root / tag.strip("\0/")
    if several or ".." in folder.parts or not is_tag_folder(folder):
        raise UserError(f"{latest} names {tag!r}; name one checkpoint: {listing(tags) or 'there is none'}")
    return folder


def open_deepspeed(path: Path, folder: Path) -> Checkpoint:
    """Opens a tag's folder, of ZeRO stage 0 to 3. `path`: as the user named it.

    Raises UserError if a rank's file is missing, damaged or of another save.
    """
    save = _load(folder)
    first = save.models[0]
    trained = save.trained_parameters()
    tied = {}
    for one, other in (first.get("shared_params") or {}).items():
        if one in trained:
            one, other = other, one
        tied[one] = other
    if not save.stage:
        tied = tied_names(first["module"])
    pieces = {**trained, **save.other_tensors([*trained, *tied])}
    order = [name for name in first["module"] if name in pieces]
    checks: list[Callable[[], None]] = [functools.partial(check_zip, each) for each in save.paths]
    if save.stage in (1, 2):
        checks.append(functools.partial(save.check_copies, trained))
    return Checkpoint(
        path=path,
        kind=f"DeepSpeed, ZeRO-{save.stage} of {save.world} ranks",
        tensors={name: _join(pieces[name], save.shape_of(name)) for name in {**dict.fromkeys(order), **pieces}},
        tied={other: name for other, name in tied.items() if name in pieces},
        step=first["global_steps"],
        checks=tuple(checks),
    )


def _join(pieces: Pieces, shape: tuple[int, ...]) -> Stored:
    def read() -> torch.Tensor:
        if len(pieces) == 1:
            return pieces[0].view(shape)
        return torch.cat(list(pieces)).view(shape)

    return Stored(shape, pieces[0].dtype, read)


@dataclass(frozen=True)
class _Save:
    """The files of a tag's folder."""

    folder: Path
    world: int
    stage: int
    models: list[Any]
    """One under stages 0 to 2; by rank under stage 3."""
    ranks: list[_Rank]
    """Under stages 1 to 3."""
    paths: list[Path]

    def shape_of(self, name: str) -> tuple[int, ...]:
        first = self.models[0]
        for shapes in [*(first["param_shapes"] or []), first.get("frozen_param_shapes") or {}]:
            if name in shapes:
                return tuple(shapes[name])
        return tuple(first["module"][name].shape)

    def trained_parameters(self) -> dict[str, Pieces]:
        """Raises UserError if the ranks' buffers do not hold exactly the parameters of the model's file."""
        groups = self.models[0]["param_shapes"] or []
        split = _split_stage3 if self.stage == 3 else _split_buffer
        parameters: dict[str, Pieces] = {}
        _require_same("the number of groups", [(rank.path, len(rank.masters)) for rank in self.ranks], len(groups))
        for number, shapes in enumerate(groups):
            parameters |= split(self.ranks, number, shapes)
        return parameters

    def other_tensors(self, known: Collection[str]) -> dict[str, Pieces]:
        """Buffers and frozen parameters: all that are not in `known`.

        Stage 2 has frozen ones whole, stage 3 a part in each rank's file, the last ones padded; under stages 0 and 1
        they are in `module` alone.
        """
        first = self.models[0]
        others: dict[str, Pieces] = {}
        if first.get("frozen_param_fragments"):
            for name, shape in first["frozen_param_shapes"].items():
                parts = [model["frozen_param_fragments"][name].reshape(-1) for model in self.models]
                others[name] = _without_padding(parts, shape.numel())
        for name, tensor in first["module"].items():
            is_part = self.stage == 3 and name not in first["buffer_names"]
            if name not in others and name not in known and not is_part:
                others[name] = [tensor.reshape(-1)]
        return others

    def check_copies(self, trained: Mapping[str, Pieces]) -> None:
        """Under stages 1 and 2 the model's file has each parameter in the engine's dtype: compares small ones, which
        all steps change. Raises UserError if one differs."""
        module = self.models[0]["module"]
        for name, pieces in trained.items():
            if name in module and 0 < module[name].numel() <= _SMALL:
                master = torch.cat(list(pieces)).to(module[name].dtype)
                if not torch.equal(master, module[name].reshape(-1)):
                    raise UserError(f"{self.folder} has files of different saves: {name} differs; copy it again")


class _Rank:
    """A rank's optimizer file. Raises UserError if it is not one of ZeRO."""

    def __init__(self, path: Path) -> None:
        state = _load_file(path)["optimizer_state_dict"]
        self.path = path
        self.stage = state.get("zero_stage", 1)  # BF16_Optimizer does not write it
        masters, optimizer = "single_partition_of_fp32_groups", "base_optimizer_state"
        if self.stage == 3:
            masters, optimizer = "fp32_flat_groups", "optimizer_state_dict"
        if masters not in state:
            raise UserError(f"{path} has no {masters}: it is not a file of ZeRO")
        self.masters: list[torch.Tensor] = state[masters]
        """By group: the flat fp32 elements of this rank."""
        self.sizes = [master.numel() for master in self.masters]
        """By group: elements of this rank's part of the buffer, with its padding."""
        paddings = state.get("group_paddings") if "zero_stage" in state else None
        for number, padding in enumerate((paddings or [])[: len(self.sizes)]):
            self.sizes[number] += max(0, padding)
        self.gaps = state.get("param_alignment_paddings")
        """By group and parameter: elements between it and the next one."""
        counts = state.get("partition_count")
        if not isinstance(counts, list):
            counts = [counts]
        self.worlds = set(counts)
        self.steps = _steps(state, state.get(optimizer))


def _steps(state: Mapping[str, Any], optimizer: Any) -> set[float]:
    """The steps that the optimizer has counted."""
    values = [state.get("base_optimizer_state_step")]  # of elastic_checkpoint
    if isinstance(optimizer, dict):
        values += [group.get("step") for group in optimizer["param_groups"]]
        values += [each.get("step") for each in optimizer["state"].values()]
    return {float(value) for value in values if value is not None}


def _load(folder: Path) -> _Save:
    """Raises UserError if files are missing, damaged, or of different saves."""
    paths = {"model": _paths_by_rank(folder, "model"), "optim": _paths_by_rank(folder, "optim")}
    if not paths["model"]:
        raise UserError(f"{folder} lacks the model's files *_model_states.pt: copy it again")
    models = {path: _load_file(path) for path in paths["model"].values()}
    path, first = next(iter(models.items()))
    world = first.get("dp_world_size", 1)
    expected = {"model": 1, "optim": 0}
    if path.name.startswith("zero_"):
        expected["model"] = world
    if first.get("param_shapes"):
        expected["optim"] = world
    _require_ranks(folder, paths, expected)
    ranks = [_Rank(path) for path in paths["optim"].values()]
    for key in _SAME:
        _require_same(key, [(path, each.get(key)) for path, each in models.items()], first.get(key))
    if ranks:
        _require_same("the numbers of ranks", [(rank.path, rank.worlds) for rank in ranks], {world})
        _require_same("their ZeRO stages", [(rank.path, rank.stage) for rank in ranks], ranks[0].stage)
        _require_same("their steps", [(rank.path, rank.steps) for rank in ranks], ranks[0].steps)
        if max(ranks[0].steps, default=0) > first["global_steps"]:
            steps = f"{max(ranks[0].steps):g} and {first['global_steps']}"
            raise _mixed(ranks[0].path, f"the step ({steps})")
    stage = next((int(rank.stage) for rank in ranks), 0)
    every = [*paths["model"].values(), *paths["optim"].values()]
    return _Save(folder, world, stage, list(models.values()), ranks, every)


def _paths_by_rank(folder: Path, kind: str) -> dict[int, Path]:
    """Raises UserError for parallelism that we do not read, and for files of two saves."""
    ranks: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if _OTHER_PARALLELISM.fullmatch(path.name) or (match and int(match["tensor"])):
            raise UserError(
                f"{path}: tensor, pipeline and expert parallelism are not supported; DeepSpeed's "
                "ds_to_universal.py reads them"
            )
        if match is None or match["kind"] != kind:
            continue
        other = next(iter(ranks.values()), path)
        if re.sub(r"rank_\d+", "", path.name) != re.sub(r"rank_\d+", "", other.name):
            raise _mixed(path, f"its name and that of {other.name}")
        ranks[int(match["rank"] or 0)] = path
    return dict(sorted(ranks.items()))


def _load_file(path: Path) -> Any:
    """Raises UserError if it is damaged, or was written under another name."""
    content = load(path)
    with zipfile.ZipFile(path) as file:
        written_as = file.namelist()[0].partition("/")[0] + ".pt"
    if written_as != path.name and _FILE.fullmatch(written_as):
        raise UserError(f"{path} was written as {written_as}: files of ranks were exchanged; copy the folder again")
    if not isinstance(content, dict) or not {"module", "optimizer_state_dict"} & content.keys():
        raise UserError(f"{path} is not a file of DeepSpeed's save_checkpoint")
    return content


def _require_ranks(folder: Path, paths: Mapping[str, Mapping[int, Path]], expected: Mapping[str, int]) -> None:
    """Raises UserError naming all files that are missing, or left of another save."""
    faults = []
    for kind, count in expected.items():
        if missing := [rank for rank in range(count) if rank not in paths[kind]]:
            faults.append(f"lacks the {kind} files of ranks {listing(missing, 16)}")
        if surplus := [path.name for rank, path in paths[kind].items() if rank >= count]:
            faults.append(f"has {listing(surplus)} of another save")
    if faults:
        world = max(expected.values())
        raise UserError(
            f"{folder} {' and '.join(faults)} ({world} ranks saved it): copy it again; where machines "
            f"share no disk, from each of them: `rsync -a OTHER_MACHINE:{folder}/ {folder}/`"
        )


def _require_same(what: str, values: Iterable[tuple[Path, Any]], expected: Any) -> None:
    for path, value in values:
        if value != expected:
            raise _mixed(path, what)


def _mixed(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} is of another save than the files beside it: {what} differ; copy the checkpoint again, or take another"
    )


def _split_buffer(ranks: Sequence[_Rank], number: int, shapes: Shapes) -> dict[str, Pieces]:
    """Stages 1 and 2: each parameter's range of the buffer, cut where a rank's part of it ends."""
    first = ranks[0]
    size = first.sizes[number]
    _require_same("their parts of a group", [(rank.path, rank.sizes) for rank in ranks], first.sizes)
    _require_same("their gaps", [(rank.path, rank.gaps) for rank in ranks], first.gaps)
    gaps = first.gaps[number] if first.gaps else [0] * len(shapes)
    parameters: dict[str, Pieces] = {}
    start = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = start + shape.numel()
        parts = []
        for index, rank in enumerate(ranks):
            low, high = (min(max(place - index * size, 0), size) for place in (start, end))
            parts.append(rank.masters[number][low:high])
        parameters[name] = [part for part in parts if part.numel()] or parts[:1]
        start = end + gap
    total = sum(rank.masters[number].numel() for rank in ranks)
    if not start <= total < start + 2 * len(ranks):  # padded to a multiple of 2 x ranks
        raise _mixed(first.path, f"the elements of group {number} ({total:,} and {start:,})")
    return parameters


def _split_stage3(ranks: Sequence[_Rank], number: int, shapes: Shapes) -> dict[str, Pieces]:
    """Stage 3: each parameter's equal parts, the last ones without their padding."""
    parameters: dict[str, Pieces] = {}
    start = 0
    for name, shape in shapes.items():
        size = -(-shape.numel() // len(ranks))
        parts = [rank.masters[number][start : start + size] for rank in ranks]
        parameters[name] = _without_padding(parts, shape.numel())
        start += size
    counts = [(rank.path, rank.masters[number].numel()) for rank in ranks]
    _require_same(f"the elements of group {number}, or they were offloaded to NVMe, and", counts, start)
    return parameters


def _without_padding(parts: Pieces, count: int) -> Pieces:
    """The first `count` elements."""
    pieces = []
    for part in parts:
        pieces.append(part[:count])
        count -= pieces[-1].numel()
    return pieces
