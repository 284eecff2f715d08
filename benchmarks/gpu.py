"""This toolkit against `transformers.Trainer` on a GPU: all parts take about half an hour on an H100 (calculated).

    python benchmarks/gpu.py --write                writes benchmarks/results/gpu-NAME.md, again after each part
    python benchmarks/gpu.py --parts epoch bigbird  these only; --minutes 8 starts no run after that time
    python benchmarks/gpu.py --tiny --device cpu    all of it at toy size, in minutes, with meaningless figures

Needs torch, transformers, accelerate and this package, and no network: weights are random, texts are random words with
the lengths of real reviews. bf16 unless stated otherwise.

    ours      as recipes/cls.py trains and evaluates
    compiled  the same with --torch_compile
    rows      the same with --padding_free (attention itself padded: torch's kernel for rows has no dropout)
    ours0     as ours, without dropout of attention; rows0: rows likewise, by that kernel
    tuned     Trainer at its best: bf16, group_by_length, dynamic padding, fused AdamW, no logging, four worker
              processes for batches, torch's own attention kernels instead of cuDNN's
    cudnn     the same with cuDNN's attention, torch's default on recent GPUs
    plain     Trainer as in most scripts: every text padded to the longest, fp32, defaults

Each run is a process of its own, and the contestants take turns. The second epoch of training is timed (of `plain`,
whose batches all have one shape, the steps after the fifth). MFU counts real tokens only (benchmarks/flops.py), not
padding.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import contestants
import processes
from machine import hardware

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "BERT-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "BERT-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "toy": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
}
VOCABULARY = 30522
# Tokens of 1,500 film reviews (demo:imdb, the uncased vocabulary of BERT): the percentiles 0, 5, ..., 100
REVIEWS = (
    41,
    81,
    112,
    137,
    148,
    158,
    166,
    177,
    190,
    206,
    222,
    240,
    261,
    294,
    330,
    369,
    425,
    482,
    579,
    761,
    1974,
)
TOKENS_PER_STEP = 32768
# the most important first: part -> (model, texts) of its tables of training and evaluation
PARTS = {"epoch": None, "base-reviews": ("BERT-base", "real reviews"), "bigbird": None,
         "base-512": ("BERT-base", "512 tokens"), "large-reviews": ("BERT-large", "real reviews"),
         "large-512": ("BERT-large", "512 tokens")}  # fmt: skip
MOST_SECONDS = 900  # of one run
TASKS = (("train", ["ours", "tuned", "rows0", "ours0", "compiled", "rows", "cudnn", "plain"]),
         ("evaluate", ["ours", "tuned", "rows", "cudnn"]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy models, few texts, one round")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="[all]")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="after which no further run starts"
    )
    parser.add_argument("--samples", type=int, default=4096, help="of an epoch [4096]")
    parser.add_argument("--rounds", type=int, default=1, help="of each contestant [1]")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/gpu-NAME.md")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = (  # one GPU
        "" if options.device == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    )
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU: run this on a GPU machine, or pass --tiny --device cpu for a test"
        )
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    if options.tiny:
        options.parts, options.rounds = [part for part in options.parts if "large" not in part], 1
    options.end = time.monotonic() + 60 * options.minutes
    file = "-".join(["gpu", name, *([] if options.parts == list(PARTS) else options.parts)])
    target = (
        ROOT / "benchmarks" / "results" / f"{re.sub('[^a-z0-9]+', '-', file.lower()).strip('-')}.md"
    )
    page = ""
    for part in (None, *options.parts):
        lines = lines_of(part, options, name) if part else introduction(name)
        page += "\n".join([*lines, ""])
        print(*lines, sep="\n", flush=True)
        if options.write:
            target.write_text(page, encoding="utf-8")


def lines_of(part: str, options: Namespace, name: str) -> list[str]:
    """A part of the page; where it fails, why: the other parts still run."""
    try:
        if tables := PARTS[part]:
            return trained(options, name, *tables)
        return an_epoch(options, name) if part == "epoch" else long_texts(options)
    except Exception as error:
        traceback.print_exc()
        return ["", f"## {part}", "", f"failed: {type(error).__name__}: {error}"]


def introduction(name: str) -> list[str]:
    libraries = ", ".join(
        f"{each} {version(each)}" for each in ("torch", "transformers", "accelerate")
    )
    command = f"`python benchmarks/gpu.py {' '.join(sys.argv[1:])}`, {date.today()}"
    return [f"# On {name}", "", (__doc__ or "").split("\n\n", 2)[2].strip().replace("\n    ", "\n- ").replace(
        "-           ", "  "), "", f"{hardware()}, {libraries}; {command}"]  # fmt: skip


# ---- the parts of the page


def trained(options: Namespace, name: str, model: str, texts: str) -> list[str]:
    """Training and evaluation of a model."""
    lines, model = [], "toy" if options.tiny else model
    for task, who in TASKS:
        who = [each for each in who if each != "compiled" or not options.tiny]  # too slow
        lines += ["", f"## {model}, {texts}: {'training' if task == 'train' else 'evaluation'}", ""]
        lines += table(options, name, who, {"model": model, "texts": texts, "task": task})
    return lines


def an_epoch(options: Namespace, name: str) -> list[str]:
    """The time of an epoch of 9,216 texts of 128 tokens; the goal on an H200 is 2 s."""
    model, samples = ("toy", 32) if options.tiny else ("BERT-base", 9216)
    title = f"## {model}: an epoch of {samples} samples of 128 tokens"
    spec = {"model": model, "texts": "128 tokens", "task": "train", "samples": samples}
    return [
        "",
        title,
        "",
        *table(options, name, ["ours"] if options.tiny else ["ours", "compiled"], spec),
    ]


def long_texts(options: Namespace) -> list[str]:
    """Our BigBird against transformers' and full attention."""
    import bigbird

    tokens, layers, repeats = (1024, 1, 1) if options.tiny else (4096, 12, 5)
    title = f"## BigBird of {layers} layers: a training step on {tokens} tokens"
    if time.monotonic() > options.end:
        return ["", title, "", "not run"]
    options = Namespace(
        device=options.device, tokens=tokens, layers=layers, repeats=repeats, rounds=options.rounds
    )
    note = "`full` is full attention by SDPA, torch's flash kernel, with other numbers."
    return ["", title, "", note, "", *bigbird.measure_table(options, "model")]


def table(options: Namespace, name: str, contestants: list[str], spec: dict[str, Any]) -> list[str]:
    samples = spec.get("samples") or (32 if options.tiny else options.samples)
    results: dict[str, list[dict[str, float]]] = {who: [] for who in contestants}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for who in contestants:
            if who in failed or time.monotonic() > options.end:
                continue
            measured = spawn(
                {
                    **spec,
                    "who": who,
                    "samples": samples,
                    "device": options.device,
                    "tiny": options.tiny,
                }
            )
            if isinstance(measured, str):
                failed[who] = measured
            else:
                results[who].append(measured)
            outcome = failed.get(who) or f"{measured['seconds']:.2f} s"
            print(
                f"{spec['model']} {spec['texts']} {spec['task']} {number + 1} {who}: {outcome}",
                file=sys.stderr,
                flush=True,
            )
    lines = [
        "| | seconds | samples/s | real tokens/s | MFU | peak GB | time / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [row(who, runs, results["ours"], name) if runs else
                    f"| {who} | {failed.get(who, 'not run')} | | | | | |" for who, runs in results.items()]  # fmt: skip


def row(who: str, runs: list[dict[str, float]], ours: list[dict[str, float]], name: str) -> str:
    """Medians; ratios are within a round."""
    from flops import peak_flops

    seconds = statistics.median(run["seconds"] for run in runs)
    peak, run = peak_flops(name, "bf16"), runs[0]
    mfu = f"{run['flops'] / seconds / peak:.1%}" if peak else "-"
    ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(runs, ours, strict=False)]
    ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
    memory = max(run["peak"] for run in runs) / 1e9
    return (
        f"| {who} | {seconds:.2f} | {run['samples'] / seconds:.0f} | {run['tokens'] / seconds:.0f} | {mfu} | "
        f"{memory:.1f} | {ratio} |"
    )


def spawn(spec: dict[str, Any]) -> dict[str, float] | str:
    """`work` in a new process; the first line of the error where it fails, for example out of memory."""
    try:
        return processes.run(work, spec, seconds=MOST_SECONDS)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


# ---- one contestant, in its own process


def work(spec: dict[str, Any]) -> dict[str, float]:
    import resource

    import torch
    from flops import training_flops

    clock = contestants.Clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):  # Trainer prints its results
        job = job_of(spec, folder)
        theirs = {"tuned": contestants.tuned_trainer, "cudnn": functools.partial(contestants.tuned_trainer, cudnn=True),
                  "plain": contestants.plain_trainer}  # fmt: skip
        contestant = theirs.get(spec["who"], contestants.ours)
        result = contestant(job, spec["task"], clock)
    split = job.data.train if spec["task"] == "train" else job.data.validation
    count = training_flops(job.model)
    assert count is not None
    flops = count(split.lengths) * (1 if spec["task"] == "train" else 1 / 3)  # forward only
    peak = torch.cuda.max_memory_allocated() if spec["device"] == "cuda" else (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # fmt: skip
    return {
        "seconds": clock.wall,
        "samples": len(split),
        "tokens": int(split.lengths.sum()),
        "flops": flops,
        "peak": max(peak, result.get("peak", 0)),
    }


def job_of(spec: dict[str, Any], folder: str) -> Any:
    """A random model, random texts, and settings of the steps before the clock starts and of a timed epoch."""
    import dataclasses

    from toolkit.config import TaskSettings, build
    from toolkit.data.labels import Labels
    from toolkit.data.prepare import Prepared, finish_data

    longest = int(spec["texts"].split()[0]) if spec["texts"][0].isdigit() else 512
    longest = min(longest, 48) if spec["tiny"] else longest
    batch = 16 if spec["tiny"] else TOKENS_PER_STEP // longest
    samples = spec["samples"] // batch * batch
    steps = samples // batch
    warm_steps = min(steps, 5) if spec["who"] == "plain" else steps
    settings = build(TaskSettings, {
        "model_name_or_path": "random", "max_length": longest, "output_dir": f"{folder}/run",
        "max_steps": warm_steps + steps,
        "global_batch_size": batch, "per_device_batch_size": batch, "per_device_eval_batch_size": batch,
        "learning_rate": 1e-5, "warmup_ratio": 0.1, "mixed_precision": "bf16", "seed": contestants.SEED,
        "report_to": "none", "eval_every": 10**6, "torch_compile": spec["who"] == "compiled",
        "padding_free": spec["who"].startswith("rows"),
    })  # fmt: skip
    splits = {
        name: split_of(name, samples, spec["texts"], longest, seed)
        for seed, name in enumerate(("train", "validation"))
    }
    labels = Labels("single_label_classification", ("0", "1"), ("label",))
    data = finish_data(
        settings,
        Prepared(Path(folder), "random", "text", None, longest, (), labels, test=None, **splits),
        None,
        None,
    )
    job = contestants.Job(settings, tokenizer_of(), data, model_of(spec), warm_steps)
    return job if spec["task"] == "train" else dataclasses.replace(job, warm_steps=0)


def split_of(name: str, samples: int, texts: str, longest: int, seed: int) -> Any:
    """Random words, with the lengths of real reviews or all of the same length."""
    import numpy as np

    from toolkit.data.tokens import Split

    generator = np.random.default_rng(seed)
    lengths = np.full(samples, longest)
    if not texts[0].isdigit():
        percentiles = generator.uniform(0, len(REVIEWS) - 1, samples)
        lengths = np.minimum(
            np.interp(percentiles, np.arange(len(REVIEWS)), REVIEWS).astype(int), longest
        )
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    words = generator.integers(1000, VOCABULARY, offsets[-1], dtype=np.int32)
    return Split(
        name, Path(), words, offsets, generator.integers(0, 2, samples), np.arange(samples)
    )


def tokenizer_of() -> Any:
    """Used for padding only."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "[UNK]")), pad_token="[PAD]", unk_token="[UNK]"
    )


def model_of(spec: dict[str, Any]) -> Any:
    """A model as by `load_classifier`, or a plain one for Trainer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from toolkit.models.attention import choose_attention
    from toolkit.models.classifier import freeze_unused
    from toolkit.models.first_token import read_first_token_only

    torch.manual_seed(contestants.SEED)
    config = BertConfig(**SHAPES[spec["model"]], vocab_size=VOCABULARY)
    config.attention_probs_dropout_prob *= not spec["who"].endswith("0")
    model = BertForSequenceClassification(config)
    if spec["who"] not in ("tuned", "cudnn", "plain"):
        choose_attention(model, None)
        freeze_unused(model)
        read_first_token_only(model)
    return model


if __name__ == "__main__":
    main()
