"""Fine-tuning of BERT-like encoders, the same under every way to launch it.

`import toolkit` offers what a recipe, a script or a notebook needs (docs/api.md); a name is imported when it is first
used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "convert": "api",
    "evaluate": "api",
    "load_data": "api",
    "predict": "api",
    "settings": "api",
    "start_accelerator": "api",
    "wait_for_all": "api",
    "prepare_data": "data.prepare",
    "Split": "data.tokens",
    "load_tokenizer": "data.tokens",
    "Evaluation": "evaluation",
    "Outputs": "evaluation",
    "classification_evaluation": "evaluation",
    "classification_metrics": "evaluation",
    "evaluate_classifier": "evaluation",
    "evaluation_batches": "evaluation",
    "make_accelerator": "launch",
    "load_classifier": "models.classifier",
    "long_model": "models.to_bigbird",
    "Objective": "objective.base",
    "make_objective": "objective",
    "sample_losses": "objective.losses",
    "token_losses": "objective.losses",
    "layer_of": "pretrained",
    "load_config": "pretrained",
    "whole_weights": "pretrained",
    "Run": "run",
    "make_optimizer": "training.optimizer",
    "make_scheduler": "training.optimizer",
    "parameter_groups": "training.optimizer",
    "prepare": "training.prepare",
    "precision_of": "training.resume",
    "Steps": "training.steps",
    "align_strategy": "training.strategy",
    "unwrapped": "utils.modules",
}
"""A name that `import toolkit` offers -> its module."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolkit.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_MODULES, *globals()])
