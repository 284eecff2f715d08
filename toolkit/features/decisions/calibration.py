"""Whether probabilities are right as often as they say, and the temperature that mends them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

TEMPERATURES = (0.05, 20.0)
_BINS = 15


def calibration_error(probabilities: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """The expected calibration error `ece` (Guo et al., 2017; bins of equal width) of (N, C)
    probabilities for (N,) classes, or (N, C) labels.

    With one label per row it is that of the most probable class; with several each label counts.
    """
    if truth.ndim == 2:
        confidence = probabilities.ravel()
        correct = truth.ravel()
    else:
        confidence = probabilities.max(axis=1)
        correct = probabilities.argmax(axis=1) == truth
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, correct - confidence)  # of each bin, times its rows
    return {"ece": float(np.abs(gaps).sum() / len(confidence))}


def fit_temperature(logits: np.ndarray, truth: np.ndarray) -> float:
    """The T that minimises the negative log likelihood of softmax(logits / T), or of the sigmoid
    (Guo et al., 2017); 1 without mistakes, of which there would be none to learn from."""
    from scipy.optimize import minimize_scalar

    scores = torch.tensor(logits, dtype=torch.float64)
    target = torch.tensor(truth)
    compute_loss: Any = F.cross_entropy
    answers = scores.argmax(dim=1)
    if truth.ndim == 2:
        compute_loss = F.binary_cross_entropy_with_logits
        target = target.double()
        answers = scores > 0
    if bool((answers == target).all()):
        return 1.0

    def loss(log_temperature: float) -> float:
        return float(compute_loss(scores / np.exp(log_temperature), target))

    result = minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded")
    return float(np.exp(result.x))
