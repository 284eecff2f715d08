"""The sparse attention in operators that every device has: gather the key blocks, then call SDPA.

B samples, S tokens, H = nh * hs hidden, n = S / b blocks, W key blocks of a query block, R query blocks
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from toolkit.models.bigbird import plan
from toolkit.models.bigbird.plan import Pattern


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_bias: torch.Tensor | None,
    pattern: Pattern,
    training: bool,
) -> torch.Tensor:
    """BigBird attention (arXiv:2007.14062) on any device: three (B, S, H) -> (B, S, H).

    `key_bias` (B, S) is added to every score of a key; S is a multiple of the block and above `pattern.shortest`.
    A block that the plan names twice is gathered twice: it counts twice in the softmax.
    """
    samples, length, hidden = query.shape
    blocked = (samples, length // pattern.block, pattern.block, pattern.heads, -1)
    q, k, v = (x.view(blocked).permute(0, 3, 1, 2, 4) for x in (query, key, value))  # (B, nh, n, b, hs)
    bias = None if key_bias is None else key_bias.to(query.dtype).view(blocked[:3])
    ends = _ends(q, k, v, bias)  # (B, nh, 2, b, hs)
    tables = [_table(query, pattern.layout, length, training, number) for number in range(2)]
    seconds = _rows(q[:, :, 1 :: blocked[1] - 3], k, v, bias, tables[0])  # (B, nh, 2, b, hs)
    middle = _rows(q[:, :, 2:-2], k, v, bias, tables[1])
    parts = [ends[:, :, :1], seconds[:, :, :1], middle, seconds[:, :, 1:], ends[:, :, 1:]]
    return torch.cat(parts, dim=2).permute(0, 2, 3, 1, 4).reshape(samples, length, hidden)


def _ends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The first and the last block, which read every key."""
    queries = torch.cat([q[:, :, 0], q[:, :, -1]], dim=2)  # (B, nh, 2 b, hs)
    mask = None if bias is None else bias.flatten(1)[:, None, None].expand(-1, 1, queries.shape[2], -1)
    out = F.scaled_dot_product_attention(queries, k.flatten(2, 3), v.flatten(2, 3), mask)
    return out.unflatten(2, (2, -1))


def _rows(
    queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor
) -> torch.Tensor:
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


@torch.library.custom_op("toolkit::bigbird_table", mutates_args=())
def _table(like: torch.Tensor, layout: list[int], length: int, training: bool, number: int) -> torch.Tensor:
    """The key blocks of the second and the last but one (number 0) or of the middle query blocks (number 1).

    An operator, so that torch.compile neither traces numpy's draws nor freezes them for one length; a copy, so
    that nothing compiled writes into what is kept.
    """
    return plan.rows_of(Pattern(*layout), length, training, False, like.device)[number].table.clone()


@_table.register_fake
def _(like: Any, layout: Any, length: Any, training: Any, number: Any) -> Any:
    pattern = Pattern(*layout)
    rows, width = (length // pattern.block - 4, 5) if number else (2, 4)
    return like.new_empty(pattern.heads, rows, width + pattern.random, dtype=torch.int64)
