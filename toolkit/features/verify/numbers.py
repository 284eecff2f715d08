"""What a run has logged, and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.report.files import read_lines

LOSS = "loss"
NORM = "gradient norm"
EVALUATION = "evaluation"

Numbers = dict[str, dict[str, float]]
"""LOSS and NORM -> step -> value (infinite in a step that fp16 skips); EVALUATION -> `STEP METRIC`
-> value on the validation rows."""


def numbers_of(folder: Path, after: int = 0) -> Numbers:
    """Those of a run's steps that follow the step `after`; steps are counted from 1."""
    numbers: Numbers = {LOSS: {}, NORM: {}, EVALUATION: {}}
    for line in read_lines(folder / "metrics.jsonl"):
        step, norm = line["step"], line["grad_norm"]
        if step > after:
            numbers[LOSS][str(step)] = line["loss"]
            numbers[NORM][str(step)] = math.inf if norm is None else norm
    for line in read_lines(folder / "eval.jsonl"):
        if line["step"] > after and line["split"] == "validation":
            values = {
                name: each for name, each in line.items() if isinstance(each, int | float)
            }
            numbers[EVALUATION] |= {
                f"{line['step']} {name}": each for name, each in values.items()
            }
    return numbers


def differences(one: Numbers, other: Numbers, figures: Iterable[str]) -> dict[str, float]:
    """Figure -> the largest relative difference."""
    return {figure: _difference(one[figure], other[figure]) for figure in figures}


def _difference(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Infinite if one lacks a value of the other; pairs of which one is not finite do not count."""
    if one.keys() != other.keys():
        return math.inf
    pairs = [(one[key], other[key]) for key in one if math.isfinite(one[key] + other[key])]
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)
