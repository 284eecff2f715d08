"""The English demo job, started by each launcher, for a few steps.

    python benchmarks/ways.py --write            (about 3 minutes on 2 cores)

Prints the table of the README: command, processes, strategy, loss of the last step. `--write` puts it
into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import processor

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [
    "python recipes/cls.py",
    "python recipes/cls.py --config_file accelerate_configs/zero3.yaml",
    "accelerate launch --config_file accelerate_configs/zero2.yaml recipes/cls.py",
    "accelerate launch recipes/cls.py --config_file accelerate_configs/ddp.yaml",
    "deepspeed recipes/cls.py",
    "deepspeed --num_gpus 2 recipes/cls.py --deepspeed_config ds_configs/zero3.json",
    "torchrun --nproc_per_node 2 recipes/cls.py",
    "mpirun -np 2 python recipes/cls.py",
]
STEPS = ["--max_steps", "10", "--dropout", "0", "--mixed_precision", "no", "--report_to", "none"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/ways.md")
    options = parser.parse_args()
    lines = [
        "| command | processes | strategy | loss of step 10 | seconds |",
        "|---|---|---|---|---|",
    ]
    for command in COMMANDS:
        lines.append(measure(command))
        print(lines[-1], flush=True)
    if options.write:
        results = ROOT / "benchmarks" / "results" / "ways.md"
        results.parent.mkdir(exist_ok=True)
        table = "\n".join(lines)
        note = f"Each with `{' '.join(STEPS)}`, on {processor()}, no GPU."
        results.write_text(f"# Ways to start, as typed\n\n{note}\n\n{table}\n", encoding="utf-8")


def measure(command: str) -> str:
    """Runs one command line; returns its row of the table."""
    words = command.split()
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if shutil.which(words[0], path=env["PATH"]) is None:
        return f"| `{command}` | not installed here | | | |"
    if words[0] == "mpirun" and os.geteuid() == 0:
        words[1:1] = ["--allow-run-as-root", "--oversubscribe"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        started = time.monotonic()
        finished = subprocess.run(
            [*words, *STEPS, "--output_dir", str(output)],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
        )
        if finished.returncode:
            sys.exit(f"{command} failed:\n{finished.stderr[-3000:]}")
        seconds = time.monotonic() - started
        world = json.loads((output / "config.json").read_text())["world"]
        loss = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    stage = (world["deepspeed"] or {}).get("zero_optimization", {}).get("stage")
    plain = {"NO": "none", "MULTI_CPU": "DDP", "MULTI_GPU": "DDP"}
    strategy = f"ZeRO-{stage}" if stage else plain[world["distributed_type"]]
    return f"| `{command}` | {world['num_processes']} | {strategy} | {loss:.7f} | {seconds:.0f} |"


if __name__ == "__main__":
    main()
