"""toolkit/objective/losses.py: losses per sample, whose mean is transformers' loss."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from toolkit.config import ProblemType
from toolkit.objective.losses import sample_losses, token_losses

SINGLE, MULTI = "single_label_classification", "multi_label_classification"
LABELS: dict[str, torch.Tensor] = {
    SINGLE: torch.tensor([0, 2, 1, 2]),
    MULTI: torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]),
    "regression": torch.tensor([0.5, -1.0, 3.25, 0.0]),
}
LOGITS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("problem", get_args(ProblemType))
def test_the_mean_is_transformers_loss(tiny_model: Path, problem: ProblemType, size: int) -> None:
    torch.manual_seed(0)
    load: Any = AutoModelForSequenceClassification.from_pretrained
    count = 1 if problem == "regression" else 3
    model = load(tiny_model, num_labels=count, problem_type=problem).eval()
    labels = LABELS[problem][:size]
    output = model(input_ids=torch.arange(5, 5 + 6 * size).view(size, 6), labels=labels)
    losses = sample_losses(output.logits, labels, problem)
    assert (losses.shape, losses.dtype) == ((size,), torch.float32)
    gradients = []
    for loss in (losses.mean(), output.loss):
        gradients += torch.autograd.grad(loss, model.classifier.weight, retain_graph=True)
    torch.testing.assert_close(losses.mean(), output.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_label_smoothing_and_pos_weight_are_torchs() -> None:
    labels = LABELS[SINGLE]
    smoothed = sample_losses(LOGITS, labels, SINGLE, label_smoothing=0.1)
    assert smoothed.mean() == F.cross_entropy(LOGITS, labels, label_smoothing=0.1)
    labels, weight = LABELS[MULTI], torch.tensor([3.0, 1.0, 0.25])
    losses = sample_losses(LOGITS, labels, MULTI, pos_weight=weight)
    expected = F.binary_cross_entropy_with_logits(LOGITS, labels, pos_weight=weight)
    torch.testing.assert_close(losses.mean(), expected)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_the_focal_loss_is_that_of_its_paper(gamma: float) -> None:
    """Equation 4 of Lin et al., 2017; no NaN at a probability of 1."""
    logits = LOGITS.clone()
    logits[0, 0] = 200.0
    one = logits.softmax(-1).gather(1, LABELS[SINGLE][:, None])  # (B, 1)
    several = torch.where(LABELS[MULTI] == 1, logits.sigmoid(), (-logits).sigmoid())  # (B, C)
    logits.requires_grad_()
    for problem, p in ((SINGLE, one), (MULTI, several)):
        losses = sample_losses(logits, LABELS[problem], problem, focal_gamma=gamma)
        expected = (-((1 - p) ** gamma) * p.log()).mean(-1)
        torch.testing.assert_close(losses.detach(), expected, rtol=1e-4, atol=1e-6)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert gradient.isfinite().all()


TITLES = torch.tensor([[5, 6, 3, -100], [3, -100, -100, -100], [9, 9, 9, 3]])  # (B, T)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_token_losses_are_sums_of_torchs_cross_entropy(smoothing: float) -> None:
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(1))  # (B, T, V)
    logits[1, 3] = torch.linspace(-500, 500, 11)  # padding with a huge loss
    options: dict[str, Any] = {"reduction": "sum", "label_smoothing": smoothing}
    for row, labels, loss in zip(
        logits, TITLES, token_losses(logits, TITLES, smoothing), strict=True
    ):
        is_token = labels >= 0
        expected = F.cross_entropy(row[is_token], labels[is_token], **options)
        torch.testing.assert_close(loss, expected)
