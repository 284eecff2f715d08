"""Time and memory of a global batch in micro-batches of several sizes on a CPU: what `--max_tokens_per_batch` sets.

    python benchmarks/micro_batches.py --write         (about 6 minutes)

MiniLM (demo:minilm) in bf16 on random tokens, texts of half the length to the whole, by length. Each size is a process
of its own, which keeps freed memory as training does (docs/scaling.md); sizes take turns, and a row has the least time.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from machine import processor, write_page

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "micro_batches.md"
# (what, tokens of the longest text, texts of the global batch) -> sizes of micro-batches
CASES = {
    ("training", 128, 64): (8, 16, 32, 64),
    ("training", 512, 32): (2, 4, 8, 16, 32),
    ("evaluation", 128, 128): (16, 32, 64, 128),
    ("evaluation", 512, 64): (2, 4, 8, 16, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="[2]")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/micro_batches.md"
    )
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, *numbers = options.one
        print(*one(what == "training", *map(int, numbers)))
        return
    head = [
        "| | longest text, tokens | texts of a micro-batch | texts per second | peak memory, MiB |",
        "|---|---|---|---|---|",
    ]
    lines = []
    for (what, length, texts), sizes in CASES.items():
        results: dict[int, list[list[float]]] = {size: [] for size in sizes}
        for _ in range(options.rounds):
            for size in sizes:
                words = [sys.executable, __file__, "--one", what, *map(str, (length, texts, size))]
                done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
                results[size].append([float(word) for word in done.stdout.split()])
        for size, runs in results.items():
            seconds, peak = map(min, zip(*runs, strict=True))
            lines.append(f"| {what} | {length} | {size} | {texts / seconds:.1f} | {peak:,.0f} |")
            print(lines[-1], flush=True)
    if options.write:
        note = f"`python benchmarks/micro_batches.py --write`: {processor()}, {date.today()}."
        write_page(
            PAGE, "\n".join(["# Micro-batches on a CPU", "", note, "", *head, *lines]) + "\n"
        )


def one(trains: bool, length: int, texts: int, size: int) -> tuple[float, float]:
    """(seconds of a global batch, peak resident MiB)."""
    sys.path.insert(0, str(ROOT))
    import torch
    from transformers import AutoModelForSequenceClassification

    from toolkit.demo import model_path
    from toolkit.features.cpu_attention.kernel import install
    from toolkit.features.cpu_dropout.kernel import install as install_dropout
    from toolkit.utils import memory

    install_dropout()
    install()  # the attention of training
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20000, (texts, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (texts,), generator=generator).sort().values
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        model_path("demo:minilm"), num_labels=2
    )
    model.train(trains)

    def step() -> None:
        for start in range(0, texts, size):
            part, width = slice(start, start + size), int(lengths[start : start + size].max())
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(trains):
                logits = model(
                    input_ids=ids[part, :width], attention_mask=mask[part, :width]
                ).logits
            if trains:
                (logits.float().sum() / texts).backward()
        model.zero_grad()
        memory.manage_freed_memory()

    step()  # the first kernels are slower, and the heap grows
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return min(seconds), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
