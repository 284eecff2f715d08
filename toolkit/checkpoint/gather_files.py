"""A checkpoint whose files lie on the disks of several machines, whole on each: who lacks a file is sent it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.disks import Disks
from toolkit.checkpoint.reader import read_into
from toolkit.checkpoint.save import bytes_of, write_all
from toolkit.errors import UserError
from toolkit.files import flush_folders, replace_file
from toolkit.units import size_text

_CHUNK = 16 << 20
"""Bytes sent at a time."""


@dataclass(frozen=True)
class Gathered:
    """Why a checkpoint is not whole on every disk; both empty when it is."""

    lacks: str = ""
    """Files that no disk of this run has, and how to get them."""
    fault: str = ""
    """Anything else, which makes it useless."""


@dataclass(frozen=True)
class Held:
    """What a disk has of a checkpoint."""

    begun: bool = False
    """Its manifest is rank 0's."""
    names: frozenset[str] = frozenset()
    """Files of the right size."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """File -> why it does not count, where it is there."""


@dataclass(frozen=True)
class Move:
    """A file to be sent."""

    name: str
    size: int
    """Bytes."""
    reader: int
    """Rank."""
    targets: tuple[int, ...]
    """Ranks that write it, one of each disk."""


def gather_files(accelerator: Accelerator, disks: Disks, folder: Path, say: Callable[[str], None]) -> Gathered:
    """Makes a checkpoint that rank 0's disk has begun whole on every disk; all processes call this, and are told
    alike. `say` is given a line before much is sent.

    Raises UserError where a file cannot be read or written.
    """
    manifest = broadcast_object_list([_manifest(folder) if accelerator.is_main_process else None])[0]
    if isinstance(manifest, str):
        return Gathered(fault=manifest)
    if disks.shared:
        return broadcast_object_list([_on_one_disk(folder) if accelerator.is_main_process else None])[0]
    mine = held(folder, manifest) if disks.mine.owner == disks.rank else None
    on = {rank: found for rank, found in enumerate(gather_object([mine])) if found is not None}
    moves, missing = plan(manifest["files"], on)
    if missing:
        return _not_whole(folder, manifest, disks, on, missing)
    if moves:
        say(f"bringing {folder.name} together: {_summary(moves, disks)}")
        _carry_out(accelerator, folder, manifest, moves, on.get(disks.rank))
    return Gathered()


def _manifest(folder: Path) -> dict[str, Any] | str:
    try:
        return folders.read_manifest(folder)
    except UserError as error:
        return str(error)


def _on_one_disk(folder: Path) -> Gathered:
    if half := folders.half_of(folder):
        return Gathered(lacks=half)
    return Gathered(fault=folders.fault_of(folder))


def held(folder: Path, manifest: Mapping[str, Any]) -> Held:
    """What this disk has. A folder of the same name with another manifest is of another run, and has nothing."""
    there = _manifest(folder)
    if isinstance(there, str) or there != manifest:
        return Held()
    names, faults = set(), {}
    for name, entry in manifest["files"].items():
        size = folders.size_of(folder / name)
        if size == entry["bytes"]:
            names.add(name)
        elif size is not None:
            faults[name] = folders.size_fault(folder / name, size, entry)
    return Held(True, frozenset(names), faults)


def plan(files: Mapping[str, Mapping[str, Any]], on: Mapping[int, Held]) -> tuple[list[Move], list[str]]:
    """(what to send, files that nobody has). `on`: by the rank of a disk's owner."""
    moves, missing = [], []
    for name, entry in files.items():
        having = [owner for owner, there in on.items() if name in there.names]
        lacking = tuple(owner for owner in on if owner not in having)
        if not having:
            missing.append(name)
        elif lacking:
            moves.append(Move(name, entry["bytes"], min(having), lacking))
    return moves, missing


def _not_whole(
    folder: Path, manifest: Mapping[str, Any], disks: Disks, on: Mapping[int, Held], missing: Sequence[str]
) -> Gathered:
    """Files of machines that are not in this run can be fetched; those of its own are gone."""
    faults = [there.faults[name] for there in on.values() for name in missing if name in there.faults]
    places = {disk.host: f"{disk.host}:{disk.folder}/{folder.name}" for disk in disks.all}
    for name in missing:
        entry = manifest["files"][name]
        if "host" not in entry:
            faults.append(f"{folder / name} is missing")
        elif entry["host"] in places:
            faults.append(f"{name}, which rank {entry['rank']} wrote, is gone from {places[entry['host']]}")
    return Gathered(fault=faults[0]) if faults else Gathered(lacks=folders.lacking(folder, manifest, missing))


def _summary(moves: Sequence[Move], disks: Disks) -> str:
    """`2 files (1.2 GB) from hostB to hostA, ...`."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for move in moves:
        to = " and ".join(disks.host_of(target) for target in move.targets)
        sizes.setdefault((disks.host_of(move.reader), to), []).append(move.size)
    return ", ".join(
        f"{len(each)} file{'s' * (len(each) > 1)} ({size_text(sum(each))}) from {reader} to {to}"
        for (reader, to), each in sizes.items()
    )


def _carry_out(
    accelerator: Accelerator, folder: Path, manifest: Mapping[str, Any], moves: Sequence[Move], mine: Held | None
) -> None:
    receives = any(accelerator.process_index in move.targets for move in moves)
    if receives and mine is not None:
        with _named(folder):
            _make_way(folder, mine)
    buffer = torch.empty(min(_CHUNK, max(move.size for move in moves)), dtype=torch.uint8)
    for move in moves:
        _send(accelerator, folder, move, buffer)
    if receives and mine is not None:
        with _named(folder):
            folders.publish(folder, dict(manifest)) if not mine.begun else flush_folders(folder)
    accelerator.wait_for_everyone()


def _make_way(folder: Path, mine: Held) -> None:
    if not mine.begun and (folder / folders.MANIFEST).is_file():
        folder.rename(folder.with_name(f"{folder.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"))
    if not mine.begun:
        folders.begin(folder)
    for draft in folder.rglob(".*"):  # of a file whose receiver was killed
        if draft.is_file():
            draft.unlink()


def _send(accelerator: Accelerator, folder: Path, move: Move, buffer: torch.Tensor) -> None:
    """A file's bytes from one process to those that lack it, chunk by chunk; all processes call this."""
    rank, path = accelerator.process_index, folder / move.name
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_written(path)) if rank in move.targets else None
        for start in range(0, move.size, _CHUNK):
            block = buffer[: min(_CHUNK, move.size - start)]
            if rank == move.reader:
                _read(path, start, bytes_of(block))
            sent = block.to(accelerator.device)
            torch.distributed.broadcast(sent, src=move.reader)
            if file is not None:
                write_all(file.fileno(), bytes_of(sent))


def _read(path: Path, start: int, view: memoryview) -> None:
    try:
        read_into(path, start, view)
    except OSError as error:
        raise UserError(f"{path}, which another machine of this run lacks, cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A file beside its name, which it gets when it is whole and on the disk."""
    with _named(path), replace_file(path) as draft, draft.open("wb", buffering=0) as file:
        yield file


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}, which another machine of this run has, cannot be written here: {error.strerror or error}. Make "
            "room, and start the same command again"
        ) from error
