"""Every optional term of a training, alone and in pairs: equal losses under every strategy, or one error line."""

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.jobs_worker import run_jobs
from tests.runs import WAYS, lines_of, losses_of, slow_but

STEPS = 3
COMMON = ["--dropout", 0, "--report_to", "none", "--learning_rate", "5e-3", "--lr_scheduler_type", "constant",
          "--global_batch_size", 22, "--per_device_batch_size", 6, "--max_eval_samples", 21, "--max_train_samples", 100,
          "--max_steps", STEPS]  # fmt: skip
TERMS: dict[str, list[Any]] = {
    "r_drop": ["--r_drop_alpha", 1.0],
    "fgm": ["--fgm_epsilon", 0.5],
    "teacher": ["--teacher"],
    "ema": ["--ema_decay", 0.6],
    "decay": ["--layerwise_lr_decay", 0.8],
    "freeze": ["--freeze_layers", 1],
    "reinit": ["--reinit_layers", 1],
    "class_weights": ["--class_weights", "balanced"],
    "pos_weight": ["--pos_weight", "balanced"],
    "focal": ["--loss", "focal"],
    "smoothing": ["--label_smoothing_factor", 0.1],
    "lora": ["--lora_r", 3],
    "recompute": ["--gradient_checkpointing"],
}
SINGLE_LABEL = ["--label_column", "label"]
SEVERAL_LABELS = ["--label_column", "tags", "--problem_type", "multi_label_classification"]
REFUSED = {("r_drop", "teacher"), ("fgm", "teacher"), ("class_weights", "pos_weight"), ("pos_weight", "smoothing"),
           ("focal", "smoothing"), ("freeze", "lora"), ("reinit", "lora")}  # fmt: skip
ALONE = [(name,) for name in TERMS]
PAIRS = list(itertools.combinations(TERMS, 2))
SECOND_PASS = [pair for pair in PAIRS if {"r_drop", "fgm"} & set(pair) and {"recompute", "lora", "ema"} & set(pair)]
BF16 = [*ALONE, ("r_drop", "fgm"), *SECOND_PASS]
SETS = {"alone": (ALONE, "no"), "pairs": (PAIRS, "no"), "bf16": (BF16, "bf16"), "fp32": (BF16, "no")}
SHARDED = [way for way in WAYS if way not in ("single", "ddp x3")]
# zero3 gathers weights in hooks, in each pass. Under DDP: test_craft, test_sameness, test_long, test_distillation
OFTEN = ("zero3 x2",)
Runs = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> Runs:
    """(way to start, name in SETS) -> the folder with its runs; each way is started once."""
    folder = tmp_path_factory.mktemp("terms")
    table = pd.read_csv(reviews)
    table = table[(table["label"] == "neg") | (table.index % 5 == 0)]
    table["tags"] = table["label"] + table["text"].str.contains("film").map({True: "|film", False: ""})
    table.to_csv(folder / "rows.csv", index=False)
    data = ["--train_file", folder / "rows.csv", "--model_name_or_path", tiny_model, "--text_column", "text", *COMMON]
    job = ["tests.bare_cls", *data, "--mixed_precision", "no", "--seed", 9]
    teachers = {False: folder / "teacher", True: folder / "teacher of several labels"}
    run_jobs(folder, [], [[*job, *SINGLE_LABEL, "--output_dir", teachers[False]],
                          [*job, *SEVERAL_LABELS, "--output_dir", teachers[True]]])  # fmt: skip

    @functools.cache
    def run(way: str, name: str) -> Path:
        runs, (sets, precision), jobs = folder / f"{way} {name}", SETS[name], []
        for terms in sets:
            several = "pos_weight" in terms
            words = [word for term in terms for word in TERMS[term]]
            if "teacher" in terms:
                words.insert(words.index("--teacher") + 1, teachers[several] / "model")
            jobs.append(["tests.bare_cls", *data, *(SEVERAL_LABELS if several else SINGLE_LABEL), *words,
                         "--mixed_precision", precision, "--output_dir", runs / "+".join(terms)])  # fmt: skip
        run_jobs(runs, WAYS[way], jobs, seconds=1500)
        return runs

    return run


def differing(runs: Path, expected: Path, sets: list[tuple[str, ...]]) -> list[str]:
    """The sets of terms whose losses, gradient norms or evaluations differ by more than 1e-5."""
    wrong = []
    for terms in sets:
        name = "+".join(terms)
        numbers = [
            [*losses_of(folder / name), *(line["grad_norm"] for line in lines_of(folder / name / "metrics.jsonl")),
             lines_of(folder / name / "eval.jsonl")[-1]["loss"]]
            for folder in (runs, expected)
        ]  # fmt: skip
        if len(numbers[0]) != 2 * STEPS + 1 or numbers[0] != pytest.approx(numbers[1], rel=1e-5):
            wrong.append(f"{name}: {numbers}")
    return wrong


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", slow_but(SHARDED, *OFTEN))
def test_each_term_alone(way: str, runs_of: Runs) -> None:
    assert differing(runs_of(way, "alone"), runs_of("single", "alone"), ALONE) == []


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", SHARDED)
def test_each_pair_of_terms(way: str, runs_of: Runs) -> None:
    runs, expected = runs_of(way, "pairs"), runs_of("single", "pairs")
    assert differing(runs, expected, [pair for pair in PAIRS if pair not in REFUSED]) == []
    lines = {file.name: file.read_text(encoding="utf-8") for file in runs.glob("*.refused")}
    assert set(lines) == {f"{one}+{other}.refused" for one, other in REFUSED}
    assert lines == {file.name: file.read_text(encoding="utf-8") for file in expected.glob("*.refused")}
    assert all("\n" not in line and "--" in line for line in lines.values())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", *SHARDED])
def test_each_term_in_bf16(way: str, runs_of: Runs) -> None:
    """By autocast; within 1 % of fp32."""
    for terms in BF16:
        folders = (runs_of(way, "bf16"), runs_of("single", "fp32"))
        losses, expected = (losses_of(runs / "+".join(terms)) for runs in folders)
        assert len(losses) == STEPS
        assert all(map(math.isfinite, losses)), terms
        assert losses == pytest.approx(expected, rel=1e-2), terms
