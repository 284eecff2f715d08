"""What each token adds to a model's output: integrated gradients over the word embeddings, as captum computes them.

Sundararajan, Taly and Yan 2017, "Axiomatic Attribution for Deep Networks". The baseline is the text with padding
between its special tokens: what all tokens add is the difference between the outputs of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_POINTS, _FEWEST_POINTS = 32, 8
_MOST_TOKENS = 4096
"""Of one batch of points."""


def attribute(
    model: Any,
    inputs: dict[str, torch.Tensor],
    special: torch.Tensor,
    output_of: Callable[[torch.Tensor], torch.Tensor],
    seconds: float,
) -> np.ndarray | None:
    """`inputs` (1, S) of one text, `special` (S,) bool, `output_of` (B, C) logits -> (B,) -> (S,) float32.

    By Gauss-Legendre with 32 points, or as many as `seconds` allow; None where they allow fewer than 8.
    """
    from captum.attr import LayerIntegratedGradients

    ids, names = inputs["input_ids"], [name for name in inputs if name != "input_ids"]
    others = tuple(inputs[name] for name in names)

    def output(ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return output_of(model(input_ids=ids, **dict(zip(names, others, strict=True))).logits.float())

    with torch.no_grad():
        output(ids, *others)  # the first one may load kernels
        started = time.monotonic()
        output(ids, *others)
    # a backward pass takes twice as long as a forward pass
    points = min(_POINTS, int(seconds / (3 * (time.monotonic() - started))))
    if points < _FEWEST_POINTS:
        return None
    adds = LayerIntegratedGradients(output, model.get_input_embeddings()).attribute(
        ids,
        torch.where(special, ids, model.config.get_text_config().pad_token_id or 0),
        additional_forward_args=others,
        n_steps=points,
        method="gausslegendre",
        internal_batch_size=max(1, _MOST_TOKENS // ids.shape[1]),
    )  # (1, S, H); a BigBird pads S to whole blocks
    return adds.sum(dim=-1)[0, : ids.shape[1]].float().cpu().numpy()
