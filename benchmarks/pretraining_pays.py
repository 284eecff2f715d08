"""Accuracy with few labels, with and without continued pretraining, for several seeds.

    python benchmarks/pretraining_pays.py --minutes 3 --seeds 2 --labels 100       small: two cores
    python benchmarks/pretraining_pays.py --minutes 60 --seeds 5 --write           (--seconds 170: stop early)
    python benchmarks/pretraining_pays.py --long --minutes 30 --seeds 3 --labels 300 --write

English film reviews (demo:rotten-tomatoes): 1000 for testing, up to 1000 labelled, all others unlabelled. The encoder
(demo:minilm, with a new masked-language head tied to its embeddings, as the package has none) is pretrained once on the
unlabelled texts for --minutes; recipes/cls.py then fine-tunes the weights before and after on 100, 300 and 1000 labels,
with the same labels and seeds. Finished runs in --folder are not repeated.

--long: a BERT converted to BigBird, before and after pretraining on long texts: reviews of more than 600 tokens
(demo:imdb), cut at 1536, 500 of them for testing. The encoder is first pretrained at 512 tokens for --minutes, which
trains its new head; then it is converted, and pretrained at 1536 tokens for another --minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from machine import hardware

ROOT = Path(__file__).resolve().parent.parent
LONG = 1536  # tokens; sparse attention begins above 704
MLM = ["--report_to", "none", "--data_seed", "1", "--learning_rate", "3e-4", "--warmup_ratio", "0.06",
       "--whole_word_mask", "true"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true", help="long reviews and a BigBird")
    parser.add_argument("--minutes", type=float, default=3, help="of pretraining [3]")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        help="instead of --minutes; with --long, of both pretrainings",
    )
    parser.add_argument(
        "--parallel", type=int, default=1, help="fine-tunings at once, on a GPU [1]"
    )
    parser.add_argument("--seeds", type=int, default=5, help="[5]")
    parser.add_argument(
        "--labels", type=int, nargs="+", default=[100, 300, 1000], help="[100 300 1000]"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/pretraining-pays"), help="[/tmp/pretraining-pays]"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/pretraining_pays.md"
    )
    options = parser.parse_args()
    until, folder = (
        time.monotonic() + options.seconds,
        options.folder / ("long" if options.long else "short"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    make_files(folder, options.labels, options.long)
    title, note, models = (long_models if options.long else short_models)(folder, options, until)
    lines = ["| labels | before | after | difference, seed by seed |", "|---|---|---|---|"]
    threads = ThreadPoolExecutor(options.parallel)
    for count in options.labels:
        runs = [[threads.submit(fine_tune, folder / f"{when}-{count}-{seed}", model, count, seed, options.long, until)
                 for seed in range(1, options.seeds + 1)]
                for when, model in zip(("before", "after"), models, strict=True)]  # fmt: skip
        scores = [[run.result() for run in each] for each in runs]
        differences = [100 * (after - before) for before, after in zip(*scores, strict=True)]
        cells = [f"{100 * statistics.mean(values):.1f} ({100 * min(values):.1f} to {100 * max(values):.1f})"
                 for values in scores]  # fmt: skip
        lines.append(f"| {count} | {cells[0]} | {cells[1]} | {statistics.mean(differences):+.1f} "
                     f"({', '.join(f'{each:+.1f}' for each in differences)}) |")  # fmt: skip
    note += f" Accuracy in % on test reviews: means (lowest to highest) of {options.seeds} seeds. On {hardware()}."
    section = f"## {title}\n\n{note}\n\n" + "\n".join(lines) + "\n"
    print(section)
    (folder / "section.md").write_text(section)
    if options.write:
        sections = [path.read_text() for name in ("short", "long")
                    if (path := options.folder / name / "section.md").is_file()]  # fmt: skip
        head = f"# What continued pretraining is worth\n\nMade by `benchmarks/pretraining_pays.py`, {date.today()}.\n\n"
        path = ROOT / "benchmarks" / "results" / "pretraining_pays.md"
        path.write_text(head + "\n".join(sections))


def make_files(folder: Path, labels: list[int], long: bool) -> None:
    """Writes test.jsonl, N.jsonl with the first N of the same rows, and texts.txt with all others."""
    if all((folder / f"{name}.jsonl").exists() for name in ("test", *labels)):
        return
    from toolkit.data.read import read_demo

    rows = [
        dict(row)
        for row in read_demo("demo:imdb" if long else "demo:rotten-tomatoes")["train"].rows
    ]
    if long:
        from tokenizers import Tokenizer

        from toolkit.demo import model_path

        tokenizer = Tokenizer.from_file(f"{model_path('demo:minilm')}/tokenizer.json")
        tokenizer.no_truncation()
        lengths = [
            len(each.ids) for each in tokenizer.encode_batch_fast([row["text"] for row in rows])
        ]
        rows = [row for row, length in zip(rows, lengths, strict=True) if length > 600]
    random.Random(7).shuffle(rows)
    test = 500 if long else 1000
    parts = {"test": rows[:test], **{str(count): rows[test : test + count] for count in labels}}
    for name, part in parts.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    texts = [
        " ".join(row["text"].split()) for row in rows[test + (max(labels) if long else 1000) :]
    ]
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def short_models(
    folder: Path, options: argparse.Namespace, until: float
) -> tuple[str, str, tuple[str, str]]:
    """(title, note, the models before and after)."""
    model = ["--model_name_or_path", "demo:minilm", "--new_head", "true", "--max_length", 128]
    out = pretrain(folder, "pretrained", [*model, "--max_eval_samples", 300], options, until)
    first, last = perplexities(out)
    texts = len((folder / "texts.txt").read_text(encoding="utf-8").splitlines())
    note = (f"MiniLM with a new masked-language head, pretrained on {texts:,} unlabelled film reviews of a sentence or "
            f"two: {duration(out, options)}; perplexity {first:.0f} at the first evaluation, {last:.1f} at the "
            "last.")  # fmt: skip
    return "Few labels, short texts", note, ("demo:minilm", str(out / "model"))


def long_models(
    folder: Path, options: argparse.Namespace, until: float
) -> tuple[str, str, tuple[str, str]]:
    """(title, note, the models before and after)."""
    model = ["--model_name_or_path", "demo:minilm", "--new_head", "true", "--max_length", 512]
    short = pretrain(folder, "at-512", [*model, "--max_eval_samples", 100], options, until)
    before = folder / "bigbird"
    if not before.exists():
        make = ["-m", "toolkit", "to-bigbird", short / "model", before, "--max_length", LONG]
        run("to-bigbird", list(map(str, make)), until)
    model = ["--model_name_or_path", before, "--max_length", LONG, "--max_eval_samples", 100]
    if not (folder / "unchanged" / "report.html").exists():
        no_training = [
            *MLM,
            "--max_steps",
            1,
            "--output_dir",
            folder / "unchanged",
            "--learning_rate",
            "1e-12",
        ]
        recipe("pretrain", ["--train_file", folder / "texts.txt", *model, *no_training], until)
    out = pretrain(folder, "at-1536", model, options, until)
    note = (f"A BigBird of MiniLM, which was pretrained at 512 tokens ({duration(short, options)}), before and after "
            f"pretraining at {LONG} ({duration(out, options)}). Perplexity on held-out reviews of more than "
            f"600 tokens: {perplexities(folder / 'unchanged')[1]:.1f} before, {perplexities(out)[1]:.1f} "
            "after.")  # fmt: skip
    return "A BigBird made of a BERT, long texts", note, (str(before), str(out / "model"))


def duration(out: Path, options: argparse.Namespace) -> str:
    steps = len((out / "metrics.jsonl").read_text().splitlines())
    return f"{steps:,} steps of 32 texts" + (
        "" if options.steps else f", {options.minutes:g} minutes by the speed of a trial")  # fmt: skip


def perplexities(out: Path) -> tuple[float, float]:
    first, *_, last = [json.loads(line)["perplexity"] for line in (out / "eval.jsonl").open()] * 2
    return first, last


def pretrain(
    folder: Path, name: str, model: list[object], options: argparse.Namespace, until: float
) -> Path:
    """Pretrains for --steps, or for about --minutes by the speed of a trial of 24 steps. Returns the run's folder."""
    out, trial = folder / name, folder / f"{name}-trial"
    common = ["--train_file", folder / "texts.txt", *model, *MLM]
    if not (out / "report.html").exists():
        if options.steps:
            steps = options.steps[name == "at-1536"]
        else:
            if not (trial / "report.html").exists():
                recipe("pretrain", [*common, "--max_steps", "24", "--output_dir", trial], until)
            speeds = [
                json.loads(line)["samples_per_second"] for line in (trial / "metrics.jsonl").open()
            ]
            steps = max(10, round(options.minutes * 60 * statistics.median(speeds) / 32))
        more = [
            "--max_steps",
            steps,
            "--eval_every",
            -(-steps // 8),
            "--checkpoint_every",
            50,
            "--output_dir",
            out,
        ]
        recipe("pretrain", [*common, *more], until)
    return out


def fine_tune(out: Path, model: str, labels: int, seed: int, long: bool, until: float) -> float:
    """The accuracy on the test rows."""
    if not (out / "report.html").exists():
        epochs = {100: 10, 300: 6}.get(labels, 4)
        recipe("cls", ["--train_file", out.parent / f"{labels}.jsonl", "--test_file", out.parent / "test.jsonl",
                       "--model_name_or_path", model, "--seed", seed, "--data_seed", 1,
                       "--max_length", LONG if long else 128, "--num_train_epochs", epochs, "--learning_rate", "1e-4",
                       "--warmup_ratio", 0.1, "--report_to", "none", "--global_batch_size", 16, "--output_dir", out,
                       *(["--eval_every", 10**6] if long else [])], until)  # fmt: skip
    return float(json.loads((out / "eval.jsonl").read_text().splitlines()[-1])["accuracy"])


def recipe(name: str, words: list[object], until: float) -> None:
    run(name, [str(ROOT / "recipes" / f"{name}.py"), *map(str, words)], until)


def run(name: str, words: list[str], until: float) -> None:
    if time.monotonic() > until:
        sys.exit("unfinished: call the same command again")
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    print(f"{name}: {done.stdout.strip().splitlines()[0]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
