"""Classifiers of transformers that accept packed texts, several in one row without padding.

`attend` restricts attention to each text; after the last layer the first token of each text becomes
a row, as heads that read `hidden_states[:, 0]` expect. Done by transformers' registry of attentions
and by hooks: parameters, classes and padded batches do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.errors import UserError
from toolkit.models.layers import outer_layers


@dataclass(frozen=True)
class Packed:
    """The texts of a row. It is passed as attention mask, so that an unprepared model fails."""

    lengths: tuple[int, ...]
    """Tokens of the N texts; padding texts last."""
    num_texts: int
    """Without padding texts."""
    width: int
    """Of padded texts; at least the longest length."""
    cu_seqlens: Tensor
    """(N + 1,) int32: cumulative lengths, from 0."""
    padded_indices: Tensor
    """(T,) int64: index of each token in the flattened padded texts (N, width)."""

    @property
    def first_tokens(self) -> Tensor:
        """(N,): index of each text's first token."""
        return self.cu_seqlens[:-1].long()

    @cached_property
    def key_mask(self) -> Tensor:
        """(N, 1, 1, width) bool: tokens of the padded texts that are no padding."""
        columns = torch.arange(self.width, device=self.cu_seqlens.device)
        return (columns < self.cu_seqlens.diff()[:, None])[:, None, None]


def accept_packed(model: Any, probe: Mapping[str, Any]) -> None:
    """Makes a classifier accept packed batches besides padded ones. Raises UserError if it cannot,
    judged by its attention and its logits for `probe`, a packed batch."""
    if hasattr(model, "peft_config"):
        model = model.get_base_model()
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention != "sdpa":
        why = (
            f"needs a classifier of transformers with the attention sdpa, not {attention!r}"
        )
        raise UserError(f"--padding_free: {why}, as {type(model).__name__}: leave it out")
    padded = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(padded, "func", None) is not attend:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", partial(attend, padded))
    model.register_forward_pre_hook(_unpack, with_kwargs=True)
    model.register_forward_hook(_drop_padding_texts, with_kwargs=True)
    layer = outer_layers(model.base_model)[-1]
    layer.register_forward_hook(_select_first_tokens, with_kwargs=True)
    check_logits(model, probe)


@torch.no_grad()
def check_logits(model: Any, probe: Mapping[str, Any]) -> None:
    """Raises UserError unless each text of `probe`, a packed batch, has the logits that it has
    alone."""
    packed = probe["attention_mask"]
    model.eval()
    texts = probe["input_ids"].split(packed.lengths, dim=1)[: packed.num_texts]
    expected = torch.cat([model(input_ids=text).logits for text in texts])
    try:
        error = float((model(**probe).logits - expected).abs().max())
    except Exception:  # an unknown model may raise anything
        error = math.inf
    spread = float(expected.diff(dim=0).abs().max())
    if not error <= 1e-6 + 1e-3 * spread:
        why = "has other logits for packed texts than for single ones"
        raise UserError(f"--padding_free: {type(model).__name__} {why}: leave it out")


def _unpack(model: Any, args: Any, inputs: dict[str, Any]) -> Any:
    """The hook before the model: replaces a `Packed` mask by None, which layers take for no
    padding, shifts positions as the model counts them, and adds options for its layers, `packed`
    and the first tokens."""
    packed = inputs.get("attention_mask")
    if not isinstance(packed, Packed):
        return None
    inputs = inputs | {"packed": packed, "attention_mask": None}
    kinds = getattr(model.config, "layer_types", None)
    if kinds:  # ModernBERT takes a mask for each
        inputs["attention_mask"] = dict.fromkeys(kinds)
    embeddings = getattr(model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if padding is not None:  # RoBERTa's positions start behind it
        inputs["position_ids"] = inputs["position_ids"] + padding + 1
    if inputs.get("first_token_only"):
        inputs["first_token_only"] = packed.first_tokens
    return args, inputs


def _select_first_tokens(
    layer: Any, args: Any, options: dict[str, Any], output: Any
) -> Any:
    """The hook after the last layer: (1, T, H) -> (N, 1, H), unless it has computed only the first
    tokens."""
    packed = options.get("packed")
    if packed is None or output.shape[1] == 1:
        return None
    return output[0, packed.first_tokens, None]


def _drop_padding_texts(
    model: Any, args: Any, options: dict[str, Any], output: Any
) -> None:
    """The hook after the model: leaves the logits of the texts. Raises UserError for outputs of all
    tokens, which a caller would index by text."""
    if "packed" not in options:
        return
    if output.get("hidden_states") is not None or output.get("attentions") is not None:
        why = "hidden states and attentions have no row for each text"
        raise UserError(f"--padding_free: {why}: leave it out")
    output.logits = output.logits[: options["packed"].num_texts]  # (B, C)


def attend(
    padded: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed: Packed | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention `padded` of transformers; with `packed`, within each text.

    query (1, nh, T, hs), key and value (1, nh, T, hs) -> (1, T, nh, hs). query (N, nh, 1, hs), the
    first tokens only -> (N, 1, nh, hs).
    """
    if packed is None:
        result: tuple[Tensor, Tensor | None] = padded(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **options,
        )
        return result
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    window = packed.width
    if sliding_window is not None:
        window = sliding_window - 1  # transformers' includes the token itself
    if _supports_varlen(q) and not dropout:
        output = _varlen(q, k, v, packed, window, scaling)
    else:
        compute = partial(padded, module, dropout=dropout, scaling=scaling, is_causal=False)
        output = _padded(q, k, v, packed, window, compute)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def _supports_varlen(query: Tensor) -> bool:
    """Whether flash attention, which `varlen_attn` runs, supports this query (from Ampere on)."""
    head_size = query.shape[-1]
    if query.device.type == "cpu" or query.dtype.itemsize != 2:
        return False
    if head_size % 8 or head_size > 256:
        return False
    return not query.is_cuda or torch.cuda.get_device_capability(query.device) >= (8, 0)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    window: int,
    scaling: float | None,
) -> Tensor:
    """(T, nh, hs) each, or q (N, nh, hs) -> like q. A token attends to `window` others on each
    side."""
    cu_queries = packed.cu_seqlens
    longest = packed.width
    if len(q) != len(k):  # one query for each text
        cu_queries = torch.arange(len(cu_queries), dtype=torch.int32, device=q.device)
        longest = 1
    sides = (-1, -1)
    if window < packed.width:
        sides = (window, window)
    context: Any = varlen_attn(
        q,
        k,
        v,
        cu_queries,
        packed.cu_seqlens,
        longest,
        packed.width,
        scale=scaling,
        window_size=sides,
    )
    return cast(Tensor, context)


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    window: int,
    compute: Callable[..., Any],
) -> Tensor:
    """As `_varlen`, by the attention `compute` of transformers for padded texts, in any precision
    and with dropout."""
    # a compiled layer is made for one length of a tuple, and for any length of a tensor
    count = packed.cu_seqlens.shape[0] - 1
    width = packed.width
    mask = packed.key_mask
    if window < width:
        positions = torch.arange(width, device=q.device)
        distance = (positions[:, None] - positions).abs()
        # padding attends to itself: a fully masked row has no softmax
        mask = (mask & (distance <= window)) | (distance == 0)

    def pad(states: Tensor) -> Tensor:  # (T, nh, hs) -> (N, nh, width, hs)
        rows = states.new_zeros(count * width, *states.shape[1:])
        rows = rows.index_copy(0, packed.padded_indices, states)
        return rows.unflatten(0, (count, width)).transpose(1, 2)

    if len(q) != len(k):  # one query for each text
        first: Tensor = compute(q.unsqueeze(2), pad(k), pad(v), mask[:, :, :1])[0]
        return first.flatten(0, 1)
    context: Tensor = compute(pad(q), pad(k), pad(v), mask)[0]
    return context.flatten(0, 1)[packed.padded_indices]
