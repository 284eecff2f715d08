"""toolkit/features/titles/data.py: columns, rows and tokens of titles."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.faults import refusal
from toolkit.data.prepare import Data
from toolkit.features.titles.data import Titles
from toolkit.features.titles.settings import TitleSettings

Row = dict[str, Any]
Prepare = Callable[..., Data]


def news(count: int) -> list[Row]:
    """Row i has another text and a title of i + 1 words."""
    titles = ["film" + " good" * row for row in range(count)]
    return [{"text": f"the story {row} is good", "title": each} for row, each in enumerate(titles)]


@pytest.fixture
def prepared(prepared: Callable[..., Any]) -> Callable[..., Data]:
    return partial(prepared, kind=TitleSettings)


@pytest.mark.parametrize(
    ("columns", "settings", "expected"),
    [
        ("text title", {}, ("text", "title")),
        ("article highlights", {}, ("article", "highlights")),
        ("正文 标题", {}, ("正文", "标题")),
        ("text Headline", {}, ("text", "Headline")),
        ("headline title text", {}, ("text", "title")),  # `title` before `headline`
        ("text title lead", {"title_column": "lead"}, ("text", "lead")),
        ("lead text title", {"text_column": "lead,text"}, ("lead,text", "title")),
        ("title,text title", {"text_column": "title,text"}, ("title,text", "title")),
        (
            "text lead body",
            {},
            "which column is the title? name one of lead, body with --title_column",
        ),
        ("text", {}, "which column is the title? there is no other than the text"),
        ("text title", {"title_column": "titel"}, "no column 'titel' (did you mean title?"),
        ("text a b", {"title_column": "a,b"}, "--title_column a,b: name one"),
        ("text title", {"title_column": "text"}, "column text is to be read and predicted"),
    ],
)
def test_the_column_of_titles(
    prepared: Prepare, columns: str, settings: dict[str, Any], expected: Any
) -> None:
    rows = [dict.fromkeys(columns.split(), f"film {number}") for number in range(4)]
    if isinstance(expected, str):
        refusal(prepared, rows, **settings, says=[expected])
    else:
        data = prepared(rows, **settings)
        assert (data.text_column, data.targets) == (expected[0], Titles(expected[1], 32))


def test_rows_and_files_without_a_title_are_named(prepared: Prepare) -> None:
    """A test split without any is left out with a note."""
    titles = ("film", "", "film", " \n\t", None)
    rows = [row | {"title": title} for row, title in zip(news(5), titles, strict=True)]
    says = ["validation_file.jsonl", "empty in 3 of 5 rows (rows 2, 4, 5)", "--drop_empty_text"]
    refusal(prepared, news(3), validation_file=rows, says=says)
    others = [{"text": "a", "headline": "b"}]
    says = ["validation_file.jsonl has no column 'title': it has text, headline"]
    refusal(prepared, news(4), validation_file=others, says=says)
    bare = [row | {"title": " "} for row in news(3)]
    says = ["train_file.jsonl", "every title in column 'title' is empty", "--title_column"]
    refusal(prepared, bare, validation_file=news(3), drop_empty_text=True, says=says)
    data = prepared(news(4), validation_file=news(2), test_file=bare)
    assert data.test is None
    assert [note for note in data.notes if note.startswith("test ") and "left out" in note]
    says = ["test_file.jsonl: the title in column 'title' is empty in 2 of 3 rows (rows 1, 2)"]
    some = [*bare[:2], news(3)[2]]
    refusal(prepared, news(4), validation_file=news(2), test_file=some, says=says)


def test_rows_without_a_title_are_left_out_when_asked(prepared: Prepare) -> None:
    rows = news(6)
    rows[2] = {"text": " ", "title": None}
    rows[4]["title"] = "\n"
    data = prepared(rows, validation_file=rows, drop_empty_text=True)
    for split in (data.train, data.validation):
        assert split.rows.tolist() == [0, 1, 3, 5]
        assert split.loss_denominators().tolist() == [2, 3, 5, 7]
    assert data.validation.titles() == [rows[place]["title"] for place in (0, 1, 3, 5)]
    assert data.validation.texts() == [rows[place]["text"] for place in (0, 1, 3, 5)]


@pytest.mark.parametrize("max_length", [2, 5, 32])
def test_tokens_of_titles(prepared: Prepare, tokenizer: Any, max_length: int) -> None:
    """`max_length` tokens are predicted, [SEP] included; [CLS] is not."""
    rows = news(6)
    data = prepared(rows, validation_file=rows[:3], max_target_length=max_length)
    for split, expected in ((data.train, rows), (data.validation, rows[:3])):
        for index, row in enumerate(expected):
            first, *words, last = tokenizer(row["title"])["input_ids"]
            span = slice(*split.target_offsets[index : index + 2])
            title = [first, *words[: max_length - 1], last]
            assert split.target_ids[span].tolist() == title
            assert split.loss_denominators()[index] == len(title) - 1 <= max_length
            assert split.tokens(index).tolist() == tokenizer(row["text"])["input_ids"]
    assert data.targets == Titles("title", max_length)


@pytest.mark.parametrize("settings", [{"title_column": "lead"}, {"max_target_length": 3}])
def test_settings_of_titles_change_the_cached_folder(prepared: Prepare, settings: Row) -> None:
    rows = [row | {"lead": "the room"} for row in news(4)]
    plain = prepared(rows, validation_file=rows)
    changed = prepared(rows, validation_file=rows, **settings)
    assert changed.folder != plain.folder
    assert settings.items() <= changed.facts.items()
