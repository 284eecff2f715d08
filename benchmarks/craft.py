"""Metrics with the settings for uneven classes, and with those of docs/fine-tuning-craft.md, on English demo data.

    python benchmarks/craft.py uneven [NAME ...]     one review in eleven is positive
    python benchmarks/craft.py craft [NAME ...]      few rows: 200 reviews, both classes alike

MiniLM (6 layers) of the demo, one process. Trains each NAME with two seeds; prints their mean metrics on the test rows,
and the spread (largest - smallest) of macro F1. The first table is in docs/uneven-classes.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.jobs_worker import run_jobs
from tests.runs import lines_of
from toolkit.data.read import read_demo

SEEDS = (1, 2)
COMMON = [
    "--model_name_or_path",
    "demo:minilm",
    "--max_length",
    32,
    "--report_to",
    "none",
    "--warmup_ratio",
    0.1,
]
# rows of (neg, pos) in train, validation, test; settings of all runs; name -> its settings
KINDS: dict[str, tuple[tuple[tuple[int, int], ...], list[Any], dict[str, list[Any]]]] = {
    "uneven": (
        ((800, 80), (200, 20), (500, 50)),
        ["--num_train_epochs", 2, "--learning_rate", "2e-4", "--eval_every", 14],
        {
            "nothing": [],
            "class_weights": ["--class_weights", "balanced"],
            "sampling": ["--sampling", "balanced"],
            "sampling-sqrt": ["--sampling", "sqrt"],
            "focal": ["--loss", "focal"],
        },
    ),
    "craft": (
        ((100, 100), (50, 50), (250, 250)),
        ["--num_train_epochs", 4, "--learning_rate", "2e-4", "--eval_every", 14],
        {
            "nothing": [],
            "layerwise_lr_decay": ["--layerwise_lr_decay", 0.8],
            "freeze_layers": ["--freeze_layers", 3],
            "reinit_layers": ["--reinit_layers", 1],
            "lion": ["--optimizer", "lion", "--learning_rate", "2e-5"],
            "adafactor": ["--optimizer", "adafactor"],
            "muon": ["--optimizer", "muon"],
            "unfreeze_every": ["--unfreeze_every", 3],
            "ema_decay": ["--ema_decay", 0.9],
            "r_drop_alpha": ["--r_drop_alpha", 1],
            "fgm_epsilon": ["--fgm_epsilon", 0.1],
            "fgm_epsilon-0.5": ["--fgm_epsilon", 0.5],
        },
    ),
}


def main() -> None:
    kind, *names = sys.argv[1:]
    sizes, common, every = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        data = write(Path(folder), sizes)
        jobs = [
            [
                "recipes.cls",
                *COMMON,
                *common,
                *every[name],
                *data,
                "--seed",
                seed,
                "--output_dir",
                f"{folder}/{name}{seed}",
            ]
            for name in names or every
            for seed in SEEDS
        ]
        run_jobs(Path(folder), [], jobs, seconds=3000)
        for name in names or every:
            results = [last(Path(folder, f"{name}{seed}")) for seed in SEEDS]
            means = {
                key: round(float(np.mean([one[key] for one in results])), 4) for key in results[0]
            }
            f1 = [one["f1_macro"] for one in results]
            print(
                json.dumps({"name": name, **means, "spread": round(max(f1) - min(f1), 4)}),
                flush=True,
            )


def last(run: Path) -> dict[str, float]:
    """Metrics of the saved model on the test rows."""
    line = lines_of(run / "eval.jsonl")[-1]
    assert line["split"] == "test"
    rare = {f"pos_{name}": line["per_class"]["pos"][name] for name in ("precision", "recall", "f1")}
    seconds = sum(
        step["samples"] / step["samples_per_second"] for step in lines_of(run / "metrics.jsonl")
    )
    return {
        "accuracy": line["accuracy"],
        "f1_macro": line["f1_macro"],
        **rare,
        "training_seconds": seconds,
    }


def write(folder: Path, sizes: tuple[tuple[int, int], ...]) -> list[str]:
    """Samples disjoint rows for each split; returns the settings of the files."""
    frame = read_demo("demo:rotten-tomatoes")["train"].rows.to_pandas().drop_duplicates("text")
    frame = frame.sample(frac=1, random_state=7)
    remaining = {name: frame[frame["label"] == name] for name in ("neg", "pos")}
    settings: list[str] = []
    for split, counts in zip(("train", "validation", "test"), sizes, strict=True):
        parts = []
        for name, count in zip(remaining, counts, strict=True):
            parts.append(remaining[name][:count])
            remaining[name] = remaining[name][count:]
            assert len(parts[-1]) == count

        pd.concat(parts).sample(frac=1, random_state=7).to_csv(folder / f"{split}.csv", index=False)
        settings += [f"--{split}_file", str(folder / f"{split}.csv")]
    return settings


if __name__ == "__main__":
    main()
