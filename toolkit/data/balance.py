"""Imbalanced classes: their rows, their weights in the loss and how often their rows are
sampled.

Each way is one setting, and each adds to the notes what it does: `--class_weights` and
`--pos_weight` change what a sample weighs, `--sampling` which rows an epoch has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit.config import ObjectiveSettings
from toolkit.data.label_cells import to_float
from toolkit.data.label_notes import note_on_rare, notes_on_names, separator_hint
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, Labels
from toolkit.data.tokens import Split
from toolkit.errors import UserError, did_you_mean, listing

if TYPE_CHECKING:
    from toolkit.data.prepare import Data

_IMBALANCE = 3.0
_RARE_SHARE = 0.1
_UNSUPPORTED = {
    SINGLE: {"pos_weight": "use --class_weights"},
    MULTI: {
        "class_weights": "use --pos_weight, the weight of positive labels",
        "sampling": "a row has several classes; use --pos_weight",
    },
    REGRESSION: dict.fromkeys(
        ("class_weights", "pos_weight", "sampling"), "it is for classes"
    ),
}
"""Settings, and why they do not fit this kind of labels."""


def weigh_classes(data: Data, objective: ObjectiveSettings, device: torch.device) -> Data:
    """The data with the weights and the sampling of classes that the settings ask for, and notes on
    them. Raises UserError for a setting that does not fit this kind of labels."""
    labels = data.labels
    _check_objective(labels, objective)
    if labels.problem_type == REGRESSION:
        return data
    counts = _class_counts(labels, data.train)
    notes = [*data.notes, *_notes_on_classes(data.splits, labels, counts)]
    splits: dict[str, Any] = dict(data.splits)
    pos_weight = None
    if objective.class_weights:
        weights = _class_weights(objective.class_weights, counts, labels.names)
        in_fp32 = weights.astype(np.float32)
        for name, split in data.splits.items():
            splits[name] = replace(split, weights=in_fp32[split.labels])
        line = _listed(labels, counts, weights, "{:.3g}")
        notes.append(f"class weights of the loss (--class_weights): {line}")
    if objective.pos_weight:
        weights = _positive_weights(
            objective.pos_weight, counts, len(data.train), labels.names
        )
        pos_weight = torch.from_numpy(weights.astype(np.float32)).to(device)
        line = _listed(labels, counts, weights, "{:.3g}")
        notes.append(f"weights of positive labels (--pos_weight): {line}")
    if objective.sampling:
        shares = _sampling_shares(objective.sampling, counts)
        probabilities = (shares / np.maximum(counts, 1))[data.train.labels]
        splits["train"] = replace(splits["train"], sampling_probabilities=probabilities)
        line = _listed(labels, counts, 100 * shares, "{:.3g}")
        notes.append(f"classes of an epoch's rows, in % (--sampling): {line}")
    compensations = (objective.class_weights, objective.pos_weight, objective.sampling)
    if not any(compensations) and objective.loss != "focal":
        notes.extend(_advice(counts, len(data.train), labels))
    return replace(data, **splits, pos_weight=pos_weight, notes=tuple(notes))


def _notes_on_classes(
    splits: Mapping[str, Split], labels: Labels, counts: np.ndarray
) -> Iterator[str]:
    """How many rows each class has, which classes may be none, and which an evaluated split
    lacks."""
    yield f"rows of each class in train: {_listed(labels, counts, counts, '{:d}')}"
    if len(labels.columns) == 1:
        yield from notes_on_names(labels.names)
        yield from note_on_rare(labels.names, counts, splits["train"])
        hint = separator_hint(labels.names, labels.separator)
        if hint:
            yield hint
    for name, split in splits.items():
        missing = np.flatnonzero(_class_counts(labels, split) == 0)
        if name != "train" and len(missing):
            classes = listing(labels.names[place] for place in missing)
            yield f"{name} has no row of {classes}: that counts as an F1 of 0 in f1_macro"


def _check_objective(labels: Labels, objective: ObjectiveSettings) -> None:
    """Raises UserError for a setting that does not fit this kind of labels."""
    kind = labels.problem_type.replace("_", " ")
    for name, why in _UNSUPPORTED[labels.problem_type].items():
        value = getattr(objective, name)
        if value:
            raise UserError(f"--{name} {value} does not fit {kind}: {why}")
    if labels.problem_type == REGRESSION and objective.loss != "cross_entropy":
        raise UserError(f"--loss {objective.loss} does not fit {kind}: it is for classes")


def _class_counts(labels: Labels, split: Split) -> np.ndarray:
    """(classes,) int64: the rows of each class."""
    if labels.problem_type == MULTI:
        return split.labels.sum(axis=0, dtype=np.float64).astype(np.int64)
    return np.bincount(split.labels, minlength=labels.size)


def _positive_weights(
    setting: str, counts: np.ndarray, rows: int, names: Sequence[str]
) -> np.ndarray:
    """(classes,) float64: the weights of positive labels."""
    if setting != "balanced":
        return _weights_by_name("pos_weight", setting, names)
    # a label of every row would weigh 0, and not be trained at all
    varies = (counts > 0) & (counts < rows)
    balanced = (rows - counts) / np.maximum(counts, 1)
    return np.where(varies, balanced, 1)


def _class_weights(setting: str, counts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """(classes,) float64; `balanced` has mean 1 over the training rows."""
    if setting != "balanced":
        return _weights_by_name("class_weights", setting, names)
    present = counts > 0
    balanced = counts.sum() / (present.sum() * np.maximum(counts, 1))
    return np.where(present, balanced, 1)


def _sampling_shares(setting: str, counts: np.ndarray) -> np.ndarray:
    """(classes,) float64: the shares of the classes in an epoch."""
    shares = np.sqrt(counts)
    if setting == "balanced":
        shares = (counts > 0).astype(np.float64)
    return shares / shares.sum()


def _weights_by_name(setting: str, text: str, names: Sequence[str]) -> np.ndarray:
    """`A=2.0,B=1.0` -> (classes,) float64; a class without a weight has 1."""
    weights = dict.fromkeys(names, 1.0)
    # a name may hold commas
    for part in re.findall(r".+?=[^=,]*(?=,|$)|.+", text):
        name, _, number = (word.strip(" ,") for word in part.rpartition("="))
        where = f"--{setting} {part.strip(' ,')}"
        if name not in weights:
            hint = did_you_mean(name, names)
            raise UserError(
                f"{where}: there is no class {name!r}{hint}: there are {listing(names)}"
            )
        weights[name] = to_float(number) or 0.0
        if not 0 < weights[name] < np.inf:
            raise UserError(f"{where}: write balanced, or a number above 0 for each class")
    return np.array(list(weights.values()))


def _listed(labels: Labels, counts: np.ndarray, numbers: np.ndarray, written: str) -> str:
    """The number of each class, of at most ten: those with the most rows."""
    order = np.argsort(-counts, kind="stable").tolist()
    return listing(
        f"{labels.names[place]} {written.format(numbers[place])}" for place in order
    )


def _advice(counts: np.ndarray, rows: int, labels: Labels) -> Iterator[str]:
    """A line with settings that help, if the model may ignore the rarest class."""
    present = np.where(counts > 0, counts, rows)
    least = int(present.min())
    rarest = labels.names[int(present.argmin())]
    most = int(counts.max())
    often = labels.names[int(counts.argmax())]
    if labels.problem_type == MULTI and least < _RARE_SHARE * rows:
        fault = f"the labels are imbalanced: {rarest} is in {100 * least / rows:.2g} % of the rows"
        remedy = "--pos_weight balanced makes"
    elif labels.problem_type == SINGLE and most >= _IMBALANCE * least:
        times = f"{most / least:.3g} times as many rows as {rarest}"
        fault = f"the classes are imbalanced: {often} has {times}"
        remedy = "--class_weights balanced, --sampling balanced or --loss focal make"
    else:
        return
    yield (
        f"{fault}; {remedy} the rare ones count, and f1_macro shows them "
        "(docs/fine-tuning-craft.md)"
    )
