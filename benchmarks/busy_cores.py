"""Training on CPU cores that other processes use, too: how long OpenMP's threads spin before they sleep.

    python benchmarks/busy_cores.py --write            about 12 minutes on two cores

PyTorch's wheels for Linux bring GCC's OpenMP, whose threads spin 300,000 times at the end of each parallel operation
before they sleep. If another process has the other thread's core, they spin for nothing. Contestants are values of
GOMP_SPINCOUNT (0 is what OMP_WAIT_POLICY=PASSIVE sets): `ours` of contestants.py trains in processes of its own, which
take turns, alone and beside one busy process per core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from datetime import date
from pathlib import Path

from machine import cores, processor

SPINS = (300000, 10000, 3000, 0)
SAMPLES = {128: 160, 512: 32}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="[2]")
    parser.add_argument(
        "--spins", type=int, nargs="+", default=SPINS, help=f"GOMP_SPINCOUNT [{SPINS}]"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", choices=SAMPLES, default=list(SAMPLES), help="tokens"
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/busy_cores.md"
    )
    options = parser.parse_args()
    lines = [
        "| texts | busy processes | GOMP_SPINCOUNT | seconds | CPU seconds |",
        "|---|---|---|---|---|",
    ]
    for length in options.lengths:
        for busy in (0, cores()):
            runs: dict[int, list[tuple[float, float]]] = {spins: [] for spins in options.spins}
            for _ in range(options.rounds):
                for spins, done in runs.items():
                    done.append(measure(spins, length, busy))
            for spins, done in runs.items():
                cells = [
                    ", ".join(f"{value:.1f}" for value in values)
                    for values in zip(*done, strict=True)
                ]
                medians = [f"{statistics.median(values):.1f}" for values in zip(*done, strict=True)]
                cells = [f"{median} ({each})" for median, each in zip(medians, cells, strict=True)]
                lines.append(
                    f"| {SAMPLES[length]} of {length} tokens | {busy} | {spins:,} | {' | '.join(cells)} |"
                )
                print(lines[-1], flush=True)
    if options.write:
        about = " ".join((__doc__ or "").split("\n\n", 2)[2].split())
        note = f"{processor()}, fp32, {options.rounds} rounds, {date.today()}: medians (each run)."
        page = Path(__file__).parent / "results" / "busy_cores.md"
        text = [
            "# Busy cores",
            "",
            f"`python benchmarks/busy_cores.py --write`. {about}",
            "",
            note,
            "",
            *lines,
        ]
        page.write_text("\n".join(text) + "\n", encoding="utf-8")


def measure(spins: int, length: int, busy: int) -> tuple[float, float]:
    """(seconds, CPU seconds) of a training beside `busy` processes that never sleep."""
    environment = {**os.environ, "GOMP_SPINCOUNT": str(spins), "TRAINER_PRECISION": "no"}
    with ExitStack() as stack:
        for _ in range(busy):
            other = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
            )
            stack.callback(other.kill)
        trainer = str(Path(__file__).with_name("trainer.py"))
        words = [
            sys.executable,
            trainer,
            "--worker",
            "ours",
            "train",
            str(SAMPLES[length]),
            str(length),
        ]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return result["wall"], result["cpu"]


if __name__ == "__main__":
    main()
