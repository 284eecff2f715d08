"""docs/migrating.md: its scripts run, and have the faults that it describes."""

import dataclasses
import re
import sys
from inspect import signature
from pathlib import Path

import pandas as pd
import pytest
from transformers import Trainer, TrainingArguments

from tests.runs import ROOT, Finished, fork, free_port, lines_of, start, train
from toolkit.config import TaskSettings, sections_of

PAGES = [ROOT / "docs" / "migrating.md", ROOT / "docs" / "migrating.zh.md"]
VALIDATION = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, reviews: Path) -> Path:
    """The scripts of the page, and reviews for them, with an odd number of validation rows."""
    folder = tmp_path_factory.mktemp("migrating")
    page = PAGES[0].read_text(encoding="utf-8")
    for name, text in re.findall(r"<!-- file: (\w+\.py) -->\n```python\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")
    rows = pd.read_csv(reviews)
    rows[VALIDATION:].to_csv(folder / "train.csv", index=False)
    rows[:VALIDATION].to_csv(folder / "valid.csv", index=False)
    return folder


def run(folder: Path, *words: str | Path) -> Finished:
    with fork(words, cwd=folder) as process:
        return process.finish(240).succeeded()


def first_columns(page: Path, title: str) -> list[list[set[str]]]:
    """The names in each cell of each row (without values) of the table whose first heading is `title`."""
    rows = (
        page.read_text(encoding="utf-8")
        .partition(f"\n| {title} |")[2]
        .partition("\n\n")[0]
        .splitlines()[2:]
    )
    assert rows
    return [
        [set(re.findall(r"`(\w+)[^`]*`", cell)) for cell in row.strip("| ").split(" | ")]
        for row in rows
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_trainer_is_in_the_installed_version(page: Path) -> None:
    """If this fails, update the table to the installed transformers."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = {
        name
        for section in sections_of(TaskSettings).values()
        for name in section.__dataclass_fields__
    }
    rows = first_columns(page, "`TrainingArguments`")
    assert set().union(*(row[0] for row in rows)) <= names
    same = next(row for row in rows if not row[1] and len(row[0]) > 5)  # "the same names"
    assert same[0] <= ours
    assert set().union(*(row[0] for row in first_columns(page, "`Trainer`"))) <= set(
        signature(Trainer).parameters
    )
    for removed, now, *_ in first_columns(page, "removed" if page == PAGES[0] else "已去掉的"):
        assert removed
        assert not removed & names
        assert now <= names


@pytest.mark.multiprocess
def test_the_usual_script_counts_a_sample_twice_and_the_recipe_does_not(
    folder: Path, tiny_model: Path
) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    words = [torchrun, "--nproc_per_node", "2", "--master_port", str(free_port()), "old_ddp.py"]
    old = run(folder, *words, tiny_model, "train.csv", "valid.csv")
    assert f"of {VALIDATION + 1} samples" in old.out
    run(folder, "to_folder.py", tiny_model, "carried")
    train("--train_file", folder / "train.csv", "--validation_file", folder / "valid.csv", "--max_steps", 1,
          "--model_name_or_path", folder / "carried", "--output_dir", folder / "run",
          "--config_file", "accelerate_configs/ddp.yaml", "--report_to", "none")  # fmt: skip
    assert lines_of(folder / "run" / "eval.jsonl")[-1]["num_samples"] == VALIDATION


@pytest.mark.slow
@pytest.mark.multiprocess
def test_mp_spawn(folder: Path, tiny_model: Path) -> None:
    ended = start(
        [sys.executable, "old_spawn.py", tiny_model, "train.csv", "valid.csv"], cwd=folder
    )
    assert f"of {VALIDATION + 1} samples" in ended.succeeded().out


def test_trainer_multiplies_the_gradient_by_the_accumulation_steps(folder: Path) -> None:
    """If this fails, transformers has fixed it: update the page."""
    output = run(folder, "old_trainer.py").out
    losses = [float(loss) for loss in re.findall(r"accumulation steps: loss ([\d.]+)", output)]
    assert losses == pytest.approx([losses[0], 2 * losses[0], 4 * losses[0]], rel=1e-2)
    assert losses[0] == pytest.approx(0.69, abs=0.02)
