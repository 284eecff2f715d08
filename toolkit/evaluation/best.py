"""Which evaluation was the best so far, by `--metric_for_best_model`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit.config import TrainingSettings
from toolkit.data.prepare import Prepared
from toolkit.errors import UserError, did_you_mean
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation
from toolkit.utils.features import features
from toolkit.utils.files import as_json

_USUAL = {
    "single_label_classification": "f1_macro",
    "multi_label_classification": "f1_micro",
    "regression": "loss",
}
_LOWER_IS_BETTER = ("loss", "mse", "mae", "rmse", "error")
_TRIAL_ROWS = 10_000


def _usual_metric(problem_type: str) -> str:
    metrics = [_USUAL, *(feature.usual_metrics for feature in features())]
    return next(known[problem_type] for known in metrics if problem_type in known)


class Best:
    """The best evaluation so far, and how long ago it was."""

    def __init__(
        self, metric: str | None, problem_type: str, patience: int | None = None, greater_is_better: bool | None = None
    ) -> None:
        """`patience`: evaluations without a better one after which training stops."""
        self.patience = patience or math.inf
        self.metric = (metric or _usual_metric(problem_type)).removeprefix("eval_")
        if greater_is_better is None:
            greater_is_better = not self.metric.endswith(_LOWER_IS_BETTER)
        self.sign = 1.0 if greater_is_better else -1.0
        self.forget()

    def forget(self) -> None:
        """As before the first evaluation."""
        self.value = -math.inf
        self.step = 0
        self.waited = 0
        """Evaluations since the best one."""

    def improved(self, evaluation: Evaluation, step: int) -> bool:
        """Takes note of an evaluation; True when it is better than all before it."""
        number = evaluation.numbers[self.metric]
        value = math.nan if number is None else self.sign * number  # null in eval.jsonl
        if value > self.value:
            self.value, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    @property
    def gives_up(self) -> bool:
        """Whether there has been no better evaluation for so long that training stops."""
        return self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        """For a checkpoint: JSON."""
        value = None if math.isinf(self.value) else self.value
        return {"metric": self.metric, "value": value, "step": self.step, "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint's state; anew where that was of another metric."""
        if state["metric"] == self.metric and state["value"] is not None:
            self.value, self.step, self.waited = state["value"], state["step"], state["waited"]


def make_best(
    accelerator: Accelerator, settings: TrainingSettings, data: Prepared, compute_metrics: ComputeMetrics
) -> Best:
    """`Best` for a recipe's metrics, which are computed once, on outputs made up for the validation rows: what fails in
    them, or is not among them, is an error now and not after an epoch. All processes call this.

    Raises UserError for a `--metric_for_best_model` that they do not hold.
    """
    problem_type = data.facts["problem_type"]
    best = Best(
        settings.metric_for_best_model, problem_type, settings.early_stopping_patience, settings.greater_is_better
    )
    numbers: Any = {}
    if accelerator.is_main_process:
        outputs, truth = data.targets.trial(data.validation) or _random_outputs(data)
        numbers = as_json(compute_metrics(outputs, truth))
    known = ["loss", *(name for name, number in numbers.items() if type(number) in (int, float))]
    known = broadcast_object_list([known])[0]
    if best.metric not in known:
        metric = settings.metric_for_best_model or best.metric
        raise UserError(
            f"--metric_for_best_model {metric}{did_you_mean(best.metric, known)}: {problem_type} has {', '.join(known)}"
        )
    return best


def _random_outputs(data: Prepared) -> tuple[np.ndarray, np.ndarray]:
    """(random logits (N, C), labels) of at most so many validation rows."""
    labels = np.asarray(data.validation.labels)
    if len(labels) > _TRIAL_ROWS:  # from end to end, and one of each class, however rare
        firsts = labels.argmax(axis=0) if labels.ndim > 1 else np.unique(labels, return_index=True)[1][:_TRIAL_ROWS]
        labels = labels[np.union1d(np.linspace(0, len(labels) - 1, _TRIAL_ROWS, dtype=np.int64), firsts)]
    size = (len(labels), len(data.facts["labels"]))
    return np.random.default_rng(0).standard_normal(size).astype(np.float32), labels
