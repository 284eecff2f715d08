"""Without any feature recipes/cls.py trains, resumes, evaluates and reports; with one more, too:
`main`, with a folder that has copies of `toolkit/` and `recipes/`, a model and a file."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

LIBRARIES = ("torch", "transformers", "datasets", "accelerate", "pandas", "sklearn.metrics", "pydantic", "scipy",
             "matplotlib.pyplot", "jinja2", "peft", "tqdm", "transformers.models.bert.modeling_bert",
             "transformers.models.auto.modeling_auto", "sklearn.linear_model")  # fmt: skip


@pytest.mark.parametrize("name", ["all", "mistakes"])
def test_the_core_without_it(name: str, tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    """`all`: without any feature; `mistakes`: with the one that docs/your-own-feature.md adds."""
    from tests.runs import ROOT, recipe

    for part in ("toolkit", "recipes"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "toolkit" / "features"
    if name == "mistakes":
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        page = (ROOT / "docs" / "your-own-feature.md").read_text(encoding="utf-8")
        code = page.split("```python\n")[1].split("```")[0]
        (folder / name / "feature.py").write_text(code, encoding="utf-8")
    else:
        for feature in filter(Path.is_dir, folder.iterdir()):
            shutil.rmtree(feature)
    recipe(tmp_path, tiny_model, reviews, script=__file__, pages=True, imported=LIBRARIES,
           env={"TOOLKIT_CACHE": str(tmp_path / "cache")}).succeeded()  # fmt: skip


def call(main: str, *arguments: object) -> None:
    """Runs a command line in this process."""
    sys.argv = [main, *map(str, arguments)]
    module = importlib.import_module(main)
    if main.startswith("recipes."):
        module.main()
    else:
        module._run(module.commands())


def main() -> None:
    copy, model, train_file = map(Path, sys.argv[1:])
    sys.path.insert(0, str(copy))
    run = copy / "run"
    words = "--max_steps 4 --checkpoint_every 2 --report_to none --max_length 16"
    settings = ["--model_name_or_path", model, "--train_file", train_file, "--output_dir", run]
    has_mistakes = (copy / "toolkit" / "features" / "mistakes").is_dir()
    settings += ["--global_batch_size", 8, *words.split(), *["--mistakes", 3] * has_mistakes]
    call("recipes.cls", *settings)
    uninterrupted = (run / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    call("recipes.cls", *settings)
    assert Path(sys.modules["toolkit"].__file__ or "").parent == copy / "toolkit"
    assert json.loads((run / "config.json").read_text())["resumed_from"].endswith("step-00000002")
    resumed = (run / "metrics.jsonl").read_text().splitlines()
    losses = [[json.loads(line)["loss"] for line in lines] for lines in (resumed, uninterrupted)]
    assert losses[0] == losses[1]
    assert len(resumed) == 4
    assert (run / "model" / "README.md").is_file()
    (run / "report.html").unlink()
    call("toolkit.cli", "report", run)
    assert ("Mistakes by class" in (run / "report.html").read_text()) == has_mistakes
    assert "accuracy" in json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    saved = importlib.import_module("toolkit.api").predict(run / "model", ["good film"])
    assert set(saved[0]) == {"prediction", "probabilities"}
    if has_mistakes:
        call("toolkit.cli", "mistakes", run)
        assert len((run / "mistakes.jsonl").read_text().splitlines()) == 3


if __name__ == "__main__":
    main()
