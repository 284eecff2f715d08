"""Every sample exactly once, whatever the size of the set, the batch and the world.

Sample ids travel with the outputs through `gather_for_metrics`; the ids that came back are compared
with the data set before any number is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.batches import Ahead, Batch, collator_of, micro_batches
from toolkit.data.progress import PartOfProgress, Progress
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.launch.signals import StopRequested, stop_requested
from toolkit.utils import memory
from toolkit.utils.files import as_json

ComputeMetrics = Callable[[Any, Any], dict[str, Any]]
"""(outputs, what is true) of all samples -> names and numbers, as transformers' Trainer calls it: logits (N, C) and
labels (N,) or (N, C); of titles, two lists of texts. It runs on the main process only."""
Lines = Callable[[], Iterator[dict[str, Any]]]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: the numbers everywhere, the predictions on the main process."""

    split: str
    numbers: dict[str, Any]
    """`num_samples`, `loss` and what the recipe's metrics are."""
    predictions: Lines | None
    """Makes the lines of predictions.jsonl."""
    outputs: tuple[Split, np.ndarray] | None = None
    """(the split, its logits (N, C)) of a classification, on the main process."""

    @property
    def single_numbers(self) -> dict[str, float]:
        """The numbers that a curve can show; not the counts, nor those of each class."""
        return {name: value for name, value in self.numbers.items() if isinstance(value, float)}

    def __str__(self) -> str:
        """`accuracy 0.9000  f1_macro 0.8972`."""
        shown = without_repetition(self.single_numbers)
        return "  ".join(f"{name} {value:.4f}" for name, value in shown.items())


def without_repetition(numbers: dict[str, Any]) -> dict[str, Any]:
    """Numbers for a reader: without the micro F1 where it is the accuracy once more."""
    again = numbers.get("f1_micro") == numbers.get("accuracy")
    return {name: value for name, value in numbers.items() if not (again and name == "f1_micro")}


class ExactlyOnceError(RuntimeError):
    """Some sample was predicted never or more than once: no metric of it would be true."""


@dataclass(frozen=True)
class EvaluationBatch(Batch):
    """A batch whose outputs are to be gathered."""

    gathered_size: int
    """Samples that each process gathers, one at least of padding: the same in all of them."""

    def padded(self, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, ...) outputs -> (ids, *outputs), each padded to `gathered_size` samples for `gather_for_metrics`,
        which wants the same shape from every process."""
        filling = [-1 - stop_requested(), *[0] * len(outputs)]  # so that all processes learn of a stop signal here
        return tuple(map(self._pad, (self.ids, *outputs), filling))

    def _pad(self, tensor: torch.Tensor, value: float) -> torch.Tensor:
        missing = self.gathered_size - tensor.shape[0]
        return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])


def evaluation_batches(
    accelerator: Accelerator, split: Split, tokenizer: Any, settings: TrainingSettings
) -> Iterator[EvaluationBatch]:
    """This process's batches of a whole split, as the settings size them; see `batches_of`."""
    size = settings.per_device_eval_batch_size or 2 * settings.micro_batch_size
    return batches_of(accelerator, split, tokenizer, size, settings.max_tokens_per_batch)


def batches_of(
    accelerator: Accelerator,
    split: Split,
    tokenizer: Any,
    per_device: int,
    max_tokens: int | None = None,
    bar: Progress | PartOfProgress | None = None,
) -> Iterator[EvaluationBatch]:
    """Yields this process's batches of a whole split, the longest texts first.

    Every process gets the same number of batches, as sharded parameters need; where samples run out, a batch
    holds padding samples alone.
    """
    ahead, collate = Ahead(accelerator.device), collator_of(split, tokenizer, accelerator.device)
    rank, world = accelerator.process_index, accelerator.num_processes
    batches = micro_batches(split, np.arange(len(split)), per_device, rank, world, max_tokens)
    ends = np.cumsum([(len(indices), split.lengths[indices].sum()) for indices in batches], axis=0)  # samples, tokens
    bar = (bar or Progress(split.name, len(split))) if accelerator.is_main_process else None
    collations = [partial(collate, indices) for indices in batches]
    for place, (collation, following) in enumerate(zip(collations, [*collations[1:], None], strict=True)):
        batch = EvaluationBatch(**vars(ahead.batch(collation, following)), gathered_size=per_device + 1)
        launch.explain_failures(partial(memory.explain, batch, None))
        yield batch
        if accelerator.device.type == "cpu":
            memory.manage_freed_memory()
        if bar:
            samples, tokens = ends[place].tolist()
            bar.update(min(samples * world, len(split)), tokens / max(1, ends[-1][1]))
    if bar:
        bar.close()
    launch.explain_failures()


class Outputs:
    """Collects what `gather_for_metrics` returned for a split, on the main process, and checks it."""

    def __init__(self, accelerator: Accelerator, split: Split) -> None:
        self.accelerator, self.split = accelerator, split
        self._parts: list[list[np.ndarray]] = []

    def add(self, gathered: Sequence[torch.Tensor]) -> None:
        """Adds `accelerator.gather_for_metrics(batch.padded(...))`, the padding left out. Raises StopRequested, in all
        processes, where one of them has got a stop signal."""
        ids = gathered[0].cpu().numpy()
        if number := -1 - int(ids.min()):
            raise StopRequested(number)
        if self.accelerator.is_main_process:
            self._parts.append([part.cpu().numpy()[ids >= 0] for part in gathered])

    def in_order(self) -> list[np.ndarray]:
        """The outputs, (N, ...) each, in the order of the source; nothing but on the main process. All call this.

        Raises ExactlyOnceError where a sample is missing or there twice, and UserError where an output is not
        finite; in every process, so that none waits for another.
        """
        columns = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]
        main = self.accelerator.is_main_process
        self._raise_everywhere(ids_fault(columns[0], self.split.rows) if main else "", ExactlyOnceError)
        self._raise_everywhere(_finite_fault(columns) if main else "", UserError)
        if not main:
            return []
        order = np.argsort(columns[0], kind="stable")
        return [column[order] for column in columns[1:]]

    def evaluation(
        self,
        losses: np.ndarray | None = None,
        metrics: Mapping[str, Any] | None = None,
        predictions: Lines | None = None,
        logits: np.ndarray | None = None,
    ) -> Evaluation:
        """The evaluation of the main process's losses (N,), in order, and metrics; all call this, the others with
        nothing, and get the numbers. The loss is the sum of all, weighted, over the split's loss denominator, as a
        training step has it."""
        numbers: dict[str, Any] = {}
        if losses is not None:
            weights = 1 if self.split.weights is None else self.split.weights
            loss = float((losses * weights).sum(dtype=np.float64) / self.split.loss_denominators().sum())
            numbers = {"num_samples": len(self.split), "loss": loss, **as_json(metrics or {})}
        outputs = None if logits is None else (self.split, logits)
        return Evaluation(self.split.name, broadcast_object_list([numbers])[0], predictions, outputs)

    def _raise_everywhere(self, fault: str, kind: type[Exception]) -> None:
        (fault,) = broadcast_object_list([fault])
        if fault:
            raise kind(f"{self.split.name}: {fault}")


@torch.no_grad()  # not inference_mode: parameters gathered in it could not be trained on afterwards
def predict(
    accelerator: Accelerator,
    model: torch.nn.Module,
    split: Split,
    tokenizer: Any,
    per_device_batch_size: int,
    max_tokens: int | None = None,
    bar: Progress | PartOfProgress | None = None,
) -> np.ndarray | None:
    """(N, C) float32 logits of a whole split on the main process, None on the others; all must call it."""
    model.eval()
    outputs = Outputs(accelerator, split)
    for batch in batches_of(accelerator, split, tokenizer, per_device_batch_size, max_tokens, bar):
        logits = model(**batch.inputs).logits.float()  # (B, C)
        outputs.add(accelerator.gather_for_metrics(batch.padded(logits)))
    return next(iter(outputs.in_order()), None)


def _finite_fault(columns: Sequence[np.ndarray]) -> str:
    """A model that diverged has no metric, only rows it fails on."""
    finite = [np.isfinite(column.reshape(len(column), -1)).all(axis=1) for column in columns[1:]]
    bad = np.sort(columns[0][~np.logical_and.reduce(finite)])
    if not len(bad):
        return ""
    rows = listing((bad + 1).tolist())
    return f"the model's outputs are not finite for rows {rows}: it diverged; lower --learning_rate"


def ids_fault(ids: np.ndarray, expected: np.ndarray) -> str:
    """What differs between the ids that came back and those of the data set, or nothing."""
    unique, counts = np.unique(ids, return_counts=True)
    faults = {
        "never predicted: rows": np.setdiff1d(expected, unique),
        "more than once: rows": unique[counts > 1],
        "unknown:": np.setdiff1d(unique, expected),
    }
    return "; ".join(f"{name} {listing(some.tolist())}" for name, some in faults.items() if len(some))
