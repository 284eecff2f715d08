"""How a run goes on from a checkpoint, taken under any launch.

`choose_origin` says what `--resume` means for the checkpoints that are there; `Resume` reads the newest sound one
and puts it into model, optimizer, schedule and random generators.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object, set_seed

from toolkit import launch
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.gather_files import gather_files
from toolkit.checkpoint.model_folder import step_of as model_folder_step
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.restore import restore
from toolkit.checkpoint.save import random_file, set_random_states
from toolkit.config import DataSettings
from toolkit.errors import UserError
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.optimizer import set_scaler, set_schedule


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


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    folder: Path
    step: int
    metrics: dict[str, Any] | None
    """The line of metrics.jsonl of that step."""
    evaluations: int
    """Lines that eval.jsonl had."""
    lines: list[str]
    """For the user."""


class Resume:
    """Puts a checkpoint's state into a run; every process calls every method."""

    def __init__(self, checkpoints: Checkpoints, origin: Origin) -> None:
        self.checkpoints, self.origin = checkpoints, origin
        self.state, self.accelerator, self.path = checkpoints.state, checkpoints.accelerator, checkpoints.path
        self.steps, self.best, self.disks = self.state.steps, self.state.best, checkpoints.disks

    def from_newest(self) -> Resumed | None:
        """Puts the newest sound checkpoint's state into model, optimizer, schedule and random generators.

        Returns None where the run starts at step 0. Raises UserError when none of several is sound.
        """
        lines = [f"checkpoint {why}: skipped" for why in self.origin.skipped]
        if self.origin.aside is not None:
            self._set_aside(self.origin.aside)
        for place, folder in enumerate(self.origin.candidates, 1):
            fault = self._fault(folder, or_older(self.origin.candidates[place : place + 1]))
            if not fault:
                return self._resume_from(folder, lines)
            lines.append(f"checkpoint {folder.name}: {fault}: skipped")
        if lines and self.origin.candidates:
            raise UserError("no checkpoint is sound:\n  " + "\n  ".join(lines))
        for line in lines:
            launch.say(self.accelerator, line)
        return None

    def _set_aside(self, aside: Path) -> None:
        """Rank 0 has moved an old run aside: what lies of it on other disks goes with it."""
        if self.disks(self.path).owns_another and folders.newest_first(self.path):
            try:
                self.path.parent.rename(aside)
            except OSError as error:
                raise UserError(f"{self.path.parent} cannot be renamed to {aside}: {error.strerror}") from error

    def _fault(self, folder: Path, otherwise: str = "") -> str:
        """Why nothing can be read from a checkpoint, once it is whole on every disk: all processes get the same answer.

        Raises UserError, which ends with `otherwise`, where it is half a checkpoint.
        """
        gathered = gather_files(
            self.accelerator, self.disks(folder.parent), folder, lambda line: launch.say(self.accelerator, line)
        )
        if gathered.lacks:
            raise UserError(gathered.lacks + otherwise)
        return gathered.fault or self._damage(folder)

    def _damage(self, folder: Path) -> str:
        """Each process of a disk reads a part of the files through, and so brings them into memory for the loading."""
        names, ranks = sorted(folders.read_manifest(folder)["files"]), self.disks(folder.parent).mine.ranks
        mine = names[ranks.index(self.accelerator.process_index) :: len(ranks)]
        faults = gather_object([folders.checksum_fault(folder, mine)])
        return next((fault for fault in faults if fault), "")

    def _resume_from(self, folder: Path, lines: list[str]) -> Resumed:
        accelerator = self.accelerator
        manifest = folders.read_manifest(folder)
        step = int(manifest["step"])
        changed = self._changed_since(manifest)
        _refuse_without_effect(folder, step, self.steps.schedule.total_steps, changed)
        self.best.restore(manifest["best"])
        lines += self._model_of_best(folder)
        self._restore(folder, step)
        owns = accelerator.process_index == self.disks(folder.parent).mine.owner
        if owns and folder.parent.resolve() == self.path.resolve():
            folders.point_best(self.path, self.best.step)
        set_schedule(self.state.scheduler, int(manifest["scheduler_steps"]))
        set_scaler(accelerator, self.state.optimizer, manifest["loss_scale"])
        self.steps.done = step
        self._set_randomness(folder, manifest)
        accelerator.wait_for_everyone()
        return Resumed(
            folder, step, manifest["metrics"], int(manifest["evaluations"]), [*lines, *self._told(folder, manifest)]
        )

    def _restore(self, folder: Path, step: int) -> None:
        restore(self.state.live(), open_checkpoint(folder), step)

    def _model_of_best(self, folder: Path) -> list[str]:
        """The run's model/ may be newer than the checkpoint, or not there: then it is made again from the
        best checkpoint. Where that is gone the next evaluation is the best one so far."""
        model_folder, step = self.checkpoints.evaluations.with_name("model"), self.best.step
        there = broadcast_object_list([model_folder_step(model_folder)])[0]
        if not step or there == step:
            return []
        best = folders.step_folder(folder.parent, step)  # the link may already name one after this checkpoint
        if self._fault(best, f". Or remove {best} to go on without the best model so far"):
            self.best.forget()
            return [f"the best model so far, of step {step}, is gone: the next evaluation counts as the best"]
        self._restore(best, step)
        self.state.save_model(model_folder, step)
        return []

    def _set_randomness(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """The very dropout that would have come; in a world of another size, one that has not been yet."""
        steps, seed = self.steps, self.steps.settings.seed
        path = folder / random_file(self.accelerator.process_index)
        if manifest["world"] == self.accelerator.num_processes and path.is_file():
            states = json.loads(path.read_text(encoding="utf-8"))
            steps.set_randomness = lambda: set_random_states(states)
        else:
            steps.set_randomness = lambda: set_seed((seed + 1_000_003 * steps.done) % 2**31, device_specific=True)

    def _told(self, folder: Path, manifest: Mapping[str, Any]) -> list[str]:
        total = self.steps.schedule.total_steps
        by = f"{manifest['strategy']}, {manifest['world']} process{'es' * (manifest['world'] > 1)}"
        lines = [f"resuming from {folder}: step {manifest['step']} of {total} (saved by {by})"]
        changed = self._changed_since(manifest)
        if changed:
            lines.append(f"settings that changed since: {'; '.join(changed)}")
        return lines

    def _changed_since(self, manifest: Mapping[str, Any]) -> list[str]:
        changed = folders.differences(manifest["settings"], self.checkpoints.facts["settings"])
        return [line for line in changed if not line.startswith(_NOT_TOLD)]


def _refuse_without_effect(folder: Path, step: int, total: int, changed: list[str]) -> None:
    """A run that has taken all its steps can be shown again, not trained otherwise."""
    if step > total:
        raise UserError(
            f"{folder} has taken {step} steps, and the settings ask for {total} in all: raise --max_steps (or "
            "--num_train_epochs), choose another --output_dir, or pass --overwrite_output_dir"
        )
    if step == total and changed:
        raise UserError(
            f"{folder.parent.parent} is a finished run, in which what changed since would have no effect "
            f"({'; '.join(changed)}): choose another --output_dir, pass --overwrite_output_dir to move it aside, "
            "or raise --max_steps (or --num_train_epochs)"
        )


# Settings that say where and how often, not what is trained.
_NOT_TOLD = ("output_dir ", "overwrite_output_dir ", "resume ", "report_to ", "checkpoint_", "keep_checkpoints ")
