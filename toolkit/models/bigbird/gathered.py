"""The sparse attention of one layer by operators of every device, a few heads at a time.

The softmax of a query block is computed in parts, each by a kernel that also returns the logarithm
of its sum of exponentials, by which parts are merged as in FlashAttention-2 (Dao 2023,
arXiv:2307.08691). So the first and the last block are one product with all queries, the three
neighbours of each block are views of the keys, and only random blocks are copied. The backward pass
recomputes the parts: a layer saves only queries, keys, values and outputs.

B samples, nh heads, S tokens, hs hidden per head, b block, n = S / b blocks; of a part: P pairs of
a sample and a head, R rows of Q queries each, K keys of each row
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.models.bigbird.plan import Pattern, tables
from toolkit.models.head_groups import Group, head_groups, like_projection

# query blocks per group: 4 heads at 4096 tokens, whose keys and values fit a CPU's cache. A GPU
# takes 16: it waits for the CPU, which starts over 300 kernels per group and training step.
_BLOCKS = 256
# a graph would contain the random blocks of one pattern
_tables = torch.compiler.disable(tables)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def gathered(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, pattern: Pattern
) -> Tensor:
    """(B, nh, S, hs) each, and a bias (B, S), added to every score of a key -> (B, nh, S, hs).

    A block that occurs twice in the plan counts twice in the softmax. Supports no second
    derivatives.
    """
    blocks = _tables(pattern, query.device)
    middle = blocks["middle"]
    random = middle[..., middle.shape[-1] - pattern.random :]
    states = (query, key, value)
    context: Tensor = _Sparse.apply(*states, bias, pattern.block, blocks["second"], random)
    return context


class _Part(NamedTuple):
    """Some rows of queries, and the keys that they read, both selected from (P, n, b, ...)."""

    rows: Callable[[Tensor], Tensor]  # a view, (P, R, Q, ...)
    keys: Callable[[Tensor], Tensor]  # (P, R, K, ...)
    # adds gradients (P, R, K, hs) of the keys to their sum
    add: Callable[[Tensor, Tensor], Any]

    def bias(self, bias: Tensor | None, queries: Tensor) -> Tensor | None:
        """(P, n, b) -> (P, R, Q, K)."""
        if bias is None:
            return None
        return self.keys(bias.unsqueeze(-1)).mT.expand(-1, -1, queries.shape[2], -1)


def _parts(second: Tensor, random: Tensor) -> Iterator[_Part]:
    """All parts, for tables of key blocks (P, 2, W) and (P, n - 4, r)."""
    middle = random.shape[1]
    yield _Part(  # the first and the last block read all blocks
        lambda x: x[:, :: x.shape[1] - 1],
        lambda x: x.flatten(1, 2).unsqueeze(1).expand(-1, 2, *x.flatten(1, 2).shape[1:]),
        lambda total, grad: total.add_(grad.sum(1).view_as(total)),
    )
    yield _Part(lambda x: x[:, 1 :: x.shape[1] - 3], *_blocks_of(second))
    yield _Part(  # all blocks read the first and the last
        lambda x: x[:, 2:-2].flatten(1, 2).unsqueeze(1),
        lambda x: x[:, :: x.shape[1] - 1].flatten(1, 2).unsqueeze(1),
        lambda total, grad: total[:, :: total.shape[1] - 1].add_(
            grad.unflatten(2, (2, -1)).squeeze(1)
        ),
    )
    yield _Part(lambda x: x[:, 2:-2], _neighbours, _add_neighbours)
    if random.shape[-1]:
        yield _Part(lambda x: x[:, 2 : middle + 2], *_blocks_of(random))


def _neighbours(x: Tensor) -> Tensor:
    """(P, n, b, hs) -> a view of each middle block with the blocks before and after it,
    (P, n - 4, 3 b, hs)."""
    block = x.shape[2]
    return x[:, 1:-1].flatten(1, 2).unfold(1, 3 * block, block).transpose(2, 3)


def _add_neighbours(total: Tensor, grad: Tensor) -> None:
    for place, part in enumerate(grad.unflatten(2, (3, -1)).unbind(2), 1):
        total[:, place : place + part.shape[1]].add_(part)


def _blocks_of(
    table: Tensor,
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Any]]:
    """Functions that copy the blocks of a table (P, R, W), and that add their gradients."""
    pairs, rows, _ = table.shape

    def places(blocks: int) -> Tensor:
        first_of_pair = torch.arange(pairs, device=table.device).view(-1, 1, 1) * blocks
        return (table + first_of_pair).flatten()

    def keys(x: Tensor) -> Tensor:
        blocks = x.flatten(0, 1).index_select(0, places(x.shape[1]))
        return blocks.view(pairs, rows, -1, x.shape[-1])

    def add(total: Tensor, grad: Tensor) -> None:
        blocks = grad.reshape(-1, *total.shape[2:]).to(total.dtype)
        total.flatten(0, 1).index_add_(0, places(total.shape[1]), blocks)

    return keys, add


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        block: int,
        second: Tensor,
        random: Tensor,
    ) -> Tensor:
        samples, heads, length, _ = query.shape
        context = like_projection(query)
        # of logarithms, merged outputs and sums of gradients: bfloat16 is too coarse for 64 terms
        sum_dtype = torch.promote_types(query.dtype, torch.float32)
        logs = query.new_empty(samples, heads, length, dtype=sum_dtype)
        for group in head_groups(samples, heads, _at_once(query, block)):
            q, k, v = (_blocked(x[group], block) for x in (query, key, value))
            outputs = torch.zeros_like(q, dtype=sum_dtype)
            sums = logs.new_full(q.shape[:3], -torch.inf)
            group_bias = _bias_of(bias, group, block)
            for part in _parts(_of_group(second, group), _of_group(random, group)):
                queries = part.rows(q)
                part_bias = part.bias(group_bias, queries)
                more, more_sums = _attend(queries, part.keys(k), part.keys(v), part_bias)
                _merge(part.rows(outputs), part.rows(sums), more, more_sums)
            context[group].copy_(outputs.view(context[group].shape))
            logs[group].copy_(sums.view(logs[group].shape))
        ctx.save_for_backward(query, key, value, bias, second, random, context, logs)
        ctx.block = block
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, second, random, context, logs = ctx.saved_tensors
        block = ctx.block
        grads = [like_projection(query) for _ in range(3)]
        samples, heads = query.shape[:2]
        for group in head_groups(samples, heads, _at_once(query, block)):
            q, k, v = (_blocked(x[group], block) for x in (query, key, value))
            g = _blocked(grad[group], block)
            outputs = _blocked(context[group], block)
            sums = logs[group].flatten(0, 1).unflatten(1, (-1, block))
            group_bias = _bias_of(bias, group, block)
            totals = [torch.zeros_like(q, dtype=logs.dtype) for _ in range(3)]
            for part in _parts(_of_group(second, group), _of_group(random, group)):
                queries = part.rows(q)
                q_grad, k_grad, v_grad = _attend_backward(
                    part.rows(g), queries, part.keys(k), part.keys(v), part.rows(outputs),
                    part.rows(sums), part.bias(group_bias, queries),
                )  # fmt: skip
                part.rows(totals[0]).add_(q_grad)
                part.add(totals[1], k_grad)
                part.add(totals[2], v_grad)
            for whole, total in zip(grads, totals, strict=True):
                whole[group].copy_(total.view(whole[group].shape))
        return *grads, None, None, None, None


def _at_once(query: Tensor, block: int) -> int:
    """Heads of a group, for queries (B, nh, S, hs)."""
    blocks = _BLOCKS if query.device.type == "cpu" else 4 * _BLOCKS
    return blocks // (query.shape[2] // block)


def _blocked(x: Tensor, block: int) -> Tensor:
    """(samples, heads, S, hs) of a group -> (P, n, b, hs), contiguous."""
    return x.flatten(0, 1).contiguous().unflatten(1, (-1, block))


def _bias_of(bias: Tensor | None, group: Group, block: int) -> Tensor | None:
    """(B, S) -> (P, n, b)."""
    if bias is None:
        return None
    samples, heads = group
    return (
        bias[samples]
        .repeat_interleave(heads.stop - heads.start, 0)
        .unflatten(1, (-1, block))
    )


def _of_group(table: Tensor, group: Group) -> Tensor:
    """(nh, R, W) -> (P, R, W)."""
    samples, heads = group
    return table[heads].repeat(samples.stop - samples.start, 1, 1)


def _merge(outputs: Tensor, logs: Tensor, more: Tensor, more_logs: Tensor) -> None:
    """Merges another part of the same queries, (P, R, Q, hs) and (P, R, Q), into `outputs` and
    `logs`."""
    merged = torch.logaddexp(logs, more_logs)
    share = (logs - merged).exp_().unsqueeze(-1)
    more_share = (more_logs - merged).exp_().unsqueeze(-1)
    outputs.mul_(share).add_(more.to(outputs.dtype) * more_share)
    logs.copy_(merged)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(P, R, Q, hs), twice (P, R, K, hs), (P, R, Q, K) -> outputs (P, R, Q, hs), and logarithms of
    sums of exponentials (P, R, Q)."""
    if query.device.type != "cpu":
        return _plain(query, key, value, bias)
    outputs, logs = _flash(query, key, value, attn_mask=bias)
    return outputs, logs


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    outputs: Tensor,
    logs: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. `outputs` and `logs` are over all parts."""
    # torch's kernel takes 1.5 times as long in bf16
    if query.device.type != "cpu" or query.dtype.itemsize == 2:
        return _plain_backward(grad, query, key, value, outputs, logs, bias)
    states = (query, key, value, outputs, logs)
    q_grad, k_grad, v_grad = _flash_backward(grad, *states, 0.0, False, attn_mask=bias)
    return q_grad, k_grad, v_grad


def _plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_attend` on any device."""
    scores = _scores(query, key, bias)
    logs = scores.logsumexp(-1)
    return _product((scores - logs.unsqueeze(-1)).exp_(), value), logs


def _plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    outputs: Tensor,
    logs: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_attend_backward` on any device."""
    weights = (_scores(query, key, bias) - logs.unsqueeze(-1)).exp_()
    errors = _product(grad, value.mT) - (grad * outputs).sum(
        -1, keepdim=True, dtype=logs.dtype
    )
    errors = errors.mul_(weights).mul_(query.shape[-1] ** -0.5).to(key.dtype)
    with _without_autocast(query):
        return errors @ key, errors.mT @ query, weights.to(grad.dtype).mT @ grad


def _scores(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    scores = _product(query, key.mT) * query.shape[-1] ** -0.5
    return scores if bias is None else scores + bias


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product in at least float32."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    with _without_autocast(left):
        return left.to(dtype) @ right.to(dtype)


def _without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
