"""docs/first-labels.md: the CSV files of its script; examples/first_steps.ipynb: every cell, in order."""

import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.runs import ROOT, lines_of, start

# replaces Jupyter's IPython.display
PLAIN = """
import subprocess, sys, types
sys.modules["IPython"], sys.modules["IPython.display"] = types.ModuleType("IPython"), types.ModuleType("display")
sys.modules["IPython.display"].HTML, sys.modules["IPython.display"].display = str, lambda page: print(page[:200])
"""


@pytest.mark.parametrize("page", ["first-labels.md", "first-labels.zh.md"])
def test_files_of_the_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    train, new = (pd.read_csv(name) for name in re.findall(r'to_csv\("(.*?)"', script))
    assert (len(train), len(new), train["label"].nunique()) == (2500, 500, 2)
    assert [*train.columns, *new.columns] == ["text", "label", "text"]


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))
    cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(lines) for lines in cells)
    shell = r"subprocess.run(f'''\1''', shell=True, check=True)"
    code = re.sub(r"^!(.+)$", shell, code, flags=re.MULTILINE)
    (tmp_path / "run.py").write_text(PLAIN + code)
    env = {"PYTHONPATH": str(ROOT)}
    # 86 steps of MiniLM in fp32, where no bf16 is fast
    done = start([sys.executable, "run.py"], 1100, env, cwd=tmp_path).succeeded()
    assert "<iframe srcdoc=" in done.out
    assert "'prediction': 'pos'" in done.out
    folder = tmp_path / "first_steps"
    assert len((folder / "new.predictions.csv").read_text().splitlines()) == 5
    assert lines_of(folder / "runs" / "reviews" / "eval.jsonl")[-1]["accuracy"] > 0.65
