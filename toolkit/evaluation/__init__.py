"""Evaluation: every sample exactly once, with the recipe's loss and metrics."""

from toolkit.evaluation.best import Best as Best
from toolkit.evaluation.metrics import classification_metrics as classification_metrics
from toolkit.evaluation.outputs import ComputeMetrics as ComputeMetrics
from toolkit.evaluation.outputs import Evaluation as Evaluation
from toolkit.evaluation.outputs import Outputs as Outputs
