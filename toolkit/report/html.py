"""report.html: a run on one page, in one file, without the network."""

from __future__ import annotations

import collections
import heapq
import json
import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.labels import Labels
from toolkit.data.tokens import load_split
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation
from toolkit.features.baselines.baselines import read_baselines
from toolkit.features.folds.label_errors import worst_slices
from toolkit.features.folds.page import write_folds
from toolkit.features.folds.split import FOLDS
from toolkit.report import curves
from toolkit.report.files import write_whole
from toolkit.report.record import Record, last_evaluation, plain, render, run_config
from toolkit.utils.cache import cache_folder
from toolkit.utils.files import refuse_link_out

MOST_MATRIX_CLASSES = 40
"""Above it, the pairs that are confused most stand for the whole matrix."""
MOST_PAIRS = 30
MOST_MISTAKES = 20
MOST_CHARACTERS = 300
HANDFUL = 8
"""Titles that are shown of each kind."""


@dataclass(slots=True)
class Sample:
    """A line of predictions.jsonl, without what is needed for the worst only."""

    place: int
    row: int
    label: Any
    prediction: Any
    wrong: bool
    held_back: bool = False
    """By `--abstain_below`: never wrong, whatever `prediction` would have been answered."""
    badness: float = 0.0
    """Greater is worse."""
    missed: Sequence[tuple[str, float]] = ()
    """Labels that were not predicted, with their probabilities."""
    added: Sequence[tuple[str, float]] = ()
    """Predictions that are not labels."""


@dataclass(frozen=True, slots=True)
class Title:
    """A line of predictions.jsonl of a run that writes titles."""

    place: int
    row: int
    written: str
    reference: str
    rouge: float
    """ROUGE-L."""


def write_report(
    folder: Path,
    last: Evaluation,
    texts: Sequence[str],
    explained_rows: int = 0,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Writes `folder`/report.html, whole or not at all.

    `last` is the evaluation that predictions.jsonl is of, `texts` are its samples' (or empty), and `groups` say of
    each sample what it has in common with others (its length, its source). Of so many of the worst mistakes the saved
    model says which words led to them.
    Raises ValueError where the number of texts is another, OSError where a file is missing.
    """
    record = Record.load(folder, last)
    samples = _titles_shown if record.problem_type == "title_generation" else _samples_shown
    context: dict[str, Any] = {
        "record": record,
        "config": record.config,
        "problem_type": record.problem_type,
        "last": last,
        "folder": folder.resolve().name,
        "charts": curves.charts(record),
        "smoothed": curves.window_of(len(record.steps)) > 1,
        "has_texts": bool(texts),
        "sureness": _sureness(last),
        "baselines": read_baselines(folder, last),
        "confusion": None,
        "num_samples": 0,
        "num_held_back": 0,
        "slices": [],
        "examples": {},
        "explanations": {},
        **samples(record, folder, texts, groups or {}),
    }
    if explained_rows and texts and context.get("worst"):
        from toolkit.features.explain.page import explain

        worst = [sample for sample, _ in context["worst"]]
        context["explanations"] = explain(folder, record.data, worst, texts, explained_rows)
    write_whole(folder / "report.html", [render("report.html", context, **_FILTERS)])


def write_report_of_folder(folder: str | Path, explained_rows: int = 0) -> Path:
    """Writes the report again from the run's own files, and returns its path; `explained_rows` as in `write_report`.

    The texts are those the run prepared, where this machine still has them. Raises UserError where
    `folder` holds no run.
    """
    folder = Path(folder)
    if (folder / FOLDS).is_file():
        write_folds(folder)
        return folder / "report.html"
    data = run_config(folder)["data"]
    last = last_evaluation(folder)
    cache = cache_folder() / "tokens"
    prepared = cache / str(data["digest"])
    refuse_link_out(prepared, cache)
    refuse_link_out(prepared / str(last.split), prepared)
    there = last.numbers and (prepared / last.split).is_dir()
    split = load_split(prepared, last.split) if there else None
    texts = split.texts() if split else []
    if explained_rows:
        _refuse_explanations(folder, data["problem_type"], texts)
    write_report(folder, last, texts, explained_rows, split.groups() if split else None)
    return folder / "report.html"


def _refuse_explanations(folder: Path, problem_type: str, texts: Sequence[str]) -> None:
    """Raises UserError where nothing can be explained."""
    if problem_type == "title_generation":
        raise UserError("--explain is for classes and numbers, and this run writes titles")
    if not (folder / "model" / "config.json").is_file():
        raise UserError(f"--explain needs the saved model, and there is no {folder / 'model' / 'config.json'}")
    if not texts:
        raise UserError(
            "--explain needs the texts of the last evaluation, and the cache of this machine does not have them: "
            "`toolkit prepare` with the run's settings makes them again"
        )


def _sureness(last: Evaluation) -> list[curves.Chart]:
    """The drawings of tuned decisions."""
    found = last.numbers.get("decisions")
    if found is None:
        return []
    drawn = [curves.reliability(found["before"], found["after"])]
    return drawn + ([curves.coverage(found["coverage"], found["abstain_below"])] if "coverage" in found else [])


def _is_stacked(name: str) -> bool:
    """Names in Chinese, Japanese or Korean are set one character below the other."""
    return re.fullmatch(r"[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uff60]+", name) is not None


def _median(lines: Sequence[dict[str, Any]], name: str) -> str:
    return f"{statistics.median(line[name] for line in lines):,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


_FILTERS: dict[str, Any] = {
    "setting": plain,
    "pretty": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    "stacks": _is_stacked,
    "median": _median,
    "duration": _duration,
}


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS].rstrip()}…"


def _check_number(folder: Path, count: int, texts: Sequence[str]) -> None:
    if texts and len(texts) != count:
        raise ValueError(f"{folder}/predictions.jsonl has {count} lines, and there are {len(texts)} texts")


# Samples


def _samples_shown(
    record: Record, folder: Path, texts: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What the page says of each sample of a run with labels."""
    labels = Labels(record.data["problem_type"], tuple(record.data["labels"]), ())
    regression = labels.problem_type == "regression"
    samples = [_judged(place, line, labels) for place, line in enumerate(record.predictions(folder))]
    _check_number(folder, len(samples), texts)
    wrong, held_back = ([own for own in samples if getattr(own, name)] for name in ("wrong", "held_back"))
    answered = [sample for sample in samples if not sample.held_back]
    # a NaN has no order, and is as wrong as can be
    worst = heapq.nlargest(MOST_MISTAKES, wrong, key=lambda s: math.inf if math.isnan(s.badness) else s.badness)
    return {
        "scatter": _scatter(samples) if regression else None,
        "confusion": _confusion(samples, labels) if labels.problem_type == "single_label_classification" else None,
        "worst": [(sample, _shortened(texts[sample.place]) if texts else "") for sample in worst],
        "num_samples": len(samples),
        "num_wrong": len(wrong),
        "num_held_back": len(held_back),
        "num_held_wrong": sum(sample.label != sample.prediction for sample in held_back),
        "slices": []
        if regression
        else worst_slices(
            np.array([sample.wrong for sample in answered]),
            {name: [values[sample.place] for sample in answered] for name, values in groups.items()},
        ),
    }


def _scatter(samples: Sequence[Sample]) -> curves.Chart | None:
    """Of several numbers, each is a dot."""
    true, predicted = (np.ravel([getattr(own, name) for own in samples]) for name in ("label", "prediction"))
    return curves.scatter(list(zip(true.tolist(), predicted.tolist(), strict=True)))


def _judged(place: int, line: dict[str, Any], labels: Labels) -> Sample:
    label, prediction = line["label"], line["prediction"]
    held_back = line.get("held_back", False)
    sample = Sample(place, line["id"] + 1, label, prediction, label != prediction and not held_back, held_back)
    if labels.problem_type == "regression":
        sample.badness = float(np.abs(np.subtract(prediction, label)).mean())
    elif sample.wrong:
        known = [math.nan if chance is None else chance for chance in line["probabilities"]]  # null in the file
        chances = dict(zip(labels.names, known, strict=True))
        single = labels.problem_type == "single_label_classification"
        true, guessed = ([label], [prediction]) if single else (label, prediction)
        sample.missed = [(name, chances[name]) for name in true if name not in guessed]
        sample.added = [(name, chances[name]) for name in guessed if name not in true]
        if single:  # bad is: sure of it
            sample.badness = chances[prediction]
        else:  # bad is the loss: the mean over classes of the binary cross entropy, of chances written with 6 digits
            right = [chance if name in label else 1 - chance for name, chance in chances.items()]
            sample.badness = -sum(math.log(max(chance, 5e-7)) for chance in right) / len(right)
    return sample


def _confusion(samples: Sequence[Sample], labels: Labels) -> dict[str, Any]:
    """The matrix where it can be read, and the pairs that are confused most where it is large."""
    counts = collections.Counter((sample.label, sample.prediction) for sample in samples)
    totals = collections.Counter(sample.label for sample in samples)
    whole = labels.size <= MOST_MATRIX_CLASSES
    pairs = [(truth, guess, n, n / totals[truth]) for (truth, guess), n in counts.most_common() if truth != guess]
    shown = MOST_PAIRS if not whole else 10 if labels.size > 8 else 0
    return {
        "names": labels.names,
        "counts": counts if whole else {},
        "totals": totals,
        "pairs": pairs[:shown],
        "num_pairs": len(pairs),
    }


# Titles


def _titles_shown(record: Record, folder: Path, texts: Sequence[str], _: Any) -> dict[str, Any]:
    """What the page says of each sample of a run that writes titles; letter case and spaces do not count."""
    titles = [
        Title(place, line["id"] + 1, line["title"].strip(), line["reference"], line["scores"]["rougeL"])
        for place, line in enumerate(record.predictions(folder))
    ]
    _check_number(folder, len(titles), texts)

    def example(title: Title) -> tuple[Title, str, str, str]:
        """(it, its text, what was written, the reference), the three as they are shown."""
        text = texts[title.place] if texts else ""
        return title, _shortened(text), _shortened(title.written), _shortened(title.reference)

    plain = [_plain(title.written) for title in titles]
    commonest = collections.Counter(title.written for title in titles if title.written).most_common(1)
    return {
        "examples": {name: [*map(example, some)] for name, some in _handfuls(titles).items()},
        "num_titles": len(titles),
        "num_empty": plain.count(""),
        "num_copies": sum(own == _plain(title.reference) for own, title in zip(plain, titles, strict=True)),
        "num_lifted": sum(own != "" and own in _plain(text) for own, text in zip(plain, texts, strict=False)),
        "commonest": [(_shortened(written), count) for written, count in commonest if count > 1],
    }


def _handfuls(titles: Sequence[Title]) -> dict[str, list[Title]]:
    """Which titles are shown; those at random are the same rows in every run on the same samples."""
    if len(titles) <= HANDFUL:
        return {"all": list(titles)} if titles else {}
    chosen = random.Random(0).sample(range(len(titles)), HANDFUL)
    ordered = sorted(titles, key=lambda title: title.rouge)
    few = min(HANDFUL, len(titles) // 2)
    return {
        "random": [titles[place] for place in sorted(chosen)],
        "worst": ordered[:few],
        "best": ordered[: -few - 1 : -1],
    }


def _plain(text: str) -> str:
    return "".join(text.casefold().split())
