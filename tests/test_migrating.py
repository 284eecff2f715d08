"""docs/migrating.md: its scripts run, and have the faults that it describes."""

import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from tests import inputs
from tests.runs import ROOT, WAYS, fork, free_port, lines_of, train

VALIDATION = 101


def test_the_usual_script_counts_a_sample_twice(tmp_path: Path) -> None:
    """It splits an odd number of validation rows over two processes; the recipe does not."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"<!-- file: (\w+\.py) -->\n```python\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    rows = pd.read_csv(inputs.reviews())
    rows[VALIDATION:].to_csv(tmp_path / "train.csv", index=False)
    rows[:VALIDATION].to_csv(tmp_path / "valid.csv", index=False)

    def run(*words: Any) -> str:
        with fork(words, cwd=tmp_path) as process:
            return process.finish(240).succeeded().out

    torchrun = Path(sys.executable).with_name("torchrun")
    words = [torchrun, "--nproc_per_node", 2, "--master_port", free_port(), "old_ddp.py"]
    printed = run(*words, inputs.tiny_model, "train.csv", "valid.csv")
    assert f"of {VALIDATION + 1} samples" in printed
    run("to_folder.py", inputs.tiny_model, "carried")
    files = ["--train_file", tmp_path / "train.csv", "--validation_file", tmp_path / "valid.csv"]
    folders = ["--model_name_or_path", tmp_path / "carried", "--output_dir", tmp_path / "run"]
    train(*files, *folders, "--max_steps", 1, "--report_to", "none", *WAYS["ddp x2"])
    assert lines_of(tmp_path / "run" / "eval.jsonl")[-1]["num_samples"] == VALIDATION
