"""Classifiers of transformers that take texts end to end in one row.

Attention ends at each text (`attend`); after the last layer only each text's first token is there, a row each, where a
head that reads `hidden_states[:, 0]` finds it. Hooks do that; parameters, classes and padded batches stay as they are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from toolkit.errors import UserError
from toolkit.launch import log_on_main
from toolkit.models.first_token import only_head_reads
from toolkit.models.layers import outer_layers


@dataclass(frozen=True)
class Packed:
    """The texts of a row. It stands in the place of the attention mask: a model that was not made to take it fails."""

    lengths: tuple[int, ...]
    """Of the N texts in tokens, those of padding last."""
    texts: int
    """How many are no padding."""
    width: int
    """At least the longest length."""
    offsets: torch.Tensor
    """(N + 1,) int32: where each text begins, and the last one ends."""
    places: torch.Tensor
    """(T,) int64: each token's place in the texts padded to (N, width)."""

    @property
    def firsts(self) -> torch.Tensor:
        """(N,): each text's first token."""
        return self.offsets[:-1].long()

    @functools.cached_property
    def keys(self) -> torch.Tensor:
        """(N, 1, 1, width) bool: what is a token in the padded texts."""
        columns = torch.arange(self.width, device=self.offsets.device)
        return (columns < self.offsets.diff()[:, None])[:, None, None]


def take_rows(accelerator: Any, model: Any, probe: dict[str, Any]) -> None:
    """Lets a classifier take what `PackedCollator` makes, besides padded batches; its encoder's last layer then
    computes the first tokens alone where nothing else is read. Raises UserError for one that cannot, as far as its
    attention and the logits of a `probe` show."""
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not (layers := outer_layers(model.base_model)):
        raise UserError(f"--padding_free: {name} is no classifier of transformers with layers: leave it out")
    if (attention := model.config._attn_implementation) != "sdpa":
        way = "leave it out, or --attn_implementation, or take a model that has it (docs/scaling.md names some)"
        raise UserError(f"--padding_free: {name} has the attention {attention!r}, and texts in a row need sdpa: {way}")
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)
    model.register_forward_pre_hook(_unpack, with_kwargs=True)
    model.register_forward_hook(_drop_padding, with_kwargs=True)
    layers[-1].register_forward_hook(_gather_firsts, with_kwargs=True)
    refuse_other_logits(model, probe)
    dropout = max(getattr(model.config, f"attention{name}", None) or 0 for name in ("_probs_dropout_prob", "_dropout"))
    if accelerator.device.type != "cpu" and (dropout or accelerator.mixed_precision == "no"):
        why = f"no dropout (here {dropout}: pass --dropout 0)" if dropout else "no fp32 (pass --mixed_precision bf16)"
        log_on_main(
            accelerator, f"--padding_free: attention alone is padded, for torch's kernel of texts in a row has {why}"
        )


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, packed: Packed | None = None, sliding_window: int | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """transformers' attention `sdpa`; with `packed` that of each text to itself.

    query (1, nh, T, hs), or of the first tokens (N, nh, 1, hs); key and value (1, nh, T, hs) -> as many rows as the
    query has, (1, T, nh, hs) or (N, 1, nh, hs).
    """
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # (T, nh, hs)
    reach = packed.width if sliding_window is None else sliding_window - 1  # transformers' counts the token itself
    by_text = q.device.type == "cpu" and _is_worth_it(packed)
    compute = _in_kernel if _has_kernel(q) and not dropout else _text_by_text if by_text else _padded
    output = compute(q, k, v, packed, reach, dropout_p=dropout, scale=scaling)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def _has_kernel(query: Tensor) -> bool:
    """Of flash attention, which `varlen_attn` runs, from Ampere on."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cpu" or not is_half or query.shape[-1] % 8 or query.shape[-1] > 256:
        return False
    return not query.is_cuda or torch.cuda.get_device_capability(query.device) >= (8, 0)


def _is_worth_it(packed: Packed) -> bool:
    """Whether texts one by one, which are many calls, take less of a CPU than padded ones: long or uneven texts."""
    count, tokens = len(packed.lengths), len(packed.places)
    return tokens > 128 * count or packed.width * count > 1.2 * tokens


def _in_kernel(q: Tensor, k: Tensor, v: Tensor, packed: Packed, reach: int, **options: Any) -> Tensor:
    offsets, width = packed.offsets, packed.width
    if len(q) != len(k):  # a query each
        offsets, width = torch.arange(len(offsets), dtype=torch.int32, device=q.device), 1
    sizes: Any = (offsets, packed.offsets, width, packed.width)
    window = (reach, reach) if reach < packed.width else (-1, -1)
    return cast(Tensor, varlen_attn(q, k, v, *sizes, scale=options["scale"], window_size=window))


def _text_by_text(q: Tensor, k: Tensor, v: Tensor, packed: Packed, reach: int, **options: Any) -> Tensor:
    lengths, outputs = list(packed.lengths), []
    queries = q.split(lengths if len(q) == len(k) else [1] * len(lengths))
    for parts in zip(queries, k.split(lengths), v.split(lengths), strict=True):
        query, key, value = (states.transpose(0, 1)[None] for states in parts)  # (1, nh, length, hs)
        mask = _near(key.shape[2], reach, q.device)[: query.shape[2]] if reach < key.shape[2] else None
        outputs.append(F.scaled_dot_product_attention(query, key, value, mask, **options)[0].transpose(0, 1))
    return torch.cat(outputs)


def _padded(q: Tensor, k: Tensor, v: Tensor, packed: Packed, reach: int, **options: Any) -> Tensor:
    """By a few kernels for all texts, in any precision and with dropout."""
    count, width, mask = len(packed.lengths), packed.width, packed.keys
    if reach < width:  # padding sees itself, or its part of the softmax would be empty
        mask = (_near(width, reach, q.device) & mask) | torch.eye(width, dtype=torch.bool, device=q.device)

    def pad(states: Tensor) -> Tensor:  # (T, nh, hs) -> (N, nh, width, hs)
        rows = states.new_zeros(count * width, *states.shape[1:]).index_copy(0, packed.places, states)
        return rows.unflatten(0, (count, width)).transpose(1, 2)

    is_whole = len(q) == len(k)
    query, mask = (pad(q), mask) if is_whole else (q.unsqueeze(2), mask[:, :, :1])
    output = F.scaled_dot_product_attention(query, pad(k), pad(v), mask, **options).transpose(1, 2).flatten(0, 1)
    return output[packed.places] if is_whole else output


def _near(width: int, reach: int, device: torch.device) -> Tensor:
    """(width, width) bool: of which tokens on either side a token reads."""
    places = torch.arange(width, device=device)
    return (places[:, None] - places).abs() <= reach


def _unpack(model: Any, args: Any, inputs: dict[str, Any]) -> Any:
    """What a `Packed` stands for: no mask, positions as the model counts them, and options for its layers."""
    packed = inputs.get("attention_mask")
    if not isinstance(packed, Packed):
        return None
    embeddings = getattr(model.base_model, "embeddings", None)  # RoBERTa and its kin count from the one after padding
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    kinds = getattr(model.config, "layer_types", None)  # ModernBERT has a mask for each, and makes none where they are
    options: dict[str, Any] = {"packed": packed, "attention_mask": dict.fromkeys(kinds) if kinds else None}
    options["position_ids"] = inputs["position_ids"] + (0 if padding is None else padding + 1)
    if only_head_reads(model, {}):
        options["first_token_only"] = packed.firsts
    return args, inputs | options


def _gather_firsts(layer: Any, args: Any, options: dict[str, Any], output: Any) -> Any:
    """Of the last layer: (1, T, H) -> (N, 1, H), unless it has computed no more."""
    packed = options.get("packed")
    if packed is None or output.shape[1] == 1:
        return None
    return output[0, packed.firsts, None]


def _drop_padding(model: Any, args: Any, options: dict[str, Any], output: Any) -> None:
    if "packed" in options:
        output.logits = output.logits[: options["packed"].texts]  # (B, C)


@torch.no_grad()
def refuse_other_logits(model: Any, probe: dict[str, Any]) -> None:
    """Raises UserError unless the texts of a `probe` have in one row the logits that each of them has alone."""
    training, packed = model.training, probe["attention_mask"]
    texts = probe["input_ids"].split(packed.lengths, dim=1)[: packed.texts]
    expected = torch.cat([model.eval()(input_ids=text).logits for text in texts])
    try:
        logits = model(**probe).logits
        same = bool((logits - expected).abs().max() <= 1e-6 + 1e-3 * expected.diff(dim=0).abs().max())
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
        same = False
    model.train(training)
    if not same:
        why = "other logits than each has alone: its attention, its positions or its head are of another kind"
        raise UserError(f"--padding_free: {type(model).__name__} gives texts in one row {why}; leave it out")
