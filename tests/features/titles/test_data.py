"""toolkit/features/titles/data.py: the titles of texts, from their column to the tokens that are learned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import refusal
from toolkit.config import TextSettings, build
from toolkit.data.prepare import Prepared
from toolkit.data.read import read_file
from toolkit.features.titles.data import Titles
from toolkit.features.titles.settings import TitleSettings

Row = dict[str, Any]
Prepare = Callable[..., Prepared]
WriteRows = Callable[..., str]


def news(count: int, first: int = 1) -> list[Row]:
    """Row i has a text of its own and a title of `first` + i words."""
    return [
        {"text": f"the story {place} is very good", "title": " ".join(["film", *["good"] * (place + first - 1)])}
        for place in range(count)
    ]


@pytest.fixture
def prepared(prepared: Callable[..., Any]) -> Callable[..., Prepared]:
    return partial(prepared, kind=TitleSettings)


def titled(column: str | None) -> TitleSettings:
    return build(TitleSettings, {"title_column": column, "max_target_length": 9})


@pytest.mark.parametrize(
    ("columns", "wanted", "text", "found"),
    [
        (["text", "title"], None, "text", "title"),
        (["title", "text"], None, "text", "title"),
        (["article", "highlights"], None, "article", "highlights"),
        (["document", "summary"], None, "document", "summary"),
        (["正文", "标题"], None, "正文", "标题"),
        (["text", "Headline"], None, "text", "Headline"),
        (["headline", "summary", "title", "text"], None, "text", "title"),  # a title before a summary of it
        (["text", "title", "lead"], "lead", "text", "lead"),
        (["lead", "text", "title"], None, "lead,text", "title"),
        (["title", "text", "lead"], "lead", "title,text", "lead"),
        (["title,text", "title"], None, "title,text", "title"),  # that is the name of one column
    ],
)
def test_the_column_of_titles(
    write_rows: WriteRows, columns: list[str], wanted: str | None, text: str, found: str
) -> None:
    table = read_file(write_rows("a.jsonl", [dict.fromkeys(columns, "t")]), TextSettings())
    assert Titles.find(titled(wanted), table, text) == Titles(found, 9)


@pytest.mark.parametrize(
    ("columns", "wanted", "text", "parts"),
    [
        (["text", "lead", "body"], None, "text", ["which column is the title", "lead, body", "--title_column"]),
        (["text", "lead", "body"], None, "text,lead", ["Name one of body with --title_column"]),
        (["text"], None, "text", ["which column is the title", "no other than the text"]),
        (["text", "title"], "titel", "text", ["no column 'titel'", "did you mean title?", "--title_column"]),
        (["text", "title"], "text", "text", ["'text' cannot be both text and title", "--title_column"]),
        (["text", "title"], None, "title", ["'title' cannot be both text and title", "--text_column"]),
        (["text", "title", "lead"], None, "title,text", ["'title' cannot be both text and title", "--title_column"]),
        (["text", "title", "lead"], "text", "lead,text", ["'text' cannot be both text and title"]),
    ],
)
def test_a_column_of_titles_that_cannot_be_told(
    write_rows: WriteRows, columns: list[str], wanted: str | None, text: str, parts: list[str]
) -> None:
    table = read_file(write_rows("a.jsonl", [dict.fromkeys(columns, "t")]), TextSettings())
    refusal(Titles.find, titled(wanted), table, text, says=["a.jsonl", *parts])


@pytest.mark.parametrize("empty", ["", " \n\t", None])
def test_rows_without_a_title_are_named(prepared: Prepare, empty: str | None) -> None:
    rows = news(6)
    rows[1]["title"] = rows[4]["title"] = empty
    said = "the title in column 'title' is empty in 2 of 6 rows (rows 2, 5)"
    refusal(prepared, news(3), validation_file=rows, says=["validation_file.jsonl", said, "--drop_empty_text"])


def test_rows_without_a_title_are_left_out_when_asked(prepared: Prepare) -> None:
    rows = news(6)
    rows[2] = {"text": " ", "title": None}  # nothing at all
    rows[4]["title"] = "\n"
    data = prepared(rows, validation_file=rows, drop_empty_text=True)
    for split in (data.train, data.validation):
        assert split.rows.tolist() == [0, 1, 3, 5]
        assert split.loss_denominators().tolist() == [2, 3, 5, 7]
    assert data.validation.titles() == [rows[place]["title"] for place in (0, 1, 3, 5)]
    assert data.validation.texts() == [rows[place]["text"] for place in (0, 1, 3, 5)]
    assert [note for note in data.notes if "train_file.jsonl: 2 rows with an empty text or title are left out" in note]


@pytest.mark.parametrize("empty", ["train", "validation"])
def test_a_column_of_empty_titles(prepared: Prepare, empty: str) -> None:
    files = {"train": news(3), "validation": news(3)} | {empty: [row | {"title": " "} for row in news(3)]}
    says = (f"{empty}_file.jsonl", "every title in column 'title' is empty", "--title_column")
    refusal(prepared, files["train"], validation_file=files["validation"], drop_empty_text=True, says=says)


@pytest.mark.parametrize("most", [2, 4, 5, 32])
def test_titles_are_tokens_from_the_first_to_the_end(prepared: Prepare, tokenizer: Any, most: int) -> None:
    """`most` tokens are predicted, [SEP] among them; [CLS] is given."""
    rows = news(6)
    data = prepared(rows, validation_file=rows[:3], test_file=rows[3:], max_target_length=most)
    for split, own in ((data.train, rows), (data.validation, rows[:3]), (data.test, rows[3:])):
        whole = [tokenizer(row["title"])["input_ids"] for row in own]
        for place, tokens in enumerate(whole):
            target = split.target(place).tolist()
            assert target[0] == tokenizer.cls_token_id
            assert target[-1] == tokenizer.sep_token_id
            assert target[1:-1] == tokens[1:-1][: most - 1]
            assert split.tokens(place).tolist() == tokenizer(own[place]["text"])["input_ids"]
        assert split.loss_denominators().tolist() == [min(len(tokens) - 1, most) for tokens in whole]
        assert split.loss_denominators().max() <= most
        assert split.rows.tolist() == list(range(len(own)))
    assert data.targets == Titles("title", most)


def test_a_test_split_without_titles_is_left_out_and_said(prepared: Prepare) -> None:
    bare = [row | {"title": place % 2 * " " or None} for place, row in enumerate(news(3))]
    data = prepared(news(4), validation_file=news(2), test_file=bare)
    assert data.test is None
    assert [note for note in data.notes if "test_file.jsonl" in note and "left out" in note]
    some = [*bare[:2], news(3)[2]]
    said = "test_file.jsonl: the title in column 'title' is empty in 2 of 3 rows (rows 1, 2)"
    refusal(prepared, news(4), validation_file=news(2), test_file=some, says=[said])


def test_a_file_without_the_column_of_titles(prepared: Prepare) -> None:
    said = "validation_file.jsonl has no column 'title': it has text, headline"
    refusal(prepared, news(4), validation_file=[{"text": "a", "headline": "b"}], says=[said])


@pytest.mark.parametrize("given", [{"title_column": "lead"}, {"max_target_length": 3}, {"text_column": "text,lead"}])
def test_what_changes_the_titles_changes_the_folder(prepared: Prepare, given: dict[str, Any]) -> None:
    rows = [row | {"lead": "the room"} for row in news(4)]
    plain = prepared(rows, validation_file=rows)
    changed = prepared(rows, validation_file=rows, **given)
    assert changed.folder != plain.folder
    assert changed.facts["title_column"] == given.get("title_column", "title")
    assert changed.facts["max_target_length"] == given.get("max_target_length", 32)


@pytest.mark.parametrize("missing", ["cls_token_id", "sep_token_id"])
def test_a_tokenizer_that_neither_begins_nor_ends_a_title(prepared: Prepare, missing: str) -> None:
    bare = SimpleNamespace(**{"cls_token_id": 2, "sep_token_id": 3, missing: None})
    refusal(prepared, news(4), tokenizer=bare, model_name_or_path="m", match="no cls_token or sep_token")
