"""The best evaluation so far by `--metric_for_best_model`, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from toolkit.errors import UserError, did_you_mean, listing
from toolkit.evaluation.outputs import Evaluation

_LOWER_IS_BETTER = ("loss", "mse", "mae", "error", "perplexity")


class Best:
    """The best evaluation so far, and the number of evaluations since."""

    def __init__(
        self,
        metric: str,
        patience: int | None = None,
        greater_is_better: bool | None = None,
    ) -> None:
        """`patience`: training stops after this many evaluations without improvement."""
        self.patience = patience or math.inf
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
        self.check(evaluation.numbers)
        number = evaluation.numbers[self.metric]
        value = -math.inf
        if number is not None and not math.isnan(number):  # null in eval.jsonl
            value = self.sign * number
        # the first counts without a number, too: a run ends with a model
        if value > self.value or not self.step:
            self.value = value
            self.step = step
            self.patience_counter = 0
            return True
        self.patience_counter += 1
        return False

    def check(self, numbers: Mapping[str, Any]) -> None:
        """Raises UserError if the numbers of an evaluation lack the metric."""
        known = [name for name, number in numbers.items() if type(number) in (int, float)]
        if self.metric not in known and numbers.get(self.metric, 0) is not None:
            hint = did_you_mean(self.metric, known)
            metrics = listing(known, 20)
            raise UserError(
                f"--metric_for_best_model {self.metric}{hint}: there are {metrics}"
            )

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
        """Continues from a checkpoint's state, unless that is of another metric or
        `--greater_is_better`."""
        if (state["metric"], state.get("sign", self.sign)) == (self.metric, self.sign):
            # no evaluation gave a number yet
            value = -math.inf if state["value"] is None else state["value"]
            self.value, self.step, self.patience_counter = (
                value,
                state["step"],
                state["waited"],
            )
