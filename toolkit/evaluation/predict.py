"""Every sample exactly once, whatever the size of the set, the batch and the world.

Sample ids travel with the outputs through `gather_for_metrics`; the ids that came back are compared
with the data set before any number is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit import launch, memory
from toolkit.data.batches import Batch, Collator, evaluation_rounds
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing


@dataclass(frozen=True)
class Predictions:
    """Outputs in the order of the source, on the main process."""

    ids: np.ndarray
    """(N,) int64, rows in the source, ascending."""
    logits: np.ndarray
    """(N, C) float32."""
    labels: np.ndarray
    """(N,) or (N, C), as in the split."""


class ExactlyOnceError(RuntimeError):
    """Some sample was predicted never or more than once: no metric of it would be true."""


def predict(
    accelerator: Accelerator,
    model: torch.nn.Module,
    split: Split,
    collate: Collator,
    per_device_batch_size: int,
    max_tokens: int | None = None,
) -> Predictions | None:
    """Outputs for a whole split on the main process, None on the others; all must call it.

    Raises ExactlyOnceError or, where an output is not finite, UserError, in every process.
    """
    model.eval()

    def outputs(batch: Batch) -> tuple[torch.Tensor]:
        return (model(**batch.inputs).logits.float(),)  # (B, C)

    found = each_once(accelerator, split, collate, per_device_batch_size, max_tokens, outputs)
    ids, logits = found if found else (np.zeros(0, np.int64), np.zeros((0, 1), np.float32))
    refuse_non_finite(accelerator, ids, logits, split)
    return Predictions(ids, logits, split.labels) if found else None


@torch.no_grad()  # not inference_mode: parameters gathered in it could not be trained on afterwards
def each_once(
    accelerator: Accelerator,
    split: Split,
    collate: Collator,
    per_device_batch_size: int,
    max_tokens: int | None,
    outputs: Callable[[Batch], Sequence[torch.Tensor]],
) -> list[np.ndarray] | None:
    """`outputs` of every sample: [ids, (N, ...) each of them] in the order of the source, on the main process.

    `outputs` turns a batch into tensors (B, ...), of the same shape but for B in every batch and process. Every
    process makes the same number of calls of it, as divided parameters need. Only the main process keeps what
    it gathers. Raises ExactlyOnceError in every process.
    """
    keep = accelerator.is_main_process
    kept: list[list[np.ndarray]] = []
    rank, world = accelerator.process_index, accelerator.num_processes
    for share in evaluation_rounds(split, per_device_batch_size, rank, world, max_tokens):
        batch = collate.share(share)
        launch.explain_failures(partial(memory.of_evaluation, batch))
        with accelerator.autocast():
            found = outputs(batch)
        # gather_for_metrics wants shares of one size; with a loader of our own it cuts nothing
        gathered = accelerator.gather_for_metrics(
            (_fill(batch.ids, per_device_batch_size, -1), *(_fill(part, per_device_batch_size, 0) for part in found))
        )
        if keep:
            real = gathered[0].cpu().numpy() >= 0
            kept.append([part.cpu().numpy()[real] for part in gathered])
    columns = [np.concatenate(parts) for parts in zip(*kept, strict=True)]
    _agree(accelerator, ids_fault(columns[0], split.rows) if keep else "", split, ExactlyOnceError)
    if not keep:
        return None
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]


def refuse_non_finite(accelerator: Accelerator, ids: np.ndarray, outputs: np.ndarray, split: Split) -> None:
    """Raises UserError, in every process, naming the rows for which (N, C) outputs of the main process are not
    finite."""
    _agree(accelerator, _finite_fault(ids, outputs), split, UserError)


def _fill(tensor: torch.Tensor, size: int, value: float) -> torch.Tensor:
    """Pads the first dimension to `size`, so that every process gathers the same shape."""
    missing = size - tensor.shape[0]
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)]) if missing > 0 else tensor


def _agree(accelerator: Accelerator, fault: str, split: Split, kind: type[Exception]) -> None:
    """Raises the main process's fault in every process, so that none waits for another."""
    told: list[str] = broadcast_object_list([fault])
    if told[0]:
        raise kind(f"{split.name}: {told[0]}")


def _finite_fault(ids: np.ndarray, outputs: np.ndarray) -> str:
    """A model that diverged has no metric, only rows it fails on."""
    bad = np.sort(ids[~np.isfinite(outputs).all(axis=1)])
    if not len(bad):
        return ""
    rows = listing((bad + 1).tolist())
    return f"the model's outputs are not finite for rows {rows}: it diverged; lower --learning_rate"


def ids_fault(found: np.ndarray, expected: np.ndarray) -> str:
    """What differs between the ids that came back and those of the data set, or nothing."""
    unique, counts = np.unique(found, return_counts=True)
    missing = np.setdiff1d(expected, unique)
    foreign = np.setdiff1d(unique, expected)
    twice = unique[counts > 1]
    faults = [
        f"{name} {listing(some.tolist())}"
        for name, some in (
            ("never predicted: rows", missing),
            ("more than once: rows", twice),
            ("unknown:", foreign),
        )
        if len(some)
    ]
    return "; ".join(faults)
