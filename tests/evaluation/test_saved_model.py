"""toolkit/evaluation/saved_model.py: where a saved model computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from toolkit.evaluation.saved_model import SavedModel


def test_the_model_is_on_the_device() -> None:
    """Under FSDP `prepare_model` leaves it on the CPU."""
    module: Any = torch.nn.Linear(3, 2)
    module.config = None
    saved: Any = object.__new__(SavedModel)
    saved.settings, saved.answers = None, SimpleNamespace(load=lambda _: module)
    accelerator = SimpleNamespace(device=torch.device("meta"), prepare_model=lambda model, evaluation_mode: model)
    saved.load(accelerator, 8, 4, None)
    assert saved.model.weight.is_meta
