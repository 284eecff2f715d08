"""A run's checkpoints on disk, all of one format (docs/checkpoints.md), written and read by rank 0.

A folder is written under another name, flushed and renamed: whatever has a checkpoint's name is
whole."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate.utils import broadcast_object_list
from safetensors import safe_open

from toolkit.checkpoint.safetensors_writer import DTYPES_BY_NAME, Shapes, write_safetensors
from toolkit.checkpoint.state import LiveState
from toolkit.errors import Faults, UserError, listing
from toolkit.utils.cache import digest_of_file
from toolkit.utils.files import (
    draft_path,
    read_json_object,
    replace_file,
    replace_folder,
    write_new,
)

STATE_FILE = "state.json"
WEIGHTS_FILE, OPTIMIZER_FILE = "weights.safetensors", "optimizer.safetensors"
FORMAT = 3


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_number(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})", folder.name)
    return int(match[1]) if match else None


def save(
    folder: Path,
    tables: Mapping[str, Shapes],
    tensors: Iterable[torch.Tensor],
    entries: Mapping[str, Any],
    write_others: Callable[[Path], None],
) -> None:
    """Writes a checkpoint.

    `tables`: file -> the tensors in it. `tensors`: those of all files, one after another in the
    order of each file (`file_order`). `entries`: of state.json. `write_others`: writes
    all other files into the folder that it gets. Raises OSError, and leaves an earlier checkpoint
    of that name untouched."""
    pieces = ([tensor] for tensor in tensors)
    digests: dict[str, str] = {}
    with replace_folder(folder, overwrite=True) as draft:
        for file_name, shapes in tables.items():
            of_file = itertools.islice(pieces, len(shapes))
            digests[file_name] = write_safetensors(draft / file_name, shapes, of_file)
        write_others(draft)
        for path in sorted(draft.rglob("*")):
            name = path.relative_to(draft).as_posix()
            if path.is_file() and name not in digests:
                digests[name] = digest_of_file(path)
        # later than every other one, even if the clock has been set back
        saved_at = max(time.time(), newest_save_time(folder.parent) + 1e-3)
        state = {"format": FORMAT, "saved_at": saved_at, **entries, "files": digests}
        state["digest"] = _digest(state)
        write_new(draft / STATE_FILE, json.dumps(state, ensure_ascii=False))


def _digest(state: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(state).encode()).hexdigest()


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json. Raises UserError if it is missing, damaged or of another
    format."""
    path = folder / STATE_FILE
    state = read_json_object(path)
    digest = state.pop("digest", None)
    if state.get("format") != FORMAT or digest != _digest(state):
        raise UserError(
            f"{path} is damaged, or of another version: take another checkpoint"
        )
    return state


def find_fault(folder: Path) -> str:
    """What is wrong with a checkpoint, all of which is read; empty if nothing is."""
    try:
        for name, digest in read_state(folder)["files"].items():
            if digest_of_file(folder / name) != digest:
                return f"{folder / name} is damaged"
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def newest_first(checkpoints: Path) -> list[Path]:
    """The checkpoints in the order of their time, not of their step: a run that resumed an older
    one continues from what it saved after that. Those whose state.json is damaged come first, so
    that a run which resumes reports them."""
    return [folder for _, folder in _by_time(checkpoints)]


def readable(checkpoints: Path) -> list[Path]:
    """Those whose state.json can be read, the newest first."""
    return [folder for saved_at, folder in _by_time(checkpoints) if saved_at < math.inf]


def _by_time(checkpoints: Path) -> list[tuple[float, Path]]:
    folders = [path for path in checkpoints.glob("step-*") if step_number(path) is not None]
    return sorted(((_saved_at(folder), folder) for folder in folders), reverse=True)


def _saved_at(folder: Path) -> float:
    try:
        return float(read_state(folder)["saved_at"])
    except UserError:
        return math.inf


def newest_save_time(checkpoints: Path) -> float:
    """When the newest checkpoint was saved, in seconds since the epoch; 0 if there is none."""
    return max(map(_saved_at, readable(checkpoints)), default=0.0)


def set_links(checkpoints: Path, best_step: int) -> None:
    """Points `last` to the newest checkpoint: a run may have been killed before it did. Points
    `best` to that of `best_step`, or removes the link if there is none: a run that resumed an older
    checkpoint ignores better ones after it."""
    for newest in readable(checkpoints)[:1]:
        _set_link(checkpoints / "last", newest)
    best = step_folder(checkpoints, best_step)
    if best.is_dir():
        _set_link(checkpoints / "best", best)
    else:
        (checkpoints / "best").unlink(missing_ok=True)


def _set_link(link: Path, folder: Path) -> None:
    try:
        with replace_file(link, flush=False) as draft:
            draft.symlink_to(folder.name)
    except OSError:  # a disk without links: checkpoints are named by their steps
        link.unlink(missing_ok=True)


def prune(checkpoints: Path, keep: int, best_step: int) -> None:
    """Removes all but the newest `keep` checkpoints and that of `best_step`."""
    remaining = {*readable(checkpoints)[:keep], step_folder(checkpoints, best_step)}
    for folder in newest_first(checkpoints):
        if folder not in remaining:
            remove(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint, of a link only the link. It loses its name first."""
    if folder.is_symlink():
        folder.unlink()
        return
    draft = draft_path(folder)
    folder.rename(draft)
    shutil.rmtree(draft, ignore_errors=True)


def load(folder: Path, live: LiveState, state: Mapping[str, Any]) -> None:
    """Restores weights, buffers and optimizer state of a checkpoint on rank 0's disk; all ranks
    call it. `state`: its state.json. Raises UserError, before anything is changed, if they do not
    fit."""
    weights = TensorFile(folder / WEIGHTS_FILE, live)
    optimizer = TensorFile(folder / OPTIMIZER_FILE, live)
    _check_model(folder, live, state, weights.shapes)
    _check_optimizer(folder, live, state["optimizer"])
    live.before_loading()
    live.scatter(weights.shapes, live.weights(), weights.read)
    live.create_moments(optimizer.shapes, optimizer.numbers)
    moments = {
        name: each
        for name, each in optimizer.shapes.items()
        if name not in optimizer.numbers
    }
    live.scatter(moments, live.moments(), optimizer.read)
    groups = state["optimizer"]["groups"]
    for group, changed in zip(live.optimizer.param_groups, groups, strict=False):
        group.update(changed)
    live.after_loading()


class TensorFile:
    """A safetensors file on rank 0's disk, read one tensor at a time."""

    def __init__(self, path: Path, live: LiveState) -> None:
        """Collective."""
        self._file: Any = None
        shapes: Shapes = {}
        numbers = {}
        if live.rank == 0:
            self._file = safe_open(path, "pt")
            for name in list(self._file.keys()):
                part = self._file.get_slice(name)
                shape = tuple(part.get_shape())
                shapes[name] = (DTYPES_BY_NAME[part.get_dtype()], shape)
                if shape == ():
                    numbers[name] = self.read(name).item()
        self.shapes: Shapes
        """Of its tensors, on all ranks."""
        self.numbers: dict[str, Any]
        """The values of those without dimensions, such as `step`, on all ranks."""
        self.shapes, self.numbers = broadcast_object_list([(shapes, numbers)])[0]

    def read(self, name: str) -> torch.Tensor:
        """On rank 0."""
        return self._file.get_tensor(name)


def _check_model(
    folder: Path, live: LiveState, state: Mapping[str, Any], weights: Shapes
) -> None:
    expected, faults = live.weight_shapes(), Faults()
    missing = [name for name in expected if name not in {*weights, *state["excluded"]}]
    if missing:
        faults.add(f"{folder} lacks {listing(missing, 4)}, which the model has")
    surplus = [name for name in weights if name not in expected]
    if surplus:
        faults.add(f"{folder} has {listing(surplus, 4)}, which the model lacks")
    for name in expected.keys() & weights.keys():
        (_, saved), (_, shape) = weights[name], expected[name]
        if saved != shape:
            faults.add(
                f"{folder}: {name} has shape {list(saved)}, and {list(shape)} in the model"
            )
    faults.raise_if_any()


def _check_optimizer(folder: Path, live: LiveState, saved: Mapping[str, Any]) -> None:
    """Of the same class; with as many groups, if it has changed something in one."""
    current = live.algorithm
    remedy = "use the same again, or another --output_dir"
    if saved["class"] != current:
        fault = f"was saved by {saved['class']}, and this run has {current}"
        raise UserError(f"{folder} {fault}: {remedy}")
    groups, count = saved["groups"], len(live.optimizer.param_groups)
    if any(groups) and len(groups) != count:
        fault = f"{current} had {len(groups)} parameter groups, and has {count} in this run"
        raise UserError(f"{folder}: {fault}: {remedy}")
