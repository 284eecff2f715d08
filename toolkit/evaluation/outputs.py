"""Evaluation and prediction of every sample exactly once, at any data set size, batch size and
world size.

Sample ids are gathered with the outputs, and compared with the ids of the data set before any
metric is computed. `gather_for_metrics` only gathers here: padding samples are dropped by their id.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit import launch
from toolkit.data.batches import (
    Batch,
    Prefetcher,
    collate_padded,
    collator_of,
    micro_batches,
)
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.launch.signals import StopRequested, stop_requested
from toolkit.utils import memory
from toolkit.utils.files import as_json
from toolkit.utils.progress import Progress

Metrics = Callable[[Any, Any, Labels], dict[str, Any]]
"""(logits (N, C), labels (N,) or (N, C), their names and type) of all samples -> metrics by name.
It runs on the main process only."""
ComputeMetrics = Callable[[Any, Any], dict[str, Any]]
"""The same without the last argument; for titles of two lists of texts."""
Lines = Callable[[], Iterator[dict[str, Any]]]

# samples of each process in a trial
_TRIAL_SAMPLES = 2


@dataclass(frozen=True)
class Evaluation:
    """The numbers on every rank; all others on the main process."""

    split: str
    numbers: dict[str, Any]
    """`num_samples`, `loss` and the recipe's metrics."""
    predictions: Lines | None
    """Yields the lines of predictions.jsonl."""
    outputs: tuple[Split, np.ndarray] | None = None
    """For classification: (the split, its logits (N, C))."""
    compute_metrics: ComputeMetrics | None = None
    """For classification: the recipe's."""

    @property
    def single_numbers(self) -> dict[str, float]:
        """The metrics that are a single float: no counts, no scores per class."""
        return {
            name: value for name, value in self.numbers.items() if isinstance(value, float)
        }

    def __str__(self) -> str:
        """`accuracy 0.9000  f1_macro 0.8972`."""
        return "  ".join(
            f"{name} {value:.4f}" for name, value in self.single_numbers.items()
        )


class ExactlyOnceError(UserError):
    """A sample was predicted never or more than once, so every metric would be wrong."""


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of an evaluation's batches."""

    per_device: int
    """Maximum samples of a batch on one process."""
    max_tokens: int | None = None
    """Maximum tokens of it, with padding."""


class Outputs:
    """A model's outputs for all samples of a split.

        outputs = Outputs(accelerator, split, tokenizer, sizes)
        for batch in outputs.batches(model):
            logits = model(**batch.inputs).logits.float()
            outputs.add(accelerator.gather_for_metrics((batch.ids, logits)))
        arrays = outputs.in_order()

    Every process calls every method."""

    def __init__(
        self,
        accelerator: Accelerator,
        split: Split,
        tokenizer: Any,
        sizes: BatchSizes,
        answers: Any = None,
        is_trial: bool = False,
    ) -> None:
        """`answers`: a classifier's (`ClassAnswers`), for `evaluation`. `is_trial`: only one small
        batch is computed, and its outputs stand for those of all samples: to find mistakes before
        training."""
        self.accelerator = accelerator
        self.split = split
        self.sizes = sizes
        self.answers = answers
        self.is_trial = is_trial
        self._collate = collator_of(split, tokenizer, accelerator.device)
        self._parts: list[list[np.ndarray]] = []

    def batches(self, model: torch.nn.Module) -> Iterator[Batch]:
        """Yields this process's batches, the longest texts first, with the model in evaluation mode
        and without gradients.

        Every process gets as many batches, each with as many samples as the same batch of the
        others, as sharded parameters and `gather_for_metrics` need: some are padding samples, with
        id -1."""
        accelerator = self.accelerator
        prefetcher = Prefetcher(accelerator.device)
        bar = Progress(self.split.name, len(self.split))
        tokens, all_tokens = 0, max(1, int(self.split.lengths.sum()))
        model.eval()
        # not inference_mode: parameters gathered in it could not be trained
        with torch.no_grad():
            for batch in prefetcher.batches(self._collations()):
                launch.exit_state.explain = partial(memory.explain, batch, None)
                yield batch
                if accelerator.device.type == "cpu":
                    memory.manage_freed_memory()
                tokens += batch.tokens * accelerator.num_processes  # of all, nearly
                if accelerator.is_main_process:
                    # long texts take longer
                    part = min(1.0, tokens / all_tokens)
                    bar.update(round(part * len(self.split)))
        bar.close()
        launch.exit_state.explain = None

    def _collations(self) -> list[partial[Batch]]:
        world = self.accelerator.num_processes
        samples = micro_batches(
            self.split,
            np.arange(len(self.split)),
            self.sizes.per_device,
            world,
            self.sizes.max_tokens,
        )
        if self.is_trial:
            samples = [some[:_TRIAL_SAMPLES] for some in samples[-world:]]
        collations = []
        for start in range(0, len(samples), world):
            size = max(map(len, samples[start : start + world]))
            own = samples[start + self.accelerator.process_index]
            collations.append(partial(collate_padded, self._collate, own, size))
        return collations

    def add(self, gathered: Sequence[torch.Tensor]) -> None:
        """Adds `accelerator.gather_for_metrics((batch.ids, outputs, ...))`: ids (B,), and outputs
        (B, ...). Raises StopRequested on all ranks if one of them has received a stop signal, and
        UserError for outputs without ids."""
        ids = gathered[0]
        if isinstance(gathered, torch.Tensor) or ids.dim() != 1 or ids.is_floating_point():
            how = "outputs.add(accelerator.gather_for_metrics((batch.ids, ...)))"
            raise UserError(
                f"{self.split.name}: outputs without the ids of their samples: {how}"
            )
        self._share_stop_signal()
        if self.accelerator.is_main_process:
            is_sample = ids >= 0
            arrays = [ids[is_sample].cpu().numpy()]
            for outputs in gathered[1:]:
                if outputs.dtype == torch.bfloat16:  # unknown to NumPy
                    outputs = outputs.float()
                arrays.append(outputs.detach()[is_sample].cpu().numpy())
            self._parts.append(arrays)

    def _share_stop_signal(self) -> None:
        device = self.accelerator.device
        signals = self.accelerator.gather(torch.tensor([stop_requested()], device=device))
        number = int(signals.max())
        if number:
            raise StopRequested(number)

    def in_order(self) -> list[np.ndarray]:
        """The outputs, (N, ...) each, in the order of the file on the main process, [] on the
        others; a collective.

        Raises, on every rank, ExactlyOnceError if a sample is missing or duplicated, and UserError
        if an output is not finite."""
        arrays = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]
        if self.is_trial:
            return [_repeat(column, len(self.split)) for column in arrays[1:]]
        fault: tuple[type[Exception], str] | None = None
        if self.accelerator.is_main_process:
            fault = _fault(arrays, self.split.rows)
        fault = broadcast_object_list([fault])[0]
        if fault:
            raise fault[0](f"{self.split.name}: {fault[1]}")
        if not arrays:  # on the other ranks
            return []
        ids, *columns = arrays
        order = np.argsort(ids, kind="stable")
        return [column[order] for column in columns]

    def evaluation(self, metrics: Metrics) -> Evaluation:
        """The evaluation of a classifier or regression, of which `add` got ids, logits (B, C) and
        losses (B,); a collective, every rank gets the numbers."""
        arrays = self.in_order()
        if not arrays:
            return self.make_evaluation()
        logits, losses = arrays
        split, labels = self.split, self.answers.labels
        try:
            inspect.signature(metrics).bind(logits, split.labels, labels)
        except TypeError as error:
            arguments = (
                "logits, labels, and the labels' names, as toolkit.classification_metrics"
            )
            raise UserError(
                f"outputs.evaluation calls metrics({arguments}): {error}"
            ) from error
        compute_metrics = partial(_compute_metrics, metrics, labels)
        evaluation = self.make_evaluation(
            losses,
            compute_metrics(logits, split.labels),
            partial(self.answers.prediction_lines, split.rows, logits, split.labels),
        )
        return dataclasses.replace(
            evaluation, outputs=(split, logits), compute_metrics=compute_metrics
        )

    def make_evaluation(
        self,
        losses: np.ndarray | None = None,
        metrics: Mapping[str, Any] | None = None,
        predictions: Lines | None = None,
    ) -> Evaluation:
        """Makes the evaluation from losses (N,) and metrics on the main process, and broadcasts its
        numbers; a collective, which the other ranks call without arguments. The loss is normalised
        as in a training step: the weighted sum over the samples' loss denominators."""
        numbers: dict[str, Any] = {}
        if losses is not None:
            weighted = losses if self.split.weights is None else losses * self.split.weights
            total = weighted.sum(dtype=np.float64)
            everything = np.arange(len(self.split))
            denominator = self._collate.loss_denominators(everything).sum()
            numbers = {
                "num_samples": len(self.split),
                "loss": float(total / (denominator or 1)),
                **as_json(metrics or {}),
            }
        return Evaluation(self.split.name, broadcast_object_list([numbers])[0], predictions)


def _compute_metrics(
    metrics: Metrics, labels: Labels, logits: Any, truth: Any
) -> dict[str, Any]:
    return metrics(logits, truth, labels)


def predict(
    accelerator: Accelerator,
    model: torch.nn.Module,
    split: Split,
    tokenizer: Any,
    per_device_batch_size: int,
    max_tokens: int | None = None,
) -> np.ndarray | None:
    """(N, C) float32 logits of a whole split on the main process, None on the others; a
    collective."""
    sizes = BatchSizes(per_device_batch_size, max_tokens)
    outputs = Outputs(accelerator, split, tokenizer, sizes)
    for batch in outputs.batches(model):
        logits = model(**batch.inputs).logits.float()  # (B, C)
        outputs.add(accelerator.gather_for_metrics((batch.ids, logits)))
    return next(iter(outputs.in_order()), None)


def _repeat(column: np.ndarray, samples: int) -> np.ndarray:
    """A trial's outputs, (B, ...) -> (samples, ...): they stand for those of all samples."""
    return np.resize(column, (samples, *column.shape[1:]))


def _fault(
    arrays: Sequence[np.ndarray], expected: np.ndarray
) -> tuple[type[Exception], str] | None:
    """Of gathered ids and outputs, whose ids should be `expected`."""
    ids = arrays[0] if arrays else np.array([], np.int64)
    wrong_ids = ids_fault(ids, expected)
    if wrong_ids:
        how = "outputs.add(accelerator.gather_for_metrics((batch.ids, ...)))"
        return (
            ExactlyOnceError,
            f"{wrong_ids}: call {how} once for each batch, in all processes",
        )
    infinite = _finite_fault(ids, arrays[1:])
    return (UserError, infinite) if infinite else None


def _finite_fault(ids: np.ndarray, columns: Sequence[np.ndarray]) -> str:
    """Names the rows with a NaN or an infinity among their outputs; "" if there are none."""
    is_finite = np.ones(len(ids), np.bool_)
    for column in columns:
        is_finite &= np.isfinite(column.reshape(len(column), -1)).all(axis=1)
    if is_finite.all():
        return ""
    rows = listing((np.sort(ids[~is_finite]) + 1).tolist())
    why = (
        "it diverged in training (lower --learning_rate there), or its weights are damaged"
    )
    return f"the model's outputs are not finite for rows {rows}: {why}"


def ids_fault(ids: np.ndarray, expected: np.ndarray) -> str:
    """How the gathered ids differ from those of the data set; "" if they do not."""
    unique, counts = np.unique(ids, return_counts=True)
    faults = {
        "never predicted: ids": np.setdiff1d(expected, unique),
        "more than once: ids": unique[counts > 1],
        "unknown: ids": np.setdiff1d(unique, expected),
    }
    lines = [
        f"{name} {listing(some.tolist())}" for name, some in faults.items() if len(some)
    ]
    return "; ".join(lines)
