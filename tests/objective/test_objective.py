"""toolkit/objective: losses per sample, whose mean is transformers' loss; R-Drop, FGM, a custom term."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from tests.faults import refusal
from tests.training.test_optimizer import tiny
from toolkit.config import ProblemType, TaskSettings, build
from toolkit.data.labels import Labels
from toolkit.objective import Objective, make_objective
from toolkit.objective.adversarial import Adversarial
from toolkit.objective.losses import sample_losses, token_losses
from toolkit.objective.r_drop import divergence

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def loss_fn(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return sample_losses(logits, truth, SINGLE)


def batch_of(*rows: list[int]) -> Any:
    ids, mask = torch.tensor(rows), (torch.tensor(rows) > 0).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    return SimpleNamespace(inputs=inputs, labels=torch.arange(len(rows)) % 3, token_samples=None)


ROWS = [[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]]
BATCH = batch_of(*ROWS)


def objective_of(model: Any, problem_type: Any = SINGLE, **terms: Any) -> Objective:
    settings = build(TaskSettings, {"model_name_or_path": "m", "train_file": "t.csv", **terms})
    labels = Labels(problem_type, ("a", "b", "c"), ("label",))
    return make_objective(settings, model, SimpleNamespace(labels=labels, pos_weight=None))


def trained(model: Any, batch: Any = BATCH, **terms: Any) -> torch.Tensor:
    """The (B,) losses of a training pass."""
    return objective_of(model, **terms)(batch, model(**batch.inputs).logits)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert"])
def test_fgm_moves_each_text_along_its_gradient(family: str, frozen: bool) -> None:
    """Compared with a computation on `inputs_embeds`, and independent of the other texts of a micro-batch."""
    torch.manual_seed(0)
    model = tiny(family).eval()
    table = model.get_input_embeddings().requires_grad_(not frozen)

    def losses_at(embedded: torch.Tensor) -> torch.Tensor:
        mask = BATCH.inputs["attention_mask"]
        return loss_fn(model(inputs_embeds=embedded, attention_mask=mask).logits, BATCH.labels)

    embedded = table(BATCH.inputs["input_ids"]).detach().requires_grad_()
    clean = losses_at(embedded)
    (gradient,) = torch.autograd.grad(clean.sum(), embedded)  # (B, S, H)
    direction = gradient / gradient.flatten(1).norm(dim=1)[:, None, None]
    expected = (clean + losses_at(embedded + 0.5 * direction)) / 2
    losses = trained(model, fgm_epsilon=0.5)
    torch.testing.assert_close(losses, expected)
    assert (losses > clean).all()
    losses.sum().backward()
    assert (table.weight.grad is None) == frozen
    alone = trained(model, batch_of(ROWS[0]), fgm_epsilon=0.5)
    torch.testing.assert_close(alone, losses[:1])


def test_fgm_moves_a_text_in_fp16_whose_loss_is_small() -> None:
    """Its gradient is too small for fp16."""
    model, embedded = tiny("bert").eval(), []
    losses = Objective(lambda logits, labels: 1e-8 * logits.half().float()[:, 0])
    adversarial = Adversarial(losses, model, 0.5)
    model.get_input_embeddings().register_forward_hook(lambda *call: embedded.append(call[-1]))
    adversarial(BATCH, model(**BATCH.inputs).logits)
    norms = (embedded[1] - embedded[0]).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full((3,), 0.5), rtol=1e-3, atol=0)


def test_r_drop_adds_the_divergence_of_two_passes() -> None:
    """The mean of both directions; with several labels, of a binary distribution for each."""
    torch.manual_seed(0)
    model = tiny("bert").train()
    torch.manual_seed(7)
    one, two = (model(**BATCH.inputs).logits for _ in range(2))
    p, q = one.log_softmax(-1), two.log_softmax(-1)
    both = ((p - q) * (p.exp() - q.exp())).sum(-1)
    assert (both > 0).all()
    mean = (loss_fn(one, BATCH.labels) + loss_fn(two, BATCH.labels)) / 2
    torch.manual_seed(7)
    torch.testing.assert_close(trained(model, r_drop_alpha=0.3), mean + 0.3 * both / 2)
    binary = [torch.stack([each, torch.zeros_like(each)], -1).flatten(0, 1) for each in (one, two)]
    each_label = divergence(*binary, SINGLE).view(one.shape)
    torch.testing.assert_close(divergence(one, two, MULTI), each_label.mean(-1))


def test_a_custom_term() -> None:
    plain, outputs = objective_of(None), LOGITS[:3]
    objective = plain.plus(lambda batch, logits: logits[:, 0])
    expected = loss_fn(outputs, BATCH.labels)
    torch.testing.assert_close(plain(BATCH, outputs), expected)
    torch.testing.assert_close(objective(BATCH, outputs), expected + outputs[:, 0])
    torch.testing.assert_close(objective.losses(outputs, BATCH.labels), expected)


def test_terms_that_do_not_fit() -> None:
    """Nor their call: the gradient is that of the model's last pass."""
    refusal(objective_of, tiny("bert"), "regression", r_drop_alpha=1, match="--r_drop_alpha")
    smoothing = "label_smoothing_factor"
    for problem_type in ("regression", MULTI):  # inferred from the labels
        refusal(objective_of, None, problem_type, **{smoothing: 0.1}, says=[f"--{smoothing} 0.1"])
    says = ["Linear has no input embeddings"]
    refusal(Adversarial, Objective(loss_fn), torch.nn.Linear(2, 2), 1, says=says)
    model, sideways = tiny("bert"), tiny("bert")
    sideways.config.model_type = "xlnet"  # whose embeddings are (S, B, H)
    refusal(objective_of, sideways, fgm_epsilon=0.5, says=["--fgm_epsilon"])
    objective = objective_of(model, fgm_epsilon=0.5)
    earlier, later = (model(**BATCH.inputs).logits for _ in range(2))
    match = "--fgm_epsilon 0.5: call the model for the logits .* after its other"
    refusal(objective, BATCH, earlier, match=match)
    assert objective(BATCH, later).isfinite().all()


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
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
    expected = F.cross_entropy(logits.mT, TITLES, **options).sum(1)
    torch.testing.assert_close(token_losses(logits, TITLES, smoothing), expected)
