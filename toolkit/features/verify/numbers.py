"""What a run has logged, and how far two runs are apart."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOSS = "loss"
NORM = "gradient norm"
EVALUATION = "evaluation"


@dataclass
class Numbers:
    """Of optimizer steps, which are counted from 1."""

    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    """Infinite in a step that fp16 skips."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Equal if a step took the same samples."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """`STEP METRIC` -> its value on the validation rows."""

    @classmethod
    def of_run(cls, folder: Path, after: int = 0) -> Numbers:
        """Those of the steps that follow the step `after`."""
        numbers = cls()
        for line in _lines(folder / "metrics.jsonl", after):
            step = line["step"]
            norm = line["grad_norm"]
            numbers.losses[step] = line["loss"]
            numbers.grad_norms[step] = math.inf if norm is None else norm
            numbers.tokens[step] = line["tokens"]
        for line in _lines(folder / "eval.jsonl", after):
            if line["split"] == "validation":
                numbers.evaluations |= _metrics(line)
        return numbers

    def differences(self, other: Numbers, only_losses: bool = False) -> dict[str, float]:
        """Figure -> the largest relative difference. `only_losses`: of evaluations the losses
        alone, since rounding changes other metrics in jumps."""
        names = set(self.evaluations) | set(other.evaluations)
        if only_losses:
            names = {name for name in names if name.endswith(" loss")}
        return {
            LOSS: _difference(self.losses, other.losses),
            NORM: _difference(self.grad_norms, other.grad_norms),
            EVALUATION: _difference(
                {name: self.evaluations.get(name) for name in names},
                {name: other.evaluations.get(name) for name in names},
            ),
        }


def _difference(one: dict[Any, Any], other: dict[Any, Any]) -> float:
    """Infinite if one lacks a value of the other; pairs of which one is not finite do not count."""
    if one.keys() != other.keys() or None in (*one.values(), *other.values()):
        return math.inf
    pairs = [(one[key], other[key]) for key in one if math.isfinite(one[key] + other[key])]
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)


def _lines(path: Path, after: int) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [line for line in lines if line["step"] > after]


def _metrics(line: dict[str, Any]) -> dict[str, float]:
    numbers = {name: each for name, each in line.items() if isinstance(each, int | float)}
    return {f"{line['step']} {name}": each for name, each in numbers.items()}
