"""The files of a DeepSpeed checkpoint: which there must be, and whether they belong together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.torch_file import TorchFile, open_torch_file
from toolkit.checkpoint.read.unpickle import DEEPSPEED
from toolkit.errors import UserError, listing

_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_PIPELINE = re.compile(r"layer_\d+.*-model_(\d+-)?(states|\d+).*\.pt")
_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_.*_states\.pt|expp_rank_.*_states\.pt")
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

    @property
    def model(self) -> TorchFile:
        return self.models[0]


def is_tag_folder(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in _names(folder))


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


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def open_files(folder: Path) -> Files:
    """Opens every file of a tag folder. Raises UserError unless all are there, whole and of one save."""
    names = _names(folder)
    _refuse_parallel(folder, names)
    found = {"model": _by_rank(folder, names, _MODEL, 1), "optimizer": _by_rank(folder, names, _OPTIMIZER, 2)}
    models = [_open(path, "module") for path in found["model"].values()]
    optimizers = [_open(path, "optimizer_state_dict") for path in found["optimizer"].values()]
    told = [model.content.get("dp_world_size") for model in models]
    told += [partition_counts(optimizer)[0] for optimizer in optimizers]
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


def _refuse_parallel(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        found = _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)
        tensor = found is not None and int(found[found.lastindex or 0]) > 0
        if tensor or _PIPELINE.fullmatch(name) or _EXPERT.fullmatch(name):
            raise UserError(
                f"{folder / name}: written with {'tensor' if tensor else 'pipeline or expert'} parallelism, which is "
                "not supported; DeepSpeed's ds_to_universal.py reads it"
            )


def _by_rank(folder: Path, names: list[str], pattern: re.Pattern[str], group: int) -> dict[int, Path]:
    """`group`: of the pattern, the rank."""
    found: dict[int, str] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            other = found.setdefault(int(match[group] or 0), name)
            first = found[min(found)]
            if other != name or name.startswith("bf16_") != first.startswith("bf16_"):
                raise UserError(
                    f"{folder} holds {other if other != name else first} and {name}: two saves lie in one folder; "
                    "remove the files of the other one"
                )
    return {rank: folder / found[rank] for rank in sorted(found)}


def _compare_ranks(folder: Path, found: dict[str, dict[int, Path]], counts: dict[str, int]) -> None:
    """Raises UserError that names every rank of which a file is missing, or a file that is left of another save."""
    lacks = {what: [rank for rank in range(counts[what]) if rank not in found[what]] for what in counts}
    for what, paths in found.items():
        if left := [path.name for rank, path in paths.items() if rank >= counts[what]]:
            raise UserError(
                f"{folder} was saved by {counts['optimizer']} processes, and {listing(left)} is left of a larger save; "
                "remove the files of the other save"
            )
    missing, world = sum(map(len, lacks.values())), max(counts.values())
    if not missing:
        return
    if lacks["model"] == lacks["optimizer"]:
        lacks = {"model and optimizer": lacks["model"]}
    listed = " and ".join(_files_of(what, ranks) for what, ranks in lacks.items() if ranks)
    start = f"{folder}: {listed} {'are' if missing > 1 else 'is'} missing"
    path = shlex.quote(str(folder.resolve()))
    if world == 1:
        raise UserError(f"{start}; copy the folder again")
    raise UserError(
        f"{start} ({world} processes saved it): copy the folder again; where machines share no disk each has the files "
        f"of its own processes, to be brought together here: `rsync -a OTHER_MACHINE:{path}/ {path}/`"
    )


def _files_of(what: str, ranks: Collection[int]) -> str:
    """`the optimizer files of ranks 1, 2`."""
    files = "files" if len(ranks) > 1 or " and " in what else "file"
    return f"the {what} {files} of rank{'s' * (len(ranks) > 1)} {listing(ranks, 16)}"


def _open(path: Path, key: str) -> TorchFile:
    """`key`: of the state that a file of this kind has."""
    opened = open_torch_file(path, DEEPSPEED)
    was = f"{opened.written_as}.pt"
    if was != path.name and (_OPTIMIZER.fullmatch(was) or _MODEL.fullmatch(was)):
        raise UserError(f"{path} was written as {was}: ranks are mixed up; copy the folder again")
    if type(opened.content) is not dict or type(opened.content.get(key)) is not dict:
        raise UserError(f"{path}: not a file of DeepSpeed's save_checkpoint: it has no {key}")
    return opened


def _same(opened: list[TorchFile], key: str) -> None:
    for other in opened[1:]:
        first, value = opened[0].content.get(key), other.content.get(key)
        if first != value:
            values = f" ({first!r} and {value!r})" if type(value) in (int, str) else ""
            raise UserError(
                f"{other.file} is of another save than {opened[0].file}: their {key} differ{values}; "
                "copy the folder again or take another checkpoint"
            )
