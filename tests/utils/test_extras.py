"""Without its extras the toolkit trains, saves and converts, and names the extra where one is needed."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import inputs
from tests.runs import CLASSIFIER, ROOT, Finished, fork, words_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMED = [extra for extra in EXTRAS if extra not in ("all", "dev", "docs")]
PACKAGES = [re.split("[^\\w-]", line)[0] for extra in NAMED for line in EXTRAS[extra]]
# extra (: package) -> a command that needs it
NEEDS = {
    "deepspeed": "recipes/cls.py {job} --config_file accelerate_configs/zero2.yaml",
    "titles": "recipes/title.py --train_file {reviews} --title_column label --model_name_or_path {model}",
    "demo: --model_name_or_path and --train_file": "recipes/cls.py --output_dir {out}",
    "titles: jieba": "recipes/cls.py {job} --tokenizer jieba",
    "sweep": "-m toolkit sweep recipes/cls.py --search learning_rate=1e-5,2e-5 --output_dir {out} {job}",
    "folds": "-m toolkit folds recipes/cls.py --folds 2 --output_dir {out} {job}",
    "openvino": "-m toolkit export {run}/model {out} --to openvino",
    "onnx": "-m toolkit export {run}/model {out} --to onnx",
}
# extra -> what a run does without it, in test_a_run_without_any_extra
DOES_WITHOUT = {"report", "tensorboard"}


def without_extras(*words: Any) -> Finished:
    """Runs a Python program that finds no package of any extra."""
    hidden = ",".join(name.replace("-", "_") for name in PACKAGES)
    path = f"{ROOT / 'tests' / 'without'}{os.pathsep}{ROOT}"
    early = {"PYTHONPATH": path, "TESTS_WITHOUT": hidden}
    with fork(words, imported=CLASSIFIER, early=early) as process:
        return process.finish(120)


JOB = ["--model_name_or_path", inputs.tiny_model, "--train_file", inputs.reviews, "--max_steps", 2]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: Any) -> tuple[Path, Finished]:
    folder = tmp_path_factory.mktemp("extras") / "run"
    words = [*JOB, "--checkpoint_every", 1, "--output_dir", folder]
    return folder, without_extras("recipes/cls.py", *words).succeeded()


def test_a_run_without_any_extra(run_folder: tuple[Path, Finished], tmp_path: Path) -> None:
    folder, finished = run_folder
    assert finished.err.count("finetune-toolkit[") == 1  # one line names what is missing
    assert not (folder / "tensorboard").exists()
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "eval.jsonl", "predictions.jsonl"} <= files
    assert (folder / "model" / "README.md").is_file()
    last = folder / "checkpoints" / "last"
    without_extras("-m", "toolkit", "convert", last, tmp_path / "out").succeeded()
    assert (tmp_path / "out" / "model.safetensors").is_file()
    # and each extra is tested, here or below
    assert {*NAMED} == {case.partition(":")[0] for case in NEEDS} | DOES_WITHOUT
    assert EXTRAS["all"] == [f"finetune-toolkit[{','.join(NAMED)}]".replace("demo,", "")]


@pytest.mark.parametrize("case", NEEDS)
def test_error_names_the_missing_extra(case: str, run_folder: Any, tmp_path: Path) -> None:
    values = {
        "job": " ".join(words_of(JOB)),
        "reviews": inputs.reviews(),
        "model": inputs.tiny_model(),
    }
    values |= {"run": run_folder[0], "out": tmp_path / "out"}
    extra, _, package = case.partition(": ")
    finished = without_extras(*NEEDS[case].format(**values).split())
    finished.says_in_one_line(f"'finetune-toolkit[{extra}]'", package)
    assert not (tmp_path / "out").exists()
