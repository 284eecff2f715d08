"""`toolkit estimate`: what a job would take of each process's memory, by strategy, and its activations by length."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

import psutil
import torch

from toolkit.config import ModelSettings, PretrainedSettings, ProblemType, TrainingSettings
from toolkit.data.tokens import choose_max_length, load_tokenizer
from toolkit.init import templates
from toolkit.launch.precision import AUTO, auto_precision
from toolkit.models.classifier import load_classifier
from toolkit.models.title_model import load_title_model
from toolkit.models.to_bigbird import long_model
from toolkit.pretrained import load_config
from toolkit.run import Run as Run  # what a run imports takes memory, too
from toolkit.training.estimate import STRATEGIES, Memory, count_activations, free_memory, state, with_activations
from toolkit.units import size_text

_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_MICRO_BATCHES = (1, 4, 16, 64)


@dataclass(frozen=True)
class _AnyLabels:
    """The size of a head of few classes does not matter."""

    names: tuple[str, ...] = ("a", "b")
    problem_type: ProblemType = "single_label_classification"


class Estimate:
    """Of a recipe's settings, on this machine's device."""

    def __init__(self, task: str, settings: Any) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.process = _process_bytes() if self.device == "cpu" else (0, 0)
        self.training: TrainingSettings = settings.training
        self.precision: str = self.training.mixed_precision
        if self.precision == AUTO:
            self.precision, _ = auto_precision(None, 0 if self.device == "cuda" else None)
        asked = settings.data.max_length
        long: PretrainedSettings = settings.model if task == "cls" else long_model(settings.model, asked)
        tokenizer = load_tokenizer(long)
        self.length = choose_max_length(asked, tokenizer, load_config(long))
        self.titles = settings.data.max_target_length if task == "title" else None
        if self.titles:
            self.model: Any = load_title_model(
                settings.model, long, settings.generation, tokenizer, self.titles, self.training.seed
            )
        else:
            assert isinstance(long, ModelSettings)
            self.model = load_classifier(long, _AnyLabels(), self.training.seed)

    def micro_batch(self, processes: int) -> int:
        """Samples of the largest one, all of `length` tokens."""
        size, tokens = -(-self.training.global_batch_size // processes), self.training.max_tokens_per_batch
        if isinstance(self.training.per_device_batch_size, int):
            size = min(size, self.training.per_device_batch_size)
        return min(size, max(1, tokens // self.length)) if tokens else size

    def activations(self, samples: int, length: int, cast: bool = False) -> Any:
        shapes = {"input_ids": (samples, length)}
        if self.titles:
            shapes["decoder_input_ids"] = (samples, self.titles)
        return count_activations(self.model, shapes, self.precision, self.device, cast)

    def by_strategy(self, processes: int) -> dict[str, Memory]:
        """One process has no other strategy than `single`, and the ZeRO stages."""
        samples, found = self.micro_batch(processes), {}
        accumulates = samples * processes < self.training.global_batch_size
        kept = {cast: self.activations(samples, self.length, cast) for cast in {False, self.precision != "no"}}
        for strategy in STRATEGIES:
            zero = strategy.startswith("zero")
            memory = state(strategy, 1 if strategy == "single" else processes, self.model, self.precision, self.device,
                           _zero_section(strategy, self.model) if zero else {})  # fmt: skip
            memory = with_activations(memory, strategy, kept[zero and self.precision != "no"], accumulates,
                                      self.device)  # fmt: skip
            found[strategy] = replace(memory, process=self.process[zero])
        return found


def run(task: str, settings: Any, processes: int) -> None:
    """Prints two tables: the memory of each process by strategy, and the activations by length and micro-batch."""
    estimate = Estimate(task, settings)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in estimate.model.parameters()]
    every, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    print(f"{settings.model.model_name_or_path}: {every:,} parameters, {trained:,} of them trained")
    print(f"on {estimate.device}, mixed precision {estimate.precision}")
    batch = f"{estimate.micro_batch(processes)} texts of {estimate.length} tokens"
    print(f"\nthe peak of each of {processes} processes, with micro-batches of {batch}:\n")
    names = [field.name for field in fields(Memory)]
    free = torch.cuda.mem_get_info()[1] if estimate.device == "cuda" else free_memory() / processes
    rows = []
    for strategy, memory in estimate.by_strategy(processes).items():
        sizes_of_parts = [size_text(getattr(memory, name)) for name in names]
        rows.append([strategy, *sizes_of_parts, size_text(memory.peak), "yes" if memory.peak <= free else "no"])
    _print_table(["strategy", *names, "peak", f"fits in {size_text(free)}"], rows)
    print("\nactivations of one micro-batch:\n")
    rows = []
    for length in sorted({*(length for length in _LENGTHS if length < estimate.length), estimate.length}):
        rows.append(
            [f"{length} tokens", *(size_text(estimate.activations(size, length).alone) for size in _MICRO_BATCHES)]
        )
    _print_table(["", *(f"{size} text{'s' * (size > 1)}" for size in _MICRO_BATCHES)], rows)


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, *rows]:
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))


def _process_bytes() -> tuple[int, int]:
    """Of Python with what a run imports; and with DeepSpeed."""
    import sklearn.metrics  # noqa: F401

    own = psutil.Process().memory_info().rss
    import deepspeed  # noqa: F401

    return own, psutil.Process().memory_info().rss


def _zero_section(strategy: str, model: Any) -> dict[str, Any]:
    """Of the shipped DeepSpeed config, with what `auto` becomes."""
    config = json.loads((templates() / "ds_configs" / f"{strategy}.json").read_text(encoding="utf-8"))
    section: dict[str, Any] = config["zero_optimization"]
    return {name: model.config.hidden_size**2 if value == "auto" else value for name, value in section.items()}
