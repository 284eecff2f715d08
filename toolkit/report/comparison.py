"""Comparison of runs from their files: metrics with confidence intervals and tests, speed and memory."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import sparse, stats
from sklearn.preprocessing import MultiLabelBinarizer

from toolkit.errors import UserError, listing, size_text
from toolkit.report.curves import values_of
from toolkit.report.files import Record, dumps, run_config
from toolkit.report.templates import format_number, format_setting
from toolkit.training.resume import NOT_OF_TRAINING

LOSS_SETTINGS = {"loss", "focal_gamma", "class_weights", "pos_weight", "label_smoothing_factor"}
"""Settings that define the loss: losses of runs that differ in them cannot be compared."""
TRAINING_LOSS_SETTINGS = LOSS_SETTINGS | {
    "sampling", "r_drop_alpha", "fgm_epsilon", "teacher", "distillation_temperature", "distillation_alpha"
}  # fmt: skip
_FILE_SETTINGS = {"train_file", "validation_file", "test_file", "dataset_name", "label_names_file"}
_NOT_SHOWN = NOT_OF_TRAINING - _FILE_SETTINGS - {"model_name_or_path"}
_NOT_OF_JOB = NOT_OF_TRAINING | _FILE_SETTINGS
_NOT_OF_JOB |= {"per_device_batch_size", "max_tokens_per_batch", "gradient_checkpointing"}
"""Settings that do not change the loss of a step."""
_SIGNIFICANT = 0.05
_RESAMPLES, _MIN_RESAMPLES, _MAX_DRAWS = 1000, 100, 10**8
_MAX_BATCH, _MAX_BATCH_DRAWS = 50, 5 * 10**6  # resamples in memory at a time, and their rows: 40 MB
_COSTS = (
    "strategy",
    "mixed_precision",
    "steps",
    "seconds",
    "samples_per_second",
    "loss_difference",
)


class ComparedRun:
    def __init__(self, folder: Path, name: str) -> None:
        """Raises UserError if the folder holds no run."""
        run_config(folder)
        self.folder, self.name, self.record = folder, name, Record.load(folder)
        self.predictions = self.record.of_last(list(self.record.predictions(folder)))

    @cached_property
    def scores(self) -> Scores:
        return scores_of(self.predictions, self.record.problem_type, self.record.data["labels"])

    @cached_property
    def rows(self) -> str:
        """Identifies the evaluated rows, their labels and their file."""
        rows = [(line["id"], line.get("label", line.get("reference"))) for line in self.predictions]
        record, digests = self.record, self.record.data.get("file_digests", {})
        file = (digests.get(record.last.split) or digests.get("train", "")).partition("-")[
            0
        ]  # without how it is read
        return dumps(
            [record.last.split, record.problem_type, record.data.get("labels"), file, rows]
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The model by its digest, as paths differ between machines."""
        settings, identity = self.record.settings, self.record.config.get("identity", {})
        return settings | {
            "model_name_or_path": identity.get("model", settings.get("model_name_or_path"))
        }

    def job(self, *ignored: str) -> str:
        """Identifies the training, however it was distributed: model, data and settings but the ignored ones."""
        settings = {
            name: value
            for name, value in self.settings.items()
            if name not in _NOT_OF_JOB.union(ignored)
        }
        return dumps([settings, self.settings["model_name_or_path"], self.record.data["digest"]])


def compare(folders: Sequence[str | Path]) -> tuple[dict[str, Any], list[ComparedRun]]:
    """(the object that `toolkit compare --json` prints, the compared runs, the best first). Raises UserError for
    folders without a run, and if no two runs can be compared."""
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder).rstrip("/") for folder in folders]
    runs = [ComparedRun(Path(folder), name) for folder, name in zip(folders, names, strict=True)]
    counts = collections.Counter(run.rows for run in runs if run.predictions)
    reference = max(runs, key=lambda run: counts[run.rows])
    left_out = {
        run.name: reason for run in runs if (reason := _reason_to_leave_out(run, reference))
    }
    if len(runs) - len(left_out) < min(2, len(runs)):
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise UserError(f"these runs cannot be compared: {reasons}")
    best = reference.record.best
    runs = [run for run in runs if run.name not in left_out]
    values = {
        run.name: run.record.last.numbers[best.metric] for run in runs
    }  # None: it was not finite
    runs.sort(
        key=lambda run: math.inf if values[run.name] is None else -best.sign * values[run.name]
    )
    measured = [_measure(run, runs, best.metric) for run in runs]
    return {
        "metric": best.metric, "greater_is_better": best.sign > 0, "split": reference.record.last.split,
        "num_samples": reference.record.last.numbers["num_samples"], "settings": _differing_settings(runs),
        "runs": measured, "seeds": _seeds(runs, measured), "left_out": left_out,
    }, runs  # fmt: skip


def _reason_to_leave_out(run: ComparedRun, reference: ComparedRun) -> str:
    """Why a run cannot be compared with the reference; "" if it can."""
    metric = reference.record.best.metric
    if not run.predictions:
        return "its predictions.jsonl is not from a finished evaluation (was it killed?): resume it until it ends"
    if run.rows != reference.rows:
        remedy = "pass the same --data_seed to all runs, or evaluate the same file"
        return f"it was evaluated on other rows or labels than {reference.name}: {remedy}"
    if metric not in run.record.last.numbers:
        return f"it has no {metric}, the --metric_for_best_model of {reference.name}"
    if metric == "loss" and (names := LOSS_SETTINGS & _differing_settings([run, reference]).keys()):
        return f"runs are compared by loss, which {reference.name} defines differently ({', '.join(sorted(names))})"
    return ""


def _differing_settings(runs: Sequence[ComparedRun]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, where they differ. Paths of files with the same content do not count."""
    same_data = len({run.record.config.get("identity", {}).get("data") for run in runs}) == 1
    ignored = _NOT_SHOWN | _FILE_SETTINGS if same_data else _NOT_SHOWN
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ignored)
    values = {name: {run.name: run.settings.get(name) for run in runs} for name in names}
    return {
        name: by_run for name, by_run in values.items() if len(set(map(dumps, by_run.values()))) > 1
    }


def _measure(run: ComparedRun, runs: Sequence[ComparedRun], metric: str) -> dict[str, Any]:
    """A run's metrics with their intervals and the p of their differences from the best run, the first; its costs."""
    record, world = run.record, run.record.config["world"]
    metrics: dict[str, Any] = {
        name: {"value": record.last.numbers[name]} for name in (metric, "loss")
    }
    metrics |= intervals(run.scores)
    if run is not runs[0]:
        for name, p in p_values(run.scores, runs[0].scores).items():
            metrics[name]["p"] = p
    first = next(other for other in runs if other.job() == run.job())
    # the largest of a step; NaN without a common step
    difference = (
        (values_of(record.steps, "loss") / values_of(first.record.steps, "loss") - 1).abs().max()
    )
    return {
        "name": run.name, "folder": str(run.folder), "metrics": metrics, "strategy": record.strategy,
        "mixed_precision": world["mixed_precision"], "device": world["device"],
        "loss_difference": None if run is first or math.isnan(difference) else float(difference),
        "total_steps": record.data["total_steps"], **record.cost,
    }  # fmt: skip


def _seeds(runs: Sequence[ComparedRun], measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over runs that differ only in the seed; `measured`: the metrics of each run."""
    names = list(measured[0]["metrics"])
    table = pd.DataFrame(
        {"run": run.name, "job": run.job("seed"), "seed": run.settings.get("seed")}
        | {name: metric["value"] for name, metric in measures["metrics"].items()}
        for run, measures in zip(runs, measured, strict=True)
    ).drop_duplicates(["job", "seed"])
    groups = [group for _, group in table.groupby("job", sort=False) if len(group) > 1]
    return [
        {
            "runs": list(group["run"]),
            "metrics": group[names].astype(float).agg(["mean", "std", "min", "max"]).to_dict(),
        }
        for group in groups
    ]


# Tables and notes, for the terminal and the page


def as_text(comparison: dict[str, Any]) -> str:
    lines = notes(comparison)
    with pd.option_context("display.unicode.east_asian_width", True):
        for title, table in tables(comparison).items():
            lines += ["", f"{title}:", table.to_string()]
    return "\n".join(lines)


def tables(comparison: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """Title -> texts in cells, a row for each run or group of runs."""
    runs, settings = comparison["runs"], comparison["settings"]
    names = [
        name for name in runs[0]["metrics"] if name != "loss" or not settings.keys() & LOSS_SETTINGS
    ]
    results = [
        {setting: format_setting(values[run["name"]]) for setting, values in settings.items()}
        | {name: _format_metric(**run["metrics"][name]) for name in names}
        for run in runs
    ]
    costs = [
        {name: format_number(run[name]) for name in _COSTS}
        | {
            "steps": f"{run['steps']:,} of {run['total_steps']:,}",
            "peak_memory": size_text(run["peak_memory_bytes"] or 0),
        }
        for run in runs
    ]
    seeds = [
        {
            name: "{mean:.4f} ± {std:.4f} ({min:.4f} to {max:.4f})".format(**group["metrics"][name])
            for name in names
        }
        for group in comparison["seeds"]
    ]
    title = f"{comparison['num_samples']:,} rows of {comparison['split']}, 95 % confidence intervals in brackets"
    index = pd.Index(run["name"] for run in runs)
    by_title = {title: pd.DataFrame(results, index), "What each took": pd.DataFrame(costs, index)}
    if seeds:
        index = pd.Index(", ".join(group["runs"]) for group in comparison["seeds"])
        by_title["Over seeds: mean ± standard deviation (lowest to highest)"] = pd.DataFrame(
            seeds, index
        )
    return by_title


def notes(comparison: dict[str, Any]) -> list[str]:
    """Which runs the best one clearly differs from, and which were left out."""
    best, *others = comparison["runs"]
    lines = [f"Best by {comparison['metric']}: {best['name']}"]
    if others:
        tested = next(name for name in best["metrics"] if "p" in others[0]["metrics"][name])
        p = {run["name"]: run["metrics"][tested]["p"] for run in others}
        clear = [name for name in p if p[name] < _SIGNIFICANT]
        unclear = [name for name in p if p[name] >= _SIGNIFICANT]
        lines += [f"Clear difference in {tested} (p < {_SIGNIFICANT}): {listing(clear)}"] * bool(
            clear
        )
        lines += [f"No clear difference in {tested}: {listing(unclear)}"] * bool(unclear)
    if comparison["settings"].keys() & LOSS_SETTINGS:
        lines.append("Losses are not compared, as their definitions differ")
    return lines + [f"Left out: {name}: {why}" for name, why in comparison["left_out"].items()]


def _format_metric(
    value: float | None, low: float | None = None, high: float | None = None, p: float | None = None
) -> str:
    """`0.8500 [0.8300, 0.8700] p 0.03`."""
    interval = "" if low is None else f" [{low:.4f}, {high:.4f}]"
    return f"{format_number(value)}{interval}{'' if p is None else f' p {p:.2g}'}"


# Confidence intervals of metrics (bootstrap over rows), and paired permutation tests between two runs


class Scores(NamedTuple):
    """One run's M metrics, as a function of the mean over N rows of F features."""

    names: Sequence[str]
    rows: Any
    """(N, F) sparse; for classes the first column is 1 if the row's whole prediction is right."""
    metrics: Callable[[np.ndarray], np.ndarray] = np.asarray
    """(R, F) means over rows -> (R, M)."""


def scores_of(lines: Sequence[dict[str, Any]], problem_type: str, classes: Sequence[str]) -> Scores:
    """Lines of predictions.jsonl -> scores."""
    if "scores" in lines[0]:
        names = sorted(lines[0]["scores"])
        weights = np.array([[line.get("weight", 1.0)] for line in lines], np.float64)
        weighted = weights * [[float(line["scores"][name]) for name in names] for line in lines]
        rows = sparse.csr_array(np.hstack([weighted, weights]))
        return Scores(
            names,
            rows,
            lambda means: means[..., :-1] / np.maximum(means[..., -1:], np.finfo(float).tiny),
        )
    if problem_type == "regression":
        errors = np.array(
            [np.subtract(line["prediction"], line["label"]) for line in lines]
        ).reshape(len(lines), -1)
        rows = np.stack([np.abs(errors).mean(axis=1), np.square(errors).mean(axis=1)], axis=1)
        return Scores(("mae", "mse"), sparse.csr_array(rows))
    binarizer = MultiLabelBinarizer(classes=classes, sparse_output=True)

    def label_sets(key: str) -> Any:
        labels = (
            line[key] for line in lines
        )  # a name, None if the model abstained, or a list of names
        return binarizer.fit_transform([[x] if isinstance(x, str) else x or [] for x in labels])

    return class_scores(label_sets("label"), label_sets("prediction"), problem_type)


def class_scores(truth: Any, guess: Any, problem_type: str) -> Scores:
    """Sparse one-hot (N, C) labels and predictions -> scores."""
    truth, guess = (
        sparse.csr_array(truth, dtype=np.float64),
        sparse.csr_array(guess, dtype=np.float64),
    )
    several = problem_type == "multi_label_classification"

    def metrics(means: np.ndarray) -> np.ndarray:
        hits, true, guessed = np.split(means[:, 1:], 3, axis=1)  # (R, C) each
        tiny = np.finfo(float).tiny  # for classes that are neither labels nor predictions: 0 / 0
        f1_macro = (2 * hits / np.maximum(true + guessed, tiny)).mean(axis=1)
        f1_micro = 2 * hits.sum(axis=1) / np.maximum((true + guessed).sum(axis=1), tiny)
        return np.stack([means[:, 0], f1_macro, *[f1_micro] * several], axis=1)

    right = np.asarray(abs(truth - guess).sum(axis=1)).ravel() == 0
    rows = sparse.hstack(
        [sparse.csr_array(right[:, None].astype(float)), truth.multiply(guess), truth, guess], "csr"
    )
    return Scores(["accuracy", "f1_macro", *["f1_micro"] * several], rows, metrics)


def intervals(scores: Scores) -> dict[str, dict[str, float]]:
    """Each metric's `value`, with its 95 % percentile interval over resampled rows (`low`, `high`)."""
    count = scores.rows.shape[0]

    def statistic(rows: np.ndarray, axis: int = -1) -> np.ndarray:
        """(B, N) numbers of rows -> (M, B) metrics."""
        weights = np.stack(
            [np.bincount(sample, minlength=count) for sample in rows], axis=1
        ).astype(float)  # (N, B)
        return scores.metrics((scores.rows.T @ weights).T / count).T

    low = high = values = statistic(np.arange(count)[None])[:, 0]
    if count > 1:  # scipy refuses a single row
        low, high = stats.bootstrap(
            (np.arange(count),), statistic, vectorized=True, method="percentile", rng=0, **_resamples(count),
        ).confidence_interval  # fmt: skip
    rows = zip(scores.names, *np.stack([values, low, high]).tolist(), strict=True)
    return {name: {"value": value, "low": low, "high": high} for name, value, low, high in rows}


def p_values(one: Scores, other: Scores) -> dict[str, float]:
    """Two-sided p of each metric's difference between two models on the same rows, by a paired permutation test, which
    swaps the two models' predictions of random rows (for accuracy this is McNemar's test)."""
    change = other.rows - one.rows
    change = change[abs(change).sum(axis=1) > 0].T  # (F, D): the D rows whose predictions differ
    count, differing = one.rows.shape[0], change.shape[1]
    if differing < 2:  # swapping a single row gives a difference of the same size
        return dict.fromkeys(one.names, 1.0)

    def statistic(swapped: np.ndarray, _: np.ndarray, axis: int = -1) -> np.ndarray:
        """(..., D), 1 if the predictions are swapped -> (..., M) differences."""
        moved = (change @ swapped.reshape(-1, differing).T).T / count
        difference = one.metrics(one.rows.mean(axis=0) + moved) - other.metrics(
            other.rows.mean(axis=0) - moved
        )
        return difference.reshape(*swapped.shape[:-1], -1)

    p = stats.permutation_test(
        (np.zeros(differing), np.ones(differing)), statistic, permutation_type="samples", vectorized=True, rng=0,
        **_resamples(differing),
    ).pvalue  # fmt: skip
    return dict(zip(one.names, p.tolist(), strict=True))


def _resamples(rows: int) -> dict[str, int]:
    """1,000, and fewer above 100,000 rows, where fewer are in memory, too."""
    count = max(_MIN_RESAMPLES, min(_RESAMPLES, _MAX_DRAWS // rows))
    return {"n_resamples": count, "batch": max(1, min(_MAX_BATCH, _MAX_BATCH_DRAWS // rows))}
