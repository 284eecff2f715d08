"""Labelling texts on a CPU: `toolkit predict` with torch, ONNX Runtime and OpenVINO, against transformers.

    python benchmarks/predict.py runs/cls/model --texts short --rounds 2 --write
    python benchmarks/predict.py runs/cls/model --layers 12 --rows 200

The model is that of a fine-tuned run (`--layers 12`: instead a BERT-base with random weights, to measure speed only).
Texts are combined from halves of two reviews, so that none occurs twice: short ones, or long ones of IMDB. Each
contestant is a new process, and they take turns; compare the ratios, which are within a round.

    pipeline        transformers.pipeline(..., batch_size=64)
    Trainer         Trainer.predict with its defaults, texts tokenized before the clock starts
    torch fp32      toolkit predict --mixed_precision no
    torch bf16      toolkit predict --mixed_precision bf16
    onnx int8       toolkit predict on the folder of toolkit export --to onnx --int8
    openvino int8   toolkit predict on the folder of toolkit export --to openvino --int8

Seconds count from the end of imports to the last answer (ours: written to a file), loading the model included. CPU
seconds are those of all threads, and more reliable on a busy machine. "First" is the time to the first answers.
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
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import contestants
from machine import hardware

ROOT = Path(__file__).resolve().parent.parent
OURS = {"torch fp32": ("no", None), "torch bf16": ("bf16", None),
        "onnx int8": ("no", "onnx"), "openvino int8": ("no", "openvino")}  # fmt: skip
CONTESTANTS = ("pipeline", "Trainer", *OURS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run's model folder")
    parser.add_argument("--texts", choices=("short", "long"), default="short")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--layers", type=int, help="of a BERT-base of random weights, instead of the model"
    )
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "benchmark-predict",
                        help="folder of exported models and measurements, which later calls use")  # fmt: skip
    parser.add_argument(
        "--write",
        action="store_true",
        help="write all measurements to benchmarks/results/predict.md",
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(*options.worker)))
        return
    options.kept.mkdir(exist_ok=True)
    model, name = (
        Path(options.model),
        f"BERT-base, {options.layers} layers, random" if options.layers else "MiniLM, fine-tuned",
    )
    file = options.kept / f"{options.texts}-{options.rows}.jsonl"
    if not file.exists():
        write_texts(file, options.texts, options.rows)
    if options.layers:
        model = random_model(model, options.kept / f"random-{options.layers}", options.layers)
    for number in range(options.rounds):
        for who in options.contestants:
            folder = (
                exported(model, file, options, OURS[who][1])
                if who in OURS and OURS[who][1]
                else model
            )
            result = spawn(who, folder, file) | {
                "model": name,
                "texts": options.texts,
                "rows": options.rows,
                "who": who,
            }
            print(
                f"{number + 1} {who}: {result['seconds']:.1f} s, {result['cpu']:.1f} CPU seconds",
                file=sys.stderr,
            )
            with (options.kept / "measured.jsonl").open("a") as measured:
                measured.write(json.dumps(result | {"round": f"{os.getpid()}-{number}"}) + "\n")
    page = report(
        [json.loads(line) for line in (options.kept / "measured.jsonl").read_text().splitlines()]
    )
    print(page)
    if options.write:
        (ROOT / "benchmarks" / "results" / "predict.md").write_text(page, encoding="utf-8")


def write_texts(file: Path, kind: str, rows: int) -> None:
    from toolkit.data.read import read_demo

    table = read_demo("demo:rotten-tomatoes" if kind == "short" else "demo:imdb")["train"].rows
    words, generator = [text.split() for text in table[:5000]["text"]], random.Random(0)
    texts: dict[str, None] = {}
    while len(texts) < rows:
        one, other = generator.choice(words), generator.choice(words)
        texts[" ".join([*one[: len(one) // 2], *other[len(other) // 2 :]])] = None
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def random_model(source: Path, folder: Path, layers: int) -> Path:
    """A BERT-base with the tokenizer of `source`."""
    if not folder.exists():
        import torch
        from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(source)
        BertForSequenceClassification(
            BertConfig(vocab_size=len(tokenizer), num_hidden_layers=layers)
        ).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def exported(model: Path, file: Path, options: argparse.Namespace, to: str) -> Path:
    """The folder of the model exported in 8 bits, written once."""
    out = options.kept / f"{to}-{options.layers or 'model'}"
    if not out.exists():
        run = (
            ["--validation_file", str(file), "--calibration_file", str(file)]
            if options.layers
            else []
        )
        command = [
            sys.executable,
            "-m",
            "toolkit",
            "export",
            str(model),
            str(out),
            "--to",
            to,
            "--int8",
            "--max_drop",
            "100",
            "--max_changed",
            "100",
        ]
        print(
            subprocess.run([*command, *run], check=True, capture_output=True, text=True).stdout,
            file=sys.stderr,
        )
    return out


def spawn(who: str, folder: Path, file: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, str(folder), "--worker", who, str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{who} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def work(who: str, folder: str, file: str) -> dict[str, Any]:
    """One contestant, in its own process."""
    import resource

    measure = {"pipeline": pipeline, "Trainer": plain_trainer}.get(who, ours)
    clock, first, answers = measure(who, folder, file)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": clock.wall,
        "cpu": clock.cpu,
        "first": first,
        "resident": resident,
        "answers": answers,
    }


def _texts(file: str) -> list[str]:
    with Path(file).open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def pipeline(who: str, folder: str, file: str) -> tuple[contestants.Clock, float, list[str]]:
    import transformers

    texts, clock, answers, first = _texts(file), contestants.Clock(), [], 0.0
    clock.start()
    classify = transformers.pipeline(
        "text-classification", model=folder, batch_size=64, device="cpu"
    )
    for answer in classify((text for text in texts), truncation=True):
        first = first or time.perf_counter() - clock._wall
        answers.append(answer["label"])
    clock.stop()
    return clock, first, answers


def plain_trainer(who: str, folder: str, file: str) -> tuple[contestants.Clock, float, list[str]]:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer, clock = AutoTokenizer.from_pretrained(folder), contestants.Clock()
    encoded = tokenizer(_texts(file), truncation=True)
    samples = [
        {name: encoded[name][index] for name in encoded}
        for index in range(len(encoded["input_ids"]))
    ]
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(out, report_to="none", use_cpu=True, disable_tqdm=True)
        clock.start()
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        output = Trainer(model, arguments, DataCollatorWithPadding(tokenizer)).predict(samples)
        clock.stop()
    names = model.config.id2label
    return clock, clock.wall, [names[index] for index in output.predictions.argmax(axis=1).tolist()]


def ours(who: str, folder: str, file: str) -> tuple[contestants.Clock, float, list[str]]:
    from toolkit.cli import build_parser
    from toolkit.features.predict.command import predict_file
    from toolkit.features.predict.parts import Parts

    clock, written, write = contestants.Clock(), [], Parts.write

    def timed_write(*arguments: Any) -> None:
        write(*arguments)
        written.append(time.perf_counter() - clock._wall)

    Parts.write = timed_write  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as out:
        output = Path(out) / "out.jsonl"
        words = [
            "predict",
            folder,
            file,
            "--output",
            str(output),
            "--mixed_precision",
            OURS[who][0],
        ]
        options = build_parser().parse_args(words)
        clock.start()
        predict_file(options)
        clock.stop()
        with output.open(encoding="utf-8") as lines:
            return clock, written[0], [json.loads(line)["prediction"] for line in lines]


def report(measured: list[dict[str, Any]]) -> str:
    import torch

    libraries = ("torch", "transformers", "onnxruntime", "openvino", "nncf")
    about = (__doc__ or "").split("\n\n", 2)[2].strip().replace("\n    ", "\n- ")
    used = ", ".join(f"{name} {version(name)}" for name in libraries)
    amx = "with" if torch.cpu.get_capabilities().get("amx_int8") else "without"
    made = f"{hardware()}, {amx} AMX, {used}, {date.today()}. Medians over rounds; ratios within a round."
    lines = ["# Labelling texts on a CPU", "", about, "", made]
    head = [
        "",
        "rows/s",
        "first, s",
        "peak MB",
        "CPU time: torch fp32 / this",
        "torch bf16 / this",
        "same answers",
    ]
    for model, texts, rows in dict.fromkeys(
        (each["model"], each["texts"], each["rows"]) for each in measured
    ):
        here = [
            each
            for each in measured
            if (each["model"], each["texts"], each["rows"]) == (model, texts, rows)
        ]
        rounds = {each["round"]: {} for each in here}
        for each in here:
            rounds[each["round"]][each["who"]] = each
        lines += ["", f"## {model}: {rows} {texts} texts, {len(rounds)} rounds", ""]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [
            _row(who, list(rounds.values()), rows)
            for who in CONTESTANTS
            if any(who in each for each in rounds.values())
        ]
    return "\n".join([*lines, ""])


def _row(who: str, rounds: list[dict[str, Any]], rows: int) -> str:
    runs = [each[who] for each in rounds if who in each]

    def ratio(other: str) -> str:
        ratios = [
            each[other]["cpu"] / each[who]["cpu"]
            for each in rounds
            if who in each and other in each
        ]
        return (
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
            if ratios
            else "-"
        )

    def median(name: str) -> float:
        return statistics.median(each[name] for each in runs)

    # of torch fp32, or of bf16 where that was left out
    names = (name for name in ("torch fp32", "torch bf16") if any(name in each for each in rounds))
    if reference := next(names, None):
        answers = next(each[reference]["answers"] for each in rounds if reference in each)
        same = f"{statistics.fmean(a == b for a, b in zip(answers, runs[0]['answers'], strict=True)):.1%}"
        same += "" if reference == "torch fp32" else " of bf16's"
    else:
        same = "-"
    return (
        f"| {who} | {rows / median('seconds'):.0f} | {median('first'):.1f} | {median('resident') / 1e6:.0f} | "
        f"{ratio('torch fp32')} | {ratio('torch bf16')} | {same} |"
    )


if __name__ == "__main__":
    main()
