"""Titles of long texts. Names for a recipe, imported on first use."""

from typing import Any

from toolkit.utils.lazy import offered

_OFFERED = {
    "evaluation": ("Writer", "title_evaluation", "title_metrics"),
    "model": ("load_title_model",),
}


def __getattr__(name: str) -> Any:
    return offered(__name__, _OFFERED, name)
