"""Resumes a run from a checkpoint, whatever strategy and world size saved it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.model_folder import has_model, save_model
from toolkit.config import DataSettings, ObjectiveSettings, TrainingSettings, section_in
from toolkit.data.prepare import Data
from toolkit.errors import UserError, listing
from toolkit.launch.environment import attempt, launcher_start, place_of
from toolkit.training.average import average_as_weights, remove_average
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.extra_state import load_registered, set_random_states
from toolkit.training.optimizer import set_schedule
from toolkit.training.precision import set_scaler
from toolkit.utils.cache import digest_of_files

# Settings that do not change what is trained. Of files and models the content is compared instead,
# of the precision the one that the run used.
NOT_OF_TRAINING = {
    "output_dir", "overwrite_output_dir", "resume", "report_to", "run_name", "project",
    "checkpoint_every", "checkpoint_in_background", "keep_checkpoints", "model_name_or_path",
    "train_file", "validation_file", "test_file", "log_level", "logging_steps",
    "mixed_precision", "compare_max_length", "per_device_eval_batch_size",
}  # fmt: skip
_OF_DATA_AND_MODEL = [field.name for field in dataclasses.fields(DataSettings)]
_OF_DATA_AND_MODEL.append("model_name_or_path")
_MODEL_FILES = (".safetensors", ".bin", ".onnx", ".onnx_data", ".data", ".xml")


@dataclass(frozen=True)
class Origin:
    """Where a run starts."""

    folder: Path | None = None
    """A checkpoint, all of which has been read and is whole; None: at step 0."""
    skipped: tuple[str, ...] = ()
    """Why newer checkpoints are skipped, a line each."""


def precision_of(settings: TrainingSettings) -> str:
    """`--mixed_precision`; if that is auto and the run resumes, the checkpoint's. Only on rank 0,
    whose disk decides: `make_accelerator` gives it to the others."""
    checkpoints = Path(settings.output_dir or ".") / "checkpoints"
    resume = _resume_setting(settings, checkpoints)
    if settings.mixed_precision != "auto" or resume == "no" or place_of(os.environ).rank:
        return settings.mixed_precision
    with contextlib.suppress(UserError, OSError):  # `choose_origin` raises them again
        for folder in _named_checkpoints(resume, checkpoints):
            with contextlib.suppress(UserError):
                return str(folders.read_state(folder)["mixed_precision"])
    return "auto"


def _resume_setting(settings: TrainingSettings, checkpoints: Path) -> str:
    """--resume, and what it means for a run that a launcher restarts or that starts over."""
    if settings.output_dir and previous_attempt_in(checkpoints):
        return "auto"
    starts_over = settings.overwrite_output_dir or not settings.output_dir
    return "no" if settings.resume == "auto" and starts_over else settings.resume


def previous_attempt_in(checkpoints: Path) -> bool:
    """Whether a previous attempt of this job (`--max_restarts`) has saved the newest checkpoint."""
    return attempt() > 0 and folders.newest_save_time(checkpoints) > launcher_start()


def choose_origin(resume: str, checkpoints: Path, facts: Mapping[str, Any]) -> Origin:
    """The newest whole one of the checkpoints that `--resume` names. Raises UserError if none is
    whole, or if it is of another job."""
    if resume == "no":
        return Origin()
    skipped: list[str] = []
    for folder in _named_checkpoints(resume, checkpoints):
        fault = folders.find_fault(folder)
        if not fault:
            _refuse_other_job(folder, facts)
            return Origin(folder, tuple(skipped))
        skipped.append(f"checkpoint {folder.name}: {fault}: skipped")
    if skipped:
        listed = "\n  ".join(skipped)
        raise UserError(f"--resume {resume}: every checkpoint is damaged:\n  {listed}")
    if resume != "auto":
        raise UserError(f"--resume {resume}: there is no checkpoint")
    return Origin()


def _named_checkpoints(resume: str, checkpoints: Path) -> list[Path]:
    """The checkpoints that `--resume` names, the newest first: one by its path or by its name in
    this run's `checkpoints`, or those of a run (of this one for `auto`)."""
    if resume == "auto":
        return folders.newest_first(checkpoints)
    path = Path(resume)
    if not path.exists() and (checkpoints / resume).is_dir():
        path = checkpoints / resume
    if not resume or not path.is_dir():
        remedy = "pass auto, no, a checkpoint's folder, or best, last or step-... of this run"
        raise UserError(f"--resume {resume or repr(resume)}: no such folder: {remedy}")
    path = path.resolve()
    if folders.step_number(path) is not None or (path / folders.STATE_FILE).is_file():
        return [path]
    return folders.newest_first(path / "checkpoints") or folders.newest_first(path)


def identity_of(
    accelerator: Accelerator,
    settings: Any,
    data: Data,
    recipe: str,
) -> dict[str, Any]:
    """The facts that must be equal in a checkpoint and in the run that resumes from it, as JSON. A
    model's folder is identified by its content, and may be moved or copied."""
    model, training = settings.model, settings.training

    def content(name: str) -> str:
        if accelerator.is_main_process and Path(name).is_dir():
            return digest_of_model(Path(name))
        return name

    identity = {
        "recipe": recipe,
        "model": content(str(model.model_name_or_path)),
        **data.facts,
        "data": data.digest,
        "max_length": data.max_length,
        "global_batch_size": training.global_batch_size,
        "group_by_length": training.group_by_length,
        "seed": training.seed,
        "sampling": section_in(settings, ObjectiveSettings).sampling,
    }
    for name in ("lora_r", "lora_alpha", "lora_target_modules"):
        identity[name] = getattr(model, name, None)
    if layers := getattr(model, "num_hidden_layers", None):
        identity["num_hidden_layers"] = layers
    return identity


def digest_of_model(folder: Path) -> str:
    """Of the folder's config and weights, or of its exported graph."""
    files = [path for path in folder.iterdir() if path.suffix in _MODEL_FILES]
    files += folder.glob("config.json")
    return digest_of_files(folder, files)


def _refuse_other_job(folder: Path, facts: Mapping[str, Any]) -> None:
    """Raises UserError if the checkpoint's `identity` is not this run's."""
    state = folders.read_state(folder)
    saved, current = state["identity"], facts["identity"]
    digests = {
        "data": "the content of the files, or the tokenizer,",
        "model": "the content of the model's files",
    }
    reasons = differences(saved, current, [name for name in current if name not in digests])
    changed = [what for name, what in digests.items() if saved[name] != current[name]]
    if changed and not reasons:
        settings = differences(state["settings"], facts["settings"], _OF_DATA_AND_MODEL)
        reasons = settings or [f"{what} has changed" for what in changed]
    if not reasons:
        return
    remedy = "Pass the settings it was saved with or another --output_dir, or "
    remedy += "--overwrite_output_dir to move that run aside and start again"
    raise UserError(f"{folder} belongs to another job: {'; '.join(reasons)}. {remedy}")


def differences(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    names: Iterable[str],
) -> list[str]:
    """`NAME was X and is Y` for each of the names that both have with different values."""
    lines = []
    for name in names:
        if name in saved and name in current and saved[name] != current[name]:
            lines.append(f"{name} was {_text(saved[name])} and is {_text(current[name])}")
    return lines


def _text(value: Any) -> str:
    return f"[{listing(value, 6)}]" if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: Path
    """On rank 0's disk."""
    state: Mapping[str, Any]
    """Its state.json."""
    same_run: bool
    """Whether this run saved it."""
    lines: list[str]
    """Lines for the log."""


def resume_from(
    checkpoints: Checkpoints,
    origin: Origin,
    ignored: Collection[str] = (),
) -> Resumed | None:
    """Restores a checkpoint into model, optimizer, schedule and random generators; all ranks must
    call it. `ignored`: settings that do not affect training and may change. Returns None if the run
    starts at step 0."""
    folder = origin.folder
    if folder is None:
        return None
    accelerator, steps = checkpoints.accelerator, checkpoints.steps
    content = None
    if accelerator.is_main_process:
        content = (folders.read_state(folder), _objects(folder))
    state, objects = broadcast_object_list([content])[0]
    changes = _changed_settings(checkpoints, state, ignored)
    _check_finished_run(folder, state["step"], steps.schedule.total_steps, changes)
    load_registered(accelerator, objects)
    checkpoints.best.restore(state["best"])
    # first: it loads the best checkpoint's weights, which the resumed one's replace
    lines_on_best = _restore_best_model(checkpoints, folder)
    folders.load(folder, checkpoints.live(), state)
    if None in (checkpoints.settings.ema_decay, state["settings"].get("ema_decay")):
        remove_average(checkpoints.live())  # of the steps before --ema_decay was left out
    same_run = folder.parent.resolve() == checkpoints.path.resolve()
    checkpoints.continues = same_run
    if same_run:
        checkpoints.set_links()
    set_schedule(checkpoints.scheduler, int(state["scheduler_steps"]))
    set_scaler(accelerator, checkpoints.optimizer, state["loss_scale"])
    steps.done = state["step"]
    if state["world"] == accelerator.num_processes:
        own_states = state["random"][accelerator.process_index]
        steps.set_randomness = partial(set_random_states, own_states)
    lines = [
        *origin.skipped,
        *lines_on_best,
        *_resumed_lines(folder, state, changes, checkpoints),
    ]
    return Resumed(folder, state, same_run, lines)


def _objects(folder: Path) -> bytes:
    path = folder / "objects.pt"
    if not path.is_file():
        return b""
    return path.read_bytes()


def _changed_settings(
    checkpoints: Checkpoints,
    state: Mapping[str, Any],
    ignored: Collection[str],
) -> list[str]:
    """`NAME was X and is Y` for each setting that affects training."""
    unimportant = NOT_OF_TRAINING.union(ignored)
    if state["step"] == checkpoints.steps.schedule.total_steps:
        # only an evaluation is left, which may have run out of memory
        unimportant |= {"per_device_batch_size", "max_tokens_per_batch"}
    settings = checkpoints.facts["settings"]
    important = [name for name in settings if name not in unimportant]
    changes = differences(state["settings"], settings, important)
    precision = {"mixed_precision": checkpoints.accelerator.mixed_precision}
    return changes + differences(state, precision, precision)


def _resumed_lines(
    folder: Path,
    state: Mapping[str, Any],
    changes: list[str],
    checkpoints: Checkpoints,
) -> list[str]:
    step, total = state["step"], checkpoints.steps.schedule.total_steps
    processes = "1 process"
    if state["world"] > 1:
        processes = f"{state['world']} processes"
    saved_by = f"saved by {state['strategy']}, {processes}"
    lines = [f"resuming from {folder}: step {step} of {total} ({saved_by})"]
    if changes:
        lines.append(f"settings that changed since: {'; '.join(changes)}")
    scripts = {state["script"], checkpoints.facts["script"]}
    if len(scripts) > 1 and None not in scripts:  # a notebook has none
        why = "if its loss, model or data did, pass --overwrite_output_dir to start again"
        lines.append(f"{sys.argv[0]} has changed since that checkpoint: {why}")
    return lines


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
    is_current, state = True, None
    if accelerator.is_main_process and best.step:
        is_current = has_model(model_folder, best.step, dtype)
        if not is_current:
            state = _whole_state(source)
    is_current, state = broadcast_object_list([(is_current, state)])[0]
    if is_current:
        return []
    if state is None:
        step = best.step
        best.reset()
        fault = f"the best model so far, of step {step}, is gone"
        return [f"{fault}: the next evaluation counts as the best"]
    folders.load(source, checkpoints.live(), state)
    if state["settings"].get("ema_decay") is None:
        remove_average(checkpoints.live())
    model, tokenizer = checkpoints.model, checkpoints.tokenizer
    with average_as_weights(checkpoints.live):
        save_model(accelerator, model, tokenizer, model_folder, best.step, dtype)
    return []


def _whole_state(folder: Path) -> dict[str, Any] | None:
    """A checkpoint's state.json; None if it is missing or damaged."""
    if folders.find_fault(folder):
        return None
    return folders.read_state(folder)


def _check_finished_run(folder: Path, step: int, total: int, changes: list[str]) -> None:
    """Raises UserError if a checkpoint has more steps than the run, or all of them and settings
    have changed."""
    remedy = "raise --max_steps (or --num_train_epochs)"
    remedy += ", or pass another --output_dir or --overwrite_output_dir"
    if step > total:
        fault = f"has taken {step} steps, but the settings ask for {total} in total"
        raise UserError(f"{folder} {fault}: {remedy}")
    if step == total and changes:
        fault = "is of a finished run, and the changed settings would have no effect"
        raise UserError(f"{folder} {fault} ({'; '.join(changes)}): {remedy}")
