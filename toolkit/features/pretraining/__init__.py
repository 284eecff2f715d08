"""Continued pretraining on unlabelled texts. Names for a recipe, imported on first use."""

from typing import Any

from toolkit.utils.lazy import offered

_OFFERED = {
    "data": ("masked_evaluation", "masked_metrics"),
    "model": ("load_masked_model", "masked_sums"),
}


def __getattr__(name: str) -> Any:
    return offered(__name__, _OFFERED, name)
