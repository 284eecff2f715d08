"""toolkit/training/checks.py: what an edited loop calls wrongly is an error in its first steps. (Promise 5.)"""

import copy
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
from tests.splits import of_lengths
from tests.training.test_optimizer import accelerator_with, tiny
from toolkit.config import TrainingSettings
from toolkit.data.batches import Batch
from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.objective.losses import sample_losses
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
    head = [*model.classifier.parameters()]
    refusal(check, model, head, says=["bert.embeddings.word_embeddings.weight", "more"])
    model.base_model.requires_grad_(False)
    model.base_model.bfloat16()
    check(model, head)
    refusal(check, model.half(), head, says=["classifier.weight", "16 bits"])


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_what_no_verification_covers(strategy: str, monkeypatch: Any, tmp_path: Path) -> None:
    """An edited recipe prints a line; an optimizer that may need whole parameters is an error."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    recipe = tmp_path / "my_recipe.py"
    recipe.write_text("edited")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(recipe), raising=False)
    model, is_fsdp2 = tiny("bert"), strategy == "fsdp2"
    config = None if is_fsdp2 else {}
    accelerator = accelerator_with(config, int(strategy[-1]), is_fsdp2)
    own = type("SGD", (torch.optim.SGD,), {"__module__": "own"})(model.parameters(), lr=0.1)
    check_before_prepare(accelerator, model, torch.optim.AdamW(model.parameters()))
    check_before_prepare(accelerator_with(), model, own)  # under DDP
    for optimizer in (own, torch.optim.Adafactor(model.parameters())):
        says = [type(optimizer).__name__, strategy, "ddp", "toolkit verify"]
        refusal(check_before_prepare, accelerator, model, optimizer, says=says)
    note = f"my_recipe.py is not verified under {strategy}: toolkit verify {recipe}"
    record = verified.record_path(str(verified.script_digest()), strategy)
    record.parent.mkdir(parents=True)
    record.with_name("zero1").touch()
    assert verified.verification_note(accelerator) == note
    record.touch()
    check_before_prepare(accelerator, model, own)
    assert verified.verification_note(accelerator) is None
    recipe.write_text("edited again")
    assert verified.verification_note(accelerator) == note
    shutil.copy(ROOT / "recipes" / "cls.py", recipe)
    assert verified.verification_note(accelerator) is None
    monkeypatch.setenv(OTHER_RANDOMNESS, "0")  # it is being verified
    check_before_prepare(accelerator, model, own)


def test_tokens_that_no_text_has() -> None:
    class Tokenizer(list[str]):
        _toolkit_tokens = 2

    check_tokenizer(Tokenizer("ab"))
    refusal(check_tokenizer, Tokenizer("abc"), says=["1 tokens", "--model_name_or_path"])


TOKENIZER = SimpleNamespace(pad_token_id=0, padding_side="right")


class Toy(torch.nn.Module):
    """Embeds a text as the mean of its tokens, and predicts two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 5)
        self.classes = torch.nn.Linear(5, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The losses (B,)."""
        text = self.words(batch.inputs["input_ids"]).mean(1)  # (B, 5)
        return sample_losses(self.classes(text), batch.labels, "single_label_classification")


def as_it_should_be(it: Any) -> None:
    it.backward(it.mean(it.losses()))


def backward_twice(it: Any) -> None:
    mean = it.mean(it.losses())
    it.backward(mean, retain_graph=True)
    it.backward(mean)


def freeze(it: Any) -> None:
    as_it_should_be(it)
    it.model.words.requires_grad_(False)


def mean_of_a_part(it: Any) -> None:
    it.mean(it.model.words(it.batch.inputs["input_ids"]).sum((1, 2)))


# what is done with each micro-batch -> parts of the error
LOOPS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "a mean of its own": (lambda it: it.backward(it.losses().mean()), ("step 1", "0 means", "0 back")),
    "two backward passes": (backward_twice, ("step 1", "8 backward passes")),
    "losses in bf16": (lambda it: it.mean(it.losses().bfloat16()), ("bfloat16", "float()")),
    "losses without gradients": (lambda it: it.mean(it.losses().detach()), ("detach()",)),
    "one loss of a batch": (lambda it: it.mean(it.losses().mean()), ("reduction='none'",)),
    "a part of the model": (mean_of_a_part, ("the model that `prepare` returned",)),
    "another model": (
        lambda it: next(it.step.micro_batches(copy.deepcopy(it.model))),
        ("step 1", "the model that `prepare` returned")),
    "requires_grad changed": (freeze, ("step 2", "words.weight")),
    "a mean that is logged": (
        lambda it: it.step.log("mine", it.losses().mean()), ("step.log", "4 values", "()")),
}  # fmt: skip
# what a loop leaves out -> parts of the error
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "optimizer.zero_grad()": ("step 2", "zero_grad"),
    "optimizer.step()": ("step 1", "optimizer.step()"),
    "scheduler.step()": ("step 1", "scheduler.step()"),
    "the norm": ("step 1", "clip_grad_norm_"),
    "model.eval()": ("model.eval()",),
}


def toy_steps(accelerator: Accelerator) -> Steps:
    """Three steps of 16 texts in four micro-batches, and a shorter one."""
    settings = TrainingSettings(global_batch_size=16, num_train_epochs=2, per_device_batch_size=4)
    model: Any = Toy()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    split = of_lengths(np.full(50, 8))
    schedule = make_schedule(settings, split)
    model, optimizer = prepare_for_strategy(accelerator, settings, 4, model, optimizer)
    scheduler = make_scheduler(optimizer, settings, schedule.total_steps)
    return Steps(accelerator, split, TOKENIZER, settings, schedule, model, optimizer, scheduler)


@pytest.mark.parametrize("name", [*LOOPS, *LEFT_OUT])
def test_a_loop_that_would_train_otherwise(name: str, no_launcher: None) -> None:
    micro_batch, says = LOOPS.get(name) or (as_it_should_be, LEFT_OUT[name])
    accelerator = Accelerator(cpu=True)
    steps = toy_steps(accelerator)
    model, optimizer, scheduler = steps.model, steps.optimizer, steps.scheduler

    def loop() -> None:
        for step in steps:
            of_loop = {"step": step, "mean": step.mean, "backward": accelerator.backward}
            for batch in step.micro_batches(model):
                of_batch = {"model": model, "batch": batch, "losses": partial(model, batch)}
                micro_batch(SimpleNamespace(**of_loop, **of_batch))
            if name != "optimizer.step()":
                optimizer.step()
            if name != "optimizer.zero_grad()":
                optimizer.zero_grad()
            if name != "scheduler.step()":
                scheduler.step()
            step.grad_norm = None if name == "the norm" else 1.0
            list(steps.finish(step))
            if name != "model.eval()":
                model.eval()
            with torch.no_grad():
                model(batch)

    if says:
        refusal(loop, says=says)
    else:
        loop()


def test_logged_numbers(no_launcher: None) -> None:
    """They are means over the global batch; null if a micro-batch or a process lacks them."""
    accelerator = Accelerator(cpu=True)
    steps = toy_steps(accelerator)
    step = next(iter(steps))
    for number, batch in enumerate(step.micro_batches(steps.model)):
        losses = steps.model(batch)
        step.log("twice", 2 * losses)
        if number:
            step.log("not always", losses)
        accelerator.backward(step.mean(losses))
    step.grad_norm = torch.ones(())
    steps.optimizer.step()
    steps.scheduler.step()
    (metrics,) = steps.finish(step)
    line = metrics.line()
    assert line["twice"] == pytest.approx(2 * line["loss"])
    assert math.isnan(line["not always"])
    by_rank = [{"both": 1.0, "first": 3.0}, {"both": 2.0}]
    assert mean_by_name(by_rank, 6) == {"both": 0.5, "first": pytest.approx(math.nan, nan_ok=True)}
    with pytest.raises(TypeError, match="'loss'"):
        replace(metrics, logged={"loss": 1.0}).line()
