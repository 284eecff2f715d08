"""Files of spans and of tagged tokens: the same rows of every form; a fault names the file and the row."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.faults import refusal
from toolkit.config import build
from toolkit.data.select import select_samples
from toolkit.features.spans.data import Spans
from toolkit.features.spans.settings import SpanSettings

pytestmark = pytest.mark.usefixtures("toolkit_cache")
TEXT = "EU rejects New York"
ORG, LOC = (0, 2, "ORG"), (11, 19, "LOC")
TOKENS, BIO = TEXT.split(), ["B-ORG", "O", "B-LOC", "I-LOC"]
BIOES = ["S-ORG", "O", "B-LOC", "E-LOC"]


def conll(tokens: Any, tags: Any, between: str = "\t") -> str:
    lines = [f"{token}{between}{tag}\n" for token, tag in zip(tokens, tags, strict=True)]
    return "".join(lines) + "\nHe\tO\n"


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_objects(*spans: tuple[int, int, str]) -> list[dict[str, Any]]:
    return [{"start": start, "end": end, "label": label} for start, end, label in spans]


def doccano(*spans: tuple[int, int, str]) -> list[dict[str, Any]]:
    keys = ("start_offset", "end_offset", "label")
    return [{"id": 7, **dict(zip(keys, span, strict=True))} for span in spans]


def write(folder: Path, name: str, content: str) -> Any:
    (folder / name).write_text(content, encoding="utf-8")
    return build(SpanSettings, {"train_file": str(folder / name), "model_name_or_path": "none"})


def rows_of(settings: Any, tokenizer: Any) -> list[Any]:
    """(text, spans) of each row, as they are read for training."""
    splits, targets, _ = select_samples(settings, tokenizer, Spans.tables(settings))
    found = {}
    for samples in splits.values():
        texts = [text for (block,) in samples.table.texts() for text in block]
        for (row, spans), text in zip(targets._rows(samples.table), texts, strict=True):
            found[row] = (text, list(map(tuple, spans)))
    return [found[row] for row in sorted(found)]


FORMS = {
    "a.jsonl": jsonl({"text": TEXT, "entities": as_objects(LOC, ORG)}, {"text": "He", "entities": []}),
    "b.jsonl": jsonl({"text": "He", "label": []}, {"text": TEXT, "label": [ORG, LOC]}),
    "c.jsonl": jsonl({"text": TEXT, "entities": doccano(ORG, LOC)}, {"text": "He", "entities": []}),
    "d.csv": f'text,spans\n{TEXT},"{json.dumps([ORG, LOC])}"\nHe,[]\n'.replace('"ORG"', '""ORG""').replace(
        '"LOC"', '""LOC""'),
    "e.txt": conll(TOKENS, BIO), "f.tsv": conll(TOKENS, BIO), "g.conll": conll(TOKENS, BIO, " "),
    "h.txt": "-DOCSTART- -X- O\n\n" + conll(TOKENS, BIO, " NNP I-NP "),
    "i.bio": conll(TOKENS, BIO).replace("\n", "\r\n"),
    "j.conll": conll(TOKENS, BIOES), "k.bmes": conll(TOKENS, [tag.replace("I", "M") for tag in BIOES]),
    "l.txt": conll(TOKENS, ["U-ORG", "O", "B-LOC", "L-LOC"]),
    "m.jsonl": jsonl({"tokens": TOKENS, "ner_tags": BIO}, {"tokens": ["He"], "ner_tags": ["O"]}),
    "n.jsonl": jsonl({"id": 1, "words": ["He"], "tags": ["O"]}, {"id": 2, "words": TOKENS, "tags": BIOES}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_same_rows_in_every_form(name: str, tokenizer: Any, tmp_path: Path) -> None:
    found = rows_of(write(tmp_path, name, FORMS[name]), tokenizer)
    assert sorted(found) == [(TEXT, [ORG, LOC]), ("He", [])]


def test_class_ids_of_a_data_set_have_names(tokenizer: Any, tmp_path: Path) -> None:
    names = ["O", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
    columns = {"tokens": [TOKENS, ["He"]], "ner_tags": [[1, 0, 3, 4], [0]]}
    tags = datasets.List(datasets.ClassLabel(names=names))
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": tags}
    )
    rows = datasets.Dataset.from_dict(columns, features=features)
    rows.to_parquet(tmp_path / "train.parquet")
    settings = build(SpanSettings, {"dataset_name": str(tmp_path), "model_name_or_path": "none"})
    assert sorted(rows_of(settings, tokenizer)) == [(TEXT, [ORG, LOC]), ("He", [])]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("王 明 在 N B A", "王明在NBA"),  # all are single characters
        ("中国 GDP 增长 3 %", "中国GDP增长3 %"),
        ("He 's in Tokyo , 東京 。", "He 's in Tokyo ,東京。"),
    ],
)
def test_what_stands_between_tokens(tokens: str, text: str, tokenizer: Any, tmp_path: Path) -> None:
    """Spans are of the characters of that text."""
    words = tokens.split()
    tags = ["O"] * (len(words) - 1) + ["B-X"]
    found = rows_of(
        write(tmp_path, "a.conll", conll(words, tags).replace("\n\nHe", "\n\nx")), tokenizer
    )
    assert found[0] == (text, [(len(text) - len(words[-1]), len(text), "X")])


ROW = {"text": TEXT, "entities": as_objects(ORG)}
FAULTS: dict[str, tuple[str, list[str]]] = {
    "outside.jsonl": (jsonl(ROW, ROW | {"entities": as_objects((11, 20, "LOC"))}), ["row 2", "11 to 20", "19 char"]),
    "before.jsonl": (jsonl(ROW, ROW | {"entities": as_objects((-1, 2, "LOC"))}), ["row 2", "-1 to 2"]),
    "empty.jsonl": (jsonl(ROW, ROW | {"entities": as_objects((3, 3, "LOC"))}), ["row 2", "3 to 3", "empty"]),
    "crossing.jsonl": (jsonl(ROW, ROW | {"entities": as_objects((0, 10, "A"), (3, 14, "B"))}),
                       ["row 2", "3 to 14 (B) crosses", "0 to 10 (A)"]),
    "nested.jsonl": (jsonl(ROW, ROW | {"entities": as_objects((0, 14, "A"), (3, 10, "B"))}),
                     ["row 2", "3 to 10 (B) lies within", "0 to 14 (A)", "one label"]),
    "half.jsonl": (jsonl(ROW | {"entities": [{"start": 0.5, "end": 2, "label": "A"}]}, ROW), ["row 1", '"start": 0']),
    "unnamed.jsonl": (jsonl({"text": TEXT, "x": as_objects(ORG)}, {"text": TEXT, "x": []}),
                      ["one of x with --spans_column"]),
    "no label.jsonl": (jsonl(ROW, ROW | {"entities": [{"start": 0, "end": 2}]}), ["row 2", '"label"']),
    "a name.jsonl": (jsonl({"text": TEXT, "label": "ORG"}, {"text": TEXT, "label": "ORG"}), ["row 1", "not ORG"]),
    "none.jsonl": (jsonl(ROW, {"text": TEXT}), ["rows 2", "--drop_empty_text"]),
    "no span.jsonl": (jsonl(ROW | {"entities": []}, ROW | {"entities": []}), ["no text has a span", "entities"]),
    "no B.conll": (conll(["a", "b"], ["O", "I-X"]), ["row 1, token 2 (line 2)", "I-X", "B-X"]),
    "other label.conll": (conll(["a", "b"], ["B-X", "I-Y"]), ["row 1, token 2 (line 2)", "I-Y", "B-Y"]),
    "no end.conll": ("x\tS-A\n\n" + conll(["a", "b"], ["B-X", "O"]), ["row 2, token 1 (line 3)", "X has no last"]),
    "unknown.conll": (conll(["a", "b"], ["O", "X-X"]), ["line 2", "X-X", "BIO, BMESO, BIESO, BILUO"]),
    "two schemes.conll": (conll("abcd", ["B-X", "I-X", "B-X", "M-X"]), ["line 4", "M-X"]),
    "no tag.conll": ("a\tO\nb\n", ["line 2", "'b'", "token<TAB>tag"]),
    "lengths.jsonl": (jsonl({"tokens": ["a", "b"], "ner_tags": ["O"]}), ["row 1", "2 tokens and 1 tags"]),
    "numbers.jsonl": (jsonl({"tokens": ["a", "b"], "ner_tags": [0, 1]}), ["row 1", "'0'", "BIO"]),
    "blank.jsonl": (jsonl({"tokens": ["a", ""], "ner_tags": ["O", "O"]}), ["row 1", "token is empty"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_file_and_row(name: str, tokenizer: Any, tmp_path: Path) -> None:
    content, says = FAULTS[name]
    refusal(
        lambda: rows_of(write(tmp_path, name, content), tokenizer),
        says=[str(tmp_path / name), *says],
    )


def test_a_label_of_no_training_row(tokenizer: Any, tmp_path: Path) -> None:
    settings = write(tmp_path, "a.jsonl", jsonl(ROW, ROW))
    other = write(tmp_path, "b.jsonl", jsonl(ROW, ROW | {"entities": as_objects(LOC)}))
    tables = {"train": Spans.tables(settings)["train"], "validation": Spans.tables(other)["train"]}
    refusal(
        lambda: select_samples(settings, tokenizer, tables), says=["b.jsonl, row 2", "LOC", "ORG"]
    )
