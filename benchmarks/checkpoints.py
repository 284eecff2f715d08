"""What a checkpoint costs, and whether a resumed run has the losses of one that was not interrupted.

    python benchmarks/checkpoints.py      ZeRO-3, two processes, 110 million weights: 6 minutes on 2 cores
    python benchmarks/checkpoints.py --strategies single zero3 --processes 1 --layers 24 --hidden 1024 --together

A row per strategy: seconds that training waits for a save, in the background and not; seconds of a resume (reading,
checking and restoring); the largest relative difference of a resumed step's loss in float32; and the peak memory of
the largest process (of the GPU, or resident) without saves, with saves and in a resumed run. The model is a BERT with
random weights. It measures the toolkit on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from machine import random_bert, write_rows

import toolkit
from toolkit.utils.children import stop_with_parent

ROOT = Path(toolkit.__file__).resolve().parent.parent
STEPS, RESUMED_AT = 6, 4
SETTINGS = ["--dropout", "0", "--report_to", "none", "--mixed_precision", "no", "--max_length", "8",
            "--global_batch_size", "8", "--eval_every", "1000", "--learning_rate", "1e-5",
            "--max_steps", str(STEPS), "--baselines", "false"]  # fmt: skip
# the recipe, which also writes how long each save makes training wait, and a resume
TIMED_RECIPE = """
import time
import toolkit.run
from recipes import cls
from toolkit.training.checkpoints import Checkpoints


def timed(work, name, counts):
    def run(checkpoints, *arguments, **options):
        before, started = checkpoints._saved_step, time.perf_counter()
        result = work(checkpoints, *arguments, **options)
        seconds = time.perf_counter() - started
        if counts(before, checkpoints._saved_step) and checkpoints.accelerator.is_main_process:
            with checkpoints.path.with_name(name).open("a") as file:
                print(seconds, file=file)
        return result

    return run


save, resume = Checkpoints.save_if_due, toolkit.run.resume_from


def main():
    Checkpoints.save_if_due = timed(save, "saves.txt", lambda before, after: before != after)
    toolkit.run.resume_from = timed(resume, "resumes.txt", lambda before, after: True)
    cls.main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--strategies", nargs="+", default=["zero3"], help="names of accelerate_configs/")
    add("--processes", type=int, default=2)
    add("--layers", type=int, default=12)
    add("--hidden", type=int, default=768, help="24 layers of 1024: 330 million weights")
    add("--together", action="store_true", help="one start for the runs that save or resume; the "
        "memory of the later ones, which would hold what the first left, is not in the row")  # fmt: skip
    add("--json", help="a file for the figures, for benchmarks/gpu_report.py")
    options = parser.parse_args()
    rows = []
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(strategy, Path(name), options))
        if len(rows) == 1:
            print(f"| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|")
        cells = [cell if isinstance(cell, str) else f"{cell:.3g}" for cell in rows[-1].values()]
        print(f"| {' | '.join(cells)} |", flush=True)
    write_rows(options.json, rows)


def measure(strategy: str, folder: Path, options: Namespace) -> dict[str, Any]:
    (folder / "timed.py").write_text(TIMED_RECIPE, encoding="utf-8")
    model = str(random_bert(options.layers, options.hidden))
    common = ["--model_name_or_path", model, "--train_file", write_job(folder), *SETTINGS]
    checkpoint = str(folder / "saved" / "checkpoints" / f"step-{RESUMED_AT:08d}")
    runs = {
        "plain": common,
        "saved": [*common, "--checkpoint_every", "2"],
        # the save of the last step waits for this one
        "behind": [*common, "--checkpoint_every", str(STEPS - 1), "--checkpoint_in_background"],
        "resumed": [*common, "--resume", checkpoint],
    }
    if options.together:
        del runs["plain"]
    way = ["--config_file", f"accelerate_configs/{strategy}.yaml"]
    way += ["--num_processes", str(options.processes)]
    for names in [[*runs]] if options.together else [[name] for name in runs]:
        jobs = [["timed", *runs[name], "--output_dir", str(folder / name)] for name in names]
        start(folder, jobs, way)
    lines = {name: read_lines(folder / name / "metrics.jsonl") for name in runs}
    differences = [
        abs(mine["loss"] / theirs["loss"] - 1)
        for mine, theirs in zip(lines["resumed"], lines["saved"][RESUMED_AT:], strict=True)
    ]
    row: dict[str, Any] = {
        "": strategy,
        "save, s": statistics.median(seconds_of(folder / "saved" / "saves.txt")),
        "in the background, s": seconds_of(folder / "behind" / "saves.txt")[0],
        "resume, s": seconds_of(folder / "resumed" / "resumes.txt")[0],
        "loss after the resume, difference": max(differences),
    }
    titles = {"plain": "GB without saves", "saved": "GB, saving", "behind": "GB, in the background",
              "resumed": "GB, resumed"}  # fmt: skip
    if options.together:
        titles = {"saved": titles["saved"]}
    for name, title in titles.items():
        row[title] = max(line["peak_memory_bytes"] for line in lines[name]) / 1e9
    return row


def write_job(folder: Path) -> str:
    """A file of 40 short texts."""
    rows = {
        f"{'abcdefghij'[number % 10]} {'abcdefghij'[number % 7]},{'xy'[number % 2]}": None
        for number in range(40)
    }
    file = folder / "rows.csv"
    file.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    return str(file)


def start(folder: Path, jobs: list[list[str]], way: list[str]) -> None:
    """Runs recipes one after the other in one group of processes."""
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    command = [sys.executable, "tests/jobs_worker.py", str(folder / "jobs.json"), *way]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, preexec_fn=stop_with_parent
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def seconds_of(file: Path) -> list[float]:
    return [float(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
