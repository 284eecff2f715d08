"""recipes/bigbird.py: the promises on long texts, its literal commands, its comparison and what it saves.

Attention is sparse above 704 tokens, and which tokens a text's attention reaches then depends on how far its batch is
padded. Where runs are compared that cut their steps into different micro-batches, texts are therefore cut at 704
tokens; where attention is sparse, their micro-batches are the same ones on 1, 2 and 3 processes (6 of 2 texts each).
`test_a_text_is_read_alike_in_every_batch` says what is missing.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.jobs_worker import run_named_jobs
from tests.runs import MORE_WAYS, WAYS, assert_same_run, lines_of, losses_of, slow_but, start
from tests.splits import of_lengths
from toolkit.data.batches import GlobalBatches, micro_batches

Runs = dict[str, Path]
STEPS, STOPPED, FIRST = 6, 3, 64
SEED = 42
COMMON = ["--max_steps", STEPS, "--eval_every", STOPPED, "--dropout", 0, "--mixed_precision", "no", "--report_to",
          "none", "--learning_rate", "3e-3", "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", 2,
          "--max_grad_norm", 0.5, "--weight_decay", 0.1, "--global_batch_size", 12, "--per_device_eval_batch_size", 3,
          "--seed", SEED]  # fmt: skip
SPARSE = [*COMMON, "--max_length", 4096, "--per_device_batch_size", 2, "--compare_max_length", FIRST]
# under several processes, whose hooks it is that recomputing breaks; test_command runs without
RECOMPUTED = [*SPARSE, "--gradient_checkpointing", "true"]
# full attention, and 9 to 12 micro-batches a step on one process, 5 or 6 on two
TOKENS = [*COMMON, "--max_length", 704, "--per_device_batch_size", 12, "--max_tokens_per_batch", 1250]
# the weights stand still, so that the loss of each step is known beforehand
STILL = [*COMMON, "--max_length", 4096, "--learning_rate", "1e-30", "--warmup_steps", 0, "--weight_decay", 0,
         "--max_steps", 4]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, sharp_model: Path, long_reviews: Path) -> list[str]:
    """48 rows to train on and 12 to evaluate, in files, so that rows are known by their places."""
    folder = tmp_path_factory.mktemp("long")
    table = pd.read_csv(long_reviews).sample(60, random_state=3)
    table[:48].to_csv(folder / "train.csv", index=False)
    table[48:].to_csv(folder / "validation.csv", index=False)
    files = ["--train_file", folder / "train.csv", "--validation_file", folder / "validation.csv"]
    return ["--model_name_or_path", str(sharp_model), *map(str, files)]


def file_of(settings: list[str], name: str) -> Path:
    return Path(settings[settings.index(f"--{name}_file") + 1])


def run_all(root: Path, way: str, settings: list[str], jobs: dict[str, list[Any]]) -> Runs:
    words = {**WAYS, **MORE_WAYS}[way]
    return run_named_jobs(root, words, {name: ["recipes.bigbird", *settings, *job] for name, job in jobs.items()})


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Runs:
    stopped = [*SPARSE, "--max_steps", STOPPED, "--checkpoint_every", STOPPED]
    jobs = {"recomputed": RECOMPUTED, "tokens": TOKENS, "stopped": stopped}
    return run_all(tmp_path_factory.mktemp("zero3"), "zero3 x2", settings, jobs)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Runs:
    """Nothing passes find_unused_parameters: a parameter without a gradient would end these runs."""
    jobs = {"recomputed": RECOMPUTED, "tokens": TOKENS}
    return run_all(tmp_path_factory.mktemp("ddp"), "ddp x2", settings, jobs)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, settings: list[str], zero3: Runs) -> Runs:
    """The references, one process; `resumed` goes on from a copy of what ZeRO-3 left."""
    root = tmp_path_factory.mktemp("single")
    shutil.copytree(zero3["stopped"], root / "resumed", symlinks=True)
    alone, together = ["--per_device_batch_size", 1, "--per_device_eval_batch_size", 1], ["--per_device_batch_size", 12]
    jobs = {
        "sparse": SPARSE,
        "tokens": TOKENS,
        "resumed": [*SPARSE, "--checkpoint_every", STOPPED],
        "alone": [*STILL, *alone],
        "together": [*STILL, *together],
        "eager": [*SPARSE, "--max_steps", STOPPED, "--attn_implementation", "eager"],
        "full": [*SPARSE, "--max_steps", STOPPED, "--attn_implementation", "full"],
    }
    return run_all(root, "single", settings, jobs)


# Promise 1: the losses, the evaluations and every probability
assert_same = functools.partial(assert_same_run, probabilities=3e-6, evaluations=1e-6)


def test_the_references_could_differ(single: Runs, settings: list[str]) -> None:
    """A model that learned nothing, or for which every text is the same, would agree with anything."""
    for name in ("sparse", "tokens"):
        assert len(losses_of(single[name])) == STEPS
        assert np.ptp(losses_of(single[name])) > 0.01
        chances = [line["probabilities"][0] for line in lines_of(single[name] / "predictions.jsonl")]
        assert len(chances) == 12
        assert np.std(chances) > 3e-4  # a hundred times what they may differ by
    # and what attention reaches matters to it, far more than two runs may differ
    pairs = zip(losses_of(single["full"]), losses_of(single["sparse"])[:STOPPED], strict=True)
    assert max(abs(one - other) / other for one, other in pairs) > 3e-4
    # and steps of the variant `tokens` have different numbers of micro-batches
    lengths = lengths_of(settings, most=704)
    order = [*GlobalBatches(lengths, 12, SEED, epoch=0), *GlobalBatches(lengths, 12, SEED, epoch=1)][:STEPS]
    for world in (1, 2):
        assert len({len(micro_batches(of_lengths(lengths), batch, 12, 0, world, 1250)) for batch in order}) > 1


@pytest.mark.multiprocess
def test_it_goes_on_under_another_way(single: Runs) -> None:
    """Three steps on two processes that shard parameters, three more on one."""
    assert_continued(single["resumed"], single["sparse"])


def assert_continued(run: Path, expected: Path) -> None:
    resumed_from = json.loads((run / "config.json").read_text())["resumed_from"]
    assert Path(resumed_from).name == f"step-{STOPPED:08d}"
    assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert losses_of(run) == pytest.approx(losses_of(expected), rel=1e-5)


def lengths_of(settings: list[str], most: int) -> np.ndarray:
    """(48,): the tokens of the training texts, without the toolkit."""
    tokenizer = AutoTokenizer.from_pretrained(settings[1])
    texts = list(pd.read_csv(file_of(settings, "train"))["text"])
    return np.array([len(ids) for ids in tokenizer(texts, truncation=True, max_length=most)["input_ids"]])


@pytest.mark.multiprocess
@pytest.mark.parametrize(("variant", "expected"), [("recomputed", "sparse"), ("tokens", "tokens")])
def test_strategies_agree(variant: str, expected: str, ddp: Runs, zero3: Runs, single: Runs) -> None:
    for runs in (ddp, zero3):
        assert_same(runs[variant], single[expected])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x3", "zero1 x2", "fsdp2 x2", *MORE_WAYS])
def test_more_strategies_agree(way: str, single: Runs, settings: list[str], tmp_path: Path) -> None:
    assert_same(run_all(tmp_path, way, settings, {"run": SPARSE})["run"], single["sparse"])


COMMANDS = {
    # words -> processes
    "deepspeed recipes/bigbird.py": 1,
    "accelerate launch recipes/bigbird.py --config_file accelerate_configs/zero2.yaml": 2,
    "deepspeed --num_gpus 2 recipes/bigbird.py": 2,
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", slow_but(COMMANDS, *list(COMMANDS)[:2]))
def test_command(command: str, settings: list[str], single: Runs, tmp_path: Path) -> None:
    finished = start([*command.split(), *settings, *map(str, SPARSE), "--output_dir", tmp_path / "run"]).succeeded()
    world = json.loads((tmp_path / "run" / "config.json").read_text())["world"]
    assert (world["num_processes"], world["distributed_type"]) == (COMMANDS[command], "DEEPSPEED")
    assert world["deepspeed"]["zero_optimization"]["stage"] == 2
    assert_same(run := tmp_path / "run", single["sparse"])
    # the last two evaluations are of the saved model: of the texts' beginnings, then of all of them
    *_, beginnings, whole = lines_of(run / "eval.jsonl")
    assert (beginnings["split"], beginnings["max_length"]) == (f"validation_first_{FIRST}", FIRST)
    assert whole["split"] == "validation"
    assert "max_length" not in whole
    assert beginnings["num_samples"] == whole["num_samples"] == 12
    assert beginnings["step"] == whole["step"]
    assert beginnings["loss"] != whole["loss"]
    assert len(lines_of(run / "predictions.jsonl")) == 12
    said = finished.out[finished.out.index("done in") :]
    assert f"reading the first {FIRST} tokens only" in said
    assert said.count(f"accuracy {whole['accuracy']:.4f}") >= 2  # beside its own line, beside the other's
    assert f"accuracy {beginnings['accuracy']:.4f}" in said


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_default_job(tmp_path: Path) -> None:
    """No data, no model: IMDB reviews of more than 512 tokens, a BigBird made of MiniLM; a twentieth of the epoch."""
    part = ["--max_train_samples", "160", "--max_eval_samples", "40"]
    start(["deepspeed", "recipes/bigbird.py", *part, "--output_dir", tmp_path / "run"], seconds=600).succeeded()
    whole, first = lines_of(tmp_path / "run" / "eval.jsonl")
    assert first["num_samples"] == whole["num_samples"] == 40
    assert first["max_length"] == 512
    world = json.loads((tmp_path / "run" / "config.json").read_text())["world"]
    assert world["deepspeed"]["zero_optimization"]["stage"] == 2
    lost = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)[1]
    assert not lost["missing_keys"]


def test_transformers_own_attention_gives_the_same(single: Runs) -> None:
    assert losses_of(single["eager"]) == pytest.approx(losses_of(single["sparse"])[:STOPPED], rel=1e-5)
    mine, theirs = (lines_of(single[name] / "eval.jsonl")[0] for name in ("eager", "sparse"))
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert (mine["step"], mine["confusion_matrix"]) == (theirs["step"], theirs["confusion_matrix"])


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
            found.append(model(**tokenizer(text, truncation=True, max_length=4096, return_tensors="pt")).logits)
    return torch.cat(found)


def test_short_texts_before_long_ones(single: Runs, settings: list[str]) -> None:
    """Each text alone, short ones before long ones, with weights that stand still: the losses that transformers gives
    each by itself."""
    table = pd.read_csv(file_of(settings, "train"))
    logits = own_logits(single["alone"] / "model", list(table["text"]), training=True)
    labels = torch.tensor((table["label"] == "pos").to_numpy(), dtype=torch.long)
    still_losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none").numpy()
    lengths = lengths_of(settings, most=4096)
    order = GlobalBatches(lengths, 12, SEED, epoch=0)
    assert any((lengths[batch] <= 704).any() for batch in [*order][:-1])  # and long ones in later steps
    assert len(order) == 4
    assert losses_of(single["alone"]) == pytest.approx([still_losses[batch].mean() for batch in order], rel=1e-5)


def test_a_text_is_read_alike_in_every_batch(single: Runs) -> None:
    """The same weights, texts and steps, cut into micro-batches of one text or of twelve."""
    assert losses_of(single["together"]) == pytest.approx(losses_of(single["alone"]), rel=1e-5)


@pytest.mark.multiprocess
def test_the_saved_model_predicts_the_same(single: Runs, settings: list[str], tmp_path: Path) -> None:
    """By transformers alone, and by `toolkit predict`: a text at a time, as that run evaluated."""
    model, file = single["alone"] / "model", file_of(settings, "validation")
    written = lines_of(single["alone"] / "predictions.jsonl")
    expected = np.array([line["probabilities"] for line in written])
    own = own_logits(model, list(pd.read_csv(file)["text"]), training=False).softmax(dim=-1).numpy()
    assert own == pytest.approx(expected, abs=3e-6)
    output = tmp_path / "out.csv"
    start(["toolkit", "predict", model, file, "--output", output, "--per_device_batch_size", "1"]).succeeded()
    table = pd.read_csv(output)
    assert list(table["prediction"]) == [line["prediction"] for line in written]
    assert table[["probability_neg", "probability_pos"]].to_numpy() == pytest.approx(expected, abs=3e-6)


@pytest.mark.multiprocess
def test_a_sharded_checkpoint_becomes_the_model(zero3: Runs, tmp_path: Path) -> None:
    model = converted(zero3["stopped"], tmp_path / "out", AutoModelForSequenceClassification)
    assert model.config.attention_type == "block_sparse"


def converted(run: Path, out: Path, model_class: Any) -> Any:
    """What a stopped run's checkpoint becomes: the model that the run has saved."""
    start(["toolkit", "convert", run, out]).succeeded()
    model, loading = model_class.from_pretrained(out, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((run / "model" / "trainer_state.json").read_text())["global_step"] == STOPPED
    saved = model_class.from_pretrained(run / "model").state_dict()
    torch.testing.assert_close(dict(model.state_dict()), dict(saved), rtol=0, atol=0)
    return model
