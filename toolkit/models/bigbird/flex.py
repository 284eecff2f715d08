"""The sparse attention by `flex_attention` with a block mask: for CUDA, where it is one fused kernel each way.

On a CPU torch 2.13 compiles its forward pass only, with `dynamic=False`; uncompiled it is exact and dense, which
serves the tests. No line of this has run on a GPU yet: tests marked `gpu` are there for who has one.

B samples, S tokens, H = nh * hs hidden, n = S / b blocks
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from toolkit.models.bigbird import plan
from toolkit.models.bigbird.plan import Pattern

# Tiles of the CUDA kernels must divide the mask's blocks, and the defaults for large GPUs do not divide 64
_TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_bias: torch.Tensor | None,
    pattern: Pattern,
    training: bool,
) -> torch.Tensor:
    """BigBird attention (arXiv:2007.14062) by flex_attention: three (B, S, H) -> (B, S, H).

    `key_bias` (B, S) is added to every score of a key; S is a multiple of the block and above `pattern.shortest`.
    """
    samples, length, hidden = query.shape
    heads = (samples, length, pattern.heads, -1)
    q, k, v = (x.view(heads).transpose(1, 2) for x in (query, key, value))  # (B, nh, S, hs)
    counted = _counts(query, pattern.layout, length, training)  # (nh, n, n)
    logs = (
        counted.to(torch.promote_types(query.dtype, torch.float32)).log()
        if plan.may_repeat(pattern, length, training)
        else None
    )
    out = _kernel(query.device.type)(
        q,
        k,
        v,
        score_mod=_score(logs, key_bias, pattern.block),
        block_mask=block_mask(counted, pattern.block),
        kernel_options=_TILES if query.is_cuda else None,
    )
    return out.transpose(1, 2).reshape(samples, length, hidden)


def block_mask(counted: torch.Tensor, block: int) -> BlockMask:
    """Every block that is read at all is read whole: (nh, n, n) counts -> a mask of full blocks only."""
    read = counted > 0
    order = read.int().argsort(dim=-1, descending=True, stable=True).int().unsqueeze(0)  # the read ones first
    number = read.sum(-1, dtype=torch.int32).unsqueeze(0)
    none = torch.zeros_like(number), torch.zeros_like(order)

    def reads(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return read[head, query // block, key // block]

    return BlockMask.from_kv_blocks(*none, number, order, BLOCK_SIZE=block, mask_mod=reads)


def _score(logs: torch.Tensor | None, key_bias: torch.Tensor | None, block: int) -> Callable[..., Any] | None:
    """Adds log(count) of the blocks (nh, n, n) and the bias of padding (B, S) to a score."""
    if logs is None and key_bias is None:
        return None

    def score(value: Any, sample: Any, head: Any, query: Any, key: Any) -> Any:
        if logs is not None:
            value = value + logs[head, query // block, key // block]
        return value if key_bias is None else value + key_bias[sample, key]

    return score


def _kernel(device: str) -> Callable[..., Any]:
    """Compiled where it can be trained; inside a compiled model, and on a CPU, as it is."""
    plain: Any = flex_attention
    return plain if device == "cpu" or torch.compiler.is_compiling() else _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return compiled


@torch.library.custom_op("toolkit::bigbird_counts", mutates_args=())
def _counts(like: torch.Tensor, layout: list[int], length: int, training: bool) -> torch.Tensor:
    """`plan.counts` on the device of `like`: (nh, n, n). An operator for the reason `gathered._table` is one."""
    return plan.counts_of(Pattern(*layout), length, training, like.device).clone()


@_counts.register_fake
def _(like: Any, layout: Any, length: Any, training: Any) -> Any:
    pattern = Pattern(*layout)
    blocks = length // pattern.block
    return like.new_empty(pattern.heads, blocks, blocks, dtype=torch.int32)
