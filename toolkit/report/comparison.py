"""Comparison of runs from their files: metrics with confidence intervals, differences from the best
run, and the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from toolkit.errors import UserError
from toolkit.report.record import Record
from toolkit.report.statistics import differences, intervals, scores_of
from toolkit.report.templates import format_number
from toolkit.training.resume import NOT_OF_TRAINING

LOSS_SETTINGS = {
    "loss",
    "focal_gamma",
    "class_weights",
    "pos_weight",
    "label_smoothing_factor",
}
"""Settings that define the loss: losses of runs that differ in them cannot be compared."""
LEGEND = (
    "In brackets: 95 % confidence intervals. Difference: from the best run, on the same rows; it "
    "may be chance if its interval contains 0. ±: standard deviation over seeds. Rows without an "
    "answer count as wrong."
)
_NOT_SHOWN = NOT_OF_TRAINING - {"model_name_or_path", "train_file"}


class ComparedRun:
    """A run's files, and its scores on the rows of its last evaluation."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises UserError if the folder holds no run, or one that has not finished."""
        self.name = name
        self.record = Record.load(folder)
        data = self.record.data
        last = self.record.last
        lines = list(self.record.predictions())
        if not lines:
            fault = (
                "its predictions.jsonl is not from a finished evaluation (was it killed?)"
            )
            raise UserError(f"{folder}: {fault}: resume it until it ends")
        labels = data.get("labels", ())
        self.scores = scores_of(lines, self.record.problem_type, labels, folder)
        self.intervals = intervals(self.scores)
        digests = data.get("file_digests", {})
        digest = digests.get(last.split) or digests.get("train", "")
        file = digest.partition("-")[0]  # without how it is read
        truth = [(line["id"], line.get("label", line.get("reference"))) for line in lines]
        self.rows = [last.split, labels, file, truth]
        """Identifies the evaluated rows and their labels."""

    def values(self, metric: str) -> dict[str, float]:
        """The values of `metric`, as it was evaluated, and of those that have intervals."""
        values = {name: interval["value"] for name, interval in self.intervals.items()}
        return {metric: self.record.last.numbers[metric], **values}


@dataclass(frozen=True)
class Comparison:
    """Runs on the same rows."""

    metric: str
    """The first run's `--metric_for_best_model`."""
    runs: Sequence[ComparedRun]
    """The best first."""
    table: pd.DataFrame
    """Texts in cells; a row for each run, and for each group of runs that differ in the seed."""

    def __str__(self) -> str:
        last = self.runs[0].record.last
        rows = f"{last.numbers['num_samples']:,} rows of {last.split}"
        with pd.option_context("display.unicode.east_asian_width", True):
            cells = self.table.to_string()
        return f"{rows}, the best run by {self.metric} first\n{cells}\n{LEGEND}"


def compare(folders: Sequence[str | Path]) -> Comparison:
    """Raises UserError for folders without a finished run, and for runs on other rows or with
    another metric than the first."""
    paths = [Path(folder) for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    runs = [ComparedRun(path, name) for path, name in zip(paths, names, strict=True)]
    settings = _differing_settings(runs)
    best = runs[0].record.best
    metric = best.metric
    _check(runs, metric, settings)
    runs.sort(key=lambda run: best.sign * run.values(metric)[metric], reverse=True)
    return Comparison(metric, runs, _table(runs, metric, settings))


def _check(runs: Sequence[ComparedRun], metric: str, settings: pd.DataFrame) -> None:
    """Raises UserError for runs that cannot be compared with the first."""
    first = runs[0]
    for run in runs:
        if run.rows != first.rows:
            remedy = "pass the same --data_seed to all runs, or evaluate the same file"
            fault = f"was evaluated on other rows or labels than {first.name}"
            raise UserError(f"{run.name} {fault}: {remedy}")
        if run.record.last.numbers.get(metric) is None:  # null: not finite
            raise UserError(f"{run.name} has no {metric}, the metric of {first.name}")
    differing = LOSS_SETTINGS & {*settings}
    if metric == "loss" and differing:
        raise UserError(f"losses under different {', '.join(differing)} cannot be compared")


def _differing_settings(runs: Sequence[ComparedRun]) -> pd.DataFrame:
    """Texts: a row for each run, a column for each setting in which they differ."""
    names = [run.name for run in runs]
    settings = pd.DataFrame([run.record.settings for run in runs], names, dtype=object)
    settings = settings.drop(columns=_NOT_SHOWN & {*settings}).fillna("none").astype(str)
    return settings.loc[:, settings.nunique() > 1]


def _table(
    runs: Sequence[ComparedRun], metric: str, settings: pd.DataFrame
) -> pd.DataFrame:
    """Columns: the differing settings, the metrics, the difference from the best run's `metric`.
    One that does not follow from predictions.jsonl, as the loss, has no interval."""
    names = [run.name for run in runs]
    values = pd.DataFrame([run.values(metric) for run in runs], names)
    table = settings.loc[names]
    for run in runs:
        for name, value in run.values(metric).items():
            table.loc[run.name, name] = _format(
                {"value": value, **run.intervals.get(name, {})}
            )
    best, *others = runs
    for run in others:
        difference = intervals(differences(run.scores, best.scores)).get(metric)
        if difference:
            table.loc[run.name, "difference"] = _format(difference)
    for group in _seeds_of_jobs(runs, settings):
        row = f"mean of {', '.join(group)}"
        for column, spread in values.loc[group].agg(["mean", "std"]).items():
            table.loc[row, str(column)] = "{mean:.4f} ± {std:.4f}".format(**spread)
    return table.fillna("")


def _seeds_of_jobs(runs: Sequence[ComparedRun], settings: pd.DataFrame) -> list[list[str]]:
    """Names of runs that differ in the seed only, in groups."""
    jobs = settings.drop(columns={"seed"} & {*settings})
    jobs["data"] = pd.Series({run.name: run.record.data["digest"] for run in runs})
    groups = jobs.groupby(list(jobs)).groups.values()
    return [list(names) for names in groups if len(names) > 1]


def _format(interval: dict[str, float]) -> str:
    """`0.8500 [0.8300, 0.8700]`."""
    text = format_number(interval["value"])
    if "low" in interval:
        text += " [{low:.4f}, {high:.4f}]".format(**interval)
    return text
