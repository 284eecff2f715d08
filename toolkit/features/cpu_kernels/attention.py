"""Attention in training on a CPU, where torch's fast kernel has no dropout and a slow backward pass
for short texts.

Dropout makes torch keep three matrices of scores in float32 per head and layer. This one computes
some heads at a time, in a CPU's cache, and keeps the probabilities in the precision of the queries,
2 bytes each in bf16; their sign bit says which are dropped. In bf16 the forward and backward pass
took 0.7 of torch's time at 32 tokens, 0.6 at 128 and 0.45 at 512 (12 heads of 32 or 64, one core of
an AMD EPYC).

B samples, nh heads, Q queries, K keys, hs hidden per head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.models.head_groups import head_groups, like_projection

# scores of a group of heads: 2 MiB in float32
_SCORES = 1 << 19
# Without dropout only up to this length, and not in float32: it needs memory for each score,
# torch's kernel does not.
_SHORT = 256


def install() -> None:
    """Makes transformers' attention `sdpa` use this one where it is faster, unless another feature
    has replaced `sdpa`, as `--padding_free` does."""
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention `sdpa`: (B, nh, Q, hs) and twice (B, nh, K, hs) -> (B, Q, nh, hs),
    and no weights. `attention_mask`, to be broadcast to (B, nh, Q, K), is True for keys to attend
    to, or is added to the scores."""
    causal = module.is_causal if is_causal is None else is_causal
    needs_causal_mask = causal and attention_mask is None
    has_position_bias = options.get("position_bias") is not None
    states = (query, key, value)
    dtype = query.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    is_faster = _is_faster(states, attention_mask, dropout, dtype)
    if needs_causal_mask or has_position_bias or not is_faster:
        return sdpa_attention_forward(
            module,
            *states,
            attention_mask,
            dropout,
            scaling,
            is_causal=is_causal,
            **options,
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bias = None
    if attention_mask is not None:
        bias = _bias_of(attention_mask).expand(*query.shape[:3], key.shape[2])
    with torch.autocast("cpu", enabled=False):
        context = _Attention.apply(
            *(each.to(dtype) for each in states), bias, dropout, scale
        )
    return context.transpose(1, 2).contiguous(), None


def _is_faster(
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    dtype: torch.dtype,
) -> bool:
    """Whether this attention supports these states and mask, and takes less time than torch's."""
    query, key, value = states
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    # fewer heads of keys, which torch repeats
    if key.shape != value.shape or key.shape[:2] != query.shape[:2]:
        return False
    # a learned bias, which has no gradient here
    if mask is not None and mask.requires_grad:
        return False
    if dropout:
        # without gradients, too: the first pass of a reentrant checkpoint needs the same random
        # numbers as its second
        return dtype.itemsize <= 4
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in states)
    return trains and key.shape[2] <= _SHORT and dtype.itemsize == 2


def _bias_of(mask: Tensor) -> Tensor:
    """What a mask adds to scores, float32. Low numbers in place of -inf: a row that hides all keys
    would become NaN."""
    lowest = torch.finfo(torch.float32).min
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape).masked_fill_(~mask, lowest)
    return mask.float().clamp(min=lowest)


class _Attention(torch.autograd.Function):
    """softmax(scale * query @ key.T + bias), with dropout, @ value, of some heads at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        dropout: float,
        scale: float,
    ) -> Tensor:
        samples, heads, queries, _ = query.shape
        keys = key.shape[2]
        factor = 1 / (1 - dropout)
        context = like_projection(query)
        # probabilities; below 0: dropped
        signed = query.new_empty(samples, heads, queries, keys)
        for group in head_groups(samples, heads, _SCORES // (queries * keys)):
            # products of float32, as in torch's kernel: scores in bf16 would have three times the
            # error
            scores = (query[group].float() * scale) @ key[group].float().mT
            if bias is not None:
                scores.add_(bias[group])
            signed[group] = scores.softmax(-1)
            if dropout:
                _mark(signed[group], dropout)
            context[group] = (signed[group].relu() @ value[group]).mul_(factor)
        ctx.save_for_backward(query, key, value, signed, context)
        ctx.scale = scale
        ctx.factor = factor
        return context

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, signed, context = ctx.saved_tensors
        query_grad, key_grad, value_grad = map(like_projection, (query, key, value))
        samples, heads, queries, keys = signed.shape
        for group in head_groups(samples, heads, _SCORES // (queries * keys)):
            grads = grad[group].float()
            remaining = signed[group].relu()
            probabilities = signed[group].float()
            value_grad[group] = (remaining.mT @ grad[group]).mul_(ctx.factor)
            # of the softmax: P * (dP - sum(dP * P)), where the sum is that of the outputs times
            # their gradients; scaled in float32, since fp16 could overflow
            sums = (grads * context[group].float()).sum(-1, keepdim=True).mul_(ctx.scale)
            scores_grad = (grads * (ctx.factor * ctx.scale)) @ value[group].float().mT
            scores_grad.mul_(probabilities.relu())
            scores_grad.addcmul_(probabilities.abs(), sums, value=-1)
            scores_grad = scores_grad.to(query.dtype)
            query_grad[group] = scores_grad @ key[group]
            key_grad[group] = scores_grad.mT @ query[group]
        return query_grad, key_grad, value_grad, None, None, None


def _mark(probabilities: Tensor, dropout: float) -> None:
    """Sets the sign bit of random ones in place, each with the probability `dropout`."""
    bits = 8 * probabilities.element_size()
    integers: torch.dtype = getattr(torch, f"int{bits}")
    drops = torch.empty(probabilities.shape, dtype=integers).bernoulli_(dropout)
    probabilities.view(integers).bitwise_or_(drops.bitwise_left_shift_(bits - 1))
