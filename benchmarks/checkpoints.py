"""The cost of a checkpoint and of a resume, in the English demo job.

    python benchmarks/checkpoints.py --write            (about 4 minutes on 2 cores)

For each strategy: seconds that training waits for a save (flushed and verified) and its bytes, compared with `cp` +
`sync` of the same files right after; and the peak resident memory of a process, in the run that saves and in the one
that resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import processor

ROOT = Path(__file__).resolve().parent.parent
WAYS = {
    "one process": [],
    "one process, in the background": ["--checkpoint_in_background"],
    "DDP x2": ["--config_file", "accelerate_configs/ddp.yaml"],
    "ZeRO-2 x2": ["--config_file", "accelerate_configs/zero2.yaml"],
    "ZeRO-3 x2": ["--config_file", "accelerate_configs/zero3.yaml"],
}
STEPS, EVERY = 12, 2
SETTINGS = ["--checkpoint_every", str(EVERY), "--eval_every", "1000", "--validation_split", "0.01", "--dropout", "0",
            "--report_to", "none", "--global_batch_size", "16"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/checkpoints.md")
    options = parser.parse_args()
    lines = [
        "| way | MB | seconds, median (least) | of `cp` + `sync` | peak memory, saving | resuming |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for way, words in WAYS.items():
        lines.append(measure(way, words))
        print(lines[-1], flush=True)
    if options.write:
        note = (
            f"A BERT of 22.7 million parameters, {STEPS // EVERY} saves, {processor()}, no GPU, a "
            "virtual disk. The median of the seconds is divided by the median of as many copies of the last checkpoint."
        )
        results = ROOT / "benchmarks" / "results" / "checkpoints.md"
        results.write_text(f"# What a checkpoint costs\n\n{note}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


def measure(way: str, words: list[str]) -> str:
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        output = Path(folder) / "run"
        saving = run(output, STEPS, words)
        seconds = [line["checkpoint_seconds"] for line in saving if "checkpoint_seconds" in line]
        size = next(line["checkpoint_bytes"] for line in saving if "checkpoint_bytes" in line)
        copies = [copy_seconds((output / "checkpoints" / "last").resolve(), Path(folder) / "copy") for _ in seconds]
        resuming = run(output, STEPS + 1, words)
    peaks = [max(line["peak_memory_bytes"] for line in lines) for lines in (saving, resuming[STEPS:])]
    ratio = statistics.median(seconds) / statistics.median(copies)
    return (
        f"| {way} | {size / 1e6:.0f} | {statistics.median(seconds):.2f} ({min(seconds):.2f}) | {ratio:.2f}x | "
        f"{peaks[0] / 2**20:.0f} MiB | {peaks[1] / 2**20:.0f} MiB |"
    )


def run(output: Path, steps: int, words: list[str]) -> list[dict[str, float]]:
    command = [sys.executable, "recipes/cls.py", *SETTINGS, "--max_steps", str(steps), "--output_dir", str(output)]
    finished = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{' '.join(command + words)} failed:\n{finished.stderr[-3000:]}")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def copy_seconds(source: Path, target: Path) -> float:
    """Seconds of a copy, flushed to disk like a checkpoint."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


if __name__ == "__main__":
    main()
