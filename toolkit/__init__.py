"""Fine-tuning of BERT-like encoders, with the same result on any number of GPUs and machines.

`import toolkit` offers what a recipe, a script or a notebook needs (docs/api.md), and imports each
name on first use."""

import importlib
from typing import Any

__version__ = "0.1.0"

_OFFERED = {
    "api": ("convert", "evaluate", "predict", "settings", "wait_for_all"),
    "data.tokens": ("Split",),
    "evaluation": ("Evaluation", "Outputs", "classification_metrics"),
    "launch": ("make_accelerator",),
    "models.classifier": ("load_classifier",),
    "models.to_bigbird": ("long_model",),
    "objective": ("make_objective",),
    "objective.losses": ("Objective", "sample_losses", "token_losses"),
    "pretrained": ("whole_weights",),
    "run": ("Run",),
    "training.optimizer": ("make_optimizer", "parameter_groups"),
    "training.steps": ("Step",),
    "utils.modules": ("unwrapped",),
}
"""Module -> the names that `import toolkit` offers from it."""
_MODULES = {name: module for module, names in _OFFERED.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolkit.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_MODULES, *globals()])
