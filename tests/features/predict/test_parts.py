"""toolkit/features/predict/command.py and parts.py: predictions in parts, joined in the order of the file."""

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

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.faults import refusal
from tests.jobs_worker import run_jobs
from tests.report.made import classifier
from tests.runs import WAYS, lines_of, recipe
from toolkit.cli import build_parser
from toolkit.config import TextSettings
from toolkit.data import read, text_files, write
from toolkit.data.labels import Labels
from toolkit.features.predict import command as predict_file
from toolkit.features.predict.parts import Parts

WORDS = ("good", "bad", "film", "book", "very", "room", "dull", "fine")
ROWS = 70

Predict = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, sharp_model: Path) -> Path:
    labels = Labels("single_label_classification", ("a", "b", "c"), ("label",))
    return classifier(sharp_model, tmp_path_factory.mktemp("model"), labels)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Some twice, of very different lengths, one empty."""
    generator = random.Random(3)
    made = [" ".join(generator.choices(WORDS, k=generator.randint(1, 40))) for _ in range(ROWS)]
    made[40:50], made[60] = made[:10], ""
    made[5] = 'he said "very, good"\nfilm'
    return made


@pytest.fixture
def predicted(
    model: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_launcher: None,
    toolkit_cache: Path,
) -> Predict:  # fmt: skip
    """`predicted("out.csv", shard="1/3", window=16)` -> where the output is."""
    source = tmp_path / "rows.csv"
    pd.DataFrame({"id": [f"{row:03d}" for row in range(ROWS)], "text": texts}).to_csv(
        source, index=False
    )

    def run(
        name: str, *more: str, window: int = 16, source: Path = source, model: Path = model
    ) -> Path:
        monkeypatch.setattr(text_files, "BLOCK_ROWS", 2)  # of which four are a batch
        monkeypatch.setattr(predict_file, "WINDOW_ROWS", window)
        words = [
            "predict",
            model,
            source,
            "--output",
            tmp_path / name,
            "--mixed_precision",
            "no",
            *more,
        ]
        predict_file.predict_file(build_parser().parse_args([str(word) for word in words]))
        return tmp_path / name

    return run


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pd.read_csv(path, dtype={"id": str}, keep_default_na=False).to_dict("records")


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Up to rounding, as probabilities depend on the other texts of a batch."""
    pd.testing.assert_frame_equal(pd.DataFrame(rows), pd.DataFrame(expected), rtol=0, atol=2e-6)


def test_windows_and_repeated_texts(
    predicted: Predict, texts: list[str], tmp_path: Path, capsys: Any
) -> None:
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
    whole, words = (
        predicted("whole.csv"),
        [model, tmp_path / "rows.csv", "--mixed_precision", "no", "--output"],
    )
    run_jobs(tmp_path / "jobs", WAYS[way], [["tests.predict_worker", *words, tmp_path / "out.csv", *shard]
                                            for shard in (["--shard", "2/3"], [])])  # fmt: skip
    assert_same(rows_of(tmp_path / "out.csv"), rows_of(whole))
    assert not list((toolkit_cache / "tokens").glob("*"))


def test_shards_are_joined_in_order_by_a_command(predicted: Predict, tmp_path: Path) -> None:
    whole = predicted("whole.csv").read_bytes()
    predicted("out.csv", "--shard", "2/3")
    refusal(
        predicted, "out.csv", "--join", match=r"out.csv.parts lacks rows 1 to 16, 33 to 64 of 70"
    )
    predicted("out.csv", "--shard", "3/3")
    predicted("out.csv", "--shard", "3/3")  # as a scheduler may start it again
    other = r"holds parts of another prediction \(it differs in max_length\)"
    refusal(predicted, "out.csv", "--shard", "1/3", "--max_length", "8", match=other)
    predicted("out.csv", "--shard", "1/3")
    assert not (tmp_path / "out.csv").exists()
    assert predicted("out.csv", "--join").read_bytes() == whole
    assert not (tmp_path / "out.csv.parts").exists()
    refusal(predicted, "out.csv", "--shard", "1/3", match=r"out.csv exists: name another")
    for wrong in ("0/3", "4/3", "2", "a/b"):
        refusal(predicted, "third.csv", "--shard", wrong, match="write 3/64")


def test_options_that_do_not_fit(predicted: Predict) -> None:
    refusal(
        predicted, "third.csv", "--per_device_batch_size", "0", match="'0' is not a number from 1"
    )
    pattern = build_parser().parse_args(["predict", "m", "part-*.csv.gz"])  # of files
    refusal(predict_file._choose_output, pattern, match="--output")
    texts = build_parser().parse_args(["predict", "m", "--text", "a", "--output", "b.csv"])
    refusal(predict_file.predict_file, texts, match="--output has no effect with --text")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_loses_only_unfinished_windows(
    number: signal.Signals, predicted: Predict, model: Path, tmp_path: Path
) -> None:
    """A signal after the second of five parts; the same command continues after the finished parts. After Ctrl-C,
    during which one more may be finished, a line counts them."""
    whole, out = predicted("whole.csv").read_bytes(), tmp_path / "out.csv"
    words = [
        "tests/predict_worker.py",
        model,
        tmp_path / "rows.csv",
        "--mixed_precision",
        "no",
        "--output",
        out,
    ]
    ended = recipe(
        *words[1:], script=words[0], env={"KILLED_AT": "16", "KILLED_BY": str(int(number))}
    )
    parts = sorted(path.name for path in Path(f"{out}.parts").glob("part-*"))
    assert parts[:2] == [
        "part-0000000000-0000000016.parquet",
        "part-0000000016-0000000032.parquet",
    ]
    if number == signal.SIGKILL:
        assert (ended.code, len(parts)) == (-signal.SIGKILL, 2), ended.err
        Path(
            f"{out}.parts", ".part-0000000032-0000000048.parquet.draft-0123456789abcdef"
        ).write_text("half")
    else:
        assert ended.code == 130, ended.err
        line = next(line for line in ended.err.splitlines() if str(out) in line)
        assert f"{16 * len(parts)} of {ROWS} rows" in line
        assert " ".join(map(str, words)) in line
    again = recipe(*words[1:], script=words[0]).succeeded()
    assert again.out.split() == [str(start) for start in range(16 * len(parts), ROWS, 16)]
    assert out.read_bytes() == whole
    assert not Path(f"{out}.parts").exists()


def test_rows_without_an_answer_are_counted(
    predicted: Predict, model: Path, tmp_path: Path, capsys: Any
) -> None:
    unsure = shutil.copytree(model, tmp_path / "unsure")
    (unsure / "decisions.json").write_text(
        json.dumps({"labels": ["a", "b", "c"], "abstain_below": 0.4})
    )
    rows = rows_of(predicted("out.csv", model=unsure))
    unanswered = sum(row["prediction"] == "" for row in rows)
    assert 0 < unanswered < ROWS
    assert re.search(
        rf"\b{unanswered} of {ROWS} rows .*0.4.*abstain_below", capsys.readouterr().err
    )


def test_the_quoting_of_the_training_file_is_used(
    predicted: Predict, model: Path, tmp_path: Path, capsys: Any
) -> None:
    """Double quotes within texts reach the model and the output; for a file of another format the default holds."""
    shutil.copytree(model, tmp_path / "run" / "model")
    config = {
        "settings": {"train_file": "train.TSV.gz", "quoting": "none"},
        "data": {"text_column": "text"},
        "identity": {},
        "launch": {},
    }
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    texts = ['"a good film"', '""', 'he said "dull"', "fine"]

    def predict(content: str, name: str, out: str, *words: str) -> Path:
        (tmp_path / name).write_text(content)
        return predicted(out, *words, source=tmp_path / name, model=tmp_path / "run" / "model")

    content = "\n".join(["text", *texts, ""])
    lines = predict(content, "a.tsv", "out.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["text", *texts]
    assert [row["text"] for row in rows_of(predict(content, "a.tsv", "out.csv"))] == texts
    explicit = predict(
        'text\n"a good film"\n', "explicit.tsv", "as-csv.tsv", "--quoting", "csv"
    ).read_text()
    assert explicit.splitlines()[1].startswith("a good film\t")
    assert (
        rows_of(predict('text\n"a good, long film"\n', "b.csv", "b-out.csv"))[0]["text"]
        == "a good, long film"
    )
    rows = [pa.table({"text": ["x"], "prediction": ["a\tb"]})]
    refusal(
        write.write_rows,
        tmp_path / "t",
        tmp_path / "t.tsv",
        rows,
        quoting=False,
        match="t.tsv: .*jsonl",
    )


@pytest.mark.parametrize("kind", ["tsv", "json", "jsonl", "parquet", "csv.gz", "jsonl.bz2"])
def test_every_format_is_written_in_parts(predicted: Predict, kind: str) -> None:
    whole = rows_of(predicted("whole.csv"))
    path = predicted(f"out.{kind}")
    assert kind != "json" or len(json.loads(path.read_text())) == len(whole)
    frame = read.read_file(str(path), TextSettings()).rows.to_pandas()
    for name in ("id", "text", "prediction"):
        assert list(frame[name]) == [row[name] for row in whole]
    expected = [whole[0][f"probability_{name}"] for name in "abc"]
    if "sv" in kind:
        written = [float(frame[f"probability_{name}"][0]) for name in "abc"]
    else:
        written = list(frame["probabilities"][0])
    assert written == pytest.approx(expected, abs=2e-6)
    answers = predicted(f"answers.{kind}", "--probabilities", "none")
    names = read.read_file(str(answers), TextSettings()).rows.column_names
    assert names == ["id", "text", "prediction"]


def test_a_file_without_a_header(predicted: Predict, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "plain.csv").write_text("1,good film\n2,bad\n")
    assert len(rows_of(predicted("out.csv", source=tmp_path / "plain.csv"))) == 1
    names = re.search(r"--column_names (\S+)", capsys.readouterr().err)
    assert (
        len(
            rows_of(predicted("all.csv", "--column_names", names[1], source=tmp_path / "plain.csv"))
        )
        == 2
    )


TYPED = ["good film", "很 dull book"]


def test_strings_without_their_type(predicted: Predict, tmp_path: Path) -> None:
    """In Parquet, as of older Spark, are read as in training; lists are no texts."""
    probabilities = []
    for number, texts in enumerate(
        (TYPED, [text.encode() for text in TYPED], [[text] for text in TYPED])
    ):
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{number}.parquet")
        predict = partial(predicted, f"{number}.jsonl", source=tmp_path / f"{number}.parquet")
        if number == 2:
            refusal(predict, match="column 'text' holds lists")
        else:
            lines = lines_of(predict())
            assert [line["text"] for line in lines] == TYPED
            probabilities.append([line["probabilities"] for line in lines])
    assert probabilities[0] == probabilities[1]


def test_cells_are_written_as_they_were_read(tmp_path: Path) -> None:
    """A lone \\r, which ends a row of CSV outside quotes, all digits of numbers, nulls and lists."""
    cells: dict[str, list[Any]] = {
        "text": ["a\rb", 'c "d", e\nf', ""], "score": [0.1234567890123456, 1e-12, None], "id": [2**60 + 1, None, 0],
        "tags": [["很", "y"], [], None], "prediction": ["p", None, "r"]}  # fmt: skip
    for name in ("out.csv", "out.tsv", "out.jsonl"):
        write.write_rows(tmp_path / name, tmp_path / name, [pa.table(cells)])
    expected = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    assert lines_of(tmp_path / "out.jsonl") == expected
    written = {"score": ["0.1234567890123456", "1e-12", ""], "id": [str(2**60 + 1), "", "0"],
               "tags": ['["很", "y"]', "[]", ""], "prediction": ["p", "", "r"]}  # fmt: skip
    for name, delimiter in (("out.csv", ","), ("out.tsv", "\t")):
        with (tmp_path / name).open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file, delimiter=delimiter)
        assert dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)) == {
            **cells,
            **written,
        }


def test_a_row_in_two_parts_is_an_error(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out.csv", {})
    for start in (0, 4, 2):
        assert parts.missing(9) == {0: ["1 to 9"], 4: ["4 to 9"], 2: ["4 to 4", "8 to 9"]}[start]
        parts.write(start, {"prediction": ["x", "y", "z"]})
    refusal(parts.missing, 9, match=r"out.csv.parts holds row 3 twice: remove the folder")


def test_the_output_has_the_encoding_of_the_input(predicted: Predict, tmp_path: Path) -> None:
    rows = "".join(f"很好{row},{row}\n" for row in range(40))
    (tmp_path / "a.csv").write_text(f"text,评\n{rows}", encoding="gb18030")
    out = predicted("out.csv", "--encoding", "gb18030", source=tmp_path / "a.csv").read_text(
        encoding="gb18030"
    )
    assert [line.split(",")[:2] for line in out.splitlines()][:2] == [
        ["text", "评"],
        ["很好0", "0"],
    ]
    assert len(out.splitlines()) == 41
    (tmp_path / "b.csv").write_text("text\n很好\n", encoding="utf-8-sig")  # as Excel saves UTF-8
    assert (
        predicted("b_out.csv", source=tmp_path / "b.csv")
        .read_bytes()
        .startswith("\ufefftext,".encode())
    )
