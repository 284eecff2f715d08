"""Labelling texts: `toolkit predict` with torch, ONNX Runtime and OpenVINO, against transformers.

    python benchmarks/predict.py runs/cls/model --rows 5000 --rounds 2 --write          on a CPU
    python benchmarks/predict.py --layers 12 --texts long --rows 20000 --without_start 512 \\
        --contestants "Trainer, tuned" "torch bf16" "evaluate bf16" --rounds 1          on a GPU

The model is that of a run (with `--layers` a BERT with random weights, for speed only). Texts are
combined from halves of two reviews, so that none occurs twice. Each contestant is a whole process,
imports included, and they take turns; compare the ratios, which are within a round.

    pipeline        transformers.pipeline(..., batch_size=64)
    Trainer         Trainer.predict with its defaults
    Trainer, tuned  in bf16, texts sorted by length, 64 in a batch, torch's attention in place of
                    cuDNN's; on a GPU four worker processes for batches
    torch fp32      toolkit predict --mixed_precision no
    torch bf16      toolkit predict --mixed_precision bf16
    onnx int8       toolkit predict on the folder of toolkit export --to onnx --int8
    openvino int8   toolkit predict on the folder of toolkit export --to openvino --int8
    evaluate bf16   toolkit evaluate --mixed_precision bf16

`--without_start N` runs each contestant on N rows, too, and takes those rows and seconds off.
CPU seconds are those of all threads, and more reliable on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from machine import hardware, random_bert, write_page, write_rows

from toolkit.utils.children import stop_with_parent

ROOT = Path(__file__).resolve().parent.parent
DATA = {"short": "demo:rotten-tomatoes", "long": "demo:imdb"}
THEIRS = ("pipeline", "Trainer", "Trainer, tuned")
# contestant -> (precision, runtime of the exported model)
OURS = {
    "torch fp32": ("no", None),
    "torch bf16": ("bf16", None),
    "onnx int8": ("no", "onnx"),
    "openvino int8": ("no", "openvino"),
}
EVALUATE = "evaluate bf16"
ON_REQUEST = ("Trainer, tuned", EVALUATE)
LABELS = ("neg", "pos")


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu: float
    peak: int
    """Resident bytes."""
    answers: list[str]
    tokens: float
    """Of a text; NaN if the contestant does not count them."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a run's model folder")
    parser.add_argument("--layers", type=int, help="a BERT of so many layers, random weights")
    parser.add_argument("--texts", choices=DATA, default="short")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--without_start", type=int, default=0, help="rows of the run taken off")
    known = [*THEIRS, *OURS, EVALUATE]
    usual = [name for name in known if name not in ON_REQUEST]
    parser.add_argument("--contestants", nargs="+", choices=known, default=usual)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/predict.md")
    parser.add_argument("--json", help="a file for the figures, for benchmarks/gpu_report.py")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)  # contestant, file, output
    options = parser.parse_args()
    if not options.model and not options.layers:
        parser.error("name a run's model folder, or --layers")
    if options.worker:
        work(options.model, *options.worker)
        return
    runs: dict[str, list[Measured]] = {name: [] for name in options.contestants}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or train(folder, options.layers)
        write_texts(folder / "texts.jsonl", options)
        for number in range(options.rounds):
            for who in runs:
                runs[who].append(measure(who, folder, model, options))
                line = f"round {number + 1}, {who}: {runs[who][-1].seconds:.1f} s"
                print(line, file=sys.stderr, flush=True)
    page = table(runs, options)
    print(page)
    write_rows(options.json, rows_of(runs, options))
    if options.write:
        path = ROOT / "benchmarks" / "results" / "predict.md"
        write_page(path, f"# Labelling texts on a CPU\n\n{page}\n")


def train(folder: Path, layers: int) -> str:
    """A classifier of random weights, after one step."""
    words = ["recipes/cls.py", "--model_name_or_path", str(random_bert(layers))]
    words += ["--dataset_name", DATA["short"], "--max_train_samples", "64", "--max_steps", "1"]
    words += ["--max_eval_samples", "16", "--global_batch_size", "8", "--baselines", "false"]
    words += ["--max_length", "512", "--report_to", "none", "--output_dir", str(folder / "run")]
    run(words)
    return str(folder / "run" / "model")


def write_texts(file: Path, options: Namespace) -> None:
    from toolkit.data.read import read_demo

    texts = read_demo(DATA[options.texts])["train"].rows[:5000]["text"]
    words = [text.split() for text in texts]
    generator = random.Random(0)
    combined: dict[str, None] = {}
    while len(combined) < options.rows:
        one, other = generator.choice(words), generator.choice(words)
        combined[" ".join([*one[: len(one) // 2], *other[len(other) // 2 :]])] = None
    rows = [{"text": text, "label": generator.choice(LABELS)} for text in combined]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = file.with_name("few.jsonl")
    few.write_text("".join(json.dumps(row) + "\n" for row in rows[: options.without_start]))


def measure(who: str, folder: Path, model: str, options: Namespace) -> Measured:
    """One contestant, in a process of its own; less a process with few rows."""
    whole = measure_file(who, folder, model, folder / "texts.jsonl")
    if not options.without_start:
        return whole
    few = measure_file(who, folder, model, folder / "few.jsonl")
    if whole.seconds <= few.seconds:
        sys.exit(f"error: {who}: --rows {options.rows} take no longer than --without_start")
    return replace(whole, seconds=whole.seconds - few.seconds, cpu=whole.cpu - few.cpu)


def measure_file(who: str, folder: Path, model: str, texts: Path) -> Measured:
    output = folder / "answers.jsonl"
    output.unlink(missing_ok=True)
    evaluation = folder / "evaluation"
    shutil.rmtree(evaluation, ignore_errors=True)
    if who in THEIRS:
        words = [__file__, model, "--worker", who, str(texts), str(output)]
    elif who == EVALUATE:
        words = ["-m", "toolkit", "evaluate", model, str(texts), "--output_dir", str(evaluation)]
        words += ["--mixed_precision", "bf16"]
    else:
        precision, runtime = OURS[who]
        if runtime:
            model = str(export(model, folder / runtime, runtime))
        words = ["-m", "toolkit", "predict", model, str(texts), "--output", str(output)]
        words += ["--mixed_precision", precision]
    seconds, usage = run(words)
    file = evaluation / "predictions.jsonl" if who == EVALUATE else output
    lines = [json.loads(line) for line in file.open(encoding="utf-8")]
    cpu = usage.ru_utime + usage.ru_stime
    answers = [line["prediction"] for line in lines]
    tokens = statistics.fmean(line.get("tokens", math.nan) for line in lines)
    return Measured(seconds, cpu, usage.ru_maxrss * 1024, answers, tokens)


def run(words: Sequence[str]) -> tuple[float, Any]:
    """(seconds, resources used) of a Python program."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors,
            preexec_fn=stop_with_parent,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            errors.seek(0)
            sys.exit(f"{' '.join(words)} failed:\n{errors.read()[-3000:]}")
    return seconds, usage


def export(model: str, out: Path, runtime: str) -> Path:
    """The folder of the model in 8 bits, written once."""
    if not out.exists():
        words = ["-m", "toolkit", "export", model, str(out), "--to", runtime, "--int8"]
        words += ["--max_changed", "100"]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=sys.stderr)
    return out


def work(model: str, who: str, file: str, output: str) -> None:
    """A contestant of transformers."""
    with Path(file).open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    answers = pipeline(model, texts) if who == "pipeline" else trainer(model, texts, who)
    written = "".join(json.dumps(answer) + "\n" for answer in answers)
    Path(output).write_text(written, encoding="utf-8")


def pipeline(model: str, texts: list[str]) -> list[dict[str, Any]]:
    import transformers

    classify = transformers.pipeline("text-classification", model=model, batch_size=64)
    answers = classify((text for text in texts), truncation=True)
    return [{"prediction": answer["label"]} for answer in answers]


def trainer(folder: str, texts: list[str], who: str) -> list[dict[str, Any]]:
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [{"input_ids": ids} for ids in tokenizer(texts, truncation=True)["input_ids"]]
    order = list(range(len(samples)))
    on_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {"use_cpu": not on_gpu}
    if who == "Trainer, tuned":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape
        order.sort(key=lambda row: len(samples[row]["input_ids"]))
        settings |= {"bf16": True, "per_device_eval_batch_size": 64}
        settings["dataloader_num_workers"] = 4 if on_gpu else 0
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(out, report_to="none", disable_tqdm=True, **settings)
        predictor = Trainer(model, arguments, DataCollatorWithPadding(tokenizer))
        output = predictor.predict([samples[row] for row in order])
    answers: list[dict[str, Any]] = [{}] * len(samples)
    for row, place in zip(order, output.predictions.argmax(axis=1).tolist(), strict=True):
        tokens = len(samples[row]["input_ids"])
        answers[row] = {"prediction": model.config.id2label[place], "tokens": tokens}
    return answers


def table(runs: dict[str, list[Measured]], options: Namespace) -> str:
    first = next(iter(runs))
    lines = [
        f"| | rows/s | CPU seconds | CPU seconds, {first} / this | peak MB | same answers |",
        "|---|---|---|---|---|---|",
    ]
    for who, each in runs.items():
        pairs = list(zip(runs[first], each, strict=True))
        equal = zip(runs[first][0].answers, each[0].answers, strict=True)
        cells = [
            f"{rows_per_second(each, options):.0f}",
            spread([run.cpu for run in each]),
            spread([theirs.cpu / run.cpu for theirs, run in pairs]),
            f"{statistics.median(run.peak for run in each) / 1e6:.0f}",
            f"{statistics.fmean(one == other for one, other in equal):.1%}",
        ]
        lines.append(f"| {who} | {' | '.join(cells)} |")
    start = f"less {options.without_start} rows" if options.without_start else "imports included"
    what = f"{options.rows} {options.texts} texts, {options.rounds} rounds, {start}"
    command = f"`python benchmarks/predict.py {' '.join(sys.argv[1:])}`"
    return "\n".join([*lines, "", f"{what}. {hardware()}, {date.today()}. {command}"])


def rows_per_second(each: Sequence[Measured], options: Namespace) -> float:
    rows = options.rows - options.without_start
    return rows / statistics.median(run.seconds for run in each)


def rows_of(runs: dict[str, list[Measured]], options: Namespace) -> list[dict[str, str | float]]:
    speeds = {who: rows_per_second(each, options) for who, each in runs.items()}
    # all contestants have the same tokens
    tokens = max(
        (run.tokens for each in runs.values() for run in each if run.tokens > 0), default=0
    )
    ours = speeds.get("torch bf16", math.nan)
    rows: list[dict[str, str | float]] = []
    for who, speed in speeds.items():
        row: dict[str, str | float] = {"": who, "rows/s": speed}
        if tokens:
            row["tokens of a text"] = tokens
        rows.append(row | {"time / torch bf16": ours / speed})
    return rows


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
