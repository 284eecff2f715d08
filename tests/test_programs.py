"""The programs of the docs run, and give what the pages say: docs/migrating.md, data.md (Questions
often asked), run-folder.md, first-labels.md; every cell of examples/first_steps.ipynb."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import toolkit
from tests import inputs
from tests.report.made import classifier
from tests.runs import ROOT, WAYS, fork, free_port, lines_of, start, train
from toolkit.data.labels import Labels

VALIDATION = 101


def page_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def program_of(page: str) -> str:
    """The page's only one."""
    (program,) = re.findall(r"```python\n(.*?)```", page_of(page), re.DOTALL)
    return str(program)


def test_the_usual_script_counts_a_sample_twice(tmp_path: Path) -> None:
    """It splits an odd number of validation rows over two processes; the recipe does not."""
    programs = r"<!-- file: (\w+\.py) -->\n```python\n(.*?)```"
    for name, text in re.findall(programs, page_of("migrating.md"), re.DOTALL):
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


def test_pytorch_model_bin_is_made_and_read(sharp_model: Path, tmp_path: Path) -> None:
    labels = Labels("single_label_classification", ("neg", "pos"), ("label",))
    folder, texts = tmp_path / "model", ["a good film", "bad"]
    classifier(sharp_model, folder, labels)
    expected = toolkit.predict(folder, texts)
    exec(program_of("data.md").replace("runs/NAME/model", str(folder)), {})
    (folder / "model.safetensors").unlink()
    assert toolkit.predict(folder, texts) == expected
    toolkit.convert(folder, tmp_path / "converted")
    assert (tmp_path / "converted" / "model.safetensors").is_file()
    shutil.rmtree(folder)
    assert toolkit.predict(tmp_path / "converted", texts) == expected


def test_what_words_add_to_an_answer_adds_up(
    sharp_model: Path, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("captum")
    labels = Labels("single_label_classification", ("a", "b"), ("label",))
    folder = classifier(sharp_model, tmp_path / "model", labels)
    script = tmp_path / "script.py"
    program = program_of("run-folder.md").replace("runs/NAME/model", str(folder))
    script.write_text(program, encoding="utf-8")
    names = runpy.run_path(str(script))
    margins = [names["margin"](names[ids]).item() for ids in ("ids", "padding")]
    difference = margins[0] - margins[1]
    assert abs(difference) > 0.01
    assert names["values"].sum().item() == pytest.approx(difference, rel=2e-2, abs=2e-3)
    assert len(capsys.readouterr().out.splitlines()) == names["ids"].shape[1]


@pytest.mark.parametrize("page", ["first-labels.md", "first-labels.zh.md"])
def test_files_for_first_labels(page: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    exec(program_of(page), {})
    files = re.findall(r'to_csv\("(.*?)"', program_of(page))
    train, new = (pd.read_csv(name) for name in files)
    assert (len(train), len(new), train["label"].nunique()) == (2500, 500, 2)
    assert [*train.columns, *new.columns] == ["text", "label", "text"]


# replaces Jupyter's IPython.display
PLAIN = """
import subprocess, sys, types
sys.modules["IPython"], sys.modules["IPython.display"] = types.ModuleType("IPython"), types.ModuleType("display")
sys.modules["IPython.display"].HTML, sys.modules["IPython.display"].display = str, lambda page: print(page[:200])
"""


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
