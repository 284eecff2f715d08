"""recipes/ner.py beside transformers' Trainer as its example run_ner.py uses it: F1 and time.

    python benchmarks/ner.py                       names in English tweets, one seed: 5 minutes on two cores
    python benchmarks/ner.py --seeds 1 2 3 --write
    python benchmarks/ner.py --data demo:peoples-daily --model demo:m3e-small --rows 4000

The same rows, weights, optimizer steps, samples per step, learning rate and precision (fp32), in
turns. The Trainer labels the first piece of each word, as run_ner.py does, pads each batch to its
longest text, and is scored by seqeval; ours labels every piece and is scored on characters. Both
scores are of the last step. `seconds`: the steps alone, without evaluation and loading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from machine import hardware, write_page

ROOT = Path(__file__).resolve().parent.parent
BATCH = 32


def main() -> None:
    options = parse()
    if options.worker:
        print(json.dumps(trainer(options)))
        return
    results: dict[str, list[dict[str, float]]] = {"ours": [], "Trainer": []}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_rows(folder, options)
            results["ours"].append(ours(folder, seed, options))
            results["Trainer"].append(worker(folder, seed))
        for name, numbers in results.items():
            print(f"seed {seed}, {name}: {numbers[-1]}", file=sys.stderr, flush=True)
    page = table(results, options)
    print(page)
    if options.write:
        write_page(ROOT / "benchmarks/results/ner.md", f"# Token classification\n\n{page}\n")


def parse() -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo:minilm")
    add("--data", default="demo:tweets")
    add("--rows", type=int, default=2394, help="of the data set; a fifth of them is evaluated")
    add("--epochs", type=int, default=4)
    add("--learning_rate", type=float, default=2e-4)
    add("--max_length", type=int, default=128)
    add("--seeds", type=int, nargs="+", default=[42])
    add("--write", action="store_true", help="write benchmarks/results/ner.md")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    add("--seed", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_rows(folder: Path, options: Namespace) -> None:
    """The rows as tokens and tags: of Chinese each character is a token."""
    from toolkit.data.read import read_demo
    from toolkit.demo import model_path

    rows = read_demo(options.data)["train"].rows.shuffle(seed=0).select(range(options.rows))
    if "text" in rows.column_names:
        rows = rows.map(as_characters, remove_columns=rows.column_names)
    parts = rows.train_test_split(0.2, seed=0, shuffle=False)
    parts["train"].to_json(folder / "train.jsonl", force_ascii=False)
    parts["test"].to_json(folder / "validation.jsonl", force_ascii=False)
    facts = {**vars(options), "model": model_path(options.model)}
    (folder / "options.json").write_text(json.dumps(facts))


def as_characters(row: dict[str, Any]) -> dict[str, Any]:
    tags = ["O"] * len(row["text"])
    for span in row["entities"]:
        tags[span["start"] : span["end"]] = [f"I-{span['label']}"] * (span["end"] - span["start"])
        tags[span["start"]] = f"B-{span['label']}"
    return {"tokens": list(row["text"]), "ner_tags": tags}


def ours(folder: Path, seed: int, options: Namespace) -> dict[str, float]:
    run = folder / "run"
    settings = {
        "train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl",
        "model_name_or_path": options.model, "num_train_epochs": options.epochs, "seed": seed,
        "learning_rate": options.learning_rate, "global_batch_size": BATCH, "max_length": options.max_length,
        "warmup_ratio": 0.1, "weight_decay": 0.0, "mixed_precision": "no", "report_to": "none", "output_dir": run,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run(
        [sys.executable, "recipes/ner.py", *words], cwd=ROOT, check=True, stdout=sys.stderr
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    lines = [json.loads(line) for line in (run / "eval.jsonl").open()]
    last = next(line for line in lines if line["step"] == len(steps))
    seconds = sum(step["samples"] / step["samples_per_second"] for step in steps)
    return {"f1": last["f1"], "steps": len(steps), "seconds": seconds}


def worker(folder: Path, seed: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", str(folder), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def trainer(options: Namespace) -> dict[str, float]:
    """As run_ner.py of transformers does it."""
    from datasets import load_dataset
    from seqeval.metrics import f1_score
    from transformers import (
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    folder = options.worker
    given = json.loads((folder / "options.json").read_text())
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "validation")}
    rows = load_dataset("json", data_files=files)
    tags = sorted({tag for row in rows["train"]["ner_tags"] for tag in row} - {"O"})
    names = ["O", *tags]
    tokenizer = AutoTokenizer.from_pretrained(given["model"])

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(
            batch["tokens"],
            truncation=True,
            max_length=given["max_length"],
            is_split_into_words=True,
        )
        encoded["labels"] = []
        for place, row_tags in enumerate(batch["ner_tags"]):
            labels = []
            previous = None
            for word in encoded.word_ids(place):
                is_first = word is not None and word != previous
                labels.append(names.index(row_tags[word]) if is_first else -100)
                previous = word
            encoded["labels"].append(labels)
        return dict(encoded)

    tokens = rows.map(encode, batched=True, remove_columns=["tokens", "ner_tags"])
    set_seed(options.seed)
    model = AutoModelForTokenClassification.from_pretrained(given["model"], num_labels=len(names))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), num_train_epochs=given["epochs"], seed=options.seed,
        learning_rate=given["learning_rate"], per_device_train_batch_size=BATCH, warmup_steps=0.1,
        weight_decay=0.0, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    collator = DataCollatorForTokenClassification(tokenizer)
    run = Trainer(model, arguments, data_collator=collator, train_dataset=tokens["train"])
    trained = run.train()
    logits, labels, _ = run.predict(tokens["validation"])
    found = []
    truth = []
    for scores, row in zip(logits, labels, strict=True):
        counts = row != -100
        found.append([names[tag] for tag in np.argmax(scores[counts], axis=-1)])
        truth.append([names[tag] for tag in row[counts]])
    seconds = trained.metrics["train_runtime"]
    return {"f1": float(f1_score(truth, found)), "steps": trained.global_step, "seconds": seconds}


def table(results: dict[str, list[dict[str, float]]], options: Namespace) -> str:
    lines = [
        f"{options.data}, {options.rows} rows, {options.model}, {options.epochs} epochs of batches of {BATCH}, seeds "
        f"{', '.join(map(str, options.seeds))}; {hardware()}.",
        "", "| contestant | F1, mean (each) | steps | seconds, mean |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, numbers in results.items():
        scores = [each["f1"] for each in numbers]
        each = ", ".join(f"{score:.4f}" for score in scores)
        seconds = statistics.mean(one["seconds"] for one in numbers)
        lines.append(
            f"| {name} | {statistics.mean(scores):.4f} ({each}) | {numbers[0]['steps']:.0f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
