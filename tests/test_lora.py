"""LoRA runs: promise 1 under every strategy, and a model folder that needs no peft."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from tests.runs import WAYS, Finished, lines_of, losses_of, recipe

STEPS = 10
# the best step is not the last: its weights are loaded back at the end. (At 5e-2 a spike of the loss blows up the
# rounding differences of one and the same strategy, with other micro-batches, to 3e-5.)
COMMON = ["--max_steps", STEPS, "--eval_every", 4, "--dropout", 0, "--mixed_precision", "no", "--report_to", "none",
          "--learning_rate", "2e-2", "--warmup_ratio", 0.2, "--max_grad_norm", 0.5, "--weight_decay", 0.1,
          "--lr_scheduler_type", "constant_with_warmup", "--global_batch_size", 22, "--per_device_batch_size", 6,
          "--lora_r", 3, "--lora_alpha", 5, "--lora_target_modules", "query,dense",
          "--metric_for_best_model", "loss"]  # fmt: skip


def train(output: Path, way: list[str], model: Path, data: Path) -> Finished:
    settings: list[Any] = ["--model_name_or_path", model, "--train_file", data, "--output_dir", output]
    finished = recipe(*way, *map(str, [*settings, *COMMON]))
    assert finished.code == 0, finished.err[-3000:]
    return finished


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> tuple[Path, Finished]:
    """The reference: one process."""
    folder = tmp_path_factory.mktemp("lora") / "single"
    return folder, train(folder, [], tiny_model, reviews)


def probabilities(model: torch.nn.Module, run: Path, reviews: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(what a model says of the last evaluation's texts, what the run's predictions.jsonl says): (N, C) each."""
    tokenizer, lines = AutoTokenizer.from_pretrained(run / "model"), lines_of(run / "predictions.jsonl")
    texts = list(pandas.read_csv(reviews)["text"])
    encoded = tokenizer([texts[line["id"]] for line in lines], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**encoded).logits
    return logits.softmax(-1), torch.tensor([line["probabilities"] for line in lines])


def assert_model_is_what_was_evaluated(run: Path, base: Path, reviews: Path) -> None:
    merged, loading = AutoModelForSequenceClassification.from_pretrained(run / "model", output_loading_info=True)
    assert not any(loading.values())
    torch.testing.assert_close(*probabilities(merged, run, reviews), rtol=0, atol=1e-5)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    adapted = peft.PeftModel.from_pretrained(plain, run / "adapter")
    torch.testing.assert_close(*probabilities(adapted, run, reviews), rtol=0, atol=1e-5)


def test_a_run_in_one_process(single: tuple[Path, Finished], tiny_model: Path, reviews: Path) -> None:
    run, finished = single
    assert re.search(r"LoRA r=3: [\d,]{4,} of [\d,]{6,} parameters are trained \(\d+\.\d %\)\n", finished.err)
    assert lines_of(run / "eval.jsonl")[-1]["step"] < STEPS  # the best weights were loaded back
    assert max(losses_of(run)) - min(losses_of(run)) > 0.01
    assert_model_is_what_was_evaluated(run, tiny_model, reviews)
    assert pipeline("text-classification", model=str(run / "model"))("a fine film")[0]["label"] in ("neg", "pos")
    assert [path.name for path in run.glob(".*")] == [".lock"]  # no drafts
    before, after = load_file(tiny_model / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[f"bert.{name}"])}
    assert changed == {name for name in before if re.search(r"(query|dense)\.weight$", name)}
    assert "LoRA" in (run / "model" / "README.md").read_text(encoding="utf-8")


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x2", pytest.param("zero1 x2", marks=pytest.mark.slow), "zero2 x2", "zero3 x2"])
def test_strategies_agree(
    way: str, single: tuple[Path, Finished], tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    run, (reference, finished) = tmp_path / "run", single
    said = [re.findall("LoRA r=3.*", text) for text in (train(run, WAYS[way], tiny_model, reviews).err, finished.err)]
    assert said[0] == said[1]
    assert losses_of(run) == pytest.approx(losses_of(reference), rel=1e-5)
    mine, theirs = lines_of(run / "eval.jsonl"), lines_of(reference / "eval.jsonl")
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    assert [line["loss"] for line in mine] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
    assert_model_is_what_was_evaluated(run, tiny_model, reviews)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x2", "zero3 x2"])
def test_recomputed_activations_change_nothing(
    way: str, single: tuple[Path, Finished], tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    train(tmp_path / "run", [*WAYS[way], "--gradient_checkpointing"], tiny_model, reviews)
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(single[0]), rel=1e-5)
