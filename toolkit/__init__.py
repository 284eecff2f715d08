"""Fine-tuning of BERT-like encoders, the same under every way to launch it.

`import toolkit` offers what a script or a notebook needs (docs/api.md); each name is imported when it is first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_OFFERED = {
    "convert": "api",
    "evaluate": "api",
    "predict": "api",
    "settings": "api",
    "wait_for_all": "api",
    "prepare_data": "data.prepare",
    "load_tokenizer": "data.tokens",
    "Outputs": "evaluation",
    "classification_evaluation": "evaluation",
    "classification_metrics": "evaluation",
    "evaluation_batches": "evaluation",
    "make_accelerator": "launch",
    "load_classifier": "models.classifier",
    "sample_losses": "objective.losses",
    "layer_of": "pretrained",
    "load_config": "pretrained",
    "Run": "run",
    "align_strategy": "training.strategy",
    "make_scheduler": "training.optimizer",
    "parameter_groups": "training.optimizer",
    "precision_of": "training.resume",
    "Steps": "training.steps",
}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolkit.{_OFFERED[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_OFFERED, *globals()])
