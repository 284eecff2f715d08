"""Attention in training on a CPU, where torch's fast kernel has no dropout and a slow backward pass for short texts.

Dropout makes torch keep three matrices of scores in float32 per head and layer. This one computes some heads at a time,
in a CPU's cache, and keeps the probabilities in the precision of the queries, 2 bytes each in bf16; their sign bit says
which are dropped. In bf16 the forward and backward pass took 0.7 of torch's time at 32 tokens, 0.6 at 128 and 0.45 at
512 (12 heads of 32 or 64, one core of an AMD EPYC).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.errors import UserError
from toolkit.utils.compat import require

# scores of a group of heads: 2 MiB in float32
_SCORES = 1 << 19
# Without dropout only up to this length, and not in float32: it needs memory for each score, torch's kernel does not.
_SHORT = 256
transforms_active = require(torch._C, "_are_functorch_transforms_active", "torch")  # of torch.func


@functools.cache
def install() -> None:
    """Makes transformers' attention `sdpa` use this one if it is faster. Only once: `--padding_free` registers
    another one later."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def share_casts(model: torch.nn.Module) -> None:
    """Makes autocast cast the input of a layer's query, key and value once, not three times.

    Outputs do not change; the three gradients of that input are added before they are cast back, not after. A step of
    BERT-base with 256 texts of 128 tokens took 0.95 of the time on an H100. Not where a module has more than these
    three (ALBERT's adds its input to its output).
    """
    for part in model.modules():
        layers = {
            name: each
            for name, each in part.named_children()
            if next(each.parameters(), None) is not None
        }
        if layers.keys() == {"query", "key", "value"} and {
            type(each) for each in layers.values()
        } == {torch.nn.Linear}:
            part.register_forward_pre_hook(_cast_input)


def _cast_input(attention: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if not inputs or inputs[0].dtype != torch.float32 or inputs[0].is_meta:
        return inputs
    if not torch.is_autocast_enabled(inputs[0].device.type):
        return inputs
    return (inputs[0].to(torch.get_autocast_dtype(inputs[0].device.type)), *inputs[1:])


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """transformers' attention `sdpa`: (B, nh, Q, hs) and twice (B, nh, K, hs) -> (B, Q, nh, hs), and no weights."""
    known = all(options.get(name) is None for name in ("position_bias", "cache", "softcap"))
    if known and _is_faster(query, key, value, attention_mask, dropout):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is not None or query.shape[2] == 1 or not causal:
            context = scaled_dot_product_attention(
                query, key, value, attention_mask, dropout, scaling
            )
            return context.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **options
    )


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """As torch's: (B, nh, Q, hs) and twice (B, nh, K, hs) -> (B, nh, Q, hs). `attn_mask`, to be broadcast to
    (B, nh, Q, K), is True for keys to attend to, or is added to the scores."""
    if not _is_faster(query, key, value, attn_mask, dropout_p):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, scale=scale)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is not None:
        hides = attn_mask.logical_not() if attn_mask.dtype == torch.bool else _finite(attn_mask)
        attn_mask = hides.expand(*query.shape[:3], key.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        context: Tensor = _Attention.apply(query, key, value, attn_mask, dropout_p, scale)
    return context


def _is_faster(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> bool:
    if (
        query.device.type != "cpu"
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or transforms_active()
    ):
        return False
    if query.dim() != 4 or not key.shape[:2] == value.shape[:2] == query.shape[:2]:
        return False
    if mask is not None and (
        mask.requires_grad or not (mask.dtype == torch.bool or mask.is_floating_point())
    ):
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    if dropout:  # without gradients, too: reentrant checkpoints recompute such a pass, and need the same random numbers
        return 0 < dropout < 0.99 and dtype.itemsize <= 4
    trains = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    return trains and key.shape[2] <= _SHORT and dtype.itemsize == 2


def refuse_second_derivatives() -> None:
    """Called in a backward pass: raises UserError if its graph is to be differentiated, too."""
    if torch.is_grad_enabled():
        raise UserError(
            "create_graph=True (a gradient penalty, say) needs --attn_implementation eager"
        )


def _finite(mask: Tensor) -> Tensor:
    """Replaces -inf by a low number: a row that hides all keys would become NaN."""
    return mask.clamp(min=max(torch.finfo(mask.dtype).min, torch.finfo(torch.float32).min))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        scale: float,
    ) -> Tensor:
        samples, heads, queries, _ = query.shape
        context, factor = like_projection(query, value.shape[-1]), 1 / (1 - dropout)
        signed = query.new_empty(
            samples, heads, queries, key.shape[2]
        )  # probabilities; below 0: dropped
        for group in head_groups(samples, heads, _SCORES // (queries * key.shape[2])):
            # products of float32, as in torch's kernel: scores in bf16 would have three times the error
            scores = (query[group].float() * scale) @ key[group].float().mT
            if mask is not None:
                _mask_scores(scores, mask[group])
            signed[group] = scores.softmax(-1)
            if dropout:
                _mark(signed[group], dropout)
            context[group] = (signed[group].relu() @ value[group]).mul_(factor)
        ctx.save_for_backward(query, key, value, signed, context)
        ctx.scale, ctx.factor = scale, factor
        return context

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        query, key, value, signed, context = ctx.saved_tensors
        grads = [like_projection(each) for each in (query, key, value)]
        samples, heads, queries, keys = signed.shape
        for group in head_groups(samples, heads, _SCORES // (queries * keys)):
            g, remaining, probabilities = (
                grad[group].float(),
                signed[group].relu(),
                signed[group].float(),
            )
            grads[2][group] = (remaining.mT @ grad[group]).mul_(ctx.factor)
            # of the softmax: P * (dP - sum(dP * P)), where the sum is that of the outputs times their gradients
            sums = (g * context[group].float()).sum(-1, keepdim=True).mul_(ctx.scale)
            # scaled in float32: fp16 could overflow
            score_grads = ((g * (ctx.factor * ctx.scale)) @ value[group].float().mT).mul_(
                probabilities.relu()
            )
            score_grads = score_grads.addcmul_(probabilities.abs(), sums, value=-1).to(query.dtype)
            grads[0][group] = score_grads @ key[group]
            grads[1][group] = score_grads.mT @ query[group]
        return *grads, None, None, None


def _mask_scores(scores: Tensor, mask: Tensor) -> None:
    """Masks scores in place; a bool mask is True for keys to hide."""
    if mask.dtype == torch.bool:
        scores.masked_fill_(mask, torch.finfo(scores.dtype).min)
    else:
        scores.add_(mask)


def _mark(probabilities: Tensor, dropout: float) -> None:
    """Sets the sign bit of random ones in place."""
    bits = 8 * probabilities.element_size()
    integers: torch.dtype = getattr(torch, f"int{bits}")
    drops = torch.empty(probabilities.shape, dtype=integers).bernoulli_(dropout)
    probabilities.view(integers).bitwise_or_(drops.bitwise_left_shift_(bits - 1))


def head_groups(samples: int, heads: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Groups of at most `at_once` heads to compute together: all heads of some samples, or some heads of one."""
    some_samples, some_heads = max(1, at_once // heads), min(heads, max(1, at_once))
    for sample in range(0, samples, some_samples):
        for head in range(0, heads, some_heads):
            yield (
                slice(sample, min(sample + some_samples, samples)),
                slice(head, min(head + some_heads, heads)),
            )


def like_projection(states: Tensor, size: int | None = None) -> Tensor:
    """Empty (B, nh, S, size or hs) with the memory layout (B, S, nh, size), for the next projection."""
    samples, heads, length, head_size = states.shape
    return states.new_empty(samples, length, heads, size or head_size).transpose(1, 2)
