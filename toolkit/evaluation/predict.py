"""Every sample exactly once, whatever the size of the set, the batch and the world.

Sample ids travel with the outputs through `gather_for_metrics`; the ids that came back are compared
with the data set before any number is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator

from toolkit.data.batches import Collator, evaluation_rounds
from toolkit.data.tokens import Split
from toolkit.errors import listing


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


@torch.no_grad()  # not inference_mode: parameters gathered in it could not be trained on afterwards
def predict(
    accelerator: Accelerator,
    model: torch.nn.Module,
    split: Split,
    collate: Collator,
    per_device_batch_size: int,
    on_progress: Callable[[int], None] = lambda samples: None,
) -> Predictions | None:
    """Outputs for a whole split on the main process, None on the others; all must call it.

    Every process makes the same number of forward calls, as divided parameters need. Only the main
    process keeps what it gathers: N x (C + 1) numbers. Raises ExactlyOnceError in every process.
    """
    model.eval()
    keep = accelerator.is_main_process
    ids: list[np.ndarray] = []
    logits: list[np.ndarray] = []
    rank, world = accelerator.process_index, accelerator.num_processes
    for share in evaluation_rounds(split, per_device_batch_size, rank, world):
        batch = collate.share(share)
        with accelerator.autocast():
            output = model(**batch.inputs).logits.float()  # (B, C)
        # gather_for_metrics wants shares of one size; with a loader of our own it cuts nothing
        found_ids, found = accelerator.gather_for_metrics(
            (_fill(batch.ids, per_device_batch_size, -1), _fill(output, per_device_batch_size, 0.0))
        )
        if keep:
            host_ids = found_ids.cpu().numpy()
            real = host_ids >= 0
            ids.append(host_ids[real])
            logits.append(found.cpu().numpy()[real])
            on_progress(int(real.sum()))
    found_all = np.concatenate(ids) if keep else np.zeros(0, np.int64)
    _verify(accelerator, found_all, split)
    if not keep:
        return None
    order = np.argsort(found_all, kind="stable")
    return Predictions(found_all[order], np.concatenate(logits)[order], split.labels)


def _fill(tensor: torch.Tensor, size: int, value: float) -> torch.Tensor:
    """Pads the first dimension to `size`, so that every process gathers the same shape."""
    missing = size - tensor.shape[0]
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)]) if missing > 0 else tensor


def _verify(accelerator: Accelerator, found: np.ndarray, split: Split) -> None:
    """Raises in every process, not only where the ids were gathered, so that none waits for another."""
    fault = ""
    if accelerator.is_main_process:
        fault = ids_fault(found, split.rows)
    good = torch.tensor([0.0 if fault else 1.0], device=accelerator.device)
    # the other processes add nothing
    verdict = accelerator.reduce(good if accelerator.is_main_process else torch.zeros_like(good), reduction="sum")
    if verdict.item() < 1:
        raise ExactlyOnceError(f"{split.name}: {fault or 'some sample was not predicted exactly once'}")


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
