"""Two ways to compute the sparse attention of one layer; both give transformers' numbers.

`gathered` uses operators that every device has. `flex` is one fused kernel each way on CUDA, compiled for each shape:
so batches are cut and padded to few shapes, and one shape too many is an error, where torch by itself would go on with
dense scores. On a CPU torch 2.13 compiles its forward pass only, and uncompiled it is exact and dense, which serves
the tests. No line of it has run on a GPU yet: tests marked `gpu` are there for who has one.

Both take queries, keys and values (B, nh, S, hs) and give (B, nh, S, hs). `bias` (B, S) is added to every score of a
key; S is `pattern.length`.

B samples, nh heads, S tokens, hs hidden per head, b block, n = S / b blocks, R query blocks, W key blocks of each
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from toolkit.models.bigbird.plan import Pattern, may_repeat, planned

_MOST_SAMPLES = 8
_MOST_SHAPES = 128
"""6 widths up to 4096 tokens, 4 numbers of samples, with and without padding, in training and evaluation: 96."""
# Tiles of the CUDA kernels must divide the mask's blocks, and the defaults for large GPUs do not divide 64
TILE = 64
_TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}


def gathered(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, pattern: Pattern) -> Tensor:
    """Gathers the key blocks of each query block, and calls SDPA.

    A block that the plan names twice is gathered twice: it counts twice in the softmax.
    """
    q, k, v = (x.unflatten(2, (-1, pattern.block)) for x in (query, key, value))  # (B, nh, n, b, hs)
    bias = None if bias is None else bias.to(query.dtype).unflatten(1, (-1, pattern.block))  # (B, n, b)
    ends = _ends(q, k, v, bias)  # (B, nh, 2, b, hs)
    second, middle = (planned(query, list(pattern), what) for what in ("second", "middle"))
    seconds = _rows(q[:, :, 1 :: q.shape[2] - 3], k, v, bias, second)  # (B, nh, 2, b, hs)
    rows = _rows(q[:, :, 2:-2], k, v, bias, middle)
    parts = [ends[:, :, :1], seconds[:, :, :1], rows, seconds[:, :, 1:], ends[:, :, 1:]]
    return torch.cat(parts, dim=2).flatten(2, 3)


def _ends(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """The first and the last block, which read every key."""
    queries = torch.cat([q[:, :, 0], q[:, :, -1]], dim=2)  # (B, nh, 2 b, hs)
    mask = None if bias is None else bias.flatten(1)[:, None, None].expand(-1, 1, queries.shape[2], -1)
    out = F.scaled_dot_product_attention(queries, k.flatten(2, 3), v.flatten(2, 3), mask)
    return out.unflatten(2, (2, -1))


def _rows(queries: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, table: Tensor) -> Tensor:
    """Query blocks (B, nh, R, b, hs) over the key blocks of `table` (nh, R, W) -> (B, nh, R, b, hs)."""
    heads, rows, _ = table.shape
    samples, _, blocks, block, _ = k.shape
    of_head = torch.arange(heads, device=table.device).view(-1, 1, 1) * blocks
    picked = (table + of_head).flatten()
    # index_select, not indexing: its gradient adds the rows up without sorting them first
    keys, values = (
        x.flatten(1, 2).index_select(1, picked).reshape(samples * heads, rows, -1, x.shape[-1]) for x in (k, v)
    )  # (B * nh, R, W * b, hs)
    mask = None
    if bias is not None:
        mask = bias.index_select(1, table.flatten()).reshape(samples * heads, rows, 1, -1).expand(-1, -1, block, -1)
    out = F.scaled_dot_product_attention(queries.flatten(0, 1), keys, values, mask)
    return out.unflatten(0, (samples, heads))


def flex(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, pattern: Pattern) -> Tensor:
    """flex_attention with a block mask, over at most 8 samples at a time."""
    counted = planned(query, list(pattern), "counts")  # (nh, N, N) for N blocks, the last ones padding
    logs = counted.to(torch.promote_types(query.dtype, torch.float32)).log() if may_repeat(pattern) else None
    mask, missing = block_mask(counted, pattern.block), counted.shape[-1] * pattern.block - pattern.length
    query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    bias = None if bias is None else F.pad(bias, (0, missing))
    options = _TILES if query.is_cuda else None
    parts, start = [], 0
    for size in _sizes(len(query)):
        part = slice(start, start := start + size)
        score = _score(logs, None if bias is None else bias[part].contiguous(), pattern.block)
        given = (x[part].contiguous() for x in (query, key, value))
        parts.append(_kernel(query.device.type)(*given, score_mod=score, block_mask=mask, kernel_options=options))
    return torch.cat(parts)[:, :, : pattern.length]


def _sizes(samples: int) -> list[int]:
    """A batch in powers of two: 13 -> [8, 4, 1]."""
    if torch.compiler.is_compiling():
        return [samples]
    return [_MOST_SAMPLES] * (samples // _MOST_SAMPLES) + [size for size in (4, 2, 1) if samples & size]


def block_mask(counted: Tensor, block: int) -> BlockMask:
    """Every block that is read at all is read whole: (nh, n, n) counts -> a mask of full blocks only."""
    read = counted > 0
    order = read.int().argsort(dim=-1, descending=True, stable=True).int().unsqueeze(0)  # the read ones first
    number = read.sum(-1, dtype=torch.int32).unsqueeze(0)
    none = torch.zeros_like(number), torch.zeros_like(order)

    def reads(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return read[head, query // block, key // block]

    return BlockMask.from_kv_blocks(*none, number, order, BLOCK_SIZE=block, mask_mod=reads)


def _score(logs: Tensor | None, bias: Tensor | None, block: int) -> Callable[..., Any] | None:
    """Adds log(count) of the blocks (nh, n, n) and the bias of padding (B, S) to a score."""
    if logs is None and bias is None:
        return None

    def score(value: Any, sample: Any, head: Any, query: Any, key: Any) -> Any:
        if logs is not None:
            value = value + logs[head, query // block, key // block]
        return value if bias is None else value + bias[sample, key]

    return score


def _kernel(device: str) -> Callable[..., Any]:
    """Compiled where it can be trained; inside a compiled model, and on a CPU, as it is."""
    plain: Any = flex_attention
    return plain if device == "cpu" or torch.compiler.is_compiling() else _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Where a shape is too many, `fullgraph` makes torch raise FailOnRecompileLimitHit."""
    compile_it: Any = torch.compile  # its stub does not know recompile_limit
    compiled: Callable[..., Any] = compile_it(
        flex_attention, dynamic=False, fullgraph=True, recompile_limit=_MOST_SHAPES
    )
    return compiled
