"""toolkit/features/titles: columns, rows and tokens of titles; ROUGE against rouge-chinese, and by hand."""

import os
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.faults import refusal
from tests.inputs import CHINESE
from toolkit.data.prepare import Data
from toolkit.features.titles import rouge
from toolkit.features.titles.data import Titles
from toolkit.features.titles.evaluation import title_metrics
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


def test_the_column_of_titles(prepared: Prepare) -> None:
    for columns, settings, expected in (
        ("text title", {}, ("text", "title")),
        ("正文 标题", {}, ("正文", "标题")),
        ("headline title text", {}, ("text", "title")),  # `title` before `headline`
        ("text title lead", {"title_column": "lead"}, ("text", "lead")),
        ("lead text title", {"text_column": "lead,text"}, ("lead,text", "title")),
        ("title,text title", {"text_column": "title,text"}, ("title,text", "title")),
        ("text lead body", {}, "the title? name one of lead, body with --title_column"),
        ("text", {}, "which column is the title? there is no other than the text"),
        ("text a b", {"title_column": "a,b"}, "--title_column a,b: name one"),
        ("text title", {"title_column": "text"}, "column text is to be read and predicted"),
    ):
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
    bare, others = [row | {"title": " "} for row in news(3)], [{"text": "a", "headline": "b"}]
    empty = "empty in 3 of 5 rows (rows 2, 4, 5)"
    for train, files, says in (
        (news(3), {"validation_file": rows}, ["validation_file.jsonl", empty, "--drop_empty_text"]),
        (news(4), {"validation_file": others}, ["no column 'title': it has text, headline"]),
        (news(4), {"validation_file": news(2), "test_file": rows}, ["test_file.jsonl", empty]),
        (bare, {"drop_empty_text": True}, ["every title in column 'title' is empty"]),
    ):
        refusal(prepared, train, **files, says=says)
    data = prepared(news(4), validation_file=news(2), test_file=bare)
    assert data.test is None
    assert [note for note in data.notes if note.startswith("test ") and "left out" in note]


def test_rows_without_a_title_are_left_out_when_asked(prepared: Prepare) -> None:
    rows = news(6)
    rows[2] = {"text": " ", "title": None}
    rows[4]["title"] = "\n"
    data = prepared(rows, validation_file=rows, drop_empty_text=True)
    for split in (data.train, data.validation):
        assert split.rows.tolist() == [0, 1, 3, 5]
        assert split.loss_denominators().tolist() == [2, 3, 5, 7]
    texts = zip(data.validation.texts(), data.validation.titles(), strict=True)
    assert [*texts] == [(rows[place]["text"], rows[place]["title"]) for place in (0, 1, 3, 5)]


def test_tokens_of_titles(prepared: Prepare, tokenizer: Any) -> None:
    """`length` tokens are predicted, with [SEP], without [CLS]. Each setting has its own cache."""
    rows = [row | {"lead": f"{row['title']} room"} for row in news(6)]
    for column, length in (("title", 2), ("title", 5), ("title", 32), ("lead", 32)):
        settings = {"title_column": column, "max_target_length": length}
        split = prepared(rows, validation_file=rows, **settings).train
        for index, row in enumerate(rows):
            first, *words, last = tokenizer(row[column])["input_ids"]
            span = slice(*split.target_offsets[index : index + 2])
            title = [first, *words[: length - 1], last]
            assert split.target_ids[span].tolist() == title
            assert split.loss_denominators()[index] == len(title) - 1 <= length
            assert split.tokens(index).tolist() == tokenizer(row["text"])["input_ids"]


def cut_by_jieba(text: str) -> str:
    """As users of rouge-chinese do, after the same normalisation."""
    import jieba

    jieba.setLogLevel(60)
    jieba.dt.tmp_dir = os.environ["TOOLKIT_TESTS_FOLDER"]  # its cache file, removed at the end
    words = jieba.lcut(unicodedata.normalize("NFKC", text).lower())
    return " ".join(word for word in words if any(letter.isalnum() for letter in word))


def test_chinese_titles_score_as_in_rouge_chinese() -> None:
    """Each title and text for each title: sentences that share words, and others."""
    rouge_chinese = pytest.importorskip("rouge_chinese")
    pairs = [(text, title) for row in CHINESE for text in row for title, _ in CHINESE]
    predictions, references = map(list, zip(*pairs, strict=True))
    ours = rouge.scores(predictions, references, "jieba")
    # counts n-grams as ROUGE is defined: by default it takes sets
    words = [*map(cut_by_jieba, predictions)], [*map(cut_by_jieba, references)]
    theirs = rouge_chinese.Rouge(exclusive=False).get_scores(*words)
    for pair, mine, other in zip(pairs, ours, theirs, strict=True):
        expected = [other[name]["f"] for name in ("rouge-1", "rouge-2", "rouge-l")]
        # it adds 1e-8 to a denominator
        assert list(mine.values()) == pytest.approx(expected, abs=1e-7), pair


def test_counted_by_hand() -> None:
    for prediction, reference, segmenter, expected in (
        # tokens: the cat sat | the cat ran home: 2 of 3 and 4; 1 of 2 and 3 bigrams; LCS the cat
        ("The cat sat.", "the cat ran home", "word", (4 / 7, 2 / 5, 4 / 7)),
        # a word that occurs twice on one side counts once
        ("the the", "the cat", "word", (1 / 2, 0, 1 / 2)),
        # the order matters to LCS only
        ("b a", "a b", "word", (1, 0, 1 / 2)),
        # mate60 and 3.5 are words
        ("Mate60 售 3.5", "mate60 3.5", "char", (4 / 5, 0, 4 / 5)),
        # full-width is the same
        ("２０２４年Ｔ恤！", "2024年t恤", "jieba", (1, 1, 1)),
        # numbers and marks
        ("涨50%，到3.5亿", "涨 50%", "jieba", (4 / 7, 2 / 5, 4 / 7)),
        ("《》——……😀", "a", "char", (0, 0, 0)),
        ("", "a b", "word", (0, 0, 0)),
    ):
        (scores,) = rouge.scores([prediction], [reference], segmenter)
        assert scores == pytest.approx(dict(zip(rouge.KINDS, expected, strict=True)))


def test_auto_goes_by_the_references() -> None:
    for references, segmenter in (
        (["Ink helps drive democracy in Asia", "the character 好 means good"], "word"),
        (["Apple 发布 iPhone 新品", "华为手机"], "jieba"),
        (["새 휴대폰 발표"], "char"),
        (["Новый телефон"], "char"),
        (["Le président élu à Paris hier"], "word"),
        (["", "2024 !"], "word"),
    ):
        assert rouge.resolve("auto", references) == segmenter
        assert title_metrics(references, references)["rouge_segmenter"] == segmenter
    assert rouge.resolve("char", ["a"]) == "char"
