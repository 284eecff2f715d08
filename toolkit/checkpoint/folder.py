"""The checkpoints of a run on disk: which are complete, which are removed, and what `best` and `last` name.

A folder counts once its manifest.json is there: that file is written last, by rename, when every other
file of every process is whole and flushed. It is removed first, so that at no moment a half-written or
half-removed checkpoint looks like one.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.checkpoint.checksums import crc32
from toolkit.checkpoint.tensor_index import crc32_of_range
from toolkit.errors import UserError, listing
from toolkit.utils.files import flush_folders, flush_path, read_table, refuse_link_out, replace_file, write_new
from toolkit.utils.units import size_text

MANIFEST = "manifest.json"
PROBE, SENT = ".disk-", ".sent-"
"""Temporary files beside checkpoints: a test of whether machines share the disk, and copies of another machine's."""


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_number(folder: Path) -> int | None:
    """Of a folder named like a checkpoint."""
    match = re.fullmatch(r"step-(\d{8,})", folder.name)
    return int(match[1]) if match else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises UserError where there is none, or it is not ours."""
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{folder} has no {MANIFEST}: it was never completed, or is not a checkpoint")
    manifest = read_table(path, {})
    if manifest.get("format") != 1 or not _names_files(manifest.get("files")):
        raise UserError(f"{path} is not a manifest that this version reads: take another checkpoint")
    if manifest.get("crc32", digits := _digits(manifest)) != digits:
        raise UserError(f"{path} is damaged (CRC32 {digits}, saved as {manifest['crc32']}): take another checkpoint")
    return manifest


def _names_files(files: Any) -> bool:
    """Whether these are entries of files inside the folder."""
    return isinstance(files, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("crc32"), str)
        and not (PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name)
        for name, entry in files.items()
    )


def _digits(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest's content: it names the step of everything else."""
    text = json.dumps({key: value for key, value in manifest.items() if key != "crc32"}, ensure_ascii=False)
    return f"{crc32(text.encode(errors='surrogatepass')):08x}"


def fault_of(folder: Path) -> str:
    """Why a folder cannot be resumed from, by names and sizes alone; empty when it can."""
    try:
        files = read_manifest(folder)["files"]
        for name in (MANIFEST, *files):
            refuse_link_out(folder / name, folder)
    except UserError as error:
        return str(error)
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{path} has {size} bytes and should have {entry['bytes']}"
    return ""


def checksum_fault(folder: Path, names: Iterable[str]) -> str:
    """The first of the named files whose bytes are not those that were saved; empty when all are."""
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
    """The manifest's entries of files that this process wrote; flushes them to the disk first."""
    entries = {}
    for name in names:
        path = folder / name
        flush_path(path)
        entries[name] = {"bytes": path.stat().st_size, "crc32": f"{crc32_of_range(path):08x}"}
    return entries


def newest_first(checkpoints: Path) -> list[Path]:
    """Every step folder, complete ones by the time they were saved, then those without a manifest."""
    return sorted(_step_folders(checkpoints), key=_saved_at, reverse=True)


def complete(checkpoints: Path) -> list[Path]:
    return [folder for folder in newest_first(checkpoints) if (folder / MANIFEST).is_file()]


def _step_folders(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    return [path for path in checkpoints.iterdir() if step_number(path) is not None and path.is_dir()]


def _saved_at(folder: Path) -> tuple[float, str]:
    """By time, not by step: a run that resumed an older checkpoint continues from what it saved since."""
    try:
        return float(read_manifest(folder)["saved_at"]), folder.name
    except (UserError, KeyError, TypeError, ValueError):
        return 0.0, folder.name


def later_than_all(checkpoints: Path) -> float:
    """The time for a new checkpoint to be the newest, though the clock was set back since the last one."""
    return max([time.time(), *(_saved_at(folder)[0] + 1e-3 for folder in _step_folders(checkpoints))])


def begin(folder: Path) -> None:
    """An empty folder of this name. One that is in the way is removed, its manifest first."""
    remove(folder)
    folder.mkdir(parents=True)


def remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # its target is not this run's
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, manifest: dict[str, Any]) -> None:
    """From here on the checkpoint counts."""
    flush_folders(folder)
    manifest = json.loads(json.dumps(manifest))  # as it will be read
    manifest["crc32"] = _digits(manifest)
    with replace_file(folder / MANIFEST) as draft:
        write_new(draft, json.dumps(manifest, ensure_ascii=False, indent=1))
    flush_path(folder.parent)


def point(checkpoints: Path, name: str, folder: Path) -> None:
    """`best` or `last` -> a checkpoint, in one move."""
    with replace_file(checkpoints / name, flush=False) as draft:
        draft.symlink_to(folder.name)


def link_target(checkpoints: Path, name: str) -> Path | None:
    """The complete checkpoint that `best` or `last` names."""
    link = checkpoints / name
    target = link.resolve()
    return target if link.is_symlink() and (target / MANIFEST).is_file() else None


def point_best(checkpoints: Path, step: int) -> None:
    """`best` -> the checkpoint of that step, or nothing where it is gone: a run that continues from an older
    checkpoint ignores a better one after it."""
    folder = step_folder(checkpoints, step)
    if (folder / MANIFEST).is_file():
        point(checkpoints, "best", folder)
    else:
        (checkpoints / "best").unlink(missing_ok=True)


def prune(checkpoints: Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints and what `best` and `last` name."""
    for draft in checkpoints.glob(".*"):  # of a process that was killed
        if draft.is_symlink() or draft.name.startswith(PROBE):
            draft.unlink(missing_ok=True)  # machines may share this disk, and not rank 0's
        elif draft.name.startswith(SENT):
            remove(draft)
    newest = complete(checkpoints)[:keep]
    targets = [link_target(checkpoints, name) for name in ("best", "last")]
    for folder in _step_folders(checkpoints):
        if folder not in newest and folder.resolve() not in targets:
            remove(folder)


def disk_usage(checkpoints: Path) -> tuple[list[int], int]:
    """(bytes of the complete checkpoints, the newest first; bytes that are free on their disk)."""
    sizes = []
    for folder in complete(checkpoints):
        with contextlib.suppress(UserError):
            sizes.append(sum(entry["bytes"] for entry in read_manifest(folder)["files"].values()))
    disk = next(folder for folder in (checkpoints, *checkpoints.absolute().parents) if folder.is_dir())
    return sizes, shutil.disk_usage(disk).free


def size_note(checkpoints: Path, size: int, count: int, free: int) -> str:
    """What `count` checkpoints of `size` bytes will take. Raises UserError where not even one fits."""
    each, room = f"about {size_text(size)}", f"{size_text(free)} of room at {checkpoints}"
    if free < size:
        raise UserError(
            f"a checkpoint takes {each}, and there is {room}: make room, name an --output_dir on another disk, or "
            "leave --checkpoint_every out"
        )
    note = f"checkpoints: {each} each, at most {count} at a time, {size_text(count * size)}; {room}"
    return note if free >= count * size else f"{note}: too little; make room, or keep fewer (--keep_checkpoints)"


def resumable(checkpoints: Path) -> tuple[list[Path], list[str]]:
    """(complete checkpoints, the newest first; why each of the others is skipped)."""
    faults = {folder: fault_of(folder) for folder in newest_first(checkpoints)}
    skipped = [f"{folder.name}: {fault}" for folder, fault in faults.items() if fault]
    return [folder for folder, fault in faults.items() if not fault], skipped


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What matters and is not the same as when the checkpoint was taken, each as `NAME was X and is Y`."""
    return [
        f"{name} was {_shown(saved[name])} and is {_shown(now[name])}"
        for name in now
        if name in saved and saved[name] != now[name]
    ]


def _shown(value: Any) -> str:
    return f"[{listing(value, 6)}]" if isinstance(value, list) else str(value)
