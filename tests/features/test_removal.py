"""Without any feature recipes/cls.py trains, resumes, evaluates and reports; with one more, too."""

import shutil
from pathlib import Path

import pytest

from tests.runs import ROOT, recipe

LIBRARIES = ("torch", "transformers", "datasets", "accelerate", "pandas", "sklearn.metrics", "pydantic", "scipy",
             "matplotlib.pyplot", "jinja2", "peft", "tqdm", "transformers.models.bert.modeling_bert",
             "transformers.models.auto.modeling_auto", "sklearn.linear_model")  # fmt: skip


@pytest.mark.parametrize("name", ["all", "mistakes"])
def test_the_core_without_it(name: str, tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    """`all`: without any feature; `mistakes`: with the one that docs/your-own-feature.md adds."""
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
    recipe(tmp_path, tiny_model, reviews, script="tests/features/removal_worker.py", pages=True, imported=LIBRARIES,
           env={"TOOLKIT_CACHE": str(tmp_path / "cache")}).succeeded()  # fmt: skip
