"""Uneven classes: their rows, their weights in the loss and how often their rows are sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from toolkit.config import ObjectiveSettings
from toolkit.data.labels import Labels, doubtful_names
from toolkit.data.tokens import Split
from toolkit.errors import Faults, did_you_mean, listing

# of Cui et al. 2019, "Class-Balanced Loss Based on Effective Number of Samples": their choice for large sets
_BETA = 0.999
_UNEVEN = 3.0
_RARE_SHARE = 0.1
_MAX_LISTED = 8


def check_objective(labels: Labels, objective: ObjectiveSettings) -> None:
    """Raises UserError naming every setting that does not apply to this kind of labels."""
    faults, kind = Faults(), labels.problem_type.replace("_", " ")
    if labels.problem_type == "regression":
        unsupported = dict.fromkeys(("class_weights", "pos_weight", "sampling"), "it is for classes")
        if objective.loss != "cross_entropy":
            faults.add(f"--loss {objective.loss} is for classes, and this is regression: leave it out")
    elif labels.problem_type == "multi_label_classification":
        unsupported = {"class_weights": "use --pos_weight, the weight of positive labels",
                       "sampling": "a row has several classes; use --pos_weight"}  # fmt: skip
    else:
        unsupported = {"pos_weight": "use --class_weights"}
    for name, why in unsupported.items():
        if value := getattr(objective, name):
            faults.add(f"--{name} {value} does not fit {kind}: {why}")
    if faults:
        faults.raise_if_any()


def class_counts(labels: Labels, split: Split) -> np.ndarray:
    """(classes,) int64: the rows of each class in a split; empty for regression."""
    if labels.problem_type == "regression":
        return np.zeros(0, np.int64)
    if labels.problem_type == "multi_label_classification":
        return np.asarray(split.labels.sum(axis=0, dtype=np.float64)).astype(np.int64)
    return np.bincount(split.labels, minlength=labels.size)


def add_weights(splits: dict[str, Split], labels: Labels, objective: ObjectiveSettings) -> dict[str, Split]:
    """Sets `weights` in all splits (`--class_weights`) and `chances` in the training split (`--sampling`)."""
    counts = class_counts(labels, splits["train"])
    if objective.class_weights:
        weights = _class_weights(objective.class_weights, counts, labels.names).astype(np.float32)
        splits = {name: replace(split, weights=weights[split.labels]) for name, split in splits.items()}
    if objective.sampling:
        share = (counts > 0) / (counts > 0).sum() if objective.sampling == "balanced" else np.sqrt(counts)
        each = share / share.sum() / np.maximum(counts, 1)
        splits |= {"train": replace(splits["train"], chances=each[splits["train"].labels])}
    return splits


def positive_weights(train: Split, labels: Labels, objective: ObjectiveSettings) -> np.ndarray | None:
    """(classes,) float32: the weights of positive labels (`--pos_weight`), or None."""
    if not objective.pos_weight:
        return None
    if objective.pos_weight != "balanced":
        return _weights_by_name("pos_weight", objective.pos_weight, labels.names).astype(np.float32)
    counts = class_counts(labels, train)
    uneven = (counts > 0) & (counts < len(train))  # a label of every row would weigh 0, and not be trained at all
    return np.where(uneven, (len(train) - counts) / np.maximum(counts, 1), 1).astype(np.float32)


def _class_weights(setting: str, counts: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """(classes,) float64; `balanced` and `effective` have mean 1 over the training rows."""
    if setting not in ("balanced", "effective"):
        return _weights_by_name("class_weights", setting, names)
    rows = np.maximum(counts, 1)
    weights = 1 / rows if setting == "balanced" else (1 - _BETA) / (1 - _BETA**rows)
    return np.where(counts > 0, weights * counts.sum() / (weights * counts).sum(), 1)


def _weights_by_name(setting: str, text: str, names: tuple[str, ...]) -> np.ndarray:
    """`A=2.0,B=1.0` -> (classes,) float64; a class without a weight has 1."""
    weights, faults = dict.fromkeys(names, 1.0), Faults()
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = np.nan
        where = f"--{setting} {part.strip()}"
        if name not in weights:
            faults.add(f"{where}: there is no class {name!r}{did_you_mean(name, names)}: there are {listing(names)}")
        elif not 0 < weight < np.inf:
            faults.add(f"{where}: write balanced, or a number above 0 for each class, {names[0]}=2")
        else:
            weights[name] = weight
    faults.raise_if_any()
    return np.array(list(weights.values()))


def describe(train: Split, labels: Labels, objective: ObjectiveSettings) -> tuple[list[str], str]:
    """(lines about the training classes and their weights, advice where classes are uneven and no setting is used)."""
    counts, pos_weights = class_counts(labels, train), positive_weights(train, labels, objective)
    if not len(counts):
        return [], ""
    order = [int(place) for place in np.argsort(-counts, kind="stable")]
    lines = [f"rows of each class in train: {_listed(order, labels.names, counts, '{:d}')}"]
    lines += doubtful_names(labels.names)
    if objective.class_weights:
        weights = _class_weights(objective.class_weights, counts, labels.names)
        lines.append(f"a row weighs in the loss (--class_weights): {_listed(order, labels.names, weights, '{:.3g}')}")
    if pos_weights is not None:
        lines.append(f"a present label weighs (--pos_weight): {_listed(order, labels.names, pos_weights, '{:.3g}')}")
    if objective.sampling:
        drawn = np.bincount(train.labels, weights=train.chances, minlength=labels.size) * 100
        lines.append(f"an epoch draws (--sampling), in %: {_listed(order, labels.names, drawn, '{:.3g}')}")
    compensated = any((objective.class_weights, objective.pos_weight, objective.sampling, objective.loss == "focal"))
    if objective.class_weights and objective.sampling == "balanced":
        lines.append("--class_weights and --sampling balanced both raise the rare classes: one of them is usual")
    return lines, "" if compensated else _advice(order, counts, len(train), labels)


def _listed(order: list[int], names: tuple[str, ...], numbers: np.ndarray, written: str) -> str:
    shown = order if len(order) <= _MAX_LISTED else [*order[: _MAX_LISTED // 2], -1, *order[-_MAX_LISTED // 2 :]]
    return ", ".join("..." if place < 0 else f"{names[place]} {written.format(numbers[place])}" for place in shown)


def _advice(order: list[int], counts: np.ndarray, rows: int, labels: Labels) -> str:
    """A line with settings that help, where the model may ignore the rarest class."""
    present = [place for place in order if counts[place]]
    if not present:
        return ""
    most, least = present[0], present[-1]
    if labels.problem_type == "multi_label_classification":
        if counts[least] >= _RARE_SHARE * rows:
            return ""
        return (
            f"the labels are uneven: {labels.names[least]} is present in {100 * counts[least] / rows:.2g} % of the "
            "rows; --pos_weight balanced makes the rare ones count, and f1_macro shows them (docs/uneven-classes.md)"
        )
    if counts[most] < _UNEVEN * counts[least]:
        return ""
    return (
        f"the classes are uneven: {labels.names[most]} has {counts[most] / counts[least]:.3g} times as many rows as "
        f"{labels.names[least]}; --class_weights balanced, --sampling balanced or --loss focal make the rare ones "
        "count, and f1_macro shows them (docs/uneven-classes.md)"
    )
