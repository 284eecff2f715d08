"""What a run writes and prints at its end: the results of the best model, and the pages."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit import launch
from toolkit.config import LongTextSettings, section_in
from toolkit.data.encode import truncate_split
from toolkit.evaluation import Evaluation
from toolkit.report.start import is_demo
from toolkit.utils.features import features

if TYPE_CHECKING:
    from toolkit.run import Evaluate, Run

_MAX_CLASSES = 20


def evaluate_best_model(run: Run, evaluate: Evaluate) -> Evaluation:
    """On the test rows, or else the validation rows, and first on the same texts truncated to
    `--compare_max_length`; all processes call this, with the best model loaded."""
    split = run.data.test or run.data.validation
    length = section_in(run.settings, LongTextSettings).compare_max_length
    if length:
        short = truncate_split(split, run.tokenizer, length, f"{split.name}_first_{length}")
        truncated = _answered(run, evaluate(short))
        run.files.append_evaluation(truncated, run.best.step, max_length=length)
        run.say(f"the saved model reading the first {length} tokens only: {truncated}")
    return _answered(run, run.best_evaluation(split, evaluate))


def _answered(run: Run, evaluation: Evaluation) -> Evaluation:
    """The evaluation of the answers that a feature makes of the model's outputs."""
    if evaluation.compute_metrics is None:
        return evaluation
    return run.answers.evaluation(evaluation, evaluation.compute_metrics)


def write_results(run: Run, evaluation: Evaluation, seconds: float) -> None:
    """Writes the files of features and the pages, and prints the results with any --log_level."""
    facts = (run.folder.path, run.settings, run.data, evaluation, run.answers)
    feature_lines = [line for feature in features() for line in feature.results(*facts)]
    if not run.accelerator.is_main_process:
        return
    write_pages(run.folder.path, run.best.step)
    samples = f"{evaluation.split} ({evaluation.numbers['num_samples']} samples)"
    lines = [
        f"\ndone in {seconds:.0f} s; the saved model on {samples}: {evaluation}",
        *class_lines(evaluation),
        *run.answers.describe(evaluation),
        *_file_lines(run, evaluation.split),
        *feature_lines,
        *_next_command(run),
    ]
    print("\n".join(lines), flush=True)


def write_pages(folder: Path, best_step: int) -> None:
    """Writes report.html and, if a model was saved, its card, from the run's files; on the main
    process."""
    from toolkit.report.card import write_card  # imports jinja2 and matplotlib
    from toolkit.report.html import write_report_of_folder

    if best_step:
        write_card(folder / "model", folder, best_step)
    write_report_of_folder(folder)


def class_lines(evaluation: Evaluation) -> list[str]:
    """F1 of each class, of many those with the lowest."""
    classes = evaluation.numbers.get("per_class", {})
    lines = []
    for name in sorted(classes, key=lambda name: classes[name]["f1"])[:_MAX_CLASSES]:
        lines.append(f"  F1 {classes[name]['f1']:.4f}  {name} (of {classes[name]['support']})")
    matrix = evaluation.numbers.get("confusion_matrix")
    if matrix and np.count_nonzero(np.sum(matrix, axis=0)) == 1:
        remedy = "train longer, with a higher --learning_rate, or with --class_weights balanced"
        lines.append(
            f"  every row is predicted as the same class, nothing is learned yet: {remedy}"
        )
    return lines


def _file_lines(run: Run, split: str) -> list[str]:
    folder = shlex.quote(str(run.folder.path))
    dtype = run.settings.training.save_dtype
    lines = [
        f"  {folder}/model/            weights in {dtype}; README.md says how to load them",
        f"  {folder}/report.html       curves, results, worst mistakes: open it in a browser",
        f"  {folder}/predictions.jsonl every {split} sample with its prediction",
        f"  {folder}/metrics.jsonl, eval.jsonl, config.json",
    ]
    if run.checkpoints.path.exists():
        lines.append(f"  {folder}/checkpoints/      any number of processes can resume from them")
    return lines


def _next_command(run: Run) -> list[str]:
    """After a demo the same recipe on the user's data."""
    if not is_demo(run.settings):
        return []
    words = ["python", sys.argv[0]]
    config_file = launch.launch_info()["config_file"]
    if config_file:
        words += ["--config_file", config_file]
    model = "--model_name_or_path bert-base-chinese"
    return ["next:", f"  {shlex.join(words)} --train_file YOUR_FILE.csv {model}"]
