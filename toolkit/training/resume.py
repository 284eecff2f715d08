"""Resumes a run from a checkpoint, whatever strategy and world size saved it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from toolkit import launch
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.machines import local_copy
from toolkit.checkpoint.model_folder import has_dtype, read_step, save_model
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.restore import restore
from toolkit.checkpoint.save import load_objects, random_file, set_random_states
from toolkit.checkpoint.tensor_index import model_checksum
from toolkit.config import DataSettings, ObjectiveSettings, TrainingSettings, section_in
from toolkit.data.prepare import Prepared
from toolkit.errors import UserError, first_line
from toolkit.launch.environment import attempt, launcher_start, place_of
from toolkit.models.exported import export_format
from toolkit.training.average import average_as_weights, remove_average
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.half_precision import set_scaler
from toolkit.training.optimizer import set_schedule
from toolkit.utils.cache import digest_of_file
from toolkit.utils.files import read_table


@dataclass(frozen=True)
class Origin:
    """Where a run starts: at the first undamaged one of `candidates`; at step 0 if there are none."""

    candidates: list[Path] = field(default_factory=list)
    """Checkpoints, newest first."""
    skipped: list[str] = field(default_factory=list)
    """Why newer checkpoints are skipped, a line each."""


def precision_of(settings: TrainingSettings) -> str:
    """`--mixed_precision`; if that is auto and the run resumes, the checkpoint's. Only on rank 0, whose disk decides:
    `make_accelerator` gives it to the others."""
    checkpoints = Path(settings.output_dir or ".") / "checkpoints"
    restarts = bool(settings.output_dir) and previous_attempt_in(checkpoints)
    starts_over = settings.overwrite_output_dir or not settings.output_dir
    resume = "auto" if restarts else "no" if settings.resume == "auto" and starts_over else settings.resume
    if settings.mixed_precision != "auto" or resume == "no" or place_of(os.environ).rank:
        return settings.mixed_precision
    with contextlib.suppress(UserError, OSError):  # `choose_origin` raises them again
        path = _resume_path(resume, checkpoints)
        folder = path if (path / folders.MANIFEST).is_file() else next(iter(folders.complete(path)), None)
        return str(folders.read_manifest(folder).get("mixed_precision", "auto")) if folder else "auto"
    return "auto"


def previous_attempt_in(checkpoints: Path) -> bool:
    """Whether a previous attempt of this job (`--max_restarts`) has saved the newest checkpoint."""
    return attempt() > 0 and folders.newest_save_time(checkpoints) > launcher_start()


def choose_origin(resume: str, checkpoints: Path, facts: Mapping[str, Any]) -> Origin:
    """The checkpoints that `--resume` names. Raises UserError if none is complete, or one is of another job."""
    if resume == "no":
        return Origin()
    path = _resume_path(resume, checkpoints)
    if (path / folders.MANIFEST).is_file() or folders.step_number(path) is not None:
        if fault := folders.find_fault(path):
            raise UserError(f"--resume {resume}: {fault}; `--resume auto` takes the newest complete one")
        origin = Origin([path])
    else:
        origin = Origin(*folders.find_resumable(path))
    if origin.candidates:
        _refuse_other_job(origin.candidates[0], facts)
    elif resume != "auto":
        skipped = "".join(f"\n  {why}" for why in origin.skipped)
        raise UserError(f"--resume {resume}: no complete checkpoint there{skipped}")
    return origin


def _resume_path(resume: str, checkpoints: Path) -> Path:
    """The folder that `--resume` names: of a checkpoint (by its path, or its name in this run's `checkpoints`), or of
    all checkpoints of a run (this one's for `auto`)."""
    if resume == "auto":
        return checkpoints
    path = Path(resume)
    if not path.exists() and (checkpoints / resume).is_dir():
        path = checkpoints / resume
    if path.is_file():
        raise UserError(f"--resume {resume} is a file: pass the checkpoint's folder, {path.parent}")
    if not resume or not path.is_dir():
        remedy = "pass auto, no, a checkpoint's folder, or best, last or step-... of this run"
        raise UserError(f"--resume {resume or repr(resume)}: no such folder: {remedy}")
    return (path / "checkpoints" if (path / "checkpoints").is_dir() else path).resolve()


def identity_of(accelerator: Accelerator, settings: Any, data: Prepared, recipe: str) -> dict[str, Any]:
    """The facts that must be equal in a checkpoint and in the run that resumes from it, as JSON. A model's folder is
    identified by its content, and may be moved or copied."""
    model, training = settings.model, settings.training

    def content(name: str) -> str:
        return _checksum(Path(name)) if accelerator.is_main_process and Path(name).is_dir() else name

    distillation = getattr(settings, "distillation", None)
    return {
        "recipe": recipe,
        "model": content(str(model.model_name_or_path)),
        **({"teacher": content(distillation.teacher)} if distillation and distillation.teacher else {}),
        **({"num_hidden_layers": layers} if (layers := getattr(model, "num_hidden_layers", None)) else {}),
        **data.facts,
        "data": data.digest,
        "max_length": data.max_length,
        "global_batch_size": training.global_batch_size,
        "group_by_length": training.group_by_length,
        "seed": training.seed,
        "sampling": section_in(settings, ObjectiveSettings).sampling,
        **{name: getattr(model, name, None) for name in ("lora_r", "lora_alpha", "lora_target_modules")},
    }


def script_digest() -> str | None:
    """Of the recipe that runs, whose loss may be edited between a checkpoint and its resume."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return digest_of_file(Path(script)) if script and Path(script).is_file() else None


def _checksum(model: Path) -> str:
    """Checksum of the folder's config and weights, or of its exported graph if it has no weights."""
    graph = (".onnx", ".onnx_data", ".data", ".xml", ".bin")
    return model_checksum(model, graph) if export_format(model) else model_checksum(model)


def _refuse_other_job(folder: Path, facts: Mapping[str, Any]) -> None:
    """Raises UserError if the checkpoint's `identity` is not this run's."""
    manifest = folders.read_manifest(folder)
    saved, current = dict(manifest["identity"]), facts["identity"]
    sources = {
        "data": ([field.name for field in dataclasses.fields(DataSettings)], "the files, or the tokenizer,"),
        "model": (["model_name_or_path"], "its files"),
    }
    reasons: list[str] = []
    for name, (names, files) in sources.items():  # a digest differs: changed settings may explain it
        if saved.pop(name, current.get(name)) != current.get(name):
            settings = {key: value for key, value in facts["settings"].items() if key in names}
            changes = folders.differences(manifest["settings"], settings)
            others = [change for change in changes if change.split()[0] not in saved]  # the identity's are compared
            reasons += others if changes else [f"the {name} differs: the content of {files} has changed"]
    if reasons := list(dict.fromkeys([*folders.differences(saved, current), *reasons])):
        raise UserError(
            f"{folder} belongs to another job: {'; '.join(reasons)}. Pass the settings it was saved with or another "
            "--output_dir, or --overwrite_output_dir to move that run aside and start again"
        )


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: Path
    manifest: Mapping[str, Any]
    same_run: bool
    """Whether this run saved it."""
    lines: list[str]
    """Lines for the log."""


def resume_newest(checkpoints: Checkpoints, origin: Origin, ignored: Collection[str] = ()) -> Resumed | None:
    """Restores the newest undamaged checkpoint into model, optimizer, schedule and random generators; all ranks must
    call it. `ignored`: settings that do not affect training and may change.

    Returns None if the run starts at step 0. Raises UserError if all candidates are damaged.
    """
    skipped = [f"checkpoint {why}: skipped" for why in origin.skipped]
    for folder in origin.candidates:
        with _verified_copy(checkpoints, folder) as (copy, fault):
            if not fault:
                return _resume_from(checkpoints, folder, copy, skipped, ignored)
        skipped.append(f"checkpoint {folder.name}: {fault}: skipped")
    if origin.candidates:
        raise UserError("every checkpoint is damaged:\n  " + "\n  ".join(skipped))
    for line in skipped:
        launch.log_on_main(checkpoints.accelerator, line)
    return None


@contextlib.contextmanager
def _verified_copy(checkpoints: Checkpoints, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields (this rank's path of a checkpoint on rank 0's disk, its fault or "", the same on all ranks)."""
    accelerator = checkpoints.accelerator
    fault = broadcast_object_list([folders.find_fault(folder) if accelerator.is_main_process else ""])[0]
    if fault:
        yield folder, fault
        return
    with local_copy(accelerator, folder, checkpoints.path) as copy:
        # the ranks that share a disk verify some of its files each, which also loads them into the page cache
        manifest = (copy / folders.MANIFEST).stat()
        disks: list[tuple[int, int]] = gather_object([(manifest.st_ino, manifest.st_mtime_ns)])
        ranks = [rank for rank, disk in enumerate(disks) if disk == disks[accelerator.process_index]]
        names = sorted(folders.read_manifest(copy)["files"])[ranks.index(accelerator.process_index) :: len(ranks)]
        faults = gather_object([folders.find_damage(copy, names)])
        yield copy, next(filter(None, faults), "")


def _resume_from(
    checkpoints: Checkpoints, folder: Path, copy: Path, skipped: list[str], ignored: Collection[str]
) -> Resumed:
    """`copy`: this rank's path of rank 0's checkpoint `folder`."""
    accelerator, steps, best = checkpoints.accelerator, checkpoints.steps, checkpoints.best
    manifest, total = folders.read_manifest(copy), steps.schedule.total_steps
    step, world = int(manifest["step"]), manifest["world"]
    ignored = NOT_OF_TRAINING.union(ignored)
    if step == total:  # only the evaluation is left, which may have run out of memory
        ignored |= {"per_device_batch_size", "max_tokens_per_batch"}
    settings = {name: value for name, value in checkpoints.facts["settings"].items() if name not in ignored}
    changes = folders.differences(manifest["settings"], settings)
    changes += folders.differences(manifest, {"mixed_precision": accelerator.mixed_precision})
    _check_finished_run(folder, step, total, changes)
    load_objects(accelerator, copy)
    best.restore(manifest["best"])
    lines = [*skipped, *_restore_best_model(checkpoints, folder)]
    restore(checkpoints.live(), open_checkpoint(copy), step)
    if None in (checkpoints.settings.ema_decay, manifest["settings"].get("ema_decay")):
        remove_average(checkpoints.live())  # of the steps before --ema_decay was left out
    checkpoints.continues = same_run = folder.parent.resolve() == checkpoints.path.resolve()
    if same_run:
        checkpoints.set_links()
    set_schedule(checkpoints.scheduler, int(manifest["scheduler_steps"]))
    set_scaler(accelerator, checkpoints.optimizer, manifest["loss_scale"])
    steps.done = step
    random_states = copy / random_file(accelerator.process_index)
    if world == accelerator.num_processes and random_states.is_file():
        steps.set_randomness = partial(restore_randomness, random_states, read_table(random_states, {}))
    strategy = f"{manifest['strategy']}, {world} process{'es' * (world > 1)}"
    lines.append(f"resuming from {folder}: step {step} of {total} (saved by {strategy})")
    if changes:
        lines.append(f"settings that changed since: {'; '.join(changes)}")
    scripts = {manifest.get("script"), checkpoints.facts["script"]}
    if len(scripts) > 1 and None not in scripts:  # a notebook has none, nor does an older checkpoint
        why = "if its loss, model or data did, pass --overwrite_output_dir to start again"
        lines.append(f"{sys.argv[0]} has changed since that checkpoint: {why}")
    return Resumed(folder, manifest, same_run, lines)


def _restore_best_model(checkpoints: Checkpoints, folder: Path) -> list[str]:
    """Writes the run's model/ (of `--ema_decay` the average) from the best checkpoint if it is missing, newer than
    the resumed one or of another `--save_dtype`. Where the best checkpoint is gone, the next evaluation counts as the
    best."""
    model_folder, best, dtype = checkpoints.path.with_name("model"), checkpoints.best, checkpoints.settings.save_dtype
    saved_step, same_dtype = broadcast_object_list([(read_step(model_folder), has_dtype(model_folder, dtype))])[0]
    if not best.step or (saved_step == best.step and same_dtype):
        return []
    # the link `best` may point to a later checkpoint
    with _verified_copy(checkpoints, folders.step_folder(folder.parent, best.step)) as (copy, fault):
        if fault and saved_step == best.step:
            return [f"model/ is not saved in {dtype}: the checkpoint of its step {best.step} is gone"]
        if fault:
            step = best.step
            best.reset()
            return [f"the best model so far, of step {step}, is gone: the next evaluation counts as the best"]
        restore(checkpoints.live(), open_checkpoint(copy), best.step)
        if folders.read_manifest(copy)["settings"].get("ema_decay") is None:
            remove_average(checkpoints.live())
    with average_as_weights(checkpoints.live, best.step):
        save_model(checkpoints.accelerator, checkpoints.model, checkpoints.tokenizer, model_folder, best.step, dtype)
    return []


def restore_randomness(path: Path, states: dict[str, Any]) -> None:
    """Sets this rank's random generators to the states from `path`."""
    try:
        set_random_states(states)
    except (TypeError, ValueError, LookupError, OverflowError, RuntimeError) as error:
        raise UserError(f"{path} has no valid states of random generators ({first_line(error)})") from error


def _check_finished_run(folder: Path, step: int, total: int, changes: list[str]) -> None:
    """Raises UserError if a checkpoint has more steps than the run, or all of them and settings have changed."""
    fault = f"has taken {step} steps, but the settings ask for {total} in total" * (step > total)
    if step == total and changes:
        fault = f"is of a finished run, and the changed settings would have no effect ({'; '.join(changes)})"
    if fault:
        remedy = "raise --max_steps (or --num_train_epochs), or pass another --output_dir or --overwrite_output_dir"
        raise UserError(f"{folder} {fault}: {remedy}")


# Settings that do not change what is trained. Of files and models the content is compared instead, of the precision
# the one that the run used.
NOT_OF_TRAINING = {
    "output_dir", "overwrite_output_dir", "resume", "report_to", "run_name", "project", "checkpoint_every",
    "checkpoint_in_background", "keep_checkpoints", "model_name_or_path", "train_file", "validation_file", "test_file",
    "label_names_file", "log_level", "logging_steps", "mixed_precision", "compare_max_length",
    "per_device_eval_batch_size",
}  # fmt: skip
