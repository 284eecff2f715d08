"""Resuming from a checkpoint that was saved under any launch.

`choose_origin` finds the checkpoints that `--resume` names; `resume_newest` restores the newest sound one into model,
optimizer, schedule and random generators.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
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
from toolkit.training.steps import Steps
from toolkit.training.strategy import set_scaler
from toolkit.utils.files import read_table


@dataclass(frozen=True)
class Origin:
    """Where a run starts: at the first of `candidates` that is sound, or at step 0 where there is none."""

    candidates: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Why newer checkpoints were skipped, one line each."""

    def within(self, before: Path, after: Path) -> Origin:
        """The same after a folder was renamed."""
        old = before.resolve()
        moved = [
            after / path.resolve().relative_to(old) if old in path.resolve().parents else path
            for path in self.candidates
        ]
        return Origin(moved, self.skipped)


def precision_of(settings: TrainingSettings) -> str:
    """`--mixed_precision`; where that is auto and the run resumes from a checkpoint, the checkpoint's."""
    resumes = settings.resume != "no" and (settings.output_dir or settings.resume != "auto")
    begins_anew = settings.overwrite_output_dir and settings.resume == "auto" and not restarts.attempt()
    if settings.mixed_precision != "auto" or not resumes or begins_anew:
        return settings.mixed_precision
    with contextlib.suppress(UserError, OSError):  # `choose_origin` reports it
        place = _place_of(settings.resume, Path(settings.output_dir or ".") / "checkpoints")
        folder = place if (place / folders.MANIFEST).is_file() else next(iter(folders.complete(place)), None)
        return str(folders.read_manifest(folder).get("mixed_precision", "auto")) if folder else "auto"
    return "auto"


def choose_origin(resume: str, checkpoints: Path, facts: Mapping[str, Any]) -> Origin:
    """The checkpoints that `--resume` names.

    Raises UserError when there is nothing at PATH, nothing sound at all, or the checkpoint belongs to another job.
    """
    if resume == "no":
        return Origin()
    place = _place_of(resume, checkpoints)
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
    """A checkpoint's folder, or one of checkpoints, this run's for `auto`; a run's folder means the ones in it, and a
    bare name (`best`, `last`, `step-00000100`) one of this run's."""
    if resume == "auto":
        return checkpoints
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
    before, now = dict(saved["identity"]), facts["identity"]
    sources = {
        "data": ([field.name for field in dataclasses.fields(DataSettings)], "the files, or the tokenizer,"),
        "model": (["model_name_or_path"], "its files"),
    }
    reasons: list[str] = []
    for name, (names, files) in sources.items():  # a digest shows that something differs; the settings perhaps why
        if before.pop(name, now.get(name)) != now.get(name):
            settings = {key: value for key, value in facts["settings"].items() if key in names}
            changes = folders.differences(saved["settings"], settings)
            reasons += changes or [f"the {name} differs: the content of {files} has changed"]
    if reasons := list(dict.fromkeys([*folders.differences(before, now), *reasons])):
        raise UserError(
            f"{folder} belongs to another job: {'; '.join(reasons)}. Give the settings it was made with, choose "
            "another --output_dir, or pass --overwrite_output_dir to move that run aside and start again"
        )


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: Path
    manifest: Mapping[str, Any]
    ours: bool
    """Whether it is this run's own."""
    lines: list[str]
    """For the user."""


def resume_newest(checkpoints: Checkpoints, origin: Origin, of_features: Collection[str] = ()) -> Resumed | None:
    """Restores the newest sound checkpoint; all processes call this. `of_features`: settings that are no part of the
    training, and may have changed.

    Returns None where the run starts at step 0. Raises UserError when none of several is sound.
    """
    skipped = [f"checkpoint {why}: skipped" for why in origin.skipped]
    for folder in origin.candidates:
        with _opened(checkpoints, folder) as (here, fault):
            if not fault:
                return _resume_from(checkpoints, folder, here, skipped, of_features)
        skipped.append(f"checkpoint {folder.name}: {fault}: skipped")
    if origin.candidates:
        raise UserError("every checkpoint is damaged:\n  " + "\n  ".join(skipped))
    for line in skipped:
        launch.log_on_main(checkpoints.accelerator, line)
    return None


@contextlib.contextmanager
def _opened(checkpoints: Checkpoints, folder: Path) -> Iterator[tuple[Path, str]]:
    """Gives (the folder in which this process finds the checkpoint, why it cannot be read, the same in all)."""
    accelerator = checkpoints.accelerator
    fault = broadcast_object_list([folders.fault_of(folder) if accelerator.is_main_process else ""])[0]
    if fault:
        yield folder, fault
        return
    with local_copy(accelerator, folder, checkpoints.path) as here:
        # each process verifies a part of the files, which brings them into memory for the loading
        names = sorted(folders.read_manifest(here)["files"])[accelerator.process_index :: accelerator.num_processes]
        faults = gather_object([folders.checksum_fault(here, names)])
        yield here, next(filter(None, faults), "")


def _resume_from(
    checkpoints: Checkpoints, folder: Path, here: Path, skipped: list[str], of_features: Collection[str]
) -> Resumed:
    """`here`: where this process finds the checkpoint `folder` of rank 0."""
    accelerator, steps, best = checkpoints.accelerator, checkpoints.steps, checkpoints.best
    manifest, total = folders.read_manifest(here), steps.schedule.total_steps
    step, world = int(manifest["step"]), manifest["world"]
    settings = checkpoints.facts["settings"]
    trains = {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT.union(of_features)}
    changes = folders.differences(manifest["settings"], trains)
    changes += folders.differences(manifest, {"mixed_precision": accelerator.mixed_precision})
    _refuse_without_effect(folder, step, total, changes)
    best.restore(manifest["best"])
    lines = [*skipped, *_restore_best_model(checkpoints, folder)]
    restore(checkpoints.live(), open_checkpoint(here), step)
    if ours := folder.parent.resolve() == checkpoints.path.resolve():
        checkpoints.point_best()
    set_schedule(checkpoints.scheduler, int(manifest["scheduler_steps"]))
    set_scaler(accelerator, checkpoints.optimizer, manifest["loss_scale"])
    steps.done = step
    steps.set_randomness = randomness_of(here, world, accelerator, steps)
    strategy = f"{manifest['strategy']}, {world} process{'es' * (world > 1)}"
    lines.append(f"resuming from {folder}: step {step} of {total} (saved by {strategy})")
    if changes:
        lines.append(f"settings that changed since: {'; '.join(changes)}")
    return Resumed(folder, manifest, ours, lines)


def _restore_best_model(checkpoints: Checkpoints, folder: Path) -> list[str]:
    """The run's model/ may be newer than the checkpoint, or missing: then it is written from the best checkpoint.
    Where that is gone the next evaluation is the best one so far."""
    model_folder, best = checkpoints.path.with_name("model"), checkpoints.best
    saved_step = broadcast_object_list([model_folder_step(model_folder)])[0]
    if not best.step or saved_step == best.step:
        return []
    # not by the link, which may already name one after this checkpoint
    with _opened(checkpoints, folders.step_folder(folder.parent, best.step)) as (here, fault):
        if fault:
            step = best.step
            best.reset()
            return [f"the best model so far, of step {step}, is gone: the next evaluation counts as the best"]
        restore(checkpoints.live(), open_checkpoint(here), best.step)
    dtype = checkpoints.settings.save_dtype
    save_model(checkpoints.accelerator, checkpoints.model, checkpoints.tokenizer, model_folder, best.step, dtype)
    return []


def randomness_of(folder: Path, world: int, accelerator: Accelerator, steps: Steps) -> Callable[[], None]:
    """What sets the random generators as the checkpoint has them; in a world of another size, to numbers that have not
    been drawn yet."""
    path, seed = folder / random_file(accelerator.process_index), steps.settings.seed
    if world != accelerator.num_processes or not path.is_file():
        return lambda: set_seed((seed + 1_000_003 * steps.done) % 2**31, device_specific=True)
    states = read_table(path, {})

    def set_randomness() -> None:
        try:
            set_random_states(states)
        except (TypeError, ValueError, LookupError, OverflowError, RuntimeError) as error:
            raise UserError(f"{path} holds no states of random generators ({first_line(error)})") from error

    return set_randomness


def _refuse_without_effect(folder: Path, step: int, total: int, changes: list[str]) -> None:
    """A run that has taken all its steps can be evaluated again, not trained otherwise."""
    if step > total:
        raise UserError(
            f"{folder} has taken {step} steps, but the settings ask for {total} in total: raise --max_steps (or "
            "--num_train_epochs), choose another --output_dir, or pass --overwrite_output_dir"
        )
    if step == total and changes:
        raise UserError(
            f"{folder.parent.parent} is a finished run, and what changed since would have no effect "
            f"({'; '.join(changes)}): choose another --output_dir, pass --overwrite_output_dir to move it aside, "
            "or raise --max_steps (or --num_train_epochs)"
        )


# Settings that say where, how often, or what is done at the end, not what is trained. Of files and models the content
# is compared, of the precision which one ran.
_WITHOUT_EFFECT = {
    "output_dir", "overwrite_output_dir", "resume", "report_to", "run_name", "project", "checkpoint_every",
    "checkpoint_in_background", "keep_checkpoints", "model_name_or_path", "train_file", "validation_file", "test_file",
    "label_names_file", "log_level", "logging_steps", "mixed_precision", "compare_max_length",
    "per_device_eval_batch_size",
}  # fmt: skip
