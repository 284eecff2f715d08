"""Runs recipes/cls.py and commands with a copy of the package that lacks features, or has one more.

    python tests/features/removal_worker.py COPY TINY_MODEL TRAIN_FILE

COPY is a folder with `toolkit/` and `recipes/`. Trains, resumes from a checkpoint, evaluates, predicts, and writes the
report again.
"""

import importlib
import json
import shutil
import sys
from pathlib import Path


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
    settings = ["--model_name_or_path", model, "--train_file", train_file, "--max_steps", 4, "--checkpoint_every", 2,
                "--report_to", "none", "--global_batch_size", 8, "--max_length", 16, "--output_dir", run]  # fmt: skip
    if (copy / "toolkit" / "features" / "mistakes").is_dir():
        settings += ["--mistakes", 3]
    call("recipes.cls", *settings)
    uninterrupted = (run / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    call("recipes.cls", *settings)
    assert Path(sys.modules["toolkit"].__file__ or "").parent == copy / "toolkit"
    assert json.loads((run / "config.json").read_text())["resumed_from"].endswith("step-00000002")
    resumed = (run / "metrics.jsonl").read_text().splitlines()
    for line, expected in zip(resumed, uninterrupted, strict=True):
        assert json.loads(line)["loss"] == json.loads(expected)["loss"]
    assert len(resumed) == 4
    assert (run / "model" / "README.md").is_file()
    (run / "report.html").unlink()
    call("toolkit.cli", "report", run)
    assert (run / "report.html").is_file()
    assert "accuracy" in json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    saved = importlib.import_module("toolkit.api").predict(run / "model", ["good film"])
    assert set(saved[0]) == {"prediction", "probabilities"}
    if "--mistakes" in settings:
        call("toolkit.cli", "mistakes", run)
        assert len((run / "mistakes.jsonl").read_text().splitlines()) == 3
        assert "Mistakes by class" in (run / "report.html").read_text()


if __name__ == "__main__":
    main()
