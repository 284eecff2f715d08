"""This toolkit against `transformers.Trainer`: time, CPU seconds and peak memory of the same work.

    python benchmarks/trainer.py                       about 5 minutes on two cores
    python benchmarks/trainer.py --samples 3200 --rounds 7 --write

The same model, samples, global batch, dropout, learning rates and clipping: the demo's weights (demo:minilm) on
sentences of at most 128 tokens in batches of 32 (demo:rotten-tomatoes), or, with `--lengths 128 512`, also on reviews
of at most 512 in batches of 16 (demo:imdb). `TRAINER_PRECISION=no` computes in fp32, for CPUs on which bf16 is slower;
with `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` this CPU computes like an older one. Contestants:

    ours     as recipes/cls.py trains and evaluates: bf16, by length, a line of metrics for every step
    tuned    Trainer, the batch at once: bf16, group_by_length, dynamic padding, fused AdamW, samples in a list,
             no logging, evaluation batches of 64 by length
    small    as tuned, in micro-batches of 2048 tokens with gradient accumulation, as ours has them on a CPU; evaluation
             batches likewise. transformers 5.23 multiplies its loss and gradient by their number (#47688)
    plain    Trainer as in most scripts: every text padded to 128, fp32, defaults (evaluation batches of 8)

Each run is a new process with its own memory, and the contestants take turns, so that other jobs on the machine slow
all of them: compare the ratios, which are within a round. Imports, loading, tokenizing and a small warm-up are not
timed, but count in the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contestants import (
    TEXTS,
    Clock,
    load_job,
    make_settings,
    ours,
    plain_trainer,
    small_batches_trainer,
    tuned_trainer,
)
from machine import hardware, write_page

# Nothing heavy is imported here: Linux lets a child's ru_maxrss start at its parent's resident size.

CONTESTANTS = ("ours", "tuned", "small", "plain")
TASKS = ("train", "evaluate")
# Largest difference of a contestant's loss from ours for a valid comparison: training has other random orders and
# dropout masks, evaluation only rounding.
LOSS_TOLERANCE = {"train": 0.1, "evaluate": 0.005}


def work(contestant: str, task: str, samples: int, length: int) -> dict[str, Any]:
    """One contestant's run in this process -> its measurements."""
    contenders = {
        "ours": ours,
        "tuned": tuned_trainer,
        "small": small_batches_trainer,
        "plain": plain_trainer,
    }
    with tempfile.TemporaryDirectory() as output_dir:
        settings = make_settings(f"{output_dir}/run", samples, length)
        if contestant == "prepare":  # fills the cache of tokens
            return {"folder": str(load_job(settings, samples).data.folder)}
        clock = Clock()
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        job = load_job(settings, samples)
        if contestant != "ours":  # loading has replaced it in this process
            ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa_attention_forward)
        result = contenders[contestant](job, task, clock)
    import torch

    if task == "train" and result["steps"] != samples // TEXTS[length][1]:
        raise SystemExit(f"{contestant} made {result['steps']} steps")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = (
        max(torch.cuda.max_memory_allocated(), result.get("peak", 0))
        if torch.cuda.is_available()
        else 0
    )
    return result | {"wall": clock.wall, "cpu": clock.cpu, "resident": resident, "device": device}


def spawn(contestant: str, task: str, samples: int, length: int) -> dict[str, Any]:
    """`work` in a new process."""
    command = [sys.executable, __file__, "--worker", contestant, task, str(samples), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(
    samples: int, length: int, rounds: int, contestants: list[str]
) -> dict[str, dict[str, Any]]:
    """Task -> contestant -> a measurement per round; the contestants take turns."""
    spawn("prepare", "train", samples, length)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        task: {who: [] for who in contestants} for task in TASKS
    }
    for number in range(1, rounds + 1):
        for task in TASKS:
            for who in contestants:
                measured = spawn(who, task, samples, length)
                results[task][who].append(measured)
                line = f"round {number}/{rounds}, {length} tokens, {task} {who}: {measured['wall']:.2f} s"
                print(line, file=sys.stderr, flush=True)
    return results


def table(task: str, results: dict[str, list[dict[str, Any]]]) -> str:
    """One task's Markdown table: medians (smallest to largest), and ratios to ours within each round."""
    head = ["contestant", "seconds", "CPU seconds", "loss", "peak resident MB"]
    ratios = ["time / ours", "CPU / ours", "memory / ours"]
    on_device = any(run["device"] for runs in results.values() for run in runs)
    head += ["peak device MB"] * on_device + ratios * ("ours" in results)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for who, runs in results.items():
        cells = [who, spread(runs, "wall"), spread(runs, "cpu"), spread(runs, "loss", digits=4)]
        cells += [spread(runs, "resident", 1e-6, digits=0)]
        cells += [spread(runs, "device", 1e-6, digits=0)] * on_device
        if "ours" in results:
            memory = "device" if on_device else "resident"
            cells += [ratio(runs, results["ours"], key) for key in ("wall", "cpu", memory)]
            difference = abs(median(runs, "loss") - median(results["ours"], "loss"))
            cells[3] += " (VOID: too far from ours)" * (difference > LOSS_TOLERANCE[task])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def spread(runs: list[dict[str, Any]], key: str, unit: float = 1.0, digits: int = 2) -> str:
    return _spread([run[key] * unit for run in runs], digits)


def ratio(runs: list[dict[str, Any]], ours: list[dict[str, Any]], key: str) -> str:
    """Above 1, ours is better."""
    return _spread([run[key] / mine[key] for run, mine in zip(runs, ours, strict=True)], 2)


def _spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({low:.{digits}f} to {high:.{digits}f})" if high > low else middle


def report(tables: list[str], rounds: int, load: str) -> str:
    """The whole page."""
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate")
    )
    return "\n".join(
        [
            "# Beside transformers.Trainer",
            "",
            (__doc__ or "")
            .split("\n\n", 2)[2]
            .strip()
            .replace("\n    ", "\n- ")
            .replace("-          ", "  "),
            "",
            *tables,
            "Medians (smallest to largest). Ratios are taken within each round: above 1, ours is better.",
            "",
            "## Conditions",
            "",
            f"- {hardware()}, Python {platform.python_version()}, {libraries}",
            f"- {rounds} rounds; load average before: {load}",
            f"- `python benchmarks/trainer.py {' '.join(sys.argv[1:])}`, {date.today()}",
            "",
        ]
    )


def tables(results: dict[str, dict[str, Any]], samples: int, length: int) -> list[str]:
    """The tables of texts of at most `length` tokens."""
    titles = {"train": f"Training, {samples} texts", "evaluate": "Evaluation of held-back texts"}
    return [
        line
        for task in TASKS
        for line in (
            f"## {titles[task]} of at most {length} tokens, one process",
            "",
            table(task, results[task]),
            "",
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples", type=int, default=640, help="of 128 tokens, a quarter as many of 512 [640]"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", choices=TEXTS, default=[128], help="tokens [128]"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant [3]")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument(
        "--write", action="store_true", help="also write benchmarks/results/trainer.md"
    )
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        contestant, task, *numbers = options.worker
        print(json.dumps(work(contestant, task, *map(int, numbers))))
        return
    load, lines = " ".join(f"{value:.1f}" for value in os.getloadavg()), []
    for length in options.lengths:
        batch = TEXTS[length][1]
        samples = max(1, options.samples * 128 // length // batch) * batch
        lines += tables(
            compare(samples, length, options.rounds, options.contestants), samples, length
        )
    page = report(lines, options.rounds, load)
    print(page)
    if options.write:
        write_page(Path(__file__).parent / "results" / "trainer.md", page)


if __name__ == "__main__":
    main()
