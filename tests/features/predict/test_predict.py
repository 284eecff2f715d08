"""`toolkit predict`: each row once, in the order of the file, in parts that a killed process continues. `toolkit
evaluate`: the labels of a file, pairs, and the run that trained the model.
"""

import csv
import json
import random
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import toolkit
from tests.faults import refusal
from tests.jobs_worker import run_jobs
from tests.report.made import classifier, save_columns
from tests.runs import WAYS, lines_of, recipe
from toolkit.cli import build_parser
from toolkit.config import TextSettings
from toolkit.data import read, text_files, write
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, Labels
from toolkit.data.table import Table
from toolkit.evaluation.saved_model import choose_labels
from toolkit.features.predict import command as predict_file
from toolkit.features.predict.evaluate import evaluate_file

WORDS = ("good", "bad", "film", "book", "very", "room", "dull", "fine")
ROWS = 70
Predict = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("no_launcher", "toolkit_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, sharp_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return classifier(sharp_model, folder, Labels(SINGLE, ("a", "b", "c"), ("label",)))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Some twice, of very different lengths, one empty, one of two lines."""
    generator = random.Random(3)
    made = [" ".join(generator.choices(WORDS, k=generator.randint(1, 40))) for _ in range(ROWS)]
    made[40:50], made[60] = made[:10], ""
    made[5] = 'he said "very, good"\nfilm'
    return made


@pytest.fixture
def predicted(model: Path, texts: list[str], tmp_path: Path, monkeypatch: Any) -> Predict:
    """`predicted("out.csv", "--shard", "1/3", window=16)` -> where the output is."""
    rows = tmp_path / "rows.csv"
    numbers = [f"{row:03d}" for row in range(ROWS)]
    pd.DataFrame({"id": numbers, "text": texts}).to_csv(rows, index=False)
    monkeypatch.setattr(text_files, "BLOCK_ROWS", 2)  # of which four are a batch

    def run(name: str, *more: Any, window: int = 16, source: Any = rows, model: Any = model) -> Any:
        monkeypatch.setattr(predict_file, "WINDOW_ROWS", window)
        words = ["predict", model, source, "--output", tmp_path / name, "--mixed_precision", "no"]
        predict_file.predict_file(build_parser().parse_args(list(map(str, [*words, *more]))))
        return tmp_path / name

    return run


def rows_of(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"id": str}, keep_default_na=False)


def assert_same(path: Path, expected: Path) -> None:
    """Up to rounding, as probabilities depend on the other texts of a batch."""
    pd.testing.assert_frame_equal(rows_of(path), rows_of(expected), rtol=0, atol=2e-6)


def part(start: int, end: int) -> str:
    return f"part-{start:010d}-{end:010d}.parquet"


def test_windows(predicted: Predict, texts: list[str], tmp_path: Path, capsys: Any) -> None:
    whole = predicted("whole.csv", window=10**6)
    assert list(rows_of(whole)["text"]) == texts
    assert list(rows_of(whole)["id"]) == [f"{row:03d}" for row in range(ROWS)]
    assert rows_of(whole)["probability_a"].nunique() > ROWS / 2
    assert_same(predicted("windows.csv"), whole)
    assert re.search(r"\b1 of 70 rows .*\(rows 61\)", capsys.readouterr().err)
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x2", pytest.param("zero3 x2", marks=pytest.mark.slow)])
def test_ranks_share_windows(
    predicted: Predict, model: Path, tmp_path: Path, toolkit_cache: Path, way: str
) -> None:
    whole = predicted("whole.csv")
    words = [model, tmp_path / "rows.csv", "--mixed_precision", "no", "--output"]
    job = ["tests.predict_worker", *words, tmp_path / "out.csv"]
    run_jobs(tmp_path / "jobs", WAYS[way], [[*job, "--shard", "2/3"], job])
    assert_same(tmp_path / "out.csv", whole)
    assert not list((toolkit_cache / "tokens").glob("*"))


def test_shards_are_joined_in_order(predicted: Predict, tmp_path: Path, capsys: Any) -> None:
    """Also those of a machine without a shared disk, whose parts are copied; what no shard has done
    is computed."""
    whole = predicted("whole.csv").read_bytes()
    parts = tmp_path / "out.csv.parts"
    predicted("out.csv", "--shard", "2/3")
    predicted("out.csv", "--shard", "2/3")  # as a scheduler may start it again
    assert sorted(path.name for path in parts.iterdir()) == [part(16, 32), part(64, 70)]
    parts.rename(tmp_path / "other machine")
    predicted("out.csv", "--shard", "3/3")
    for path in (tmp_path / "other machine").iterdir():
        path.rename(parts / path.name)
    assert not (tmp_path / "out.csv").exists()
    capsys.readouterr()
    assert predicted("out.csv").read_bytes() == whole
    assert "32 of 70 rows remain" in capsys.readouterr().err
    assert not parts.exists()
    refusal(predicted, "out.csv", "--shard", "1/3", match=r"out.csv exists: name another")
    for wrong in ("0/3", "4/3", "2", "a/b"):
        refusal(predicted, "third.csv", "--shard", wrong, says=["--shard", wrong])


def test_parts_of_another_prediction(predicted: Predict, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text((tmp_path / "rows.csv").read_text().replace("good", "fine"))
    cooler = shutil.copytree(model, tmp_path / "model")
    decisions = {"labels": ["a", "b", "c"], "temperature": 2}
    (cooler / "decisions.json").write_text(json.dumps(decisions))
    changes: dict[str, tuple[list[str], dict[str, Path]]] = {
        "max_length": (["--max_length", "8"], {}),
        "probabilities": (["--probabilities", "none"], {}),
        "file": ([], {"source": tmp_path / "file.csv"}),
        "model": ([], {"model": cooler}),
    }
    for changed, (words, others) in changes.items():
        name = predicted(f"of {changed}.csv", "--shard", "1/2").name
        match = rf"part-\S+ is of another prediction \(it differs in {changed}\)"
        refusal(predicted, name, *words, **others, match=match)
        expected = predicted("expected.csv", "--overwrite", *words, **others).read_bytes()
        assert predicted(name, "--overwrite", *words, **others).read_bytes() == expected


def test_what_is_refused(predicted: Predict, model: Path, tmp_path: Path) -> None:
    """Options that do not fit, a model class of a user's own."""
    again = tmp_path / "again.csv"
    again.write_text("text,prediction\na,b\n")
    refusal(predicted, "out.csv", source=again, match="already has a column prediction")
    own = shutil.copytree(model, tmp_path / "own", ignore=shutil.ignore_patterns("config.json"))
    refusal(predicted, "out.csv", model=own, says=["load_state_dict", f"{own}/model.safetensors"])
    words = ["--per_device_batch_size", "0"]
    refusal(predicted, "out.csv", *words, says=words)
    for words in (["part-*.csv"], ["--text", "a", "--output", "b.csv"]):
        options = build_parser().parse_args(["predict", "m", *words])
        refusal(predict_file.predict_file, options, match="--output")
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process(number: int, predicted: Predict, model: Path, tmp_path: Path) -> None:
    """By a signal after the second of five parts; the same command continues after them."""
    whole, out = predicted("whole.csv").read_bytes(), tmp_path / "out.csv"
    words = [model, tmp_path / "rows.csv", "--mixed_precision", "no", "--output", out]
    env = {"KILLED_AT": part(16, 32), "KILLED_BY": str(int(number))}
    ended = recipe(*words, script="tests/predict_worker.py", env=env)
    assert ended.code == (-signal.SIGKILL if number == signal.SIGKILL else 130), ended.err
    names = [part(start, min(start + 16, ROWS)) for start in range(0, ROWS, 16)]
    parts = Path(f"{out}.parts")
    assert sorted(path.name for path in parts.glob("part-*")) == names[:2]
    (parts / f".{names[2]}.draft-0123456789abcdef").write_text("half")
    again = recipe(*words, script="tests/predict_worker.py").succeeded()
    assert again.out.split() == names[2:]
    assert out.read_bytes() == whole
    assert not parts.exists()


def test_the_quoting_of_the_training_file(predicted: Predict, model: Path, tmp_path: Path) -> None:
    """Double quotes within texts reach the model and the output."""
    trained = shutil.copytree(model, tmp_path / "trained")
    save_columns(trained, train_file="train.TSV.gz", quoting="none", text_column="text")
    texts = ['"a good film"', '""', 'he said "dull"', "fine"]
    (tmp_path / "a.tsv").write_text("\n".join(["text", *texts, ""]))
    given = partial(predicted, source=tmp_path / "a.tsv", model=trained)
    lines = given("out.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["text", *texts]
    assert list(rows_of(given("out.csv"))["text"]) == texts
    as_csv = given("b.tsv", "--quoting", "csv").read_text()
    assert as_csv.splitlines()[1].startswith("a good film\t")


@pytest.mark.parametrize("kind", ["tsv", "json", "jsonl", "parquet", "csv.gz", "jsonl.bz2"])
def test_every_format_is_written_in_parts(predicted: Predict, kind: str) -> None:
    whole = rows_of(predicted("whole.csv"))
    frame = read.read_file(str(predicted(f"out.{kind}")), TextSettings()).rows.to_pandas()
    names = ["id", "text", "prediction"]
    pd.testing.assert_frame_equal(frame[names], whole[names], check_dtype=False)
    chances = frame["probability_b"].astype(float)
    assert list(chances) == pytest.approx(list(whole["probability_b"]), abs=2e-6)
    answers = predicted(f"answers.{kind}", "--probabilities", "none")
    assert read.read_file(str(answers), TextSettings()).rows.column_names == names


CELLS: dict[str, list[Any]] = {
    "text": ["a\rb", 'c "d", e\nf', ""],
    "score": [0.1234567890123456, 1e-12, None],
    "id": [2**60 + 1, None, 0],
    "tags": [["很", "y"], [], None],
}
IN_CSV = [
    ["text", "score", "id", "tags"],
    ["a\rb", "0.1234567890123456", str(2**60 + 1), '["很", "y"]'],
    ['c "d", e\nf', "1e-12", "", "[]"],
    ["", "", "0", ""],
]


def test_cells_are_written_as_they_were_read(tmp_path: Path) -> None:
    """A lone \\r, which ends a row of CSV outside quotes, all digits of numbers, nulls, lists."""
    for name in ("out.csv", "out.tsv", "out.jsonl"):
        write.write_rows(tmp_path / name, tmp_path / name, [pa.table(CELLS)])
    assert lines_of(tmp_path / "out.jsonl") == pa.table(CELLS).to_pylist()
    for name, delimiter in (("out.csv", ","), ("out.tsv", "\t")):
        with (tmp_path / name).open(encoding="utf-8", newline="") as file:
            assert [*csv.reader(file, delimiter=delimiter)] == IN_CSV
    path, with_tab = tmp_path / "t.tsv", [pa.table({"text": ["a\tb"]})]
    refusal(write.write_rows, path, path, with_tab, quoting=False, match="t.tsv: .*jsonl")


@pytest.mark.parametrize("encoding", ["gb18030", "utf-8-sig"])  # Excel saves UTF-8 as the second
def test_the_encoding_of_the_input(encoding: str, predicted: Predict, tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    lines = ["text,评", *(f"很好{row},{row}" for row in range(40))]
    source.write_text("\n".join([*lines, ""]), encoding=encoding)
    read_as = ["--encoding", encoding] if encoding == "gb18030" else []
    out = predicted("out.csv", *read_as, source=source)
    written = out.read_text(encoding=encoding).splitlines()
    assert [line.rsplit(",", 4)[0] for line in written] == lines
    assert out.read_bytes().startswith("\ufeff".encode()) == (encoding == "utf-8-sig")


def labels_of_file(labels: Labels, columns: Any, model: Any = "none", name: Any = None) -> Any:
    rows = datasets.Dataset.from_dict({"text": ["good", "bad"], **columns})
    table = Table.of(rows, "new.csv")
    return choose_labels(str(model), table, name, labels).encode(table).tolist()


def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    """The label column is by default that of the training file."""
    columns = {"sport": [1, 0], "finance": [0, 0], "price": [9, 8], "taste": [1.5, 2]}
    classes = Labels(MULTI, ("finance", "sport"), ())
    outputs = Labels(REGRESSION, ("price", "taste"), ())
    assert labels_of_file(classes, columns, name="sport,finance") == [[0, 1], [0, 0]]
    assert labels_of_file(outputs, columns, name="taste,price") == [[9, 1.5], [8, 2]]
    says = ["sport, price", "finance, sport"]
    refusal(labels_of_file, classes, columns, name="sport,price", says=says)
    save_columns(tmp_path, label_columns=["mood"])
    moods = Labels(SINGLE, ("pos", "neg"), ())
    both: dict[str, list[Any]] = {"label": ["neg", "neg"], "mood": ["pos", "neg"]}
    assert labels_of_file(moods, both, tmp_path) == [0, 1]
    assert labels_of_file(moods, both, tmp_path, "label") == [1, 1]
    refusal(labels_of_file, moods, {}, match="which column is the label")


def test_an_evaluation_of_pairs(sharp_model: Path, tmp_path: Path, capsys: Any) -> None:
    """A pair with one empty text is named; what exists is not overwritten; the pair of the training
    file is read."""
    model = classifier(sharp_model, tmp_path / "model", Labels(SINGLE, ("a", "b"), ("label",)))
    file, out = tmp_path / "pairs.CSV", tmp_path / "pairs.evaluation"
    file.write_text("text,reply,label\ngood film,,a\n" + "bad room,fine,b\n" * 5)

    def evaluate(*more: str) -> None:
        words = ["evaluate", str(model), str(file), "--mixed_precision", "no", *more]
        evaluate_file(build_parser().parse_args(words))

    evaluate("--text_pair", "reply")
    assert re.search(r"\b1 of 6 rows .*\(rows 1\)", capsys.readouterr().err)
    assert "· pairs.evaluation<" in (out / "report.html").read_text(encoding="utf-8")
    (numbers,), lines = lines_of(out / "eval.jsonl"), lines_of(out / "predictions.jsonl")
    texts, truth = [("good film", ""), *[("bad room", "fine")] * 5], ["a", *"bbbbb"]
    expected = toolkit.evaluate(model, texts, truth, mixed_precision="no")
    assert {name: numbers[name] for name in expected} == expected
    answers = toolkit.predict(model, texts, mixed_precision="no")
    chances = np.array([answer["probabilities"] for answer in answers])
    written = np.array([line["probabilities"] for line in lines])
    assert written == pytest.approx(chances, abs=2e-6)
    losses = -np.log(chances[np.arange(6), [0, *[1] * 5]])
    assert numbers["loss"] == pytest.approx(losses.mean(), rel=1e-3)
    refusal(evaluate, "--text_pair", "reply", says=["pairs.evaluation exists", "--output_dir"])
    save_columns(model, text_pair="second")
    third = ("--output_dir", str(tmp_path / "third"))
    refusal(evaluate, *third, says=["pairs.CSV has no column 'second'", "--text_pair"])
