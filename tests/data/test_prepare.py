"""toolkit/data/prepare.py: files -> rows that take part -> one folder of tokens and labels (of the rows themselves:
tests/test_oracle.py)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import MODEL
from tests.faults import refusal
from toolkit.config import TaskSettings, TextSettings, build
from toolkit.data.columns import find_texts
from toolkit.data.prepare import Data
from toolkit.data.read import read_file, read_tables

Row = dict[str, Any]
Prepare = Callable[..., Data]
WriteRows = Callable[..., str]


def rows_of(classes: dict[str, int], prefix: str = "good film") -> list[Row]:
    """So many rows of each class, mixed, each text once."""
    labels = [label for label, count in classes.items() for _ in range(count)]
    places = np.random.default_rng(7).permutation(len(labels)).tolist()
    return [{"text": f"{prefix} {place}", "label": labels[place]} for place in places]


AB = rows_of({"a": 5, "b": 5})


def counts_of(data: Data, split: str) -> dict[str, int]:
    labels = getattr(data, split).labels
    return {name: int((labels == place).sum()) for place, name in enumerate(data.labels.names)}


def test_a_class_of_one_row_is_trained_on(prepared: Prepare) -> None:
    rows = rows_of({"a": 20, "b": 20, "alone": 1, "single": 1})
    for seed in range(3):
        data = prepared(rows, seed=seed, validation_split=0.5)
        assert (counts_of(data, "train")["alone"], counts_of(data, "train")["single"]) == (1, 1)
        assert len(data.validation) == 20
    alone = rows_of(dict.fromkeys("abcd", 1))
    refusal(prepared, alone, match="too few to hold out.*is the label column right")


def test_a_tokenizer_of_another_model_is_an_error(prepared: Prepare) -> None:
    """It has 127 tokens: more than the model has rows for."""
    model = SimpleNamespace(**vars(MODEL), vocab_size=126)
    refusal(prepared, AB, model=model, says=["id 126", "126 rows"])


def test_texts_that_are_also_in_training_and_cut_ones_are_said(prepared: Prepare) -> None:
    rows = [*rows_of({"a": 5, "b": 4}), {"text": "the " * 40, "label": "a"}]
    validation = rows[:3] + rows_of({"a": 2}, "bad")
    data = prepared(rows, validation_file=validation, max_length=20)
    notes = "\n".join(data.notes)
    assert "validation: 3 of 5 texts are also in the training data" in notes
    assert "(rows 1, 2, 3)" in notes
    assert "train: 10.0 % of the texts are cut at 20 tokens" in notes
    assert data.train.lengths.max() == 20


def labelled(*pairs: tuple[str | None, str | None]) -> list[Row]:
    return [{"text": text, "label": label} for text, label in pairs]


EMPTY = labelled(("a", "x"), (" \n", "y"), ("b", "y"), (None, "x"))


def test_empty_texts_are_left_out_when_asked(prepared: Prepare) -> None:
    """They need no label then; rows without a label are left out, too. The error: tests/test_bad_input.py."""
    rows = [*EMPTY, *labelled(("", None), ("c", None))]
    data = prepared(rows, validation_file=EMPTY[1:3], drop_empty_text=True)
    assert (data.train.rows.tolist(), data.validation.rows.tolist()) == ([0, 2], [1])
    assert data.validation.texts() == ["b"]
    assert counts_of(data, "train") == {"x": 1, "y": 1}
    assert any("4 rows with an empty text or label are left out" in note for note in data.notes)
    lists = labelled(("a", '["x"]'), ("b", ""), ("c", '["x", "y"]'))  # an empty cell: no class
    assert len(prepared(lists, validation_file=lists, drop_empty_text=True).train) == 3
    says = ("every text in column 'text'", "--text_column")
    refusal(prepared, [EMPTY[1], EMPTY[3]], drop_empty_text=True, says=says)


def test_text_column(write_rows: WriteRows) -> None:
    cells: Row = {"label": "1.5", "id": "7", "number": 1}
    for columns, wanted, found in (
        (["label", "text"], None, "text"),
        (["label", "评论"], None, "评论"),
        (["number", "utterance"], None, "utterance"),  # the only column of strings
        (["title", "text"], "title", "title"),
        (["id", "text_a", "label"], None, "text_a"),  # where all cells are strings, as in CSV
        (["title", "body"], None, "name one of title, body with --text_column"),
        (["number"], None, "name one of number with --text_column"),
        ([" 标题　", "text"], "标题", " 标题　"),
        (["title", "text"], "title,txt", r"no column 'txt' \(did you mean text.*--text_column"),
    ):
        row = {column: cells.get(column, "t") for column in columns}
        table = read_file(write_rows("a.jsonl", [row]), TextSettings())
        if found in columns:
            assert find_texts(table, wanted, None, ["label"]) == (found,)
        else:
            refusal(find_texts, table, wanted, None, match=found)


def test_the_label_and_the_second_text_are_not_the_text(prepared: Prepare) -> None:
    rows = [{"text_a": row["text"], "text_b": "good", "sentiment": row["label"]} for row in AB]
    assert prepared(rows, text_pair="text_b").text_column == "text_a"
    refusal(prepared, rows, match=r"name one of text_a, text_b with --text_column")
    says = ["column sentiment is to be read and predicted"]
    refusal(prepared, rows, text_column="text_a,sentiment", says=says)
    refusal(prepared, rows, text_column="text_a", text_pair="sentiment", says=says)
    says = ["validation_file.jsonl has no column 'text'"]
    refusal(prepared, AB, validation_file=[{"sentence": "x", "label": "a"}], says=says)


def test_the_second_run_makes_nothing(prepared: Prepare, toolkit_cache: Path) -> None:
    first = prepared(AB)
    times = {path: path.stat().st_mtime_ns for path in first.folder.glob("**/*.npy")}
    second = prepared(AB, train_name="elsewhere.jsonl")
    assert second.folder == first.folder
    assert first.folder.is_relative_to(toolkit_cache)
    assert times == {path: path.stat().st_mtime_ns for path in first.folder.glob("**/*.npy")} != {}
    assert (second.labels, second.notes) == (first.labels, first.notes)


def test_what_changes_the_data_changes_the_folder(prepared: Prepare, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    rows = [row | {"other": "x y"} for row in rows_of({"1": 10, "2": 10})]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["film-noir"])
    changes = {"validation_file": rows[:2], "max_length": 30, "seed": 43, "validation_split": 0.3,
               "text_column": "other", "drop_empty_text": True, "problem_type": "regression",
               "max_train_samples": 9, "max_eval_samples": 1, "tokenizer": tokenizer}  # fmt: skip
    digests = [prepared(rows, **{name: value}).digest for name, value in changes.items()]
    digests.append(prepared(rows, text_column="text,other").digest)
    for how in ({}, {"quoting": "none"}):
        digests.append(prepared(rows, train_name="rows.csv", **how).digest)
    digests.append(prepared([rows[0] | {"text": "another film"}, *rows[1:]]).digest)
    digests.append(prepared(rows).digest)
    assert len(set(digests)) == len(digests)


def test_a_seed_counts_only_where_rows_are_drawn(prepared: Prepare) -> None:
    rows = rows_of({"a": 20, "b": 20})
    for more, count in (({}, 1), ({"max_eval_samples": 5}, 2)):
        runs = [prepared(rows, validation_file=rows, seed=seed, **more) for seed in (1, 2)]
        assert len({data.digest for data in runs}) == count
    plain, other = prepared(rows, seed=7), prepared(rows, seed=8)
    assert plain.digest == prepared(rows, seed=8, data_seed=7).digest
    assert plain.validation.rows.tolist() != other.validation.rows.tolist()


@pytest.mark.parametrize("dev", ["validation", "valid", "dev"])
def test_splits_of_a_data_set(write_rows: WriteRows, tmp_path: Path, dev: str) -> None:
    settings = build(TaskSettings, {"dataset_name": str(tmp_path)}).data
    write_rows("test.jsonl", AB)
    refusal(read_tables, settings, match="has no train split: it has test")
    for split in ("train", dev):
        write_rows(f"{split}.jsonl", rows_of({"a": 1, "b": 2}, split))
    for setting, value in {"quoting": "none", "validation_split": 0.2}.items():
        changed = replace(settings, **{setting: value})
        refusal(read_tables, changed, match=f"--{setting} {value} has no effect")
    tables = read_tables(settings)
    assert list(tables) == ["train", "validation", "test"]
    assert tables["validation"].rows["text"][0].startswith(f"{dev} ")


def test_a_test_split_without_labels_is_left_out_and_said(prepared: Prepare) -> None:
    data = prepared(AB, validation_file=AB, test_file=labelled(("t", None), ("u", None)))
    assert data.test is None
    assert any("no labels" in note for note in data.notes)


def growing(count: int) -> list[Row]:
    """Row i has i + 3 tokens; the classes take turns."""
    texts = [" ".join([str(row % 10), *["good"] * row]) for row in range(count)]
    return [{"text": text, "label": "ab"[row % 2]} for row, text in enumerate(texts)]


TWO = [
    {"title": "A", "text": "b c", "number": 1},
    {"title": None, "text": "b", "number": 2},
    {"title": "", "text": None, "number": 4},
    {"title": " A ", "text": "b\n", "number": 5},
]


def test_several_columns_are_one_text_with_a_separator(write_rows: WriteRows) -> None:
    table = read_file(write_rows("a.jsonl", TWO), TextSettings())
    for wanted, texts in {
        "title,text": ["A\nb c", "b", "", " A \nb\n"],
        "text,title": ["b c\nA", "b", "", "b\n\n A "],  # in the order that was asked for
        "title,number,text": ["A\n1\nb c", "2\nb", "4", " A \n5\nb\n"],
    }.items():
        assert find_texts(table, wanted, None) == (wanted,)
        assert [text for (block,) in table.read([wanted], "\n").texts() for text in block] == texts


def test_the_separator_is_a_token_that_stays(prepared: Prepare, tokenizer: Any) -> None:
    """A row is empty where every column is."""
    rows = [row | {"title": "the room"} for row in AB]
    settings: Row = {"validation_file": rows, "text_column": "title,text"}
    data = prepared(rows, **settings)
    expected = tokenizer(f"the room[SEP]{rows[0]['text']}")["input_ids"]
    assert expected.count(tokenizer.sep_token_id) == 2
    assert data.train.tokens(0).tolist() == expected
    assert "columns title, text are one text, with [SEP] between them" in data.notes
    rows[2]["text"] = ""  # its title is not
    rows[3] |= {"title": " ", "text": None}
    says = ["column 'title,text' is empty in 1 of 10 rows (rows 4)"]
    refusal(prepared, rows, **settings, says=says)


def test_each_split_has_its_own_limit(prepared: Prepare) -> None:
    """A trial evaluates on rows that the whole run holds back."""
    files = {"validation_file": growing(12), "test_file": growing(15)}
    data = prepared(growing(20), max_train_samples=9, max_eval_samples=4, **files)
    assert data.sizes == {"train": 9, "validation": 4, "test": 4}
    for split in (data.train, data.validation, data.test):
        # the tokens are the row's own
        assert split.lengths.tolist() == [row + 3 for row in split.rows]
        assert split.labels.tolist() == [row % 2 for row in split.rows]
    assert data.validation.texts() == [growing(12)[row]["text"] for row in data.validation.rows]
    whole = prepared(growing(40), validation_split=0.25)
    less = prepared(growing(40), validation_split=0.25, max_train_samples=6, max_eval_samples=3)
    assert set(less.train.rows) < set(whole.train.rows)
    assert set(less.validation.rows) < set(whole.validation.rows)
    assert less.sizes == {"train": 6, "validation": 3}


def test_the_rows_held_out_stay_the_same_from_version_to_version(prepared: Prepare) -> None:
    data = prepared(growing(30), validation_split=0.2, seed=42)
    assert data.validation.rows.tolist() == [3, 4, 5, 8, 18, 27]
    assert counts_of(data, "validation") == {"a": 3, "b": 3}
    assert len({*data.train.rows, *data.validation.rows}) == 30
