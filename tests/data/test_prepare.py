"""toolkit/data/prepare.py: files -> one folder of tokens and labels, made once, named after its content."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from toolkit.config import TaskSettings, build
from toolkit.data import prepare
from toolkit.data.prepare import TaskData, prepare_data
from toolkit.data.read import read_file, read_tables
from toolkit.data.rows import text_column
from toolkit.errors import UserError

MODEL = SimpleNamespace(model_type="bert", max_position_embeddings=131, pad_token_id=0)
Row = dict[str, Any]


def rows_of(classes: dict[str, int], prefix: str = "good film") -> list[Row]:
    """So many rows of each class, mixed, each text once."""
    rows = [
        {"text": f"{prefix} {label} {number}", "label": label} for label, n in classes.items() for number in range(n)
    ]
    return [rows[place] for place in np.random.default_rng(7).permutation(len(rows))]


@pytest.fixture
def prepared(write_rows: Callable[..., str], tokenizer: Any, toolkit_cache: Path) -> Callable[..., TaskData]:
    """`prepared(rows, validation_file=rows, seed=3, ...)` -> the data of files written for it."""

    def run(train: list[Row], _model: Any = MODEL, _tokenizer: Any = tokenizer, **given: Any) -> TaskData:
        files = {"train_file": train} | {name: given.pop(name) for name in list(given) if name.endswith("_file")}
        paths = {name: write_rows(f"{name}.jsonl", rows) for name, rows in files.items()}
        return prepare_data(build(TaskSettings, paths | given), _tokenizer, _model)

    return run


def counts_of(data: TaskData, split: str) -> dict[str, int]:
    labels = getattr(data, split).labels
    return {name: int((labels == place).sum()) for place, name in enumerate(data.labels.names)}


def test_samples_are_the_rows_of_the_file(prepared: Callable[..., TaskData], tokenizer: Any) -> None:
    train, validation = rows_of({"a": 3, "b": 4}), rows_of({"a": 2, "b": 1}, "bad book")
    data = prepared(train, validation_file=validation, test_file=train[:2])
    assert (len(data.train), len(data.validation), len(data.test or ())) == (7, 3, 2)
    assert data.max_length == 131
    for split, rows in ((data.train, train), (data.validation, validation)):
        assert split.rows.tolist() == list(range(len(rows)))
        assert [data.labels.names[label] for label in split.labels] == [row["label"] for row in rows]
        assert [split.tokens(place).tolist() for place in range(len(rows))] == [
            tokenizer(row["text"])["input_ids"] for row in rows
        ]
    assert data.validation.texts() == [row["text"] for row in validation]


def test_held_back_rows_are_divided_by_class(prepared: Callable[..., TaskData]) -> None:
    rows = rows_of({"often": 80, "rare": 10, "sometimes": 30})
    data = prepared(rows, validation_split=0.2)
    assert counts_of(data, "validation") == {"often": 16, "rare": 2, "sometimes": 6}
    assert sorted([*data.train.rows, *data.validation.rows]) == list(range(120))
    for split in (data.train, data.validation):  # in the file's order, with the file's labels
        assert split.rows.tolist() == sorted(split.rows)
        assert [data.labels.names[label] for label in split.labels] == [rows[row]["label"] for row in split.rows]
    assert any("24 of 120 rows are held back" in note for note in data.notes)


def test_a_class_of_one_row_is_trained_on(prepared: Callable[..., TaskData]) -> None:
    for seed in range(5):
        data = prepared(rows_of({"a": 20, "b": 20, "alone": 1, "single": 1}), seed=seed, validation_split=0.5)
        assert (counts_of(data, "train")["alone"], counts_of(data, "train")["single"]) == (1, 1)
        assert len(data.validation) == 20


def test_too_few_rows_for_every_class_are_said(prepared: Callable[..., TaskData]) -> None:
    data = prepared(rows_of({"a": 3, "b": 3, "c": 3}))
    assert len(data.validation) == 1
    assert any("too few rows to hold some of each class back" in note for note in data.notes)


@pytest.mark.parametrize("vocabulary", [50, 126])
def test_a_tokenizer_of_another_model_is_an_error(prepared: Callable[..., TaskData], vocabulary: int) -> None:
    """It has 127 tokens: more than the model has rows for."""
    with pytest.raises(UserError, match=f"127.*{vocabulary}|{vocabulary}.*127"):
        prepared(rows_of({"a": 5, "b": 5}), _model=SimpleNamespace(**vars(MODEL), vocab_size=vocabulary))


def test_texts_that_also_stand_in_training_are_said(prepared: Callable[..., TaskData]) -> None:
    rows = rows_of({"a": 5, "b": 5})
    data = prepared(rows, validation_file=rows[:3] + rows_of({"a": 2}, "bad"), test_file=rows_of({"b": 2}, "dull"))
    assert [note for note in data.notes if "flatter" in note] == [
        "validation: 3 of 5 texts also stand in training: their scores flatter"
    ]


def test_cut_texts_are_counted(prepared: Callable[..., TaskData]) -> None:
    rows = [*rows_of({"a": 5, "b": 4}), {"text": "the " * 40, "label": "a"}]
    data = prepared(rows, validation_file=rows[:2], max_length=20)
    assert any("train: 10.0 % of the texts are cut at 20 tokens" in note for note in data.notes)
    assert not any(note.startswith("validation") and "cut" in note for note in data.notes)
    assert data.train.lengths.max() == 20


EMPTY = [
    {"text": "a", "label": "x"},
    {"text": " \n", "label": "y"},
    {"text": "b", "label": "y"},
    {"text": None, "label": "x"},
]


def test_empty_texts_are_an_error_that_names_the_rows(prepared: Callable[..., TaskData]) -> None:
    with pytest.raises(UserError) as caught:
        prepared(EMPTY, validation_file=EMPTY[:1])
    for part in ("train_file.jsonl", "2 of 4 rows (rows 2, 4)", "--drop_empty_text", "'text'"):
        assert part in str(caught.value)


def test_empty_texts_are_left_out_when_asked(prepared: Callable[..., TaskData]) -> None:
    data = prepared(EMPTY, validation_file=EMPTY[1:3], drop_empty_text=True)
    assert data.train.rows.tolist() == [0, 2]
    assert data.validation.rows.tolist() == [1]
    assert data.validation.texts() == ["b"]
    assert [data.labels.names[label] for label in data.train.labels] == ["x", "y"]
    assert any("2 rows with an empty text are left out" in note for note in data.notes)


def test_a_row_that_is_left_out_needs_no_label(prepared: Callable[..., TaskData]) -> None:
    rows = [*rows_of({"a": 4, "b": 4}), {"text": "", "label": None}]
    assert len(prepared(rows, validation_file=rows, drop_empty_text=True).train) == 8


def test_a_column_of_empty_texts(prepared: Callable[..., TaskData]) -> None:
    rows = [{"text": "", "label": "a"}, {"text": " ", "label": "b"}]
    with pytest.raises(UserError, match=r"every text in column 'text' is empty.*--text_column"):
        prepared(rows, drop_empty_text=True)


@pytest.mark.parametrize(
    ("columns", "wanted", "found"),
    [
        (["label", "text"], None, "text"),
        (["label", "评论"], None, "评论"),
        (["number", "utterance"], None, "utterance"),  # the only column of strings
        (["title", "text"], "title", "title"),
    ],
)
def test_text_column(write_rows: Callable[..., str], columns: list[str], wanted: str | None, found: str) -> None:
    row = {column: 1 if column in ("label", "number") else "t" for column in columns}
    assert text_column(read_file(write_rows("a.jsonl", [row])), wanted) == found


@pytest.mark.parametrize("columns", [["title", "body"], ["number"]])
def test_a_text_column_that_cannot_be_told(write_rows: Callable[..., str], columns: list[str]) -> None:
    row = {column: 1 if column == "number" else "t" for column in columns}
    with pytest.raises(UserError) as caught:
        text_column(read_file(write_rows("a.jsonl", [row])), None)
    assert "--text_column" in str(caught.value)
    assert ", ".join(columns) in str(caught.value)


def test_a_validation_file_without_the_text_column(prepared: Callable[..., TaskData]) -> None:
    with pytest.raises(UserError, match=r"validation_file\.jsonl has no text column 'text'"):
        prepared(rows_of({"a": 2, "b": 2}), validation_file=[{"sentence": "x", "label": "a"}])


def state(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*/**/*"))


def test_the_second_run_makes_nothing(prepared: Callable[..., TaskData], toolkit_cache: Path) -> None:
    rows = rows_of({"a": 10, "b": 10})
    first = prepared(rows)
    before = state(toolkit_cache / "tokens")
    second = prepared(rows)
    assert second.folder == first.folder
    assert second.folder.is_relative_to(toolkit_cache)
    assert before == state(toolkit_cache / "tokens")
    assert (second.notes, second.labels, second.digest) == (first.notes, first.labels, first.digest)


def test_what_changes_the_data_changes_the_folder(prepared: Callable[..., TaskData], tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    rows = [row | {"other": "x y"} for row in rows_of({"1": 10, "2": 10})]
    other_tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    other_tokenizer.add_tokens(["film-noir"])
    changes: list[dict[str, Any]] = [
        {},
        {"validation_file": rows[:2]},
        {"max_length": 30},
        {"seed": 43},
        {"validation_split": 0.3},
        {"text_column": "other"},
        {"text_column": "text,other"},
        {"drop_empty_text": True},
        {"problem_type": "regression"},
        {"min_length": 4},
        {"max_train_samples": 9},
        {"max_eval_samples": 1},
        {"_tokenizer": other_tokenizer},
    ]
    digests = [prepared(rows, **change).digest for change in changes]
    digests.append(prepared([rows[0] | {"text": "another film"}, *rows[1:]]).digest)
    assert len(set(digests)) == len(digests)
    assert prepared(rows).digest == digests[0]


def test_a_seed_counts_only_where_rows_are_drawn(prepared: Callable[..., TaskData]) -> None:
    rows = rows_of({"a": 20, "b": 20})
    assert prepared(rows, validation_file=rows, seed=1).digest == prepared(rows, validation_file=rows, seed=2).digest
    limited = {"validation_file": rows, "max_eval_samples": 5}
    assert prepared(rows, **limited, seed=1).digest != prepared(rows, **limited, seed=2).digest


def test_a_data_seed_holds_the_same_rows_back_under_every_seed(prepared: Callable[..., TaskData]) -> None:
    rows = rows_of({"a": 20, "b": 20})
    plain, fixed, other = prepared(rows, seed=7), prepared(rows, seed=8, data_seed=7), prepared(rows, seed=8)
    assert plain.digest == fixed.digest
    assert fixed.validation.rows.tolist() == plain.validation.rows.tolist() != other.validation.rows.tolist()


def test_the_same_content_elsewhere_keeps_the_folder(
    write_rows: Callable[..., str], tokenizer: Any, toolkit_cache: Path
) -> None:
    paths = [write_rows(name, rows_of({"a": 5, "b": 5})) for name in ("one.jsonl", "two.jsonl")]
    folders = {prepare_data(build(TaskSettings, {"train_file": path}), tokenizer, MODEL).folder for path in paths}
    assert len(folders) == 1


def test_a_half_made_draft_is_never_used(
    prepared: Callable[..., TaskData], toolkit_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies after the first split, or just before the last file, leaves nothing to be taken."""
    rows, real = rows_of({"a": 10, "b": 10}), prepare.tokens.save_split
    saved: list[str] = []

    def die_at_the_second(folder: Path, *arguments: Any, **strings: Any) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(folder.name)
        real(folder, *arguments, **strings)

    monkeypatch.setattr(prepare.tokens, "save_split", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        prepared(rows)
    assert saved == ["train"]
    monkeypatch.setattr(prepare.tokens, "save_split", real)
    data = prepared(rows)
    assert len(data.train) + len(data.validation) == 20
    assert (data.folder / "meta.json").is_file()
    assert [path.name for path in (toolkit_cache / "tokens").iterdir() if path.is_dir()] == [data.digest]


@pytest.mark.parametrize("dev", ["validation", "valid", "dev"])
def test_splits_of_a_data_set(write_rows: Callable[..., str], tmp_path: Path, dev: str) -> None:
    for split in ("train", dev, "test"):
        write_rows(f"{split}.jsonl", rows_of({"a": 1, "b": 2}, split))
    tables = read_tables(build(TaskSettings, {"dataset_name": str(tmp_path)}).data)
    assert list(tables) == ["train", "validation", "test"]
    assert tables["validation"].rows["text"][0].startswith(f"{dev} ")


def test_a_data_set_without_training_rows(write_rows: Callable[..., str], tmp_path: Path) -> None:
    write_rows("test.jsonl", rows_of({"a": 1}))
    with pytest.raises(UserError, match="has no train split: it has test"):
        read_tables(build(TaskSettings, {"dataset_name": str(tmp_path)}).data)


def test_two_at_once_make_it_once(
    write_rows: Callable[..., str], tokenizer: Any, toolkit_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, real = [], prepare.tokens.save_split

    def slowly(folder: Path, *arguments: Any, **strings: Any) -> None:
        saved.append(folder.name)
        time.sleep(0.2)
        real(folder, *arguments, **strings)

    monkeypatch.setattr(prepare.tokens, "save_split", slowly)
    path = write_rows("a.jsonl", rows_of({"a": 100, "b": 100}))
    settings = build(TaskSettings, {"train_file": path, "validation_file": path})
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: prepare_data(settings, tokenizer, MODEL), range(2))
    assert one.folder == other.folder
    assert (len(one.train), len(other.train)) == (200, 200)
    assert sorted(saved) == ["train", "validation"]


def test_a_test_split_without_labels_is_left_out_and_said(prepared: Callable[..., TaskData]) -> None:
    rows = rows_of({"a": 3, "b": 3})
    data = prepared(rows, validation_file=rows, test_file=[{"text": "t", "label": None}, {"text": "u", "label": None}])
    assert data.test is None
    assert any("no labels" in note for note in data.notes)


def test_texts_the_model_cannot_read_are_an_error(prepared: Callable[..., TaskData]) -> None:
    foreign = [{"text": "ありがとう ございます " * 4, "label": label} for label in ("a", "b") for _ in range(5)]
    with pytest.raises(UserError, match=r"% of the tokens are unknown.*--model_name_or_path"):
        prepared(foreign, validation_file=foreign)
    some = [*rows_of({"a": 5, "b": 5}), {"text": "good ありがとう ございます film", "label": "a"}]
    assert any("unknown to this model" in note for note in prepared(some, validation_file=some).notes)
