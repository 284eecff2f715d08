"""toolkit/objective: R-Drop, FGM, a custom term."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

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
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def test_the_divergence_is_the_mean_of_both_directions() -> None:
    one, other = logits(1), logits(2)
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    both = F.kl_div(q, p, reduction="none", log_target=True) + F.kl_div(
        p, q, reduction="none", log_target=True
    )
    torch.testing.assert_close(divergence(one, other, SINGLE), both.sum(-1) / 2)
    # multi-label: a binary divergence per label
    two = torch.stack([one, torch.zeros(4, 3)], -1), torch.stack([other, torch.zeros(4, 3)], -1)
    each = torch.stack(
        [divergence(two[0][:, place], two[1][:, place], SINGLE) for place in range(3)], -1
    )
    torch.testing.assert_close(divergence(one, other, MULTI), each.mean(-1))


def loss_fn(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return sample_losses(logits, truth, SINGLE)


def batch_of(rows: list[list[int]]) -> Any:
    ids, mask = torch.tensor(rows), (torch.tensor(rows) > 0).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    return SimpleNamespace(inputs=inputs, labels=torch.arange(len(rows)) % 3, token_samples=None)


ROWS = [[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]]


def objective_of(
    model: Any, problem_type: Any = SINGLE, losses: Any = None, **terms: Any
) -> Objective:
    settings = build(TaskSettings, {"model_name_or_path": "m", "train_file": "t.csv", **terms})
    data = SimpleNamespace(
        labels=Labels(problem_type, ("a", "b", "c"), ("label",)), pos_weight=None
    )
    return make_objective(settings, model, data, losses)


def trained(model: Any, batch: Any, **terms: Any) -> torch.Tensor:
    """The (B,) losses of a training pass."""
    objective = objective_of(model, **terms)
    return objective(batch, model(**batch.inputs).logits)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert"])
def test_fgm_moves_each_text_along_its_gradient(family: str, frozen: bool) -> None:
    """Compared with a computation on `inputs_embeds`, and independent of the other texts of a micro-batch."""
    torch.manual_seed(0)
    model: Any = tiny(family).eval()
    model.get_input_embeddings().requires_grad_(not frozen)
    batch, table = batch_of(ROWS), model.get_input_embeddings()
    mask = {"attention_mask": batch.inputs["attention_mask"]}
    embedded = table(batch.inputs["input_ids"]).detach().requires_grad_()
    clean = loss_fn(model(inputs_embeds=embedded, **mask).logits, batch.labels)
    gradients = torch.autograd.grad(clean.sum(), embedded)[0]
    moved = embedded + torch.stack([0.5 * gradient / gradient.norm() for gradient in gradients])
    expected = (clean + loss_fn(model(inputs_embeds=moved, **mask).logits, batch.labels)) / 2
    losses = trained(model, batch, fgm_epsilon=0.5)
    torch.testing.assert_close(losses, expected)
    assert (losses > clean).all()
    losses.sum().backward()
    assert (table.weight.grad is None) == frozen
    inputs = {name: rows[1:2] for name, rows in batch.inputs.items()}
    alone = SimpleNamespace(inputs=inputs, labels=batch.labels[1:2], token_samples=None)
    torch.testing.assert_close(trained(model, alone, fgm_epsilon=0.5), losses[1:2])


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
    model, batch = Half(), batch_of(ROWS)
    adversarial = Adversarial(Objective(lambda logits, labels: logits.sum(-1)), model, 0.5)
    adversarial(batch, model(**batch.inputs).logits)
    shift = model.embedded - model.words.weight[batch.inputs["input_ids"]]
    torch.testing.assert_close(
        shift.flatten(1).norm(dim=1), torch.full((3,), 0.5), rtol=1e-3, atol=0
    )


def test_fgm_after_another_pass_of_the_recipe() -> None:
    model, batch = tiny("bert"), batch_of(ROWS)
    objective = Adversarial(Objective(loss_fn), model, 0.5)
    earlier, later = (model(**batch.inputs).logits for _ in range(2))
    refusal(
        objective,
        batch,
        earlier,
        match="--fgm_epsilon 0.5: call the model for the logits .* after its other",
    )
    assert objective(batch, later).isfinite().all()


def test_r_drop_adds_the_divergence_of_two_passes() -> None:
    torch.manual_seed(0)
    model: Any = tiny("bert").train()
    batch = batch_of(ROWS)
    torch.manual_seed(7)
    one, two = (model(**batch.inputs).logits for _ in range(2))
    expected = (loss_fn(one, batch.labels) + loss_fn(two, batch.labels)) / 2 + 0.3 * divergence(
        one, two, SINGLE
    )
    torch.manual_seed(7)
    torch.testing.assert_close(trained(model, batch, r_drop_alpha=0.3), expected)
    assert (divergence(one, two, SINGLE) > 0).all()


def test_a_custom_term_and_terms_that_do_not_fit() -> None:
    batch, outputs = batch_of(ROWS), logits(3)[:3]
    plain = objective_of(None)
    objective = plain.plus(lambda batch, logits: logits[:, 0])
    expected = loss_fn(outputs, batch.labels)
    torch.testing.assert_close(plain(batch, outputs), expected)
    torch.testing.assert_close(objective(batch, outputs), expected + outputs[:, 0])
    torch.testing.assert_close(objective.losses(outputs, batch.labels), expected)
    refusal(objective_of, tiny("bert"), "regression", r_drop_alpha=1, match="--r_drop_alpha")
    for problem_type in ("regression", MULTI):  # inferred from the labels
        refusal(
            objective_of,
            None,
            problem_type,
            label_smoothing_factor=0.1,
            match="--label_smoothing_factor 0.1",
        )
    refusal(
        Adversarial,
        Objective(loss_fn),
        torch.nn.Linear(2, 2),
        1,
        match="Linear has no input embeddings",
    )
    sizes = {
        "vocab_size": 30,
        "d_model": 24,
        "n_layer": 1,
        "n_head": 2,
        "d_inner": 8,
        "num_labels": 3,
    }
    # (S, B, H)
    sideways = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("xlnet", **sizes)
    )
    square = batch_of([*ROWS, ROWS[0]])  # four texts of four tokens
    refusal(trained, sideways, square, fgm_epsilon=0.5, says=["XLNet", "--fgm_epsilon"])
