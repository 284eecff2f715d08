"""report.html: a run on one page, in one file, without the network."""

from __future__ import annotations

import collections
import heapq
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import demo
from toolkit.cache import cache_folder
from toolkit.config import Task
from toolkit.data.labels import Labels
from toolkit.data.tokens import load_split
from toolkit.errors import UserError
from toolkit.evaluation import Best, Evaluation
from toolkit.report import curves
from toolkit.report.card import (
    READINGS_EXPLAINED,
    base_name,
    explain_rouge,
    is_comparison,
    metric_title,
    readings,
    render,
    results,
)
from toolkit.report.files import by_step, read_lines, write_whole

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
    badness: float = 0.0
    """Greater is worse."""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Title:
    """A line of predictions.jsonl of a run that writes titles."""

    place: int
    row: int
    written: str
    reference: str
    rouge: float
    """ROUGE-L."""


def write_report(folder: Path, last: Evaluation, texts: Sequence[str]) -> None:
    """Writes `folder`/report.html, whole or not at all.

    `last` is the evaluation that predictions.jsonl is of, and `texts` are its samples' (or empty).
    Raises ValueError where the number of texts is another, OSError where a file is missing.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    problem_type: Task = config["data"]["problem_type"]
    steps = by_step(read_lines(folder / "metrics.jsonl"))
    # the confusion matrix of many classes is large, and each line has one
    lines = [_scalars(line) for line in read_lines(folder / "eval.jsonl")]
    evaluations = [line for line in lines if not is_comparison(line)]
    last_step = evaluations[-1]["step"] if evaluations else None
    saved_step = _saved_step(config, evaluations, problem_type)
    max_grad_norm = config["settings"].get("max_grad_norm")
    samples = _titles_shown if problem_type == "title_generation" else _samples_shown
    context = {
        "title": _title(config),
        "config": config,
        "folder": folder.resolve().name,
        "problem_type": problem_type,
        "last": last,
        "last_step": last_step,
        "saved_step": saved_step,
        "results": _loss_last(results(last, problem_type)),
        "rouge_explained": explain_rouge(last),
        "readings_explained": READINGS_EXPLAINED,
        "readings": [
            (length, _loss_last(results(read, problem_type)))
            for length, read in readings(lines, last_step, config["data"]["max_length"], last)
        ],
        "facts": _facts(config, steps),
        "evaluations": evaluations,
        "charts": curves.charts(steps, evaluations, saved_step, max_grad_norm, problem_type),
        "per_class": last.numbers.get("per_class", {}),
        "has_texts": bool(texts),
        "confusion": None,
        "num_samples": 0,
        "examples": {},
        "smoothed": curves.series_of(steps, "loss").window > 1,
        **samples(folder / "predictions.jsonl", config["data"], texts),
    }
    write_whole(folder / "report.html", [render("report.html", context, autoescape=True, **_FILTERS)])


def write_report_of_folder(folder: str | Path) -> Path:
    """Writes the report again from the run's own files, and returns its path.

    The texts are those the run prepared, where this machine still has them. Raises UserError where
    `folder` holds no run.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no run folder: it has no config.json")
    data = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("data")
    if data is None:
        near = f": did you mean {folder.parent}?" if (folder.parent / "metrics.jsonl").is_file() else ""
        raise UserError(f"{folder} is no run folder, its config.json is a model's{near}")
    evaluated = (line for line in read_lines(folder / "eval.jsonl") if not is_comparison(line))
    lines = collections.deque(evaluated, maxlen=1)
    numbers = {name: value for line in lines for name, value in line.items() if name not in ("step", "split")}
    split = lines[0]["split"] if lines else "validation"
    write_report(folder, Evaluation(split, numbers, None), _texts_of(data["digest"], split) if lines else [])
    return folder / "report.html"


def _texts_of(digest: str, split: str) -> list[str]:
    prepared = cache_folder() / "tokens" / digest / split
    return load_split(prepared.parent, split).texts() if prepared.is_dir() else []


def _is_stacked(name: str) -> bool:
    """Names in Chinese, Japanese or Korean are set one character below the other."""
    return re.fullmatch(r"[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uff60]+", name) is not None


_FILTERS: dict[str, Any] = {
    "metric": lambda name, problem_type: {"num_samples": "samples"}.get(name) or metric_title(name, problem_type),
    "setting": lambda value: "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value),
    "pretty": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    "stacks": _is_stacked,
}


# What the files hold


def _scalars(line: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
    return {"step": line["step"], "split": line["split"], **numbers}


def _saved_step(config: dict[str, Any], evaluations: Sequence[dict[str, Any]], problem_type: Task) -> int | None:
    """The best step so far; in a run that was killed it need not be that of the last evaluation."""
    settings = config["settings"]
    named, greater = settings.get("metric_for_best_model"), settings.get("greater_is_better")
    best = Best(named, problem_type, greater_is_better=greater)
    for line in evaluations:
        if line["split"] == evaluations[0]["split"]:
            best.improved(Evaluation(line["split"], line, None), line["step"])
    return best.step or None


def _loss_last(numbers: dict[str, float]) -> dict[str, float]:
    losses = [name for name in numbers if name.startswith("Loss")]
    return {name: numbers[name] for name in [*(name for name in numbers if name not in losses), *losses]}


def _title(config: dict[str, Any]) -> str:
    settings = config["settings"]
    data = (settings.get("dataset_name") or Path(str(settings.get("train_file"))).name).removeprefix(demo.PREFIX)
    return f"{base_name(settings['model_name_or_path']).rsplit('/', 1)[-1]} on {data}"


def _facts(config: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, str]:
    """The run in a few lines."""
    settings, data, world = config["settings"], config["data"], config["world"]
    files = [settings.get(name) for name in ("train_file", "validation_file", "test_file")]
    sizes = ", ".join(f"{size:,} {split}" for split, size in data["samples"].items())
    mixed = world["mixed_precision"]
    precision = "fp32" if mixed in ("no", None) else f"{mixed} mixed precision"
    facts = {
        "Model": f"{settings['model_name_or_path']}",
        "Data": settings.get("dataset_name") or ", ".join(file for file in files if file),
        "Samples": sizes,
        **_learned(data, settings),
        "Length": f"at most {data['max_length']:,} tokens",
        "Steps": _steps_done(data, steps, settings),
        **_speed(steps),
        "Processes": f"{world['num_processes']}, {_strategy(world)}, {precision}",
        "Device": f"{world['device']} on {world['host']}",
        "Memory": f"at most {max(_peaks(steps)) / 2**30:,.2f} GiB in a process" if _peaks(steps) else "",
        "Config": config["launch"].get("config_file") or "",
        "Started": config["started"][:16].replace("T", " ") + " UTC",
    }
    return {name: fact for name, fact in facts.items() if fact}


def _learned(data: dict[str, Any], settings: dict[str, Any]) -> dict[str, str]:
    if data["problem_type"] == "title_generation":
        beams = settings.get("num_beams")
        how = f", written with {beams} beam{'s' * (beams > 1)}" if beams else ""
        return {"Titles": f"at most {data['max_target_length']:,} tokens, column {data['title_column']}{how}"}
    return {"Labels": f"{len(data['labels']):,} classes" if data["problem_type"] != "regression" else "a number"}


def _steps_done(data: dict[str, Any], steps: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    done = steps[-1]["step"] if steps else 0
    epochs = f" ({steps[-1]['epoch']:.2f} epochs)" if steps else ""
    return f"{done:,} of {data['total_steps']:,}{epochs}, {settings['global_batch_size']:,} samples each"


def _speed(steps: list[dict[str, Any]]) -> dict[str, str]:
    timed = [line for line in steps if line["samples_per_second"] > 0]
    if not timed:
        return {}
    seconds = sum(line["samples"] / line["samples_per_second"] for line in timed)
    samples, tokens = (np.median([line[f"{unit}_per_second"] for line in timed]) for unit in ("samples", "tokens"))
    spent = f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
    return {
        "Speed": f"{samples:,.0f} samples/s, {tokens:,.0f} tokens/s (median)",
        "Time": f"{spent if seconds < 6000 else f'{seconds / 3600:,.1f} h'} in training steps",
    }


def _peaks(steps: list[dict[str, Any]]) -> list[int]:
    return [line["peak_memory_bytes"] for line in steps if line.get("peak_memory_bytes")]


def _strategy(world: dict[str, Any]) -> str:
    if world.get("deepspeed"):
        return f"DeepSpeed ZeRO-{world['deepspeed'].get('zero_optimization', {}).get('stage', 0)}"
    kind = world["distributed_type"]
    return {"NO": "not distributed"}.get(kind, f"DDP ({kind})" if kind.startswith("MULTI") else kind)


# Samples


def _samples_shown(path: Path, data: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """What the page says of each sample of a run with labels."""
    labels = Labels(data["problem_type"], tuple(data["labels"]), ())
    regression = labels.problem_type == "regression"
    samples = [_judged(place, line, labels) for place, line in enumerate(read_lines(path))]
    _check_number(path, len(samples), texts)
    return {
        "scatter": curves.scatter([(own.label, own.prediction) for own in samples]) if regression else None,
        "confusion": _confusion(samples, labels) if labels.problem_type == "single_label_classification" else None,
        "worst": _worst(samples, texts),
        "num_samples": len(samples),
        "num_wrong": sum(sample.wrong for sample in samples),
    }


def _check_number(path: Path, count: int, texts: Sequence[str]) -> None:
    if texts and len(texts) != count:
        raise ValueError(f"{path} has {count} lines, and there are {len(texts)} texts")


def _judged(place: int, line: dict[str, Any], labels: Labels) -> Sample:
    label, prediction = line["label"], line["prediction"]
    sample = Sample(place, line["id"] + 1, label, prediction, label != prediction)
    if labels.problem_type == "regression":
        sample.badness = abs(prediction - label)
    elif sample.wrong:
        chances = dict(zip(labels.names, line["probabilities"], strict=True))
        if labels.problem_type == "single_label_classification":  # bad is: sure of it
            sample.badness = chances[prediction]
            sample.details = {"chance": sample.badness, "chance_of_label": chances[label]}
        else:  # bad is the loss: the mean over classes of the binary cross entropy, of chances written with 6 digits
            right = [chance if name in label else 1 - chance for name, chance in chances.items()]
            sample.badness = -sum(math.log(max(chance, 5e-7)) for chance in right) / len(right)
            sample.details = {
                "missed": [(name, chances[name]) for name in label if name not in prediction],
                "added": [(name, chances[name]) for name in prediction if name not in label],
            }
    return sample


def _worst(samples: Sequence[Sample], texts: Sequence[str]) -> list[tuple[Sample, str]]:
    """The worst samples with their texts; a NaN has no order, and is as wrong as can be."""
    wrong = (sample for sample in samples if sample.wrong)
    worst = heapq.nlargest(MOST_MISTAKES, wrong, key=lambda s: math.inf if math.isnan(s.badness) else s.badness)
    return [(sample, _shortened(texts[sample.place]) if texts else "") for sample in worst]


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS].rstrip()}…"


def _confusion(samples: Sequence[Sample], labels: Labels) -> dict[str, Any]:
    """The matrix where it can be read, and the pairs that are confused most where it is large."""
    counts = collections.Counter((sample.label, sample.prediction) for sample in samples)
    totals = collections.Counter(sample.label for sample in samples)
    whole = labels.size <= MOST_MATRIX_CLASSES
    rows = [
        {
            "name": truth,
            "total": totals[truth],
            "cells": [(counts[truth, guess], counts[truth, guess] / (totals[truth] or 1)) for guess in labels.names],
        }
        for truth in (labels.names if whole else ())
    ]
    pairs = [
        {"label": truth, "prediction": guess, "count": count, "share": count / totals[truth]}
        for (truth, guess), count in counts.most_common()
        if truth != guess
    ]
    shown = MOST_PAIRS if not whole else 10 if labels.size > 8 else 0
    return {"names": labels.names, "rows": rows, "pairs": pairs[:shown], "num_pairs": len(pairs)}


# Titles


def _titles_shown(path: Path, data: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """What the page says of each sample of a run that writes titles."""
    titles = [
        Title(place, line["id"] + 1, line["title"].strip(), line["reference"], line["scores"]["rougeL"])
        for place, line in enumerate(read_lines(path))
    ]
    _check_number(path, len(titles), texts)
    examples = {name: [_example(title, texts) for title in some] for name, some in _handfuls(titles).items()}
    return {
        "examples": examples,
        "told": _told(titles, texts),
        "commonest": _commonest(titles),
        "num_titles": len(titles),
    }


def _example(title: Title, texts: Sequence[str]) -> tuple[Title, str, str, str]:
    """(it, its text, what was written, the reference), the three as they are shown."""
    text = texts[title.place] if texts else ""
    return title, _shortened(text), _shortened(title.written), _shortened(title.reference)


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


def _told(titles: Sequence[Title], texts: Sequence[str]) -> list[str]:
    """What stands out in all titles together; letter case and spaces are not looked at."""
    plain = [_plain(title.written) for title in titles]
    copies = sum(own == _plain(title.reference) for own, title in zip(plain, titles, strict=True))
    told = [f"{_titles(plain.count(''))} empty", f"{_titles(copies)} exactly the reference"]
    if texts:
        lifted = sum(own != "" and own in _plain(text) for own, text in zip(plain, texts, strict=True))
        told.append(f"{_titles(lifted)} a piece of the text, word for word")
    return told


def _commonest(titles: Sequence[Title]) -> tuple[str, int] | None:
    """(a title, for how many texts it was written) where that is more than one."""
    counts = collections.Counter(title.written for title in titles if title.written)
    (written, count), *_ = counts.most_common(1) or [("", 0)]
    return (_shortened(written), count) if count > 1 else None


def _titles(count: int) -> str:
    return f"{count:,} {'is' if count == 1 else 'are'}"


def _plain(text: str) -> str:
    return "".join(text.casefold().split())
