"""Whole jobs: every kind of label, the best model kept and loaded again, prediction of files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pandas as pd
import pytest

from tests.runs import WAYS, lines_of, recipe, start

WORDS = ("good", "bad", "film", "book", "very", "room", "dull", "fine", "price", "story")
FEW = ["--max_steps", "4", "--global_batch_size", "12", "--per_device_batch_size", "5", "--report_to", "none"]


def write_rows(path: Path, kind: str, count: int = 61) -> Path:
    """Short texts of uneven length; labels that follow from the words."""
    generator = random.Random(5)
    rows = []
    for _ in range(count):
        words = generator.choices(WORDS, k=generator.randint(1, 25))
        label: object = {
            "six classes": f"class {len(words) % 6 * 2}",
            "multi-label": sorted({word for word in words if word in ("good", "bad", "dull")}),
            "regression": len(words) / 10,
        }[kind]
        rows.append({"text": " ".join(words), "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


EXPECTED = {
    "six classes": {"accuracy", "f1_macro", "f1_micro", "f1_weighted", "per_class", "confusion_matrix"},
    "multi-label": {"accuracy", "f1_macro", "f1_micro", "f1_weighted", "per_class"},
    "regression": {"mse", "mae", "pearson"},
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", EXPECTED)
def test_every_kind_of_label(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    data, run = write_rows(tmp_path / "rows.jsonl", kind), tmp_path / "run"
    held_back = write_rows(tmp_path / "test.jsonl", kind, 23)
    arguments = ["--train_file", data, "--test_file", held_back, "--model_name_or_path", tiny_model]
    finished = recipe(*WAYS["ddp x2"], *arguments, *FEW, "--output_dir", run)
    assert finished.code == 0, finished.err[-3000:]
    last = lines_of(run / "eval.jsonl")[-1]
    assert set(last) == {"step", "split", "num_samples", "loss"} | EXPECTED[kind]
    assert (last["split"], last["num_samples"]) == ("test", 23)
    lines = lines_of(run / "predictions.jsonl")
    assert [line["id"] for line in lines] == list(range(23))
    truth = [json.loads(line)["label"] for line in held_back.read_text().splitlines()]
    assert [line["label"] for line in lines] == (pytest.approx(truth) if kind == "regression" else truth)
    labels = json.loads((run / "config.json").read_text())["data"]["labels"]
    if kind == "six classes":
        assert labels == [f"class {number}" for number in (0, 2, 4, 6, 8, 10)]
    for name in ("config.json", "metrics.jsonl", "report.html", "model/config.json", "model/README.md"):
        assert (run / name).stat().st_size > 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", "zero2 x2", "zero3 x2"])
def test_the_best_model_is_kept_and_evaluated_again(way: str, tmp_path: Path, tiny_model: Path) -> None:
    """Training goes on after the best evaluation; what is left is the best, and its numbers are its own."""
    data, run = write_rows(tmp_path / "rows.jsonl", "six classes"), tmp_path / "run"
    settings = ["--metric_for_best_model", "f1_macro", "--early_stopping_patience", "3", "--eval_every", "1"]
    settings += ["--learning_rate", "0.05", "--dropout", "0", "--max_steps", "40"]
    arguments = ["--train_file", data, "--model_name_or_path", tiny_model, "--output_dir", run]
    finished = recipe(*WAYS[way], *arguments, *FEW[2:], *settings)
    assert finished.code == 0, finished.err[-3000:]
    *during, last = lines_of(run / "eval.jsonl")
    best = max(during, key=lambda line: line["f1_macro"])
    assert len(during) < 40
    assert "stopping early" in finished.err
    assert during[-1]["step"] == best["step"] + 3
    assert last["step"] == best["step"]
    assert last["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert last["loss"] != pytest.approx(during[-1]["loss"], rel=1e-3)
    assert last["confusion_matrix"] == best["confusion_matrix"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    data = write_rows(folder / "rows.jsonl", "six classes")
    finished = recipe("--train_file", data, "--model_name_or_path", tiny_model, *FEW, "--output_dir", folder / "run")
    assert finished.code == 0, finished.err[-3000:]
    return folder / "run" / "model"


def write_table(path: Path, rows: int) -> pd.DataFrame:
    generator = random.Random(9)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 20))) for _ in range(rows)]
    frame = pd.DataFrame({"number": [f"{row:03d}" for row in range(rows)], "text": texts, "价格": ["0.10"] * rows})
    frame.to_csv(path, index=False)
    return frame


@pytest.mark.multiprocess
def test_predict_keeps_rows_order_and_columns(trained: Path, tmp_path: Path) -> None:
    """37 rows over 2 and 3 processes and batches of 4: what one process says, in the file's order."""
    frame = write_table(tmp_path / "new.csv", 37)
    outputs = {}
    for name, way in {"single": [], "ddp": WAYS["ddp x3"], "zero": WAYS["zero3 x2"]}.items():
        outputs[name] = tmp_path / f"{name}.csv"
        arguments = [str(trained), str(tmp_path / "new.csv"), "--output", str(outputs[name])]
        finished = start(["toolkit", "predict", *arguments, "--per_device_batch_size", "4", *way])
        assert finished.code == 0, finished.err[-3000:]
    tables = {name: pd.read_csv(path, dtype={"number": str, "价格": str}) for name, path in outputs.items()}
    for table in tables.values():
        assert table[["number", "text", "价格"]].equals(frame)
        assert table["prediction"].equals(tables["single"]["prediction"])
        chances = table.filter(like="probability_")
        assert chances.shape == (37, 6)
        assert chances.sum(axis=1).to_list() == pytest.approx([1.0] * 37, abs=1e-5)
        assert chances.to_numpy() == pytest.approx(tables["single"].filter(like="probability_").to_numpy(), abs=2e-6)


def test_predict_overwrites_nothing(trained: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "new.csv", 3)
    command = ["toolkit", "predict", trained, tmp_path / "new.csv"]
    assert start(command).code == 0
    before = (tmp_path / "new.predictions.csv").read_bytes()
    again = start(command)
    assert again.code == 1
    assert "--overwrite" in again.error_lines[0]
    assert (tmp_path / "new.predictions.csv").read_bytes() == before


def test_predict_refuses_a_model_without_a_trained_head(tiny_model: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "new.csv", 3)
    finished = start(["toolkit", "predict", tiny_model, tmp_path / "new.csv"])
    assert finished.code == 1
    assert "no trained classification head" in finished.error_lines[0]


def test_prepare_makes_what_the_recipe_takes(tmp_path: Path, tiny_model: Path) -> None:
    data, cache = write_rows(tmp_path / "rows.jsonl", "six classes"), {"TOOLKIT_CACHE": str(tmp_path / "cache")}
    arguments = ["--train_file", str(data), "--model_name_or_path", str(tiny_model)]
    prepared = start(["toolkit", "prepare", *arguments], env=cache)
    assert prepared.code == 0, prepared.err
    assert "train: 55 samples" in prepared.out
    (folder,) = [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]
    before = folder.stat().st_mtime_ns
    assert recipe(*arguments, *FEW, "--output_dir", tmp_path / "run", env=cache).code == 0
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]
    assert folder.stat().st_mtime_ns == before


def test_report_writes_the_page_again(trained: Path) -> None:
    page = trained.parent / "report.html"
    page.unlink()
    assert start(["toolkit", "report", trained.parent]).code == 0
    assert page.stat().st_size > 10_000


def test_help_imports_no_torch() -> None:
    finished = start(["toolkit", "--help"], seconds=30)
    assert finished.code == 0
    assert "predict" in finished.out


@pytest.mark.multiprocess
def test_the_literal_command_runs_the_demo(tmp_path: Path) -> None:
    """Real weights, real reviews, two processes; the first steps of it."""
    words = ["accelerate", "launch", "recipes/cls.py", "--config_file", "accelerate_configs/ddp.yaml"]
    finished = start([*words, "--max_steps", "3", "--output_dir", tmp_path / "run"])
    assert finished.code == 0, finished.err[-3000:]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["world"]["num_processes"] == 2
    assert config["data"]["samples"] == {"train": 7677, "validation": 853}
