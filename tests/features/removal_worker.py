"""Runs recipes/cls.py and commands with copies of the package that lack a feature.

    python tests/features/removal_worker.py TINY_MODEL TRAIN_FILE COPY ...

COPY is a folder with `toolkit/` and `recipes/`. Each runs in a fork, after the libraries have been imported. Writes its
output to COPY/printed and its exit code to COPY/code.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import traceback
from pathlib import Path


def call(main: str, *arguments: object) -> None:
    """Runs a command line in this process."""
    sys.argv = [main, *map(str, arguments)]
    module = importlib.import_module(main)
    if main.startswith("recipes."):
        module.main()
    else:
        module._run(module.commands())


def use(copy: Path, model: str, train_file: str) -> None:
    """Trains, resumes from a checkpoint, evaluates, and writes the report again."""
    sys.path.insert(0, str(copy))
    import toolkit

    assert Path(toolkit.__file__).parent == copy / "toolkit"
    assert not [name for name in sys.modules if name.startswith("toolkit.features")]
    settings = ["--model_name_or_path", model, "--train_file", train_file, "--max_steps", 4, "--checkpoint_every", 2]
    settings += ["--report_to", "none", "--global_batch_size", 8, "--max_length", 16, "--output_dir", copy / "run"]
    has_mistakes = (copy / "toolkit" / "features" / "mistakes").is_dir()
    settings += ["--mistakes", 3] * has_mistakes
    call("recipes.cls", *settings)
    run = copy / "run"
    uninterrupted = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "report.html").unlink()
    call("recipes.cls", *settings)
    assert json.loads((run / "config.json").read_text())["resumed_from"].endswith("step-00000002")
    losses = [[json.loads(line)["loss"] for line in text.splitlines()]
              for text in (uninterrupted, (run / "metrics.jsonl").read_text())]  # fmt: skip
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert (run / "report.html").is_file()
    assert (run / "model" / "README.md").is_file()
    (run / "report.html").unlink()
    call("toolkit.cli", "report", run)
    assert (run / "report.html").is_file()
    assert "accuracy" in json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    saved = importlib.import_module("toolkit.api").predict(run / "model", ["good film"])
    assert set(saved[0]) == {"prediction", "probabilities"}
    if has_mistakes:
        call("toolkit.cli", "mistakes", run)
        assert len((run / "mistakes.jsonl").read_text().splitlines()) == 3
        assert "Mistakes by class" in (run / "report.html").read_text()


def main() -> None:
    model, train_file, *copies = sys.argv[1:]
    for name in ("torch", "transformers", "datasets", "accelerate", "pandas", "sklearn.metrics", "pydantic", "scipy",
                 "matplotlib.pyplot", "jinja2", "peft", "tqdm", "transformers.models.bert.modeling_bert",
                 "transformers.models.auto.modeling_auto", "sklearn.linear_model"):  # fmt: skip
        importlib.import_module(name)
    failed = False
    for copy in map(Path, copies):
        if not (child := os.fork()):
            file = os.open(copy / "printed", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ["TOOLKIT_CACHE"] = str(copy / "cache")
            try:
                use(copy, model, train_file)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (copy / "code").write_text(str(code))
        failed |= code != 0
    sys.exit(failed)


if __name__ == "__main__":
    sys.path.pop(0)
    main()
