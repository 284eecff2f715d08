"""The sparse attention of one layer on a CPU, in pieces that stay in its cache, as one operator of torch.

The keys of a few query blocks are gathered into the same scratch memory again and again, PyTorch's flash kernel runs
over them, and the backward pass gathers again instead of keeping what was gathered: a layer keeps its queries, keys,
values and outputs. For torch.compile it is one node of the graph; the plan is looked up inside.

B samples, S tokens, H = nh * hs hidden, n = S / b blocks, W key blocks of a query block, R query blocks of a piece
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.compat import require
from toolkit.models.bigbird import plan
from toolkit.models.bigbird.plan import Pattern

_PIECE = 64  # query blocks at a time: their keys and values take 17 MB at b = hs = 64 in float32, the gradients as much

_flash = require(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", "torch")
_flash_backward = require(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", "torch")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_bias: torch.Tensor | None,
    pattern: Pattern,
    training: bool,
) -> torch.Tensor:
    """BigBird attention (arXiv:2007.14062) on the CPU: three (B, S, H) -> (B, S, H).

    `key_bias` (B, S) is added to every score of a key; S is a multiple of the block and above `pattern.shortest`.
    Gradients for query, key and value, once (no second derivatives).
    """
    return _forward(query.contiguous(), key.contiguous(), value.contiguous(), key_bias, pattern.layout, training)[0]


@dataclass(frozen=True)
class _Piece:
    """Some query blocks of some heads of one sample, and the key blocks they read."""

    sample: int
    heads: slice  # h of the nh heads
    blocks: slice  # R of the n query blocks
    picked: torch.Tensor  # (h * R * W) of the h * n key blocks of these heads
    bias: torch.Tensor | None  # (h, R, b, W * b)

    def queries(self, blocked: torch.Tensor) -> torch.Tensor:
        """(B, n, b, nh, hs) -> a view of (h, R, b, hs)."""
        return blocked[self.sample, self.blocks, :, self.heads].permute(2, 0, 1, 3)

    def logs(self, logs: torch.Tensor) -> torch.Tensor:
        """(B, nh, n, b) -> a view of (h, R, b)."""
        return logs[self.sample, self.heads, self.blocks]

    def keys(self, blocked: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """(B, n, b, nh, hs) -> (h, R, W * b, hs), copied into the scratch memory."""
        gathered = scratch[: len(self.picked)]
        torch.index_select(self._of_heads(blocked).flatten(0, 1), 0, self.picked, out=gathered)
        heads, rows = self.queries(blocked).shape[:2]
        return gathered.view(heads, rows, -1, blocked.shape[-1])

    def add(self, grads: torch.Tensor, into: torch.Tensor) -> None:
        """Adds (h, R, W * b, hs) to (B, n, b, nh, hs): a key's gradient is the sum over all who read it."""
        target = self._of_heads(into)  # (h, n, b, hs)
        total = torch.zeros(target.shape, dtype=_sum_dtype(into.dtype))  # a sum of 64 needs more than bfloat16
        rows = grads.reshape(-1, *target.shape[2:]).to(total.dtype)
        target += total.flatten(0, 1).index_add_(0, self.picked, rows).view(target.shape)

    def _of_heads(self, blocked: torch.Tensor) -> torch.Tensor:
        """(B, n, b, nh, hs) -> a view of (h, n, b, hs)."""
        return blocked[self.sample, :, :, self.heads].permute(2, 0, 1, 3)


def _pieces(pattern: Pattern, length: int, training: bool, sample: int,
            key_bias: torch.Tensor | None, dtype: torch.dtype) -> Iterator[_Piece]:  # fmt: skip
    """Every piece of one sample, but for the first and the last block."""
    blocks = length // pattern.block
    for chosen, table in plan.rows_of(pattern, length, training, merge=True):
        numbers = range(blocks)[chosen]
        together = max(1, _PIECE // len(numbers))  # heads
        for head in range(0, pattern.heads, together):
            for start in range(0, len(numbers), _PIECE):
                picked = table[head : head + together, start : start + _PIECE]  # (h, R, W)
                part = numbers[start : start + _PIECE]
                bias = _bias(pattern, training, picked, None if key_bias is None else key_bias[sample], dtype)
                of_head = torch.arange(len(picked)).view(-1, 1, 1) * blocks
                heads = slice(head, head + len(picked))
                yield _Piece(sample, heads, slice(part.start, part.stop, part.step), (picked + of_head).flatten(), bias)


def _bias(
    pattern: Pattern, training: bool, picked: torch.Tensor, key_bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """What is added to the scores of the picked keys, (h, R, b, W * b), the same for the b queries of a block:
    the bias of padding, and log(count) where block 0 stands for several."""
    times = plan.repeats(pattern, training)
    if key_bias is None and times == 1:
        return None
    if key_bias is None:
        bias = torch.zeros(*picked.shape, pattern.block, dtype=dtype)
    else:
        bias = key_bias.to(dtype).view(-1, pattern.block)[picked]
    bias[:, :, 0] += math.log(times)
    return bias.flatten(2).unsqueeze(2).expand(-1, -1, pattern.block, -1)


def _ends(blocked: torch.Tensor, sample: int) -> torch.Tensor:
    """The first and the last block of every head: (B, n, b, nh, hs) -> (1, nh, 2 b, hs)."""
    return torch.cat([blocked[sample, 0], blocked[sample, -1]]).transpose(0, 1).unsqueeze(0)


def _all_keys(hidden: torch.Tensor, sample: int) -> torch.Tensor:
    """(B, n, b, nh, hs) -> a view of (1, nh, S, hs)."""
    return hidden[sample].flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _ends_bias(key_bias: torch.Tensor | None, sample: int, block: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if key_bias is None else key_bias[sample].to(dtype).view(1, 1, 1, -1).expand(1, 1, 2 * block, -1)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of biases, of the softmax's logarithms and of sums of gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scratch(pattern: Pattern, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the gathered keys and values of a piece."""
    most = _PIECE * (5 + pattern.random)
    shape = (most, pattern.block, like.shape[-1])
    return like.new_empty(shape), like.new_empty(shape)


@torch.library.custom_op("toolkit::bigbird_attention", mutates_args=(), device_types="cpu")
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_bias: torch.Tensor | None,
    layout: list[int],
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The context (B, S, H), and each query's log of its sum of exponentials (B, nh, S)."""
    pattern = Pattern(*layout)
    samples, length, _ = query.shape
    blocked = (samples, length // pattern.block, pattern.block, pattern.heads, -1)
    q, k, v = query.view(blocked), key.view(blocked), value.view(blocked)
    dtype = _sum_dtype(query.dtype)
    context, logs = torch.empty_like(q), query.new_empty(samples, pattern.heads, *blocked[1:3], dtype=dtype)
    scratch = _scratch(pattern, q)
    for sample in range(samples):
        bias = _ends_bias(key_bias, sample, pattern.block, dtype)
        ends, end_logs = _flash(_ends(q, sample), _all_keys(k, sample), _all_keys(v, sample), attn_mask=bias)
        context[sample, 0], context[sample, -1] = ends[0].transpose(0, 1).split(pattern.block)
        logs[sample, :, 0], logs[sample, :, -1] = end_logs[0].split(pattern.block, dim=1)
        for piece in _pieces(pattern, length, training, sample, key_bias, dtype):
            gathered = piece.keys(k, scratch[0]), piece.keys(v, scratch[1])
            out, out_logs = _flash(piece.queries(q), *gathered, attn_mask=piece.bias)  # (h, R, b, hs), (h, R, b)
            piece.queries(context).copy_(out)
            piece.logs(logs).copy_(out_logs)
    return context.view(query.shape), logs.view(samples, pattern.heads, length)


@torch.library.custom_op("toolkit::bigbird_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
    logs: torch.Tensor,
    key_bias: torch.Tensor | None,
    layout: list[int],
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, three (B, S, H)."""
    pattern = Pattern(*layout)
    samples, length, _ = query.shape
    blocked = (samples, length // pattern.block, pattern.block, pattern.heads, -1)
    g, q, k, v, o = (x.contiguous().view(blocked) for x in (grad, query, key, value, context))
    logs = logs.view(samples, pattern.heads, *blocked[1:3])  # (B, nh, n, b)
    dtype = _sum_dtype(query.dtype)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scratch = _scratch(pattern, q)
    for sample in range(samples):
        _ends_backward(sample, (g, q, k, v, o), logs, _ends_bias(key_bias, sample, pattern.block, dtype), (dq, dk, dv))
        for piece in _pieces(pattern, length, training, sample, key_bias, dtype):
            gathered = piece.keys(k, scratch[0]), piece.keys(v, scratch[1])
            grads = _flash_backward(piece.queries(g), piece.queries(q), *gathered, piece.queries(o), piece.logs(logs),
                                    0.0, False, attn_mask=piece.bias)  # fmt: skip
            piece.queries(dq).copy_(grads[0])
            piece.add(grads[1], dk)
            piece.add(grads[2], dv)
    return dq.view(query.shape), dk.view(query.shape), dv.view(query.shape)


def _ends_backward(sample: int, blocked: tuple[torch.Tensor, ...], logs: torch.Tensor,
                   bias: torch.Tensor | None, into: tuple[torch.Tensor, ...]) -> None:  # fmt: skip
    """What the first and the last block, which read every key, give to the gradients (B, n, b, nh, hs)."""
    g, q, k, v, o = blocked
    dq, dk, dv = into
    end_logs = torch.cat([logs[sample, :, 0], logs[sample, :, -1]], dim=1).unsqueeze(0)  # (1, nh, 2 b)
    keys, values = _all_keys(k, sample), _all_keys(v, sample)
    grads = _flash_backward(_ends(g, sample), _ends(q, sample), keys, values, _ends(o, sample), end_logs,
                            0.0, False, attn_mask=bias)  # fmt: skip
    dq[sample, 0], dq[sample, -1] = grads[0][0].transpose(0, 1).split(q.shape[2])
    for total, part in ((dk, grads[1]), (dv, grads[2])):
        total[sample] = part[0].transpose(0, 1).reshape(total[sample].shape)


@_forward.register_fake
def _(query: Any, key: Any, value: Any, key_bias: Any, layout: Any, training: Any) -> Any:
    samples, length, _ = query.shape
    return torch.empty_like(query), query.new_empty(samples, layout[1], length, dtype=_sum_dtype(query.dtype))


@_backward.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, key_bias, ctx.layout, ctx.training = inputs
    ctx.save_for_backward(query, key, value, *output, key_bias)


def _differentiate(ctx: Any, grad: torch.Tensor, logs_grad: torch.Tensor | None) -> tuple[Any, ...]:
    query, key, value, context, logs, key_bias = ctx.saved_tensors
    grads = _backward(grad, query, key, value, context, logs, key_bias, ctx.layout, ctx.training)
    return *grads, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
