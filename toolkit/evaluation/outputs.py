"""Evaluation and prediction of every sample exactly once, at any data set size, batch size and world size.

Sample ids are gathered with the outputs by `gather_for_metrics`, and compared with the ids of the data set before any
metric is computed.
"""

from __future__ import annotations

import contextlib
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
from toolkit.data.batches import Batch, Prefetcher, collator_of, micro_batches
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.launch.signals import StopRequested, stop_requested
from toolkit.utils import memory
from toolkit.utils.files import as_json
from toolkit.utils.progress import Progress

ComputeMetrics = Callable[[Any, Any], dict[str, Any]]
"""(outputs, labels) of all samples -> metrics by name, as in transformers' Trainer: logits (N, C) and labels (N,) or
(N, C); for titles, two lists of texts. It runs on the main process only."""
Lines = Callable[[], Iterator[dict[str, Any]]]
ReportProgress = Callable[[int, float], object]
"""Called on the main process after each batch: (samples that are done, share of the work); by default a bar."""


@dataclass(frozen=True)
class Evaluation:
    """The numbers on every rank; predictions and outputs on the main process."""

    split: str
    numbers: dict[str, Any]
    """`num_samples`, `loss` and the recipe's metrics."""
    predictions: Lines | None
    """Yields the lines of predictions.jsonl."""
    outputs: tuple[Split, np.ndarray] | None = None
    """For classification: (the split, its logits (N, C))."""

    @property
    def single_numbers(self) -> dict[str, float]:
        """The metrics that are a single float: no counts, no scores per class."""
        return {name: value for name, value in self.numbers.items() if isinstance(value, float)}

    def __str__(self) -> str:
        """`accuracy 0.9000  f1_macro 0.8972`."""
        shown = drop_redundant_f1(self.single_numbers)
        return "  ".join(f"{name} {value:.4f}" for name, value in shown.items())


def drop_redundant_f1(numbers: dict[str, Any]) -> dict[str, Any]:
    """Numbers without the micro F1 if it equals the accuracy, as for every single-label task."""
    redundant = numbers.get("f1_micro") == numbers.get("accuracy")
    return {
        name: value for name, value in numbers.items() if not (redundant and name == "f1_micro")
    }


GATHER = "call outputs.add(accelerator.gather_for_metrics(batch.padded(...))) once for each batch, in all processes"


class ExactlyOnceError(UserError):
    """A sample was predicted never or more than once, so every metric would be wrong."""


@contextlib.contextmanager
def _refuse_unpadded(accelerator: Accelerator, size: int) -> Iterator[list[EvaluationBatch]]:
    """Within this context gathering outputs of the batch in the current list that are not padded to `size` raises
    UserError: other processes may have other sizes, with which the collective hangs."""
    gather, current = accelerator.gather_for_metrics, list[EvaluationBatch]()

    def checked_gather(outputs: Any, *more: Any, **options: Any) -> Any:
        several = outputs if isinstance(outputs, tuple) else ()  # one tensor may be a sum
        lengths = {len(each) for each in several if torch.is_tensor(each) and each.dim()}
        if (
            lengths
            and lengths == {len(batch.ids) for batch in current} - {1, size}
            and accelerator.num_processes > 1
        ):
            raise UserError(f"gather_for_metrics got outputs that are not padded: {GATHER}")
        return gather(outputs, *more, **options)

    vars(accelerator)["gather_for_metrics"] = checked_gather
    try:
        yield current
    finally:
        vars(accelerator)["gather_for_metrics"] = gather


@dataclass(frozen=True)
class EvaluationBatch(Batch):
    """A batch whose outputs are to be gathered."""

    gathered_size: int
    """Samples that each rank gathers, the same on all ranks."""

    def padded(self, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, ...) outputs -> (ids and this rank's stop signal (B, 2), *outputs), padded to `gathered_size` samples, as
        `gather_for_metrics` needs the same shape from every rank."""
        ids = self._pad(self.ids, -1)
        signals = torch.full_like(ids, stop_requested())
        return torch.stack([ids, signals], dim=1), *(self._pad(output, 0) for output in outputs)

    def _pad(self, tensor: torch.Tensor, value: int) -> torch.Tensor:
        missing = self.gathered_size - tensor.shape[0]
        return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])


def evaluation_batches(
    accelerator: Accelerator, split: Split, tokenizer: Any, settings: TrainingSettings
) -> Iterator[EvaluationBatch]:
    """This rank's batches of a whole split, of the batch size in the settings; see `batches_of`."""
    size = settings.per_device_eval_batch_size or 2 * settings.micro_batch_size
    return batches_of(accelerator, split, tokenizer, size, settings.max_tokens_per_batch)


def batches_of(
    accelerator: Accelerator,
    split: Split,
    tokenizer: Any,
    per_device: int,
    max_tokens: int | None = None,
    report: ReportProgress | None = None,
) -> Iterator[EvaluationBatch]:
    """Yields this rank's batches of a whole split, the longest texts first.

    Every rank gets the same number of batches, as collectives of sharded parameters need; a rank that runs out of
    samples gets batches of padding samples.
    """
    prefetcher, collate = (
        Prefetcher(accelerator.device),
        collator_of(split, tokenizer, accelerator.device),
    )
    rank, world = accelerator.process_index, accelerator.num_processes
    batches = micro_batches(split, np.arange(len(split)), per_device, rank, world, max_tokens)
    ends = np.cumsum(
        [(len(indices), split.lengths[indices].sum()) for indices in batches], axis=0
    )  # samples, tokens
    bar = Progress(split.name, len(split))
    report = report or bar.update
    collations = [partial(collate, indices) for indices in batches]
    with _refuse_unpadded(accelerator, per_device) as current:
        for place, (collation, following) in enumerate(
            zip(collations, [*collations[1:], None], strict=True)
        ):
            batch = EvaluationBatch(
                **vars(prefetcher.batch(collation, following)), gathered_size=per_device
            )
            launch.explain_failures(partial(memory.explain, batch, None))
            current[:] = [batch]
            yield batch
            if accelerator.device.type == "cpu":
                memory.manage_freed_memory()
            if accelerator.is_main_process:
                samples, tokens = ends[place].tolist()
                report(min(samples * world, len(split)), tokens / max(1, ends[-1][1]))
    bar.close()
    launch.explain_failures()


class Outputs:
    """Collects the gathered outputs of a split on the main process, and checks that each sample is there once."""

    def __init__(self, accelerator: Accelerator, split: Split) -> None:
        self.accelerator, self.split = accelerator, split
        self._parts: list[list[np.ndarray]] = []

    def add(self, gathered: Sequence[torch.Tensor]) -> None:
        """Adds `accelerator.gather_for_metrics(batch.padded(...))` without the padding. Raises StopRequested on all
        ranks if one of them has received a stop signal, and UserError for outputs without ids."""
        if (
            isinstance(gathered, torch.Tensor)
            or gathered[0].shape[1:] != (2,)
            or gathered[0].is_floating_point()
        ):
            raise UserError(
                f"{self.split.name}: outputs without the ids of their samples: {GATHER}"
            )
        ids, signals = gathered[0].cpu().numpy().T
        if signals.any():
            raise StopRequested(int(signals.max()))
        if self.accelerator.is_main_process:
            parts = (
                part.float() if part.dtype == torch.bfloat16 else part for part in gathered[1:]
            )  # not NumPy's
            self._parts.append(
                [ids[ids >= 0], *(part.detach().cpu().numpy()[ids >= 0] for part in parts)]
            )

    def in_order(self) -> list[np.ndarray]:
        """The outputs, (N, ...) each, in the order of the file on the main process, [] on the others; a collective.

        Raises, on every rank, ExactlyOnceError if a sample is missing or duplicated, and UserError if an output
        is not finite.
        """
        columns = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)] or [
            np.array([], np.int64)
        ]
        fault: tuple[type[Exception], str] | None = None
        if self.accelerator.is_main_process:
            wrong_ids, infinite = ids_fault(columns[0], self.split.rows), _finite_fault(columns)
            faults = {ExactlyOnceError: wrong_ids and f"{wrong_ids}: {GATHER}", UserError: infinite}
            fault = next((each for each in faults.items() if each[1]), None)
        if fault := broadcast_object_list([fault])[0]:
            raise fault[0](f"{self.split.name}: {fault[1]}")
        if not self.accelerator.is_main_process:
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
        """Makes the evaluation from losses (N,) and metrics on the main process, and broadcasts its numbers; a
        collective, which the other ranks call without arguments. The loss is normalised as in a training step: the
        weighted sum over the split's loss denominator."""
        numbers: dict[str, Any] = {}
        if losses is not None:
            weights = 1 if self.split.weights is None else self.split.weights
            loss = float(
                (losses * weights).sum(dtype=np.float64) / self.split.loss_denominators().sum()
            )
            numbers = {"num_samples": len(self.split), "loss": loss, **as_json(metrics or {})}
        outputs = None if logits is None else (self.split, logits)
        return Evaluation(
            self.split.name, broadcast_object_list([numbers])[0], predictions, outputs
        )


@torch.no_grad()  # not inference_mode: parameters gathered in it could not be trained on afterwards
def predict(
    accelerator: Accelerator,
    model: torch.nn.Module,
    split: Split,
    tokenizer: Any,
    per_device_batch_size: int,
    max_tokens: int | None = None,
    report: ReportProgress | None = None,
) -> np.ndarray | None:
    """(N, C) float32 logits of a whole split on the main process, None on the others; a collective."""
    model.eval()
    outputs = Outputs(accelerator, split)
    for batch in batches_of(
        accelerator, split, tokenizer, per_device_batch_size, max_tokens, report
    ):
        logits = model(**batch.inputs).logits.float()  # (B, C)
        outputs.add(accelerator.gather_for_metrics(batch.padded(logits)))
    return next(iter(outputs.in_order()), None)


def _finite_fault(columns: Sequence[np.ndarray]) -> str:
    """Names the rows with a NaN or an infinity among their outputs; "" if there are none."""
    finite = [np.isfinite(column.reshape(len(column), -1)).all(axis=1) for column in columns[1:]]
    bad = np.sort(columns[0][~np.logical_and.reduce(finite)])
    if not len(bad):
        return ""
    rows = listing((bad + 1).tolist())
    return f"the model's outputs are not finite for rows {rows}: it diverged; lower --learning_rate"


def ids_fault(ids: np.ndarray, expected: np.ndarray) -> str:
    """How the gathered ids differ from those of the data set; "" if they do not."""
    unique, counts = np.unique(ids, return_counts=True)
    faults = {
        "never predicted: ids": np.setdiff1d(expected, unique),
        "more than once: ids": unique[counts > 1],
        "unknown: ids": np.setdiff1d(unique, expected),
    }
    return "; ".join(
        f"{name} {listing(some.tolist())}" for name, some in faults.items() if len(some)
    )
