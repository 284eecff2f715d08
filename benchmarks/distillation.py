"""Distillation: a student of 3 layers with and without MiniLM's 6 as teacher, fine-tuned on the same film reviews.

    python benchmarks/distillation.py --write            (--seconds 200: stop early; the same command continues)

The teacher is fine-tuned once; each student starts as layers 1, 3 and 6 of MiniLM and is trained with and without the
teacher, on the same rows, for several seeds. Finished runs in --folder are not repeated. `--write` puts the table into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import processor

ROOT = Path(__file__).resolve().parent.parent
COMMON = ["--data_seed", "1", "--report_to", "none", "--learning_rate", "1e-4", "--warmup_ratio", "0.1",
          "--max_train_samples", "2500"]  # fmt: skip
TEACHER, ALONE, TAUGHT = (
    "teacher, 6 layers",
    "student, 3 layers",
    "student, 3 layers, with the teacher",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/distillation.md"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/distillation"), help="[/tmp/distillation]"
    )
    parser.add_argument("--seeds", type=int, default=2, help="of each student [2]")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    three = ["--num_hidden_layers", "3", "--num_train_epochs", "2"]
    taught = [
        *three,
        "--teacher",
        str(options.folder / "teacher" / "model"),
        "--distillation_alpha",
        "0.9",
    ]
    runs = {TEACHER: [train(options.folder / "teacher", ["--num_train_epochs", "2"], until)]}
    for seed in range(1, options.seeds + 1):
        for name, kind, settings in ((ALONE, "alone", three), (TAUGHT, "taught", taught)):
            folder = train(
                options.folder / f"{kind}-{seed}", [*settings, "--seed", str(seed)], until
            )
            runs.setdefault(name, []).append(folder)
    lines = [
        "| model | accuracy | lowest to highest | F1 (macro) | parameters | rows/s in `toolkit predict` |"
    ]
    lines += [
        "|---|---|---|---|---|---|",
        *(row(name, folders, options.folder) for name, folders in runs.items()),
    ]
    print("\n".join(lines))
    if options.write:
        note = (
            f"2 500 of the English film reviews of `demo:rotten-tomatoes`, judged on 853 others, "
            f"`demo:minilm` (6 layers), {options.seeds} seeds of each student and their mean, {processor()}, in "
            "the recipe's precision. Made by `benchmarks/distillation.py`: 2 epochs each, `--distillation_alpha 0.9`."
        )
        results = ROOT / "benchmarks" / "results" / "distillation.md"
        results.write_text(
            f"# Distillation: 6 layers into 3\n\n{note}\n\n" + "\n".join(lines) + "\n",
            encoding="utf-8",
        )


def train(folder: Path, settings: list[str], until: float) -> Path:
    """Runs recipes/cls.py unless the folder has a finished run."""
    if not (folder / "report.html").exists():
        if time.monotonic() > until:
            sys.exit(f"stopped before {folder.name}: the same command continues")
        command = [sys.executable, "recipes/cls.py", *COMMON, *settings, "--output_dir", str(folder),
                   "--overwrite_output_dir"]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def row(name: str, folders: list[Path], here: Path) -> str:
    last = [json.loads((folder / "eval.jsonl").read_text().splitlines()[-1]) for folder in folders]
    accuracies = [line["accuracy"] for line in last]
    spread = f"{min(accuracies):.4f} to {max(accuracies):.4f}" if len(folders) > 1 else ""
    size = (folders[0] / "model" / "model.safetensors").stat().st_size / 4e6
    f1 = statistics.mean(line["f1_macro"] for line in last)
    return (f"| {name} | {statistics.mean(accuracies):.4f} | {spread} | {f1:.4f} | {size:.1f} M | "
            f"{speed(folders[0] / 'model', here):.0f} |")  # fmt: skip


def speed(model: Path, here: Path) -> float:
    """Rows per second of `toolkit predict` on 2 000 reviews, with reading and writing, without the start."""
    from toolkit.data.read import read_demo

    file = here / "rows.csv"
    rows = (
        read_demo("demo:rotten-tomatoes")["train"].rows.select(range(2000)).select_columns(["text"])
    )
    rows.to_csv(file, index=False)
    command = [sys.executable, "-m", "toolkit", "predict", str(model), str(file), "--overwrite"]
    log = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stderr
    return float(log.split("(")[-1].split(" a second")[0])


if __name__ == "__main__":
    main()
