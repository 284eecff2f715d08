"""The best evaluation so far by `--metric_for_best_model`, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit.config import TrainingSettings
from toolkit.data.prepare import Prepared
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation
from toolkit.utils.files import as_json

_USUAL = {
    "single_label_classification": "f1_macro",
    "multi_label_classification": "f1_micro",
    "regression": "loss",
}
_LOWER_IS_BETTER = ("loss", "mse", "mae", "error", "perplexity")
_TRIAL_ROWS = 10_000


class Best:
    """The best evaluation so far, and the number of evaluations since."""

    def __init__(
        self,
        metric: str | None,
        problem_type: str,
        patience: int | None = None,
        greater_is_better: bool | None = None,
    ) -> None:
        """`patience`: training stops after this many evaluations without improvement."""
        self.patience = patience or math.inf
        if not metric:
            metric = _USUAL.get(problem_type, "loss")
        self.metric = metric.removeprefix("eval_")
        if greater_is_better is None:
            greater_is_better = not self.metric.endswith(_LOWER_IS_BETTER)
        self.sign = 1.0 if greater_is_better else -1.0
        self.reset()

    def reset(self) -> None:
        self.value = -math.inf
        self.step = 0
        self.patience_counter = 0

    def update(self, evaluation: Evaluation, step: int) -> bool:
        """Records an evaluation, and returns whether it is better than all before it."""
        if self.metric not in (numbers := evaluation.numbers):
            metrics = f"--metric_for_best_model takes one of {listing(numbers, 20)}"
            raise UserError(f"the evaluation of step {step} has no {self.metric}: {metrics}")
        number = numbers[self.metric]
        value = (
            -math.inf if number is None or math.isnan(number) else self.sign * number
        )  # null in eval.jsonl
        if (
            value > self.value or not self.step
        ):  # the first counts without a number, too: a run ends with a model
            self.value, self.step, self.patience_counter = value, step, 0
            return True
        self.patience_counter += 1
        return False

    @property
    def patience_exhausted(self) -> bool:
        """Whether training stops early."""
        return self.patience_counter >= self.patience

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores, as JSON."""
        value = None if math.isinf(self.value) else self.value
        state = {"value": value, "step": self.step, "waited": self.patience_counter}
        return {"metric": self.metric, "sign": self.sign, **state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint's state; a state of another metric or `--greater_is_better` is ignored."""
        if (state["metric"], state.get("sign", self.sign)) == (self.metric, self.sign):
            value = (
                -math.inf if state["value"] is None else state["value"]
            )  # no evaluation gave a number yet
            self.value, self.step, self.patience_counter = value, state["step"], state["waited"]


def make_best(
    accelerator: Accelerator,
    settings: TrainingSettings,
    data: Prepared,
    compute_metrics: ComputeMetrics,
) -> Best:
    """Makes `Best`, and calls the recipe's metrics once on random outputs for the validation rows, so that a bug in
    them is raised now and not after an epoch. A collective. Raises UserError for a `--metric_for_best_model` that is
    not among the metrics."""
    problem_type = data.facts["problem_type"]
    metric = settings.metric_for_best_model or data.targets.usual_metric
    best = Best(metric, problem_type, settings.early_stopping_patience, settings.greater_is_better)
    numbers: Any = {}
    if accelerator.is_main_process:
        outputs, truth = data.targets.trial(data.validation) or _random_outputs(data)
        numbers = as_json(compute_metrics(outputs, truth))
    known = ["loss", *(name for name, number in numbers.items() if type(number) in (int, float))]
    known = broadcast_object_list([known])[0]
    if best.metric not in known:
        hint = did_you_mean(best.metric, known)
        raise UserError(
            f"--metric_for_best_model {metric or best.metric}{hint}: {problem_type} has {', '.join(known)}"
        )
    return best


def _random_outputs(data: Prepared) -> tuple[np.ndarray, np.ndarray]:
    """(random logits (N, C), labels) for at most `_TRIAL_ROWS` evenly spaced validation rows and one of each class."""
    labels = np.asarray(data.validation.labels)
    if len(labels) > _TRIAL_ROWS:
        firsts = (
            labels.argmax(axis=0)
            if labels.ndim > 1
            else np.unique(labels, return_index=True)[1][:_TRIAL_ROWS]
        )
        labels = labels[
            np.union1d(np.linspace(0, len(labels) - 1, _TRIAL_ROWS, dtype=np.int64), firsts)
        ]
    size = (len(labels), len(data.facts["labels"]))
    return np.random.default_rng(0).standard_normal(size).astype(np.float32), labels
