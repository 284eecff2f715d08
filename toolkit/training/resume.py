"""Resumes a run from a checkpoint, whatever strategy and world size saved it.

`choose_origin` finds the newest whole checkpoint and compares its job with this one, before the
run's folder is changed; `resume_from` restores its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.model_folder import has_model, save_model
from toolkit.config import ObjectiveSettings, section_in
from toolkit.data.prepare import Data
from toolkit.errors import UserError
from toolkit.pretrained import model_digest
from toolkit.training.average import average_as_weights, remove_average
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.extra_state import load_registered
from toolkit.training.optimizer import set_schedule
from toolkit.training.precision import set_scaler
from toolkit.utils.log import logger

# Settings that do not change what is trained. Of files and models the content is compared instead,
# of the precision the one that the run used.
NOT_OF_TRAINING = {
    "output_dir", "overwrite_output_dir", "resume", "report_to", "run_name", "project",
    "checkpoint_every", "checkpoint_in_background", "keep_checkpoints", "model_name_or_path",
    "train_file", "validation_file", "test_file", "log_level", "logging_steps", "language",
    "mixed_precision", "compare_max_length", "per_device_eval_batch_size",
}  # fmt: skip
# They change only which samples are computed together, as the number of processes does
_OF_THE_DEVICE = {"per_device_batch_size", "max_tokens_per_batch"}


def choose_origin(
    resume: str, checkpoints: Path, provenance: Mapping[str, Any]
) -> Path | None:
    """The newest whole one of the checkpoints that `--resume` names, or None, for a start at step
    0. Raises UserError if all are damaged, or if it is of another job."""
    if resume == "no":
        return None
    faults = []
    for folder in _named_checkpoints(resume, checkpoints):
        fault = folders.find_fault(folder)
        if not fault:
            _refuse_other_job(folder, provenance)
            return folder
        faults.append(fault)
        logger.warning(f"checkpoint {folder.name}: {fault}: skipped")
    if faults:
        raise UserError(
            f"--resume {resume}: there is no whole checkpoint: {'; '.join(faults)}"
        )
    return None


def _named_checkpoints(resume: str, checkpoints: Path) -> list[Path]:
    """The checkpoints that `--resume` names, the newest first: this run's for `auto`, else those of
    another run, or one."""
    if resume == "auto":
        return folders.newest_first(checkpoints)
    path = Path(resume).resolve()
    return (
        folders.newest_first(path / "checkpoints") or folders.newest_first(path) or [path]
    )


def identity_of(
    accelerator: Accelerator,
    settings: Any,
    data: Data,
    recipe: str,
) -> dict[str, Any]:
    """What must be equal in a checkpoint and in the run that resumes from it, as JSON. A model's
    folder is identified by its content, and may be moved or copied."""
    training = settings.training
    source = str(settings.model.model_name_or_path)
    if accelerator.is_main_process and Path(source).is_dir():
        source = model_digest(source)
    return {
        "recipe": recipe,
        "model": source,
        **data.facts,
        "data": data.digest,
        "max_length": data.max_length,
        "global_batch_size": training.global_batch_size,
        "group_by_length": training.group_by_length,
        "seed": training.seed,
        "sampling": section_in(settings, ObjectiveSettings).sampling,
    }


def _refuse_other_job(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Raises UserError if the checkpoint's `identity` is not this run's."""
    state = folders.read_state(folder)
    reasons = differences(state["identity"], provenance["identity"])
    if not reasons:
        return
    # data and model are digests: the settings say which file is another one
    reasons += differences(
        state["settings"], provenance["settings"], ignored=provenance["identity"]
    )
    remedy = "Pass the settings it was saved with or another --output_dir, or "
    remedy += "--overwrite_output_dir to move that run aside and start again"
    raise UserError(f"{folder} belongs to another job: {'; '.join(reasons)}. {remedy}")


def differences(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> list[str]:
    """`NAME was X and is Y` for each name that both have with different values."""
    lines = []
    for name in current:
        if name in saved and name not in ignored and saved[name] != current[name]:
            lines.append(f"{name} was {saved[name]} and is {current[name]}")
    return lines


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: Path
    """On rank 0's disk."""
    state: Mapping[str, Any]
    """Its state.json."""
    lines: list[str]
    """Lines for the log."""


def resume_from(
    checkpoints: Checkpoints,
    folder: Path | None,
    ignored: Collection[str] = (),
) -> Resumed | None:
    """Restores a checkpoint into model, optimizer, schedule and random generators; all ranks must
    call it. `ignored`: settings that do not affect training and may change. Returns None if the run
    starts at step 0."""
    if folder is None:
        return None
    accelerator, steps = checkpoints.accelerator, checkpoints.steps
    content = None
    if accelerator.is_main_process:
        content = (folders.read_state(folder), (folder / "objects.pt").read_bytes())
    state, objects = broadcast_object_list([content])[0]
    changes = _changed_settings(checkpoints, state, ignored)
    total = steps.schedule.total_steps
    if changes and state["step"] >= total:
        _refuse_finished_run(folder, state["step"], total, changes)
    load_registered(accelerator, objects)
    checkpoints.best.restore(state["best"])
    # first: it loads the best checkpoint's weights, which the resumed one's replace
    lines_on_best = _restore_best_model(checkpoints, folder)
    folders.load(folder, checkpoints.live(), state)
    if checkpoints.settings.ema_decay is None:
        remove_average(checkpoints.live())  # of the steps before it was left out
    set_schedule(checkpoints.scheduler, int(state["scheduler_steps"]))
    set_scaler(accelerator, checkpoints.optimizer, state["loss_scale"])
    steps.done = state["step"]
    if (state["world"], state["device"]) == (
        accelerator.num_processes,
        accelerator.device.type,
    ):
        steps.random_states = state["random"][accelerator.process_index]
    checkpoints.continues = folder.parent.resolve() == checkpoints.path.resolve()
    if checkpoints.continues:
        checkpoints.set_links()
    saved_by = f"saved by {state['strategy']}, number of processes: {state['world']}"
    line = f"resuming from {folder}: step {steps.done} of {total} ({saved_by})"
    lines = [*lines_on_best, line]
    if changes:
        lines.append(f"settings that changed since: {'; '.join(changes)}")
    if state["script"] != checkpoints.provenance["script"]:
        why = "if its loss, model or data did, pass --overwrite_output_dir to start again"
        lines.append(f"the recipe has changed since that checkpoint: {why}")
    return Resumed(folder, state, lines)


def _changed_settings(
    checkpoints: Checkpoints,
    state: Mapping[str, Any],
    ignored: Collection[str],
) -> list[str]:
    """`NAME was X and is Y` for each setting that affects training."""
    unimportant = NOT_OF_TRAINING | _OF_THE_DEVICE | set(ignored)
    changes = differences(
        state["settings"], checkpoints.provenance["settings"], unimportant
    )
    precision = {"mixed_precision": checkpoints.accelerator.mixed_precision}
    return changes + differences(state, precision)


def _refuse_finished_run(folder: Path, step: int, total: int, changes: list[str]) -> None:
    fault = (
        f"has taken {step} of {total} steps, and the changed settings would have no effect"
    )
    remedy = "raise --max_steps (or --num_train_epochs)"
    remedy += ", or pass another --output_dir or --overwrite_output_dir"
    raise UserError(f"{folder} {fault} ({'; '.join(changes)}): {remedy}")


def _restore_best_model(checkpoints: Checkpoints, folder: Path) -> list[str]:
    """Writes the run's model/ (of `--ema_decay` the average) from the best checkpoint if it is
    missing, newer than the resumed one or of another `--save_dtype`. If the best checkpoint is
    gone, the next evaluation counts as the best. Returns lines for the log; all ranks must call
    it."""
    accelerator, best = checkpoints.accelerator, checkpoints.best
    dtype = checkpoints.settings.save_dtype
    model_folder = checkpoints.path.with_name("model")
    # by its step: the link `best` may point to a later checkpoint
    source = folders.step_folder(folder.parent, best.step)
    is_needed, state = False, None
    if accelerator.is_main_process and best.step:
        is_needed = not has_model(model_folder, best.step, dtype)
        if is_needed and not folders.find_fault(source):
            state = folders.read_state(source)
    is_needed, state = broadcast_object_list([(is_needed, state)])[0]
    if not is_needed:
        return []
    if state is None:
        line = f"the best model so far, of step {best.step}, is gone"
        best.reset()
        return [f"{line}: the next evaluation counts as the best"]
    folders.load(source, checkpoints.live(), state)
    model, tokenizer = checkpoints.model, checkpoints.tokenizer
    with average_as_weights(checkpoints.live):
        save_model(accelerator, model, tokenizer, model_folder, best.step, dtype)
    return []
