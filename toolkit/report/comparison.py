"""Comparison of runs from their files: metrics with confidence intervals and paired tests."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from toolkit.errors import UserError, listing
from toolkit.report.files import dumps, run_config
from toolkit.report.record import Record
from toolkit.report.statistics import Scores, intervals, p_values, scores_of
from toolkit.report.templates import format_number, format_setting
from toolkit.training.resume import NOT_OF_TRAINING

LOSS_SETTINGS = {"loss", "focal_gamma", "class_weights", "pos_weight", "label_smoothing_factor"}
"""Settings that define the loss: losses of runs that differ in them cannot be compared."""
_FILE_SETTINGS = {"train_file", "validation_file", "test_file", "dataset_name"}
_NOT_SHOWN = NOT_OF_TRAINING - _FILE_SETTINGS - {"model_name_or_path"}
_SIGNIFICANT = 0.05


class ComparedRun:
    def __init__(self, folder: Path, name: str) -> None:
        """Raises UserError if the folder holds no run."""
        run_config(folder)
        self.folder = folder
        self.name = name
        self.record = Record.load(folder)
        self.predictions = self.record.of_last(list(self.record.predictions(folder)))

    @cached_property
    def scores(self) -> Scores:
        return scores_of(self.predictions, self.record.problem_type, self.record.data["labels"])

    @cached_property
    def rows(self) -> str:
        """Identifies the evaluated rows, their labels and their file."""
        record = self.record
        digests = record.data.get("file_digests", {})
        digest = digests.get(record.last.split) or digests.get("train", "")
        file = digest.partition("-")[0]  # without how it is read
        rows = [(line["id"], line.get("label", line.get("reference"))) for line in self.predictions]
        labels = record.data.get("labels")
        return dumps([record.last.split, record.problem_type, labels, file, rows])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """With the model by its digest, as paths differ between machines."""
        settings = self.record.settings
        model = settings.get("model_name_or_path")
        identity = self.record.config.get("identity", {})
        return settings | {"model_name_or_path": identity.get("model", model)}


def compare(folders: Sequence[str | Path]) -> tuple[dict[str, Any], list[ComparedRun]]:
    """(the object that `toolkit compare --json` prints, the compared runs, the best first).

    Raises UserError for folders without a run, and if no two runs can be compared.
    """
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder).rstrip("/") for folder in folders]
    runs = [ComparedRun(Path(folder), name) for folder, name in zip(folders, names, strict=True)]
    counts = collections.Counter(run.rows for run in runs if run.predictions)
    reference = max(runs, key=lambda run: counts[run.rows])
    reasons = {run.name: _reason_to_leave_out(run, reference) for run in runs}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    if len(runs) - len(left_out) < min(2, len(runs)):
        listed = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(f"these runs cannot be compared: {listed}")
    best = reference.record.best
    last = reference.record.last
    runs = [run for run in runs if run.name not in left_out]
    metric = {run.name: run.record.last.numbers[best.metric] for run in runs}
    runs.sort(key=lambda run: _sort_key(metric[run.name], best.sign))
    measured = [_measure(run, runs[0], best.metric) for run in runs]
    comparison = {
        "metric": best.metric,
        "greater_is_better": best.sign > 0,
        "split": last.split,
        "num_samples": last.numbers["num_samples"],
        "settings": _differing_settings(runs),
        "runs": measured,
        "seeds": _seeds(runs, measured),
        "left_out": left_out,
    }
    return comparison, runs


def _sort_key(value: float | None, sign: float) -> float:
    """`value` is None if it was not finite."""
    return math.inf if value is None else -sign * value


def _reason_to_leave_out(run: ComparedRun, reference: ComparedRun) -> str:
    """Why a run cannot be compared with the reference; "" if it can."""
    metric = reference.record.best.metric
    if not run.predictions:
        why = "its predictions.jsonl is not from a finished evaluation (was it killed?)"
        return f"{why}: resume it until it ends"
    if run.rows != reference.rows:
        remedy = "pass the same --data_seed to all runs, or evaluate the same file"
        return f"it was evaluated on other rows or labels than {reference.name}: {remedy}"
    if metric not in run.record.last.numbers:
        return f"it has no {metric}, the --metric_for_best_model of {reference.name}"
    differing = LOSS_SETTINGS & _differing_settings([run, reference]).keys()
    if metric == "loss" and differing:
        why = f"{reference.name} defines it differently ({', '.join(sorted(differing))})"
        return f"runs are compared by loss, and {why}"
    return ""


def _differing_settings(runs: Sequence[ComparedRun]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, where they differ. Paths of files with the same content do not
    count."""
    data = {run.record.config.get("identity", {}).get("data") for run in runs}
    ignored = _NOT_SHOWN
    if len(data) == 1:
        ignored = _NOT_SHOWN | _FILE_SETTINGS
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ignored)
    differing = {}
    for name in names:
        values = {run.name: run.settings.get(name) for run in runs}
        if len({dumps(value) for value in values.values()}) > 1:
            differing[name] = values
    return differing


def _measure(run: ComparedRun, best: ComparedRun, metric: str) -> dict[str, Any]:
    """A run's metrics with their intervals, and the p of their differences from the best run."""
    numbers = run.record.last.numbers
    metrics: dict[str, Any] = {name: {"value": numbers[name]} for name in (metric, "loss")}
    metrics |= intervals(run.scores)
    if run is not best:
        for name, p in p_values(run.scores, best.scores).items():
            metrics[name]["p"] = p
    return {"name": run.name, "folder": str(run.folder), "metrics": metrics}


def _seeds(runs: Sequence[ComparedRun], measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over runs that differ only in the seed; `measured`: as `_measure`."""
    rows = []
    for run, measures in zip(runs, measured, strict=True):
        ignored = NOT_OF_TRAINING - {"model_name_or_path"} | {"seed"}
        settings = {name: value for name, value in run.settings.items() if name not in ignored}
        values = {name: metric["value"] for name, metric in measures["metrics"].items()}
        job = dumps([settings, run.record.data["digest"]])
        rows.append({"run": run.name, "job": job, "seed": run.settings.get("seed"), **values})
    names = list(measured[0]["metrics"])
    groups = []
    table = pd.DataFrame(rows).drop_duplicates(["job", "seed"])
    for _, group in table.groupby("job", sort=False):
        if len(group) > 1:
            spread = group[names].astype(float).agg(["mean", "std", "min", "max"])
            groups.append({"runs": list(group["run"]), "metrics": spread.to_dict()})
    return groups


# Tables and notes, for the terminal and the page


def as_text(comparison: dict[str, Any]) -> str:
    lines = notes(comparison)
    with pd.option_context("display.unicode.east_asian_width", True):
        for title, table in tables(comparison).items():
            lines += ["", f"{title}:", table.to_string()]
    return "\n".join(lines)


def tables(comparison: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """Title -> texts in cells, a row for each run or group of runs."""
    settings = comparison["settings"]
    metrics = list(comparison["runs"][0]["metrics"])
    if settings.keys() & LOSS_SETTINGS:
        metrics.remove("loss")
    rows = {}
    for run in comparison["runs"]:
        cells = {name: format_setting(values[run["name"]]) for name, values in settings.items()}
        cells |= {name: _format_metric(**run["metrics"][name]) for name in metrics}
        rows[run["name"]] = cells
    where = f"{comparison['num_samples']:,} rows of {comparison['split']}"
    title = f"{where}, 95 % confidence intervals in brackets"
    by_title = {title: pd.DataFrame.from_dict(rows, orient="index")}
    spreads = {
        ", ".join(group["runs"]): {name: _format_spread(group["metrics"][name]) for name in metrics}
        for group in comparison["seeds"]
    }
    if spreads:
        title = "Over seeds: mean ± standard deviation (lowest to highest)"
        by_title[title] = pd.DataFrame.from_dict(spreads, orient="index")
    return by_title


def _format_spread(numbers: dict[str, float]) -> str:
    return "{mean:.4f} ± {std:.4f} ({min:.4f} to {max:.4f})".format(**numbers)


def _format_metric(
    value: float | None, low: float | None = None, high: float | None = None, p: float | None = None
) -> str:
    """`0.8500 [0.8300, 0.8700] p 0.03`."""
    text = format_number(value)
    if low is not None:
        text += f" [{low:.4f}, {high:.4f}]"
    if p is not None:
        text += f" p {p:.2g}"
    return text


def notes(comparison: dict[str, Any]) -> list[str]:
    """Which runs the best one clearly differs from, and which were left out."""
    best, *others = comparison["runs"]
    lines = [f"Best by {comparison['metric']}: {best['name']}"]
    if others:
        tested = next(name for name in best["metrics"] if "p" in others[0]["metrics"][name])
        p = {run["name"]: run["metrics"][tested]["p"] for run in others}
        clear = [name for name in p if p[name] < _SIGNIFICANT]
        unclear = [name for name in p if p[name] >= _SIGNIFICANT]
        if clear:
            lines.append(f"Clear difference in {tested} (p < {_SIGNIFICANT}): {listing(clear)}")
        if unclear:
            lines.append(f"No clear difference in {tested}: {listing(unclear)}")
    if comparison["settings"].keys() & LOSS_SETTINGS:
        lines.append("Losses are not compared, as their definitions differ")
    return lines + [f"Left out: {name}: {why}" for name, why in comparison["left_out"].items()]
