"""Comparison of runs from their files: metrics with confidence intervals, paired tests against the
best run, and the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from toolkit.errors import UserError
from toolkit.report.files import dumps
from toolkit.report.record import Record
from toolkit.report.statistics import intervals, p_values, scores_of
from toolkit.report.templates import format_number
from toolkit.training.resume import NOT_OF_TRAINING

LOSS_SETTINGS = {"loss", "focal_gamma", "class_weights", "pos_weight", "label_smoothing_factor"}
"""Settings that define the loss: losses of runs that differ in them cannot be compared."""
LEGEND = (
    "In brackets: 95 % confidence intervals. p: of the difference from the best run, by a paired "
    "permutation test. ±: standard deviation over seeds. Rows without an answer count as wrong."
)
_NOT_SHOWN = NOT_OF_TRAINING - {"model_name_or_path", "train_file"}


class ComparedRun:
    def __init__(self, folder: Path, name: str) -> None:
        """Raises UserError if the folder holds no run, or one that has not finished."""
        self.name = name
        self.record = Record.load(folder)
        data, last = self.record.data, self.record.last
        lines = list(self.record.predictions())
        if not lines:
            fault = "its predictions.jsonl is not from a finished evaluation (was it killed?)"
            raise UserError(f"{folder}: {fault}: resume it until it ends")
        labels = data.get("labels", ())
        self.scores = scores_of(lines, self.record.problem_type, labels)
        self.metrics: dict[str, dict[str, Any]] = dict(intervals(self.scores))
        """Metric -> value, and low, high and p, if they are known."""
        digests = data.get("file_digests", {})
        digest = digests.get(last.split) or digests.get("train", "")
        file = digest.partition("-")[0]  # without how it is read
        truth = [(line["id"], line.get("label", line.get("reference"))) for line in lines]
        self.rows = [last.split, labels, file, truth]
        """Identifies the evaluated rows and their labels."""


def compare(folders: Sequence[str | Path]) -> tuple[dict[str, Any], list[ComparedRun]]:
    """(the object that `toolkit compare --json` prints, the runs, the best first).

    The metric is the first run's `--metric_for_best_model`. Raises UserError for folders without a
    finished run, and for runs on other rows or with another metric than the first.
    """
    paths = [Path(folder) for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    runs = [ComparedRun(path, name) for path, name in zip(paths, names, strict=True)]
    settings = _differing_settings(runs)
    best = runs[0].record.best
    _check(runs, best.metric, settings)
    for run in runs:
        run.metrics.setdefault(best.metric, {"value": run.record.last.numbers[best.metric]})
    runs.sort(key=lambda run: -best.sign * run.metrics[best.metric]["value"])
    for run in runs[1:]:
        for name, p in p_values(run.scores, runs[0].scores).items():
            run.metrics[name]["p"] = p
    last = runs[0].record.last
    comparison = {
        "metric": best.metric,
        "split": last.split,
        "num_samples": last.numbers["num_samples"],
        "settings": settings,
        "runs": [{"name": run.name, "metrics": run.metrics} for run in runs],
        "seeds": _seeds(runs, settings),
    }
    return comparison, runs


def _check(runs: Sequence[ComparedRun], metric: str, settings: dict[str, Any]) -> None:
    """Raises UserError for runs that cannot be compared with the first."""
    first = runs[0]
    for run in runs:
        if run.rows != first.rows:
            remedy = "pass the same --data_seed to all runs, or evaluate the same file"
            fault = f"was evaluated on other rows or labels than {first.name}"
            raise UserError(f"{run.name} {fault}: {remedy}")
        if run.record.last.numbers.get(metric) is None:  # null: not finite
            raise UserError(f"{run.name} has no {metric}, the metric of {first.name}")
    differing = LOSS_SETTINGS & settings.keys()
    if metric == "loss" and differing:
        raise UserError(f"losses under different {', '.join(differing)} cannot be compared")


def _differing_settings(runs: Sequence[ComparedRun]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, where they differ."""
    names = dict.fromkeys(name for run in runs for name in run.record.settings)
    differing = {}
    for name in names:
        values = {run.name: run.record.settings.get(name) for run in runs}
        if name not in _NOT_SHOWN and len(set(map(dumps, values.values()))) > 1:
            differing[name] = values
    return differing


def _seeds(runs: Sequence[ComparedRun], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation over runs that differ only in the seed."""
    if "seed" not in settings:
        return []
    jobs = []
    rows = []
    for run in runs:
        job = {name: settings[name][run.name] for name in settings if name != "seed"}
        jobs.append(dumps([job, run.record.data["digest"]]))
        rows.append({name: metric["value"] for name, metric in run.metrics.items()})
    groups = []
    for _, group in pd.DataFrame(rows, dtype=float).groupby(jobs, sort=False):
        if len(group) > 1:
            names = [runs[place].name for place in group.index]
            spread = group.agg(["mean", "std"]).to_dict()
            groups.append({"runs": names, "metrics": spread})
    return groups


def table(comparison: dict[str, Any]) -> pd.DataFrame:
    """Texts in cells; a row for each run, and for each group of runs that differ in the seed."""
    rows = {}
    for run in comparison["runs"]:
        cells = {name: str(values[run["name"]]) for name, values in comparison["settings"].items()}
        for name, metric in run["metrics"].items():
            cells[name] = _format_metric(metric)
        rows[run["name"]] = cells
    for group in comparison["seeds"]:
        cells = {}
        for name, spread in group["metrics"].items():
            cells[name] = f"{spread['mean']:.4f} ± {spread['std']:.4f}"
        rows[f"mean of {', '.join(group['runs'])}"] = cells
    return pd.DataFrame.from_dict(rows, orient="index").fillna("")


def _format_metric(metric: dict[str, Any]) -> str:
    """`0.8500 [0.8300, 0.8700] p 0.03`."""
    text = format_number(metric["value"])
    if "low" in metric:
        text += " [{low:.4f}, {high:.4f}]".format(**metric)
    if "p" in metric:
        text += " p {p:.2g}".format(**metric)
    return text


def as_text(comparison: dict[str, Any]) -> str:
    rows = f"{comparison['num_samples']:,} rows of {comparison['split']}"
    with pd.option_context("display.unicode.east_asian_width", True):
        cells = table(comparison).to_string()
    return f"{rows}, the best run by {comparison['metric']} first\n{cells}\n{LEGEND}"
