"""Two texts read as a pair (--text_pair): their tokens and token types are the tokenizer's own."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.conftest import MODEL
from tests.faults import refusal
from toolkit.data.batches import Collator
from toolkit.data.encode import truncate_split
from toolkit.data.jieba_tokenizer import words_first

ROWS = [
    {"question": "good film", "answer": "很好 的 书店", "label": "yes"},
    {"question": "the " * 30, "answer": "a", "label": "no"},
    {"question": "书店", "answer": "the room " * 20, "label": "no"},
    {"question": "the price", "answer": "good", "label": "yes"},
]
QUESTIONS, ANSWERS = ([row[name] for row in ROWS] for name in ("question", "answer"))


Prepare = Callable[..., Any]


def as_roberta(tokenizer: Any) -> Any:
    """It has no token types."""
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


@pytest.fixture
def prepared(prepared: Prepare) -> Callable[..., Any]:
    columns = {"text_column": "question"}
    return lambda rows, **given: prepared(rows, validation_file=rows, **columns, **given)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", [lambda tokenizer: tokenizer, as_roberta, words_first])
def test_tokens_of_pairs(tiny_model: Path, prepared: Prepare, kind: Any, side: str) -> None:
    tokenizer = kind(AutoTokenizer.from_pretrained(tiny_model, padding_side=side))
    data = prepared(ROWS, text_pair="answer", tokenizer=tokenizer, max_length=24)
    split = data.validation
    batch = Collator(split, tokenizer, torch.device("cpu"))(np.arange(4))
    cut = {"truncation": "longest_first", "max_length": 24}
    theirs = tokenizer(QUESTIONS, ANSWERS, padding=True, return_tensors="pt", **cut)
    assert ("token_type_ids" in batch.inputs) == (kind is not as_roberta)
    torch.testing.assert_close(batch.inputs, dict(theirs))
    assert any("50.0 % of the texts are cut at 24 tokens" in note for note in data.notes)
    assert split.texts()[3] == "the price\ngood"
    expected = tokenizer(QUESTIONS[2], ANSWERS[2], truncation=True, max_length=12).input_ids
    assert truncate_split(split, tokenizer, 12, "first_12").tokens(2).tolist() == expected


def test_the_pair_is_in_the_data_and_in_their_digest(prepared: Prepare, tokenizer: Any) -> None:
    data, alone = prepared(ROWS, text_pair="answer"), prepared(ROWS)
    roberta = as_roberta(copy.deepcopy(tokenizer))
    without_types = prepared(ROWS, text_pair="answer", tokenizer=roberta)
    assert len({data.digest, alone.digest, without_types.digest}) == 3
    assert without_types.train.token_types is None
    assert alone.train.token_types is None
    assert data.train.token_types.max() == 1
    assert (data.facts["text_pair"], alone.facts.get("text_pair")) == ("answer", None)
    rows = [{**ROWS[0], "answer": ""}, *ROWS]
    left_out = prepared(rows, text_pair="answer", drop_empty_text=True)
    assert left_out.train.rows.tolist() == [1, 2, 3, 4]


def test_faults_of_pairs(prepared: Prepare) -> None:
    rows = [*ROWS, {**ROWS[0], "answer": " "}]
    for pair, length, match in (
        ("anwser", 24, r"no column 'anwser' \(did you mean answer\?\).*--text_pair"),
        ("question", 24, "--text_pair question is the first text's column too"),
        ("answer", 24, r"'answer' is empty in 1 of 5 rows \(rows 5\)"),
        ("answer", 3, "--max_length 3 leaves no token for the text"),
    ):
        refusal(prepared, rows, text_pair=pair, max_length=length, match=match)


def test_a_model_of_one_type(prepared: Prepare, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(MODEL, "type_vocab_size", 1, raising=False)
    data = prepared(ROWS, text_pair="answer")
    assert data.train.token_types is None
    assert truncate_split(data.validation, tokenizer, 12, "test_first_12").token_types is None
    assert any("one token type" in note for note in data.notes)
