"""toolkit/training/checks.py, loop_checks.py, shard_checks.py. Optimizers: tests/training/test_optimizer_trial.py."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from toolkit.training.loop_checks import refuse_changes, refuse_foreign_parameters
from toolkit.training.shard_checks import check_functions, check_hooks, refuse_copies, refuse_shards
from torch.optim.lr_scheduler import StepLR
from transformers import Adafactor

from tests.faults import refusal
from tests.training.test_optimizer import accelerator_with, tiny
from toolkit.config import TrainingSettings
from toolkit.training.checks import check_parameters, check_scheduler
from toolkit.training.optimizer import (
    custom_scheduler,
    make_optimizer,
    make_scheduler,
    parameter_groups,
)
from toolkit.training.steps import _explanation

SETTINGS = TrainingSettings()


def check(
    model: torch.nn.Module, parameters: Any, settings: TrainingSettings = SETTINGS, **kind: Any
) -> None:
    check_parameters(
        accelerator_with(**kind), model, torch.optim.SGD(parameters, lr=0.1), settings, 10
    )


def test_a_loss_depends_on_a_parameter_outside_the_model() -> None:
    model, centres = tiny("bert"), torch.nn.Parameter(torch.ones(3))
    delta = torch.zeros(1, requires_grad=True)  # of an adversarial text, say: not a parameter
    losses = model(input_ids=torch.ones(2, 5, dtype=torch.long)).logits.mean(-1) + delta
    refuse_foreign_parameters(model, losses)
    refuse_foreign_parameters(model, losses.detach())
    says = ["of shape (3,)", "docs/your-own-recipe.md"]
    refusal(refuse_foreign_parameters, model, losses + centres.exp().sum(), says=says)
    model.centres = centres
    refuse_foreign_parameters(model, losses + centres.exp().sum())


def test_the_optimizer_has_exactly_the_trainable_parameters() -> None:
    model, temperature = tiny("bert"), torch.nn.Parameter(torch.ones(7))
    refusal(
        check,
        model,
        [*model.parameters(), temperature],
        says=["of shape (7,)", "docs/your-own-recipe.md"],
    )
    head = [*model.classifier.parameters()]  # type: ignore[union-attr]
    names = ["bert.embeddings.word_embeddings.weight", "--freeze_layers", "--unfreeze_every"]
    refusal(check, model, head, says=[*names, "lacks", "more"])
    every = [*model.parameters()]
    model.base_model.requires_grad_(False)  # type: ignore[operator, union-attr]
    refusal(check, model, every, says=[*names, "are frozen"])
    model.base_model.bfloat16()  # type: ignore[operator, union-attr]
    check(model, head)
    refusal(check, model.half(), head, says=["classifier.weight", "dtype=torch.float32"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"optimizer": "lion"}, "--optimizer lion"), ({"optimizer_args": "eps=1e-6"}, "--optimizer_args eps=1e-6"),
     ({"layerwise_lr_decay": 0.9}, "--layerwise_lr_decay 0.9")],
)  # fmt: skip
def test_settings_of_an_optimizer_that_the_recipe_does_not_make(settings: Any, says: str) -> None:
    model, chosen = tiny("bert"), TrainingSettings(**settings)
    refusal(check, model, parameter_groups(model, 0.1), chosen, says=[says, "or leave it out"])
    check_parameters(accelerator_with(), model, make_optimizer(model, chosen), chosen, 10)
    check(model, parameter_groups(model, 0.1), TrainingSettings(optimizer="sgd"))


def test_an_optimizer_that_chooses_its_own_learning_rate() -> None:
    model = tiny("bert")
    optimizer, says = Adafactor(model.parameters()), ["Adafactor", "lr=training.learning_rate"]
    refusal(check_parameters, accelerator_with(), model, optimizer, SETTINGS, 10, says=says)


def test_the_optimizer_and_the_scheduler_are_prepared(
    accelerator: Accelerator, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    optimizer = accelerator.prepare(plain)
    scheduler = make_scheduler(optimizer, SETTINGS, 10)
    own = custom_scheduler(optimizer, lambda inner: StepLR(inner, 2))
    cosine = TrainingSettings(lr_scheduler_type="cosine")
    for each, settings in (
        (scheduler, SETTINGS),
        (own, SETTINGS),
        (make_scheduler(optimizer, cosine, 10), cosine),
    ):
        check_scheduler(accelerator, optimizer, each, settings)
    assert not capsys.readouterr().err
    check_scheduler(accelerator, optimizer, own, cosine)
    assert "--lr_scheduler_type cosine" in capsys.readouterr().err
    says = ["LambdaLR", "custom_scheduler"]
    refusal(
        check_scheduler, accelerator, accelerator.prepare(other), scheduler, SETTINGS, says=says
    )
    raw = StepLR(optimizer, 2)
    for wrong in (raw, accelerator.prepare(raw)):
        refusal(
            check_scheduler,
            accelerator,
            optimizer,
            wrong,
            SETTINGS,
            says=["StepLR", "custom_scheduler"],
        )


@pytest.mark.parametrize("trains", [True, False])
def test_requires_grad_changes_while_training(trains: bool) -> None:
    model = tiny("bert")
    model.base_model.embeddings.requires_grad_(not trains)  # type: ignore[operator, union-attr]
    check(model, [each for each in model.parameters() if each.requires_grad])
    refuse_changes(model)
    model.base_model.embeddings.requires_grad_(trains)  # type: ignore[operator, union-attr]
    refusal(
        refuse_changes,
        model,
        says=["bert.embeddings.word_embeddings.weight", "more", "--unfreeze_every"],
    )
    model.base_model.embeddings.requires_grad_(not trains)  # type: ignore[operator, union-attr]
    refuse_changes(model, first=True)
    model.classifier = torch.nn.Linear(2, 2)
    refusal(
        refuse_changes, model, first=True, says=["classifier.weight, classifier.bias", "before"]
    )
    model.classifier = model.base_model.embeddings.LayerNorm  # type: ignore[union-attr]
    refusal(
        refuse_changes, model, first=True, says=["classifier.weight, classifier.bias", "before"]
    )


def test_requires_grad_changes_after_fsdp2_has_replaced_parameters() -> None:
    model = tiny("bert")
    check(model, model.parameters())
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(parameter.detach()))
    model.classifier.requires_grad_(False)  # type: ignore[operator, union-attr]
    refusal(refuse_changes, model, says=["classifier.weight, classifier.bias"])


def test_fsdp2_cannot_shard_a_scalar() -> None:
    model = torch.nn.Linear(2, 2)
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    check(model, model.parameters())
    refusal(check, model, model.parameters(), is_fsdp2=True, says=["scale", "shape (1,)"])


def test_unfreezing_needs_groups_by_layer_and_enough_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, settings = tiny("bert"), TrainingSettings(unfreeze_every=4)
    refusal(check, model, model.parameters(), settings, says=["--unfreeze_every 4", "gradual=True"])
    check(model, parameter_groups(model, 0.1, gradual=True), settings)
    assert (
        "1 of 4 groups stay frozen for all 10 steps" in capsys.readouterr().err
    )  # the embeddings, at step 12
    check(model, parameter_groups(model, 0.1, gradual=True), TrainingSettings(unfreeze_every=3))
    assert not capsys.readouterr().err


class Sharded(torch.nn.Module):
    """Parameters as in ZeRO-3, outside of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.whole = (torch.nn.Parameter(torch.zeros(count)) for count in (0, 3))
        for parameter, status in ((self.scale, "NOT_AVAILABLE"), (self.whole, "AVAILABLE")):
            parameter.ds_status = SimpleNamespace(name=status)  # type: ignore[attr-defined]

    def forward(self) -> torch.Tensor:
        return self.scale.sum()  # ZeRO-3 would gather it in a hook


@pytest.mark.parametrize(
    "use",
    [lambda scale: scale.sum(), lambda scale: torch.ones(2) * scale, lambda scale: torch.stack([scale, scale]),
     lambda scale: torch.nn.functional.linear(torch.ones(2), scale), lambda scale: scale[0]],
)  # fmt: skip
def test_sharded_parameters_cannot_be_used_outside_forward(use: Any) -> None:
    model = Sharded()
    with refuse_shards(model):
        refusal(use, model.scale, says=["scale: ", "docs/your-own-recipe.md"])
        assert model() == model.whole.sum() == 0
        assert model.scale.requires_grad
        assert model.scale.device.type == "cpu"
        refusal(use, model.scale, says=["scale"])  # also after a forward
    assert model.scale.sum() == 0
    with refuse_shards(torch.nn.Linear(1, 1)) as nothing:
        assert nothing is None


def test_a_state_dict_of_shards_is_refused_and_a_gathered_one_is_not() -> None:
    model = Sharded()
    refuse_copies(accelerator_with({}, stage=3), model)
    refusal(model.state_dict, says=["accelerator.get_state_dict"])
    model.scale.ds_status.name = "AVAILABLE"  # type: ignore[attr-defined]  # within `deepspeed.zero.GatheredParameters`
    assert model.state_dict().keys() == {"scale", "whole"}


@pytest.mark.parametrize(
    "layer", [torch.nn.Linear(4, 2), torch.nn.Linear(4, 2, bias=False), torch.nn.LayerNorm(4)]
)
def test_a_frozen_part_in_16_bits_under_a_head_in_fp32(layer: torch.nn.Module) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), layer.bfloat16())
    with pytest.raises(RuntimeError) as crash:
        model(torch.ones(3, 4))
    line = str(_explanation(Mock(), model, crash.value))
    assert "torch.bfloat16, torch.float32" in line
    assert "--mixed_precision bf16" in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("where", ["tensor", "module", "module before", "every module", "Function"])
@pytest.mark.parametrize(
    ("change", "is_linear"),
    [(lambda gradient: gradient.clamp(-0.5, 0.5), False), (lambda gradient: gradient / gradient.norm(), False),
     (lambda gradient: gradient.triu() * -2, True)],
)  # fmt: skip
def test_a_hook_that_clips(
    change: Any, is_linear: bool, where: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    static = {
        "forward": lambda _, value: value.view_as(value),
        "backward": lambda _, gradient: change(gradient),
    }
    function: Any = type(
        "Function", (torch.autograd.Function,), {key: staticmethod(static[key]) for key in static}
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(dtype)
    if where == "module":
        model[1].register_full_backward_hook(lambda _, gradients, __: tuple(map(change, gradients)))
    elif where == "module before":
        model[1].register_full_backward_pre_hook(lambda _, gradients: tuple(map(change, gradients)))
    elif where == "every module":
        hook = torch.nn.modules.module.register_module_full_backward_hook(
            lambda _, gradients, __: tuple(
                each if each is None else change(each) for each in gradients
            )
        )
        request.addfinalizer(hook.remove)
    with check_hooks(model):
        losses = model(torch.ones(3, 2, dtype=dtype))
        losses = function.apply(losses) if where == "Function" else losses
        if where == "tensor":
            losses.register_hook(change)
        check_functions(losses)
    if is_linear:
        losses.sum().backward()
    else:
        name = "1" if where.startswith("module") else where
        refusal(losses.sum().backward, says=[name, "--max_grad_norm"])
    model(torch.ones(3, 2, dtype=dtype)).sum().backward()  # only the first backward pass is checked
