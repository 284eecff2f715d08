"""Evaluation of every sample exactly once, with the recipe's own loss and metrics."""

from toolkit.evaluation.best import Best
from toolkit.evaluation.classification import classification_evaluation, classification_metrics
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, Outputs, evaluation_batches

__all__ = [
    "Best",
    "ComputeMetrics",
    "Evaluation",
    "Outputs",
    "classification_evaluation",
    "classification_metrics",
    "evaluation_batches",
]
