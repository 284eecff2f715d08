"""report.html: a run on one page, a single file that loads nothing from the network."""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from toolkit.data.labels import Labels
from toolkit.data.tokens import load_split
from toolkit.evaluation import Evaluation
from toolkit.report import curves
from toolkit.report.files import last_evaluation, run_config, write_atomically
from toolkit.report.record import Record
from toolkit.report.templates import render, render_blocks
from toolkit.utils.cache import cache_folder
from toolkit.utils.features import features
from toolkit.utils.log import logger

_MAX_MATRIX_CLASSES = 40
_FEW_CLASSES = 8  # whose matrix shows all pairs
_MAX_PAIRS = 30
_MAX_PAIRS_BELOW = 10  # a matrix
_MAX_MISTAKES = 20
MAX_CHARACTERS = 300
# groups of rows with more errors than average
MIN_ROWS = 10
_MAX_SLICES = 15


@dataclass(slots=True)
class Sample:
    """A line of predictions.jsonl without its probabilities."""

    place: int
    """Index of the line, from 0; `row` is the row in the file, from 1."""
    row: int
    label: Any
    prediction: Any
    wrong: bool
    abstained: bool = False
    """Below `--abstain_below`: such a row does not count as wrong."""
    severity: float = 0.0
    """The loss, the error, or the confidence in a wrong class: the worst mistakes have the
    greatest."""
    missed: Sequence[tuple[str, float]] = ()
    """Labels that were not predicted, with their probabilities."""
    added: Sequence[tuple[str, float]] = ()
    """Predictions that are not labels, with their probabilities."""


# the template's variables about predictions, where there are none
_NO_SAMPLES = {
    "worst": [],
    "num_samples": 0,
    "num_abstained": 0,
    "confusion": None,
    "scatter": None,
    "slices": [],
}


@dataclass(frozen=True)
class Page:
    """The argument of `Feature.page`."""

    folder: Path
    record: Record
    last: Evaluation
    """The evaluation of the rows in predictions.jsonl."""
    texts: Sequence[str]
    """The texts of its rows; empty if this machine does not have them."""


def write_report(
    folder: Path,
    last: Evaluation,
    texts: Sequence[str],
    groups: Mapping[str, Sequence[str]] | None = None,
    name: str = "",
) -> None:
    """Writes `folder`/report.html atomically.

    `last` is the evaluation of the rows in predictions.jsonl, `texts` are their texts (or empty),
    `groups` maps the name of a grouping (length, source) to the group of each row, `name` is the
    folder's on the page, if `folder` is a draft.
    Raises ValueError for another number of texts than rows, OSError if a file is missing.
    """
    record = Record.load(folder, last)
    rows = last.numbers.get("num_samples", 0)
    if texts and len(texts) != rows:
        raise ValueError(f"{last.split} has {rows} rows, and there are {len(texts)} texts")
    context: dict[str, Any] = {
        "record": record,
        "config": record.config,
        "problem_type": record.problem_type,
        "last": last,
        "folder": name or folder.resolve().name,
        "charts": curves.charts(record),
        "has_texts": bool(texts),
        **_NO_SAMPLES,
    }
    if record.data.get("labels"):
        context |= _sample_context(record, folder, texts, groups or {})
    _add_features(context, Page(folder, record, last, texts))
    write_atomically(folder / "report.html", [render("report.html", context)])


def _add_features(context: dict[str, Any], page: Page) -> None:
    """The parts of features: their blocks, and the links to them."""
    context["blocks"] = []
    context["links"] = {}
    for feature in features():
        part = feature.page(page)
        if part:
            blocks = render_blocks(part.template, {**context, **part.context})
            context["blocks"].append(blocks)
            context["links"] |= part.links


def write_report_of_folder(folder: str | Path) -> Path:
    """Writes the report from the files of a run, and returns its path. The texts come from the
    cache of this machine, if it still has them. Raises UserError if `folder` holds no run."""
    folder = Path(folder)
    digest = run_config(folder)["data"]["digest"]
    last = last_evaluation(folder)
    prepared = cache_folder() / "tokens" / str(digest)
    if last.numbers and (prepared / last.split).is_dir():
        split = load_split(prepared, last.split)
        write_report(folder, last, split.texts())
    else:
        if last.numbers:
            why = "the page has no texts, as this machine's cache lacks them"
            remedy = "`toolkit prepare` with the run's settings makes them again"
            logger.warning(f"{folder}: {why}: {remedy}")
        write_report(folder, last, [])
    return folder / "report.html"


def truncate(text: str) -> str:
    text = " ".join(text.split())
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS].rstrip()}…"
    return text


def _sample_context(
    record: Record, folder: Path, texts: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The template's variables about the predictions of a run with labels."""
    labels = Labels(record.data["problem_type"], tuple(record.data["labels"]), ())
    lines = enumerate(record.predictions(folder))
    samples = record.of_last([read_sample(place, line, labels) for place, line in lines])
    if len(samples) != record.last.numbers.get("num_samples", 0):
        why = "is not of the last evaluation: the report has no mistakes"
        logger.warning(f"{folder}/predictions.jsonl {why}")
    answered = [sample for sample in samples if not sample.abstained]
    abstained = [sample for sample in samples if sample.abstained]
    wrong = [sample for sample in samples if sample.wrong]
    worst = heapq.nlargest(_MAX_MISTAKES, wrong, key=lambda sample: sample.severity)
    context: dict[str, Any] = {
        "worst": [(sample, truncate(texts[sample.place]) if texts else "") for sample in worst],
        "num_samples": len(samples),
        "num_wrong": len(wrong),
        "num_abstained": len(abstained),
        "num_abstained_wrong": sum(sample.label != sample.prediction for sample in abstained),
    }
    if labels.problem_type == "regression":  # each number of a row is a dot
        true = np.ravel([sample.label for sample in samples])
        predicted = np.ravel([sample.prediction for sample in samples])
        return {**context, "scatter": curves.scatter(true, predicted)}
    if labels.problem_type == "single_label_classification":
        context["confusion"] = _confusion(samples, labels)
    of_answered = {}
    for name, values in groups.items():
        of_answered[name] = [values[sample.place] for sample in answered]
    is_wrong = np.array([sample.wrong for sample in answered])
    return {**context, "slices": worst_slices(is_wrong, of_answered)}


def read_sample(place: int, line: dict[str, Any], labels: Labels) -> Sample:
    """A line of `Record.predictions` -> `Sample`."""
    label = line["label"]
    prediction = line["prediction"]
    abstained = line.get("abstained", False)
    wrong = label != prediction and not abstained
    sample = Sample(place, line["id"] + 1, label, prediction, wrong, abstained)
    if labels.problem_type == "regression":
        sample.severity = float(np.abs(np.subtract(prediction, label)).mean())
    elif wrong:
        # null in the file: not finite
        numbers = [math.inf if number is None else number for number in line["probabilities"]]
        probabilities = dict(zip(labels.names, numbers, strict=True))
        if labels.problem_type == "single_label_classification":
            sample.missed = [(label, probabilities[label])]
            sample.added = [(prediction, probabilities[prediction])]
            sample.severity = probabilities[prediction]
        else:
            sample.missed = [
                (name, probabilities[name]) for name in label if name not in prediction
            ]
            sample.added = [(name, probabilities[name]) for name in prediction if name not in label]
            sample.severity = _loss(probabilities, label)
    return sample


def _loss(probabilities: Mapping[str, float], label: Sequence[str]) -> float:
    """Binary cross entropy, mean over classes."""
    losses = []
    for name, probability in probabilities.items():
        right = probability if name in label else 1 - probability
        losses.append(-math.log(max(right, 5e-7)))  # probabilities have 6 digits
    return sum(losses) / len(losses)


def _confusion(samples: Sequence[Sample], labels: Labels) -> dict[str, Any]:
    """The confusion matrix of few classes, and the most confused pairs of many."""
    counts = collections.Counter((sample.label, sample.prediction) for sample in samples)
    totals = collections.Counter(sample.label for sample in samples)
    pairs = []
    for (truth, guess), count in counts.most_common():
        if truth != guess:
            pairs.append((truth, guess, count, count / totals[truth]))
    confusion = {"names": labels.names, "counts": counts, "totals": totals, "num_pairs": len(pairs)}
    if labels.size > _MAX_MATRIX_CLASSES:
        return {**confusion, "counts": {}, "pairs": pairs[:_MAX_PAIRS]}
    if labels.size > _FEW_CLASSES:
        return {**confusion, "pairs": pairs[:_MAX_PAIRS_BELOW]}
    return {**confusion, "pairs": []}


class Slice(NamedTuple):
    """The rows that have one value in a column."""

    name: str
    value: str
    rows: int
    wrong: float
    """Error rate, 0 to 1."""
    deviations: float
    """Standard deviations (binomial) above the error rate of all rows."""


def worst_slices(wrong: np.ndarray, groups: Mapping[str, Sequence[str]]) -> list[Slice]:
    """The slices whose error rate is more than two standard deviations above that of all rows, the
    worst first. `wrong`: (N,) bool; `groups`: column -> each row's value."""
    if not len(wrong):
        return []
    share = float(wrong.mean())
    slices = []
    for name, values in groups.items():
        rates = pd.Series(wrong).groupby(list(values)).agg(["size", "mean"])
        for value, rows, rate in rates.itertuples():
            spread = math.sqrt(share * (1 - share) / rows)
            if MIN_ROWS <= rows < len(wrong) and rate > share + 2 * spread:
                slices.append(Slice(name, value, rows, rate, (rate - share) / spread))
    slices.sort(key=lambda slice: -slice.deviations)
    return slices[:_MAX_SLICES]
