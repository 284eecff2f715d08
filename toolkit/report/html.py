"""report.html: a run on one page, in one file, without the network.

Curves are drawn by matplotlib and put into the page as SVG whose colours are the page's own, so that
they follow light and dark. Names from the data stand in HTML only: fonts for them may be missing here.
"""

from __future__ import annotations

import collections
import heapq
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from toolkit.config import ProblemType
from toolkit.data import demo
from toolkit.data.labels import Labels
from toolkit.data.prepare import cache_folder
from toolkit.data.tokens import load_split
from toolkit.errors import UserError
from toolkit.evaluation import Best, Evaluation
from toolkit.report.card import base_name, metric_title, number, read_lines, write_whole

MOST_MATRIX_CLASSES = 40
"""Above it, the pairs that are confused most stand for the whole matrix."""
MOST_PAIRS = 30
MOST_MISTAKES = 20
MOST_CHARACTERS = 300
_MOST_POINTS = 600  # of a curve: more make the page heavy and look the same
_MOST_DOTS = 2000

# drawn colour -> the page's
_DASHED: Any = {"color": "#00d004", "linewidth": 0.9, "linestyle": (0, (3, 3))}
_COLOURS = {"#00a001": "var(--one)", "#00b002": "var(--two)", "#00c003": "var(--three)", "#00d004": "var(--faint)",
            "#00e005": "var(--line)"}  # fmt: skip
_ONE, _TWO, _THREE, _FAINT, _LINE = _COLOURS
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _FAINT,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.labelcolor": _FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.formatter.useoffset": False,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
}
# which numbers of eval.jsonl share an axis
_EVALUATION_CHARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "single_label_classification": (("accuracy", "f1_macro"),),
    "multi_label_classification": (("f1_micro", "f1_macro", "accuracy"),),
    "regression": (("pearson",), ("mae",)),
}


@dataclass(frozen=True)
class Chart:
    """A drawing and the legend that stands over it."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    """(one, two, three or faint, what that colour is)."""
    note: str = ""


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


@dataclass(frozen=True)
class Series:
    """What was recorded under one name; NaN where it was not a finite number."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def window(self) -> int:
        """Steps that the smoothed line averages over."""
        return max(1, len(self.steps) // 15)


@dataclass(frozen=True)
class Line:
    """A series and how it is drawn."""

    name: str
    series: Series
    points: bool = False
    """A dot for each value: they are few."""
    smooth: bool = False
    """A strong moving average over the pale values."""


def write_report(folder: Path, labels: Labels, last: Evaluation, texts: Sequence[str]) -> None:
    """Writes `folder`/report.html, whole or not at all.

    `last` is the evaluation that predictions.jsonl is of, and `texts` are its samples' (or empty).
    Raises ValueError where the number of texts is another, OSError where a file is missing.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    steps = _by_step(read_lines(folder / "metrics.jsonl"))
    # the confusion matrix of many classes is large, and each line has one
    evaluations = [_scalars(line) for line in read_lines(folder / "eval.jsonl")]
    samples = [_judged(place, line, labels) for place, line in enumerate(read_lines(folder / "predictions.jsonl"))]
    if texts and len(texts) != len(samples):
        raise ValueError(f"{folder / 'predictions.jsonl'} has {len(samples)} lines, and there are {len(texts)} texts")
    context = {
        "title": _title(config),
        "config": config,
        "folder": folder.resolve().name,
        "problem_type": labels.problem_type,
        "last": last,
        "last_step": evaluations[-1]["step"] if evaluations else None,
        "saved_step": _saved_step(config, evaluations, labels.problem_type),
        "results": _results(last, labels.problem_type),
        "facts": _facts(config, steps),
        "evaluations": evaluations,
        "charts": _charts(config, steps, evaluations, labels.problem_type),
        "scatter": _scatter(samples) if labels.problem_type == "regression" else None,
        "confusion": _confusion(samples, labels) if labels.problem_type == "single_label_classification" else None,
        "worst": _worst(samples, texts),
        "per_class": last.numbers.get("per_class", {}),
        "has_texts": bool(texts),
        "num_samples": len(samples),
        "num_wrong": sum(sample.wrong for sample in samples),
        "smoothed": _series(steps, "loss").window > 1,
    }
    write_whole(folder / "report.html", _environment().get_template("report.html").render(context))


def write_report_of_folder(folder: str | Path) -> Path:
    """Writes the report again from the run's own files, and returns its path.

    The texts are those the run prepared, where this machine still has them. Raises UserError where
    `folder` holds no run.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no run folder: it has no config.json")
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))["data"]
    lines = collections.deque(read_lines(folder / "eval.jsonl"), maxlen=1)
    numbers = {name: value for line in lines for name, value in line.items() if name not in ("step", "split")}
    split = lines[0]["split"] if lines else "validation"
    labels = Labels(data["problem_type"], tuple(data["labels"]), ())
    write_report(folder, labels, Evaluation(split, numbers, None), _texts_of(data["digest"], split) if lines else [])
    return folder / "report.html"


def _texts_of(digest: str, split: str) -> list[str]:
    prepared = cache_folder() / "tokens" / digest / split
    return load_split(prepared.parent, split).texts() if prepared.is_dir() else []


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "metric": lambda name, problem_type: {"num_samples": "samples"}.get(name) or metric_title(name, problem_type),
        "setting": lambda value: "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value),
        "pretty": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        # names in Chinese, Japanese or Korean are set one character below the other
        "stacks": lambda name: (
            re.fullmatch(r"[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uff60]+", name) is not None
        ),
    }
    return environment


# What the files hold


def _by_step(lines: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """A resumed run does the steps after its checkpoint again: the last line of a step is the one that counts."""
    found = {line["step"]: line for line in lines}
    return [found[step] for step in sorted(found)]


def _scalars(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if isinstance(value, int | float | str)}


def _series(lines: Sequence[dict[str, Any]], name: str, factor: float = 1.0) -> Series:
    pairs = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    array = np.array(pairs, np.float64).reshape(-1, 2)
    return Series(array[:, 0], np.where(np.isfinite(array[:, 1]), factor * array[:, 1], np.nan))


def _saved_step(config: dict[str, Any], evaluations: Sequence[dict[str, Any]], problem_type: ProblemType) -> int | None:
    """The best step so far; in a run that was killed it need not be that of the last evaluation."""
    best = Best(config["settings"].get("metric_for_best_model"), problem_type)
    for line in evaluations:
        if line["split"] == evaluations[0]["split"]:
            best.improved(Evaluation(line["split"], line, None), line["step"])
    return best.step or None


def _results(last: Evaluation, problem_type: ProblemType) -> dict[str, float]:
    """The evaluation's single numbers by title, the loss at the end."""
    names = [name for name, value in last.numbers.items() if isinstance(value, float) and name != "loss"]
    if problem_type == "single_label_classification" and "f1_micro" in names:
        names.remove("f1_micro")  # the accuracy once more
    names += ["loss"] if "loss" in last.numbers else []
    return {metric_title(name, problem_type): last.numbers[name] for name in names}


def _title(config: dict[str, Any]) -> str:
    settings = config["settings"]
    data = (settings.get("dataset_name") or Path(str(settings.get("train_file"))).name).removeprefix(demo.PREFIX)
    return f"{base_name(settings['model_name_or_path']).rsplit('/', 1)[-1]} on {data}"


def _facts(config: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, str]:
    """The run in a few lines."""
    settings, data, world = config["settings"], config["data"], config["world"]
    files = [settings.get(name) for name in ("train_file", "validation_file", "test_file")]
    sizes = ", ".join(f"{size:,} {split}" for split, size in data["samples"].items())
    facts = {
        "Model": f"{settings['model_name_or_path']}",
        "Data": settings.get("dataset_name") or ", ".join(file for file in files if file),
        "Samples": sizes,
        "Labels": f"{len(data['labels']):,} classes" if data["problem_type"] != "regression" else "a number",
        "Length": f"at most {data['max_length']:,} tokens",
        "Steps": _steps_done(data, steps, settings),
        **_speed(steps),
        "Processes": f"{world['num_processes']}, {_strategy(world)}, {_precision(world['mixed_precision'])}",
        "Device": f"{world['device']} on {world['host']}",
        "Memory": f"at most {max(_peaks(steps)) / 2**30:,.2f} GiB in a process" if _peaks(steps) else "",
        "Config": config["launch"].get("config_file") or "",
        "Started": config["started"][:16].replace("T", " ") + " UTC",
    }
    return {name: fact for name, fact in facts.items() if fact}


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


def _precision(mixed: str) -> str:
    return "fp32" if mixed in ("no", None) else f"{mixed} mixed precision"


def _strategy(world: dict[str, Any]) -> str:
    if world.get("deepspeed"):
        return f"DeepSpeed ZeRO-{world['deepspeed'].get('zero_optimization', {}).get('stage', 0)}"
    kind = world["distributed_type"]
    return {"NO": "not distributed"}.get(kind, f"DDP ({kind})" if kind.startswith("MULTI") else kind)


# Samples


def _judged(place: int, line: dict[str, Any], labels: Labels) -> Sample:
    label, prediction = line["label"], line["prediction"]
    sample = Sample(place, line["id"] + 1, label, prediction, label != prediction)
    if labels.problem_type == "regression":
        sample.badness = abs(prediction - label)
    elif sample.wrong:
        judge = _judge_class if labels.problem_type == "single_label_classification" else _judge_classes
        judge(sample, dict(zip(labels.names, line["probabilities"], strict=True)))
    return sample


def _judge_class(sample: Sample, chances: dict[str, float]) -> None:
    """Bad is: sure of it."""
    sample.badness = chances[sample.prediction]
    sample.details = {"chance": sample.badness, "chance_of_label": chances[sample.label]}


def _judge_classes(sample: Sample, chances: dict[str, float]) -> None:
    """Bad is the loss: the mean over classes of the binary cross entropy."""
    right = [chance if name in sample.label else 1 - chance for name, chance in chances.items()]
    sample.badness = -sum(math.log(max(chance, 5e-7)) for chance in right) / len(right)  # written with 6 digits
    sample.details = {
        "missed": [(name, chances[name]) for name in sample.label if name not in sample.prediction],
        "added": [(name, chances[name]) for name in sample.prediction if name not in sample.label],
    }


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


# Curves


def _charts(
    config: dict[str, Any], steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], problem_type: ProblemType
) -> list[Chart]:
    if not steps:
        return []
    end = steps[-1]["step"]
    charts = [
        _chart("Learning rate", [Line("", _series(steps, "learning_rate"))], end, from_zero=True),
        _chart("Gradient norm", [Line("", _series(steps, "grad_norm"), smooth=True)], end, note=_clipping(config)),
        _chart("Samples per second", [Line("", _series(steps, "samples_per_second"), smooth=True)], end, True),
        _chart("Peak memory, GiB", [Line("", _series(steps, "peak_memory_bytes", 2**-30))], end, from_zero=True),
    ]
    loss = Line("training", _series(steps, "loss"), smooth=True)
    if not evaluations:
        return [_chart("Loss", [loss], end), *charts]
    split, saved = evaluations[0]["split"], _saved_step(config, evaluations, problem_type)
    during = _by_step(line for line in evaluations if line["split"] == split)
    metrics = [
        _chart(
            f"{'Metrics' if len(names) > 1 else metric_title(names[0], problem_type)} on {split}",
            [Line(metric_title(name, problem_type), _series(during, name), points=True) for name in names],
            end,
            dashed_at=saved,
            note=f"dashed: the saved model, step {saved:,}" if saved else "",
        )
        for names in _EVALUATION_CHARTS[problem_type]
    ]
    return [_chart("Loss", [loss, Line(split, _series(during, "loss"), points=True)], end), *metrics, *charts]


def _clipping(config: dict[str, Any]) -> str:
    clip = config["settings"].get("max_grad_norm")
    return f"before clipping at {clip:g}" if clip else ""


def _chart(
    title: str,
    lines: Sequence[Line],
    end: int,
    from_zero: bool = False,
    dashed_at: int | None = None,
    note: str = "",
) -> Chart:
    """Lines over the steps 0 to `end`, in the page's colours one after another."""

    values = np.concatenate([line.series.values for line in lines])
    outlier = max((_outlier(line.series) for line in lines if line.smooth), default="")

    def draw(axes: Axes) -> None:
        for line, colour in zip(lines, _COLOURS, strict=False):
            _draw_line(axes, line, colour)
        if dashed_at is not None:
            axes.axvline(dashed_at, **_DASHED)
        if np.isfinite(values).any() and (from_zero or outlier):
            top = np.nanpercentile(values, 99.5) if outlier else np.nanmax(values)
            axes.set_ylim(0, 1.08 * top or 1)
        axes.set_xlim(0, 1.02 * end)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))

    legend = tuple(zip(("one", "two", "three"), [line.name for line in lines], strict=False)) if len(lines) > 1 else ()
    return Chart(title, _svg(title, draw), legend, ", ".join(filter(None, (note, outlier))))


def _outlier(series: Series) -> str:
    """What is said of a spike that would flatten the rest of its curve; it is drawn out of the frame."""
    if not np.isfinite(series.values).any():
        return ""
    greatest = int(np.nanargmax(series.values))
    if series.values[greatest] <= 2 * np.nanpercentile(series.values, 99.5):
        return ""
    return f"up to {series.values[greatest]:.4g} at step {int(series.steps[greatest]):,}"


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    raw, window = _thinned(line.series), line.series.window
    if line.points or len(raw.steps) == 1:
        axes.plot(raw.steps, raw.values, color=colour, linewidth=1.6, marker="o", markersize=3.5, clip_on=False)
    elif not line.smooth or window == 1:
        axes.plot(raw.steps, raw.values, color=colour, linewidth=1.6)
    else:
        axes.plot(raw.steps, raw.values, color=colour, linewidth=0.8, alpha=0.35)
        mean = _thinned(Series(line.series.steps, smoothed(line.series.values, window)))
        axes.plot(mean.steps, mean.values, color=colour, linewidth=1.8)


def _scatter(samples: Sequence[Sample]) -> Chart | None:
    """Every sample at (true, predicted); many are thinned out evenly."""
    pairs = np.array([(sample.label, sample.prediction) for sample in samples], np.float64).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if not len(pairs):
        return None
    chosen = pairs[np.linspace(0, len(pairs) - 1, min(len(pairs), _MOST_DOTS)).astype(int)]

    def draw(axes: Axes) -> None:
        edge = 0.04 * (pairs.max() - pairs.min()) or 1.0
        ends = (pairs.min() - edge, pairs.max() + edge)
        axes.plot(ends, ends, **_DASHED)
        axes.plot(chosen[:, 0], chosen[:, 1], "o", color=_ONE, markersize=3, alpha=0.45, markeredgewidth=0)
        axes.set(xlabel="true", ylabel="predicted", xlim=ends, ylim=ends)
        axes.grid(axis="x")

    thinned = f"; {len(chosen):,} of {len(pairs):,} samples are drawn" if len(chosen) < len(pairs) else ""
    return Chart("Predicted against true", _svg("scatter", draw, (5.2, 4.2)), (), f"dashed: exactly right{thinned}")


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """(N,) -> (N,), the mean of the finite values among the `window` around each; shorter at the ends."""
    finite = np.isfinite(values)
    places = np.arange(len(values))
    first, last = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    totals = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    count = counts[last] - counts[first]
    return np.divide(totals[last] - totals[first], count, out=np.full(len(values), np.nan), where=count > 0)


def _thinned(series: Series) -> Series:
    """Least and greatest of each stretch, so that a spike stays to be seen."""
    if len(series.steps) <= _MOST_POINTS:
        return series
    stretches = np.array_split(np.arange(len(series.steps)), _MOST_POINTS // 2)
    known = np.nan_to_num(series.values)
    kept = sorted({int(part[pick(known[part])]) for part in stretches for pick in (np.argmin, np.argmax)})
    return Series(series.steps[kept], series.values[kept])


def _svg(name: str, draw: Callable[[Axes], None], size: tuple[float, float] = (5.2, 2.3)) -> Markup:
    """Draws on one pair of axes -> an <svg> element, colours and fonts those of the page.

    `name` is the drawing's own on the page: the ids inside it are made of it.
    """
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        written = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return Markup(_inlined(written.getvalue()))


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}".replace("e-0", "e-")


def _inlined(svg: str) -> str:
    """An SVG file -> what may stand in HTML: no prologue, no addresses, no names two drawings would share."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r" font-family: [^;]*;", "", svg)  # the page's own
    for drawn, own in _COLOURS.items():
        svg = svg.replace(drawn, own)
    return svg
