"""BigBird attention at 4096 tokens: ours against transformers', time and peak memory.

    python benchmarks/bigbird.py --write              (CPU; some minutes on 2 cores)
    python benchmarks/bigbird.py --device cuda        (against full SDPA too)

One attention layer, forward + backward, and a training step of a whole model, batch 1 in training mode. Each row has
its own processes, which take turns; a peak is the memory that a process's first step adds. The first step of `flex`
compiles its kernel. `--write` puts the tables into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import processor, write_rows
from transformers import BigBirdConfig, BigBirdForSequenceClassification, BigBirdModel
from transformers.utils import logging

from toolkit.models import bigbird
from toolkit.utils.children import stop_with_parent

ROOT = Path(__file__).resolve().parent.parent
THEIRS = "transformers"
SHAPE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 64, above 704")
    parser.add_argument("--layers", type=int, default=4, help="of the whole model")
    parser.add_argument(
        "--repeats", type=int, default=7, help="timed steps of a process, after one warm-up step"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each row")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/bigbird[-cuda].md"
    )
    parser.add_argument("--json", help="a file for the model's figures only, of gpu_report.py")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options, *options.worker)))
        return
    if options.json:
        write_rows(options.json, measure(options, "model"))
        return
    lines = [conditions(options)]
    for what, title in (("layer", "One attention layer, forward + backward"),
                        ("model", f"A training step (AdamW) of a classifier of {options.layers} layers")):  # fmt: skip
        lines += ["", f"## {title}, {options.tokens} tokens", "", *measure_table(options, what)]
        print(
            "\n".join(lines if what == "layer" else lines[-len(names(options)) - 5 :]), flush=True
        )
    if options.write:
        name = "bigbird.md" if options.device == "cpu" else "bigbird-cuda.md"
        text = "# BigBird attention against transformers\n\n" + "\n".join(lines) + "\n"
        (ROOT / "benchmarks" / "results" / name).write_text(text, encoding="utf-8")


def names(options: argparse.Namespace) -> list[str]:
    if options.device == "cuda":
        return [THEIRS, "flex", "full", "gathered"]
    return [THEIRS, "gathered"]


def measure(options: argparse.Namespace, what: str) -> list[dict[str, Any]]:
    """A row per attention; ratios are to transformers. One that fails has no figures."""
    firsts, seconds = ({how: list[float]() for how in names(options)} for _ in range(2))
    for _ in range(options.rounds):
        for how, each in seconds.items():
            first, *others = spawn(options, what, how, "no") or [math.nan]
            firsts[how].append(first)
            each.extend(others)
    peaks = {how: min(spawn(options, what, how, "yes"), default=math.nan) for how in names(options)}
    rows: list[dict[str, Any]] = []
    theirs = seconds[THEIRS] or [math.nan]
    for how, each in seconds.items():
        row: dict[str, Any] = {"attention": how}
        if each:
            row["first step, s"] = max(firsts[how])
            row["minimum, ms"] = min(each) * 1e3
            row["median, ms"] = median(each) * 1e3
            row["faster (minimum)"] = min(theirs) / min(each)
            row["faster (median)"] = median(theirs) / median(each)
            row["peak, MB"] = peaks[how] / 1e6
            row["of the memory"] = peaks[how] / peaks[THEIRS]
        rows.append(row)
    return rows


def measure_table(options: argparse.Namespace, what: str) -> list[str]:
    rows = measure(options, what)
    digits = {"attention": "", "first step, s": ".1f", "minimum, ms": ".0f", "median, ms": ".0f",
              "faster (minimum)": ".2f", "faster (median)": ".2f", "peak, MB": ".0f",
              "of the memory": ".2f"}  # fmt: skip
    lines = [f"| {' | '.join(digits)} |", "|---" * len(digits) + "|"]
    for row in rows:
        cells = [format(row[name], how) if name in row else "" for name, how in digits.items()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def step_of(options: argparse.Namespace, what: str, how: str) -> Callable[[], None]:
    """A function that runs one step of a layer or a model with one attention."""
    torch.manual_seed(0)
    config = BigBirdConfig(vocab_size=1000, num_hidden_layers=options.layers if what == "model" else 1, **SHAPE,
                           max_position_embeddings=options.tokens)  # fmt: skip
    model = (BigBirdForSequenceClassification if what == "model" else BigBirdModel)(config)
    model = model.train().to(
        options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    )
    if how != THEIRS:
        bigbird.install(model, how)
    return _model_step(options, model) if what == "model" else _layer_step(options, model, how)


def _layer_step(options: argparse.Namespace, model: Any, how: str) -> Callable[[], None]:
    layer, dtype = model.encoder.layer[0].attention, next(model.parameters()).dtype
    states = torch.randn(
        1, options.tokens, 768, device=options.device, dtype=dtype, requires_grad=True
    )
    masks: dict[str, Any] = {}
    if how == THEIRS:
        ones = torch.ones(1, options.tokens, device=options.device)
        blocks, band, rows, keys = BigBirdModel.create_masks_for_block_sparse_attn(ones, 64)
        masks = {"band_mask": band, "from_mask": rows, "to_mask": keys,
                 "from_blocked_mask": blocks.to(dtype), "to_blocked_mask": blocks.to(dtype)}  # fmt: skip

    def step() -> None:
        layer(states, **masks)[0].sum().backward()

    return step


def _model_step(options: argparse.Namespace, model: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(3, 1000, (1, options.tokens), device=options.device)
    labels = torch.ones(1, dtype=torch.long, device=options.device)

    def step() -> None:
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(options: argparse.Namespace, what: str, how: str, peak: str) -> list[float]:
    """The seconds of each step, the first one too, or [peak bytes added by a step]."""
    logging.set_verbosity_error()
    step = step_of(options, what, how)
    if peak == "yes":
        return [peak_of(options, step)]
    seconds = []
    for _ in range(options.repeats + 1):
        _wait(options)
        started = time.perf_counter()
        step()
        _wait(options)
        seconds.append(time.perf_counter() - started)
    return seconds


def spawn(options: argparse.Namespace, what: str, how: str, peak: str) -> list[float]:
    """`work` in a new process; nothing where it fails, for example out of memory."""
    words = [sys.executable, __file__, *sys.argv[1:], "--worker", what, how, peak]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=900, preexec_fn=stop_with_parent
    )
    if done.returncode:
        print(f"{what} {how}: {done.stderr[-500:]}", file=sys.stderr, flush=True)
        return []
    return list(json.loads(done.stdout.splitlines()[-1]))


def _wait(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def peak_of(options: argparse.Namespace, step: Callable[[], None]) -> int:
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes. Not getrusage: its maximum includes the parent before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def conditions(options: argparse.Namespace) -> str:
    where = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    load = (
        f", load average {os.getloadavg()[0]:.1f} when it began" if options.device == "cpu" else ""
    )
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    return (f"On {where}{load}; torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}; hidden 768, "
            f"12 heads, batch 1, training mode; {options.rounds} processes of {options.repeats} steps in turn; peak "
            "memory of one step in a process of its own, beyond what it held before.")  # fmt: skip


if __name__ == "__main__":
    main()
