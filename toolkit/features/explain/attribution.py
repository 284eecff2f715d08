"""Which tokens made a model say what it says: integrated gradients over the output of the word embeddings.

Sundararajan, Taly and Yan 2017, "Axiomatic Attribution for Deep Networks": the gradient of an output, averaged on the
straight way from a text that says nothing to this one, times what lies between. All tokens together add what the output
of the one is above that of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

_POINTS, _FEWEST_POINTS = 32, 8
_MOST_TOKENS = 4096  # computed at once


class Attribution(NamedTuple):
    """Of one text."""

    tokens: np.ndarray
    """(S,) float32: what each token adds to the output."""
    output: float
    baseline: float
    """The output for the text that says nothing: padding between the same special tokens."""


def attribute(
    model: Any,
    inputs: dict[str, torch.Tensor],
    special: torch.Tensor,
    output_of: Callable[[torch.Tensor], torch.Tensor],
    seconds: float,
) -> Attribution | None:
    """`inputs` (1, S) of one text, `special` (S,) bool, `output_of` (B, C) logits -> (B,) -> what each token adds.

    32 points of Gauss-Legendre, or as many as `seconds` allow, 8 at least; None where they do not allow these.
    """
    embeddings, put = model.get_input_embeddings(), _Put()
    hook = embeddings.register_forward_hook(put)
    try:
        with torch.no_grad():
            output = float(output_of(model(**inputs).logits.float()))
            ids = inputs["input_ids"]
            text = put.seen[:, : ids.shape[1]]  # (1, S, H)
            pad = torch.full_like(ids, model.config.get_text_config().pad_token_id or 0)
            nothing = embeddings(torch.where(special, ids, pad))  # (1, S, H)
            put.given, started = nothing, time.monotonic()
            baseline = float(output_of(model(**inputs).logits.float()))
        # a backward pass takes twice as long as a forward pass
        affordable = int(seconds / (3 * (time.monotonic() - started)))
        if affordable < _FEWEST_POINTS:
            return None
        ways, weights = np.polynomial.legendre.leggauss(min(_POINTS, affordable))
        total = torch.zeros_like(text)
        size = max(1, _MOST_TOKENS // ids.shape[1])
        for start in range(0, len(ways), size):
            some = torch.as_tensor((ways[start : start + size] + 1) / 2, dtype=text.dtype, device=text.device)
            put.given = (nothing + some[:, None, None] * (text - nothing)).requires_grad_()  # (K, S, H)
            repeated = {name: tensor.expand(len(some), -1) for name, tensor in inputs.items()}
            (slope,) = torch.autograd.grad(output_of(model(**repeated).logits.float()).sum(), put.given)
            share = torch.as_tensor(weights[start : start + size] / 2, dtype=text.dtype, device=text.device)
            total += (share[:, None, None] * slope).sum(dim=0, keepdim=True)
        found = ((text - nothing) * total).sum(dim=-1)[0]
        return Attribution(found.float().cpu().numpy(), output, baseline)
    finally:
        hook.remove()


class _Put:
    """In place of what the embeddings found, where something is given."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None
        self.seen: Any = None

    def __call__(self, module: torch.nn.Module, inputs: Any, found: torch.Tensor) -> torch.Tensor:
        self.seen = found
        if self.given is None:
            return found
        return torch.cat([self.given, found[:, self.given.shape[1] :]], dim=1)  # a BigBird pads to whole blocks
