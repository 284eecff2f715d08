"""Perplexity and accuracy of masked tokens, from two sums for each text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from toolkit.data.tokens import Split
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, Outputs


def masked_metrics(sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """(N, 2) sums over each text's masked tokens, of losses and of right answers, and (N,) how many they are -> numbers
    of all masked tokens together."""
    loss, right = (sums.sum(axis=0, dtype=np.float64) / counts.sum()).tolist()
    return {"perplexity": math.exp(min(loss, 700)), "masked_accuracy": right, "masked_tokens": int(counts.sum())}


def masked_evaluation(outputs: Outputs, compute_metrics: ComputeMetrics) -> Evaluation:
    """The evaluation of gathered sums (N, 2); every process gets the numbers."""
    if not (arrays := outputs.in_order()):
        return outputs.evaluation()
    (sums,), counts = arrays, outputs.split.loss_denominators()
    lines = partial(_lines, outputs.split, sums, counts.tolist())
    return outputs.evaluation(sums[:, 0], compute_metrics(sums, counts), lines)


def _lines(split: Split, sums: np.ndarray, counts: list[int]) -> Iterator[dict[str, Any]]:
    """Of each text: its masked tokens, their mean loss, and what part of them is right."""
    for row, count, (loss, right) in zip(split.rows, counts, sums.tolist(), strict=True):
        scores = {"loss": round(loss / max(1, count), 6), "masked_accuracy": round(right / max(1, count), 6)}
        yield {"id": int(row), "masked_tokens": count, "scores": scores}
