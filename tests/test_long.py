"""recipes/bigbird.py: its attention, its literal commands, its comparison, what it saves and resumes.

Equal losses under every strategy: tests/test_sameness.py.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import inputs
from tests.matrix import LONG, SPARSE, runs, words_of
from tests.runs import assert_same_run, lines_of, losses_of, slow_but, start
from tests.splits import global_batches, of_lengths
from toolkit.data.batches import micro_batches

STEPS, STOPPED, FIRST = 4, 2, 64
SEED = 42
# the weights stand still, so that the loss of each step is known beforehand
STILL = [
    *LONG,
    *"--max_length 4096 --learning_rate 1e-30 --warmup_steps 0 --weight_decay 0".split(),
]
ALONE = [*STILL, "--per_device_batch_size", 1, "--per_device_eval_batch_size", 1]
# Promise 1: the losses, the evaluations and every probability
assert_same = functools.partial(assert_same_run, probabilities=3e-6)


def single(name: str, words: list[Any]) -> Path:
    return runs("single").run(f"long {name}", "recipes.bigbird", words)


def stopped() -> Path:
    """Two steps on two processes that shard parameters."""
    words = [*SPARSE, "--max_steps", STOPPED, "--checkpoint_every", STOPPED]
    return runs("zero3 x2").run("long stopped", "recipes.bigbird", words)


def lengths_of(most: int) -> np.ndarray:
    """(48,): the tokens of the training texts, without the toolkit."""
    tokenizer = AutoTokenizer.from_pretrained(inputs.sharp_model())
    texts = list(pd.read_csv(inputs.long_split("train"))["text"])
    return np.array(
        [len(ids) for ids in tokenizer(texts, truncation=True, max_length=most)["input_ids"]]
    )


def test_the_references_could_differ() -> None:
    """A model that learned nothing, or for which every text is the same, would agree with anything."""
    for name in ("long", "long by tokens"):
        run = runs("single")[name]
        assert len(losses_of(run)) == STEPS
        assert np.ptp(losses_of(run)) > 0.005
        chances = [line["probabilities"][0] for line in lines_of(run / "predictions.jsonl")]
        assert len(chances) == 12
        assert np.std(chances) > 3e-4  # a hundred times what they may differ by
    # and what attention reaches matters to it, far more than two runs may differ
    full = single("full", [*SPARSE, "--max_steps", STOPPED, "--attn_implementation", "full"])
    pairs = zip(losses_of(full), losses_of(runs("single")["long"])[:STOPPED], strict=True)
    assert max(abs(one - other) / other for one, other in pairs) > 1e-4
    # and steps of `long by tokens` have different numbers of micro-batches
    lengths = lengths_of(most=704)
    order = global_batches(lengths, 12, SEED, 0)
    for world in (1, 2):
        assert (
            len(
                {
                    len(micro_batches(of_lengths(lengths), batch, 12, 0, world, 1250))
                    for batch in order
                }
            )
            > 1
        )


COMMANDS = {
    # words -> processes
    "deepspeed recipes/bigbird.py": 1,
    "accelerate launch recipes/bigbird.py --config_file accelerate_configs/zero2.yaml": 2,
    "deepspeed --num_gpus 2 recipes/bigbird.py": 2,
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", slow_but(COMMANDS, *list(COMMANDS)[:2]))
def test_command(command: str, tmp_path: Path) -> None:
    finished = start(
        [*command.split(), *words_of(SPARSE), "--output_dir", tmp_path / "run"]
    ).succeeded()
    world = json.loads((tmp_path / "run" / "config.json").read_text())["world"]
    assert (world["num_processes"], world["distributed_type"]) == (COMMANDS[command], "DEEPSPEED")
    assert world["deepspeed"]["zero_optimization"]["stage"] == 2
    assert_same(run := tmp_path / "run", runs("single")["long"])
    # the last two evaluations are of the saved model: of the texts' beginnings, and of all of them
    whole, beginnings = sorted(
        lines_of(run / "eval.jsonl")[-2:], key=lambda line: "max_length" in line
    )
    assert (beginnings["split"], beginnings["max_length"]) == (f"validation_first_{FIRST}", FIRST)
    assert whole["split"] == "validation"
    assert "max_length" not in whole
    assert beginnings["num_samples"] == whole["num_samples"] == 12
    assert beginnings["step"] == whole["step"]
    assert beginnings["loss"] != whole["loss"]
    assert len(lines_of(run / "predictions.jsonl")) == 12
    said = finished.err
    assert f"reading the first {FIRST} tokens only" in said
    assert f"accuracy {beginnings['accuracy']:.4f}" in said


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_default_job(tmp_path: Path) -> None:
    """No data, no model: IMDB reviews of more than 512 tokens, a BigBird made of MiniLM; a twentieth of the epoch."""
    part = ["--max_train_samples", "160", "--max_eval_samples", "40"]
    start(
        ["deepspeed", "recipes/bigbird.py", *part, "--output_dir", tmp_path / "run"], seconds=600
    ).succeeded()
    whole, first = lines_of(tmp_path / "run" / "eval.jsonl")
    assert first["num_samples"] == whole["num_samples"] == 40
    assert first["max_length"] == 512
    world = json.loads((tmp_path / "run" / "config.json").read_text())["world"]
    assert world["deepspeed"]["zero_optimization"]["stage"] == 2
    lost = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "model", output_loading_info=True
    )[1]
    assert not lost["missing_keys"]


def own_logits(folder: Path, texts: list[str], training: bool) -> torch.Tensor:
    """(N, C): each text alone, by nothing but transformers, whose attention stays full after a text of 704 tokens or
    fewer unless it is told otherwise."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).train(training)
    assert type(model).__name__ == "BigBirdForSequenceClassification"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        model.bert.set_attention_type("block_sparse")
        with torch.no_grad():
            found.append(
                model(
                    **tokenizer(text, truncation=True, max_length=4096, return_tensors="pt")
                ).logits
            )
    return torch.cat(found)


def test_short_texts_before_long_ones() -> None:
    """Each text alone, short ones before long ones, with weights that stand still: the losses that transformers gives
    each by itself."""
    table, run = pd.read_csv(inputs.long_split("train")), single("alone", ALONE)
    logits = own_logits(run / "model", list(table["text"]), training=True)
    labels = torch.tensor((table["label"] == "pos").to_numpy(), dtype=torch.long)
    still_losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none").numpy()
    lengths = lengths_of(most=4096)
    order = global_batches(lengths, 12, SEED, 0)
    # and long ones in later steps
    assert any((lengths[batch] <= 704).any() for batch in order[:-1])
    assert len(order) == STEPS
    assert losses_of(run) == pytest.approx(
        [still_losses[batch].mean() for batch in order], rel=1e-5
    )


def test_a_text_is_read_alike_in_every_batch() -> None:
    """The same weights, texts and steps, cut into micro-batches of one text or of twelve."""
    together = single("together", [*STILL, "--per_device_batch_size", 12])
    assert losses_of(together) == pytest.approx(losses_of(single("alone", ALONE)), rel=1e-5)


def test_the_saved_model_predicts_the_same(tmp_path: Path) -> None:
    """By transformers alone, and by `toolkit predict`: a text at a time, as that run evaluated."""
    run = single("alone", ALONE)
    file = inputs.long_split("validation")
    output = tmp_path / "out.csv"
    written = lines_of(run / "predictions.jsonl")
    expected = np.array([line["probabilities"] for line in written])
    own = (
        own_logits(run / "model", list(pd.read_csv(file)["text"]), training=False)
        .softmax(dim=-1)
        .numpy()
    )
    assert own == pytest.approx(expected, abs=3e-6)
    start(
        [
            "toolkit",
            "predict",
            run / "model",
            file,
            "--output",
            output,
            "--per_device_batch_size",
            "1",
        ]
    ).succeeded()
    table = pd.read_csv(output)
    assert list(table["prediction"]) == [line["prediction"] for line in written]
    assert table[["probability_neg", "probability_pos"]].to_numpy() == pytest.approx(
        expected, abs=3e-6
    )


@pytest.mark.multiprocess
def test_a_sharded_checkpoint_becomes_the_model(tmp_path: Path) -> None:
    model = converted(stopped(), tmp_path / "out", AutoModelForSequenceClassification, STOPPED)
    assert model.config.attention_type == "block_sparse"


def converted(run: Path, out: Path, model_class: Any, step: int) -> Any:
    """What the checkpoint of a run that stopped after `step` becomes: the model that the run has saved."""
    start(["toolkit", "convert", run, out]).succeeded()
    model, loading = model_class.from_pretrained(out, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((run / "model" / "trainer_state.json").read_text())["global_step"] == step
    saved = model_class.from_pretrained(run / "model").state_dict()
    torch.testing.assert_close(dict(model.state_dict()), dict(saved), rtol=0, atol=0)
    return model
