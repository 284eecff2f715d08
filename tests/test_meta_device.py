"""Steps leave no tensor on the CPU and do not synchronize: checked on torch's `meta` device, without a GPU."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests.meta_worker import DEVICE, Crossings
from tests.report.made import classifier
from tests.runs import recipe
from toolkit.data.labels import Labels

# each kind of micro-batch: a run's first, a step's last, those of a later step
COMMON = ["--text_column", "text", "--report_to", "none", "--max_steps", 2, "--eval_every", 2, "--logging_steps", 2,
          "--global_batch_size", 5, "--per_device_batch_size", 3]  # fmt: skip
META = ["--mixed_precision", "no", "--optimizer_args", "fused=False"]  # `meta` supports neither
CLASSES = ["--label_column", "label"]
TAGS = "--label_column tags --label_separator |".split()
NUMBERS = ["--label_column", "length", "--problem_type", "regression"]
BOTH = ["--r_drop_alpha", 1, "--fgm_epsilon", 0.5]
CLS: dict[str, list[Any]] = {
    "plain": CLASSES,
    "regularized": [*CLASSES, *BOTH, "--ema_decay", 0.9],
    "lora": [*CLASSES, *BOTH, "--lora_r", 2, "--gradient_checkpointing"],
    "class weights": [*CLASSES, *"--class_weights balanced --loss focal --sampling sqrt".split()],
    "pos_weight": [*TAGS, *BOTH, "--pos_weight", "balanced", "--loss", "focal"],
    "numbers": [*NUMBERS, "--fgm_epsilon", 0.5],
    "teacher": [*CLASSES, "--teacher", "TEACHER"],
    "padding free": [*CLASSES, *BOTH, "--padding_free"],
    "layers": [*CLASSES, "--freeze_layers", 1, "--layerwise_lr_decay", 0.9, "--max_grad_norm", 0],
}
LONG = [*CLASSES, "--max_length", 1536]
BIGBIRD: dict[str, list[Any]] = {
    "gathered": [*LONG, "--attn_implementation", "gathered"],
    "flex": [*LONG, "--attn_implementation", "flex"],
    "full": [*LONG, "--attn_implementation", "full"],
    "regularized": [*LONG, *BOTH, "--ema_decay", 0.9, "--gradient_checkpointing"],
    "lora": [*LONG, "--lora_r", 2],
}
TITLE: dict[str, list[Any]] = {
    "plain": [],
    "averaged": ["--ema_decay", 0.9, "--gradient_checkpointing"],
}
PRETRAIN: dict[str, list[Any]] = {"new head": ["--new_head", "true", "--whole_word_mask", "true"]}
RECIPES = {"cls": CLS, "bigbird": BIGBIRD, "title": TITLE, "pretrain": PRETRAIN}
JOBS = {
    f"{name} {job}": (name, words) for name, jobs in RECIPES.items() for job, words in jobs.items()
}
CLEAN = {"error": "", "computing": [], "evaluating": []}


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, reviews: Path, long_reviews: Path, articles: Path
) -> dict[str, Path]:
    """The data of each recipe."""
    table, path = pd.read_csv(reviews), tmp_path_factory.mktemp("rows") / "rows.csv"
    table["tags"] = table["label"] + table["text"].str.contains("film").map(
        {True: "|film", False: ""}
    )
    table["length"] = table["text"].str.len() / 100
    table.to_csv(path, index=False)
    return {"cls": path, "bigbird": long_reviews, "title": articles, "pretrain": path}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    labels = Labels("single_label_classification", ("neg", "pos"), ("label",))
    return classifier(tiny_model, tmp_path_factory.mktemp("teacher") / "model", labels)


def trace(
    folder: Path, files: Mapping[str, Path], jobs: Mapping[str, tuple[str, Path, list[Any]]],
    worker: str = "tests/meta_worker.py", seconds: float = 500,
) -> dict[str, Any]:  # fmt: skip
    """jobs: name -> (recipe, model, words). Returns the notes of the worker by name."""
    commands = {
        job: [f"recipes.{name}", "--model_name_or_path", model, "--train_file", files[name], *COMMON, *words,
              "--output_dir", folder / job]
        for job, (name, model, words) in jobs.items()
    }  # fmt: skip
    (folder / "jobs.json").write_text(json.dumps(commands, default=str), encoding="utf-8")
    recipe(folder / "jobs.json", folder / "notes.json", script=worker, seconds=seconds).succeeded()
    notes: dict[str, Any] = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    return notes


@pytest.fixture(scope="module")
def notes(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    files: dict[str, Path],
    teacher: Path,
) -> dict[str, Any]:
    jobs = {
        job: (name, tiny_model, META + [teacher if word == "TEACHER" else word for word in words])
        for job, (name, words) in JOBS.items()
    }
    return trace(tmp_path_factory.mktemp("meta"), files, jobs)


@pytest.mark.parametrize("job", JOBS)
def test_a_step_and_an_evaluation_stay_on_the_device(job: str, notes: dict[str, Any]) -> None:
    assert notes[job] == CLEAN, notes[job]["error"]


@pytest.mark.parametrize(
    "compute",
    [lambda x: x.new_tensor([1.0, 2.0]), lambda x: torch.tensor([1.0, 2.0], device=DEVICE),
     lambda x: torch.tensor([1.0, 2.0]).to(DEVICE), lambda x: x[torch.tensor([0])],
     lambda x: torch.zeros_like(x).copy_(torch.tensor([1.0, 2.0]))],
)  # fmt: skip
def test_copies_from_the_cpu_are_noted(compute: Callable[[torch.Tensor], Any]) -> None:
    with Crossings() as crossings:
        compute(torch.ones(2, device=DEVICE))
    assert crossings.notes["computing"]
