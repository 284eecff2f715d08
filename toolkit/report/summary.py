"""What a run says of itself: config.json and lines at its start, results and pages at its end."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from toolkit import demo, launch
from toolkit.config import ModelSettings
from toolkit.errors import escape_controls
from toolkit.evaluation import Evaluation
from toolkit.evaluation.self_test import try_self_test
from toolkit.launch.strategy import strategy_name
from toolkit.models import lora
from toolkit.report.model_class import architecture
from toolkit.training.optimizer import unwrapped_optimizer
from toolkit.training.resume import Resumed
from toolkit.utils.extras import install_command, is_installed
from toolkit.utils.features import features
from toolkit.utils.language import Language

if TYPE_CHECKING:
    from toolkit.run import Run

_MAX_CLASSES = 20


# --- at the start


def write_config(run: Run, resumed: Resumed | None) -> None:
    """Writes config.json."""
    data = run.data
    data_section = {
        "samples": data.sizes,
        **data.facts,
        **data.targets.source(),
        "text_column": data.text_column,
        "max_length": data.max_length,
        "digest": data.digest,
        "file_digests": data.file_digests,
        "notes": data.notes,
        **asdict(run.schedule),
        "accumulation": run.accelerator.gradient_accumulation_steps,
        "metric_for_best_model": run.best.metric,
        "pipeline_tag": data.targets.pipeline_tag,
    }
    sections = {
        "identity": run.provenance["identity"],
        "optimizer": type(unwrapped_optimizer(run.checkpoints.optimizer)).__name__,
        "resumed_from": str(resumed.folder) if resumed else None,
    }
    run.files.write_config(run.settings, data_section, sections)


def start_lines(run: Run, model: Any) -> list[str]:
    """World, data, model and schedule; some are empty."""
    settings = run.settings
    lines = [
        *_world_lines(run),
        *_data_lines(run),
        _schedule_line(run),
        *_idle_lines(run.accelerator),
        demo.demo_entry(settings.model.model_name_or_path).note,
        demo.demo_entry(settings.data.dataset_name).note,
    ]
    if not is_installed("matplotlib"):
        lines.append(f"report.html will have no curves: {install_command('report')}")
    if isinstance(settings.model, ModelSettings) and settings.model.lora_r:
        lines.append(lora.describe(model, settings.model))
    return lines


def _world_lines(run: Run) -> list[str]:
    accelerator = run.accelerator
    world = f"processes: {accelerator.num_processes} ({strategy_name(accelerator)})"
    device, precision = accelerator.device.type, accelerator.mixed_precision
    lines = [
        f"run folder: {run.folder.path}",
        f"{world}, {device}, mixed precision {precision}",
    ]
    machines = launch.list_machines()
    if machines:
        lines.append(f"machines: {', '.join(machines)}")
    return lines


def _data_lines(run: Run) -> list[str]:
    data = run.data
    sizes = ", ".join(f"{split} {count}" for split, count in data.sizes.items())
    columns = data.text_column
    if data.text_pair:
        columns += f", paired with {data.text_pair}"
    return [
        f"samples: {sizes}",
        data.targets.describe(),
        f"texts: column {columns}, at most {data.max_length} tokens",
        *data.notes,
    ]


def _schedule_line(run: Run) -> str:
    schedule = run.schedule
    per_step = f"{run.settings.training.global_batch_size} samples per step"
    accumulation = run.accelerator.gradient_accumulation_steps
    if accumulation > 1:
        per_step += f" (at most {accumulation} micro-batches on each process)"
    steps = f"{schedule.total_steps} optimizer steps, {schedule.steps_per_epoch} per epoch"
    return f"{steps}, {per_step}"


def _idle_lines(accelerator: Accelerator) -> list[str]:
    """What one process leaves unused, and what uses it."""
    lines: list[str] = []
    if accelerator.num_processes > 1 or "ipykernel" in sys.modules:
        return lines
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks != "1":
        lines.append(
            f"one process of {tasks} (SLURM_NTASKS): srun before the command uses all"
        )
    gpus = torch.accelerator.device_count()
    if accelerator.device.type == "cuda" and gpus > 1:
        words = f"--config_file accelerate_configs/ddp.yaml --num_processes {gpus}"
        lines.append(
            f"{gpus - 1} of {gpus} GPUs are idle: {words} after the command uses all"
        )
    return lines


# --- at the end


def command_to_continue(run: Run) -> str:
    """What resumes the run after a stop signal: a command, or a call in a script."""
    training, folder = run.settings.training, str(run.folder.path)
    is_demo = str(run.settings.data.dataset_name).startswith(demo.PREFIX)
    if "ipykernel" in sys.modules or not (is_demo or sys.argv[1:]):
        return f"the same call, with output_dir={folder!r}"
    words = shlex.split(launch.launch_info()["command"])
    if not training.output_dir:
        words += ["--output_dir", folder]
    if training.overwrite_output_dir:
        words.append("--overwrite_output_dir=false")
    if training.resume != "auto":
        words.append("--resume=auto")
    return shlex.join(words)


def write_results(run: Run, evaluation: Evaluation, seconds: float) -> None:
    """Writes the files of features and the pages, and prints the results with any --log_level."""
    folder = run.folder.path
    feature_lines: list[str] = []
    for feature in features():
        feature_lines += feature.results(
            folder, run.settings, run.data, evaluation, run.answers
        )
    if not run.accelerator.is_main_process:
        return
    write_pages(folder, run.best.step)
    samples = f"{evaluation.split} ({evaluation.numbers['num_samples']} samples)"
    lines = [
        "",
        f"done in {seconds:.0f} s; the saved model on {samples}: {evaluation}",
        *class_lines(evaluation),
        *run.answers.describe(evaluation),
        f"  {folder}/report.html  curves, results, worst mistakes: open it in a browser",
        f"  {folder}/model/       weights in {run.settings.training.save_dtype}, and their card",
        *feature_lines,
    ]
    language = Language(run.settings.training.language)
    print(escape_controls("\n".join(map(language.line, lines))), flush=True)


def write_pages(folder: Path, best_step: int) -> None:
    """Writes report.html and, if a model was saved, its self test and its card, from the run's
    files; on the main process."""
    from toolkit.report.card import write_card  # imports jinja2 and matplotlib
    from toolkit.report.html import write_report_of_folder

    if best_step:
        if architecture(folder / "model"):
            try_self_test(folder / "model")
        write_card(folder / "model", folder, best_step)
    write_report_of_folder(folder)


def class_lines(evaluation: Evaluation) -> list[str]:
    """F1 of each class, of many those with the lowest."""
    classes = evaluation.numbers.get("per_class", {})
    names = sorted(classes, key=lambda name: classes[name]["f1"])
    lines = []
    for name in names[:_MAX_CLASSES]:
        lines.append(
            f"  F1 {classes[name]['f1']:.4f}  {name} (of {classes[name]['support']})"
        )
    if len(names) > _MAX_CLASSES:
        lines.append(f"  and {len(names) - _MAX_CLASSES} more in report.html")
    return lines
