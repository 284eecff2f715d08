"""docs/migrating.md: its scripts run, and have the faults that it describes."""

import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.runs import ROOT, Finished, fork, free_port, lines_of, train

VALIDATION = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, reviews: Path) -> Path:
    """The scripts of the page, and reviews for them, with an odd number of validation rows."""
    folder = tmp_path_factory.mktemp("migrating")
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"<!-- file: (\w+\.py) -->\n```python\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")
    rows = pd.read_csv(reviews)
    rows[VALIDATION:].to_csv(folder / "train.csv", index=False)
    rows[:VALIDATION].to_csv(folder / "valid.csv", index=False)
    return folder


def run(folder: Path, *words: str | Path) -> Finished:
    with fork(words, cwd=folder) as process:
        return process.finish(240).succeeded()


def test_the_usual_script_counts_a_sample_twice(folder: Path, tiny_model: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    words = [torchrun, "--nproc_per_node", "2", "--master_port", str(free_port()), "old_ddp.py"]
    old = run(folder, *words, tiny_model, "train.csv", "valid.csv")
    assert f"of {VALIDATION + 1} samples" in old.out
    run(folder, "to_folder.py", tiny_model, "carried")
    train("--train_file", folder / "train.csv", "--validation_file", folder / "valid.csv", "--max_steps", 1,
          "--model_name_or_path", folder / "carried", "--output_dir", folder / "run",
          "--config_file", "accelerate_configs/ddp.yaml", "--report_to", "none")  # fmt: skip
    assert lines_of(folder / "run" / "eval.jsonl")[-1]["num_samples"] == VALIDATION
