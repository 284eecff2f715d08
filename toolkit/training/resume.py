"""How a run goes on from a checkpoint, taken under any launch.

`choose_origin` says what `--resume` means for the checkpoints that are there; `Resume` reads the newest sound one
and puts it into model, optimizer, schedule and random generators.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object, set_seed

from toolkit import launch
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.machines import local_copy
from toolkit.checkpoint.model_folder import save_model
from toolkit.checkpoint.model_folder import step_of as model_folder_step
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.restore import restore
from toolkit.checkpoint.save import random_file, set_random_states
from toolkit.config import DataSettings, TrainingSettings
from toolkit.errors import UserError, first_line
from toolkit.launch import restarts
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.optimizer import set_schedule
from toolkit.training.strategy import set_scaler
from toolkit.utils.files import read_table


@dataclass(frozen=True)
class Origin:
    """Where a run starts: at the first of `candidates` that is sound, or at step 0 where there is none."""

    candidates: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Why newer checkpoints were passed over, one line each."""

    def within(self, before: Path, after: Path) -> Origin:
        """The same after a folder was renamed."""
        old = before.resolve()
        moved = [
            after / path.resolve().relative_to(old) if old in path.resolve().parents else path
            for path in self.candidates
        ]
        return Origin(moved, self.skipped)


def precision_of(settings: TrainingSettings) -> str:
    """`--mixed_precision`; where that is auto and the run goes on from a checkpoint, what this was trained in."""
    goes_on = settings.resume != "no" and (settings.output_dir or settings.resume != "auto")
    if settings.mixed_precision != "auto" or not goes_on:
        return settings.mixed_precision
    if settings.overwrite_output_dir and settings.resume == "auto" and not restarts.attempt():
        return "auto"
    own = Path(settings.output_dir or ".") / "checkpoints"
    with contextlib.suppress(UserError, OSError):  # told of by `choose_origin`
        place = own if settings.resume == "auto" else _place_of(settings.resume, own)
        found = [place] if (place / folders.MANIFEST).is_file() else folders.complete(place)
        return str(folders.read_manifest(found[0]).get("mixed_precision", "auto")) if found else "auto"
    return "auto"


def choose_origin(resume: str, checkpoints: Path, facts: Mapping[str, Any]) -> Origin:
    """What `--resume` means here.

    Raises UserError when there is nothing at PATH, nothing sound at all, or the checkpoint belongs to another job.
    """
    if resume == "no":
        return Origin()
    place = checkpoints if resume == "auto" else _place_of(resume, checkpoints)
    if (place / folders.MANIFEST).is_file() or folders.step_number(place) is not None:
        if fault := folders.fault_of(place):
            raise UserError(f"--resume {resume}: {fault}; `--resume auto` takes the newest one that is complete")
        origin = Origin([place])
    else:
        origin = Origin(*folders.resumable(place))
    if origin.candidates:
        _refuse_other_job(origin.candidates[0], facts)
    elif resume != "auto":
        skipped = "".join(f"\n  {why}" for why in origin.skipped)
        raise UserError(f"--resume {resume}: no complete checkpoint there{skipped}")
    return origin


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
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path.resolve()


def _refuse_other_job(folder: Path, facts: Mapping[str, Any]) -> None:
    saved = folders.read_manifest(folder)
    was, now = dict(saved["identity"]), facts["identity"]
    explained = {
        "data": ([field.name for field in dataclasses.fields(DataSettings)], "the files, or the tokenizer,"),
        "model": (["model_name_or_path"], "its files"),
    }
    why: list[str] = []
    for name, (names, files) in explained.items():  # digests say that something differs; the settings perhaps why
        if was.pop(name, now.get(name)) != now.get(name):
            settings = {key: value for key, value in facts["settings"].items() if key in names}
            changed = folders.differences(saved["settings"], settings)
            why += changed or [f"the {name} differs: the content of {files} has changed"]
    found = list(dict.fromkeys([*folders.differences(was, now), *why]))
    if found:
        raise UserError(
            f"{folder} belongs to another job: {'; '.join(found)}. Give the settings it was made with, choose another "
            "--output_dir, or pass --overwrite_output_dir to move that run aside and start again"
        )


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    folder: Path
    manifest: Mapping[str, Any]
    ours: bool
    """Whether the checkpoint is this run's own."""
    lines: list[str]
    """For the user."""


class Resume:
    """Puts a checkpoint's state into a run; every process calls every method."""

    def __init__(self, checkpoints: Checkpoints, origin: Origin) -> None:
        self.checkpoints, self.origin = checkpoints, origin
        self.accelerator, self.path = checkpoints.accelerator, checkpoints.path
        self.steps, self.best = checkpoints.steps, checkpoints.best

    def from_newest(self) -> Resumed | None:
        """Puts the newest sound checkpoint's state into model, optimizer, schedule and random generators.

        Returns None where the run starts at step 0. Raises UserError when none of several is sound.
        """
        lines = [f"checkpoint {why}: skipped" for why in self.origin.skipped]
        for folder in self.origin.candidates:
            with self._opened(folder) as (here, fault):
                if not fault:
                    return self._resume_from(folder, here, lines)
            lines.append(f"checkpoint {folder.name}: {fault}: skipped")
        if self.origin.candidates:
            raise UserError("every checkpoint is damaged:\n  " + "\n  ".join(lines))
        for line in lines:
            launch.say(self.accelerator, line)
        return None

    @contextlib.contextmanager
    def _opened(self, folder: Path) -> Iterator[tuple[Path, str]]:
        """Gives (where this process finds the checkpoint, why nothing can be read from it, the same to all)."""
        fault = broadcast_object_list([folders.fault_of(folder) if self.accelerator.is_main_process else ""])[0]
        if fault:
            yield folder, fault
            return
        with local_copy(self.accelerator, folder, self.path) as here:
            # each process reads a part of the files through, and so brings them into memory for the loading
            names = sorted(folders.read_manifest(here)["files"])
            mine = names[self.accelerator.process_index :: self.accelerator.num_processes]
            faults = gather_object([folders.checksum_fault(here, mine)])
            yield here, next((fault for fault in faults if fault), "")

    def _resume_from(self, folder: Path, here: Path, lines: list[str]) -> Resumed:
        """`here`: where this process finds the checkpoint `folder` of rank 0."""
        accelerator, total = self.accelerator, self.steps.schedule.total_steps
        manifest = folders.read_manifest(here)
        step, world = int(manifest["step"]), manifest["world"]
        changed = folders.differences(manifest["settings"], self.checkpoints.facts["settings"])
        changed = [line for line in changed if not line.startswith(_NOT_TOLD)]
        changed += folders.differences(manifest, {"mixed_precision": accelerator.mixed_precision})
        _refuse_without_effect(folder, step, total, changed)
        self.best.restore(manifest["best"])
        lines += self._make_best_model_again(folder)
        restore(self.checkpoints.live(), open_checkpoint(here), step)
        if ours := folder.parent.resolve() == self.path.resolve():
            self.checkpoints.point_best()
        set_schedule(self.checkpoints.scheduler, int(manifest["scheduler_steps"]))
        set_scaler(accelerator, self.checkpoints.optimizer, manifest["loss_scale"])
        self.steps.done = step
        self._set_randomness(here, world)
        by = f"{manifest['strategy']}, {world} process{'es' * (world > 1)}"
        lines.append(f"resuming from {folder}: step {step} of {total} (saved by {by})")
        if changed:
            lines.append(f"settings that changed since: {'; '.join(changed)}")
        return Resumed(folder, manifest, ours, lines)

    def _make_best_model_again(self, folder: Path) -> list[str]:
        """The run's model/ may be newer than the checkpoint, or not there: then it is made again from the
        best checkpoint. Where that is gone the next evaluation is the best one so far."""
        model_folder, step = self.path.with_name("model"), self.best.step
        there = broadcast_object_list([model_folder_step(model_folder)])[0]
        if not step or there == step:
            return []
        # not by the link, which may already name one after this checkpoint
        with self._opened(folders.step_folder(folder.parent, step)) as (here, fault):
            if fault:
                self.best.forget()
                return [f"the best model so far, of step {step}, is gone: the next evaluation counts as the best"]
            restore(self.checkpoints.live(), open_checkpoint(here), step)
        model, dtype = self.checkpoints.model, self.checkpoints.settings.save_dtype
        save_model(self.accelerator, model, self.checkpoints.tokenizer, model_folder, step, dtype)
        return []

    def _set_randomness(self, folder: Path, world: int) -> None:
        """The very dropout that would have come; in a world of another size, one that has not been yet."""
        steps, seed = self.steps, self.steps.settings.seed
        path = folder / random_file(self.accelerator.process_index)
        if world == self.accelerator.num_processes and path.is_file():
            states = read_table(path, {})

            def set_randomness() -> None:
                try:
                    set_random_states(states)
                except (TypeError, ValueError, LookupError, OverflowError, RuntimeError) as error:
                    raise UserError(f"{path} holds no states of random generators ({first_line(error)})") from error

            steps.set_randomness = set_randomness
        else:
            steps.set_randomness = lambda: set_seed((seed + 1_000_003 * steps.done) % 2**31, device_specific=True)


def _refuse_without_effect(folder: Path, step: int, total: int, changed: list[str]) -> None:
    """A run that has taken all its steps can be shown again, not trained otherwise."""
    if step > total:
        raise UserError(
            f"{folder} has taken {step} steps, but the settings ask for {total} in total: raise --max_steps (or "
            "--num_train_epochs), choose another --output_dir, or pass --overwrite_output_dir"
        )
    if step == total and changed:
        raise UserError(
            f"{folder.parent.parent} is a finished run, and what changed since would have no effect "
            f"({'; '.join(changed)}): choose another --output_dir, pass --overwrite_output_dir to move it aside, "
            "or raise --max_steps (or --num_train_epochs)"
        )


# Settings that say where and how often, not what is trained: of files and models the content is compared, of the
# precision which one ran.
_NOT_TOLD = ("output_dir ", "overwrite_output_dir ", "resume ", "report_to ", "run_name ", "project ", "checkpoint_",
             "keep_checkpoints ", "model_name_or_path ", "train_file ", "validation_file ", "test_file ",
             "label_names_file ", "logging_steps ", "mixed_precision ", "tune_thresholds ", "positive_class ",
             "calibrate ", "abstain_below ", "label_corrections ", "baselines ")  # fmt: skip
