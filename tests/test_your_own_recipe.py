"""docs/your-own-recipe.md: each edit of recipes/cls.py runs, with equal losses under every launch."""

import functools
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

import toolkit
from tests.faults import refusal
from tests.jobs_worker import run_jobs
from tests.runs import ROOT, WAYS, lines_of, losses_of, start

PAGES = [ROOT / "docs" / "your-own-recipe.md", ROOT / "docs" / "your-own-recipe.zh.md"]
AGAIN = ("learned", "sgd", "own_model", "noise")  # stopped and resumed, too
# run -> (edit, its settings)
JOBS: dict[str, tuple[str, list[Any]]] = {
    "focal": ("focal", ["--gamma", 1.5, "--rare_weight", 2]),
    "learned with LoRA": ("learned", ["--lora_r", 4, "--ema_decay", 0.5]),
    "contrastive in fewer": ("contrastive", ["--per_device_batch_size", 22]),
    "metric": ("metric", ["--metric_for_best_model", "mcc"]),
    **{
        edit: (edit, [])
        for edit in ("entropy", "contrastive", "frozen", "schedule", "logged", *AGAIN)
    },
    **{f"{edit} again": (edit, []) for edit in AGAIN},
    "pair": ("", ["--text_pair", "second", "--model_name_or_path", "PAIRS"]),
}
# edits that replace the same lines; a loss whose parameters a frozen model does not have; a model without the layers or
# hidden states that another edit uses
APART = [{"focal", "learned"}, {"focal", "entropy"}, {"learned", "entropy"}, {"learned", "frozen"},
         {"contrastive", "own_model"}, {"frozen", "own_model"}]  # fmt: skip
_ORDER = (
    "focal",
    "learned",
    "entropy",
    "contrastive",
    "metric",
    "frozen",
    "sgd",
    "schedule",
    "own_model",
)
PAIRS: dict[str, tuple[str, list[Any]]] = {
    f"{one}, {other}": (f"{one}_and_{other}", [*JOBS[one][1], *JOBS[other][1]])
    for one, other in itertools.combinations(_ORDER, 2)
    if {one, other} not in APART
}
# its loss depends on micro-batches, which differ with the number of processes
DIFFERENT = ("contrastive in fewer",)
STEPS = 6
COMMON = ["--eval_every", 3, "--dropout", 0, "--mixed_precision", "no", "--report_to", "none",
          "--learning_rate", "5e-3", "--lr_scheduler_type", "constant", "--global_batch_size", 22,
          "--per_device_batch_size", 6, "--max_eval_samples", 21]  # fmt: skip
HALF = ["--max_steps", STEPS // 2, "--checkpoint_every", STEPS // 2]
SLOW_WAYS = [
    pytest.param(way, marks=(pytest.mark.slow, pytest.mark.multiprocess))
    for way in ("zero2 x2", "fsdp2 x2")
]


def assert_agree(run: Path, expected: Path) -> None:
    losses = losses_of(run)
    assert len(losses) == len(set(losses)) == STEPS
    assert losses == pytest.approx(losses_of(expected), rel=1e-5)
    mine, theirs = (lines_of(folder / "eval.jsonl") for folder in (run, expected))
    assert [line["loss"] for line in mine] == pytest.approx(
        [line["loss"] for line in theirs], rel=1e-5
    )


def edits_of(page: Path) -> dict[str, list[str]]:
    """Name -> its diffs."""
    _, *parts = re.split(r"<!-- edit: (\w+) -->", page.read_text(encoding="utf-8"))
    edits = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        edits[name] = re.findall(r"```diff\n(.*?)```", text.split("\n## ")[0], re.DOTALL)
    return edits


def edited(diffs: list[str]) -> str:
    """recipes/cls.py with these diffs applied; the lines they remove must occur once."""
    text = (ROOT / "recipes" / "cls.py").read_text(encoding="utf-8")
    for diff in diffs:
        lines = diff.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def test_both_languages_show_the_same_edits() -> None:
    english, chinese = map(edits_of, PAGES)
    assert english == chinese
    assert {edit for edit, _ in JOBS.values() if edit} == set(english)


@pytest.fixture(scope="module")
def runs_of(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path
) -> Callable[[str], Path]:
    """A way to start -> the folder with its runs; each way is started once."""
    folder = tmp_path_factory.mktemp("own")
    table = pd.read_csv(reviews)
    table["second"] = table["text"].str[::-1].str[:40]
    table.to_csv(folder / "rows.csv", index=False)
    pairs = shutil.copytree(tiny_model, folder / "PAIRS")
    torch.manual_seed(3)
    BertModel(BertConfig.from_pretrained(pairs, type_vocab_size=2)).save_pretrained(pairs)

    @functools.cache
    def run(way: str, precision: str, pairs: bool) -> Path:
        runs = folder / f"{way} {precision} {'pairs' if pairs else ''}"
        runs.mkdir()
        edits = edits_of(PAGES[0])
        for edit in {edit for edit, _ in (PAIRS if pairs else JOBS).values()} - {""}:
            diffs = [diff for name in edit.split("_and_") for diff in edits[name]]
            (runs / f"own_{edit}.py").write_text(edited(diffs), encoding="utf-8")
        data = [
            "--train_file",
            folder / "rows.csv",
            "--model_name_or_path",
            tiny_model,
            "--text_column",
            "text",
        ]
        jobs: list[list[Any]] = []
        for name, (edit, settings) in (PAIRS if pairs else JOBS).items():
            settings = [folder / word if word == "PAIRS" else word for word in settings]
            job = [f"own_{edit}" if edit else "recipes.cls", *data, *COMMON, "--mixed_precision", precision, *settings,
                   "--output_dir", runs / name]  # fmt: skip
            jobs += [[*job, *HALF]] if name.endswith("again") else []
            jobs.append([*job, "--max_steps", STEPS])
        run_jobs(runs, WAYS[way], jobs, 900, pages=["metric"] if way == "single" else [])
        return runs

    return lambda way, precision="no", pairs=False: run(
        way, precision, pairs
    )  # one key for equal arguments


def test_the_evaluation_uses_the_focal_loss(runs_of: Callable[[str], Path]) -> None:
    run = runs_of("single") / "focal"
    assert json.loads((run / "config.json").read_text())["settings"]["gamma"] == 1.5
    lines = lines_of(run / "predictions.jsonl")
    chance = np.array(
        [line["probabilities"][("neg", "pos").index(line["label"])] for line in lines]
    )
    weight = np.array([2.0 if line["label"] == "pos" else 1.0 for line in lines])
    focal = (weight * (1 - chance) ** 1.5 * -np.log(chance)).mean()
    assert lines_of(run / "eval.jsonl")[-1]["loss"] == pytest.approx(focal, rel=1e-3)
    assert losses_of(run) != pytest.approx(losses_of(runs_of("single") / "metric"), rel=1e-2)


def test_a_custom_metric_chooses_the_best_model(runs_of: Callable[[str], Path]) -> None:
    run = runs_of("single") / "metric"
    evaluations = lines_of(run / "eval.jsonl")
    best = max(evaluations, key=lambda line: line["mcc"])
    assert (
        json.loads((run / "model" / "trainer_state.json").read_text())["global_step"]
        == best["step"]
    )
    assert "mcc" in (run / "report.html").read_text(encoding="utf-8")
    assert "mcc" in (run / "model" / "README.md").read_text(encoding="utf-8")


def test_frozen_layers_do_not_change(runs_of: Callable[[str], Path], tiny_model: Path) -> None:
    before, after = (
        load_file(path / "model.safetensors")
        for path in (tiny_model, runs_of("single") / "frozen/model")
    )
    name = "embeddings.word_embeddings.weight"
    assert (before[name] == after[f"bert.{name}"]).all()
    assert (
        before[name] != load_file(runs_of("single") / "sgd/model/model.safetensors")[f"bert.{name}"]
    ).any()


def test_a_custom_model_is_loaded_as_the_page_says(
    runs_of: Callable[[str], Path], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = runs_of("single")
    (program,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)
    program = program.replace("from my_recipe", "from own_own_model")
    program = program.replace("runs/mine/model", str(runs / "own_model" / "model"))
    program = program.replace("bert-base-chinese", str(tiny_model))
    done = start([sys.executable, "-c", program], env={"PYTHONPATH": f"{runs}:{ROOT}"})
    assert done.code == 0, done.err
    assert re.fullmatch(r"tensor\(\[\[0\.\d+, 0\.\d+\]\]\)", done.out.strip())
    assert (runs / "own_model" / "model" / "encoder" / "config.json").is_file()
    refusal(toolkit.predict, runs / "own_model" / "model", ["a"], says=["load_state_dict"])


def test_a_logged_number_is_the_mean_over_the_global_batch(
    runs_of: Callable[[str], Path],
) -> None:
    """Of 22 samples, or of the last ones of an epoch."""
    for line in lines_of(runs_of("single") / "logged" / "metrics.jsonl"):
        right = line["accuracy"] * line["samples"]
        assert right == pytest.approx(round(right), abs=1e-4)
        assert 0 < right < line["samples"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["ddp x2", "zero3 x2", *SLOW_WAYS])
def test_a_logged_number_is_equal_under_every_launch(
    way: str, runs_of: Callable[[str], Path]
) -> None:
    several, one = (
        [line["accuracy"] for line in lines_of(runs_of(each) / "logged" / "metrics.jsonl")]
        for each in (way, "single")
    )
    assert several == pytest.approx(one, rel=1e-6)


def test_a_parameter_of_the_loss_is_trained_and_saved(runs_of: Callable[[str], Path]) -> None:
    run = runs_of("single") / "learned"
    weights = load_file(run / "model" / "model.safetensors")
    assert weights["loss.log_scale"].shape == (1,)
    assert (weights["loss.bias"] != 0).all()
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        run / "model", output_loading_info=True
    )
    assert {*loading["unexpected_keys"]} == {"loss.log_scale", "loss.bias"}
    assert not loading["missing_keys"]
    assert (model.state_dict()["classifier.weight"].numpy() == weights["classifier.weight"]).all()


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize("way", ["single", pytest.param("ddp x2", marks=pytest.mark.multiprocess),
                                 pytest.param("zero3 x2", marks=pytest.mark.multiprocess), *SLOW_WAYS])  # fmt: skip
def test_a_resumed_run_continues_the_uninterrupted_one(
    way: str, name: str, runs_of: Callable[[str], Path]
) -> None:
    uninterrupted, resumed = (losses_of(runs_of(way) / run) for run in (name, f"{name} again"))
    assert len(resumed) == STEPS
    assert resumed == pytest.approx(uninterrupted, rel=1e-6)
    assert len(set(resumed)) == STEPS


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [name for name in JOBS if not name.endswith("again")])
@pytest.mark.parametrize("way", ["ddp x2", "zero3 x2", *SLOW_WAYS])
def test_equal_losses_under_every_launch(
    way: str, name: str, runs_of: Callable[[str], Path]
) -> None:
    losses, expected = losses_of(runs_of(way) / name), losses_of(runs_of("single") / name)
    if name in DIFFERENT:
        assert len(losses) == STEPS
        assert all(map(np.isfinite, losses))
        assert losses != pytest.approx(expected, rel=1e-5)  # as the page says
        return
    assert_agree(runs_of(way) / name, runs_of("single") / name)
    one, other = (
        load_file(runs_of(run) / name / "model" / "model.safetensors") for run in (way, "single")
    )
    assert {key: value.shape for key, value in one.items()} == {
        key: value.shape for key, value in other.items()
    }


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("way", ["ddp x2", "zero2 x2", "zero3 x2", "fsdp2 x2"])
def test_pairs_of_edits(way: str, name: str, runs_of: Callable[..., Path]) -> None:
    assert_agree(runs_of(way, pairs=True) / name, runs_of("single", pairs=True) / name)


def deviation(run: Path, expected: Path) -> float:
    pairs = zip(losses_of(run), losses_of(expected), strict=True)
    return max(abs(loss / other - 1) for loss, other in pairs)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("precision", "name"),
    [(precision, name) for precision, jobs in {"bf16": [*JOBS, *PAIRS], "fp16": [*JOBS]}.items()
     for name in jobs if name not in DIFFERENT],
)  # fmt: skip
@pytest.mark.parametrize("way", ["ddp x2", "zero2 x2", "zero3 x2", "fsdp2 x2"])
def test_half_precision(way: str, name: str, precision: str, runs_of: Callable[..., Path]) -> None:
    several, one, exact = (
        runs_of(*where, pairs=name in PAIRS) / name
        for where in ((way, precision), ("single", precision), ("single",))
    )
    assert deviation(several, exact) < 2 * deviation(one, exact) + 1e-5
    assert deviation(several, one) < 1e-3
    if name.endswith("again"):
        assert losses_of(several) == pytest.approx(
            losses_of(several.with_name(name.removesuffix(" again"))), rel=1e-6
        )


OPTIMIZER = "    optimizer = toolkit.make"
ZERO = "        optimizer.zero_grad()\n"


def test_a_loop_that_ends_early_is_logged_evaluated_and_saved(
    tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    leave = f"{ZERO}        if step.number == 4:\n            break\n"
    (tmp_path / "own_early.py").write_text(edited([]).replace(ZERO, leave), encoding="utf-8")
    files = ["--train_file", reviews, "--model_name_or_path", tiny_model]
    jobs = {
        "first": ["--eval_every", 9, "--logging_steps", 9, "--checkpoint_every", 9],
        "second": ["--eval_every", 3, "--checkpoint_every", 2],
    }
    run_jobs(tmp_path, [], [["own_early", *files, *COMMON, *more, "--output_dir", tmp_path / name]
                            for name, more in jobs.items()])  # fmt: skip
    for name, evaluations in {"first": [4], "second": [3, 4]}.items():
        run = tmp_path / name
        assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == [1, 2, 3, 4]
        steps = [line["step"] for line in lines_of(run / "eval.jsonl")]
        assert steps == evaluations or steps == [
            *evaluations,
            3,
        ]  # the best at the end, if that is not the last
        assert (run / "checkpoints" / "last").resolve().name == "step-00000004"
        assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["zero2 x2", "fsdp2 x2"])
def test_running_means_are_equal_in_all_processes(
    way: str, tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    layer = "model.classifier = torch.nn.Sequential(model.classifier, torch.nn.BatchNorm1d(2))"
    means = "means = accelerator.gather(toolkit.unwrapped(model).classifier[1].running_mean[None])"
    text = edited([]).replace("import toolkit\n", "import torch\n\nimport toolkit\n")
    text = text.replace(OPTIMIZER, f"    {layer}\n{OPTIMIZER}")
    check = "assert means.any() and not means.diff(dim=0).any()"
    batches = "        for batch in step.micro_batches"
    later = f"        if step.number > 1:\n            {means}\n            {check}\n{batches}"
    text = text.replace(batches, later)
    (tmp_path / "own_means.py").write_text(text, encoding="utf-8")
    files = [
        "--train_file",
        reviews,
        "--model_name_or_path",
        tiny_model,
        "--output_dir",
        tmp_path / "run",
    ]
    run_jobs(tmp_path, WAYS[way], [["own_means", *files, *COMMON, "--max_steps", 3]])
