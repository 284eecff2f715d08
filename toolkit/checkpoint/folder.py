"""A run's checkpoints on disk, all of one format (docs/checkpoints.md), written and read by rank 0.

A folder is written under another name, flushed and renamed: whatever has a checkpoint's name is
whole."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from toolkit.checkpoint.safetensors_writer import DTYPE_NAMES, SafetensorsWriter, Shapes
from toolkit.checkpoint.state import DEEPSPEED_ADAM, LiveState
from toolkit.errors import Faults, UserError, listing
from toolkit.utils.cache import digest_of_file
from toolkit.utils.files import draft_path, flush_path, read_table, replace_file, replace_folder, write_new

STATE_FILE = "state.json"
WEIGHTS_FILE, OPTIMIZER_FILE = "weights.safetensors", "optimizer.safetensors"
FORMAT = 2
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
    facts: Mapping[str, Any],
    write_others: Callable[[Path], None],
) -> None:
    """Writes a checkpoint. `tables`: file -> what it holds; `tensors`: of all files in their order;
    `facts`: for state.json; `write_others`: of the other files, into the folder that it gets.
    Raises OSError, and leaves an earlier checkpoint of that name untouched."""
    remaining = iter(tensors)
    digests: dict[str, str] = {}
    with replace_folder(folder, overwrite=True) as draft:
        for file_name, shapes in tables.items():
            with SafetensorsWriter(draft / file_name, shapes) as file:
                for name in file.names:
                    file.write(name, next(remaining))
            digests[file_name] = file.digest
        write_others(draft)
        for path in sorted(draft.rglob("*")):
            name = path.relative_to(draft).as_posix()
            if path.is_file() and name not in digests:
                digests[name] = digest_of_file(path)
        saved_at = max(time.time(), newest_save_time(folder.parent) + 1e-3)
        state = {"format": FORMAT, "saved_at": saved_at, **facts, "files": digests}
        text = json.dumps({**state, "digest": _digest(state)}, ensure_ascii=False)
        write_new(draft / STATE_FILE, text)


def _digest(state: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(state).encode()).hexdigest()


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state.json. Raises UserError if it is missing, damaged or of another
    format."""
    path = folder / STATE_FILE
    state = read_table(path, {})
    digest = state.pop("digest", None)
    if state.get("format") != FORMAT or digest != _digest(state):
        raise UserError(f"{path} is damaged, or of another version: take another checkpoint")
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
    one continues from what it saved after that. Those whose state.json is damaged come first."""
    folders = [path for path in checkpoints.glob("step-*") if step_number(path) is not None]
    return sorted(folders, key=lambda folder: (_saved_at(folder), folder.name), reverse=True)


def readable(checkpoints: Path) -> list[Path]:
    """Those whose state.json can be read, the newest first."""
    return [folder for folder in newest_first(checkpoints) if _saved_at(folder) < float("inf")]


def _saved_at(folder: Path) -> float:
    try:
        return float(read_state(folder)["saved_at"])
    except UserError:
        return float("inf")


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
    except OSError as error:  # a disk without links: checkpoints are named by their steps
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


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
    flush_path(folder.parent)
    shutil.rmtree(draft, ignore_errors=True)


def load(folder: Path, live: LiveState, state: Mapping[str, Any]) -> None:
    """Restores weights, buffers and optimizer state of a checkpoint on rank 0's disk; all ranks
    call it. `state`: its state.json. Raises UserError, before anything is changed, if they do not
    fit."""
    with contextlib.ExitStack() as stack:
        weights_file: Any = None
        optimizer_file: Any = None
        if live.rank == 0:
            weights_file = stack.enter_context(safe_open(folder / WEIGHTS_FILE, "pt"))
            optimizer_file = stack.enter_context(safe_open(folder / OPTIMIZER_FILE, "pt"))
        weights = live.broadcast(_shapes(weights_file))
        entries = live.broadcast(_shapes(optimizer_file))
        numbers = live.broadcast(_numbers(optimizer_file, entries, weights))
        _check_model(folder, live, state, weights)
        _check_optimizer(folder, live, state["optimizer"], weights, entries, numbers)
        live.before_loading()
        live.scatter(weights, live.weights(), lambda name: weights_file.get_tensor(name))
        live.create_moments(entries, numbers)
        moments = {entry: shape for entry, shape in entries.items() if entry not in numbers}
        live.scatter(moments, live.moments(), lambda entry: optimizer_file.get_tensor(entry))
        for group, saved in zip(live.optimizer.param_groups, state["optimizer"]["groups"], strict=False):
            group.update(saved)
        live.after_loading()


def _shapes(file: Any) -> Shapes:
    shapes: Shapes = {}
    for name in file.keys() if file else ():
        part = file.get_slice(name)
        shapes[name] = (_DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return shapes


def _numbers(file: Any, entries: Shapes, weights: Shapes) -> dict[str, Any]:
    """The optimizer's numbers by `KEY.NAME`, such as `step`: what has no dimensions and is not of a
    weight's shape."""
    numbers = {}
    for entry, (_, shape) in entries.items() if file else ():
        key, _, name = entry.partition(".")
        if shape == () and (key == "step" or weights[name][1]):
            numbers[entry] = file.get_tensor(entry).item()
    return numbers


def _check_model(folder: Path, live: LiveState, state: Mapping[str, Any], weights: Shapes) -> None:
    expected, faults = live.weight_shapes(), Faults()
    if missing := [name for name in expected if name not in {*weights, *state["excluded"]}]:
        faults.add(f"{folder} lacks {listing(missing, 4)}, which the model has")
    if surplus := [name for name in weights if name not in expected]:
        faults.add(f"{folder} has {listing(surplus, 4)}, which the model lacks")
    for name in expected.keys() & weights.keys():
        saved, shape = weights[name][1], expected[name][1]
        if saved != shape:
            faults.add(f"{folder}: {name} has shape {list(saved)}, and {list(shape)} in the model")
    faults.raise_if_any()


def _check_optimizer(
    folder: Path,
    live: LiveState,
    saved: Mapping[str, Any],
    weights: Shapes,
    entries: Shapes,
    numbers: Mapping[str, Any],
) -> None:
    current = type(live.optimizer).__name__
    remedy = "use the same again, or another --output_dir"
    if _kind(saved["class"]) != _kind(current):
        raise UserError(f"{folder} was saved by {saved['class']}, and this run has {current}: {remedy}")
    groups = len(saved["groups"])
    if any(saved["groups"]) and groups != len(live.optimizer.param_groups):
        count = len(live.optimizer.param_groups)
        raise UserError(f"{folder}: {current} had {groups} parameter groups, and has {count} in this run: {remedy}")
    if not live.sharded:
        return
    states: dict[str, dict[str, Any]] = {}
    for entry, (_, shape) in entries.items():
        key, _, name = entry.partition(".")
        states.setdefault(name, {})[key] = numbers.get(entry)
        if entry not in numbers and shape != weights[name][1]:
            fault = f"{current} has {key} of the unsharded {name}, which {live.strategy} cannot restore"
            raise UserError(f"{folder}: {fault}: resume with one process or DDP")
    for _, names in live.optimizer_tensors():
        filled = [name for name in names if name in weights and 0 not in weights[name][1]]
        for name in filled[1:]:
            first = filled[0]
            if states.get(name) != states.get(first):
                fault = f"{first} and {name} differ in their optimizer state, and ZeRO has one for both"
                raise UserError(f"{folder}: {fault}: resume with one process or DDP")


def _kind(name: str) -> str:
    return "AdamW" if name in DEEPSPEED_ADAM else name
