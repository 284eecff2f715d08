"""Which processes of a run write to the same disk: machines need not share one."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from toolkit.launch.network import node_id


@dataclass(frozen=True)
class Disk:
    """Where some of the processes find a folder."""

    owner: int
    """The lowest of `ranks`, which makes folders there and publishes what is in them."""
    host: str
    """The owner's."""
    ranks: tuple[int, ...]
    folder: str
    """Absolute, as its owner says it."""


@dataclass(frozen=True)
class Disks:
    """The disks of a run, as one of its processes sees them."""

    all: tuple[Disk, ...]
    """Rank 0's first: what is complete there counts."""
    rank: int
    """This process."""

    @property
    def shared(self) -> bool:
        """Whether there is one for all."""
        return len(self.all) == 1

    @property
    def mine(self) -> Disk:
        return next(disk for disk in self.all if self.rank in disk.ranks)

    @property
    def first(self) -> bool:
        """Whether this process finds what rank 0 finds."""
        return self.mine is self.all[0]

    @property
    def owns_another(self) -> bool:
        """Whether this process owns a disk that is not rank 0's."""
        return not self.first and self.mine.owner == self.rank

    def host_of(self, owner: int) -> str:
        return next(disk.host for disk in self.all if disk.owner == owner)


@dataclass(frozen=True)
class View:
    """What one process tells of a folder."""

    host: str
    machine: str
    """See `facts.machine`."""
    folder: str
    seen: tuple[int, ...] = ()
    """Ranks whose probes it sees there."""


def find_disks(accelerator: Accelerator, folder: Path) -> Disks:
    """Finds out who shares the disk `folder` is on; all processes call this. It makes the folder where it is missing.

    One process of each machine makes a file there, and each looks which of them it sees.
    """
    rank, here = accelerator.process_index, View(socket.gethostname(), node_id(), str(folder.absolute()))
    views: list[View] = gather_object([here])
    probing = sorted(_firsts(views).values())
    if len(probing) == 1:
        return disks_of(views, rank)
    stem = broadcast_object_list([f".disk-{secrets.token_hex(8)}"])[0]
    probes = {other: folder / f"{stem}-{other}" for other in probing}
    if rank in probing:
        with contextlib.suppress(OSError):  # what cannot be written may still be read: the others' probes say
            folder.mkdir(parents=True, exist_ok=True)
            probes[rank].touch()
    accelerator.wait_for_everyone()
    seen = tuple(other for other, probe in probes.items() if os.access(probe, os.F_OK))
    views = gather_object([View(here.host, here.machine, here.folder, seen)])
    if rank in probing:
        with contextlib.suppress(OSError):
            probes[rank].unlink(missing_ok=True)
    return disks_of(views, rank)


def disks_of(views: Sequence[View], rank: int) -> Disks:
    """By what each process, in the order of ranks, tells. Those of one machine share what it has."""
    firsts = _firsts(views)
    group = [firsts[view.machine] for view in views]
    for other, view in enumerate(views):
        for owner in view.seen:
            low, high = sorted((group[other], group[owner]))
            group = [low if label == high else label for label in group]
    ranks = {owner: tuple(r for r, label in enumerate(group) if label == owner) for owner in sorted(set(group))}
    found = (Disk(owner, views[owner].host, those, views[owner].folder) for owner, those in ranks.items())
    return Disks(tuple(found), rank)


def _firsts(views: Sequence[View]) -> dict[str, int]:
    """Machine -> its lowest rank."""
    return {view.machine: rank for rank, view in reversed(list(enumerate(views)))}
