"""Losses and seconds of the same job under every strategy.

    python benchmarks/sameness.py --write        (about 6 minutes on 2 cores)

Runs the English demo job in float32 without dropout for 40 optimizer steps under each strategy, and plots the loss
curves and their relative differences from one process. `--write` puts the picture into docs/images and the table into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

FLOOR = 1e-10  # equal losses are drawn here
ROOT = Path(__file__).resolve().parent.parent
FILE = "--config_file"
WAYS = {
    "one process": [],
    "DDP x2": [FILE, "accelerate_configs/ddp.yaml"],
    "DDP x3": [FILE, "accelerate_configs/ddp.yaml", "--num_processes", "3"],
    "ZeRO-1 x2": [FILE, "accelerate_configs/zero1.yaml"],
    "ZeRO-2 x2": [FILE, "accelerate_configs/zero2.yaml"],
    "ZeRO-2 offload x2": [FILE, "accelerate_configs/zero2_offload.yaml"],
    "ZeRO-3 x2": [FILE, "accelerate_configs/zero3.yaml"],
    "ZeRO-3 offload x2": [FILE, "accelerate_configs/zero3_offload.yaml"],
}
JOB = ["--max_steps", "40", "--eval_every", "40", "--dropout", "0", "--mixed_precision", "no", "--report_to", "none",
       "--global_batch_size", "26", "--per_device_batch_size", "7"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/images/sameness.png and benchmarks/results"
    )
    options = parser.parse_args()
    runs = {name: run(way) for name, way in WAYS.items()}
    table = table_of(runs)
    print(table)
    picture = draw(runs)
    target = (
        ROOT / "docs" / "images" / "sameness.png"
        if options.write
        else Path(tempfile.gettempdir()) / "sameness.png"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(target, dpi=110)
    print(f"picture: {target}")
    if options.write:
        results = ROOT / "benchmarks" / "results" / "sameness.md"
        results.parent.mkdir(exist_ok=True)
        results.write_text(
            f"# The same job under every strategy\n\n`{' '.join(sys.argv)}`\n\n{table}\n",
            encoding="utf-8",
        )


def run(way: list[str]) -> dict[str, list[float]]:
    """One run: its losses, its evaluation and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        started = time.monotonic()
        command = [sys.executable, "recipes/cls.py", *way, *JOB, "--output_dir", str(output)]
        subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        evaluation = json.loads((output / "eval.jsonl").read_text().splitlines()[-1])
        return {
            "loss": [line["loss"] for line in lines],
            "evaluation": [evaluation["loss"], evaluation["accuracy"]],
            "seconds": [time.monotonic() - started],
        }


def differences(run: dict[str, list[float]], reference: dict[str, list[float]]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(run["loss"], reference["loss"], strict=True)]


def table_of(runs: dict[str, dict[str, list[float]]]) -> str:
    reference = runs["one process"]
    lines = [
        "| way | last training loss | largest relative difference | evaluation loss | accuracy | seconds in all |",
        "|---|---|---|---|---|---|",
    ]
    for name, run_of_way in runs.items():
        largest = max(differences(run_of_way, reference))
        loss, accuracy = run_of_way["evaluation"]
        lines.append(f"| {name} | {run_of_way['loss'][-1]:.7f} | {largest:.1e} | {loss:.7f} | {accuracy:.4f} "
                     f"| {run_of_way['seconds'][0]:.0f} |")  # fmt: skip
    return "\n".join(lines)


def draw(runs: dict[str, dict[str, list[float]]]) -> Figure:
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = runs["one process"]
    for number, (name, run_of_way) in enumerate(runs.items()):
        steps = range(1, len(run_of_way["loss"]) + 1)
        # from wide to narrow, so that equal curves are all visible
        above.plot(
            steps,
            run_of_way["loss"],
            label=name,
            color=f"C{number}",
            linewidth=9 - number,
            alpha=0.75,
        )
        if name != "one process":
            shown = [max(difference, FLOOR) for difference in differences(run_of_way, reference)]
            below.semilogy(steps, shown, color=f"C{number}", linewidth=1.2)
    below.axhline(1e-5, color="black", linestyle="--", linewidth=1)
    below.text(1, 1.4e-5, "the promise: 1e-5", fontsize=9)
    below.set_ylim(FLOOR / 2, 1e-4)
    above.set_ylabel("training loss")
    above.legend(fontsize=8, ncols=2)
    below.set_ylabel("relative difference\nfrom one process")
    below.set_xlabel("optimizer step")
    above.set_title("The same job under every strategy (float32, dropout off, 26 samples a step)")
    return figure


if __name__ == "__main__":
    main()
