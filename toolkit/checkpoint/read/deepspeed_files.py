"""The files of a DeepSpeed checkpoint: which there must be, and whether they belong together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.torch_file import TorchFile, open_torch_file
from toolkit.errors import UserError, listing

_OPTIMIZER = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<tensor>\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<tensor>\d+)_model_states\.pt")
_PIPELINE_OR_EXPERT = re.compile(
    r"layer_\d+.*-model_(\d+-)?(states|\d+).*\.pt|(layer_\d+_)?expert_\d+_.*_states\.pt|expp_rank_.*_states\.pt"
)
_MOST_PROCESSES = 1 << 20  # a larger number is not believed


@dataclass(frozen=True)
class Files:
    """What lies in a tag folder, opened."""

    folder: Path
    models: list[TorchFile]
    """One under stages 0 to 2, by rank under stage 3."""
    optimizers: list[TorchFile]
    """By rank; none under stage 0."""
    world: int
    """Processes that saved it."""


def is_tag_folder(folder: Path) -> bool:
    return folder.is_dir() and any(
        _MODEL.fullmatch(entry.name) or _OPTIMIZER.fullmatch(entry.name) for entry in folder.iterdir()
    )


def find_tag_folder(root: Path) -> Path | None:
    """The folder that `latest` names, or None where this is no folder of save_checkpoint.

    Raises UserError, naming the tags there are, where `latest` is missing or names none of them.
    """
    tags = sorted(entry.name for entry in root.iterdir() if is_tag_folder(entry))
    choices, latest = listing(root / tag for tag in tags), root / "latest"
    if not latest.is_file():
        if not tags:
            return None
        raise UserError(f"{root} has no file `latest` to say which checkpoint counts; name one: {choices}")
    named = latest.read_bytes()[:1000].decode("utf-8", "replace").strip()
    if named not in tags:
        there = f"name one that is there: {choices}" if tags else "and no other one is there"
        raise UserError(f"{latest} names {named!r}, which is not a checkpoint in {root}; {there}")
    return root / named


def open_files(folder: Path) -> Files:
    """Opens every file of a tag folder. Raises UserError unless all are there, whole and of one save."""
    names = sorted(entry.name for entry in folder.iterdir())
    found = {"model": _by_rank(folder, names, _MODEL), "optimizer": _by_rank(folder, names, _OPTIMIZER)}
    models = [_open(path, "module") for path in found["model"].values()]
    optimizers = [_open(path, "optimizer_state_dict") for path in found["optimizer"].values()]
    told = [*(model.content.get("dp_world_size") for model in models), *(partition_counts(o)[0] for o in optimizers)]
    believable = (count for count in told if type(count) is int and 0 < count <= _MOST_PROCESSES)
    world = next(believable, max([*found["model"], *found["optimizer"]]) + 1)
    # under stage 3 each rank has a model file
    sharded = is_sharded(models[0]) if models else any(optimizer_of(each).get("zero_stage") == 3 for each in optimizers)
    _compare_ranks(folder, found, {"model": world if sharded else 1, "optimizer": world if optimizers else 0})
    _same([*models, *optimizers], "ds_version")
    for key in ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "param_shapes"):
        _same(models, key)
    return Files(folder, models, optimizers, world)


def optimizer_of(opened: TorchFile) -> dict[str, Any]:
    state: dict[str, Any] = opened.content["optimizer_state_dict"]
    return state


def partition_counts(optimizer: TorchFile) -> list[Any]:
    """Processes that share a parameter's state, for each group."""
    counts = optimizer_of(optimizer).get("partition_count")
    return counts if type(counts) is list and counts else [counts]


def is_sharded(model: TorchFile) -> bool:
    return model.file.name.startswith("zero_pp_rank_")


def _by_rank(folder: Path, names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if _PIPELINE_OR_EXPERT.fullmatch(name) or (match and int(match["tensor"])):
            raise UserError(
                f"{folder / name}: written with {'tensor' if match else 'pipeline or expert'} parallelism, which is "
                "not supported; DeepSpeed's ds_to_universal.py reads it"
            )
        if match:
            other = found.setdefault(int(match["rank"] or 0), name)
            first = found[min(found)]
            if other != name or name.startswith("bf16_") != first.startswith("bf16_"):
                raise UserError(
                    f"{folder} holds {other if other != name else first} and {name}: two saves lie in one folder; "
                    "remove the files of the other one"
                )
    return {rank: folder / found[rank] for rank in sorted(found)}


def _compare_ranks(folder: Path, found: dict[str, dict[int, Path]], counts: dict[str, int]) -> None:
    """Raises UserError that names every rank of which a file is missing, or a file that is left of another save."""
    for what, paths in found.items():
        if left := [path.name for rank, path in paths.items() if rank >= counts[what]]:
            raise UserError(
                f"{folder} was saved by {counts['optimizer']} processes, and {listing(left)} is left of a larger save; "
                "remove the files of the other save"
            )
    lacks = {what: [rank for rank in range(count) if rank not in found[what]] for what, count in counts.items()}
    listed = [f"{what} files of ranks {listing(ranks, 16)}" for what, ranks in lacks.items() if ranks]
    path = shlex.quote(str(folder.resolve()))
    if listed:
        raise UserError(
            f"{folder} lacks the {' and the '.join(listed)} ({max(counts.values())} processes saved it): copy the "
            "folder again; where machines share no disk each has the files of its own processes, to be brought "
            f"together here: `rsync -a OTHER_MACHINE:{path}/ {path}/`"
        )


def _open(path: Path, key: str) -> TorchFile:
    """`key`: of the state that a file of this kind has."""
    opened = open_torch_file(path)
    was = f"{opened.written_as}.pt"
    if was != path.name and (_OPTIMIZER.fullmatch(was) or _MODEL.fullmatch(was)):
        raise UserError(f"{path} was written as {was}: ranks are mixed up; copy the folder again")
    if type(opened.content) is not dict or type(opened.content.get(key)) is not dict:
        raise UserError(f"{path}: not a file of DeepSpeed's save_checkpoint: it has no {key}")
    return opened


def _same(opened: Collection[TorchFile], key: str) -> None:
    first, *others = opened
    for other in others:
        one, two = first.content.get(key), other.content.get(key)
        if one != two:
            values = f" ({one!r} and {two!r})" if type(two) in (int, str) else ""
            raise UserError(
                f"{other.file} is of another save than {first.file}: their {key} differ{values}; "
                "copy the folder again or take another checkpoint"
            )
