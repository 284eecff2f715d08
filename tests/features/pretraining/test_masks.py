"""Masks: whole words of real sentences, numbers that follow from the length, draws by seed, epoch and row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import BertTokenizerFast

from tests.architectures import make_tokenizer
from tests.faults import refusal
from toolkit.features.pretraining import data as module
from toolkit.features.pretraining.data import (
    Draw,
    MaskedSplit,
    MaskingCollator,
    draw_masks,
    ordinary_tokens,
)
from toolkit.features.pretraining.settings import PretrainSettings
from toolkit.features.pretraining.words import word_starts, words_of

# Words separated by hand with bars: English and Chinese reviews, a headline, mixed text.
ENGLISH = [
    "This| |café| |doesn|'|t| |serve| |espresso| |for| |$|3|.|50|,| |sadly|.",
    "state|-|of|-|the|-|art| |visuals|,| |extras| |and| |a| |naïve| |script|!",
]
CHINESE = [
    "酒店|的|服务态度|非常|好|,|房间|也|很|干净|,|下次|还|会|再|来|。",
    "京东|快递|小哥|态度|很|好",
]
MIXED = [
    "😀| |我|用|iPhone15|拍照|,|很|清楚|。",
    "买|了|一件|T恤|,|花|了|10|,|000|元|!",
    "南京市|长江大桥| |is| |1|,|577| |m| |long|.",
]


@pytest.mark.parametrize("marked", [*ENGLISH, *CHINESE, *MIXED, "می\u200cخواهم| |بروم"])
def test_words_are_those_separated_by_hand(marked: str) -> None:
    text = marked.replace("|", "")
    expected = [part for part in marked.split("|") if part.strip()]
    assert [text[start:end] for start, end in words_of(text)] == expected


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trained on the sentences; most words are several tokens."""
    texts = [marked.replace("|", "") for marked in (*ENGLISH, *CHINESE, *MIXED)]
    return {kind: make_tokenizer(kind, texts) for kind in ("wordpiece", "bpe", "unigram")}


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@pytest.mark.parametrize("marked", [*ENGLISH, *CHINESE, *MIXED])
def test_words_of_tokens(kind: str, marked: str, tokenizers: dict[str, Any]) -> None:
    """Each start is that of a word; a word has none where it shares a token with the one before it."""
    text = marked.replace("|", "")
    encoded = tokenizers[kind](text, return_offsets_mapping=True, add_special_tokens=False)
    offsets = encoded["offset_mapping"]
    starts = word_starts(text, offsets)
    assert len(starts) == len(encoded["input_ids"])
    found = []
    for (start, end), is_start in zip(offsets, starts, strict=True):
        if is_start:
            found.append(end - len(text[start:end].lstrip()))
    words = [start for start, _ in words_of(text)]
    assert found == words if kind == "wordpiece" else {*found} <= {*words}
    assert sum(starts) < len(starts) or kind != "bpe"


def drawn(
    seed: int, epoch: int, probability: float, row: int, maskable: Any, starts: Any = None
) -> np.ndarray:
    draw = Draw(seed, epoch, probability)
    return draw_masks(draw, np.array([row]), np.array([len(maskable)]), maskable, starts)


@pytest.mark.parametrize("longest", [3, 200])
def test_samples_together_have_the_masks_of_each_alone(longest: int) -> None:
    """Only of tokens that may be masked, whole words, and of each sample at least one."""
    generator = np.random.default_rng(longest)
    for maskable_part, starts_part in ((0.05, None), (1, None), (0.5, 0.3), (1, 0.8)):
        lengths = generator.integers(1, longest, 40)
        maskable = generator.random(lengths.sum()) < maskable_part
        starts = None
        if starts_part is not None:
            starts = generator.random(lengths.sum()) < starts_part
            starts[lengths.cumsum() - lengths] = True
        rows = generator.permutation(1000)[:40]
        masks = draw_masks(Draw(3, 2, 0.15), rows, lengths, maskable, starts)
        assert not (masks & ~maskable).any()
        ends = lengths.cumsum()
        for row, begin, end in zip(rows.tolist(), ends - lengths, ends, strict=True):
            part = slice(begin, end)
            of_words = None if starts is None else starts[part]
            alone = drawn(3, 2, 0.15, row, maskable[part], of_words)
            assert alone.tolist() == masks[part].tolist()
            assert alone.any() == maskable[part].any()
            words = np.arange(end - begin) if of_words is None else of_words.cumsum()
            masked_words = np.isin(words, words[alone])
            assert (masked_words & maskable[part]).tolist() == alone.tolist()


def test_masks_depend_on_seed_epoch_and_row_and_are_uniform() -> None:
    maskable = np.ones(40, bool)
    maskable[[0, 39]] = False
    keys = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2**31 - 1, 1, 1))
    masks = [drawn(seed, epoch, 0.25, row, maskable).tolist() for seed, epoch, row in keys]
    assert len(set(map(tuple, masks))) == 5
    assert drawn(1, 1, 0.25, 1, maskable).tolist() == masks[0]
    frequency = np.mean([drawn(7, 1, 0.25, row, maskable) for row in range(4000)], axis=0)
    assert frequency[[0, 39]].tolist() == [0, 0]
    assert frequency[1:39] == pytest.approx(0.25, abs=0.04)


def split_of(lengths: list[int], words: bool = False) -> MaskedSplit:
    generator = np.random.default_rng(4)
    ids = [np.concatenate([[2], generator.integers(5, 127, length), [3]]) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum([*map(len, ids)])])
    starts = None
    if words:
        starts = generator.random(offsets[-1]) < 0.5
        starts[offsets[:-1]] = True
    return MaskedSplit("train", Path(), np.concatenate(ids).astype(np.int32), offsets, np.array(lengths),
                       np.arange(len(lengths)) * 3 + 7, words=starts)  # fmt: skip


def collator_of(split: MaskedSplit, tokenizer: Any) -> MaskingCollator:
    return MaskingCollator(split, tokenizer, torch.device("cpu"), seed=5, probability=0.4)


@pytest.mark.parametrize("words", [False, True])
def test_a_batch_holds_the_original_tokens(words: bool, tokenizer: Any) -> None:
    split = split_of([9, 0, 30, 17], words)
    collate = collator_of(split, tokenizer).at(epoch=1)
    batch = collate(np.arange(4))
    ids, positions = (batch.inputs[name] for name in ("input_ids", "target_positions"))
    truth = batch.labels
    counts = (truth != -100).sum(1).tolist()
    assert counts == collate.loss_denominators(np.arange(4)).tolist()
    assert counts[1] == 0
    assert min(counts[0], counts[2], counts[3]) > 0
    for row in range(4):
        original = torch.from_numpy(split.tokens(row).astype(np.int64))
        there = positions[row][truth[row] != -100]
        assert torch.equal(original[there], truth[row][truth[row] != -100])
        changed = (original != ids[row, : len(original)]).nonzero().flatten()
        assert {*changed.tolist()} <= {*there.tolist()}  # nothing else is replaced
    alone = collate(np.array([2]))  # equal masks in any batch
    assert torch.equal(alone.inputs["input_ids"][0], ids[2, :32])


def test_eighty_ten_ten(tokenizer: Any) -> None:
    batch = collator_of(split_of([60] * 400), tokenizer).at(0)(np.arange(400))
    real = batch.labels != -100
    truth = batch.labels[real]
    ids = batch.inputs["input_ids"].gather(1, batch.inputs["target_positions"])[real]
    assert len(truth) == pytest.approx(0.4 * 400 * 60, rel=0.03)
    is_mask = ids == tokenizer.mask_token_id
    assert is_mask.float().mean() == pytest.approx(0.8, abs=0.01)
    assert (ids == truth).float().mean() == pytest.approx(0.1 + 0.1 / 122, abs=0.01)
    others = ids[(ids != truth) & ~is_mask]
    assert ordinary_tokens(tokenizer)[others].all()
    assert len(others.unique()) > 100


def test_the_fixed_masks_of_an_evaluation(tokenizer: Any) -> None:
    split = split_of([4000])
    collate = collator_of(split, tokenizer)
    assert collate.draw == module.EVALUATION_DRAW
    labels = collate(np.arange(1)).labels
    assert (labels != -100).sum() == pytest.approx(600, rel=0.1)
    assert torch.equal(labels, collator_of(split, tokenizer)(np.arange(1)).labels)


def test_texts_become_words(
    prepared: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = Mock(side_effect=word_starts)
    monkeypatch.setattr(module, "word_starts", segment)
    texts = ("good film", "the [MASK] 很好", "z 很好", "é", "x" * 90, "fine " * 150, "fine " * 9000)
    rows = [{"text": text} for text in texts]
    more = {"validation_file": rows[:2], "mlm_probability": "0.15"}
    data = prepared(rows, PretrainSettings, whole_word_mask=True, **more)
    collate = collator_of(data.train, tokenizer)  # with the masks of evaluations
    assert collate.loss_denominators(np.arange(len(rows)))[4] == 90  # one word
    assert max(len(call.args[0]) for call in segment.mock_calls) == 16 * 131  # characters
    assert data.train.words is not None
    ends = data.train.offsets
    words = [data.train.words[ends[row] : ends[row + 1]][1:-1].sum() for row in (0, 4)]
    assert words == [2, 1]
    assert prepared(rows, PretrainSettings, **more).train.words is None


def test_a_tokenizer_without_a_mask_token(prepared: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\n")
    plain = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
    plain.mask_token = None
    refusal(prepared, [{"text": "good"}] * 9, PretrainSettings, tokenizer=plain, match="mask token")
