"""recipes/pretrain.py: the losses of a plain loop, checkpoints, fine-tuning of its model; masks of whole words.

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
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM

from tests import inputs
from tests.architectures import make_architecture, make_tokenizer
from tests.faults import refusal
from tests.matrix import MASKED, runs
from tests.runs import assert_same_run, lines_of, losses_of
from tests.splits import global_batches
from toolkit.config import build
from toolkit.data.batches import Batch
from toolkit.data.token_files import load_split
from toolkit.features.pretraining import data as module
from toolkit.features.pretraining.data import Draw, MaskedSplit, MaskingCollator, draw_masks
from toolkit.features.pretraining.model import load_masked_model, predict_masked_only
from toolkit.features.pretraining.settings import EncoderSettings, PretrainSettings
from toolkit.features.pretraining.words import word_starts, words_of
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


@pytest.mark.multiprocess
def test_a_run_goes_on_under_another_way() -> None:
    steps = ["--max_steps", STOPPED, "--checkpoint_every", STOPPED]
    saved = masked("zero3 x2", "stopped", *steps) / f"checkpoints/step-{STOPPED:08d}"
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


def test_the_card() -> None:
    card = (runs("single")["pretraining"] / "model" / "README.md").read_text(encoding="utf-8")
    assert [part for part in ("pipeline_tag: fill-mask", "perplexity") if part not in card] == []


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
    def load(path: Path, seed: int = 1, **more: Any) -> Any:
        return load_masked_model(EncoderSettings(model_name_or_path=str(path), **more), seed)

    refusal(load, tiny_model, says=["masked-language head", "--new_head true", "cls.predictions"])
    refusal(load, model_of("Qwen3"), match="Qwen3")
    made = [load(tiny_model, seed, new_head=True) for seed in (1, 1, 2)]
    one, same, other = (model.cls.predictions.transform.dense.weight for model in made)
    assert (torch.equal(one, same), torch.equal(one, other)) == (True, False)
    assert made[0].cls.predictions.decoder.weight is made[0].get_input_embeddings().weight


def test_the_first_loss_of_a_model_that_guesses() -> None:
    """A line, unless its head is new: these weights are random."""
    run, name = single("BERT"), str(model_of("BERT"))
    says = f"the loss of step 1, {losses_of(run)[0]:.2f}"
    assert runs("single").log("masked BERT").count(says) == 1
    tokenizer = AutoTokenizer.from_pretrained(name)
    for new_head, loss in ((False, 0.94), (True, 1.0)):
        settings = build(PretrainSettings, {"model_name_or_path": name, "new_head": new_head})
        nats = loss * np.log(len(tokenizer))
        assert module.Masks.first_loss_note(settings, tokenizer, nats) is None


def test_other_recipes_take_the_model(tmp_path: Path) -> None:
    rows = [{"text": "a film " * row, "title": "good", "label": row % 2} for row in range(1, 19)]
    file = inputs.write_jsonl(tmp_path / "rows.jsonl", rows)
    common = ["--train_file", file, "--max_steps", 1, "--report_to", "none", "--learning_rate",
              1e-9, "--mixed_precision", "no", "--max_length", 48]  # fmt: skip
    last = "encoder.layer.1.output.dense.weight"
    for script, name, parts in (
        ("cls", "BERT", ["bert."]),
        ("bigbird", "BigBird", ["bert."]),
        ("title", "BERT", ["encoder.", "decoder.bert."]),
    ):
        words = [*common, "--model_name_or_path", single(name) / "model"]
        run = runs("single").run(f"{script} of a masked {name}", f"recipes.{script}", words)
        folders = (run / "model", single(name) / "model")
        weights, expected = (load_file(folder / "model.safetensors") for folder in folders)
        pairs = {f"{part}{last}": f"bert.{last}" for part in parts}
        if script == "title":
            pairs |= {f"decoder.{each}": each for each in expected if each.startswith("cls.")}
            assert len(pairs) > 4
        for mine, pretrained in pairs.items():
            torch.testing.assert_close(weights[mine], expected[pretrained], rtol=0, atol=1e-7)


# Words separated by hand with bars: English and Chinese reviews, a headline, mixed text.
MARKED = [
    "This| |café| |doesn|'|t| |serve| |espresso| |for| |$|3|.|50|,| |sadly|.",
    "state|-|of|-|the|-|art| |visuals|,| |extras| |and| |a| |naïve| |script|!",
    "酒店|的|服务态度|非常|好|,|房间|也|很|干净|,|下次|还|会|再|来|。",
    "京东|快递|小哥|态度|很|好",
    "😀| |我|用|iPhone15|拍照|,|很|清楚|。",
    "买|了|一件|T恤|,|花|了|10|,|000|元|!",
    "南京市|长江大桥| |is| |1|,|577| |m| |long|.",
]


@pytest.mark.parametrize("marked", [*MARKED, "می\u200cخواهم| |بروم"])
def test_words_are_those_separated_by_hand(marked: str) -> None:
    text = marked.replace("|", "")
    expected = [part for part in marked.split("|") if part.strip()]
    assert [text[start:end] for start, end in words_of(text)] == expected


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_words_of_tokens(kind: str) -> None:
    """Each start is that of a word; a word has none where it shares a token with the one before it."""
    texts = [marked.replace("|", "") for marked in MARKED]
    tokenizer = make_tokenizer(kind, texts)  # most words are several tokens
    for text in texts:
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        offsets, found = encoded["offset_mapping"], []
        starts = word_starts(text, offsets)
        for (first, last), is_start in zip(offsets, starts, strict=True):
            if is_start:
                found.append(last - len(text[first:last].lstrip()))
        words = [first for first, _ in words_of(text)]
        assert found == words if kind == "wordpiece" else {*found} <= {*words}
        assert sum(starts) < len(starts) or kind != "bpe"


def drawn(draw: Draw, row: int, maskable: Any, starts: Any = None) -> list[bool]:
    return draw_masks(draw, np.array([row]), np.array([len(maskable)]), maskable, starts).tolist()


@pytest.mark.parametrize("longest", [3, 200])
@pytest.mark.parametrize(("maskable_part", "starts_part"), [(0.05, 1), (0.5, 0.3), (1, 0.8)])
def test_samples_together_have_the_masks_of_each_alone(
    longest: int, maskable_part: float, starts_part: float
) -> None:
    """Only of tokens that may be masked, whole words, and of each sample at least one."""
    draw, generator = Draw(3, 2, 0.15), np.random.default_rng(longest)
    lengths = generator.integers(1, longest, 40)
    maskable, starts = (
        generator.random(lengths.sum()) < part for part in (maskable_part, starts_part)
    )
    ends = lengths.cumsum()
    starts[ends - lengths] = True
    rows = generator.permutation(1000)[:40]
    masks = draw_masks(draw, rows, lengths, maskable, starts)
    assert not (masks & ~maskable).any()
    for row, begin, end in zip(rows.tolist(), ends - lengths, ends, strict=True):
        part = slice(begin, end)
        alone = drawn(draw, row, maskable[part], starts[part])
        assert alone == masks[part].tolist()
        assert any(alone) == maskable[part].any()
        words = starts[part].cumsum()
        masked_words = np.isin(words, words[alone])
        assert (masked_words & maskable[part]).tolist() == alone


def test_masks_depend_on_seed_epoch_and_row() -> None:
    keys = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2**31 - 1, 1, 1))
    maskable = np.ones(40, bool)
    masks = {tuple(drawn(Draw(seed, epoch, 0.25), row, maskable)) for seed, epoch, row in keys}
    assert len(masks) == 5


def random_split(lengths: list[int]) -> MaskedSplit:
    generator = np.random.default_rng(4)
    ids = [np.concatenate([[2], generator.integers(5, 127, length), [3]]) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum([*map(len, ids)])])
    flat, rows = np.concatenate(ids).astype(np.int32), np.arange(len(lengths)) * 3 + 7
    return MaskedSplit("train", Path(), flat, offsets, np.array(lengths), rows)


def collator_of(split: MaskedSplit, tokenizer: Any) -> MaskingCollator:
    return MaskingCollator(split, tokenizer, torch.device("cpu"), seed=5, probability=0.4)


def test_a_batch_holds_the_original_tokens(tokenizer: Any) -> None:
    split = random_split([9, 0, 30, 17])
    collate = collator_of(split, tokenizer).at(epoch=1)
    batch = collate(np.arange(4))
    ids, positions = (batch.inputs[name] for name in ("input_ids", "target_positions"))
    counts = (batch.labels != -100).sum(1)
    assert counts.tolist() == collate.loss_denominators(np.arange(4)).tolist()
    assert (counts > 0).tolist() == [True, False, True, True]
    for row, truth in enumerate(batch.labels):
        original = torch.from_numpy(split.tokens(row).astype(np.int64))
        there = positions[row][truth != -100]
        assert torch.equal(original[there], truth[truth != -100])
        changed = (original != ids[row, : len(original)]).nonzero().flatten()
        assert {*changed.tolist()} <= {*there.tolist()}  # nothing else is replaced
    alone = collate(np.array([2]))  # equal masks in any batch
    assert torch.equal(alone.inputs["input_ids"][0], ids[2, :32])


def test_eighty_ten_ten(tokenizer: Any) -> None:
    batch = collator_of(random_split([60] * 400), tokenizer).at(0)(np.arange(400))
    real = batch.labels != -100
    truth = batch.labels[real]
    ids = batch.inputs["input_ids"].gather(1, batch.inputs["target_positions"])[real]
    assert len(truth) == pytest.approx(0.4 * 400 * 60, rel=0.03)
    is_mask = ids == tokenizer.mask_token_id
    assert is_mask.float().mean() == pytest.approx(0.8, abs=0.01)
    assert (ids == truth).float().mean() == pytest.approx(0.1 + 0.1 / 122, abs=0.01)
    others = ids[(ids != truth) & ~is_mask]
    assert module.ordinary_tokens(tokenizer)[others].all()
    assert len(others.unique()) > 100


def test_texts_become_words(prepared: Any, tokenizer: Any) -> None:
    texts = ("good film", "the [MASK] 很好", "z 很好", "é", "x" * 90, "fine " * 150, "fine " * 9000)
    rows = [{"text": text} for text in texts]
    more = {"validation_file": rows[:2], "mlm_probability": "0.15"}
    data = prepared(rows, PretrainSettings, whole_word_mask=True, **more)
    collate = collator_of(data.train, tokenizer)  # with the masks of evaluations
    assert collate.loss_denominators(np.arange(len(rows)))[4] == 90  # one word
    ends = data.train.offsets
    words = [data.train.words[ends[row] : ends[row + 1]][1:-1].sum() for row in (0, 4)]
    assert words == [2, 1]
    assert prepared(rows, PretrainSettings, **more).train.words is None


def test_a_tokenizer_without_a_mask_token(prepared: Any, tokenizer: Any) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.mask_token = None
    refusal(prepared, [{"text": "good"}] * 9, PretrainSettings, tokenizer=plain, match="mask token")
