"""`toolkit estimate`: what a job would take of each process's memory, by strategy, and its activations by length."""

from __future__ import annotations

import json
import os
from dataclasses import astuple, fields, replace
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from toolkit.data.tokens import choose_max_length, load_tokenizer
from toolkit.features.titles.model import load_title_model
from toolkit.launch.precision import AUTO, auto_precision
from toolkit.launch.trial import faster, measure_once
from toolkit.models.classifier import load_classifier
from toolkit.models.to_bigbird import long_model
from toolkit.pretrained import layer_of, load_config
from toolkit.run import Run as Run  # what a run imports takes memory, too
from toolkit.training.estimate import (
    STRATEGIES,
    Memory,
    Trial,
    computes_in_cast_weights,
    free_memory,
    state,
    with_activations,
)
from toolkit.utils.files import templates
from toolkit.utils.units import size_text

_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_MICRO_BATCHES = (1, 4, 16, 64)


class Estimate:
    """Of a recipe's settings, on this machine's device."""

    def __init__(self, task: str, settings: Any) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.process = _process_bytes() if self.device == "cpu" else (0, 0)
        self.training = settings.training
        self.precision = self.training.mixed_precision
        if self.precision == AUTO:
            self.precision, _ = auto_precision(None, 0 if self.device == "cuda" else None)
        if self.precision == AUTO:
            self.precision = faster(measure_once(layer_of(settings.model)()))
        long: Any = settings.model if task == "cls" else long_model(settings.model, settings.data.max_length)
        tokenizer = load_tokenizer(long)
        self.length = choose_max_length(settings.data.max_length, tokenizer, load_config(long))
        self.title_length = settings.data.max_target_length if task == "title" else None
        if self.title_length:
            given = (settings.model, long, settings.generation, tokenizer, self.title_length, 0)
            self.model: Any = load_title_model(*given)
        else:  # the size of a head of few classes does not matter
            labels: Any = SimpleNamespace(names=("a", "b"), problem_type="single_label_classification")
            self.model = load_classifier(long, labels, 0)

    def micro_batch(self, processes: int) -> int:
        """Samples of the largest one, all of `length` tokens."""
        size, tokens = -(-self.training.global_batch_size // processes), self.training.max_tokens_per_batch
        if isinstance(self.training.per_device_batch_size, int):
            size = min(size, self.training.per_device_batch_size)
        return min(size, max(1, tokens // self.length)) if tokens else size

    def activations(self, samples: int, length: int, cast: bool = False) -> int:
        shapes = {"input_ids": (samples, length)}
        if self.title_length:
            shapes["decoder_input_ids"] = (samples, self.title_length)
        return Trial(self.model, self.precision, self.device, cast).count(shapes)

    def by_strategy(self, processes: int) -> dict[str, Memory]:
        samples = self.micro_batch(processes)
        counted = {cast: self.activations(samples, self.length, cast) for cast in (False, True)}
        found = {}
        for strategy in STRATEGIES:
            zero = strategy.startswith("zero")
            section = _zero_section(strategy) if zero else {}
            memory = state(strategy, processes, self.model, self.training, self.device, section, self.precision)
            cast = computes_in_cast_weights(strategy, self.training)
            memory = with_activations(memory, counted[cast], self.device)
            found[strategy] = replace(memory, process=self.process[zero])
        return found


def run(task: str, settings: Any, processes: int) -> None:
    """Prints two tables: the memory of each process by strategy, and the activations by length and micro-batch."""
    estimate = Estimate(task, settings)
    every, trained = (sum(weight.numel() for weight in estimate.model.parameters() if weight.requires_grad or all_)
                      for all_ in (True, False))  # fmt: skip
    print(f"{settings.model.model_name_or_path}: {every:,} parameters, {trained:,} of them trained")
    print(f"on {estimate.device}, mixed precision {estimate.precision}")
    batch = f"{estimate.micro_batch(processes)} texts of {estimate.length} tokens"
    print(f"\nthe peak of each of {processes} processes, with micro-batches of {batch}:\n")
    free = torch.cuda.mem_get_info()[1] if estimate.device == "cuda" else free_memory() / processes
    rows = [["strategy", *(field.name for field in fields(Memory)), "peak", f"fits in {size_text(free)}"]]
    for strategy, memory in estimate.by_strategy(processes).items():
        sizes = map(size_text, (*astuple(memory), memory.peak))
        rows.append([strategy, *sizes, "yes" if memory.peak <= free else "no"])
    _print_table(rows)
    print("\nactivations of one micro-batch:\n")
    rows = [["", *(f"{size} text{'s' * (size > 1)}" for size in _MICRO_BATCHES)]]
    for length in sorted({*(length for length in _LENGTHS if length < estimate.length), estimate.length}):
        rows.append([f"{length} tokens", *(size_text(estimate.activations(n, length)) for n in _MICRO_BATCHES)])
    _print_table(rows)


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))


def _process_bytes() -> tuple[int, int]:
    """Of Python with what a run imports; and with DeepSpeed."""
    import sklearn.metrics  # noqa: F401

    own = psutil.Process().memory_info().rss
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # what it would find, without its warning
    import deepspeed  # noqa: F401

    return own, psutil.Process().memory_info().rss


def _zero_section(strategy: str) -> dict[str, Any]:
    """Of the shipped DeepSpeed config."""
    config = json.loads((templates() / "ds_configs" / f"{strategy}.json").read_text(encoding="utf-8"))
    return {name: value for name, value in config["zero_optimization"].items() if value != "auto"}
