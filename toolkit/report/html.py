"""report.html: a run on one page, a single file that loads nothing from the network."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from toolkit.checkpoint.model_folder import read_step
from toolkit.data.labels import REGRESSION, SINGLE
from toolkit.data.token_files import load_split
from toolkit.evaluation import Evaluation
from toolkit.report import curves
from toolkit.report.files import write_atomically
from toolkit.report.record import Record, results
from toolkit.report.templates import render, render_blocks
from toolkit.utils.cache import cache_folder
from toolkit.utils.features import features
from toolkit.utils.log import logger

_MAX_MISTAKES = 20


@dataclass(frozen=True)
class Page:
    """The argument of `Feature.page`."""

    folder: Path
    record: Record
    last: Evaluation
    """The evaluation of the rows in predictions.jsonl."""
    texts: Sequence[str]
    """The texts of its rows; empty if this machine does not have them."""


class Mistake(NamedTuple):
    """A wrong prediction."""

    error: float
    """Of classes the largest difference between a probability and the truth, 0 or 1; of regression
    the absolute error, mean over its numbers."""
    line: Mapping[str, Any]
    """Of predictions.jsonl."""
    text: str


def write_report_of_folder(folder: str | Path) -> Path:
    """Writes the report from the files of a run, and returns its path. The texts come from the
    cache of this machine, if it still has them. Raises UserError if `folder` holds no run."""
    record = Record.load(Path(folder))
    prepared = cache_folder() / "tokens" / str(record.data["digest"])
    split = record.last.split
    texts: Sequence[str] = ()
    if (prepared / split).is_dir():
        texts = load_split(prepared, split).texts()
    elif record.evaluations:
        why = "the page has no texts, as this machine's cache lacks them"
        remedy = "`toolkit prepare` with the run's settings makes them again"
        logger.warning(f"{folder}: {why}: {remedy}")
    write_report(record, texts)
    return record.folder / "report.html"


def write_report(record: Record, texts: Sequence[str], name: str = "") -> None:
    """Writes report.html into the run's folder atomically. `texts` are those of the rows in
    predictions.jsonl, or empty; `name` is the folder's on the page, if it is a draft."""
    last = record.last
    context: dict[str, Any] = {
        "record": record,
        "config": record.config,
        "last": last,
        "folder": name or record.folder.resolve().name,
        "results": results(last.numbers),
        "saved_step": read_step(record.folder / "model"),
        "charts": curves.charts(record),
        "texts": texts,
        "confusion": None,
        "num_samples": 0,
        "num_unanswered": 0,
    }
    if record.data.get("labels"):
        context |= _predictions(record, texts)
    context["blocks"] = []
    context["links"] = {}
    page = Page(record.folder, record, last, texts)
    for feature in features():
        part = feature.page(page)
        if part:
            context["blocks"].append(
                render_blocks(part.template, {**context, **part.context})
            )
            context["links"] |= part.links
    write_atomically(record.folder / "report.html", [render("report.html", context)])


def _predictions(record: Record, texts: Sequence[str]) -> dict[str, Any]:
    """The template's variables about predictions.jsonl; it is read twice, as its probabilities may
    not fit into memory."""
    pairs = [(line["label"], line["prediction"]) for line in record.predictions()]
    answered = [
        (label, prediction) for label, prediction in pairs if prediction is not None
    ]
    mistakes = _mistakes(record, texts)
    context: dict[str, Any] = {
        "num_samples": len(pairs),
        "num_unanswered": len(pairs) - len(answered),
        "num_wrong": sum(label != prediction for label, prediction in answered),
        "worst": heapq.nlargest(_MAX_MISTAKES, mistakes, key=lambda mistake: mistake.error),
    }
    if answered and record.problem_type == SINGLE:
        context["confusion"] = _confusion(answered)
    return context


def _mistakes(record: Record, texts: Sequence[str]) -> Iterator[Mistake]:
    """Yields the wrong predictions in the order of the file; a row without an answer is none."""
    names = np.array(record.data["labels"])
    for index, line in enumerate(record.predictions()):
        label, prediction = line["label"], line["prediction"]
        if prediction is None or prediction == label:
            continue
        if record.problem_type == REGRESSION:
            error = np.abs(np.subtract(prediction, label)).mean()
        else:
            truth = np.isin(names, label)  # (C,)
            error = np.abs(truth - np.array(line["probabilities"])).max()
        yield Mistake(float(error), line, texts[index] if texts else "")


def _confusion(answered: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """(label, prediction) -> how often, label -> how often, and the most confused pairs."""
    counts = collections.Counter(answered)
    totals = collections.Counter(label for label, _ in answered)
    pairs = []
    for (truth, guess), count in counts.most_common():
        if truth != guess:
            pairs.append((truth, guess, count, count / totals[truth]))
    return {"counts": counts, "totals": totals, "pairs": pairs}
