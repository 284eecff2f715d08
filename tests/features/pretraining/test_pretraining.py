"""recipes/pretrain.py: equal losses under every strategy, checkpoints, and fine-tuning of its model."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM, pipeline

from tests import inputs
from tests.architectures import make_architecture
from tests.faults import refusal
from tests.matrix import runs
from tests.runs import lines_of, losses_of, start
from tests.splits import global_batches
from tests.test_long import converted
from toolkit.data.batches import Batch
from toolkit.data.token_files import load_split
from toolkit.features.pretraining.data import MaskedSplit, MaskingCollator
from toolkit.features.pretraining.model import load_masked_model, predict_masked_only
from toolkit.features.pretraining.settings import EncoderSettings
from toolkit.report.comparison import compare
from toolkit.utils.cache import cache_folder

CPU = torch.device("cpu")
SEED, STEPS, STOPPED, RATE = 42, 7, 3, 3e-3  # 6 steps are an epoch
COMMON = ["--max_steps", STEPS, "--eval_every", STEPS, "--dropout", 0, "--mixed_precision", "no", "--report_to", "none",
          "--seed", SEED, "--global_batch_size", 11, "--per_device_batch_size", 3, "--per_device_eval_batch_size", 5,
          "--learning_rate", RATE, "--lr_scheduler_type", "constant", "--weight_decay", 0,
          "--max_grad_norm", 0, "--max_length", 48]  # fmt: skip
SEVERAL = ["BERT", "RoBERTa", "XLM-R", "ModernBERT"]
Runs = dict[str, Path]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(pd.read_csv(inputs.reviews())["text"][:80])


@pytest.fixture(scope="module")
def models(texts: list[str]) -> Runs:
    """Small encoders with a head, and a BigBird converted from the BERT."""
    made = {name: inputs.shared(f"masked {name}", lambda folder, name=name: make_architecture(name, folder, texts))
            for name in SEVERAL[1:]}  # fmt: skip
    return {"BERT": inputs.masked_model(), **made, "BigBird": inputs.masked_bigbird()}


@pytest.fixture(scope="module")
def data(texts: list[str]) -> list[Any]:
    def make(folder: Path) -> None:
        for name, some in (("train", texts[:64]), ("validation", texts[64:])):
            lines = "".join(f"{text}\n" for text in some)
            (folder / f"{name}.txt").write_text(lines, encoding="utf-8")

    folder = inputs.shared("masked texts", make)
    return ["--train_file", folder / "train.txt", "--validation_file", folder / "validation.txt"]


Masked = Callable[..., Path]


@pytest.fixture(scope="module")
def masked(models: Runs, data: list[Any]) -> Masked:
    """`masked("zero3 x2", "BERT", ...)` -> the run of this model."""

    def run(way: str, name: str, kind: str = "", *more: Any) -> Path:
        job = ["--model_name_or_path", models[name], *data, *COMMON]
        job += ["--mlm_probability", 0.3]
        job += [] if name == "XLM-R" else ["--whole_word_mask", "true"]
        job += ["--gradient_checkpointing", "true"] if name == "RoBERTa" else []
        return runs(way).run(f"masked {name} {kind}".strip(), "recipes.pretrain", [*job, *more])

    return run


@pytest.fixture(scope="module")
def single(masked: Masked, models: Runs) -> Runs:
    """The references, in one process."""
    return {name: masked("single", name) for name in models}


@pytest.fixture(scope="module")
def stopped(masked: Masked) -> Path:
    steps = ["--max_steps", STOPPED, "--checkpoint_every", STOPPED]
    return masked("zero3 x2", "BERT", "stopped", *steps)


def assert_same(run: Path, reference: Path) -> None:
    losses, expected = losses_of(run), losses_of(reference)
    assert losses == pytest.approx(expected[-len(losses) :], rel=1e-5)
    (mine, theirs) = (lines_of(folder / "eval.jsonl")[-1] for folder in (run, reference))
    assert (mine["num_samples"], mine["masked_tokens"]) == (16, theirs["masked_tokens"])
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert mine["masked_accuracy"] == pytest.approx(theirs["masked_accuracy"], abs=1e-9)
    assert [line["id"] for line in lines_of(run / "predictions.jsonl")] == list(range(16))


@pytest.mark.multiprocess
def test_a_run_goes_on_under_another_way(masked: Masked, single: Runs, stopped: Path) -> None:
    for name in ("BERT", "BigBird"):
        assert np.ptp(losses_of(single[name])) > 0.1
        assert lines_of(single[name] / "eval.jsonl")[-1]["masked_tokens"] > 30
    assert losses_of(stopped) == pytest.approx(losses_of(single["BERT"])[:STOPPED], rel=1e-5)
    saved = stopped / "checkpoints" / f"step-{STOPPED:08d}"
    resumed = masked("single", "BERT", "resumed", "--per_device_batch_size", 11, "--resume", saved)
    assert len(losses_of(resumed)) == STEPS - STOPPED
    assert_same(resumed, single["BERT"])


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("way", "name"), [("zero3 x2", "RoBERTa"), ("ddp x2", "XLM-R"), ("fsdp2 x2", "ModernBERT")]
)
def test_strategies_agree(way: str, name: str, masked: Masked, single: Runs) -> None:
    """Of a BERT and a BigBird: tests/test_sameness.py."""
    assert_same(masked(way, name), single[name])


def cross_entropy(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, truth, reduction="none")


def split_of(run: Path, name: str) -> MaskedSplit:
    digest = json.loads((run / "config.json").read_text())["data"]["digest"]
    return load_split(cache_folder() / "tokens" / digest, name, None, MaskedSplit)


def as_transformers(batch: Batch) -> dict[str, torch.Tensor]:
    """A masked batch in transformers' format: `labels` (B, S), -100 elsewhere."""
    ids, places = batch.inputs["input_ids"], batch.inputs["target_positions"]
    rows = torch.arange(len(ids))[:, None].expand_as(places)
    real = batch.labels != -100
    labels = torch.full_like(ids, -100)
    labels[rows[real], places[real]] = batch.labels[real]
    mask = batch.inputs.get("attention_mask", torch.ones_like(ids))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_a_plain_loop_has_the_same_losses(single: Runs, models: Runs) -> None:
    options = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model, losses = BertForMaskedLM.from_pretrained(models["BERT"], **options), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    split = split_of(single["BERT"], "train")
    tokenizer = AutoTokenizer.from_pretrained(models["BERT"])
    collate = MaskingCollator(split, tokenizer, CPU, SEED, 0.3)
    for number in range(STEPS):
        epoch, place = divmod(number, 6)
        batch = collate.at(epoch)(global_batches(split.lengths, 11, SEED, epoch)[place])
        loss = model(**as_transformers(batch)).loss  # over all masked tokens of the batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses_of(single["BERT"]) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", [*SEVERAL, "BigBird"])
def test_the_saved_model_is_what_was_evaluated(name: str, single: Runs) -> None:
    """Computed by transformers, text by text: every masked token counts once."""
    run = single[name]
    model, loading = AutoModelForMaskedLM.from_pretrained(run / "model", output_loading_info=True)
    assert not any(loading[kind] for kind in ("unexpected_keys", "mismatched_keys"))
    assert all("pooler" in key for key in loading["missing_keys"])  # BigBird's class has one
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    split = split_of(run, "validation")
    collate = MaskingCollator(split, tokenizer, CPU, 1, 0.9)
    loss, right, count = 0.0, 0, 0
    for index in range(len(split)):
        inputs = as_transformers(collate(np.array([index])))
        is_masked = inputs["labels"] != -100
        truth = inputs.pop("labels")[is_masked]
        if name == "BigBird":  # the first short text would switch it to full attention for good
            model.bert.set_attention_type("block_sparse")
        with torch.no_grad():
            logits = model.eval()(**inputs).logits[is_masked]
        loss += cross_entropy(logits, truth).sum().item()
        right += int((logits.argmax(-1) == truth).sum())
        count += len(truth)
    last = lines_of(run / "eval.jsonl")[-1]
    assert (last["masked_tokens"], last["num_samples"]) == (count, 16)
    assert last["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert last["perplexity"] == pytest.approx(np.exp(loss / count), rel=1e-4)
    assert last["masked_accuracy"] == pytest.approx(right / count, abs=1e-9)
    lines = lines_of(run / "predictions.jsonl")
    assert sum(line["masked_tokens"] for line in lines) == count
    compared = compare([run]).runs[0].intervals["masked_accuracy"]
    assert compared["value"] == pytest.approx(last["masked_accuracy"], abs=1e-5)


def test_pages() -> None:
    run = runs("single")["pretraining"]
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: fill-mask" in card
    assert "perplexity" in card
    assert 'href="#mistakes"' not in (run / "report.html").read_text(encoding="utf-8")
    answers = pipeline("fill-mask", model=str(run / "model"))("a fine [MASK]")
    assert len(answers) == 5


@pytest.mark.multiprocess
def test_a_sharded_checkpoint_is_converted(stopped: Path, tmp_path: Path) -> None:
    model = converted(stopped, tmp_path / "out", BertForMaskedLM, STOPPED)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


OTHERS = "ERNIE DistilBERT ALBERT DeBERTa-v2 EuroBERT NomicBERT GTE Longformer MobileBERT".split()


@pytest.mark.parametrize("name", [*SEVERAL, "BigBird", *OTHERS])
def test_logits_at_masked_positions(
    name: str, models: Runs, texts: list[str], tmp_path: Path
) -> None:
    """Equal to those positions of all logits, with equal gradients."""
    if name == "MobileBERT":  # its head reads the output layer's weights
        sizes = {"vocab_size": 100, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "intermediate_size": 8, "embedding_size": 8, "intra_bottleneck_size": 8}  # fmt: skip
        config = AutoConfig.for_model("mobilebert", **sizes)
        plain = AutoModelForMaskedLM.from_config(config).eval()
    else:
        folder = models.get(name) or make_architecture(name, tmp_path / "model", texts)
        plain = AutoModelForMaskedLM.from_pretrained(folder).eval()
    masked = copy.deepcopy(plain)
    predict_masked_only(masked)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 100, (3, 12), generator=generator)
    places = torch.stack([torch.randperm(12, generator=generator)[:5] for _ in range(3)])
    logits = plain(input_ids=ids).logits
    expected = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
    output = masked(input_ids=ids, target_positions=places).logits
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    for each in (output, expected):
        each.square().sum().backward()
    for (key, mine), theirs in zip(masked.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=key)
    torch.testing.assert_close(masked(input_ids=ids).logits, logits)


def test_models_without_a_head(texts: list[str], tiny_model: Path, tmp_path: Path) -> None:
    settings = EncoderSettings(model_name_or_path=str(tiny_model))
    says = ["masked-language head", "--new_head true", "cls.predictions"]
    refusal(load_masked_model, settings, 1, says=says)
    settings = EncoderSettings(model_name_or_path=str(tiny_model), new_head=True)
    made = [load_masked_model(settings, seed) for seed in (1, 1, 2)]
    heads = [model.cls.predictions.transform.dense.weight for model in made]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    for model in made:
        assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
    qwen = make_architecture("Qwen3", tmp_path / "qwen", texts)
    settings = EncoderSettings(model_name_or_path=str(qwen))
    refusal(load_masked_model, settings, 1, match="Qwen3")


def test_other_recipes_take_the_model(single: Runs, tmp_path: Path) -> None:
    rows = [
        {"text": "a good zyxomab " * place, "title": "good zyxomab", "label": place % 2}
        for place in range(1, 19)
    ]
    pd.DataFrame(rows).to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    common = ["--train_file", tmp_path / "rows.jsonl", "--max_steps", 1, "--report_to", "none", "--learning_rate", 1e-9,
              "--mixed_precision", "no", "--max_length", 48]  # fmt: skip
    last = "encoder.layer.1.output.dense.weight"
    for script, name in (("cls", "BERT"), ("title", "BERT"), ("bigbird", "BERT"), ("bigbird", "BigBird")):  # fmt: skip
        words = [*common, "--model_name_or_path", single[name] / "model"]
        run = runs("single").run(f"{script} of a masked {name}", f"recipes.{script}", words)
        weights = load_file(run / "model" / "model.safetensors")
        expected = load_file(single[name] / "model" / "model.safetensors")
        pairs = {f"bert.{last}": f"bert.{last}"}
        if script == "title":
            pairs = {f"encoder.{last}": f"bert.{last}", f"decoder.bert.{last}": f"bert.{last}"}
            pairs |= {f"decoder.{each}": each for each in expected if each.startswith("cls.")}
            assert len(pairs) > 4
        for mine, pretrained in pairs.items():
            torch.testing.assert_close(weights[mine], expected[pretrained], rtol=0, atol=1e-7)


def test_prepared_tokens_are_those_of_the_run(single: Runs, models: Runs, data: list[Any]) -> None:
    words = ["--model_name_or_path", models["XLM-R"], *data, "--max_length", 48]
    prepared = start(["toolkit", "prepare", "pretrain", *map(str, words)]).succeeded()
    assert "masked tokens" in prepared.out
    facts = json.loads((single["XLM-R"] / "config.json").read_text())["data"]
    assert facts["digest"] in prepared.out
