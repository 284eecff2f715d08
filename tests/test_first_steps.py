"""docs/first-labels.md: the CSV files of its script; examples/first_steps.ipynb: every cell, in order."""

import json
import os
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.runs import ROOT, lines_of, start

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
# replaces Jupyter's IPython.display
PLAIN = """
import subprocess, sys, types
sys.modules["IPython"], sys.modules["IPython.display"] = types.ModuleType("IPython"), types.ModuleType("display")
sys.modules["IPython.display"].HTML, sys.modules["IPython.display"].display = str, lambda page: print(page[:200])
"""


@pytest.mark.parametrize("page", ["first-labels.md", "first-labels.zh.md"])
def test_the_script_writes_the_files_of_the_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    train, new = (pd.read_csv(name) for name in re.findall(r'to_csv\("(.*?)"', script))
    assert (len(train), len(new)) == (2500, 500)
    assert train["label"].nunique() == 2
    assert "".join(train.columns) + "".join(new.columns) == "textlabeltext"
    for line in re.findall(r"^\$ head.*\n((?:.+\n)+)", text, re.MULTILINE)[:1]:
        assert line.splitlines()[1].rpartition(",")[0] == train["text"][0]


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    env = {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    cells = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    code = re.sub(
        r"^!(.+)$", r"subprocess.run(f'''\1''', shell=True, check=True)", code, flags=re.MULTILINE
    )
    (tmp_path / "run.py").write_text(PLAIN + code)
    command = ["bash", "-c", f"cd {tmp_path} && exec {sys.executable} run.py"]
    done = start(
        command, seconds=1100, env=env
    ).succeeded()  # 86 steps of MiniLM in fp32, where no bf16 is fast
    assert "<iframe srcdoc=" in done.out
    assert "'prediction': 'pos'" in done.out
    assert len((tmp_path / "first_steps" / "new.predictions.csv").read_text().splitlines()) == 5
    assert (
        lines_of(tmp_path / "first_steps" / "runs" / "reviews" / "eval.jsonl")[-1]["accuracy"]
        > 0.65
    )
