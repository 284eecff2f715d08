"""Labelling texts on a CPU: `toolkit predict` with torch, ONNX Runtime and OpenVINO, against
transformers.

    python benchmarks/predict.py runs/cls/model --rows 5000 --rounds 2 --write

The model is that of a run. Texts are combined from halves of two reviews, so that none occurs
twice. Each contestant is a whole process, imports included, and they take turns; compare the ratios,
which are within a round.

    pipeline        transformers.pipeline(..., batch_size=64)
    Trainer         Trainer.predict with its defaults
    torch fp32      toolkit predict --mixed_precision no
    torch bf16      toolkit predict --mixed_precision bf16
    onnx int8       toolkit predict on the folder of toolkit export --to onnx --int8
    openvino int8   toolkit predict on the folder of toolkit export --to openvino --int8

CPU seconds are those of all threads, and more reliable on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from machine import hardware, write_page

ROOT = Path(__file__).resolve().parent.parent
DATA = {"short": "demo:rotten-tomatoes", "long": "demo:imdb"}
THEIRS = ("pipeline", "Trainer")
# contestant -> (precision, runtime of the exported model)
OURS = {
    "torch fp32": ("no", None),
    "torch bf16": ("bf16", None),
    "onnx int8": ("no", "onnx"),
    "openvino int8": ("no", "openvino"),
}


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu: float
    peak: int
    """Resident bytes."""
    answers: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run's model folder")
    parser.add_argument("--texts", choices=DATA, default="short")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--contestants", nargs="+", choices=[*THEIRS, *OURS], default=[*THEIRS, *OURS]
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/predict.md")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)  # contestant, file, output
    options = parser.parse_args()
    if options.worker:
        work(options.model, *options.worker)
        return
    runs: dict[str, list[Measured]] = {name: [] for name in options.contestants}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder / "texts.jsonl", options)
        for number in range(options.rounds):
            for who in runs:
                runs[who].append(measure(who, folder, options.model))
                line = f"round {number + 1}, {who}: {runs[who][-1].seconds:.1f} s"
                print(line, file=sys.stderr, flush=True)
    page = table(runs, options)
    print(page)
    if options.write:
        path = ROOT / "benchmarks" / "results" / "predict.md"
        write_page(path, f"# Labelling texts on a CPU\n\n{page}\n")


def write_texts(file: Path, options: Namespace) -> None:
    from toolkit.data.read import read_demo

    texts = read_demo(DATA[options.texts])["train"].rows[:5000]["text"]
    words = [text.split() for text in texts]
    generator = random.Random(0)
    combined: dict[str, None] = {}
    while len(combined) < options.rows:
        one, other = generator.choice(words), generator.choice(words)
        combined[" ".join([*one[: len(one) // 2], *other[len(other) // 2 :]])] = None
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in combined))


def measure(who: str, folder: Path, model: str) -> Measured:
    """One contestant, in a process of its own."""
    output = folder / "answers.jsonl"
    output.unlink(missing_ok=True)
    texts = str(folder / "texts.jsonl")
    if who in THEIRS:
        words = [__file__, model, "--worker", who, texts, str(output)]
    else:
        precision, runtime = OURS[who]
        if runtime:
            model = str(export(model, folder / runtime, runtime))
        words = ["-m", "toolkit", "predict", model, texts, "--output", str(output)]
        words += ["--mixed_precision", precision]
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            errors.seek(0)
            sys.exit(f"{who} failed:\n{errors.read()[-3000:]}")
    answers = [json.loads(line)["prediction"] for line in output.open(encoding="utf-8")]
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, answers)


def export(model: str, out: Path, runtime: str) -> Path:
    """The folder of the model in 8 bits, written once."""
    if not out.exists():
        words = ["-m", "toolkit", "export", model, str(out), "--to", runtime, "--int8"]
        words += ["--max_drop", "100", "--max_changed", "100"]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=sys.stderr)
    return out


def work(model: str, who: str, file: str, output: str) -> None:
    """A contestant of transformers."""
    with Path(file).open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    answers = pipeline(model, texts) if who == "pipeline" else trainer(model, texts)
    written = "".join(json.dumps({"prediction": answer}) + "\n" for answer in answers)
    Path(output).write_text(written, encoding="utf-8")


def pipeline(model: str, texts: list[str]) -> list[str]:
    import transformers

    classify = transformers.pipeline(
        "text-classification", model=model, batch_size=64, device="cpu"
    )
    answers = classify((text for text in texts), truncation=True)
    return [answer["label"] for answer in answers]


def trainer(folder: str, texts: list[str]) -> list[str]:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [{"input_ids": ids} for ids in tokenizer(texts, truncation=True)["input_ids"]]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(out, report_to="none", use_cpu=True, disable_tqdm=True)
        output = Trainer(model, arguments, DataCollatorWithPadding(tokenizer)).predict(samples)
    return [model.config.id2label[place] for place in output.predictions.argmax(axis=1).tolist()]


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
            f"{options.rows / statistics.median(run.seconds for run in each):.0f}",
            spread([run.cpu for run in each]),
            spread([theirs.cpu / run.cpu for theirs, run in pairs]),
            f"{statistics.median(run.peak for run in each) / 1e6:.0f}",
            f"{statistics.fmean(one == other for one, other in equal):.1%}",
        ]
        lines.append(f"| {who} | {' | '.join(cells)} |")
    what = f"{options.rows} {options.texts} texts, {options.rounds} rounds, imports included"
    command = f"`python benchmarks/predict.py {' '.join(sys.argv[1:])}`"
    return "\n".join([*lines, "", f"{what}. {hardware()}, {date.today()}. {command}"])


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
