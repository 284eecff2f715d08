"""Temperature, thresholds and abstention: how probabilities become answers.

Tuned on the validation rows with the best model, and saved next to its weights in decisions.json, which `toolkit
predict`, `toolkit.predict` and the last evaluation apply.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from toolkit.data.labels import MULTI, Labels
from toolkit.data.tokens import Split
from toolkit.demo import model_path
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.evaluation.answers import DECISIONS, ClassAnswers
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation
from toolkit.report.curves import DASHED, Chart, chart
from toolkit.report.files import write_atomically
from toolkit.utils.files import Kinds, as_json, read_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from toolkit.features.decisions.feature import DecisionSettings

_SINGLE, _BINS = "single_label_classification", 15
_TEMPERATURES = (0.05, 20.0)
_MAX_TUNED_CLASSES, _MAX_ROUNDS = 200, 5
_FEW_ROWS = 10
_COVERAGES = np.linspace(1, 0.05, 20)


@dataclass(frozen=True)
class Decisions(ClassAnswers):
    """Answers after a temperature and thresholds; None if the probability is below `abstain_below`."""

    temperature: float = 1.0
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Label -> threshold on its probability after the temperature; with two classes, of the positive one only. With
    more than two, the answer is the class with the highest probability / (threshold's odds)."""
    abstain_below: float | None = None

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        return super().probabilities(self._scale(logits))

    def adjust_logits(self, logits: np.ndarray) -> np.ndarray:
        thresholds = np.array([self.thresholds.get(name, 0.5) for name in self.labels.names])
        offsets = (
            (np.log(thresholds) - np.log1p(-thresholds)).astype(np.float32)
            if self.thresholds
            else np.float32(0)
        )
        return self._scale(logits) - offsets

    def _scale(self, logits: np.ndarray) -> np.ndarray:
        return logits if self.temperature == 1 else logits / np.float32(self.temperature)

    def abstains(self, probability: float) -> bool:
        return self.abstain_below is not None and probability < self.abstain_below

    @property
    def no_answer_reason(self) -> str:  # type: ignore[override]
        return f"their probabilities are below {self.abstain_below:g}, the abstain_below of the model's decisions.json"

    def as_json(self) -> dict[str, Any]:
        thresholds = dict(self.thresholds)
        return {
            "temperature": self.temperature,
            "thresholds": thresholds,
            "abstain_below": self.abstain_below,
        }

    def evaluation(self, evaluation: Evaluation, compute_metrics: ComputeMetrics) -> Evaluation:
        """Replaces metrics and predictions by those of these decisions; on the main process. Adds `decisions`: metrics
        and calibration error without (`before`) and with them (`after`), and accuracy by coverage."""
        if evaluation.outputs is None:
            return evaluation
        split, logits = evaluation.outputs
        truth, probabilities, adjusted = (
            split.labels,
            self.probabilities(logits),
            self.adjust_logits(logits),
        )
        metrics, effect = as_json(compute_metrics(adjusted, truth)), self.as_json()
        plain = {
            name: value for name, value in evaluation.single_numbers.items() if name in metrics
        }
        effect["before"] = plain | calibration_error(
            ClassAnswers(self.labels).probabilities(logits), truth
        )
        effect["after"] = {name: metrics[name] for name in plain} | calibration_error(
            probabilities, truth
        )
        if self.labels.problem_type == _SINGLE:
            correct, answer = _correct(adjusted, truth, self.labels), adjusted.argmax(axis=1)
            confidence = np.take_along_axis(probabilities, answer[:, None], axis=1)[:, 0]
            effect["coverage"] = coverage(confidence, correct)
            if self.abstain_below is not None:
                answered = confidence >= self.abstain_below
                effect["answered"] = int(answered.sum())
                effect["accuracy_of_answered"] = (
                    float(correct[answered].mean()) if answered.any() else None
                )
        lines = partial(self.prediction_lines, split.rows, logits, truth)
        numbers = evaluation.numbers | metrics | {"decisions": effect}
        return replace(evaluation, numbers=numbers, predictions=lines)

    def describe(self, evaluation: Evaluation) -> list[str]:
        effect = evaluation.numbers.get("decisions")
        if effect is None:
            return []
        before, after, lines = effect["before"], effect["after"], []

        def change(*names: str) -> str:
            return ", ".join(
                f"{name} {before[name]:.4f} -> {after[name]:.4f}"
                for name in names
                if name in before
            )

        if self.thresholds:
            thresholds = [f"{name} {value:.3f}" for name, value in self.thresholds.items()]
            lines.append(f"thresholds from the validation rows: {listing(thresholds, 8)}")
            lines.append(f"  on {evaluation.split}: {change('accuracy', 'f1_macro', 'f1_micro')}")
        if self.temperature != 1:
            lines.append(
                f"temperature {self.temperature:.3f}, on {evaluation.split}: {change('ece', 'brier')}"
            )
        if self.abstain_below is not None:
            share, accuracy = (
                effect["answered"] / evaluation.numbers["num_samples"],
                effect["accuracy_of_answered"],
            )
            suffix = "" if accuracy is None else f", of which {100 * accuracy:.1f} % are right"
            answered = f"{100 * share:.1f} % of {evaluation.split} answered"
            lines.append(f"no answer below {self.abstain_below:g}: {answered}{suffix}")
        return lines


# ---- decisions.json


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1


def _is_temperature(value: Any) -> bool:
    low, high = _TEMPERATURES
    return type(value) in (int, float) and low <= value <= high


_KINDS: Kinds = {
    "temperature": (_is_temperature, "a number from {} to {}".format(*_TEMPERATURES)),
    "thresholds": (
        lambda value: isinstance(value, dict) and all(map(_is_share, value.values())),
        "a table of numbers between 0 and 1",
    ),
    "abstain_below": (_is_share, "a number between 0 and 1"),
}  # fmt: skip


def saved_decisions(model: str, labels: Labels) -> Decisions | None:
    """Reads decisions.json of a model's folder, or of a name on the hub; None if there is none.

    Raises UserError for a file that is damaged or of a model with other labels.
    """
    path = _decisions_file(model)
    if path is None:
        return None
    content = read_table(path, _KINDS)
    remedy = f"repeat the run's command to write a new one, or remove {path} to answer with the most probable class"
    thresholds, names = content.get("thresholds") or {}, list(labels.names)
    if content.get("labels") != names:
        raise UserError(
            f"{path} belongs to a model with other labels than {listing(names)}: {remedy}"
        )
    if unknown := [name for name in thresholds if name not in names]:
        raise UserError(
            f"{path}: thresholds of {listing(unknown)}, but the labels are {listing(names)}: {remedy}"
        )
    kind, abstain_below = labels.problem_type, content.get("abstain_below")
    too_many = kind == _SINGLE and labels.size == 2 and len(thresholds) > 1
    if kind == "regression" or too_many or (kind == MULTI and abstain_below is not None):
        why = "regression has no decisions, two classes have one threshold, several labels per text no abstain_below"
        raise UserError(f"{path}: {why}: {remedy}")
    return Decisions(labels, float(content.get("temperature") or 1), thresholds, abstain_below)


def _decisions_file(model: str) -> Path | None:
    path = Path(model_path(model)) / DECISIONS
    if path.parent.is_dir():
        return path if path.is_file() else None
    cached = try_to_load_from_cache(model, DECISIONS)
    if (
        cached is None
    ):  # one request for each commit of the model: its cache records that there is no such file
        with contextlib.suppress(EntryNotFoundError, HfHubHTTPError):  # no network
            cached = hf_hub_download(model, DECISIONS)
    return Path(cached) if isinstance(cached, str) else None


# ---- tuning


def check(settings: DecisionSettings, labels: Labels) -> None:
    """Raises UserError for settings that do not fit the kind of labels."""
    kind = labels.problem_type
    for name in ("tune_thresholds", "calibrate"):
        if getattr(settings, name) and kind == "regression":
            raise UserError(
                f"--{name} needs probabilities of classes: these labels are numbers (regression)"
            )
    if settings.tune_thresholds and kind == _SINGLE and labels.size > 2:
        if settings.tune_thresholds != "f1":
            why = f"{settings.tune_thresholds} is for two classes or several labels per text"
            raise UserError(
                f"--tune_thresholds {why}: with {labels.size} classes use --tune_thresholds f1"
            )
        if labels.size > _MAX_TUNED_CLASSES:
            raise UserError(
                f"--tune_thresholds is for at most {_MAX_TUNED_CLASSES} classes: these are {labels.size}"
            )
    two = labels.names if kind == _SINGLE and labels.size == 2 else ()
    if (positive := settings.positive_class) is not None and positive not in two:
        near = did_you_mean(positive, labels.names)
        raise UserError(
            f"--positive_class {positive}{near}: name one of two classes: {listing(labels.names)}"
        )
    if settings.abstain_below is not None and kind != _SINGLE:
        other = "several labels per text" if kind == MULTI else "numbers"
        raise UserError(
            f"--abstain_below compares the probability of one class per text: these labels are {other}"
        )


def tune_and_save(
    run: Any, settings: DecisionSettings, evaluate: Callable[[Split], Evaluation]
) -> None:
    """Tunes on the best model's evaluation of the validation rows, writes decisions.json next to its weights, and sets
    `run.answers`. A collective."""
    path = run.folder.model / DECISIONS
    validation = run.best_evaluation(run.data.validation, evaluate) if settings.any else None
    if not run.accelerator.is_main_process:
        return
    path.unlink(missing_ok=True)  # written with other settings
    if validation is None:
        return
    decisions, notes = tune(settings, run.data.labels, validation)
    content = {
        "labels": list(run.data.labels.names),
        **decisions.as_json(),
        "requested": vars(settings),
    }
    content["step"] = run.best.step  # a conversion of other weights does not copy the file
    text = json.dumps(content, ensure_ascii=False, indent=2)
    write_atomically(path, [text, "\n"])
    run.answers = decisions
    for line in notes:
        run.say(line)


def tune(
    settings: DecisionSettings, labels: Labels, validation: Evaluation
) -> tuple[Decisions, list[str]]:
    """(the tuned decisions, warnings). Raises UserError for an evaluation without logits."""
    if validation.outputs is None:
        remedy = "let evaluate return toolkit.evaluation.classification_evaluation(...), or drop these settings"
        raise UserError(f"--tune_thresholds, --calibrate and --abstain_below need logits: {remedy}")
    logits, truth = validation.outputs[1], validation.outputs[0].labels
    temperature, thresholds, notes = 1.0, dict[str, float](), []
    if settings.calibrate and _correct(logits, truth, labels).all():
        notes.append(
            "temperature 1: without mistakes on the validation rows there is nothing to calibrate on"
        )
    elif settings.calibrate:
        temperature = fit_temperature(logits, truth)
        if temperature > 0.99 * _TEMPERATURES[1]:
            notes.append(f"temperature {temperature:.0f}, the highest that is tried: on the validation rows the model "
                         "is hardly better than chance; train longer, or look at the labels")  # fmt: skip
    if settings.tune_thresholds:
        # in float64, so that a threshold fits between any two scores
        thresholds = _thresholds(settings, logits.astype(np.float64) / temperature, truth, labels)
        rows = (
            truth.sum(axis=0)
            if labels.problem_type == MULTI
            else np.bincount(truth, minlength=labels.size)
        )
        few = np.minimum(rows, len(truth) - rows) < _FEW_ROWS
        if rare := [
            name
            for name, is_rare in zip(labels.names, few, strict=True)
            if is_rare and name in thresholds
        ]:
            why = f"each has fewer than {_FEW_ROWS} validation rows with or without it"
            notes.append(f"thresholds of {listing(rare, 5)}: {why}")
    return Decisions(labels, temperature, thresholds, settings.abstain_below), notes


def _thresholds(
    settings: DecisionSettings, logits: np.ndarray, truth: np.ndarray, labels: Labels
) -> dict[str, float]:
    if labels.problem_type == _SINGLE and labels.size > 2:
        return dict(zip(labels.names, best_thresholds(truth, logits).tolist(), strict=True))
    if labels.problem_type == MULTI:
        binary = {
            name: (logits[:, column], truth[:, column] > 0.5)
            for column, name in enumerate(labels.names)
        }
    else:
        name = settings.positive_class or labels.names[1]
        column = labels.names.index(name)
        binary = {name: (logits[:, column] - logits[:, 1 - column], truth == column)}
    criterion = str(settings.tune_thresholds)
    return {
        name: best_threshold(true, 1 / (1 + np.exp(-score)), criterion)
        for name, (score, true) in binary.items()
    }


def fit_temperature(logits: np.ndarray, truth: np.ndarray) -> float:
    """The T that minimises the negative log likelihood of softmax(logits / T), or sigmoid (Guo et al., 2017)."""
    from scipy.optimize import minimize_scalar

    scores = torch.tensor(logits, dtype=torch.float64)
    target = torch.tensor(truth, dtype=torch.float64 if truth.ndim == 2 else torch.int64)
    loss = F.binary_cross_entropy_with_logits if truth.ndim == 2 else F.cross_entropy
    bounds = tuple(np.log(_TEMPERATURES))
    result = minimize_scalar(
        lambda log: loss(scores / np.exp(log), target).item(), bounds=bounds, method="bounded"
    )
    return float(np.exp(result.x))


def best_threshold(truth: np.ndarray, probabilities: np.ndarray, criterion: str) -> float:
    """The best threshold on (N,) probabilities for (N,) bool, midway between two of them; 0.5 if all rows have the same
    label. `criterion`: as `--tune_thresholds`."""
    from sklearn.metrics import roc_curve

    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives:
        return 0.5
    false_rate, recall, scores = roc_curve(truth, probabilities, drop_intermediate=False)
    hits, alarms = recall * positives, false_rate * negatives
    kind, _, value = criterion.partition("=")
    if kind == "f1":
        value_at = 2 * hits / (hits + alarms + positives)
    elif kind == "cost":
        alarm_cost, miss_cost = map(float, value.split(":"))
        value_at = -(alarm_cost * alarms + miss_cost * (positives - hits))
    else:
        value_at = np.where(recall >= float(value) - 1e-9, hits / np.maximum(hits + alarms, 1), -1)
    best = int(value_at.argmax())
    lower = scores[best + 1] if best + 1 < len(scores) else 0.0
    return float(np.clip((min(scores[best], 1.0) + lower) / 2, 1e-6, 1 - 1e-6))


def best_thresholds(truth: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(C,) thresholds for (N, C) logits, C > 2, that maximise macro F1 on (N,) classes by coordinate ascent."""
    count, classes = scores.shape
    offsets = np.zeros(classes)  # subtracted from the scores
    class_sizes = np.bincount(truth, minlength=classes)

    def f1_sum() -> float:
        guess = (scores - offsets).argmax(axis=1)
        hits = np.bincount(truth[guess == truth], minlength=classes)
        return float(
            np.sum(2 * hits / np.maximum(np.bincount(guess, minlength=classes) + class_sizes, 1))
        )

    best = f1_sum()
    for _ in range(_MAX_ROUNDS):
        before = best
        for c in np.flatnonzero(class_sizes).tolist():
            others = scores - offsets
            others[:, c] = -np.inf
            runner_up = others.argmax(axis=1)  # (N,): the answer if it is not class c
            margin = scores[:, c] - others[np.arange(count), runner_up]
            order = np.argsort(
                -margin, kind="stable"
            )  # (N,): as the offset falls, rows switch to c in this order
            ends = np.append(
                np.flatnonzero(np.diff(margin[order])), count - 1
            )  # equal margins switch together
            f1 = _f1_after_each_switch(truth[order], runner_up[order], c, class_sizes)[ends]
            if f1.max() > best + 1e-9:
                end = int(ends[f1.argmax()])
                following = margin[order[end + 1]] if end + 1 < count else margin[order[end]] - 1
                previous, offsets[c] = offsets[c], (margin[order[end]] + following) / 2
                if (now := f1_sum()) > best:
                    best = now
                else:  # the midpoint of two adjacent floats is one of them
                    offsets[c] = previous
        if best <= before:
            break
    return np.clip(1 / (1 + np.exp(-offsets)), 1e-6, 1 - 1e-6)


def _f1_after_each_switch(
    truth: np.ndarray, runner_up: np.ndarray, c: int, class_sizes: np.ndarray
) -> np.ndarray:
    """(N,): the sum of the classes' F1 after the first 1 to N rows have switched from their runner-up to class `c`."""
    counts = np.arange(1, len(truth) + 1)
    total = 2 * np.cumsum(truth == c) / (counts + class_sizes[c])
    for source in np.unique(runner_up):
        rows = np.flatnonzero(runner_up == source)
        correct = (truth[rows] == source).astype(int)
        hits = correct.sum() - np.append(0, np.cumsum(correct))
        f1 = 2 * hits / np.maximum(len(rows) - np.arange(len(rows) + 1) + class_sizes[source], 1)
        steps = np.zeros(len(truth))
        steps[rows] = np.diff(f1)
        total = total + f1[0] + np.cumsum(steps)
    return total


# ---- effect


def _correct(logits: np.ndarray, truth: np.ndarray, labels: Labels) -> np.ndarray:
    """(N,) bool: whether each row's class, or all of its labels, are correct."""
    return (
        logits.argmax(axis=1) == truth
        if labels.problem_type == _SINGLE
        else ((logits > 0) == truth).all(axis=1)
    )


def calibration_error(probabilities: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """`ece`, `brier`, and `bins` of a reliability diagram: [rows, mean probability, share correct].

    With one label per row, the expected calibration error is that of the most probable class (Guo et al., 2017; bins of
    equal width), and Brier's score (1950) a sum over classes; with several, both count each label of each row.
    """
    if truth.ndim == 2:
        confidence, correct = probabilities.ravel(), truth.ravel()
        brier = float(np.mean((probabilities - truth) ** 2))
    else:
        confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == truth
        brier = float(
            np.mean(((probabilities - np.eye(probabilities.shape[1])[truth]) ** 2).sum(axis=1))
        )
    bin_of = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    count, total, hits = (
        np.bincount(bin_of, weight, _BINS) for weight in (None, confidence, correct)
    )
    bins = [
        [int(count[b]), float(total[b] / count[b]), float(hits[b] / count[b])]
        for b in np.flatnonzero(count)
    ]
    ece = float(np.abs(total - hits).sum() / len(confidence))
    return {"ece": ece, "brier": brier, "bins": bins}


def coverage(confidence: np.ndarray, correct: np.ndarray) -> list[list[float]]:
    """[share of rows answered, accuracy on them, their lowest confidence], from all rows down to 5 %."""
    order = np.argsort(-confidence, kind="stable")
    hits = np.cumsum(correct[order])
    num_rows = len(confidence)
    counts = [
        count
        for count in dict.fromkeys(np.round(_COVERAGES * num_rows).astype(int).tolist())
        if count
    ]
    return [
        [count / num_rows, float(hits[count - 1] / count), float(confidence[order[count - 1]])]
        for count in counts
    ]


# ---- charts of the report page


def reliability_chart(before: dict[str, Any], after: dict[str, Any]) -> Chart:
    """Accuracy by probability, from `bins` of [rows, mean probability, accuracy]."""
    changed = before["bins"] != after["bins"]

    def draw(axes: Axes) -> None:
        axes.axline((0, 0), slope=1, **DASHED)
        for bins, colour in ((before["bins"], "C1"), (after["bins"], "C0"))[not changed :]:
            _, probabilities, accuracies = zip(*bins, strict=True)
            axes.plot(probabilities, accuracies, color=colour, linewidth=1.4, marker="o")
        axes.set(xlabel="probability", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))

    legend = (("two", "before"), ("one", "after the temperature")) if changed else ()
    return chart("Reliability", draw, 3.6, legend, "dashed: perfectly calibrated")


def coverage_chart(points: Sequence[Sequence[float]], below: float | None) -> Chart:
    """Points (share of rows answered, accuracy among them, lowest probability), and `--abstain_below`."""
    shares, accuracies, probabilities = zip(*points, strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(shares, accuracies, color="C0")
        if below is not None:
            answered = [
                share
                for share, chance in zip(shares, probabilities, strict=True)
                if chance >= below
            ]
            axes.axvline(max(answered, default=0), **DASHED)
        axes.set(xlabel="share of rows answered", ylabel="accuracy", xlim=(0, 1.02))

    note = "" if below is None else f"dashed: no answer below {below:g}"
    return chart("Accuracy of the answered rows", draw, 3.6, note=note)
