"""What continued pretraining is worth: accuracy with few labels, with it and without it, for several seeds.

    python benchmarks/pretraining_pays.py --minutes 3 --seeds 2 --labels 100       small: two cores
    python benchmarks/pretraining_pays.py --minutes 60 --seeds 5 --write           (--seconds 170: a part; it goes on)

English film reviews (demo:rotten-tomatoes): 1000 of them are for testing, up to 1000 have their labels, all others are
texts alone. The encoder (demo:minilm, with a new masked-language head tied to its embeddings, as the package has none)
is pretrained once on the texts for --minutes, then fine-tuned by recipes/cls.py on 100, 300 and 1000 labels, as it was
and as it is after that, with the same labels and seeds. Runs that are finished in --folder are not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST, LABELLED = 1000, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3, help="of pretraining [3]")
    parser.add_argument("--seeds", type=int, default=5, help="[5]")
    parser.add_argument("--labels", type=int, nargs="+", default=[100, 300, 1000], help="[100 300 1000]")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/pretraining-pays"), help="[/tmp/pretraining-pays]")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many; go on another time")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/pretraining_pays.md")
    options = parser.parse_args()
    until, folder = time.monotonic() + options.seconds, options.folder
    folder.mkdir(parents=True, exist_ok=True)
    make_files(folder, options.labels)
    pretrained = pretrain(folder, options.minutes, until)
    lines = ["| labels | as it was | after pretraining | difference, seed by seed |", "|---|---|---|---|"]
    for count in options.labels:
        scores: dict[str, list[float]] = {"before": [], "after": []}
        for seed in range(1, options.seeds + 1):
            for name, model in (("before", "demo:minilm"), ("after", str(pretrained))):
                scores[name].append(fine_tune(folder / f"{name}-{count}-{seed}", model, count, seed, until))
        differences = [100 * (after - before) for before, after in zip(*scores.values(), strict=True)]
        cells = [f"{100 * statistics.mean(values):.1f} ({100 * min(values):.1f} to {100 * max(values):.1f})"
                 for values in scores.values()]  # fmt: skip
        lines.append(f"| {count} | {cells[0]} | {cells[1]} | {statistics.mean(differences):+.1f} "
                     f"({', '.join(f'{each:+.1f}' for each in differences)}) |")  # fmt: skip
    print("\n".join(lines))
    if options.write:
        first, *_, last = [json.loads(line) for line in (folder / "pretrained" / "eval.jsonl").open()]
        note = (f"Accuracy in % on {TEST} film reviews, means (lowest to highest) of {options.seeds} seeds; "
                f"{options.minutes:g} minutes of pretraining on {os.cpu_count()} CPU cores; its perplexity was "
                f"{first['perplexity']:.0f} at the first evaluation and {last['perplexity']:.1f} at the last. Made by "
                "`benchmarks/pretraining_pays.py`.")  # fmt: skip
        path = ROOT / "benchmarks" / "results" / "pretraining_pays.md"
        path.write_text(f"# What continued pretraining is worth\n\n{note}\n\n" + "\n".join(lines) + "\n")


def make_files(folder: Path, labels: list[int]) -> None:
    """test.jsonl, N.jsonl for each number of labels, the first of the same rows, and texts.txt, all others."""
    from toolkit.data.read import read_demo

    rows = [dict(row) for row in read_demo("demo:rotten-tomatoes")["train"].rows]
    random.Random(7).shuffle(rows)
    parts = {"test": rows[:TEST], **{str(count): rows[TEST : TEST + count] for count in labels}}
    for name, part in parts.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    texts = [" ".join(row["text"].split()) for row in rows[TEST + LABELLED :]]
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def pretrain(folder: Path, minutes: float, until: float) -> Path:
    """Its model; the number of steps follows from the speed of a few."""
    out = folder / "pretrained"
    common = ["--train_file", folder / "texts.txt", "--model_name_or_path", "demo:minilm", "--new_head", "true",
              "--max_length", "128", "--report_to", "none", "--data_seed", "1", "--learning_rate", "3e-4",
              "--warmup_ratio", "0.06", "--whole_word_mask", "true", "--max_eval_samples", "300"]  # fmt: skip
    if not (out / "report.html").exists():
        trial = folder / "trial"
        if not (trial / "report.html").exists():
            run("pretrain", [*common, "--max_steps", "24", "--output_dir", trial], until)
        speeds = [json.loads(line)["samples_per_second"] for line in (trial / "metrics.jsonl").open()]
        steps = max(10, round(minutes * 60 * statistics.median(speeds) / 32))
        more = ["--max_steps", steps, "--eval_every", -(-steps // 8), "--checkpoint_every", 50, "--output_dir", out]
        run("pretrain", [*common, *more], until)
    return out / "model"


def fine_tune(out: Path, model: str, labels: int, seed: int, until: float) -> float:
    """The accuracy on the test rows."""
    if not (out / "report.html").exists():
        epochs = {100: 10, 300: 6}.get(labels, 4)
        run("cls", ["--train_file", out.parent / f"{labels}.jsonl", "--test_file", out.parent / "test.jsonl",
                    "--model_name_or_path", model, "--seed", seed, "--data_seed", 1, "--max_length", 128,
                    "--num_train_epochs", epochs, "--learning_rate", "1e-4", "--warmup_ratio", 0.1, "--report_to",
                    "none", "--global_batch_size", 16, "--output_dir", out], until)  # fmt: skip
    return float(json.loads((out / "eval.jsonl").read_text().splitlines()[-1])["accuracy"])


def run(recipe: str, words: list[object], until: float) -> None:
    if time.monotonic() > until:
        sys.exit("the rest is left: the same command goes on")
    command = [sys.executable, ROOT / "recipes" / f"{recipe}.py", *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    print(f"{recipe}: {done.stdout.strip().splitlines()[0]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
