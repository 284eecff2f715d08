"""Whether probabilities are right as often as they say, and the temperature that mends them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

TEMPERATURES = (0.05, 20.0)
_BINS = 15


def calibration_error(probabilities: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """`ece` and `brier` of (N, C) probabilities for (N,) classes, or (N, C) labels.

    With one label per row the expected calibration error is that of the most probable class (Guo et
    al., 2017; bins of equal width), and Brier's score (1950) a sum over classes; with several, both
    count each label.
    """
    if truth.ndim == 2:
        confidence = probabilities.ravel()
        correct = truth.ravel()
        brier = np.mean((probabilities - truth) ** 2)
    else:
        confidence = probabilities.max(axis=1)
        correct = probabilities.argmax(axis=1) == truth
        target = np.eye(probabilities.shape[1])[truth]  # (N, C)
        brier = np.mean(((probabilities - target) ** 2).sum(axis=1))
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, correct - confidence)  # of each bin, times its rows
    return {"ece": float(np.abs(gaps).sum() / len(confidence)), "brier": float(brier)}


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
