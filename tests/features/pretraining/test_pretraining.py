"""recipes/pretrain.py: the losses of a plain loop, checkpoints, and fine-tuning of its model.

Equal losses under every strategy: tests/test_sameness.py.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM, pipeline

from tests import inputs
from tests.architectures import make_architecture
from tests.faults import refusal
from tests.matrix import MASKED, runs, words_of
from tests.runs import assert_same_run, lines_of, losses_of, start
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
SEED, STEPS, STOPPED, RATE, MASKED_PART = 42, 5, 3, 3e-3, 0.4  # 4 steps are an epoch
MODELS = ["BERT", "BigBird", "RoBERTa", "ModernBERT"]


def model_of(name: str) -> Path:
    """A small encoder with a head; the BigBird is converted from the BERT."""
    made = {"BERT": inputs.masked_model, "BigBird": inputs.masked_bigbird}
    if name in made:
        return made[name]()
    texts = list(pd.read_csv(inputs.reviews())["text"][:80])
    return inputs.shared(f"masked {name}", lambda folder: make_architecture(name, folder, texts))


def masked(way: str, kind: str, *more: Any) -> Path:
    return runs(way).run(f"masked {kind}", "recipes.pretrain", [*MASKED, *more])


def single(name: str) -> Path:
    """The run of this model in one process."""
    return masked("single", name, "--model_name_or_path", model_of(name))


def stopped() -> Path:
    steps = ["--max_steps", STOPPED, "--checkpoint_every", STOPPED]
    return masked("zero3 x2", "stopped", *steps)


@pytest.mark.multiprocess
def test_a_run_goes_on_under_another_way() -> None:
    saved = stopped() / "checkpoints" / f"step-{STOPPED:08d}"
    resumed = masked("single", "resumed", "--per_device_batch_size", 11, "--resume", saved)
    assert_same_run(resumed, single("BERT"), after=STOPPED)
    assert np.ptp(losses_of(single("BERT"))) > 0.1


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


def test_a_plain_loop_has_the_same_losses() -> None:
    run = masked("single", "without clipping", "--weight_decay", 0, "--max_grad_norm", 0)
    options = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model, losses = BertForMaskedLM.from_pretrained(model_of("BERT"), **options), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    split = split_of(run, "train")
    tokenizer = AutoTokenizer.from_pretrained(model_of("BERT"))
    collate = MaskingCollator(split, tokenizer, CPU, SEED, MASKED_PART)
    for number in range(STEPS):
        epoch, place = divmod(number, 4)
        batch = collate.at(epoch)(global_batches(split.lengths, 11, SEED, epoch)[place])
        loss = model(**as_transformers(batch)).loss  # over all masked tokens of the batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses_of(run) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_saved_model_is_what_was_evaluated(name: str) -> None:
    """Computed by transformers, text by text: every masked token counts once."""
    run = single(name)
    model, loading = AutoModelForMaskedLM.from_pretrained(run / "model", output_loading_info=True)
    assert not any(loading[kind] for kind in ("unexpected_keys", "mismatched_keys"))
    assert all("pooler" in key for key in loading["missing_keys"])  # BigBird's class has one
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    split, tokenizer = split_of(run, "validation"), AutoTokenizer.from_pretrained(run / "model")
    collate = MaskingCollator(split, tokenizer, CPU, 1, 0.9)
    losses, right = torch.zeros(0), torch.zeros(0)
    for index in range(len(split)):
        encoded = as_transformers(collate(np.array([index])))
        is_masked = encoded["labels"] != -100
        truth = encoded.pop("labels")[is_masked]
        if name == "BigBird":  # the first short text would switch it to full attention for good
            model.bert.set_attention_type("block_sparse")
        with torch.no_grad():
            logits = model.eval()(**encoded).logits[is_masked]
        losses = torch.cat([losses, F.cross_entropy(logits, truth, reduction="none")])
        right = torch.cat([right, logits.argmax(-1) == truth])
    last = lines_of(run / "eval.jsonl")[-1]
    assert (last["masked_tokens"], last["num_samples"]) == (len(losses), 16)
    assert len(losses) > 30
    assert last["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert last["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-4)
    assert last["masked_accuracy"] == pytest.approx(right.mean().item())
    lines = lines_of(run / "predictions.jsonl")
    assert sum(line["masked_tokens"] for line in lines) == len(losses)
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
def test_a_sharded_checkpoint_is_converted(tmp_path: Path) -> None:
    model = converted(stopped(), tmp_path / "out", BertForMaskedLM, STOPPED)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


OTHERS = "XLM-R ERNIE DistilBERT ALBERT DeBERTa-v2 EuroBERT NomicBERT GTE Longformer".split()


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_logits_at_masked_positions(name: str) -> None:
    """Equal to those positions of all logits, with equal gradients."""
    plain = AutoModelForMaskedLM.from_pretrained(model_of(name)).eval()
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


def test_models_without_a_head(tiny_model: Path) -> None:
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
    settings = EncoderSettings(model_name_or_path=str(model_of("Qwen3")))
    refusal(load_masked_model, settings, 1, match="Qwen3")


def test_other_recipes_take_the_model(tmp_path: Path) -> None:
    rows = [
        {"text": "a good film " * place, "title": "good", "label": place % 2}
        for place in range(1, 19)
    ]
    file = inputs.write_jsonl(tmp_path / "rows.jsonl", rows)
    common = ["--train_file", file, "--max_steps", 1, "--report_to", "none", "--learning_rate", 1e-9,
              "--mixed_precision", "no", "--max_length", 48]  # fmt: skip
    last = "encoder.layer.1.output.dense.weight"
    for script, name in (
        ("cls", "BERT"),
        ("title", "BERT"),
        ("bigbird", "BERT"),
        ("bigbird", "BigBird"),
    ):
        words = [*common, "--model_name_or_path", single(name) / "model"]
        run = runs("single").run(f"{script} of a masked {name}", f"recipes.{script}", words)
        weights = load_file(run / "model" / "model.safetensors")
        expected = load_file(single(name) / "model" / "model.safetensors")
        pairs = {f"bert.{last}": f"bert.{last}"}
        if script == "title":
            pairs = {f"encoder.{last}": f"bert.{last}", f"decoder.bert.{last}": f"bert.{last}"}
            pairs |= {f"decoder.{each}": each for each in expected if each.startswith("cls.")}
            assert len(pairs) > 4
        for mine, pretrained in pairs.items():
            torch.testing.assert_close(weights[mine], expected[pretrained], rtol=0, atol=1e-7)


def test_prepared_tokens_are_those_of_the_run() -> None:
    words = words_of([*MASKED, "--model_name_or_path", model_of("RoBERTa")])
    prepared = start(["toolkit", "prepare", "pretrain", *words]).succeeded()
    assert "masked tokens" in prepared.out
    facts = json.loads((single("RoBERTa") / "config.json").read_text())["data"]
    assert facts["digest"] in prepared.out
