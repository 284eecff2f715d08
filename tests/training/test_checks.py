"""toolkit/training/checks.py: what an edited loop calls wrongly is an error in its first steps."""

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.faults import refusal
from tests.runs import ROOT
from tests.training.test_optimizer import accelerator_with, tiny
from tests.training.test_schedule import TOKENIZER, Toy, split_of
from toolkit.config import TrainingSettings
from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.training import verified
from toolkit.training.checks import check_before_prepare, check_tokenizer
from toolkit.training.metrics import mean_by_name
from toolkit.training.optimizer import make_scheduler
from toolkit.training.prepare import prepare_for_strategy
from toolkit.training.schedule import make_schedule
from toolkit.training.steps import Steps


def check(model: torch.nn.Module, parameters: Any) -> None:
    check_before_prepare(accelerator_with(), model, torch.optim.SGD(parameters, lr=0.1))


def test_the_optimizer_has_exactly_the_trained_parameters() -> None:
    model, temperature = tiny("bert"), torch.nn.Parameter(torch.ones(7))
    refusal(check, model, [*model.parameters(), temperature], says=["(7,)"])
    head = [*model.classifier.parameters()]  # type: ignore[union-attr]
    refusal(check, model, head, says=["bert.embeddings.word_embeddings.weight", "more"])
    model.base_model.requires_grad_(False)  # type: ignore[operator, union-attr]
    model.base_model.bfloat16()  # type: ignore[operator, union-attr]
    check(model, head)
    refusal(check, model.half(), head, says=["classifier.weight", "16 bits"])


@pytest.mark.parametrize("kind", ["zero2", "zero3", "fsdp2"])
def test_an_optimizer_of_whole_parameters_needs_a_verification(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model = tiny("bert")
    stage = {"stage": int(kind[-1])} if kind != "fsdp2" else {"is_fsdp2": True}
    accelerator = accelerator_with({} if kind != "fsdp2" else None, **stage)
    own = type("SGD", (torch.optim.SGD,), {"__module__": "own"})(model.parameters(), lr=0.1)
    check_before_prepare(accelerator_with(), model, own)
    check_before_prepare(accelerator, model, torch.optim.AdamW(model.parameters()))
    for optimizer in (own, torch.optim.Adafactor(model.parameters())):
        says = [type(optimizer).__name__, kind, "ddp", "toolkit verify"]
        refusal(check_before_prepare, accelerator, model, optimizer, says=says)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    digest = str(verified.script_digest())
    path = verified.record_path(digest, kind)
    path.parent.mkdir(parents=True)
    path.touch()
    check_before_prepare(accelerator, model, own)
    path.rename(path.with_name("zero1"))
    refusal(check_before_prepare, accelerator, model, own, says=[kind])
    monkeypatch.setenv(OTHER_RANDOMNESS, "0")  # it is being verified
    check_before_prepare(accelerator, model, own)


def test_a_run_of_an_edited_recipe_that_was_not_verified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    recipe = tmp_path / "my_recipe.py"
    recipe.write_text("edited")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(recipe), raising=False)
    accelerator = accelerator_with({}, stage=3)
    note = verified.verification_note(accelerator)
    assert note == f"my_recipe.py is not verified under zero3: toolkit verify {recipe}"
    path = verified.record_path(str(verified.script_digest()), "zero3")
    path.parent.mkdir(parents=True)
    path.with_name("zero2").touch()
    assert verified.verification_note(accelerator) == note
    path.touch()
    assert verified.verification_note(accelerator) is None
    recipe.write_text("edited again")
    assert verified.verification_note(accelerator) is not None
    shutil.copy(ROOT / "recipes" / "cls.py", recipe)
    assert verified.verification_note(accelerator) is None


def test_tokens_that_no_text_has() -> None:
    class Tokenizer(list[str]):
        _toolkit_tokens = 2

    check_tokenizer(Tokenizer("ab"))
    refusal(check_tokenizer, Tokenizer("abc"), says=["1 tokens", "--model_name_or_path"])


def compiled(it: Any) -> None:
    it.step.micro_batches(torch.compile(it.model)).__next__()


Loop = Callable[[Any], object]
# what is done in each micro-batch, and parts of the error
LOOPS: dict[str, tuple[Loop, tuple[str, ...]]] = {
    "as it should be": (lambda it: it.backward(it.mean(it.losses())), ()),
    "a term in the losses": (
        lambda it: it.backward(it.mean(it.losses() + it.model.words.weight.square().sum())), ()),
    "a mean of its own": (
        lambda it: it.backward(it.losses().mean()), ("step 1", "0 means", "0 backward")),
    "two means": (
        lambda it: it.backward(it.mean(it.losses()) + it.mean(it.losses())), ("step 1", "means")),
    "two backward passes": (
        lambda it: [it.backward(mean, retain_graph=True) for mean in [it.mean(it.losses())] * 2],
        ("step 1", "8 backward passes")),
    "no backward pass": (lambda it: it.mean(it.losses()), ("step 1", "0 backward passes")),
    "a micro-batch left out": (
        lambda it: it.number == 1 or it.backward(it.mean(it.losses())), ("step 1", "3 means")),
    "losses in bf16": (lambda it: it.mean(it.losses().bfloat16()), ("bfloat16", "float()")),
    "losses without gradients": (lambda it: it.mean(it.losses().detach()), ("detach()",)),
    "one loss of a batch": (lambda it: it.mean(it.losses().mean()), ("reduction='none'",)),
    "a part of the model": (
        lambda it: it.mean(it.model.words(it.batch.inputs["input_ids"]).sum((1, 2))),
        ("the model that `prepare` returned",)),
    "another model": (compiled, ("step 1", "the model that `prepare` returned")),
    "requires_grad changed": (
        lambda it: (it.backward(it.mean(it.losses())), it.model.words.requires_grad_(False)),
        ("step 2", "words.weight")),
    "no zero_grad": (lambda it: it.backward(it.mean(it.losses())), ("step 2", "zero_grad")),
    "no step": (lambda it: it.backward(it.mean(it.losses())), ("step 1", "optimizer.step()")),
    "no scheduler": (lambda it: it.backward(it.mean(it.losses())), ("step 1", "scheduler.step()")),
    "no micro-batches": (lambda it: it.backward(it.mean(it.losses())), ("step 2", "0 means")),
    "dropout in the evaluation": (
        lambda it: it.backward(it.mean(it.losses())), ("model.eval()",)),
    "a mean that is logged": (
        lambda it: it.step.log("mine", it.losses().mean()), ("step.log", "4 values", "()")),
    "no norm": (lambda it: it.backward(it.mean(it.losses())), ("step 1", "clip_grad_norm_")),
}  # fmt: skip


def toy_steps(accelerator: Accelerator) -> Steps:
    """Seven steps of 16 texts in four micro-batches, and a shorter one."""
    settings = TrainingSettings(global_batch_size=16, num_train_epochs=2, per_device_batch_size=4)
    model = Toy()
    model.tokens.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.1)
    schedule = make_schedule(settings, split_of())
    model, optimizer = prepare_for_strategy(accelerator, settings, 4, model, optimizer)
    scheduler = make_scheduler(optimizer, settings, schedule.total_steps)
    objects = (schedule, model, optimizer, scheduler)
    return Steps(accelerator, split_of(), TOKENIZER, settings, *objects)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_would_train_otherwise(name: str, no_launcher: None) -> None:
    micro_batch, says = LOOPS[name]
    accelerator = Accelerator(cpu=True)
    steps = toy_steps(accelerator)
    model, optimizer, scheduler = steps.model, steps.optimizer, steps.scheduler

    def loop() -> None:
        for step in steps:
            skips = name == "no micro-batches" and step.number > 1
            for number, batch in enumerate([] if skips else step.micro_batches(model)):
                losses = partial(model, batch)
                micro_batch(SimpleNamespace(step=step, backward=accelerator.backward, mean=step.mean, losses=losses,
                                            model=model, batch=batch, number=number))  # fmt: skip
            if name != "no step":
                optimizer.step()
            if name != "no zero_grad":
                optimizer.zero_grad()
            if name != "no scheduler":
                scheduler.step()
            step.grad_norm = None if name == "no norm" else 1.0
            list(steps.finish(step))
            if name != "dropout in the evaluation":
                model.eval()
            with torch.no_grad():
                model(batch)

    refusal(loop, says=says) if says else loop()


def test_logged_numbers(no_launcher: None) -> None:
    """They are means over the global batch; null if a micro-batch or a process lacks them."""
    accelerator = Accelerator(cpu=True)
    steps = toy_steps(accelerator)
    step = next(iter(steps))
    for number, batch in enumerate(step.micro_batches(steps.model)):
        losses = steps.model(batch)
        step.log("twice", 2 * losses)
        step.log("right", batch.ids % 2 == 0)
        if number:
            step.log("not always", losses)
        accelerator.backward(step.mean(losses))
    step.grad_norm = torch.ones(())
    steps.optimizer.step()
    steps.scheduler.step()
    (metrics,) = steps.finish(step)
    line = metrics.line()
    assert line["twice"] == pytest.approx(2 * line["loss"])
    assert line["right"] == np.mean(split_of().rows[step.indices] % 2 == 0)
    assert math.isnan(line["not always"])
    by_rank = [{"both": 1.0, "first": 3.0}, {"both": 2.0}]
    assert mean_by_name(by_rank, 6) == {"both": 0.5, "first": pytest.approx(math.nan, nan_ok=True)}
    with pytest.raises(TypeError, match="'loss'"):
        replace(metrics, logged={"loss": 1.0}).line()
