"""`--padding_free` against padded batches on a CPU: seconds and CPU seconds of the same steps and evaluations.

    python benchmarks/padding_free.py --write          about 20 minutes on two cores

Film reviews of a sentence or two (demo:rotten-tomatoes, at most 128 tokens) and long ones (demo:imdb, at most 512), the
demo's 6-layer MiniLM, global batches of 32 (long texts in micro-batches of 16), in float32 and bf16; with batches by
length, as they are by default, and with `--group_by_length false`. Contestants:

    padded        without the setting
    row           --padding_free, which chooses one of the next two for each row
    row, by text  attention in a loop over the texts
    row, padded   the texts padded in attention only
    row, mask     a mask over the whole row (T x T): with short texts only

A run takes 14 steps of short texts, or 3 of long ones; an evaluation twice as many samples.

Each run is a new process, and the contestants take turns; ratios are within a round. `least / least` compares the
shortest run of each, seconds and CPU seconds: on a busy machine one of three equal runs can take several times as long
as the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import contestants
import trainer
from machine import hardware

DATA = {
    "128": ("demo:rotten-tomatoes", 3200, 14),
    "512": ("demo:imdb", 1280, 3),
}  # samples of an epoch, steps of a run
ROUNDS, WARM = 3, 1
GLOBAL_BATCH = 32
CLOCKS = ("wall", "cpu")
CONTESTANTS = ("padded", "row", "row, by text", "row, padded", "row, mask")


def cases() -> list[dict[str, Any]]:
    plain = {"task": "train", "precision": "no", "sorted": True}
    kinds: list[dict[str, Any]] = [
        {},
        {"precision": "bf16"},
        {"sorted": False},
        {"task": "evaluate"},
    ]
    return [{**plain, "length": length, **kind} for length in DATA for kind in kinds]


def title(case: dict[str, Any]) -> str:
    precision = "float32" if case["precision"] == "no" else "bf16"
    order = "" if case["sorted"] or case["task"] == "evaluate" else ", not by length"
    return f"{case['length']} tokens, {'training' if case['task'] == 'train' else 'evaluation'}, {precision}{order}"


def work(case: dict[str, Any]) -> dict[str, float]:
    """Runs one contestant in this process."""
    from toolkit.config import TaskSettings, build
    from toolkit.features.padding_free import packed

    if case["who"] == "row, mask":
        packed._text_by_text = packed._padded = attend_with_block_mask
    elif case["who"] != "row":
        packed._is_loop_faster = lambda _: case["who"] == "row, by text"
    name, samples, steps = DATA[case["length"]]
    with tempfile.TemporaryDirectory() as folder:
        settings = build(TaskSettings, {
            **contestants.JOB, "dataset_name": name, "max_length": int(case["length"]), "output_dir": f"{folder}/run",
            "max_steps": steps + WARM, "mixed_precision": case["precision"], "group_by_length": case["sorted"],
            "padding_free": case["who"] != "padded", "report_to": "none",
            "per_device_batch_size": 32 if case["length"] == "128" else 16,
            "max_eval_samples": 2 * steps * GLOBAL_BATCH, "global_batch_size": GLOBAL_BATCH,
        })  # fmt: skip
        job, clock = contestants.load_job(settings, samples), contestants.Clock()
        warm = WARM if case["task"] == "train" else 0
        result = contestants.ours(
            contestants.Job(settings, job.tokenizer, job.data, job.model, warm), case["task"], clock
        )
    return {"wall": clock.wall, "cpu": clock.cpu, "loss": result["loss"]}


def attend_with_block_mask(q: Any, k: Any, v: Any, packed: Any, window: int, **options: Any) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    text = packed.padded_indices // packed.width
    mask = text[:, None] == text if len(q) == len(k) else text[packed.first_tokens][:, None] == text
    q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)[0].transpose(0, 1)


def spawn(case: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(case: dict[str, Any], rounds: int) -> list[str]:
    """Medians (smallest to largest)."""
    every = 5 if case["length"] == "128" else 4
    contestants = CONTESTANTS[: every if case in (cases()[0], cases()[4]) else 2]
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in contestants}
    for _ in range(rounds):
        for who in contestants:
            runs[who].append(spawn({**case, "who": who}))
    lines = [
        "",
        f"## {title(case)}",
        "",
        "| | seconds | CPU seconds | loss | time / padded | CPU / padded | least / least |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for who, measured in runs.items():
        seconds, cpu = (trainer.spread(measured, name) for name in CLOCKS)
        times, cpus = (trainer.ratio(measured, runs["padded"], name) for name in CLOCKS)
        loss = statistics.median(run["loss"] for run in measured)
        least = [
            min(run[name] for run in measured) / min(run[name] for run in runs["padded"])
            for name in CLOCKS
        ]
        lines.append(
            f"| {who} | {seconds} | {cpu} | {loss:.4f} | {times} | {cpus} | {least[0]:.2f}, {least[1]:.2f} |"
        )
    print("\n".join(lines), file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"runs of each contestant [{ROUNDS}]"
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/padding_free.md"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(json.loads(options.worker))))
        return
    libraries = ", ".join(
        f"{each} {version(each)}" for each in ("torch", "transformers", "accelerate")
    )
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    page = ["# Batches without padding, on a CPU", ""]
    page += [
        (__doc__ or "").split("\n\n", 2)[2].strip().replace("\n    ", "\n- ").replace("  ", " ")
    ]
    for case in cases():
        page += table(case, options.rounds)
    page += ["", f"Medians (smallest to largest). {hardware()}, {libraries}; load average before: {load}; "
             f"`python benchmarks/padding_free.py {' '.join(sys.argv[1:])}`, {date.today()}", ""]  # fmt: skip
    if options.write:
        path = Path(__file__).parent / "results" / "padding_free.md"
        path.write_text("\n".join(page), encoding="utf-8")


if __name__ == "__main__":
    main()
