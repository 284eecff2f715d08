"""`toolkit predict`: each row once, in the order of the file, in parts that a killed process continues. `toolkit
evaluate`: the labels of a file, pairs, and the run that trained the model.
"""

import csv
import json
import math
import random
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest

import toolkit
from tests.evaluation.columns import save_columns
from tests.faults import refusal
from tests.jobs_worker import run_jobs
from tests.report.made import classifier
from tests.runs import WAYS, lines_of, recipe
from toolkit.cli import build_parser
from toolkit.config import TextSettings
from toolkit.data import read, text_files, write
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, Labels
from toolkit.data.table import Table
from toolkit.evaluation.saved_model import choose_labels, training_run
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

    def run(
        name: str, *more: str, window: int = 16, source: Path = rows, model: Any = model
    ) -> Path:
        monkeypatch.setattr(predict_file, "WINDOW_ROWS", window)
        words = ["predict", model, source, "--output", tmp_path / name, "--mixed_precision", "no"]
        predict_file.predict_file(build_parser().parse_args(list(map(str, [*words, *more]))))
        return tmp_path / name

    return run


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pd.read_csv(path, dtype={"id": str}, keep_default_na=False).to_dict("records")


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Up to rounding, as probabilities depend on the other texts of a batch."""
    pd.testing.assert_frame_equal(pd.DataFrame(rows), pd.DataFrame(expected), rtol=0, atol=2e-6)


def with_decisions(model: Path, folder: Path, **decisions: Any) -> Path:
    copy = shutil.copytree(model, folder)
    (copy / "decisions.json").write_text(json.dumps({"labels": ["a", "b", "c"], **decisions}))
    return copy


def test_windows(predicted: Predict, texts: list[str], tmp_path: Path, capsys: Any) -> None:
    whole = rows_of(predicted("whole.csv", window=10**6))
    assert [row["text"] for row in whole] == texts
    assert [row["id"] for row in whole] == [f"{row:03d}" for row in range(ROWS)]
    assert len({row["probability_a"] for row in whole}) > ROWS / 2
    assert_same(rows_of(predicted("windows.csv")), whole)
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
    assert_same(rows_of(tmp_path / "out.csv"), rows_of(whole))
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


@pytest.mark.parametrize("changed", ["max_length", "file", "model", "probabilities"])
def test_parts_of_another_prediction(
    changed: str, predicted: Predict, model: Path, tmp_path: Path
) -> None:
    predicted("out.csv", "--shard", "1/2")
    lines = (tmp_path / "rows.csv").read_text().replace("good", "fine")
    (tmp_path / "other.csv").write_text(lines)
    words = {"max_length": ["--max_length", "8"], "probabilities": ["--probabilities", "none"]}
    more: Any = {
        "file": {"source": tmp_path / "other.csv"},
        "model": {"model": with_decisions(model, tmp_path / "model", temperature=2)},
    }
    given = partial(predicted, **more.get(changed, {}))
    options = words.get(changed, [])
    match = rf"part-\S+ is of another prediction \(it differs in {changed}\)"
    refusal(given, "out.csv", *options, match=match)
    expected = given("expected.csv", *options).read_bytes()
    assert given("out.csv", "--overwrite", *options).read_bytes() == expected


def test_what_is_refused(predicted: Predict, model: Path, tmp_path: Path) -> None:
    """What would be overwritten, options that do not fit, a model class of a user's own."""
    again = tmp_path / "again.csv"
    again.write_text("text,prediction\na,b\n")
    refusal(predicted, "out.csv", source=again, match="already has a column prediction")
    (tmp_path / "mine.csv").write_text("mine")
    refusal(predicted, "mine.csv", match="mine.csv exists")
    assert (tmp_path / "mine.csv").read_text() == "mine"
    own = shutil.copytree(model, tmp_path / "own", ignore=shutil.ignore_patterns("config.json"))
    refusal(predicted, "out.csv", model=own, says=["load_state_dict", f"{own}/model.safetensors"])
    words = ["--per_device_batch_size", "0"]
    refusal(predicted, "out.csv", *words, says=words)
    for words in (["part-*.csv"], ["--text", "a", "--output", "b.csv"]):
        options = build_parser().parse_args(["predict", "m", *words])
        refusal(predict_file.predict_file, options, match="--output")
    assert not list(tmp_path.glob("*.parts"))


def part(start: int, end: int) -> str:
    return f"part-{start:010d}-{end:010d}.parquet"


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


def test_rows_without_an_answer(
    predicted: Predict, model: Path, tmp_path: Path, capsys: Any
) -> None:
    unsure = with_decisions(model, tmp_path / "unsure", abstain_below=0.4)
    answers = [row["prediction"] for row in rows_of(predicted("out.csv", model=unsure))]
    unanswered = answers.count("")
    assert 0 < unanswered < ROWS
    assert re.search(rf"\b{unanswered} of {ROWS} rows .*abstain_below", capsys.readouterr().err)


def test_the_quoting_of_the_training_file(predicted: Predict, model: Path, tmp_path: Path) -> None:
    """Double quotes within texts reach the model and the output."""
    trained = shutil.copytree(model, tmp_path / "trained")
    save_columns(trained, train_file="train.TSV.gz", quoting="none", text_column="text")
    texts = ['"a good film"', '""', 'he said "dull"', "fine"]
    (tmp_path / "a.tsv").write_text("\n".join(["text", *texts, ""]))
    given = partial(predicted, source=tmp_path / "a.tsv", model=trained)
    lines = given("out.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["text", *texts]
    assert [row["text"] for row in rows_of(given("out.csv"))] == texts
    as_csv = given("b.tsv", "--quoting", "csv").read_text()
    assert as_csv.splitlines()[1].startswith("a good film\t")


@pytest.mark.parametrize("kind", ["tsv", "json", "jsonl", "parquet", "csv.gz", "jsonl.bz2"])
def test_every_format_is_written_in_parts(predicted: Predict, kind: str) -> None:
    whole = rows_of(predicted("whole.csv"))
    path = predicted(f"out.{kind}")
    assert kind != "json" or len(json.loads(path.read_text())) == len(whole)
    frame = read.read_file(str(path), TextSettings()).rows.to_pandas()
    for name in ("id", "text", "prediction"):
        assert list(frame[name]) == [row[name] for row in whole]
    chances = [row["probability_b"] for row in whole]
    assert list(frame["probability_b"].astype(float)) == pytest.approx(chances, abs=2e-6)
    answers = predicted(f"answers.{kind}", "--probabilities", "none")
    names = read.read_file(str(answers), TextSettings()).rows.column_names
    assert names == ["id", "text", "prediction"]


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


def test_columns_are_matched_by_name() -> None:
    columns = {"sport": [1, 0], "finance": [0, 0], "price": [9, 8], "taste": [1.5, 2]}
    classes = Labels(MULTI, ("finance", "sport"), ())
    outputs = Labels(REGRESSION, ("price", "taste"), ())
    assert labels_of_file(classes, columns, name="sport,finance") == [[0, 1], [0, 0]]
    assert labels_of_file(outputs, columns, name="taste,price") == [[9, 1.5], [8, 2]]
    says = ["sport, price", "finance, sport"]
    refusal(labels_of_file, classes, columns, name="sport,price", says=says)


def test_the_label_column_of_the_training_file(tmp_path: Path) -> None:
    """Also where this file has one with a more usual name."""
    save_columns(tmp_path, label_columns=["mood"])
    labels = Labels(SINGLE, ("pos", "neg"), ())
    columns: dict[str, list[Any]] = {"label": ["neg", "neg"], "mood": ["pos", "neg"]}
    assert labels_of_file(labels, columns, tmp_path) == [0, 1]
    assert labels_of_file(labels, columns, tmp_path, "label") == [1, 1]
    refusal(labels_of_file, labels, {}, match="which column is the label")


def test_the_run_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": {"seed": 3}, "data": {}}))
    names = {".": ["run/model", "run/model/"], "run": ["model"], "run/model": [".", "../model"]}
    for folder, models in names.items():
        monkeypatch.chdir(tmp_path / folder)
        assert [training_run(model)["settings"] for model in models] == [{"seed": 3}] * len(models)
    assert training_run("a-name-of-the-hub")["settings"] == {}


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
    assert [line["id"] for line in lines_of(out / "predictions.jsonl")] == list(range(6))
    assert "· pairs.evaluation<" in (out / "report.html").read_text(encoding="utf-8")
    (numbers,) = lines_of(out / "eval.jsonl")
    texts, truth = [("good film", ""), *[("bad room", "fine")] * 5], ["a", *"bbbbb"]
    expected = toolkit.evaluate(model, texts, truth, mixed_precision="no")
    assert {name: numbers[name] for name in expected} == expected
    answers = toolkit.predict(model, texts, mixed_precision="no")
    chances = [dict(zip("ab", answer["probabilities"], strict=True)) for answer in answers]
    losses = [-math.log(each[label]) for each, label in zip(chances, truth, strict=True)]
    assert numbers["loss"] == pytest.approx(sum(losses) / 6, rel=1e-3)
    refusal(evaluate, "--text_pair", "reply", says=["pairs.evaluation exists", "--output_dir"])
    save_columns(model, text_pair="second")
    third = ("--output_dir", str(tmp_path / "third"))
    refusal(evaluate, *third, says=["pairs.CSV has no column 'second'", "--text_pair"])
