"""Packed texts, several in one row without padding: a collator, and transformers' classifiers that accept its batches.

`attend` restricts attention to each text; after the last layer the first token of each text becomes a row, as heads
that read `hidden_states[:, 0]` expect. Done by hooks: parameters, classes and padded batches do not change.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from toolkit.data.batches import Batch, Collator
from toolkit.errors import UserError
from toolkit.launch import log_on_main
from toolkit.models.layers import outer_layers
from toolkit.pretrained import attention_dropout

_LENGTHS = 8
"""Row lengths on a GPU from one power of two to the next: at most 1/8 of a row is padding, 1/25 on average."""


@dataclass(frozen=True)
class Packed:
    """The texts of a row. It is passed as attention mask, so that an unprepared model fails."""

    lengths: tuple[int, ...]  # tokens of the N texts; padding texts last
    num_texts: int  # without padding texts
    width: int  # of padded texts; at least the longest length
    cu_seqlens: Tensor  # (N + 1,) int32: cumulative lengths, from 0
    padded_indices: (
        Tensor  # (T,) int64: index of each token in the flattened padded texts (N, width)
    )

    @property
    def first_tokens(self) -> Tensor:
        """(N,): index of each text's first token."""
        return self.cu_seqlens[:-1].long()

    @functools.cached_property
    def key_mask(self) -> Tensor:
        """(N, 1, 1, width) bool: tokens of the padded texts that are no padding."""
        columns = torch.arange(self.width, device=self.cu_seqlens.device)
        return (columns < self.cu_seqlens.diff()[:, None])[:, None, None]


def accept_packed(accelerator: Any, model: Any, probe: dict[str, Any]) -> None:
    """Makes a classifier accept packed batches besides padded ones. Raises UserError if it cannot, judged by its
    attention and its logits for `probe`, a packed batch."""
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not (layers := outer_layers(model.base_model)):
        raise UserError(
            f"--padding_free needs a classifier of transformers, and {name} is none: leave it out"
        )
    if (attention := model.config._attn_implementation) != "sdpa":
        way = "leave it out, or --attn_implementation, or take a model with sdpa (docs/scaling.md)"
        raise UserError(
            f"--padding_free needs the attention sdpa, and {name} has {attention!r}: {way}"
        )
    padded = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(padded, "func", None) is not attend:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", functools.partial(attend, padded=padded))
    model.register_forward_pre_hook(_unpack, with_kwargs=True)
    model.register_forward_hook(_drop_padding_texts, with_kwargs=True)
    layers[-1].register_forward_hook(_select_first_tokens, with_kwargs=True)
    check_logits(model, probe)
    dropout = attention_dropout(model.config)
    half = accelerator.mixed_precision != "no"
    old = accelerator.device.type == "cuda" and torch.cuda.get_device_capability(
        accelerator.device
    ) < (8, 0)
    if accelerator.device.type != "cpu" and (old or dropout or not half):
        why = "torch's varlen_attn needs --dropout 0, --mixed_precision bf16 or fp16, and a GPU from Ampere on"
        log_on_main(accelerator, f"--padding_free: attention is padded: {why}")


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed: Packed | None = None,
    sliding_window: int | None = None,
    padded: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention `sdpa`; with `packed`, within each text. `padded`: the attention of
    padded texts.

    query (1, nh, T, hs), key and value (1, nh, T, hs) -> (1, T, nh, hs). query (N, nh, 1, hs), the first tokens only ->
    (N, 1, nh, hs).
    """
    if packed is None:
        outputs: tuple[Tensor, Tensor | None] = padded(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return outputs
    q, k, v = (
        states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)
    )  # (T, nh, hs)
    window = (
        packed.width if sliding_window is None else sliding_window - 1
    )  # transformers' includes the token itself
    loop = q.device.type == "cpu" and _is_loop_faster(packed)
    compute = _varlen if _supports_varlen(q) and not dropout else _text_by_text if loop else _padded
    sdpa = functools.partial(padded, module, dropout=dropout, scaling=scaling, is_causal=False)
    output = compute(q, k, v, packed, window, scale=scaling, sdpa=sdpa)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def _supports_varlen(query: Tensor) -> bool:
    """Whether flash attention, which `varlen_attn` runs, supports this query (from Ampere on)."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cpu" or not is_half or query.shape[-1] % 8 or query.shape[-1] > 256:
        return False
    return not query.is_cuda or torch.cuda.get_device_capability(query.device) >= (8, 0)


def _is_loop_faster(packed: Packed) -> bool:
    """Whether a loop over texts beats padding on a CPU: with long texts or uneven lengths."""
    count, tokens = len(packed.lengths), len(packed.padded_indices)
    return tokens > 128 * count or packed.width * count > 1.2 * tokens


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: int, **options: Any) -> Tensor:
    cu_queries, longest = packed.cu_seqlens, packed.width
    if len(q) != len(k):  # one query for each text
        cu_queries, longest = torch.arange(len(cu_queries), dtype=torch.int32, device=q.device), 1
    sizes: Any = (cu_queries, packed.cu_seqlens, longest, packed.width)
    both_sides = (window, window) if window < packed.width else (-1, -1)
    return cast(
        Tensor, varlen_attn(q, k, v, *sizes, scale=options["scale"], window_size=both_sides)
    )


def _text_by_text(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: int, **options: Any
) -> Tensor:
    lengths, outputs = list(packed.lengths), []
    queries = q.split(lengths if len(q) == len(k) else [1] * len(lengths))
    for parts in zip(queries, k.split(lengths), v.split(lengths), strict=True):
        query, key, value = (
            states.transpose(0, 1)[None] for states in parts
        )  # (1, nh, length, hs)
        mask = (
            _window_mask(key.shape[2], window, q.device)[: query.shape[2]]
            if window < key.shape[2]
            else None
        )
        outputs.append(options["sdpa"](query, key, value, mask)[0][0])  # (length, nh, hs)
    return torch.cat(outputs)


def _padded(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: int, **options: Any) -> Tensor:
    """A few kernels for all texts, in any precision and with dropout."""
    # a compiled layer is made for one length of a tuple, and for any length of a tensor
    count, width, mask = packed.cu_seqlens.shape[0] - 1, packed.width, packed.key_mask
    if window < width:  # padding attends to itself: a fully masked row has no softmax
        mask = (_window_mask(width, window, q.device) & mask) | torch.eye(
            width, dtype=torch.bool, device=q.device
        )

    def pad(states: Tensor) -> Tensor:  # (T, nh, hs) -> (N, nh, width, hs)
        rows = states.new_zeros(count * width, *states.shape[1:]).index_copy(
            0, packed.padded_indices, states
        )
        return rows.unflatten(0, (count, width)).transpose(1, 2)

    has_all_queries = len(q) == len(k)
    query, mask = (pad(q), mask) if has_all_queries else (q.unsqueeze(2), mask[:, :, :1])
    output = options["sdpa"](query, pad(k), pad(v), mask)[0].flatten(0, 1)
    return output[packed.padded_indices] if has_all_queries else output


def _window_mask(width: int, window: int, device: torch.device) -> Tensor:
    """(width, width) bool: pairs of tokens at most `window` apart."""
    positions = torch.arange(width, device=device)
    return (positions[:, None] - positions).abs() <= window


def _unpack(model: Any, args: Any, inputs: dict[str, Any]) -> Any:
    """Replaces a `Packed` mask by None, shifts positions as the model counts them, and adds options for its layers."""
    packed = inputs.get("attention_mask")
    if not isinstance(packed, Packed):
        return None
    embeddings = getattr(
        model.base_model, "embeddings", None
    )  # RoBERTa's positions start at padding_idx + 1
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    kinds = getattr(model.config, "layer_types", None)  # ModernBERT takes a mask for each
    options: dict[str, Any] = {
        "packed": packed,
        "attention_mask": dict.fromkeys(kinds) if kinds else None,
    }
    options["position_ids"] = inputs["position_ids"] + (0 if padding is None else padding + 1)
    if "first_token_only" in inputs:  # see toolkit/models/first_token.py
        options["first_token_only"] = packed.first_tokens
    return args, inputs | options


def _select_first_tokens(layer: Any, args: Any, options: dict[str, Any], output: Any) -> Any:
    """(1, T, H) -> (N, 1, H), unless the last layer has computed the first tokens only."""
    packed = options.get("packed")
    return None if packed is None or output.shape[1] == 1 else output[0, packed.first_tokens, None]


def _drop_padding_texts(model: Any, args: Any, options: dict[str, Any], output: Any) -> None:
    if "packed" in options:
        if output.get("hidden_states") is not None or output.get("attentions") is not None:
            raise UserError(
                "--padding_free: hidden states and attentions have no row for each text: leave it out"
            )
        output.logits = output.logits[: options["packed"].num_texts]  # (B, C)


@torch.no_grad()
def check_logits(model: Any, probe: dict[str, Any]) -> None:
    """Raises UserError unless each text of `probe`, a packed batch, has the logits that it has alone."""
    training, packed = model.training, probe["attention_mask"]
    texts = probe["input_ids"].split(packed.lengths, dim=1)[: packed.num_texts]
    expected = torch.cat([model.eval()(input_ids=text).logits for text in texts])
    try:
        logits = model(**probe).logits
        same = bool(
            (logits - expected).abs().max() <= 1e-6 + 1e-3 * expected.diff(dim=0).abs().max()
        )
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
        same = False
    model.train(training)
    if not same:
        why = "has other logits for packed texts than for single ones (its attention, positions or head do not fit)"
        raise UserError(f"--padding_free: {type(model).__name__} {why}: leave it out")


class PackedCollator(Collator):
    """Sample indices -> a `Batch` of one row. On a GPU texts of padding fill it to one of few lengths (`round_up`), for
    kernels, compiled layers and the caching allocator."""

    def __init__(
        self, split: Any, tokenizer: Any, device: torch.device, max_tokens: int | None = None
    ) -> None:
        """`max_tokens`: no padding beyond this length of a row."""
        super().__init__(split, tokenizer, device)
        self.max_tokens, self.rounds_up = max_tokens, device.type != "cpu"

    def __call__(self, indices: np.ndarray) -> Batch:
        batch = super().__call__(indices)
        lengths = cast(Packed, batch.inputs["attention_mask"]).lengths
        return replace(
            batch, token_samples=self.move(np.repeat(np.arange(len(lengths)), lengths)[None])
        )

    def inputs(
        self, tokens: np.ndarray, lengths: np.ndarray, types: np.ndarray | None
    ) -> dict[str, Any]:
        """`input_ids`, `position_ids` and `token_type_ids` (1, T), and a `Packed` as `attention_mask`."""
        samples, total, longest = len(lengths), len(tokens), int(lengths.max())
        padding = (
            min(round_up(total), max(total, self.max_tokens or round_up(total))) - total
            if self.rounds_up
            else 0
        )
        count, rest = divmod(
            padding, longest
        )  # padding texts no longer than the others: positions are limited
        lengths = np.append(lengths, [*[longest] * count, *[rest] * (rest > 0)]).astype(np.int64)
        width = round_up(longest) if self.rounds_up else longest
        cu_seqlens = np.append(0, lengths.cumsum())
        positions = np.arange(total + padding) - np.repeat(cu_seqlens[:-1], lengths)
        padded_indices = self.move(np.repeat(np.arange(len(lengths)) * width, lengths) + positions)
        on_device = self.move(cu_seqlens.astype(np.int32))
        inputs = {
            "input_ids": self.row(tokens, padding, self.pad_id),
            "position_ids": self.move(positions[None]),
            "attention_mask": Packed(
                tuple(lengths.tolist()), samples, width, on_device, padded_indices
            ),
        }
        return inputs | (
            {} if types is None else {"token_type_ids": self.row(types, padding, self.pad_type)}
        )

    def row(self, values: np.ndarray, padding: int, filler: int) -> torch.Tensor:
        """(T,) -> (1, T + padding) int64 on the device."""
        return self.move(np.concatenate([values, np.full(padding, filler)], dtype=np.int64)[None])

    def prepare_model(self, accelerator: Any, model: Any) -> None:
        probe = copy.copy(self)
        probe.device = next(model.parameters()).device
        accept_packed(accelerator, model, probe.inputs(np.r_[3:10, 8:4:-1], np.array([7, 4]), None))


def round_up(tokens: int) -> int:
    step = max(8, (1 << (tokens.bit_length() - 1)) // _LENGTHS)
    return -(-tokens // step) * step
