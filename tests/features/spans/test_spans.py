"""recipes/ner.py: losses, windows, tags, metrics, predictions and pages, against others' code and counts by hand.

Equal losses under every strategy: tests/test_sameness.py."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertForTokenClassification,
    pipeline,
)

from tests import inputs
from tests.faults import refusal
from tests.matrix import SPANS, runs
from tests.runs import assert_same_run, lines_of, losses_of
from tests.splits import global_batches
from toolkit import api
from toolkit.data.batches import IGNORED
from toolkit.data.read import read_demo
from toolkit.data.token_files import load_split
from toolkit.features.spans.data import SpanCollator, SpanSplit
from toolkit.features.spans.decoding import best_tags
from toolkit.features.spans.metrics import span_intervals, span_metrics
from toolkit.features.spans.mistakes import mistakes_of, summary
from toolkit.features.spans.spans import Span
from toolkit.features.spans.windows import (
    WindowReader,
    decode_tags,
    encode_tags,
    tag_names,
    window_slices,
)
from toolkit.utils.cache import cache_folder

SEED, STEPS, RATE = 42, 8, 6e-3
LABELS = ["JUDGEMENT", "THING"]


def job(way: str, name: str, *more: Any) -> Path:
    return runs(way).run(f"spans, {name}", "recipes.ner", [*SPANS, *more])


def whole() -> Path:
    """A run whose texts are of one window."""
    return job("single", "whole texts", "--max_length", 131)


@pytest.mark.multiprocess
def test_a_run_goes_on_under_another_way() -> None:
    saved = (
        job("zero3 x2", "stopped", "--max_steps", 3, "--checkpoint_every", 3)
        / "checkpoints/step-00000003"
    )
    resumed = job("single", "resumed", "--per_device_batch_size", 11, "--resume", saved)
    assert_same_run(resumed, runs("single")["spans"], after=3)


def split_of(run: Path, name: str) -> SpanSplit:
    digest = json.loads((run / "config.json").read_text())["data"]["digest"]
    split = load_split(cache_folder() / "tokens" / digest, name, None, SpanSplit)
    assert isinstance(split, SpanSplit)
    return split


def test_a_plain_loop_has_the_same_losses() -> None:
    """Cross entropies of transformers' model: the mean over the words of all windows of a global
    batch, of a word the mean over its tokens."""
    run = job("single", "plain", "--weight_decay", 0, "--max_grad_norm", 0)
    torch.manual_seed(SEED)
    model = BertForTokenClassification.from_pretrained(
        inputs.tiny_model(), num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    split = split_of(run, "train")
    collate = SpanCollator(
        split, AutoTokenizer.from_pretrained(inputs.tiny_model()), torch.device("cpu")
    )
    count = len(split) // 22 + 1
    losses = []
    for number in range(STEPS):
        epoch, place = divmod(number, count)
        batch = collate(global_batches(split.lengths, 22, SEED, epoch)[place])
        logits = model(**batch.inputs).logits
        each = torch.nn.functional.cross_entropy(logits.mT, batch.labels, reduction="none")
        counts = batch.labels != IGNORED
        shares = counts / batch.columns["pieces"]
        loss = (each * shares).sum() / shares.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses_of(run) == pytest.approx(losses, rel=1e-5)


def test_transformers_pipeline_finds_the_same_spans() -> None:
    """In texts of one window, with the same scores; the folder says what it is."""
    folder = whole() / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertForTokenClassification"]
    _, loading = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    texts = [
        json.loads(line)["text"] for line in inputs.spans("validation").read_text().splitlines()
    ]
    tagger = pipeline(
        "token-classification", model=str(folder), aggregation_strategy="simple", device="cpu"
    )
    found = tagger(texts)
    expected = [
        [(each["start"], each["end"], each["entity_group"]) for each in spans] for spans in found
    ]
    scores = [each["score"] for spans in found for each in spans]
    assert len(scores) > 100
    for lines in (
        lines_of(whole() / "predictions.jsonl"),
        api.predict(folder, texts, mixed_precision="no"),
    ):
        predictions = [line["prediction"] for line in lines]
        assert [
            [(each["start"], each["end"], each["label"]) for each in spans] for spans in predictions
        ] == expected
        ours = [each["probability"] for spans in predictions for each in spans]
        assert ours == pytest.approx(scores, abs=1e-5)
        for text, spans in zip(texts, predictions, strict=True):
            assert all(each["text"] == text[each["start"] : each["end"]] for each in spans)


@pytest.mark.parametrize("stride", [0, 1, 4, 7])
def test_each_token_counts_once_where_it_has_most_context(stride: int) -> None:
    room = 8
    for count in range(40):
        windows = list(window_slices(count, room, stride))
        counted = [place for _, part in windows for place in range(part.start, part.stop)]
        assert counted == list(range(count))
        for tokens, part in windows:
            assert tokens.stop - tokens.start <= room
            for place in range(part.start, part.stop):

                def context(window: slice, place: int = place, count: int = count) -> float:
                    if not window.start <= place < window.stop:
                        return -1
                    before = place - window.start if window.start else np.inf
                    after = window.stop - 1 - place if window.stop < count else np.inf
                    return min(before, after)

                best = max(context(window) for window, _ in windows)
                assert context(tokens) >= best - 1  # of an even number shared, one of two middles


def test_windows_are_what_a_tokenizer_gives(tokenizer: Any) -> None:
    """Of a text of one window all tokens, of a longer one those of transformers' overflow."""
    text = "good 書 film, very dull!  bad\tstory xqz fine " * 3
    for max_length, stride in ((120, 5), (16, 5), (11, 2)):
        reader = WindowReader(tokenizer, max_length, stride)
        [tokens] = reader.tokens([text])
        windows = list(reader.windows(tokens, np.zeros_like(tokens.ids)))
        expected = tokenizer(
            text, max_length=max_length, stride=stride, truncation=True, return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )  # fmt: skip
        assert [window.input_ids.tolist() for window in windows] == expected["input_ids"]
        for window, offsets in zip(windows, expected["offset_mapping"], strict=True):
            assert list(zip(window.starts.tolist(), window.ends.tolist(), strict=True)) == offsets
        assert sum((window.tags != IGNORED).sum() for window in windows) == len(tokens.ids)
    refusal(WindowReader, tokenizer, 16, 14, says=["--stride", "14", "--max_length 16"])


def test_an_unknown_character_keeps_its_place_and_spans_come_back(tokenizer: Any) -> None:
    text = "good 龘film  very dull"  # 龘 is [UNK]
    [tokens] = WindowReader(tokenizer, 50, 3).tokens([text])
    spans = [Span(5, 6, "THING"), Span(6, 10, "JUDGEMENT"), Span(12, 21, "THING")]
    tags, lost = encode_tags([*spans, Span(0, 3, "THING")], tokens, LABELS)
    assert lost == 1  # its last character is inside a token
    tags[0] = 0
    assert [tag_names(LABELS)[tag] for tag in tags] == [
        "O",
        "B-THING",
        "B-JUDGEMENT",
        "B-THING",
        "I-THING",
    ]
    texts = np.zeros(len(tags), np.int64)
    found = list(
        decode_tags(tags, texts, tokens.starts, tokens.ends, np.array([1, 0.5, 0.5, 1, 0.2]))
    )
    assert [Span(start, end, LABELS[label]) for _, start, end, label, _ in found] == spans
    assert [probability for *_, probability in found] == pytest.approx([0.5, 0.5, 0.6])


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("good goodfilm xy", [1, 5, 5, 5, 5, 5, 2, 2]),
        ("xy. xy", [3, 3, 3, 2, 2]),
        ("很好xy很", [1, 1, 2, 2, 1]),
    ],
)
def test_each_word_counts_as_much(text: str, pieces: list[int], tokenizer: Any) -> None:
    """A word is between white space; a Chinese character is one."""
    [tokens] = WindowReader(tokenizer, 50, 3).tokens([text])
    assert tokens.pieces.tolist() == pieces


def test_the_best_possible_tags_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    names = tag_names(["A", "B"])
    differ = 0
    for _ in range(60):
        scores = torch.randn(1, 5, 5, generator=generator).log_softmax(-1)
        has_text = torch.rand(1, 5, generator=generator) > 0.2
        places = has_text[0].nonzero()[:, 0].tolist()
        possible = {}
        for tags in itertools.product(range(5), repeat=len(places)):
            words = ["O", *(names[tag] for tag in tags)]
            pairs = itertools.pairwise(words)
            if all(word[0] != "I" or before[1:] == word[1:] for before, word in pairs):
                possible[tags] = sum(
                    float(scores[0, place, tag]) for place, tag in zip(places, tags, strict=True)
                )
        best = max(possible, key=possible.__getitem__)
        assert best_tags(scores, has_text)[0, places].tolist() == list(best)
        differ += list(best) != scores[0, places].argmax(-1).tolist()
    assert differ > 5


GOLD = [[Span(0, 2, "A"), Span(3, 5, "B")], [Span(0, 1, "A")], []]
FOUND = [[Span(0, 2, "A"), Span(3, 6, "B"), Span(8, 9, "A")], [Span(0, 1, "B")], []]


def test_metrics_counted_by_hand() -> None:
    """One of 4 predicted and 3 true spans is right; of A one of 2 and 2, of B none of 2 and 1."""
    numbers = span_metrics(FOUND, GOLD)
    assert numbers["precision"] == pytest.approx(1 / 4)
    assert numbers["recall"] == pytest.approx(1 / 3)
    assert numbers["f1"] == pytest.approx(2 / 7)
    assert numbers["f1_macro"] == pytest.approx((1 / 2 + 0) / 2)
    assert numbers["per_class"]["B"] == {"precision": 0, "recall": 0, "f1": 0, "support": 1}
    interval = span_intervals(FOUND, GOLD)["f1"]
    assert interval["value"] == pytest.approx(2 / 7)
    assert interval["low"] < 2 / 7 < interval["high"]
    assert span_metrics([[]], [[]])["f1"] == 0


def test_metrics_are_seqevals() -> None:
    """On real texts, with a third of the tags changed at random; the spans are those of its tags."""
    seqeval = pytest.importorskip("seqeval.metrics")
    scheme = pytest.importorskip("seqeval.scheme").IOB2
    rows = read_demo("demo:peoples-daily")["train"].rows[:2000]
    labels = ["nr", "ns", "nt"]
    generator = np.random.default_rng(0)
    spans: list[list[list[Span]]] = [[], []]
    tags: list[list[list[str]]] = [[], []]
    for text, entities in zip(rows["text"], rows["entities"], strict=True):
        truth = np.zeros(len(text), np.int64)
        for span in entities:
            truth[span["start"] : span["end"]] = 2 + 2 * labels.index(span["label"])
            truth[span["start"]] -= 1
        noise = generator.integers(0, 7, len(text))
        found = np.where(generator.random(len(text)) < 0.02, noise, truth)
        for place, each in enumerate((found, truth)):
            possible = []
            for tag in each:  # as decoding gives them
                is_inside = tag and tag % 2 == 0
                goes_on = bool(possible) and possible[-1] in (tag - 1, tag)
                possible.append(tag - 1 if is_inside and not goes_on else tag)
            numbers = np.array(possible, np.int64)
            ends = np.arange(1, len(text) + 1)
            decoded = decode_tags(numbers, np.zeros(len(text)), ends - 1, ends, np.ones(len(text)))
            spans[place].append(
                [Span(start, end, labels[label]) for _, start, end, label, _ in decoded]
            )
            tags[place].append([tag_names(labels)[tag] for tag in possible])
    numbers = span_metrics(*spans)
    options = {"mode": "strict", "scheme": scheme, "output_dict": True}
    report = seqeval.classification_report(tags[1], tags[0], **options)
    assert 0.3 < numbers["f1"] < 0.95
    for ours, theirs in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
        assert numbers[ours] == pytest.approx(report["micro avg"][theirs])
        for label in labels:
            assert numbers["per_class"][label][ours] == pytest.approx(report[label][theirs])
    assert numbers["f1_macro"] == pytest.approx(report["macro avg"]["f1-score"])


def test_evaluation_is_that_of_its_predictions() -> None:
    """Each text once, whatever its windows; the weighted scores of the lines are the F1."""
    run = runs("single")["spans"]
    last, lines = lines_of(run / "eval.jsonl")[-1], lines_of(run / "predictions.jsonl")
    assert (last["num_samples"], [line["id"] for line in lines]) == (23, list(range(23)))
    assert len(split_of(run, "validation")) > 50  # windows
    spans = {
        key: [
            [Span(each["start"], each["end"], each["label"]) for each in line[key]]
            for line in lines
        ]
        for key in ("prediction", "label")
    }
    numbers = span_metrics(spans["prediction"], spans["label"])
    assert {name: last[name] for name in numbers} == numbers
    assert last["f1"] > 0.5
    weights = np.array([line["weight"] for line in lines])
    scores = np.array([line["scores"]["f1"] for line in lines])
    assert (weights @ scores) / weights.sum() == pytest.approx(last["f1"])
    rows = [json.loads(line) for line in inputs.spans("validation").read_text().splitlines()]
    texts, truth = [row["text"] for row in rows], [row["entities"] for row in rows]
    evaluated = api.evaluate(run / "model", texts, truth, mixed_precision="no")
    assert {name: last[name] for name in numbers} == evaluated


def test_a_text_of_20_000_characters() -> None:
    """In the order of the file, with its offsets; an empty text has no spans."""
    text = "very good film " * 1400
    answers = api.predict(
        runs("single")["spans"] / "model", ["", text, "film"], mixed_precision="no"
    )
    found = [each["prediction"] for each in answers]
    assert (found[0], len(text)) == ([], 21000)
    assert [each["text"] for each in found[2]] == ["film"]
    things = [each["start"] for each in found[1] if each["label"] == "THING"]
    assert things == list(range(10, 21000, 15))


def test_mistakes_are_told_apart() -> None:
    truth = [Span(0, 2, "A"), Span(3, 5, "A"), Span(6, 9, "A"), Span(10, 12, "B")]
    found = [Span(0, 2, "A"), Span(3, 5, "B"), Span(6, 8, "A"), Span(20, 22, "B")]
    kinds = [mistake.kind for mistake in mistakes_of(truth, found)]
    assert kinds == ["label", "border", "missed", "invented"]
    lines = [
        {
            "id": 7,
            "label": [span._asdict() for span in truth],
            "prediction": [span._asdict() for span in found],
        },
        {"id": 8, "label": [], "prediction": []},
    ]
    content = summary(lines, ["ab cd efg hi" + " " * 100, ""])
    assert content["kinds"] == {"missed": 1, "invented": 1, "label": 1, "border": 1}
    assert content["confusion"] == {("A", "A"): 2, ("A", "B"): 1, ("B", None): 1, (None, "B"): 1}
    [worst] = content["worst"]
    pieces = {piece: kind for piece, kind, _ in worst.pieces}
    assert (pieces["ab"], pieces["cd"], pieces["g"], pieces["hi"]) == (
        "right",
        "label",
        "missed",
        "missed",
    )


def test_the_page_and_the_card(monkeypatch: Any) -> None:
    """Both programs of the card run: how to use the model, and whether it answers as when it was saved."""
    run = runs("single")["spans"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "wrong border" in page
    assert len(re.findall("<mark", page)) > 10
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert [
        part
        for part in ("pipeline_tag: token-classification", "THING", "stride=7")
        if part not in card
    ] == []
    use, test = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(run / "model")
    exec(use, {})
    exec(test, {})
