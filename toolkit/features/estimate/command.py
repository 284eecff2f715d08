"""`toolkit estimate`: the memory of a job on each process, by strategy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from toolkit.config import LongTaskSettings, TaskSettings, TrainingSettings
from toolkit.data.tokens import choose_max_length, load_tokenizer
from toolkit.errors import UserError, size_text
from toolkit.launch.precision import AUTO, auto_precision, faster_precision, measure_cached
from toolkit.models.classifier import load_classifier
from toolkit.models.to_bigbird import long_model
from toolkit.pretrained import layer_of, load_config
from toolkit.training.estimate import (
    STRATEGIES,
    Memory,
    count_activations,
    memory_of,
    micro_batch_size,
    usable_memory,
    uses_autocast,
)
from toolkit.utils.features import first, hooks
from toolkit.utils.files import templates


def run(settings: Any, processes: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision, usable = _precision(settings, device), usable_memory(device, processes)
    other_model = first(load(settings) for load in hooks("untrained_model", settings))
    model, lengths = other_model or load_untrained_classifier(settings)
    length = lengths["input_ids"]
    training = settings.training.limit_tokens(device, length)
    samples, limit = -(-training.global_batch_size // processes), training.per_device_batch_size
    samples = micro_batch_size(training, samples if limit == "auto" else min(samples, limit), length)
    if samples * processes >= training.global_batch_size:  # one micro-batch
        training = dataclasses.replace(training, max_tokens_per_batch=None)
    print(f"{settings.model.model_name_or_path}: {model.num_parameters():,} parameters, "
          f"{model.num_parameters(only_trainable=True):,} of them trained")  # fmt: skip
    print(f"on {device}, mixed precision {precision}")
    print(f"\nthe peak of each of {processes} processes, with micro-batches of {samples} texts of {length} tokens:\n")
    rows = [["strategy", *Memory._fields, "peak", f"fits in {size_text(usable)}"]]
    shapes = {name: (samples, length) for name, length in lengths.items()}
    for strategy, memory in by_strategy(model, training, processes, shapes, device, precision).items():
        rows.append([strategy, *map(size_text, (*memory, sum(memory))), "yes" if sum(memory) <= usable else "no"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))


def by_strategy(
    model: torch.nn.Module, training: TrainingSettings, processes: int, shapes: Mapping[str, tuple[int, ...]],
    device: str, precision: str,
) -> dict[str, Memory]:  # fmt: skip
    """`shapes`: name of an input -> shape in a micro-batch."""
    casts = {uses_autocast(strategy, training) for strategy in STRATEGIES}
    activations = {cast: count_activations(model, shapes, device, precision, cast) for cast in casts}
    return {
        strategy: memory_of(strategy, processes, model, training, _zero_section(strategy), precision,
                            activations[uses_autocast(strategy, training)], device)
        for strategy in STRATEGIES
    }  # fmt: skip


def load_untrained_classifier(settings: Any) -> tuple[Any, dict[str, int]]:
    """(a classifier, name of an input -> tokens of a sample in it). Raises UserError for settings of another recipe."""
    if not isinstance(settings, TaskSettings):
        raise UserError("toolkit estimate cannot build the model of this recipe: name cls, bigbird or title")
    is_long, pretrained = isinstance(settings, LongTaskSettings), settings.model
    pretrained = long_model(pretrained, settings.data.max_length) if is_long else pretrained
    length = choose_max_length(settings.data.max_length, load_tokenizer(pretrained), load_config(pretrained))
    labels: Any = SimpleNamespace(names=("a", "b"), problem_type="single_label_classification")  # the head is small
    return load_classifier(pretrained, labels, settings.training.seed), {"input_ids": length}


def _precision(settings: Any, device: str) -> str:
    precision: str = settings.training.mixed_precision
    if precision == AUTO:
        precision, _ = auto_precision(None, 0 if device == "cuda" else None)
    return faster_precision(measure_cached(layer_of(settings.model)())) if precision == AUTO else precision


def _zero_section(strategy: str) -> dict[str, Any]:
    """`zero_optimization` of ds_configs/STRATEGY.json; empty for other strategies."""
    if not strategy.startswith("zero"):
        return {}
    config = json.loads((templates() / "ds_configs" / f"{strategy}.json").read_text(encoding="utf-8"))
    return {name: value for name, value in config["zero_optimization"].items() if value != "auto"}
