"""The share of planted label errors that `toolkit folds` finds.

    python benchmarks/label_errors.py [--dataset demo:rotten-tomatoes] [--samples 3000] [--folds 5] [--epochs 2]

Changes the labels of 5 % of the rows of English demo data, trains MiniLM in folds by recipes/cls.py, and compares
label_errors.jsonl with the changed rows. Writes benchmarks/results/label_errors-NAME.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from machine import processor

ROOT = Path(__file__).resolve().parent.parent


def plant_errors(folder: Path, dataset: str, samples: int, share: float) -> tuple[Path, set[int]]:
    """(a CSV file of texts and labels, the rows with a wrong label)."""
    from toolkit.data.read import read_demo

    table = (
        read_demo(dataset)["train"]
        .rows.shuffle(seed=11)
        .select(range(samples))
        .to_pandas()[["text", "label"]]
    )
    drawn = np.random.default_rng(12)
    rows = drawn.choice(samples, round(share * samples), replace=False)
    labels = table["label"].astype(str).to_numpy()
    names = sorted(set(labels))
    labels[rows] = [
        drawn.choice([name for name in names if name != label]) for label in labels[rows]
    ]
    table["label"] = labels
    table.to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv", set(rows.tolist())


def at_cuts(ranked: list[int], wrong: set[int], samples: int) -> list[dict[str, Any]]:
    """Precision and recall of the first rows of a ranking, at several cuts."""
    cuts = {"half as many as planted": len(wrong) // 2, "as many as planted": len(wrong),
            "twice as many": 2 * len(wrong), "three times as many": 3 * len(wrong)}  # fmt: skip
    results = []
    for name, cut in [*cuts.items(), ("all that are suspected", len(ranked))]:
        hits = len(wrong & set(ranked[:cut]))
        results.append({"cut": name, "rows": min(cut, len(ranked)), "of all rows": min(cut, len(ranked)) / samples,
                      "found": hits / len(wrong), "right": hits / max(1, min(cut, len(ranked)))})  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="demo:rotten-tomatoes")
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument(
        "--folder", type=Path, help="of the folds; the same folder continues them [a temporary one]"
    )
    parser.add_argument("--no_write", action="store_true", help="print only")
    options, settings = parser.parse_known_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="label-errors-"))
    folder.mkdir(exist_ok=True)
    rows, wrong = plant_errors(folder, options.dataset, options.samples, options.share)
    started = time.monotonic()
    if not (folder / "run" / "label_errors.jsonl").is_file():
        command = [sys.executable, "-m", "toolkit", "folds", "recipes/cls.py", "--train_file", rows, "--model_name_or_path", "demo:minilm",
                   "--folds", options.folds, "--output_dir", folder / "run", "--num_train_epochs", options.epochs,
                   "--max_length", options.max_length, "--report_to", "none", *settings]  # fmt: skip
        subprocess.run([str(word) for word in command], cwd=ROOT, check=True)
    seconds = time.monotonic() - started
    out_of_fold = [
        json.loads(line) for line in (folder / "run" / "out_of_fold.jsonl").open(encoding="utf-8")
    ]
    suspected = [
        json.loads(line)["id"]
        for line in (folder / "run" / "label_errors.jsonl").open(encoding="utf-8")
    ]
    clean = [line["prediction"] == line["label"] for line in out_of_fold if line["id"] not in wrong]
    caught = [line["prediction"] != line["label"] for line in out_of_fold if line["id"] in wrong]
    table = pd.DataFrame(at_cuts(suspected, wrong, options.samples))
    goal = [k for k in range(1, len(suspected) + 1)
            if len(wrong & set(suspected[:k])) >= 0.6 * k]  # fmt: skip
    most = len(wrong & set(suspected[: max(goal, default=0)])) / len(wrong)
    lines = [
        "# Planted label errors, found by `toolkit folds`",
        "",
        "Made by `python benchmarks/label_errors.py"
        + "".join(f" {word}" for word in sys.argv[1:] if "/" not in word)
        + "`.",
        "",
        f"- {options.samples} texts of {options.dataset}; {len(wrong)} of them ({options.share:.0%}) got another label",
        f"- MiniLM (6 layers, 22 million parameters), {options.folds} folds, {options.epochs:g} epochs, "
        f"{processor()}, {seconds:.0f} s" + (" (folds of an earlier call)" if seconds < 5 else ""),
        f"- out of fold the models agree with {np.mean(clean):.1%} of the labels that were not touched, and contradict "
        f"{np.mean(caught):.1%} of those that were",
        "",
        "| cut of label_errors.jsonl | rows | of all rows | planted errors found | of the rows, planted errors |",
        "|:---|---:|---:|---:|---:|",
        *(
            f"| {cut['cut']} | {cut['rows']} | {cut['of all rows']:.1%} | {cut['found']:.1%} | {cut['right']:.1%} |"
            for cut in table.to_dict("records")
        ),
        "",
        f"With at least 60 % of the listed rows planted errors, at most {most:.1%} of them are found "
        f"(the first {max(goal, default=0)} rows).",
        "",
    ]
    print("\n".join(lines))
    if not options.no_write:
        name = options.dataset.removeprefix("demo:")
        (ROOT / "benchmarks" / "results" / f"label_errors-{name}.md").write_text(
            "\n".join(lines), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
