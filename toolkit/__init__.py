"""Fine-tuning of BERT-like encoders, with the same result on any number of GPUs and machines.

`import toolkit` offers what a recipe, a script or a notebook needs (docs/api.md), and imports each
name on first use."""

from typing import Any

from toolkit.utils.lazy import offered

__version__ = "0.1.0"

_OFFERED = {
    "api": ("convert", "evaluate", "predict", "settings", "wait_for_all"),
    "data.tokens": ("Split",),
    "evaluation.metrics": ("classification_metrics",),
    "evaluation.outputs": ("Evaluation", "Outputs"),
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


def __getattr__(name: str) -> Any:
    return offered(__name__, _OFFERED, name)


def __dir__() -> list[str]:
    return sorted(sum(_OFFERED.values(), ()))
