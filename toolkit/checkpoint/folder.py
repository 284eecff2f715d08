"""The checkpoints of a run on disk: which are complete, which are removed, and the links `best` and `last`.

A checkpoint is complete when its manifest.json exists: that file is written last, by rename, after all files of all
processes are flushed, and removed first. So no half-written or half-removed folder is ever taken for a checkpoint.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.checkpoint.tensor_index import crc32, crc32_of_range
from toolkit.errors import UserError, listing, size_text
from toolkit.utils.files import flush_folders, flush_path, read_table, refuse_link_out, replace_file, write_new
from toolkit.utils.log import logger

MANIFEST, WEIGHTS_FILE, OPTIMIZER_FILE = "manifest.json", "weights.safetensors", "optimizer.safetensors"
PROBE, SENT = ".disk-", ".sent-"
"""Prefixes of temporary files: to test whether nodes share the disk, and copies of another node's checkpoints."""


def first_with(name: str, *folders: Path | None) -> Path | None:
    """The first folder that contains `name`."""
    return next((folder for folder in folders if folder is not None and os.path.lexists(folder / name)), None)


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_number(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})", folder.name)
    return int(match[1]) if match else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises UserError if it is missing, damaged or of another format."""
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{folder} has no {MANIFEST}: it was never completed, or is not a checkpoint")
    manifest = read_table(path, {})
    if manifest.get("format") != 1 or not _are_file_entries(manifest.get("files")):
        raise UserError(f"{path} is not a manifest that this version reads: take another checkpoint")
    if manifest.get("crc32", digits := _crc32_of_manifest(manifest)) != digits:
        raise UserError(f"{path} is damaged (CRC32 {digits}, saved as {manifest['crc32']}): take another checkpoint")
    return manifest


def _are_file_entries(files: Any) -> bool:
    """Whether this is a table of files inside the folder, each with its size and CRC32."""
    return isinstance(files, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("crc32"), str)
        and not (PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name)
        for name, entry in files.items()
    )


def _crc32_of_manifest(manifest: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in manifest.items() if key != "crc32"}, ensure_ascii=False)
    return f"{crc32(text.encode(errors='surrogatepass')):08x}"


def find_fault(folder: Path) -> str:
    """What is wrong with a checkpoint's manifest, or the names and sizes of its files; empty if nothing is."""
    try:
        refuse_link_out(folder / MANIFEST, folder)
        for name, entry in read_manifest(folder)["files"].items():
            refuse_link_out(path := folder / name, folder)
            if not path.is_file():
                return f"{path} is missing"
            if (size := path.stat().st_size) != entry["bytes"]:
                return f"{path} has {size} bytes and should have {entry['bytes']}"
    except UserError as error:
        return str(error)
    return ""


def find_damage(folder: Path, names: Iterable[str]) -> str:
    """Which of the named files has another CRC32 than in the manifest; empty if none has."""
    files = read_manifest(folder)["files"]
    for name in names:
        path = folder / name
        try:
            checksum = f"{crc32_of_range(path):08x}"
        except (OSError, UserError) as error:
            return f"{path} cannot be read: {error}"
        if checksum != files[name]["crc32"]:
            return f"{path} is damaged (CRC32 {checksum}, saved as {files[name]['crc32']})"
    return ""


def manifest_entries(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Flushes files and returns their manifest entries."""
    entries = {}
    for name in names:
        path = folder / name
        flush_path(path)
        entries[name] = {"bytes": path.stat().st_size, "crc32": f"{crc32_of_range(path):08x}"}
    return entries


def list_newest_first(checkpoints: Path) -> list[Path]:
    """All step folders: complete ones by the time they were saved, then those without a manifest."""
    return sorted(_step_folders(checkpoints), key=_saved_at, reverse=True)


def complete(checkpoints: Path) -> list[Path]:
    return [folder for folder in list_newest_first(checkpoints) if (folder / MANIFEST).is_file()]


def _step_folders(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    return [path for path in checkpoints.iterdir() if step_number(path) is not None and path.is_dir()]


def _saved_at(folder: Path) -> tuple[float, str]:
    """Sorted by time, not by step: a run that resumed an older checkpoint continues from what it saved after that."""
    try:
        return float(read_manifest(folder)["saved_at"]), folder.name
    except (OSError, UserError, KeyError, TypeError, ValueError):
        return 0.0, folder.name


def newest_save_time(checkpoints: Path) -> float:
    """When the newest checkpoint was saved, in seconds since the epoch; 0 if there is none."""
    return max((_saved_at(folder)[0] for folder in _step_folders(checkpoints)), default=0.0)


def next_save_time(checkpoints: Path) -> float:
    """The time of a new checkpoint: now, or just after the newest one if the clock was set back."""
    return max(time.time(), newest_save_time(checkpoints) + 1e-3)


def create_empty(folder: Path) -> None:
    """Creates the folder, after removing an existing one."""
    remove(folder)
    folder.mkdir(parents=True)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its manifest first. Of a link only the link: its target may belong to another run."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest, which completes the checkpoint."""
    flush_folders(folder)
    manifest = json.loads(json.dumps(manifest))  # tuples become lists, as they will be read
    manifest["crc32"] = _crc32_of_manifest(manifest)
    with replace_file(folder / MANIFEST) as draft:
        write_new(draft, json.dumps(manifest, ensure_ascii=False, indent=1))
    flush_path(folder.parent)


def set_link(checkpoints: Path, name: str, folder: Path) -> None:
    """Points `best` or `last` to a checkpoint, atomically; not on a disk without links."""
    try:
        with replace_file(checkpoints / name, flush=False) as draft:
            draft.symlink_to(folder.name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        _warn_of_missing_links(checkpoints)


@functools.cache  # once
def _warn_of_missing_links(checkpoints: Path) -> None:
    logger.warning(f"{checkpoints} is on a disk without symbolic links: name a checkpoint's step, not best or last")


def set_links(checkpoints: Path, best_step: int) -> None:
    """Points `last` to the newest checkpoint: a run may have been killed before it did. Points `best` to that of
    `best_step`, or removes the link if it is gone: a run that resumed an older checkpoint ignores better ones after
    it."""
    manifests = [(folder / MANIFEST).read_bytes() for folder in complete(checkpoints)]
    for copy in (checkpoints / "best", checkpoints / "last"):  # the run was copied, with links followed
        manifest = copy / MANIFEST
        if not copy.is_symlink() and manifest.is_file() and manifest.read_bytes() in manifests:
            remove(copy)
    for newest in complete(checkpoints)[:1]:
        set_link(checkpoints, "last", newest)
    folder = step_folder(checkpoints, best_step)
    if (folder / MANIFEST).is_file():
        set_link(checkpoints, "best", folder)
    else:
        (checkpoints / "best").unlink(missing_ok=True)


def prune(checkpoints: Path, keep: int, best_step: int) -> None:
    """Removes all but the newest `keep` complete checkpoints and that of `best_step`."""
    for draft in checkpoints.glob(".*"):  # of a process that was killed
        if draft.is_symlink() or draft.name.startswith(PROBE):
            draft.unlink(missing_ok=True)  # another node that shares this disk may have removed it
        elif draft.name.startswith(SENT):
            remove(draft)
    ordered, best = complete(checkpoints), step_folder(checkpoints, best_step)
    for folder in _step_folders(checkpoints):
        if folder not in ordered[:keep] and not (folder == best and best in ordered):
            try:
                remove(folder)
            except OSError as error:  # read-only: the new checkpoint is complete all the same
                logger.warning(f"cannot remove {folder}: {error.strerror}")


def disk_usage(checkpoints: Path) -> tuple[list[int], int]:
    """(bytes of each complete checkpoint, newest first; free bytes on their disk)."""
    files = [read_manifest(folder)["files"] for folder in complete(checkpoints) if not find_fault(folder)]
    disk = next(folder for folder in (checkpoints, *checkpoints.absolute().parents) if folder.is_dir())
    return [sum(entry["bytes"] for entry in each.values()) for each in files], shutil.disk_usage(disk).free


def size_note(checkpoints: Path, size: int, count: int, free: int) -> str:
    """The disk space for `count` checkpoints of `size` bytes, for the log. Raises UserError if not one fits."""
    note = (
        f"checkpoints: about {size_text(size)} each, at most {count} at a time, {size_text(count * size)}; "
        f"{size_text(free)} free at {checkpoints}"
    )
    remedy = "free some space, pass another --output_dir, lower --keep_checkpoints or drop --checkpoint_every"
    if free < size:
        raise UserError(f"{note}, too little for one: {remedy}")
    return note if free >= count * size else f"{note}, too little: {remedy}"


def find_resumable(checkpoints: Path) -> tuple[list[Path], list[str]]:
    """(complete checkpoints, newest first; why each of the others is skipped)."""
    faults = {folder: find_fault(folder) for folder in list_newest_first(checkpoints)}
    skipped = [f"{folder.name}: {fault}" for folder, fault in faults.items() if fault]
    return [folder for folder, fault in faults.items() if not fault], skipped


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """`NAME was X and is Y` for each name that both have with different values."""

    def text(value: Any) -> str:
        return f"[{listing(value, 6)}]" if isinstance(value, list) else str(value)

    changed = [name for name in current if name in saved and saved[name] != current[name]]
    return [f"{name} was {text(saved[name])} and is {text(current[name])}" for name in changed]
