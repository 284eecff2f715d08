"""From probabilities to answers: a temperature, thresholds, no answer where the model is not sure.

They are found on the validation rows by the best model, and kept beside its weights in decisions.json, which
`toolkit predict`, `toolkit.predict` and the last evaluation follow.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from toolkit.checkpoint.convert.model_files import DECISIONS
from toolkit.config import ProblemType
from toolkit.data.labels import MULTI, Labels
from toolkit.demo import model_path
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation
from toolkit.features.decisions.feature import DecisionSettings
from toolkit.utils.files import Kinds, as_json, is_number, read_table

_SINGLE, _BINS = "single_label_classification", 15
_TEMPERATURES = (0.05, 20.0)
_MOST_THRESHOLDS, _ROUNDS = 200, 5
_COVERAGES = np.linspace(1, 0.05, 20)


@dataclass(frozen=True)
class Decisions:
    """How a model's logits become answers; as it is made by default, the likeliest class, and labels above 0.5."""

    labels: Labels
    temperature: float = 1.0
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """By label; of two classes for the positive one. Of the probabilities after the temperature. Of more classes than
    two, the answer has the greatest probability over its threshold's odds: all alike change nothing."""
    abstain_below: float | None = None

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """(N, C) logits -> (N, C) float32: softmax, or a sigmoid per class; regression keeps its numbers."""
        return probabilities_of(self._scaled(logits), self.labels.problem_type)

    def adjusted(self, logits: np.ndarray) -> np.ndarray:
        """(N, C) logits -> (N, C) of which the greatest, or those above 0, are the answer: what metrics are made of."""
        chances = np.array([self.thresholds.get(name, 0.5) for name in self.labels.names])
        moved = (np.log(chances) - np.log1p(-chances)).astype(np.float32) if self.thresholds else np.float32(0)
        return self._scaled(logits) - moved

    def _scaled(self, logits: np.ndarray) -> np.ndarray:
        return logits if self.temperature == 1 else logits / np.float32(self.temperature)

    def answers(self, logits: np.ndarray) -> Iterator[dict[str, Any]]:
        """Of each row of (N, C) logits its prediction, and its probabilities as they are written."""
        labels = self.labels
        for chances, row in zip(self.probabilities(logits), self.adjusted(logits), strict=True):
            rounded = [round(float(chance), 6) for chance in chances]
            if labels.problem_type == "regression":
                yield {"prediction": rounded[0] if labels.size == 1 else rounded}
            elif labels.problem_type == _SINGLE:
                place = int(row.argmax())
                sure = self.abstain_below is None or chances[place] >= self.abstain_below
                yield {"prediction": labels.names[place] if sure else None, "probabilities": rounded}
            else:
                yield {"prediction": readable(row > 0, labels), "probabilities": rounded}

    def described(self) -> dict[str, Any]:
        """For decisions.json and eval.jsonl."""
        return {
            "temperature": self.temperature, "thresholds": dict(self.thresholds), "abstain_below": self.abstain_below
        }  # fmt: skip


def probabilities_of(logits: np.ndarray, problem_type: ProblemType) -> np.ndarray:
    """(N, C) logits -> (N, C) float32: softmax, or a sigmoid per class; regression keeps its numbers."""
    tensor = torch.from_numpy(logits)
    if problem_type == _SINGLE:
        return tensor.softmax(dim=-1).numpy()
    return tensor.sigmoid().numpy() if problem_type == MULTI else logits


def readable(label: Any, labels: Labels) -> Any:
    """A label as its name, its names (multi-label), its number or its numbers."""
    if labels.problem_type == _SINGLE:
        return labels.names[int(label)]
    if labels.problem_type == MULTI:
        return [name for name, present in zip(labels.names, label, strict=True) if present]
    return float(label) if labels.size == 1 else [float(number) for number in label]


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


def saved_decisions(model: str, labels: Labels) -> Decisions:
    """What the decisions.json of a model's folder, or of a name on the hub, says; the default where there is none.

    Raises UserError for a file that is damaged or of a model with other labels.
    """
    path = Path(model_path(model)) / DECISIONS
    if not path.parent.is_dir():
        kept = try_to_load_from_cache(model, DECISIONS)
        if kept is None:  # the hub is asked once for each commit of the model, and its cache tells from then on
            with contextlib.suppress(EntryNotFoundError, HfHubHTTPError):  # no network: not in the cache either
                kept = hf_hub_download(model, DECISIONS)
        if not isinstance(kept, str):
            return Decisions(labels)
        path = Path(kept)
    if not path.is_file():
        return Decisions(labels)
    found = read_table(path, _KINDS)
    without = f"make them again by the run's command, or remove {path} to take the likeliest class"
    thresholds, known = found.get("thresholds") or {}, list(labels.names)
    if found.get("labels") != known:
        raise UserError(f"{path} is of a model with other labels than {listing(known)}: {without}")
    if strange := [name for name in thresholds if name not in known]:
        raise UserError(f"{path}: thresholds name {listing(strange)}, and the labels are {listing(known)}: {without}")
    two = labels.problem_type == _SINGLE and labels.size == 2
    if thresholds and (labels.problem_type == "regression" or (two and len(thresholds) > 1)):
        raise UserError(f"{path}: thresholds are for classes, and for one of two: {without}")
    return Decisions(labels, float(found.get("temperature") or 1), thresholds, found.get("abstain_below"))


def write_text(decisions: Decisions, asked: DecisionSettings, step: int) -> str:
    """The content of decisions.json; `step` tells a conversion whose it is."""
    content = {"labels": list(decisions.labels.names), **decisions.described(), "asked": vars(asked), "step": step}
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


# from the validation rows


def check_asked(asked: DecisionSettings, labels: Labels) -> bool:
    """Whether anything is asked for. Raises UserError for what these labels cannot have."""
    kind = labels.problem_type
    if asked.tune_thresholds and kind == "regression":
        raise UserError("--tune_thresholds is for classes, and these are numbers")
    if asked.tune_thresholds and kind == _SINGLE and labels.size > 2:
        if asked.tune_thresholds != "f1":
            raise UserError(
                f"--tune_thresholds {asked.tune_thresholds} is for two classes or several labels per text, and these "
                f"are {labels.size} classes: for them there is --tune_thresholds f1"
            )
        if labels.size > _MOST_THRESHOLDS:
            raise UserError(f"--tune_thresholds is for at most {_MOST_THRESHOLDS} classes, and these are {labels.size}")
    two = labels.names if kind == _SINGLE and labels.size == 2 else ()
    if asked.positive_class is not None and asked.positive_class not in two:
        near = did_you_mean(asked.positive_class, labels.names)
        raise UserError(
            f"--positive_class {asked.positive_class}{near}: name one of two classes: {listing(labels.names)}"
        )
    if asked.calibrate and kind == "regression":
        raise UserError("--calibrate is for classes, and these labels are numbers, which have no probabilities")
    if asked.abstain_below is not None and kind != _SINGLE:
        found = "several per text: a set of labels has no one probability" if kind == MULTI else "numbers"
        raise UserError(f"--abstain_below is for one class per text, and these labels are {found}")
    return bool(asked.tune_thresholds or asked.calibrate or asked.abstain_below is not None)


def tuned(asked: DecisionSettings, labels: Labels, validation: Evaluation) -> tuple[Decisions, list[str]]:
    """(what was asked for, found on an evaluation of the main process; what is worth saying of it).

    Raises UserError for an evaluation without logits.
    """
    if validation.outputs is None:
        raise UserError(
            "this recipe's evaluate keeps no logits, which thresholds and a temperature are found on: let it return "
            "what toolkit.evaluation.classification_evaluation makes, or leave these settings out"
        )
    logits, truth = validation.outputs[1], validation.outputs[0].labels
    decisions, said = Decisions(labels, abstain_below=asked.abstain_below), []
    if asked.calibrate:
        if _right(logits, truth, labels).all():
            said.append("temperature 1: the model makes no mistake on the validation rows, which say nothing of doubt")
        else:
            decisions = replace(decisions, temperature=temperature_of(logits, truth))
            if decisions.temperature > 0.99 * _TEMPERATURES[1]:
                said.append(
                    f"temperature {decisions.temperature:.0f}, the highest that is tried: on the validation rows the "
                    "probabilities say next to nothing; train longer, or look at the labels"
                )
    if asked.tune_thresholds and labels.problem_type == _SINGLE and labels.size > 2:
        thresholds = best_thresholds(truth, logits.astype(np.float64) / decisions.temperature).tolist()
        decisions = replace(decisions, thresholds=dict(zip(labels.names, thresholds, strict=True)))
        few = [labels.names[place] for place in np.flatnonzero(np.bincount(truth, minlength=labels.size) < 10)]
        said += [f"thresholds of {listing(few, 5)}: fewer than 10 of the validation rows have each"] * bool(few)
    elif asked.tune_thresholds:
        multi = labels.problem_type == MULTI
        # as probabilities, in the precision in which thresholds lie between them
        scaled = logits.astype(np.float64) / decisions.temperature
        places = list(range(labels.size)) if multi else [labels.names.index(asked.positive_class or labels.names[1])]
        found = {}
        for place in places:
            score = scaled[:, place] if multi else scaled[:, place] - scaled[:, 1 - place]
            true = truth[:, place] > 0.5 if multi else truth == place
            found[labels.names[place]] = best_threshold(true, 1 / (1 + np.exp(-score)), asked.tune_thresholds)
            if (count := int(true.sum())) < 10:
                said.append(f"threshold of {labels.names[place]}: only {count} of the validation rows have it")
        decisions = replace(decisions, thresholds=found)
    return decisions, said


def temperature_of(logits: np.ndarray, truth: np.ndarray) -> float:
    """The T whose softmax(logits / T), or sigmoid, has the least negative log likelihood (Guo et al., 2017)."""
    from scipy.optimize import minimize_scalar

    exact = logits.astype(np.float64)
    bounds = tuple(np.log(_TEMPERATURES))
    found = minimize_scalar(lambda log: _nll(exact / np.exp(log), truth), bounds=bounds, method="bounded")
    return float(np.exp(found.x))


def _nll(logits: np.ndarray, truth: np.ndarray) -> float:
    if truth.ndim == 2:
        return float(np.mean(np.logaddexp(0, logits) - truth * logits))
    chosen = np.take_along_axis(logits, truth[:, None], axis=1)[:, 0]
    return float(np.mean(np.logaddexp.reduce(logits, axis=1) - chosen))


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
    moved = np.zeros(classes)  # what each class's score is lowered by
    true = np.bincount(truth, minlength=classes)

    def total() -> float:
        guess = (scores - moved).argmax(axis=1)
        hits = np.bincount(truth[guess == truth], minlength=classes)
        return float(np.sum(2 * hits / np.maximum(np.bincount(guess, minlength=classes) + true, 1)))

    best = total()
    for _ in range(_ROUNDS):
        before = best
        for place in np.flatnonzero(true).tolist():
            others = scores - moved
            others[:, place] = -np.inf
            other = others.argmax(axis=1)  # (N,): what each row is where it is not this class
            margin = scores[:, place] - others[np.arange(count), other]
            order = np.argsort(-margin, kind="stable")  # (N,): lowering the bar, rows become this class in this order
            ends = np.append(np.flatnonzero(np.diff(margin[order])), count - 1)
            worth = _f1_on_the_way(truth[order], other[order], place, true)[ends]
            if worth.max() > best + 1e-9:
                end = int(ends[worth.argmax()])
                after = margin[order[end + 1]] if end + 1 < count else margin[order[end]] - 1
                kept, moved[place] = moved[place], (margin[order[end]] + after) / 2
                if (now := total()) > best:
                    best = now
                else:  # two scores so near that their mean is one of them
                    moved[place] = kept
        if best <= before:
            break
    return np.clip(1 / (1 + np.exp(-moved)), 1e-6, 1 - 1e-6)


def _f1_on_the_way(truth: np.ndarray, other: np.ndarray, place: int, true: np.ndarray) -> np.ndarray:
    """(N,): the sum of the classes' F1 after each row, in order, has gone from its `other` class to class `place`."""
    counts = np.arange(1, len(truth) + 1)
    worth = 2 * np.cumsum(truth == place) / (counts + true[place])
    for left in np.unique(other):
        rows = np.flatnonzero(other == left)
        right = (truth[rows] == left).astype(int)
        hits = right.sum() - np.append(0, np.cumsum(right))
        own = 2 * hits / np.maximum(len(rows) - np.arange(len(rows) + 1) + true[left], 1)
        steps = np.zeros(len(truth))
        steps[rows] = np.diff(own)
        worth = worth + own[0] + np.cumsum(steps)
    return worth


# what they bring


def brought(
    before: Mapping[str, float],
    logits: np.ndarray,
    truth: np.ndarray,
    decisions: Decisions,
    compute_metrics: ComputeMetrics,
) -> dict[str, Any]:
    """The metrics by these decisions, and under `decisions` those without (`before`), how true the probabilities are
    before and after, and what abstaining brings. (N, C) logits, (N,) or (N, C) labels."""
    labels, chances, adjusted = decisions.labels, decisions.probabilities(logits), decisions.adjusted(logits)
    metrics, found = as_json(compute_metrics(adjusted, truth)), decisions.described()
    plain = {name: value for name, value in before.items() if name in metrics}
    found["before"] = plain | truthfulness(probabilities_of(logits, labels.problem_type), truth)
    found["after"] = {name: metrics[name] for name in plain} | truthfulness(chances, truth)
    if labels.problem_type == _SINGLE:
        right, answer = _right(adjusted, truth, labels), adjusted.argmax(axis=1)
        sure = np.take_along_axis(chances, answer[:, None], axis=1)[:, 0]
        found["coverage"] = coverage(sure, right)
        if decisions.abstain_below is not None:
            answered = sure >= decisions.abstain_below
            found["answered"] = int(answered.sum())
            found["accuracy_of_answered"] = float(right[answered].mean()) if answered.any() else None
    return metrics | {"decisions": found}


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


def lines_of(last: Evaluation) -> list[str]:
    """What tuned decisions bring, for the screen."""
    found = last.numbers.get("decisions")
    if found is None:
        return []
    before, after, lines = found["before"], found["after"], []

    def change(*names: str) -> str:
        return ", ".join(f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in names if name in before)

    if found["thresholds"]:
        named = ", ".join(f"{name} {value:.3f}" for name, value in list(found["thresholds"].items())[:8])
        more = f" and {len(found['thresholds']) - 8} more" if len(found["thresholds"]) > 8 else ""
        lines.append(f"thresholds from the validation rows: {named}{more}")
        lines.append(f"  on {last.split}: {change('accuracy', 'f1_macro', 'f1_micro')}")
    if found["temperature"] != 1:
        lines.append(f"temperature {found['temperature']:.3f}, on {last.split}: {change('ece', 'brier')}")
    if found["abstain_below"] is not None:
        share, right = found["answered"] / last.numbers["num_samples"], found["accuracy_of_answered"]
        of = "" if right is None else f", of which {100 * right:.1f} % are right"
        lines.append(f"no answer below {found['abstain_below']:g}: {100 * share:.1f} % of {last.split} answered{of}")
    return lines
