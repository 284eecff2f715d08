"""toolkit/models/loss.py: each sample's loss; its mean is transformers' own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from toolkit.config import ProblemType
from toolkit.models.loss import sample_losses

LABELS: dict[str, tuple[int, torch.Tensor]] = {
    "single_label_classification": (3, torch.tensor([0, 2, 1, 2])),
    "multi_label_classification": (3, torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])),
    "regression": (1, torch.tensor([0.5, -1.0, 3.25, 0.0])),
}


def model_for(tiny_model: Path, problem: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(
        tiny_model, num_labels=LABELS[problem][0], problem_type=problem
    ).eval()


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("problem", get_args(ProblemType))
def test_the_mean_is_transformers_own_loss(tiny_model: Path, tokenizer: Any, problem: ProblemType, size: int) -> None:
    model, labels = model_for(tiny_model, problem), LABELS[problem][1][:size]
    inputs = tokenizer(["good film", "很好", "the price", "dull and bad"][:size], padding=True, return_tensors="pt")
    output = model(**inputs, labels=labels)
    losses = sample_losses(output.logits, labels, problem)
    assert losses.shape == (size,)
    assert losses.dtype == torch.float32
    assert losses.mean().item() == pytest.approx(output.loss.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(loss, model.classifier.weight, retain_graph=True)[0]
                    for loss in (losses.mean(), output.loss))  # fmt: skip
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("problem", get_args(ProblemType))
def test_each_loss_is_of_its_own_sample(problem: ProblemType) -> None:
    classes, labels = LABELS[problem]
    logits = torch.randn(4, classes, generator=torch.Generator().manual_seed(1))
    together = sample_losses(logits, labels, problem)
    alone = torch.cat([sample_losses(logits[row : row + 1], labels[row : row + 1], problem) for row in range(4)])
    assert torch.allclose(together, alone)
    assert len(set(together.tolist())) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("problem", get_args(ProblemType))
def test_the_loss_of_half_precision_logits_is_float32(problem: ProblemType, dtype: torch.dtype) -> None:
    classes, labels = LABELS[problem]
    logits = torch.randn(4, classes, generator=torch.Generator().manual_seed(1)).to(dtype)
    losses = sample_losses(logits, labels, problem)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, sample_losses(logits.float(), labels, problem))


def test_label_smoothing_is_torchs() -> None:
    classes, labels = LABELS["single_label_classification"]
    logits = torch.randn(4, classes, generator=torch.Generator().manual_seed(1))
    smoothed = sample_losses(logits, labels, "single_label_classification", label_smoothing=0.1)
    assert smoothed.mean() == F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert not torch.allclose(smoothed, sample_losses(logits, labels, "single_label_classification"))
