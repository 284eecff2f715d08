"""The memory that `toolkit estimate` predicts, against that of real runs.

    python benchmarks/memory.py --write          (about 10 minutes on 2 cores, and 8 GB of memory)

Each run trains three steps on texts of exactly 128 tokens, in float32. Measured is `peak_memory_bytes` of
metrics.jsonl: the largest resident size of any process since its start. `--write` puts the table into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import processor

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"single": 1, "ddp": 2, "zero2": 2, "zero3": 2, "fsdp2": 2}
# texts of a micro-batch
MODELS = {"MiniLM (the demo's), 22.7M": 32, "BERT-base, random, 102M": 8}
WORDS = [f"w{number}" for number in range(21123)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/memory.md")
    options = parser.parse_args()
    lines = ["| model | texts of a micro-batch | way | processes | estimate, GB | measured, GB | measured / estimate |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        models = dict(zip(MODELS, ["demo:minilm", make_bert(Path(folder) / "bert")], strict=True))
        data = make_data(Path(folder) / "data.csv")
        for name, size in MODELS.items():
            job = ["--model_name_or_path", models[name], "--train_file", data, "--max_length", "128",
                   "--mixed_precision", "no", "--per_device_batch_size", str(size),
                   "--max_tokens_per_batch", str(128 * size)]  # fmt: skip
            # without accumulation, as in the runs
            expected = estimate([*job, "--global_batch_size", str(2 * size)], 2, size)
            for way, processes in WAYS.items():
                peak = measure([*job, "--global_batch_size", str(size * processes)], way, Path(folder))
                lines.append(f"| {name} | {size} | {way} | {processes} | {expected[way] / 1e9:.2f} | {peak / 1e9:.2f} "
                             f"| {peak / expected[way]:.1f} |")  # fmt: skip
                print(lines[-1], flush=True)
    if options.write:
        import torch

        note = (f"`python benchmarks/memory.py`: 128 tokens, float32, {processor()}, "
                f"torch {torch.__version__}, no GPU.")  # fmt: skip
        results = ROOT / "benchmarks" / "results" / "memory.md"
        results.write_text(f"# Memory: the estimate and real runs\n\n{note}\n\n" + "\n".join(lines) + "\n", "utf-8")


def make_bert(folder: Path) -> str:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    BertModel(BertConfig(vocab_size=len(vocabulary))).save_pretrained(folder)
    return str(folder)


def make_data(file: Path) -> str:
    """Texts of more than 128 tokens."""
    generator = random.Random(0)
    rows = (f"{' '.join(generator.choices(WORDS, k=140))},{'ab'[row % 2]}\n" for row in range(500))
    file.write_text("text,label\n" + "".join(rows), encoding="utf-8")
    return str(file)


def estimate(job: list[str], processes: int, size: int) -> dict[str, float]:
    """Strategy -> peak bytes."""
    from toolkit import config
    from toolkit.features.estimate.command import by_strategy, load_untrained_classifier

    settings = config.parse(config.TaskSettings, job)
    model, lengths = load_untrained_classifier(settings)
    shapes = {name: (size, length) for name, length in lengths.items()}
    memory = by_strategy(model, settings.training, processes, shapes, "cpu", "no")
    return {strategy: sum(parts) for strategy, parts in memory.items()}


def measure(job: list[str], way: str, folder: Path) -> int:
    output = Path(tempfile.mkdtemp(dir=folder)) / "run"
    more = ["--config_file", f"accelerate_configs/{way}.yaml", "--max_steps", "3", "--report_to", "none",
            "--max_eval_samples", "4", "--output_dir", str(output)]  # fmt: skip
    done = subprocess.run([sys.executable, "recipes/cls.py", *job, *more], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    lines: list[dict[str, Any]] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return int(lines[-1]["peak_memory_bytes"])


if __name__ == "__main__":
    main()
