"""The time of a run of one optimizer step, from the command to its end.

    python benchmarks/start.py                                   about 2 minutes on two cores
    python benchmarks/start.py --before ../main --rounds 5 --write

240 film reviews, the weights of demo:minilm, one step of 32 samples, an evaluation, the saved
model, the model card and report.html. `--before` names another checkout of this repository, whose
runs take turns with these; so does a Python that only imports torch, accelerate, transformers and
datasets.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from machine import hardware, write_page

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = "import torch, accelerate, transformers, datasets"
JOB = [
    "recipes/cls.py", "--dataset_name", "demo:rotten-tomatoes", "--max_train_samples", "240",
    "--max_eval_samples", "60", "--model_name_or_path", "demo:minilm", "--max_length", "128",
    "--max_steps", "1", "--report_to", "none",
]  # fmt: skip
DDP, ZERO2 = (
    ["--config_file", f"accelerate_configs/{name}.yaml", "--num_processes", "2"]
    for name in ("ddp", "zero2")
)
ACCELERATE = ["-m", "accelerate.commands.launch"]
JOBS = {
    "one process, tokens made": JOB,
    "one process, tokens cached": JOB,
    "two processes, DDP": [*JOB, *DDP],
    "two processes, ZeRO-2": [*JOB, *ZERO2],
    "two processes, DDP, by accelerate launch": [*ACCELERATE, *JOB, *DDP],
}
COMMANDS = {
    "`toolkit --help`": ["-m", "toolkit", "--help"],
    "`toolkit convert --help`": ["-m", "toolkit", "convert", "--help"],
    "`python recipes/cls.py --help`": ["recipes/cls.py", "--help"],
    f"`{IMPORTS}`": ["-c", IMPORTS],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind [3]")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/start.md")
    options = parser.parse_args()
    roots = {"this": ROOT}
    if options.before:
        roots = {"before": options.before.resolve(), "this": ROOT}
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for root in roots.values():  # bytecode, and measurements that are cached
            run(JOB, root, folder)
        for number in range(options.rounds):
            for kind, command in {**JOBS, **COMMANDS}.items():
                for where, root in roots.items():
                    if kind.endswith("made"):
                        shutil.rmtree(folder / "cache" / "tokens", ignore_errors=True)
                    seconds.setdefault((kind, where), []).append(run(command, root, folder))
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    page = table(seconds, list(roots), options.rounds)
    print(page)
    if options.write:
        title = "# The time of a run of one step"
        write_page(ROOT / "benchmarks" / "results" / "start.md", f"{title}\n\n{page}\n")


def run(words: Sequence[str], root: Path, folder: Path) -> tuple[float, float]:
    """(seconds, CPU seconds of all its processes) of a Python program."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(root), "TOOLKIT_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    shutil.rmtree(folder / "run", ignore_errors=True)
    command = [sys.executable, *words]
    if JOB[0] in words and "--help" not in words:
        command += ["--output_dir", str(folder / "run")]
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=root, env=env, stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def table(
    seconds: dict[tuple[str, str], list[tuple[float, float]]], roots: list[str], rounds: int
) -> str:
    heads = [f"{where}: {what}" for where in roots for what in ("seconds", "CPU seconds")]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for kind in {**JOBS, **COMMANDS}:
        cells = []
        for where in roots:
            walls, used = zip(*seconds[kind, where], strict=True)
            cells += [spread(walls), spread(used)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    command = f"`python benchmarks/start.py {' '.join(sys.argv[1:])}`"
    note = f"Medians (smallest to largest) of {rounds} rounds. {hardware()}, {date.today()}."
    return "\n".join([*lines, "", f"{note} {command}"])


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
