"""Saved weights go back into parameters that PyTorch's FSDP2 divides, with CPU tensors on gloo.

Accelerate does not divide without a GPU; the function that loads does not need it to.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from tests.runs import WAYS, recipe


@pytest.mark.multiprocess
def test_every_parameter_comes_back(tmp_path: Path, tiny_model: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3).save_pretrained(tmp_path)
    finished = recipe(*WAYS["ddp x2"], tmp_path, script="tests/shards_worker.py")
    assert finished.code == 0, finished.err[-3000:]
    assert "every parameter is the saved one" in finished.out
