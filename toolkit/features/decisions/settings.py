"""`--tune_thresholds`, `--calibrate`, `--abstain_below`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from toolkit.config.sections import section


def _criterion(text: str | None) -> str | None:
    if text is None or re.fullmatch(r"f1|precision_at_recall=(0?\.\d+|1)|cost=\d*\.?\d+:\d*\.?\d+", text):
        return text
    raise ValueError(
        "give f1, precision_at_recall=0.9 (the best precision with a recall of at least 90 %), or cost=1:5 (cost of a "
        "false positive and of a false negative)"
    )


@section
class DecisionSettings:
    """How probabilities become answers; tuned on the validation rows at the end and saved with the model."""

    tune_thresholds: Annotated[str | None, AfterValidator(_criterion)] = None
    """f1; for two classes or several labels also precision_at_recall=0.9, or cost=1:5 (false positive, negative)."""
    positive_class: str | None = None
    """With two classes, the one whose threshold is tuned; default: the second."""
    calibrate: bool = False
    """Divide the logits by a temperature, so that of answers with probability 0.8 about 80 % are right."""
    abstain_below: float | None = Field(default=None, gt=0, lt=1)
    """Give no answer (null, an empty cell) if the probability of the answer is lower; for one class per text."""

    @property
    def any(self) -> bool:
        return bool(self.tune_thresholds or self.calibrate or self.abstain_below is not None)
