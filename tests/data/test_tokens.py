"""toolkit/data/tokens.py: texts -> one flat array per split, mapped from disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers.normalizers import NFC
from transformers import AutoTokenizer

from tests.architectures import make_tokenizer
from tests.faults import refusal
from toolkit.config import PretrainedSettings
from toolkit.data import encode, token_files
from toolkit.data import tokenizer as tokenizers

TEXTS = ["good film", "", "很好 的 书店", "the " * 50, "a"]


def config(kind: str = "bert", positions: int | None = 512, pad: int | None = 0) -> SimpleNamespace:
    return SimpleNamespace(model_type=kind, max_position_embeddings=positions, pad_token_id=pad)


def test_a_split_comes_back_as_it_was_saved(tokenizer: Any, tmp_path: Path) -> None:
    before = tokenizer.backend_tokenizer.to_str()
    labels, rows = np.array([0, 1, 0, 1, 0]), np.array([0, 2, 3, 4, 9])
    lines = ["a\nb", "", "很好", '"', "\u2028"]
    (folder := tmp_path / "train").mkdir()
    blocks = encode.encode_blocks(tokenizer, [[TEXTS[:2]], [TEXTS[2:]]], 20, 5)
    counts = token_files.save_tokens(folder, blocks, unknown=1)
    # saved with the model, whether or not this made the tokens
    assert tokenizer.backend_tokenizer.to_str() == before
    np.save(folder / "labels.npy", labels)
    np.save(folder / "rows.npy", rows)
    list(token_files.save_texts(folder / "texts.jsonl", [[lines[:2]], [lines[2:]]]))
    split = token_files.load_split(tmp_path, "train")
    theirs = tokenizer(TEXTS, truncation=True, max_length=20)["input_ids"]
    assert [split.tokens(place).tolist() for place in range(5)] == theirs
    ids = split.input_ids
    totals = (counts.truncated, counts.unknown, counts.tokens)
    assert totals == (1, int((ids == 1).sum()), len(ids))
    assert np.concatenate(counts.has_unknown).tolist() == [1 in tokens for tokens in theirs]
    assert (ids.dtype, split.offsets.dtype) == (np.int32, np.int64)
    assert isinstance(ids, np.memmap)
    assert split.lengths.tolist() == list(map(len, theirs))
    assert (split.labels.tolist(), split.rows.tolist()) == (labels.tolist(), rows.tolist())
    assert split.texts() == lines
    list(token_files.save_texts(folder / "texts.jsonl", [[["a\nb"], ["c\nd"]]]))
    assert split.texts() == ["a b\nc\nd"]  # the first line is the pair's first text


def test_only_the_beginning_of_a_very_long_text_is_tokenized(tokenizer: Any) -> None:
    """Whole where its words might be others than those of the beginning: one endless word, and blanks."""
    long = "good film, 很好[SEP] " * 40
    texts = [long, "word " + "x" * 900, " " * 900 + TEXTS[3], "good film " * 50]
    theirs = tokenizer(texts, truncation=True, max_length=9)["input_ids"]
    ours = encode.encode_texts(tokenizer, [texts], 9)
    assert [part.tolist() for part in np.split(ours["input_ids"], ours["offsets"][1:-1])] == theirs
    lengths = [len(text) for text in encode.cut_long_texts(tokenizer, texts, 9)]
    assert lengths == [144, *map(len, texts[1:])]


def test_padding_does_not_shift_the_positions_of_a_bert(tiny_model: Path, tmp_path: Path) -> None:
    """A model without a CLS token may need it on the left."""
    bert = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    for made, side in ((bert, "right"), (make_tokenizer("causal", TEXTS), "left")):
        made.save_pretrained(tmp_path / side)
        settings = PretrainedSettings(model_name_or_path=str(tmp_path / side))
        assert tokenizers.load_tokenizer(settings).padding_side == side


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens(["hello"]),
        lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", NFC()),
    ],
)
def test_the_fingerprint_is_that_of_the_tokens(tiny_model: Path, change: Any) -> None:
    before, after = (AutoTokenizer.from_pretrained(tiny_model) for _ in range(2))
    fresh = tokenizers.fingerprint(before)
    before(TEXTS, truncation=True, max_length=7, padding=True)
    change(after)
    texts = ["hello GOOD film and very bad book"]  # 14 tokens, cut at 9
    ids = [encode.encode_texts(each, [texts], 9)["input_ids"].tolist() for each in (before, after)]
    assert ids[0] != ids[1]
    assert fresh == tokenizers.fingerprint(before) != tokenizers.fingerprint(after)


def test_choose_max_length() -> None:
    for wanted, limit, model, chosen in (
        (None, 131, config(), 131),
        (None, 10**30, config(), 512),  # a tokenizer without a limit
        (None, 10**30, config(positions=None), 512),
        (None, 10**30, config("xlm-roberta", 514, 1), 512),
        (None, 10**30, config("camembert", 514, 1), 512),
        (None, 512, config("big_bird", 4096), 512),
        (512, 131, config(), 512),  # the tokenizer's own limit may be too low
        (5000, 10**30, config(positions=-1), 5000),  # relative positions
    ):
        tokenizer = SimpleNamespace(model_max_length=limit, init_kwargs={})
        tokenizer.num_special_tokens_to_add = lambda pair: 2
        assert tokenizers.choose_max_length(wanted, tokenizer, model) == chosen
        if model.max_position_embeddings in (512, 514):
            says = ["--max_length 513: the model has 512"]
            refusal(tokenizers.choose_max_length, 513, tokenizer, model, says=says)
