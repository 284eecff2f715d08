"""recipes/bigbird.py: each text is read as transformers reads it alone, and the run compares itself with the texts'
beginnings.

Equal losses under every strategy: tests/test_sameness.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import inputs
from tests.matrix import LONG, SPARSE, runs
from tests.runs import lines_of, losses_of, start
from tests.splits import global_batches

STOPPED, FIRST, SEED, MOST = 2, 64, 42, 4096
# the weights stand still, so that the loss of each step is known beforehand
STILL = [*LONG, "--max_length", MOST, "--learning_rate", "1e-30", "--warmup_steps", 0,
         "--weight_decay", 0, "--per_device_eval_batch_size", 1]  # fmt: skip


def single(name: str, words: list[Any]) -> Path:
    return runs("single").run(f"long {name}", "recipes.bigbird", words)


def read(folder: Path, file: Path, training: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each text alone, by nothing but transformers, whose attention stays full after a text of 704 tokens or fewer
    unless it is told otherwise: its tokens, loss and probabilities."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).train(training)
    assert type(model).__name__ == "BigBirdForSequenceClassification"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths, losses, probabilities = [], [], []
    for text, label in pd.read_csv(file)[["text", "label"]].itertuples(index=False):
        model.bert.set_attention_type("block_sparse")
        encoded = tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")
        with torch.no_grad():
            outputs = model(**encoded, labels=torch.tensor([int(label == "pos")]))
        lengths.append(encoded["input_ids"].shape[1])
        losses.append(outputs.loss)
        probabilities.append(outputs.logits[0].softmax(-1).numpy())
    return np.array(lengths), np.array(losses), np.array(probabilities)


@pytest.mark.parametrize("size", [1, 12])
def test_each_text_is_read_as_transformers_reads_it_alone(size: int) -> None:
    """In micro-batches of one text and of twelve, short texts before long ones; the last evaluation, too."""
    run = single(f"in {size}", [*STILL, "--per_device_batch_size", size])
    lengths, losses, _ = read(run / "model", inputs.long_split("train"), training=True)
    order = global_batches(lengths, 12, SEED, 0)
    assert any((lengths[batch] <= 704).any() for batch in order[:-1])
    expected = [losses[batch].mean() for batch in order]
    assert losses_of(run) == pytest.approx(expected, rel=1e-5)
    validation = read(run / "model", inputs.long_split("validation"), training=False)[2]
    written = [line["probabilities"] for line in lines_of(run / "predictions.jsonl")]
    assert np.array(written) == pytest.approx(validation, abs=3e-6)


def test_what_attention_reaches_matters() -> None:
    """Far more than two runs may differ; a model for which every text is the same would agree with anything."""
    full = single("full", [*SPARSE, "--max_steps", STOPPED, "--attn_implementation", "full"])
    sparse = runs("single")["long"]
    ratios = np.array(losses_of(full)) / losses_of(sparse)[:STOPPED]
    assert abs(ratios - 1).max() > 1e-4
    chances = [line["probabilities"][0] for line in lines_of(sparse / "predictions.jsonl")]
    assert np.std(chances) > 3e-4


def test_the_run_is_compared_with_the_texts_beginnings() -> None:
    """The last two evaluations are of the saved model: of all of each text, and of its first tokens."""
    run, log = runs("single")["long"], runs("single").log("long")
    whole, first = sorted(lines_of(run / "eval.jsonl")[-2:], key=lambda line: "max_length" in line)
    assert (whole["split"], first["split"]) == ("validation", f"validation_first_{FIRST}")
    assert first["max_length"] == FIRST
    assert "max_length" not in whole
    assert (first["num_samples"], first["step"]) == (12, whole["step"])
    assert first["loss"] != whole["loss"]
    assert f"reading the first {FIRST} tokens only" in log
    assert f"accuracy {first['accuracy']:.4f}" in log


@pytest.mark.slow
def test_the_default_job(tmp_path: Path) -> None:
    """No data, no model: IMDB reviews of more than 512 tokens, a BigBird made of MiniLM; a twentieth of the epoch."""
    run = tmp_path / "run"
    words = ["--max_train_samples", "160", "--max_eval_samples", "40", "--output_dir", run]
    start(["deepspeed", "recipes/bigbird.py", *words], seconds=600).succeeded()
    whole, first = lines_of(run / "eval.jsonl")
    assert first["num_samples"] == whole["num_samples"] == 40
    assert first["max_length"] == 512
    world = json.loads((run / "config.json").read_text())["world"]
    assert world["deepspeed"]["zero_optimization"]["stage"] == 2
    model = AutoModelForSequenceClassification
    assert not model.from_pretrained(run / "model", output_loading_info=True)[1]["missing_keys"]


def converted(run: Path, out: Path, model_class: Any, step: int) -> Any:
    """What the checkpoint of a run that stopped after `step` becomes: the model that the run has saved."""
    start(["toolkit", "convert", run, out]).succeeded()
    model, loading = model_class.from_pretrained(out, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((run / "model" / "trainer_state.json").read_text())["global_step"] == step
    saved = model_class.from_pretrained(run / "model").state_dict()
    torch.testing.assert_close(dict(model.state_dict()), dict(saved), rtol=0, atol=0)
    return model
