"""report.html: a run on one page, a single file that loads nothing from the network."""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd

from toolkit.data.labels import Labels
from toolkit.data.tokens import load_split
from toolkit.errors import UserError, first_line
from toolkit.evaluation import Evaluation
from toolkit.report import curves
from toolkit.report.files import Record, last_evaluation, run_config, write_atomically
from toolkit.report.templates import render, render_blocks
from toolkit.utils.cache import cache_folder
from toolkit.utils.features import features
from toolkit.utils.log import logger

_MAX_MATRIX_CLASSES, _MAX_PAIRS, _MAX_MISTAKES = 40, 30, 20
MAX_CHARACTERS = 300
MIN_ROWS, _MAX_SLICES = 10, 15  # of groups of rows with more errors than average


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
    """The loss, the error, or the confidence in a wrong class: the worst mistakes have the greatest."""
    missed: Sequence[tuple[str, float]] = ()
    """Labels that were not predicted, with their probabilities."""
    added: Sequence[tuple[str, float]] = ()
    """Predictions that are not labels, with their probabilities."""


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

    `last` is the evaluation of the rows in predictions.jsonl, `texts` are their texts (or empty), `groups` maps the
    name of a grouping (length, source) to the group of each row, `name` is the folder's on
    the page, if `folder` is a draft.
    Raises ValueError for another number of texts than rows, OSError if a file is missing.
    """
    record, rows = Record.load(folder, last), last.numbers.get("num_samples", 0)
    if texts and len(texts) != rows:
        raise ValueError(f"{last.split} has {rows} rows, and there are {len(texts)} texts")
    samples = (
        _sample_context(record, folder, texts, groups or {})
        if record.data.get("labels")
        else {"worst": []}
    )
    context: dict[str, Any] = {
        "record": record, "config": record.config, "problem_type": record.problem_type, "last": last,
        "folder": name or folder.resolve().name, "charts": curves.charts(record), "has_texts": bool(texts),
        "confusion": None, "num_samples": 0, "num_abstained": 0, "slices": [], **samples,
    }  # fmt: skip
    page = Page(folder, record, last, texts)
    parts, context["blocks"] = [], []
    for feature in features():
        if part := feature.page(page):
            parts.append(part)
            try:
                blocks = render_blocks(part.template, {**context, **part.context})
            except jinja2.TemplateError as error:
                raise UserError(
                    f"the template of {type(feature).__name__}.page: {first_line(error)}"
                ) from error
            context["blocks"].append(blocks)
    context["links"] = {place: name for part in parts for place, name in part.links.items()}
    write_atomically(folder / "report.html", [render("report.html", context)])


def write_report_of_folder(folder: str | Path) -> Path:
    """Writes the report from the files of a run, and returns its path. The texts come
    from the cache of this machine, if it still has them. Raises UserError if `folder` holds no run."""
    folder = Path(folder)
    data = run_config(folder)["data"]
    last = last_evaluation(folder)
    prepared = cache_folder() / "tokens" / str(data["digest"])
    has_texts = last.numbers and (prepared / last.split).is_dir()
    split = load_split(prepared, last.split) if has_texts else None
    if last.numbers and not split:
        remedy = (
            "`toolkit prepare` with the run's settings, or `toolkit evaluate`, makes them again"
        )
        logger.warning(
            f"{folder}: the page has no texts, as this machine's cache lacks them: {remedy}"
        )
    texts = split.texts() if split else []
    write_report(folder, last, texts, split.groups() if split else None)
    return folder / "report.html"


def truncate(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS].rstrip()}…"


def _sample_context(
    record: Record, folder: Path, texts: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The template's variables about the predictions of a run with labels."""
    labels = Labels(record.data["problem_type"], tuple(record.data["labels"]), ())
    lines = enumerate(record.predictions(folder))
    samples = record.of_last([read_sample(place, line, labels) for place, line in lines])
    if len(samples) != record.last.numbers.get("num_samples", 0):
        logger.warning(
            f"{folder}/predictions.jsonl is not of the last evaluation: the report has no mistakes"
        )
    wrong = [sample for sample in samples if sample.wrong]
    abstained = [sample for sample in samples if sample.abstained]
    worst = heapq.nlargest(
        _MAX_MISTAKES, wrong, key=lambda s: math.inf if math.isnan(s.severity) else s.severity
    )
    context: dict[str, Any] = {
        "worst": [(sample, truncate(texts[sample.place]) if texts else "") for sample in worst],
        "num_samples": len(samples), "num_wrong": len(wrong), "num_abstained": len(abstained),
        "num_abstained_wrong": sum(sample.label != sample.prediction for sample in abstained), "scatter": None,
    }  # fmt: skip
    if labels.problem_type == "regression":  # each number of a row is a dot
        true, predicted = (
            np.ravel([getattr(sample, name) for sample in samples])
            for name in ("label", "prediction")
        )
        return context | {"scatter": curves.scatter(true, predicted)}
    if labels.problem_type == "single_label_classification":
        context["confusion"] = _confusion(samples, labels)
    answered = [sample for sample in samples if not sample.abstained]
    groups = {
        name: [values[sample.place] for sample in answered] for name, values in groups.items()
    }
    return context | {
        "slices": worst_slices(np.array([sample.wrong for sample in answered]), groups)
    }


def read_sample(place: int, line: dict[str, Any], labels: Labels) -> Sample:
    """A line of `Record.predictions` -> `Sample`."""
    label, prediction = line["label"], line["prediction"]
    abstained = line.get("abstained", False)
    sample = Sample(
        place, line["id"] + 1, label, prediction, label != prediction and not abstained, abstained
    )
    if labels.problem_type == "regression":
        sample.severity = float(np.abs(np.subtract(prediction, label)).mean())
    elif sample.wrong:
        numbers = [
            math.nan if number is None else number for number in line["probabilities"]
        ]  # null in the file
        probabilities = dict(zip(labels.names, numbers, strict=True))
        single = labels.problem_type == "single_label_classification"
        true, guessed = ([label], [prediction]) if single else (label, prediction)
        sample.missed = [(name, probabilities[name]) for name in true if name not in guessed]
        sample.added = [(name, probabilities[name]) for name in guessed if name not in true]
        if single:
            sample.severity = probabilities[prediction]
        else:  # binary cross entropy, mean over classes; probabilities have 6 digits
            right = [
                number if name in label else 1 - number for name, number in probabilities.items()
            ]
            sample.severity = -sum(math.log(max(number, 5e-7)) for number in right) / len(right)
    return sample


def _confusion(samples: Sequence[Sample], labels: Labels) -> dict[str, Any]:
    """The confusion matrix of few classes, and the most confused pairs of many."""
    counts = collections.Counter((sample.label, sample.prediction) for sample in samples)
    totals = collections.Counter(sample.label for sample in samples)
    has_matrix = labels.size <= _MAX_MATRIX_CLASSES
    pairs = [
        (truth, guess, n, n / totals[truth])
        for (truth, guess), n in counts.most_common()
        if truth != guess
    ]
    max_pairs = _MAX_PAIRS if not has_matrix else 10 if labels.size > 8 else 0
    matrix = {"counts": counts if has_matrix else {}, "totals": totals}
    return {"names": labels.names, "pairs": pairs[:max_pairs], "num_pairs": len(pairs), **matrix}


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
    """The slices whose error rate is more than two standard deviations above that of all rows, the worst first.
    `wrong`: (N,) bool; `groups`: column -> each row's value."""
    share, slices = float(wrong.mean()) if len(wrong) else 0.0, []
    for name, values in groups.items() if 0 < share < 1 else ():
        for value, rows, slice_share in (
            pd.Series(wrong).groupby(list(values)).agg(["size", "mean"]).itertuples()
        ):
            if MIN_ROWS <= rows < len(wrong):
                deviations = (slice_share - share) / math.sqrt(share * (1 - share) / rows)
                slices.append(Slice(name, value, rows, slice_share, deviations))
    slices.sort(key=lambda slice: -slice.deviations)
    return [slice for slice in slices if slice.deviations > 2][:_MAX_SLICES]
