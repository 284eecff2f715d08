"""From probabilities to answers: a temperature, thresholds, no answer where the model is not sure.

They are tuned on the validation rows of the best model and saved beside its weights in decisions.json, which
`toolkit predict`, `toolkit.predict` and the last evaluation apply.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from toolkit.checkpoint.convert.model_files import DECISIONS
from toolkit.data.labels import MULTI, Labels
from toolkit.data.tokens import Split
from toolkit.demo import model_path
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation
from toolkit.features.decisions.settings import DecisionSettings
from toolkit.report.files import write_whole
from toolkit.utils.files import Kinds, as_json, is_number, read_table

_SINGLE, _BINS = "single_label_classification", 15
_TEMPERATURES = (0.05, 20.0)
_MOST_THRESHOLDS, _ROUNDS = 200, 5
_FEW = 10
_COVERAGES = np.linspace(1, 0.05, 20)


@dataclass(frozen=True)
class Decisions(ClassAnswers):
    """Answers by a temperature, thresholds, and a probability below which none is given."""

    temperature: float = 1.0
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """By label; of two classes for the positive one. Of the probabilities after the temperature. Of more classes than
    two, the answer has the greatest probability over its threshold's odds: all alike change nothing."""
    abstain_below: float | None = None

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        return super().probabilities(self._scaled(logits))

    def adjusted(self, logits: np.ndarray) -> np.ndarray:
        chances = np.array([self.thresholds.get(name, 0.5) for name in self.labels.names])
        moved = (np.log(chances) - np.log1p(-chances)).astype(np.float32) if self.thresholds else np.float32(0)
        return self._scaled(logits) - moved

    def _scaled(self, logits: np.ndarray) -> np.ndarray:
        return logits if self.temperature == 1 else logits / np.float32(self.temperature)

    def abstains(self, probability: float) -> bool:
        return self.abstain_below is not None and probability < self.abstain_below

    @property
    def no_answer_reason(self) -> str:  # type: ignore[override]
        return f"their probabilities are below {self.abstain_below:g}, the abstain_below of the model's decisions.json"

    def as_json(self) -> dict[str, Any]:
        """For decisions.json and eval.jsonl."""
        return {
            "temperature": self.temperature, "thresholds": dict(self.thresholds), "abstain_below": self.abstain_below
        }  # fmt: skip

    def evaluation(self, evaluation: Evaluation, compute_metrics: ComputeMetrics) -> Evaluation:
        """The same evaluation with numbers and predictions by these decisions; on the main process.

        Under `decisions` the numbers hold the metrics without them (`before`) and with them (`after`), how true the
        probabilities are in both, and what abstaining brings.
        """
        if evaluation.outputs is None:
            return evaluation
        split, logits = evaluation.outputs
        truth, chances, adjusted = split.labels, self.probabilities(logits), self.adjusted(logits)
        metrics, effect = as_json(compute_metrics(adjusted, truth)), self.as_json()
        plain = {name: value for name, value in evaluation.single_numbers.items() if name in metrics}
        effect["before"] = plain | truthfulness(ClassAnswers(self.labels).probabilities(logits), truth)
        effect["after"] = {name: metrics[name] for name in plain} | truthfulness(chances, truth)
        if self.labels.problem_type == _SINGLE:
            right, answer = _right(adjusted, truth, self.labels), adjusted.argmax(axis=1)
            sure = np.take_along_axis(chances, answer[:, None], axis=1)[:, 0]
            effect["coverage"] = coverage(sure, right)
            if self.abstain_below is not None:
                answered = sure >= self.abstain_below
                effect["answered"] = int(answered.sum())
                effect["accuracy_of_answered"] = float(right[answered].mean()) if answered.any() else None
        lines = partial(self.prediction_lines, split.rows, logits, truth)
        numbers = evaluation.numbers | metrics | {"decisions": effect}
        return replace(evaluation, numbers=numbers, predictions=lines)

    def describe(self, evaluation: Evaluation) -> list[str]:
        effect = evaluation.numbers.get("decisions")
        if effect is None:
            return []
        before, after, lines = effect["before"], effect["after"], []

        def change(*names: str) -> str:
            return ", ".join(f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in names if name in before)

        if self.thresholds:
            thresholds = [f"{name} {value:.3f}" for name, value in self.thresholds.items()]
            lines.append(f"thresholds from the validation rows: {listing(thresholds, 8)}")
            lines.append(f"  on {evaluation.split}: {change('accuracy', 'f1_macro', 'f1_micro')}")
        if self.temperature != 1:
            lines.append(f"temperature {self.temperature:.3f}, on {evaluation.split}: {change('ece', 'brier')}")
        if self.abstain_below is not None:
            share, right = effect["answered"] / evaluation.numbers["num_samples"], effect["accuracy_of_answered"]
            of = "" if right is None else f", of which {100 * right:.1f} % are right"
            answered = f"{100 * share:.1f} % of {evaluation.split} answered"
            lines.append(f"no answer below {self.abstain_below:g}: {answered}{of}")
        return lines


# the file


def _is_share(value: Any) -> bool:
    return is_number(value, 0, 1) and value not in (0, 1)


_KINDS: Kinds = {
    "labels": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of texts"
    ),
    "temperature": (lambda value: is_number(value, *_TEMPERATURES), "a number from {} to {}".format(*_TEMPERATURES)),
    "thresholds": (
        lambda value: isinstance(value, dict) and all(map(_is_share, value.values())),
        "a table of numbers between 0 and 1",
    ),
    "abstain_below": (_is_share, "a number between 0 and 1"),
}  # fmt: skip


def saved_decisions(model: str, labels: Labels) -> Decisions | None:
    """The decisions.json of a model's folder, or of a name on the hub; None where there is none.

    Raises UserError for a file that is damaged or of a model with other labels.
    """
    path = _decisions_file(model)
    if path is None:
        return None
    content = read_table(path, _KINDS)
    mend = f"make them again by the run's command, or remove {path} to take the likeliest class"
    thresholds, names = content.get("thresholds") or {}, list(labels.names)
    if content.get("labels") != names:
        raise UserError(f"{path} is of a model with other labels than {listing(names)}: {mend}")
    if unknown := [name for name in thresholds if name not in names]:
        raise UserError(f"{path}: thresholds name {listing(unknown)}, and the labels are {listing(names)}: {mend}")
    two = labels.problem_type == _SINGLE and labels.size == 2
    if thresholds and (labels.problem_type == "regression" or (two and len(thresholds) > 1)):
        raise UserError(f"{path}: thresholds are for classes, and for one of two: {mend}")
    return Decisions(labels, float(content.get("temperature") or 1), thresholds, content.get("abstain_below"))


def _decisions_file(model: str) -> Path | None:
    path = Path(model_path(model)) / DECISIONS
    if path.parent.is_dir():
        return path if path.is_file() else None
    cached = try_to_load_from_cache(model, DECISIONS)
    if cached is None:  # the hub is asked once for each commit of the model; its cache answers from then on
        with contextlib.suppress(EntryNotFoundError, HfHubHTTPError):  # no network: not in the cache either
            cached = hf_hub_download(model, DECISIONS)
    return Path(cached) if isinstance(cached, str) else None


# from the validation rows


def check(settings: DecisionSettings, labels: Labels) -> None:
    """Raises UserError for settings that these labels cannot have."""
    kind = labels.problem_type
    for name in ("tune_thresholds", "calibrate"):
        if getattr(settings, name) and kind == "regression":
            raise UserError(f"--{name} is for classes, and these labels are numbers, which have no probabilities")
    if settings.tune_thresholds and kind == _SINGLE and labels.size > 2:
        if settings.tune_thresholds != "f1":
            raise UserError(
                f"--tune_thresholds {settings.tune_thresholds} is for two classes or several labels per text, and "
                f"these are {labels.size} classes: for them there is --tune_thresholds f1"
            )
        if labels.size > _MOST_THRESHOLDS:
            raise UserError(f"--tune_thresholds is for at most {_MOST_THRESHOLDS} classes, and these are {labels.size}")
    two = labels.names if kind == _SINGLE and labels.size == 2 else ()
    if settings.positive_class is not None and settings.positive_class not in two:
        near = did_you_mean(settings.positive_class, labels.names)
        raise UserError(
            f"--positive_class {settings.positive_class}{near}: name one of two classes: {listing(labels.names)}"
        )
    if settings.abstain_below is not None and kind != _SINGLE:
        labels_are = "several per text: a set of labels has no one probability" if kind == MULTI else "numbers"
        raise UserError(f"--abstain_below is for one class per text, and these labels are {labels_are}")


def tune_and_save(run: Any, settings: DecisionSettings, evaluate: Callable[[Split], Evaluation]) -> None:
    """Tunes on the best model's evaluation of the validation rows, writes decisions.json beside its weights, and makes
    it the way in which the run's model answers. All processes call it."""
    path = run.folder.model / DECISIONS
    validation = run.best_evaluation(run.data.validation, evaluate) if settings.any else None
    if not run.accelerator.is_main_process:
        return
    path.unlink(missing_ok=True)  # of the same run with other settings
    if validation is None:
        return
    decisions, notes = tune(settings, run.data.labels, validation)
    content = {"labels": list(run.data.labels.names), **decisions.as_json(), "asked": vars(settings)}
    text = json.dumps(content | {"step": run.best.step}, ensure_ascii=False, indent=2)  # the step: for a conversion
    write_whole(path, [text, "\n"])
    run.answers = decisions
    for line in notes:
        run.say(line)


def tune(settings: DecisionSettings, labels: Labels, validation: Evaluation) -> tuple[Decisions, list[str]]:
    """(the decisions, tuned on an evaluation of the main process; notes on them).

    Raises UserError for an evaluation without logits.
    """
    if validation.outputs is None:
        raise UserError(
            "this recipe's evaluate keeps no logits, which thresholds and a temperature are tuned on: let it return "
            "what toolkit.evaluation.classification_evaluation makes, or leave these settings out"
        )
    logits, truth = validation.outputs[1], validation.outputs[0].labels
    temperature, thresholds, notes = 1.0, dict[str, float](), []
    if settings.calibrate and _right(logits, truth, labels).all():
        notes.append("temperature 1: the model makes no mistake on the validation rows: they do not show its doubt")
    elif settings.calibrate:
        temperature = temperature_of(logits, truth)
        if temperature > 0.99 * _TEMPERATURES[1]:
            notes.append(f"temperature {temperature:.0f}, the highest that is tried: on the validation rows the "
                         "probabilities say next to nothing; train longer, or look at the labels")  # fmt: skip
    if settings.tune_thresholds:
        # scaled as probabilities are, in the precision in which thresholds lie between them
        thresholds = _thresholds(settings, logits.astype(np.float64) / temperature, truth, labels)
        rows = truth.sum(axis=0) if labels.problem_type == MULTI else np.bincount(truth, minlength=labels.size)
        few = [name for name, count in zip(labels.names, rows, strict=True) if name in thresholds and count < _FEW]
        notes += [f"thresholds of {listing(few, 5)}: fewer than {_FEW} of the validation rows have each"] * bool(few)
    return Decisions(labels, temperature, thresholds, settings.abstain_below), notes


def _thresholds(settings: DecisionSettings, logits: np.ndarray, truth: np.ndarray, labels: Labels) -> dict[str, float]:
    """By label; of two classes for the positive one."""
    if labels.problem_type == _SINGLE and labels.size > 2:
        return dict(zip(labels.names, best_thresholds(truth, logits).tolist(), strict=True))
    if labels.problem_type == MULTI:
        each = {name: (logits[:, place], truth[:, place] > 0.5) for place, name in enumerate(labels.names)}
    else:
        name = settings.positive_class or labels.names[1]
        place = labels.names.index(name)
        each = {name: (logits[:, place] - logits[:, 1 - place], truth == place)}
    criterion = str(settings.tune_thresholds)
    return {name: best_threshold(true, 1 / (1 + np.exp(-score)), criterion) for name, (score, true) in each.items()}


def temperature_of(logits: np.ndarray, truth: np.ndarray) -> float:
    """The T whose softmax(logits / T), or sigmoid, has the least negative log likelihood (Guo et al., 2017)."""
    from scipy.optimize import minimize_scalar

    exact = logits.astype(np.float64)
    bounds = tuple(np.log(_TEMPERATURES))
    result = minimize_scalar(lambda log: _nll(exact / np.exp(log), truth), bounds=bounds, method="bounded")
    return float(np.exp(result.x))


def _nll(logits: np.ndarray, truth: np.ndarray) -> float:
    if truth.ndim == 2:
        return float(np.mean(np.logaddexp(0, logits) - truth * logits))
    true_logits = np.take_along_axis(logits, truth[:, None], axis=1)[:, 0]
    return float(np.mean(np.logaddexp.reduce(logits, axis=1) - true_logits))


def best_threshold(truth: np.ndarray, chances: np.ndarray, criterion: str) -> float:
    """The threshold on (N,) probabilities, half-way between two of them, that is best for (N,) truth values; 0.5 where
    all are alike. `criterion` as `--tune_thresholds` has it."""
    from sklearn.metrics import roc_curve

    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives:
        return 0.5
    false_rate, recall, scores = roc_curve(truth, chances, drop_intermediate=False)
    hits, alarms = recall * positives, false_rate * negatives
    kind, _, value = criterion.partition("=")
    if kind == "f1":
        worth = 2 * hits / (hits + alarms + positives)
    elif kind == "cost":
        of_alarm, of_miss = map(float, value.split(":"))
        worth = -(of_alarm * alarms + of_miss * (positives - hits))
    else:
        worth = np.where(recall >= float(value) - 1e-9, hits / np.maximum(hits + alarms, 1), -1)
    place = int(worth.argmax())
    lower = scores[place + 1] if place + 1 < len(scores) else 0.0
    return float(np.clip((min(scores[place], 1.0) + lower) / 2, 1e-6, 1 - 1e-6))


def best_thresholds(truth: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Of more than two classes: (C,) thresholds for (N, C) logits with which macro F1 is greatest on (N,) true classes,
    one class after the other, until none brings more."""
    count, classes = scores.shape
    offsets = np.zeros(classes)  # what each class's score is lowered by
    true = np.bincount(truth, minlength=classes)

    def total() -> float:
        guess = (scores - offsets).argmax(axis=1)
        hits = np.bincount(truth[guess == truth], minlength=classes)
        return float(np.sum(2 * hits / np.maximum(np.bincount(guess, minlength=classes) + true, 1)))

    best = total()
    for _ in range(_ROUNDS):
        before = best
        for place in np.flatnonzero(true).tolist():
            others = scores - offsets
            others[:, place] = -np.inf
            other = others.argmax(axis=1)  # (N,): what each row is where it is not this class
            margin = scores[:, place] - others[np.arange(count), other]
            order = np.argsort(-margin, kind="stable")  # (N,): lowering the bar, rows become this class in this order
            ends = np.append(np.flatnonzero(np.diff(margin[order])), count - 1)
            worth = _f1_on_the_way(truth[order], other[order], place, true)[ends]
            if worth.max() > best + 1e-9:
                end = int(ends[worth.argmax()])
                after = margin[order[end + 1]] if end + 1 < count else margin[order[end]] - 1
                before_move, offsets[place] = offsets[place], (margin[order[end]] + after) / 2
                if (now := total()) > best:
                    best = now
                else:  # two scores so near that their mean is one of them
                    offsets[place] = before_move
        if best <= before:
            break
    return np.clip(1 / (1 + np.exp(-offsets)), 1e-6, 1 - 1e-6)


def _f1_on_the_way(truth: np.ndarray, other: np.ndarray, place: int, true: np.ndarray) -> np.ndarray:
    """(N,): the sum of the classes' F1 after each row, in order, has gone from its `other` class to class `place`."""
    counts = np.arange(1, len(truth) + 1)
    worth = 2 * np.cumsum(truth == place) / (counts + true[place])
    for source in np.unique(other):
        rows = np.flatnonzero(other == source)
        right = (truth[rows] == source).astype(int)
        hits = right.sum() - np.append(0, np.cumsum(right))
        f1 = 2 * hits / np.maximum(len(rows) - np.arange(len(rows) + 1) + true[source], 1)
        steps = np.zeros(len(truth))
        steps[rows] = np.diff(f1)
        worth = worth + f1[0] + np.cumsum(steps)
    return worth


# their effect


def _right(logits: np.ndarray, truth: np.ndarray, labels: Labels) -> np.ndarray:
    """(N,): whether each row's class, or all of its labels, are right."""
    return logits.argmax(axis=1) == truth if labels.problem_type == _SINGLE else ((logits > 0) == truth).all(axis=1)


def truthfulness(chances: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """How far (N, C) probabilities are from what happens: `ece`, `brier`, and the `bins` of a reliability diagram.

    Of classes, the expected calibration error is of the likeliest one (Guo et al., 2017: bins of equal width, the
    gaps between mean probability and share of right ones, weighted by their rows), and Brier's score the sum over the
    classes (Brier, 1950); of several labels both are of every label of every row.
    """
    if truth.ndim == 2:
        sure, right = chances.ravel(), truth.ravel()
        brier = float(np.mean((chances - truth) ** 2))
    else:
        sure, right = chances.max(axis=1), chances.argmax(axis=1) == truth
        brier = float(np.mean(((chances - np.eye(chances.shape[1])[truth]) ** 2).sum(axis=1)))
    place = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    count, total, hits = (np.bincount(place, weight, _BINS) for weight in (None, sure, right))
    there = np.flatnonzero(count)
    bins = [[int(count[b]), float(total[b] / count[b]), float(hits[b] / count[b])] for b in there]
    ece = float(np.abs(total - hits).sum() / len(sure))
    return {"ece": ece, "brier": brier, "bins": bins}


def coverage(sure: np.ndarray, right: np.ndarray) -> list[list[float]]:
    """[share of the rows that is answered, share of right ones among them, the probability from which it is], with
    fewer and fewer rows."""
    order = np.argsort(-sure, kind="stable")
    hits = np.cumsum(right[order])
    counts = [count for count in dict.fromkeys(np.round(_COVERAGES * len(sure)).astype(int).tolist()) if count]
    return [[count / len(sure), float(hits[count - 1] / count), float(sure[order[count - 1]])] for count in counts]
