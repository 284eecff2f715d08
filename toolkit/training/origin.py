"""Where a run starts: what `--resume` means for the checkpoints that are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint import folder as folders
from toolkit.config import DataSettings
from toolkit.errors import UserError


@dataclass(frozen=True)
class Origin:
    """Where a run starts: at the first of `candidates` that is sound, or at step 0 where there is none."""

    candidates: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Why newer checkpoints were passed over, one line each."""
    aside: Path | None = None
    """Where the run that was in the folder has been moved."""

    def within(self, before: Path, after: Path) -> Origin:
        """The same after a folder was renamed."""
        old = before.resolve()
        moved = [
            after / path.resolve().relative_to(old) if old in path.resolve().parents else path
            for path in self.candidates
        ]
        return Origin(moved, self.skipped, after)


def choose_origin(resume: str, checkpoints: Path, facts: Mapping[str, Any], elsewhere: bool = False) -> Origin:
    """What `--resume` means here. `elsewhere`: the run has other machines, which may hold what is missing here.

    Raises UserError when there is nothing at PATH, nothing sound at all, the checkpoint is of another job, or a
    part of it lies on a machine that is not in this run.
    """
    if resume == "no":
        return Origin()
    good: list[Path]
    skipped: list[str]
    place = checkpoints if resume == "auto" else _place_of(resume, checkpoints)
    if (place / folders.MANIFEST).is_file() or folders.step_number(place) is not None:
        fault = folders.fault_of(place, elsewhere)
        if fault:
            other = "" if folders.half_of(place) else "; `--resume auto` takes the newest one that is complete"
            raise UserError(f"--resume {resume}: {fault}{other}")
        good, skipped = [place], []
    else:
        good, skipped = folders.resumable(place, elsewhere)
        _refuse_half(place, good)
    if not good and resume != "auto":
        raise UserError(f"--resume {resume}: no complete checkpoint there" + "".join(f"\n  {why}" for why in skipped))
    if good:
        _refuse_other_job(good[0], facts)
    return Origin(good, skipped)


def _refuse_half(checkpoints: Path, good: list[Path]) -> None:
    """Half a checkpoint can be mended: to go on from an older one must be asked for."""
    for folder in folders.complete(checkpoints):
        if folder in good:
            return
        if half := folders.half_of(folder):
            raise UserError(half + or_older(good[:1]))


def or_older(older: Sequence[Path]) -> str:
    return f". Or go on from an older one: --resume {older[0]}" if older else ""


def _place_of(resume: str, checkpoints: Path) -> Path:
    """A checkpoint's folder, or one of checkpoints; a run's folder means the ones in it, and a bare name
    (`best`, `last`, `step-00000100`) one of this run's."""
    path = Path(resume)
    if not path.exists() and (checkpoints / resume).is_dir():
        path = checkpoints / resume
    if path.is_file():
        raise UserError(f"--resume {resume} is a file: name the checkpoint's folder, {path.parent}")
    if not resume or not path.is_dir():
        raise UserError(
            f"--resume {resume or repr(resume)}: there is no such folder: give auto, no, a checkpoint's folder, "
            "or best, last or step-... of this run"
        )
    if (path / "checkpoints").is_dir():
        return path / "checkpoints"
    target = path.resolve()
    beside = path.parent / target.name  # where other machines, on which links may lead elsewhere, find it too
    return beside if beside.resolve() == target else target


def _refuse_other_job(folder: Path, facts: Mapping[str, Any]) -> None:
    saved = folders.read_manifest(folder)
    found = folders.differences(saved["identity"], facts["identity"])
    digest = next((line for line in found if line.startswith("data ")), None)
    if digest:  # says that the data differ; the settings perhaps why
        names = {field.name for field in dataclasses.fields(DataSettings)}
        now = {name: value for name, value in facts["settings"].items() if name in names}
        why = folders.differences(saved["settings"], now)
        if not why and len(found) == 1:
            why = ["the data are others: the content of the files, or the tokenizer, has changed"]
        lines = [line for line in [*found, *why] if line is not digest]
        found = list({line.partition(" was ")[0]: line for line in reversed(lines)}.values())[::-1]
    if found:
        raise UserError(
            f"{folder} is of another job: {'; '.join(found)}. Give the settings it was made with, another "
            "--output_dir, or --overwrite_output_dir to move that run aside and start again"
        )
