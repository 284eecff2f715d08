"""toolkit/objective: R-Drop, FGM, a custom term."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.faults import refusal
from tests.training.test_optimizer import tiny
from toolkit.config import TaskSettings, build
from toolkit.data.labels import Labels
from toolkit.objective import Objective, make_objective
from toolkit.objective.adversarial import Adversarial
from toolkit.objective.losses import sample_losses
from toolkit.objective.r_drop import divergence

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def logits(seed: int) -> torch.Tensor:
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))


def test_the_divergence_is_the_mean_of_both_directions() -> None:
    one, other = logits(1), logits(2)
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    options: dict[str, Any] = {"reduction": "none", "log_target": True}
    both = F.kl_div(q, p, **options) + F.kl_div(p, q, **options)
    torch.testing.assert_close(divergence(one, other, SINGLE), both.sum(-1) / 2)
    # multi-label: a binary divergence per label
    binary = [torch.stack([each, torch.zeros(3, 3)], -1).flatten(0, 1) for each in (one, other)]
    each = divergence(*binary, SINGLE).view(3, 3)
    torch.testing.assert_close(divergence(one, other, MULTI), each.mean(-1))


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
    objective = objective_of(model, **terms)
    return objective(batch, model(**batch.inputs).logits)


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


class Half(torch.nn.Module):
    """Computes in fp16, with a gradient too small for it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(14, 2)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.words

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        self.embedded = self.words(input_ids)
        return SimpleNamespace(logits=1e-8 * self.embedded.half().float().sum(1))


def test_fgm_moves_a_text_in_fp16_whose_loss_is_small() -> None:
    model = Half()
    adversarial = Adversarial(Objective(lambda logits, labels: logits.sum(-1)), model, 0.5)
    adversarial(BATCH, model(**BATCH.inputs).logits)
    shift = model.embedded - model.words.weight[BATCH.inputs["input_ids"]]
    norms = shift.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full((3,), 0.5), rtol=1e-3, atol=0)


def test_fgm_after_another_pass_of_the_recipe() -> None:
    model = tiny("bert")
    objective = Adversarial(Objective(loss_fn), model, 0.5)
    earlier, later = (model(**BATCH.inputs).logits for _ in range(2))
    message = "--fgm_epsilon 0.5: call the model for the logits .* after its other"
    refusal(objective, BATCH, earlier, match=message)
    assert objective(BATCH, later).isfinite().all()


def test_r_drop_adds_the_divergence_of_two_passes() -> None:
    torch.manual_seed(0)
    model = tiny("bert").train()
    torch.manual_seed(7)
    one, two = (model(**BATCH.inputs).logits for _ in range(2))
    mean = (loss_fn(one, BATCH.labels) + loss_fn(two, BATCH.labels)) / 2
    expected = mean + 0.3 * divergence(one, two, SINGLE)
    torch.manual_seed(7)
    torch.testing.assert_close(trained(model, r_drop_alpha=0.3), expected)
    assert (divergence(one, two, SINGLE) > 0).all()


def test_a_custom_term() -> None:
    plain = objective_of(None)
    objective = plain.plus(lambda batch, logits: logits[:, 0])
    outputs = logits(3)
    expected = loss_fn(outputs, BATCH.labels)
    torch.testing.assert_close(plain(BATCH, outputs), expected)
    torch.testing.assert_close(objective(BATCH, outputs), expected + outputs[:, 0])
    torch.testing.assert_close(objective.losses(outputs, BATCH.labels), expected)


def test_terms_that_do_not_fit() -> None:
    refusal(objective_of, tiny("bert"), "regression", r_drop_alpha=1, match="--r_drop_alpha")
    smoothing = "label_smoothing_factor"
    for problem_type in ("regression", MULTI):  # inferred from the labels
        refusal(objective_of, None, problem_type, **{smoothing: 0.1}, says=[f"--{smoothing} 0.1"])
    says = ["Linear has no input embeddings"]
    refusal(Adversarial, Objective(loss_fn), torch.nn.Linear(2, 2), 1, says=says)
    sideways = tiny("bert")
    sideways.config.model_type = "xlnet"  # whose embeddings are (S, B, H)
    refusal(objective_of, sideways, fgm_epsilon=0.5, says=["--fgm_epsilon"])
