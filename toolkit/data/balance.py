"""Imbalanced classes: their rows, their weights in the loss and how often their rows are sampled."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from toolkit.config import ObjectiveSettings
from toolkit.data.labels import MULTI, Labels, to_float
from toolkit.data.tokens import Split
from toolkit.errors import Faults, did_you_mean, listing

# of Cui et al. 2019, "Class-Balanced Loss Based on Effective Number of Samples": their choice for large sets
_BETA = 0.999
_IMBALANCE = 3.0
_RARE_SHARE = 0.1
_MAX_LISTED = 8
_MISSING_NAMES = {"NaN", "nan", "None", "null", "NULL", "N/A"}


def weigh_classes(
    splits: Mapping[str, Split], labels: Labels, objective: ObjectiveSettings
) -> tuple[dict[str, Split], np.ndarray | None, list[str], str]:
    """(the splits with `weights`, for `--class_weights`, and the training split with `sampling_probabilities`, for
    `--sampling`; the weights of positive labels, for `--pos_weight`, (classes,) float32 or None; lines about the
    classes and their weights; advice if classes are imbalanced and no setting compensates for it).

    Raises UserError naming every setting that does not apply to this kind of labels.
    """
    splits, train, names = dict(splits), splits["train"], labels.names
    _check_objective(labels, objective)
    if labels.problem_type == "regression":
        return splits, None, [], ""
    counts, positive = _class_counts(labels, train), None
    order = [int(place) for place in np.argsort(-counts, kind="stable")]
    lines = [
        f"rows of each class in train: {_listed(order, names, counts, '{:d}')}",
        *doubtful_names(names),
    ]
    for name, split in splits.items():
        absent = [names[place] for place in np.flatnonzero(_class_counts(labels, split) == 0)]
        if absent and name != "train":
            lines.append(
                f"{name} has no row of {listing(absent)}: that counts as an F1 of 0 in f1_macro"
            )
    if setting := objective.class_weights:
        weights = _class_weights(setting, counts, names)
        per_class = weights.astype(np.float32)
        splits = {
            name: replace(split, weights=per_class[split.labels]) for name, split in splits.items()
        }
        lines.append(
            f"class weights of the loss (--class_weights): {_listed(order, names, weights, '{:.3g}')}"
        )
    if setting := objective.pos_weight:
        positive = _positive_weights(setting, counts, len(train), names).astype(np.float32)
        lines.append(
            f"weights of positive labels (--pos_weight): {_listed(order, names, positive, '{:.3g}')}"
        )
    if objective.sampling:
        share = (
            (counts > 0) / (counts > 0).sum()
            if objective.sampling == "balanced"
            else np.sqrt(counts)
        )
        share = share / share.sum()
        splits["train"] = replace(
            splits["train"], sampling_probabilities=(share / np.maximum(counts, 1))[train.labels]
        )
        lines.append(
            f"classes of an epoch's rows, in % (--sampling): {_listed(order, names, 100 * share, '{:.3g}')}"
        )
        if objective.class_weights and objective.sampling == "balanced":
            lines.append(
                "--class_weights and --sampling balanced both raise the rare classes: one of them is usual"
            )
    compensated = (
        objective.class_weights
        or objective.pos_weight
        or objective.sampling
        or objective.loss == "focal"
    )
    return (
        splits,
        positive,
        lines,
        "" if compensated else _advice(order, counts, len(train), labels),
    )


def _check_objective(labels: Labels, objective: ObjectiveSettings) -> None:
    faults, kind = Faults(), labels.problem_type.replace("_", " ")
    if labels.problem_type == "regression":
        unsupported = dict.fromkeys(
            ("class_weights", "pos_weight", "sampling"), "it is for classes"
        )
        if objective.loss != "cross_entropy":
            faults.add(
                f"--loss {objective.loss} is for classes, and this is regression: leave it out"
            )
    elif labels.problem_type == MULTI:
        unsupported = {"class_weights": "use --pos_weight, the weight of positive labels",
                       "sampling": "a row has several classes; use --pos_weight"}  # fmt: skip
    else:
        unsupported = {"pos_weight": "use --class_weights"}
    for name, why in unsupported.items():
        if value := getattr(objective, name):
            faults.add(f"--{name} {value} does not fit {kind}: {why}")
    faults.raise_if_any()


def _class_counts(labels: Labels, split: Split) -> np.ndarray:
    """(classes,) int64: the rows of each class."""
    if labels.problem_type == MULTI:
        return np.asarray(split.labels.sum(axis=0, dtype=np.float64)).astype(np.int64)
    return np.bincount(split.labels, minlength=labels.size)


def _positive_weights(
    setting: str, counts: np.ndarray, rows: int, names: tuple[str, ...]
) -> np.ndarray:
    """(classes,) float64: the weights of positive labels."""
    if setting != "balanced":
        return _weights_by_name("pos_weight", setting, names)
    varies = (counts > 0) & (
        counts < rows
    )  # a label of every row would weigh 0, and not be trained at all
    return np.where(varies, (rows - counts) / np.maximum(counts, 1), 1)


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
            faults.add(
                f"{where}: there is no class {name!r}{did_you_mean(name, names)}: there are {listing(names)}"
            )
        elif not 0 < weight < np.inf:
            faults.add(f"{where}: write balanced, or a number above 0 for each class, {names[0]}=2")
        else:
            weights[name] = weight
    faults.raise_if_any()
    return np.array(list(weights.values()))


def _listed(order: list[int], names: tuple[str, ...], numbers: np.ndarray, written: str) -> str:
    shown = (
        order
        if len(order) <= _MAX_LISTED
        else [*order[: _MAX_LISTED // 2], -1, *order[-_MAX_LISTED // 2 :]]
    )
    return ", ".join(
        "..." if place < 0 else f"{names[place]} {written.format(numbers[place])}"
        for place in shown
    )


def _advice(order: list[int], counts: np.ndarray, rows: int, labels: Labels) -> str:
    """A line with settings that help, if the model may ignore the rarest class."""
    present = [place for place in order if counts[place]] or order
    most, least = counts[present[0]], counts[present[-1]]
    name, rarest = labels.names[present[0]], labels.names[present[-1]]
    if labels.problem_type == MULTI and 0 < least < _RARE_SHARE * rows:
        imbalance = f"the labels are imbalanced: {rarest} is present in {100 * least / rows:.2g} % of the rows"
        remedy = "--pos_weight balanced makes"
    elif labels.problem_type != MULTI and most >= _IMBALANCE * least:
        imbalance = f"the classes are imbalanced: {name} has {most / least:.3g} times as many rows as {rarest}"
        remedy = "--class_weights balanced, --sampling balanced or --loss focal make"
    else:
        return ""
    return f"{imbalance}; {remedy} the rare ones count, and f1_macro shows them (docs/uneven-classes.md)"


def doubtful_names(names: Sequence[str]) -> Iterator[str]:
    """Notes on classes that are probably one (`pos` and `Pos`, `1` and `01` or a full-width 1), or a missing label."""
    alike: dict[str, list[str]] = {}
    for name in names:
        folded = unicodedata.normalize("NFKC", name).casefold()
        visible = "".join(filter(str.isprintable, "".join(folded.split())))
        number = to_float(visible) if len(visible) < 16 else None  # whose digits a float holds
        key = re.sub(r"^0+(?=\d)", "", visible) if number is None else str(number + 0.0)  # -0 is 0
        alike.setdefault(key, []).append(repr(name))
    if groups := [" and ".join(group) for group in alike.values() if len(group) > 1]:
        yield f"classes with almost the same name: {listing(groups)}; if they are one, write it in one way"
    parts_of = {name: {part.strip() for part in re.split(r"[|｜;；、]", name)} for name in names}
    counts = Counter(part for parts in parts_of.values() for part in parts)
    if joined := [
        repr(name)
        for name, parts in parts_of.items()
        if min(len(parts), *(counts[part] for part in parts)) > 1
    ]:
        yield f"the parts of classes {listing(joined)} recur: if rows have several classes, pass --problem_type {MULTI}"
    for name in sorted(_MISSING_NAMES.intersection(names)):
        yield f"{name!r} is a class: if it stands for a missing label, remove its rows"
