"""Two implementations of the sparse attention of one layer, with the same results as transformers.

`gathered` uses operators of every device. `flex` is one fused kernel for forward and one for
backward on CUDA, compiled for each shape: so batches are split and padded to few shapes. `gathered`
takes over for further shapes, and if one does not compile. On a CPU torch 2.13 compiles only its
forward pass; uncompiled it is exact and dense, which the tests use. On an H100 a kernel took 4 to
17 seconds to compile; `gathered` is slower than transformers there.

Both take queries, keys and values (B, nh, S, hs) and return (B, nh, S, hs). `bias` (B, S) is added
to every score of a key; S is `pattern.length`.

B samples, nh heads, S tokens, hs hidden per head, b block, n = S / b blocks, N >= n blocks of the
kernel
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from toolkit.errors import first_line
from toolkit.models.bigbird.gathered import gathered
from toolkit.models.bigbird.plan import Pattern, counts, may_repeat
from toolkit.utils.log import log_on_rank_0

_MAX_SAMPLES = 4
_MAX_SHAPES = 60
"""3 widths up to 4096 tokens, 2 numbers of samples; in training with a bias and without, in
evaluation with one: 18."""
_MAX_MASK_BYTES = 640 * 2**20
"""All lengths up to 4096 tokens in 12 layers with 12 heads take 216 MB, in 24 layers with 16 heads
546 MB."""
TILE = 64
"""Tokens of the forward kernel's tiles. They must divide the mask's blocks; the defaults for large
GPUs do not divide 64."""
_TILES = {"BLOCK_M": TILE, "BLOCK_N": TILE}


def flex(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, pattern: Pattern
) -> Tensor:
    """flex_attention with a block mask, over 4 samples or one at a time; `gathered` if no kernel
    compiles."""
    if torch.compiler.is_compiling():  # a graph would have to build a mask in every layer
        return gathered(query, key, value, bias, pattern)
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    mask = mask_of(pattern, query.device, score_dtype)
    missing = _width(pattern) * pattern.block - pattern.length
    whole, rest = divmod(len(query), _MAX_SAMPLES)
    sizes = [_MAX_SAMPLES] * whole + [1] * rest  # 6 samples -> 4, 1, 1
    states = [query, key, value]
    if missing:
        states = [F.pad(each, (0, 0, 0, missing)) for each in states]
    if bias is None and may_repeat(pattern):  # one kernel for repeats and for padding
        bias = query.new_zeros(len(query), pattern.length)
    scores: list[Any] = [None] * len(sizes)
    if bias is not None:
        biases = F.pad(bias, (0, missing)).split(sizes)
        scores = [_score(mask.repeats, part.contiguous(), pattern.block) for part in biases]
    contexts = []
    parts = zip(*(each.split(sizes) for each in states), strict=True)
    for inputs, score in zip(parts, scores, strict=True):
        context = _run([each.contiguous() for each in inputs], score, mask.blocks)
        if context is None:
            return gathered(query, key, value, bias, pattern)
        contexts.append(context)
    context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    return context[:, :, : pattern.length]


class Mask(NamedTuple):
    """The inputs of flex_attention that depend only on the pattern."""

    blocks: BlockMask
    repeats: (
        Tensor  # (nh, N, N): logarithm of how often each query block reads each key block
    )
    size: int  # bytes


_masks: OrderedDict[tuple[Pattern, torch.device, torch.dtype], Mask] = OrderedDict()


def mask_of(pattern: Pattern, device: torch.device, dtype: torch.dtype) -> Mask:
    """Cached for all layers, micro-batches and steps, up to `_MAX_MASK_BYTES`. `dtype`: of
    scores."""
    key = (pattern, device, dtype)
    if key not in _masks:
        with torch.inference_mode(False):  # inference tensors would fail in training
            _masks[key] = _make_mask(*key)
        while (
            len(_masks) > 1 and sum(mask.size for mask in _masks.values()) > _MAX_MASK_BYTES
        ):
            _masks.popitem(last=False)
    _masks.move_to_end(key)
    return _masks[key]


def _width(pattern: Pattern) -> int:
    """N, a power of two, so that few kernels are compiled; a block of padding reads one block,
    others read eight."""
    return 1 << int(pattern.length // pattern.block - 1).bit_length()


def _make_mask(pattern: Pattern, device: torch.device, dtype: torch.dtype) -> Mask:
    """It has only full blocks, since a block is read as a whole."""
    block = pattern.block
    width = _width(pattern)
    count = counts(pattern, width, device)
    read = count > 0
    keys = _ordered(read)  # of each query
    queries = _ordered(read.transpose(1, 2))  # of each key
    no_keys, no_queries, no_repeats = _empty_tables(pattern.heads, width, device, dtype)

    def reads(sample: Any, head: Any, query: Any, key: Any) -> Any:
        return read[head, query // block, key // block]

    block_mask: Any = BlockMask
    blocks = block_mask(
        (width * block, width * block),
        *(*no_keys, *keys, *no_queries, *queries),
        BLOCK_SIZE=(block, block),
        mask_mod=reads,
    )
    tensors = [read, *queries, *keys]
    repeats = no_repeats
    if may_repeat(pattern):
        repeats = count.to(dtype).clamp(min=1).log()
        tensors.append(repeats)
    return Mask(blocks, repeats, sum(tensor.nbytes for tensor in tensors))


def _ordered(read: Tensor) -> tuple[Tensor, Tensor]:
    """(nh, N, N) -> (1, nh, N), the number of blocks that each block reads, and (1, nh, N, N),
    their indices first."""
    # kernels read rows by address, and sorting keeps the strides of a transposed tensor
    read = read.int().contiguous()
    order = read.argsort(dim=-1, descending=True, stable=True).int()
    return read.sum(-1, dtype=torch.int32).unsqueeze(0), order.unsqueeze(0)


@functools.cache
def _empty_tables(
    heads: int, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Shared by all masks of a width: no partial blocks for queries and for keys, and no
    repeats."""
    numbers = torch.zeros(1, heads, width, dtype=torch.int32, device=device)
    indices = torch.zeros(1, heads, width, width, dtype=torch.int32, device=device)
    return [numbers, indices], [numbers.clone(), indices.clone()], indices[0].to(dtype)


def _score(repeats: Tensor, bias: Tensor, block: int) -> Callable[..., Any]:
    """Adds the repeats of blocks (nh, N, N) and the bias of padding (B, N * b) to a score."""

    def score(value: Any, sample: Any, head: Any, query: Any, key: Any) -> Any:
        return value + repeats[head, query // block, key // block] + bias[sample, key]

    return score


_compiles: dict[tuple[Any, ...], bool] = {}
"""Shape, dtype and the other properties that a kernel is compiled for -> whether that succeeded."""


def _run(
    inputs: list[Tensor], score: Callable[..., Any] | None, mask: BlockMask
) -> Tensor | None:
    """(B, nh, N * b, hs), or None if no kernel exists for such inputs. This does not change within
    a process, so recomputed activations are the same."""
    query = inputs[0]
    kernel: Any = flex_attention
    if not _compiled_on(query.device.type):
        context: Tensor = kernel(*inputs, score_mod=score, block_mask=mask)
        return context
    from torch._dynamo import exc  # takes a second

    trained = tuple(each.requires_grad and torch.is_grad_enabled() for each in inputs)
    shape = (
        query.shape,
        query.dtype,
        query.device,
        mask.BLOCK_SIZE,
        score is None,
        trained,
    )
    if not _compiles.get(shape, True):
        return None
    kernel = _compiled() if shape in _compiles else _compile
    if not _compiles:
        log_on_rank_0(
            "BigBird: a kernel is compiled for each new shape of batches, seconds for each"
        )
    try:
        context = kernel(*inputs, score, mask)
    except (exc.FailOnRecompileLimitHit, exc.TorchDynamoException) as error:
        cause = first_line(getattr(error, "inner_exception", error))
        warnings.warn(
            "flex_attention has no kernel for another shape of batches "
            f"[{type(error).__name__}: {cause}]: they run gathered attention, with the same "
            "results, but slower",
            stacklevel=2,
        )
        _compiles[shape] = False
        return None
    _compiles[shape] = True
    return context


def _compiled_on(device: str) -> bool:
    """Whether to compile: not on a CPU, where the compiled backward pass is missing."""
    return device != "cpu"


def _compile(query: Tensor, *others: Any) -> Any:
    """Compiles and runs a new shape, with its backward kernel: a failure in the backward pass would
    be too late for another implementation."""
    from torch._functorch import config

    tiles = _backward_tiles() if query.is_cuda else contextlib.nullcontext()
    with config.patch(force_non_lazy_backward_lowering=True), tiles:
        return _compiled()(query, *others)


def _backward_tiles() -> contextlib.AbstractContextManager[None]:
    """Replaces the tiles of torch's backward kernel. Kernel options do not: torch drops the choices
    whose own tiles do not divide the mask's blocks (on an H100 all of them in half precision), and
    applies options to those that remain."""
    import torch._inductor.compile_fx  # noqa: F401  # before choices, as in torch itself
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    tiles = {"block_m1": 32, "block_n1": 64, "block_m2": 64, "block_n2": 32, "num_warps": 4}

    class Choices(InductorChoices):
        def get_flex_attention_bwd_configs(
            self, *arguments: Any, **options: Any
        ) -> list[Any]:
            configs = super().get_flex_attention_bwd_configs(*arguments, **options)
            return [dataclasses.replace(each, **tiles) for each in configs]

    handler: contextlib.AbstractContextManager[None] = V.set_choices_handler(Choices())
    return handler


@functools.cache
def _compiled() -> Callable[..., Any]:
    """With `fullgraph` torch raises FailOnRecompileLimitHit at the limit of shapes, and does not
    fall back to dense scores."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Callable[..., Any] | None,
        mask: BlockMask,
    ) -> Any:
        options: Any = _TILES if query.is_cuda else None
        return flex_attention(
            query, key, value, score_mod=score, block_mask=mask, kernel_options=options
        )

    compile_it: Any = torch.compile  # its type stub lacks recompile_limit
    compiled: Callable[..., Any] = compile_it(
        attend, dynamic=False, fullgraph=True, recompile_limit=_MAX_SHAPES
    )
    return compiled
