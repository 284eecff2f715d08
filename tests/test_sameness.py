"""Promise 1 in fp32: the same losses, gradient norms, evaluations and predictions under every strategy and number of
processes, with each technique, to 1e-5 of one process. tests/test_oracle.py shows that one process is right."""

import itertools
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import inputs
from tests.matrix import JOBS, KINDS, TECHNIQUES, classifier, runs
from tests.runs import assert_same_run, lines_of, losses_of, slow_but

DDP, ZERO1, ZERO2, ZERO3, FSDP2 = "ddp x2", "zero1 x2", "zero2 x2", "zero3 x2", "fsdp2 x2"
SHARDED = (ZERO1, ZERO2, ZERO3, FSDP2)
EVERYWHERE = (
    DDP, *SHARDED, "ddp x3", "zero3 x3", "fsdp2 x3", "zero2_offload x2", "zero3_offload x2",
)  # fmt: skip
# Each job under a way that reduces whole gradients and under one that shards weights; some under one of them, and
# adafactor is refused under ZeRO and FSDP2. The slow cases are the others.
FAST_WAYS: dict[str, tuple[str, ...]] = {
    name: (DDP, FSDP2) if place % 2 else (ZERO2, ZERO3) for place, name in enumerate(JOBS)
}
FAST_WAYS |= {
    "plain": EVERYWHERE, "few": (), "several labels": (), "long": (), "title": (ZERO2, ZERO3), "momentum": (ZERO3,),
    "all frozen": (FSDP2,), "two terms": (FSDP2,), "adafactor": (DDP,), **dict.fromkeys(KINDS, (DDP,)),
    "spans": (ZERO2, ZERO3, FSDP2, "ddp x3"), "padding-free sampling": (DDP,),
    "padding-free lora recomputed": (ZERO3,), "padding-free two terms": (ZERO3,),
}  # fmt: skip
FAST = [(way, name) for name, ways in FAST_WAYS.items() for way in ways]
FAST += [
    ("single", name) for name, job in JOBS.items() if job.reference
]  # other micro-batches or kernels
SLOW = [(way, name) for name in JOBS for way in (DDP, ZERO2, ZERO3, FSDP2) if name != "adafactor"]
SLOW += [(way, name) for name in ("one micro-batch", "long", "title") for way in EVERYWHERE]
# jobs that must have the losses of another; without dropout R-Drop's two passes are equal
EQUAL = {
    "recomputed": "few", "ema": "few", "r-drop": "few", "any length": "few",
    **{name: job.reference for name, job in JOBS.items() if job.reference},
}  # fmt: skip
# tests/test_config.py, tests/data/test_balance.py, tests/objective
REFUSED = {("r-drop", "teacher"), ("fgm", "teacher"), ("class weights", "pos_weight"), ("pos_weight", "smoothing"),
           ("focal", "smoothing"), ("frozen layer", "lora"), ("new layer", "lora")}  # fmt: skip
PAIRS = [pair for pair in itertools.combinations(TECHNIQUES, 2) if pair not in REFUSED]
# a second forward pass beside what hooks into the first
SECOND_PASS = [("r-drop", "lora"), ("fgm", "recomputed")]


@pytest.mark.parametrize("case", slow_but(dict.fromkeys([*FAST, *SLOW]), *FAST), ids=": ".join)
def test_the_same_as_in_one_process(case: tuple[str, str]) -> None:
    way, name = case
    assert_same_run(runs(way)[name], runs("single")[JOBS[name].reference or name])


def test_the_runs_could_differ() -> None:
    """Constant losses, or a technique without effect, would agree with anything."""
    for name in [name for name in JOBS if name not in KINDS]:
        losses = losses_of(runs("single")[name])
        assert len(set(losses)) == len(losses) >= 3, name
        assert max(losses) - min(losses) > 1e-3, name
    others = ("all frozen", "any length", "sampling", "rmsprop", "momentum", "adafactor")
    for name in [*TECHNIQUES, *others]:
        losses = losses_of(runs("single")[name])
        reference = losses_of(runs("single")[EQUAL.get(name, "few")])
        assert (losses == pytest.approx(reference, rel=1e-5)) == (name in EQUAL), name
    evaluations = (lines_of(runs("single")[name] / "eval.jsonl") for name in ("ema", "few"))
    averaged, last = (lines[-1]["loss"] for lines in evaluations)
    assert averaged != pytest.approx(last, rel=1e-4)


def combined(way: str, pair: tuple[str, ...]) -> Path:
    job = classifier(*pair)
    return runs(way).run("+".join(pair), job.recipe, job.words)


@pytest.mark.parametrize(
    ("way", "pairs"),
    [(ZERO3, SECOND_PASS), *(pytest.param(way, PAIRS, marks=pytest.mark.slow) for way in SHARDED)],
)
def test_techniques_in_pairs(way: str, pairs: list[tuple[str, str]]) -> None:
    for pair in pairs:
        assert_same_run(combined(way, pair), combined("single", pair))


@pytest.mark.parametrize("way", slow_but(["single", DDP, *SHARDED], "single", DDP, ZERO3, FSDP2))
def test_the_saved_model_is_the_evaluated_one(way: str) -> None:
    """By transformers and peft alone: model/ loads without peft, and adapter/ onto the base. LoRA's best step is not
    its last, and is loaded and evaluated at the end."""
    from peft import PeftModel

    assert load(runs(way)["plain"] / "model").config.id2label == {0: "neg", 1: "pos"}
    run = runs(way)["lora best step"]
    *during, last = lines_of(run / "eval.jsonl")
    best = min(during, key=lambda line: line["loss"])
    assert last["step"] == best["step"] < 10
    assert last["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert last["loss"] < during[-1]["loss"] * (1 - 1e-3)
    assert "LoRA r=3" in runs(way).log("lora best step")
    base = AutoModelForSequenceClassification.from_pretrained(inputs.tiny_model(), num_labels=2)
    for model in (load(run / "model"), PeftModel.from_pretrained(base, run / "adapter")):
        torch.testing.assert_close(*probabilities(model, run), rtol=0, atol=1e-5)


def load(folder: Path) -> Any:
    kind = AutoModelForSequenceClassification
    model, loading = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    return model


def probabilities(model: torch.nn.Module, run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's probabilities for the texts of the last evaluation, and those in predictions.jsonl: (N, C) each."""
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    lines = lines_of(run / "predictions.jsonl")
    table = list(pandas.read_csv(inputs.reviews())["text"])
    texts = [table[line["id"]] for line in lines]
    encoded = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**encoded).logits
    return logits.softmax(-1), torch.tensor([line["probabilities"] for line in lines])


@pytest.mark.parametrize("way", ["single", FSDP2])
def test_frozen_layers_do_not_change(way: str) -> None:
    """Bit for bit, and new layers do."""
    before = load_file(inputs.tiny_model() / "model.safetensors")
    trained_parts = {"rmsprop": ("encoder.layer.1.", "pooler."), "all frozen": ("pooler.",)}
    for name, trained in trained_parts.items():
        after = load_file(runs(way)[name] / "model" / "model.safetensors")
        same = {key for key in before if torch.equal(before[key], after[f"bert.{key}"])}
        assert same == {key for key in before if not key.startswith(trained)}
