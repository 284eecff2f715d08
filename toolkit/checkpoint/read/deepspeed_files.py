"""The files of a DeepSpeed checkpoint: which there must be, and whether they belong together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
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

    @property
    def model(self) -> TorchFile:
        return self.models[0]

    @property
    def world(self) -> int:
        return len(self.optimizers) or int(self.model.content.get("dp_world_size") or 1)


def is_tag_folder(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in _names(folder))


def find_tag_folder(root: Path) -> Path | None:
    """The folder that `latest` names, or None where this is no folder of save_checkpoint.

    Raises UserError, naming the tags there are, where `latest` is missing or names none of them.
    """
    tags = sorted(entry.name for entry in root.iterdir() if is_tag_folder(entry))
    latest = root / "latest"
    if not latest.is_file():
        if not tags:
            return None
        raise UserError(f"{root} has no file `latest` to say which checkpoint counts; name one: {_choices(root, tags)}")
    named = latest.read_bytes()[:1000].decode("utf-8", "replace").strip()
    if named not in tags:
        there = f"name one that is there: {_choices(root, tags)}" if tags else "and no other one is there"
        raise UserError(f"{latest} names {named!r}, which is not a checkpoint in {root}; {there}")
    return root / named


def _choices(root: Path, tags: list[str]) -> str:
    return listing(root / tag for tag in tags)


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def open_files(folder: Path) -> Files:
    """Opens every file of a tag folder. Raises UserError unless all are there, whole and of one save."""
    names = _names(folder)
    _refuse_parallel(folder, names)
    optimizers = _by_rank(folder, names, _OPTIMIZER, "optimizer", rank_group=2)
    models = _by_rank(folder, names, _MODEL, "model", rank_group=1)
    opened = Files(folder, [_open(path) for path in models.values()], [_open(path) for path in optimizers.values()])
    _refuse_missing(opened, models, optimizers)
    for model in opened.models:
        _expect(model, {"module": dict})
    for optimizer in opened.optimizers:
        _expect(optimizer, {"optimizer_state_dict": dict})
    _compare(opened)
    return opened


def _refuse_parallel(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        found = _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)
        if found and int(found[found.lastindex or 0]) > 0:
            raise UserError(
                f"{folder / name}: written with tensor parallelism, which is not supported; "
                "DeepSpeed's ds_to_universal.py reads it"
            )
        if _PIPELINE.fullmatch(name) or _EXPERT.fullmatch(name):
            raise UserError(
                f"{folder / name}: written with pipeline or expert parallelism, which is not supported; "
                "DeepSpeed's ds_to_universal.py reads it"
            )


def _by_rank(folder: Path, names: list[str], pattern: re.Pattern[str], what: str, rank_group: int) -> dict[int, Path]:
    found: dict[int, str] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            rank = int(match[rank_group] or 0)
            if rank in found:
                raise UserError(
                    f"{folder} holds two {what} files of rank {rank}, {found[rank]} and {name}: "
                    "two saves lie in one folder; remove the files of the other one"
                )
            found[rank] = name
    prefixes = {match[1] for name in found.values() if pattern is _OPTIMIZER and (match := pattern.fullmatch(name))}
    if len(prefixes) > 1:
        raise UserError(
            f"{folder} holds {what} files with and without bf16_ in front ({found[min(found)]}, {found[max(found)]}): "
            "two saves lie in one folder; remove the files of the other one"
        )
    return {rank: folder / found[rank] for rank in sorted(found)}


def _refuse_missing(files: Files, models: Collection[int], optimizers: Collection[int]) -> None:
    """Raises UserError that names every rank of which a file is not there. `models`, `optimizers`: those that are."""
    world = _told_world(files) or max([*models, *optimizers]) + 1
    stage_3 = any(_state(opened).get("zero_stage") == 3 for opened in files.optimizers)
    sharded = _is_sharded(files.model) if files.models else stage_3
    lacks = {
        "model": [rank for rank in range(world if sharded else 1) if rank not in models],
        "optimizer": [rank for rank in range(world if optimizers else 0) if rank not in optimizers],
    }
    count = sum(map(len, lacks.values()))
    if not count:
        return
    if lacks["model"] == lacks["optimizer"]:
        lacks = {"model and optimizer": lacks["model"]}
    listed = " and ".join(_files_of(what, ranks) for what, ranks in lacks.items() if ranks)
    start = f"{files.folder}: {listed} {'are' if count > 1 else 'is'} missing"
    path = shlex.quote(str(files.folder.resolve()))
    if world == 1:
        raise UserError(f"{start}; copy the folder again")
    raise UserError(
        f"{start} ({world} processes saved it): copy the folder again; where machines share no disk each has the files "
        f"of its own processes, to be brought together here: `rsync -a OTHER_MACHINE:{path}/ {path}/`"
    )


def _files_of(what: str, ranks: list[int]) -> str:
    """`the optimizer files of ranks 1, 2`."""
    files = "files" if len(ranks) > 1 or " and " in what else "file"
    return f"the {what} {files} of rank{'s' * (len(ranks) > 1)} {listing(ranks, 16)}"


def _told_world(files: Files) -> int | None:
    """The number of processes that a file says it was saved by."""
    for model in files.models:
        world = model.content.get("dp_world_size") if type(model.content) is dict else None
        if type(world) is int and 0 < world <= _MOST_PROCESSES:
            return world
    for optimizer in files.optimizers:
        counts = _state(optimizer).get("partition_count")
        count = counts[0] if type(counts) is list and counts else counts
        if type(count) is int and 0 < count <= _MOST_PROCESSES:
            return count
    return None


def _state(opened: TorchFile) -> dict[str, Any]:
    """The optimizer's state, or nothing where there is none."""
    state = opened.content.get("optimizer_state_dict") if type(opened.content) is dict else None
    return state if type(state) is dict else {}


def _is_sharded(model: TorchFile) -> bool:
    """Under stage 3 each rank has a model file."""
    return model.file.name.startswith("zero_pp_rank_")


def _open(path: Path) -> TorchFile:
    opened = open_torch_file(path, DEEPSPEED)
    was = f"{opened.written_as}.pt"
    if was != path.name and (_OPTIMIZER.fullmatch(was) or _MODEL.fullmatch(was)):
        raise UserError(f"{path} was written as {was}: ranks are mixed up; copy the folder again")
    return opened


def _expect(opened: TorchFile, kinds: Mapping[str, type]) -> None:
    for key, kind in kinds.items():
        value = opened.content.get(key) if type(opened.content) is dict else None
        if type(value) is not kind:
            raise UserError(f"{opened.file}: not a file of DeepSpeed's save_checkpoint: it has no {key}")


def _compare(files: Files) -> None:
    """Raises UserError where one file says something else of the save than the others."""
    _same([*files.models, *files.optimizers], "ds_version")
    for key in ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "param_shapes"):
        _same(files.models, key)
    world = files.model.content.get("dp_world_size")
    ranks = len(files.optimizers)
    if files.optimizers and type(world) is int and world != ranks:
        raise _wrong_count(files, files.optimizers, f"{files.model.file} was saved by {world} processes")
    if len(files.models) != (ranks if _is_sharded(files.model) and ranks else 1):
        raise _wrong_count(files, files.models, f"there are {ranks} optimizer files")


def _same(opened: list[TorchFile], key: str) -> None:
    for other in opened[1:]:
        first, value = opened[0].content.get(key), other.content.get(key)
        if first != value:
            values = f" ({first!r} and {value!r})" if type(value) in (int, str) else ""
            raise UserError(
                f"{other.file} is of another save than {opened[0].file}: their {key} differ{values}; "
                "copy the folder again or take another checkpoint"
            )


def _wrong_count(files: Files, found: list[TorchFile], why: str) -> UserError:
    what = "optimizer" if found is files.optimizers else "model"
    return UserError(
        f"{files.folder} holds {len(found)} {what} files and {why}: {found[-1].file.name} is left of a larger save; "
        "remove the files of the other save"
    )


def optimizer_of(opened: TorchFile) -> dict[str, Any]:
    state: dict[str, Any] = opened.content["optimizer_state_dict"]
    return state
