"""A process that trains several models (`--folds`) frees each before the next."""

from pathlib import Path

import pytest

from tests.runs import recipe

SCRIPT = """
import gc
from toolkit import launch
launch.start(__name__)
from recipes import cls

def count(name):
    return sum(type(each).__name__ == name for each in gc.get_objects())

trained = []

def main():
    if not trained:
        trained.append(True)
        cls.main()
        launch.request_rerun()
        return
    gc.collect()
    print("models", count("BertForSequenceClassification"), flush=True)

if __name__ == "__main__":
    launch.run(main)
"""


@pytest.mark.parametrize("name", ["single", "zero1", "zero2"])
def test_a_model_is_freed(name: str, tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = ["--config_file", f"accelerate_configs/{name}.yaml", "--num_processes", 1, "--model_name_or_path",
             tiny_model, "--train_file", reviews, "--max_steps", 2, "--eval_every", 2, "--report_to", "none",
             "--mixed_precision", "no", "--output_dir", tmp_path / "run"]  # fmt: skip
    done = recipe(*words, script=script).succeeded()
    assert "models 0" in done.out
