"""Promise 1 in fp32: the same losses, gradient norms, evaluations and predictions under every strategy and number of
processes, with each technique, to 1e-5 of one process. tests/test_oracle.py shows that one process is right."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from tests import inputs
from tests.matrix import JOBS, KINDS, TECHNIQUES, JobError, classifier, runs
from tests.runs import lines_of, losses_of, slow_but

CLOSE = 1e-5
DDP, ZERO1, ZERO2, ZERO3, FSDP2 = "ddp x2", "zero1 x2", "zero2 x2", "zero3 x2", "fsdp2 x2"
SHARDED = (ZERO1, ZERO2, ZERO3, FSDP2)
EVERYWHERE = (
    DDP, *SHARDED, "ddp x3", "zero3 x3", "fsdp2 x3", "zero2_offload x2", "zero3_offload x2",
)  # fmt: skip
# Each technique under a way that reduces whole gradients and under one that shards weights; the other two are slow.
FAST: dict[str, tuple[str, ...]] = {
    "plain": EVERYWHERE,
    "one micro-batch": (DDP, ZERO3),
    "lora best step": (DDP, ZERO3, FSDP2),
    **{
        name: (DDP, FSDP2) if place % 2 else (ZERO2, ZERO3) for place, name in enumerate(TECHNIQUES)
    },
    "all frozen": (FSDP2,),
    "any length": (DDP, ZERO3),
    "sampling": (ZERO2, FSDP2),
    "rmsprop": (ZERO2, FSDP2),
    "momentum": (ZERO3,),  # and ZeRO-2 in tests/test_craft.py
    "adafactor": (DDP,),
    "two terms": (FSDP2,),
    "weights": (DDP, ZERO3),
    "padding-free": (ZERO2, ZERO3),
    "padding-free lora": (ZERO3,),
    "padding-free two terms": (ZERO3,),
    "padding-free sampling": (DDP,),
    "long recomputed": (DDP, ZERO3),
    "long by tokens": (DDP, ZERO3),
    **dict.fromkeys(KINDS, (DDP,)),
    "title": (ZERO2, ZERO3),
    "pretraining": (DDP, ZERO3, FSDP2),
    "pretraining bigbird": (DDP, FSDP2),
}
SLOW: dict[str, tuple[str, ...]] = {
    "one micro-batch": (ZERO1, ZERO2, FSDP2, "ddp x3"),
    "lora best step": SHARDED,
    **dict.fromkeys(TECHNIQUES, (DDP, *SHARDED)),
    **{name: (DDP, ZERO2, ZERO3, FSDP2) for name in JOBS if name.startswith("padding-free")},
    **dict.fromkeys(
        ["all frozen", "sampling", "rmsprop", "momentum", "two terms", "weights"],
        (DDP, ZERO2, ZERO3, FSDP2),
    ),
    "long": ("ddp x3", *EVERYWHERE[1:]),
    "title": (DDP, ZERO1, ZERO2, "ddp x3", "zero3 x3", "zero2_offload x2"),
    "pretraining": (ZERO2, "ddp x3", ZERO1, "zero3 x3", "fsdp2 x3"),
    "pretraining bigbird": (ZERO3,),
}
# in one process; under several, all of them are compared with their reference
QUICK = (
    "one micro-batch", "padding-free", "padding-free lora", "padding-free two terms",
    "padding-free sampling",
)  # fmt: skip
CASES = [(way, name) for name, ways in FAST.items() for way in ways]
SLOW_CASES = [
    (way, name) for name, ways in SLOW.items() for way in ways if (way, name) not in CASES
]
# jobs that must have the losses of another; without dropout R-Drop's two passes are equal
EQUAL = {
    "recomputed": "few", "ema": "few", "r-drop": "few", "any length": "few",
    **{name: job.reference for name, job in JOBS.items() if job.reference},
}  # fmt: skip
REFUSED = {("r-drop", "teacher"), ("fgm", "teacher"), ("class weights", "pos_weight"), ("pos_weight", "smoothing"),
           ("focal", "smoothing"), ("frozen layer", "lora"), ("new layer", "lora")}  # fmt: skip
PAIRS = [pair for pair in itertools.combinations(TECHNIQUES, 2) if pair not in REFUSED]
# a second forward pass beside what hooks into the first
SECOND_PASS = [("r-drop", "lora"), ("fgm", "recomputed")]


def numbers(value: Any, at: str = "") -> dict[str, Any]:
    """Every value of a line by its path, without what is measured by a clock."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = ((str(place), part) for place, part in enumerate(value))
    else:
        return {at: value}
    return {
        path: leaf for name, part in parts for path, leaf in numbers(part, f"{at} {name}").items()
    }


def differences(
    mine: list[dict[str, Any]], theirs: list[dict[str, Any]], absolute: float = 0.0
) -> list[str]:
    """The values of two lists of lines that are not equal: numbers with decimals to 1e-5 relative, or `absolute`. The
    correlation of predictions that hardly differ is not as exact as they are."""
    one, other = numbers(mine), numbers(theirs)
    found = [f"{path} is only in one of them" for path in one.keys() ^ other.keys()]
    for path in one.keys() & other.keys():
        a, b = one[path], other[path]
        allowed = 1e-3 if path.endswith("pearson") else absolute
        is_number = isinstance(a, float) and isinstance(b, float)
        if a != b and not (is_number and math.isclose(a, b, rel_tol=CLOSE, abs_tol=allowed)):
            found.append(f"{path}: {a} and {b}")
    return found


def assert_same(run: Path, expected: Path) -> None:
    """Each step, evaluation and prediction once, with the same numbers."""
    keys = ("step", "epoch", "loss", "learning_rate", "grad_norm", "samples", "tokens")
    steps, wanted = (
        [{key: line[key] for key in keys} for line in lines_of(folder / "metrics.jsonl")]
        for folder in (run, expected)
    )
    assert differences(steps, wanted) == []
    for name, absolute in (("eval.jsonl", 0.0), ("predictions.jsonl", 3e-6)):
        assert differences(lines_of(run / name), lines_of(expected / name), absolute) == []


def assert_agrees(way: str, name: str) -> None:
    assert_same(runs(way)[name], runs("single")[JOBS[name].reference or name])


@pytest.mark.multiprocess
@pytest.mark.parametrize(("way", "name"), CASES)
def test_the_same_as_in_one_process(way: str, name: str) -> None:
    assert_agrees(way, name)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("way", "name"), SLOW_CASES)
def test_the_same_under_more_ways(way: str, name: str) -> None:
    assert_agrees(way, name)


@pytest.mark.parametrize(
    "name", slow_but([name for name, job in JOBS.items() if job.reference], *QUICK)
)
def test_the_same_numbers_by_other_micro_batches_or_kernels(name: str) -> None:
    """In one process."""
    assert_agrees("single", name)


def test_the_runs_could_differ() -> None:
    """Constant losses, or a technique without effect, would agree with anything."""
    for name in [*(name for name in FAST if name not in KINDS), "long"]:
        losses = losses_of(runs("single")[name])
        assert len(set(losses)) == len(losses) >= 3, name
        assert max(losses) - min(losses) > 1e-3, name
    for name in [
        *TECHNIQUES,
        "all frozen",
        "any length",
        *"sampling rmsprop momentum adafactor".split(),
    ]:
        losses = losses_of(runs("single")[name])
        others = losses_of(runs("single")[EQUAL.get(name, "few")])
        assert (losses == pytest.approx(others, rel=CLOSE)) == (name in EQUAL), name
    averaged, last = (
        lines_of(runs("single")[name] / "eval.jsonl")[-1]["loss"] for name in ("ema", "few")
    )
    assert averaged != pytest.approx(last, rel=1e-4)


def combined(way: str, pair: tuple[str, ...]) -> Path:
    job = classifier(*pair)
    return runs(way).run("+".join(pair), job.recipe, job.words)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("way", "pairs"),
    [(ZERO3, SECOND_PASS), *(pytest.param(way, PAIRS, marks=pytest.mark.slow) for way in SHARDED)],
)
def test_techniques_in_pairs(way: str, pairs: list[tuple[str, str]]) -> None:
    for pair in pairs:
        assert_same(combined(way, pair), combined("single", pair))


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", ZERO3])
def test_techniques_that_exclude_each_other(way: str) -> None:
    """One line that names a setting, under every launch alike."""
    for pair in REFUSED:
        with pytest.raises(JobError) as failure:
            combined(way, pair)
        assert failure.value.kind == "UserError"
        assert re.search(r"--\w+", failure.value.message)
        assert "\n" not in failure.value.message


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", slow_but(["single", DDP, *SHARDED], "single", DDP, ZERO3, FSDP2))
def test_the_saved_model_is_the_evaluated_one(way: str) -> None:
    """By transformers and peft alone; LoRA's best step is not its last."""
    plain, loading = load(runs(way)["plain"] / "model")
    assert not any(loading.values())
    assert plain.config.id2label == {0: "neg", 1: "pos"}
    run = runs(way)["lora best step"]
    assert lines_of(run / "eval.jsonl")[-1]["step"] < 10
    assert_model_was_evaluated(run)
    assert "LoRA r=3" in runs(way).log("lora best step")


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    return model, loading


def assert_model_was_evaluated(run: Path) -> None:
    """model/ loads without peft; adapter/ loads with peft onto the base."""
    from peft import PeftModel

    merged, loading = load(run / "model")
    assert not any(loading.values())
    torch.testing.assert_close(*probabilities(merged, run), rtol=0, atol=1e-5)
    plain = AutoModelForSequenceClassification.from_pretrained(inputs.tiny_model(), num_labels=2)
    adapted = PeftModel.from_pretrained(plain, run / "adapter")
    torch.testing.assert_close(*probabilities(adapted, run), rtol=0, atol=1e-5)


def probabilities(model: torch.nn.Module, run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's probabilities for the texts of the last evaluation, and those in predictions.jsonl: (N, C) each."""
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    lines = lines_of(run / "predictions.jsonl")
    texts = list(pandas.read_csv(inputs.reviews())["text"])
    encoded = tokenizer(
        [texts[line["id"]] for line in lines], padding=True, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model.eval()(**encoded).logits
    return logits.softmax(-1), torch.tensor([line["probabilities"] for line in lines])


def test_what_lora_saves() -> None:
    """A folder without peft, in which only what LoRA trained differs from the base model."""
    run = runs("single")["lora best step"]
    assert pipeline("text-classification", model=str(run / "model"))("a fine film")[0]["label"] in (
        "neg",
        "pos",
    )
    assert [path.name for path in run.glob(".*")] == [".lock"]  # no drafts
    before, after = (
        load_file(path / "model.safetensors") for path in (inputs.tiny_model(), run / "model")
    )
    changed = {name for name in before if not torch.equal(before[name], after[f"bert.{name}"])}
    assert changed == {name for name in before if re.search(r"(query|dense)\.weight$", name)}
    assert "lora_r" in (run / "model" / "README.md").read_text(encoding="utf-8")


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", FSDP2])
def test_frozen_layers_do_not_change(way: str) -> None:
    """Bit for bit, and new layers do."""
    before = load_file(inputs.tiny_model() / "model.safetensors")
    for name, trained in {
        "rmsprop": ("encoder.layer.1.", "pooler."),
        "all frozen": ("pooler.",),
    }.items():
        after = load_file(runs(way)[name] / "model" / "model.safetensors")
        same = {key for key in before if torch.equal(before[key], after[f"bert.{key}"])}
        assert same == {key for key in before if not key.startswith(trained)}
