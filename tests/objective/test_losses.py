"""toolkit/objective/losses.py: losses per sample, whose mean is transformers' loss."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from toolkit.config import ProblemType
from toolkit.objective.losses import sample_losses, token_losses

LABELS: dict[str, tuple[int, torch.Tensor]] = {
    "single_label_classification": (3, torch.tensor([0, 2, 1, 2])),
    "multi_label_classification": (3, torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])),
    "regression": (1, torch.tensor([0.5, -1.0, 3.25, 0.0])),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("problem", get_args(ProblemType))
def test_the_mean_is_transformers_loss(
    tiny_model: Path, tokenizer: Any, problem: ProblemType, size: int
) -> None:
    count, labels = LABELS[problem]
    torch.manual_seed(0)
    make: Any = AutoModelForSequenceClassification.from_pretrained
    model, labels = make(tiny_model, num_labels=count, problem_type=problem).eval(), labels[:size]
    inputs = tokenizer(
        ["good film", "很好", "the price", "dull and bad"][:size], padding=True, return_tensors="pt"
    )
    output = model(**inputs, labels=labels)
    losses = sample_losses(output.logits, labels, problem)
    assert (losses.shape, losses.dtype) == ((size,), torch.float32)
    assert losses.mean().item() == pytest.approx(output.loss.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(loss, model.classifier.weight, retain_graph=True)[0]
                    for loss in (losses.mean(), output.loss))  # fmt: skip
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_label_smoothing_and_pos_weight_are_torchs() -> None:
    labels = LABELS["single_label_classification"][1]
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    smoothed = sample_losses(logits, labels, "single_label_classification", label_smoothing=0.1)
    assert smoothed.mean() == F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert not torch.allclose(
        smoothed, sample_losses(logits, labels, "single_label_classification")
    )
    labels, weight = LABELS["multi_label_classification"][1], torch.tensor([3.0, 1.0, 0.25])
    losses = sample_losses(logits, labels, "multi_label_classification", pos_weight=weight)
    assert losses.mean() == pytest.approx(
        F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight).item()
    )


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_the_focal_loss_is_that_of_its_paper(gamma: float) -> None:
    """Equation 4 of Lin et al., 2017; no NaN at a probability of 1."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    logits[0, 0] = 200.0
    for problem in ("single_label_classification", "multi_label_classification"):
        labels = LABELS[problem][1]
        leaf = logits.clone().requires_grad_()
        losses = sample_losses(leaf, labels, problem, focal_gamma=gamma)
        if problem == "single_label_classification":
            p = logits.softmax(-1).gather(1, labels[:, None])[:, 0]
            expected = -((1 - p) ** gamma) * p.log()
        else:
            p = torch.where(labels == 1, logits.sigmoid(), (-logits).sigmoid())
            expected = (-((1 - p) ** gamma) * p.log()).mean(-1)
        torch.testing.assert_close(losses.detach(), expected, rtol=1e-4, atol=1e-6)
        losses.sum().backward()
        assert leaf.grad.isfinite().all()


TITLES = torch.tensor([[5, 6, 3, -100], [3, -100, -100, -100], [9, 9, 9, 3]])  # (B, T)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_token_losses_are_sums_of_torchs_cross_entropy(smoothing: float) -> None:
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(1))  # (B, T, V)
    logits[1, 3] = torch.linspace(-500, 500, 11)  # padding with a huge loss
    one_by_one = [F.cross_entropy(row[labels >= 0], labels[labels >= 0], reduction="sum", label_smoothing=smoothing)
                  for row, labels in zip(logits, TITLES, strict=True)]  # fmt: skip
    torch.testing.assert_close(token_losses(logits, TITLES, smoothing), torch.stack(one_by_one))
