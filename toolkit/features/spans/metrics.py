"""Precision, recall and F1 of exact spans: start, end and label are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from toolkit.features.spans.spans import Span
from toolkit.report.statistics import Scores, intervals

_NAMES = ("precision", "recall", "f1", "f1_macro")


def span_metrics(
    predicted: Sequence[Sequence[Span]], truth: Sequence[Sequence[Span]]
) -> dict[str, Any]:
    """The predicted and the true spans of each text -> precision, recall and F1 over all spans
    (micro), the mean F1 of the labels that occur (macro), and all three of each label, as conlleval
    and seqeval count them."""
    labels, counts = span_counts(predicted, truth)
    sums = counts.sum(axis=0)  # (3, L)
    numbers: dict[str, Any] = dict(zip(_NAMES, _scores(sums).tolist(), strict=True))
    numbers["per_class"] = {
        name: {
            **dict(zip(_NAMES[:3], _ratios(sums[:, place]).tolist(), strict=True)),
            "support": int(sums[2, place]),
        }
        for place, name in enumerate(labels)
    }
    return numbers


def span_counts(
    predicted: Sequence[Sequence[Span]], truth: Sequence[Sequence[Span]]
) -> tuple[list[str], np.ndarray]:
    """(The labels that occur, (N, 3, L): of each text the right, the predicted and the true spans of
    each label)."""
    labels = sorted({span.label for spans in (*predicted, *truth) for span in spans})
    place_of = {label: place for place, label in enumerate(labels)}
    counts = np.zeros((len(truth), 3, len(labels)), np.int64)
    for text, (found, true) in enumerate(zip(predicted, truth, strict=True)):
        right = set(found).intersection(true)
        for kind, spans in enumerate((right, found, true)):
            for span in spans:
                counts[text, kind, place_of[span.label]] += 1
    return labels, counts


def span_intervals(
    predicted: Sequence[Sequence[Span]], truth: Sequence[Sequence[Span]]
) -> Mapping[str, Mapping[str, float]]:
    """Each metric with its 95 % interval over resampled texts."""
    labels, counts = span_counts(predicted, truth)
    rows = sparse.csr_array(counts.reshape(len(truth), -1).astype(float))

    def metrics(means: np.ndarray) -> np.ndarray:
        return _scores(means.reshape(3, len(labels)))

    return intervals(Scores(_NAMES, rows, metrics))


def _scores(sums: np.ndarray) -> np.ndarray:
    """(3, L) right, predicted and true spans -> the metrics of _NAMES."""
    occurs = sums[1] + sums[2] > 0
    macro = np.zeros(1)
    if occurs.any():
        macro = _ratios(sums[:, occurs])[2:].mean(axis=1)
    return np.append(_ratios(sums.sum(axis=1)), macro)


def _ratios(sums: np.ndarray) -> np.ndarray:
    """(3, ...) -> precision, recall and F1; 0 where there is nothing to divide by."""
    right, predicted, true = sums
    tiny = np.finfo(float).tiny
    totals = (predicted, true, (predicted + true) / 2)
    return np.array([right / np.maximum(total, tiny) for total in totals])
