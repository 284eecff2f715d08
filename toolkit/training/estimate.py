"""Estimates the memory of a training step on each process.

Activations: the model runs forward and backward on tensors without data (FakeTensorMode) under torch's MemTracker.
Weights, gradients and AdamW's moments follow from what a strategy shards (Rajbhandari et al. 2020, "ZeRO", section 3),
buffers from DeepSpeed 0.19 and torch's FSDP2. docs/scaling.md lists what is not counted.
"""

from __future__ import annotations

import bisect
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.hooks import RemovableHandle

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.batches import collator_of
from toolkit.data.tokens import Split
from toolkit.errors import UserError, size_text
from toolkit.models.layers import outer_layers
from toolkit.utils.compat import require
from toolkit.utils.memory import container_memory

Settings = TypeVar("Settings", bound=TrainingSettings)
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2")
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Usable part of the free memory: fragmentation is not counted, and a CPU's heap does not reuse all of its pages.
_USABLE_OF_GPU, _USABLE_OF_CPU = 0.9, 0.5
# of an optimizer's state for each trained weight; 8 of all others, AdamW among them
_STATE_BYTES = {"adafactor": 0, "lion": 4, "sgd": 4}


class Memory(NamedTuple):
    """Bytes of tensors on one process at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float  # its state (AdamW's moments), the average (--ema_decay), and under ZeRO the fp32 weights
    buffers: float  # gathered copies of sharded weights, and buckets of gradients to reduce
    activations: float


def count_activations(
    model: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    device: str,
    precision: str,
    autocast: bool,
) -> int:
    """Peak bytes of a micro-batch's activations, for inputs of these shapes, on a device of this type. The model on the
    CPU does not change. Without `autocast` the weights are in `precision`. Raises UserError for a model whose steps
    depend on the values of its tensors."""
    from torch._subclasses import fake_tensor  # private, so imported only here
    from torch.distributed._tools.mem_tracker import MemTracker

    dtype, tracker = _DTYPES[precision], MemTracker()
    with (
        warnings.catch_warnings(action="ignore"),
        fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
    ):
        weights = {}
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            is_cast = weight.is_floating_point() and not autocast
            weights[name] = torch.empty_like(
                weight, device=device, dtype=dtype if is_cast else weight.dtype
            )
            tracker.track_external(weights[name])
            if weight.requires_grad:  # gradients exist, as in the second micro-batch of a step
                weights[name].requires_grad_().grad = gradient = torch.empty_like(weights[name])
                tracker.track_external(gradient)
            else:  # MemTracker raises on frozen weights without hooks (torch 2.13)
                handles = require(tracker, "_param_to_grad_hook_handles", "torch")
                handles[weights[name]] = (RemovableHandle(OrderedDict()),) * 2
        before = _total(tracker, "current")
        inputs = {
            name: torch.ones(shape, dtype=torch.long, device=device)
            for name, shape in shapes.items()
        }
        options = {"use_cache": False} if "decoder_input_ids" in inputs else {}
        with tracker, torch.autocast(device, dtype, enabled=autocast and precision != "no"):
            try:
                logits = torch.func.functional_call(
                    model.train(), weights, kwargs={**inputs, **options}
                ).logits
            except (
                fake_tensor.DataDependentOutputException,
                fake_tensor.DynamicOutputShapeException,
            ) as error:
                why = "cannot be estimated, as what it computes depends on the texts"
                remedy = "pass --per_device_batch_size as a number, and see peak_memory_bytes in a run's metrics.jsonl"
                raise UserError(f"the memory of {type(model).__name__} {why}: {remedy}") from error
            classes = logits.float().flatten(0, -2)  # (B, C), of sequences (B T, V)
            torch.nn.functional.cross_entropy(
                classes, torch.zeros_like(classes[:, 0], dtype=torch.long)
            ).backward()
        return (
            _total(tracker, "peak")
            - before
            + (_mask_bytes(model, shapes, dtype) if device == "cuda" else 0)
        )


def _mask_bytes(model: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes of the padding mask (B, 1, S, S), which SDPA on a GPU casts to `dtype` in each layer, for backward too.
    The model above runs without one."""
    samples, length = shapes["input_ids"]
    if (
        samples == 1
        or getattr(getattr(model, "config", None), "_attn_implementation", "") != "sdpa"
    ):
        return 0
    recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return (1 if recomputes else len(outer_layers(model))) * samples * length**2 * dtype.itemsize


def _total(tracker: Any, moment: str) -> int:
    return sum(
        bytes_by_kind["Total"] for bytes_by_kind in tracker.get_tracker_snapshot(moment).values()
    )


def uses_autocast(strategy: str, settings: TrainingSettings) -> bool:
    """Whether weights are fp32 and autocast casts them; otherwise they are bf16 or fp16."""
    return not (settings.half_precision_weights and strategy.startswith(("zero", "fsdp2")))


def memory_of(
    strategy: str, processes: int, model: torch.nn.Module, settings: TrainingSettings, zero: Mapping[str, Any],
    precision: str, activations: int, device: str,
) -> Memory:  # fmt: skip
    """A step's memory on each process. `zero`: the section `zero_optimization` of the DeepSpeed config."""
    total = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    moments = _STATE_BYTES.get(settings.optimizer.lower(), 8) + (
        0 if settings.ema_decay is None else 4
    )
    per_device = settings.per_device_batch_size
    splits = per_device != "auto" and per_device * processes < settings.global_batch_size
    accumulates = splits or settings.max_tokens_per_batch is not None
    accumulated = (
        4 * trained if accumulates and not settings.sync_each_batch else 0
    )  # gradients reduced once a step
    if strategy in (
        "single",
        "ddp",
    ):  # DDP's gradients are views of its buckets, except accumulated ones
        return Memory(
            4 * total,
            4 * trained,
            moments * trained,
            accumulated * (strategy == "ddp"),
            activations,
        )
    autocast, shard = uses_autocast(strategy, settings), trained / processes
    size = 4 if autocast else _DTYPES[precision].itemsize
    if strategy == "fsdp2":
        layers = [
            sum(weight.numel() for weight in layer.parameters()) for layer in outer_layers(model)
        ]
        gathered = (
            total - sum(layers) + 2 * max(layers, default=0)
        )  # outside the layers, and two layers
        unsharded = (
            0 if settings.sync_each_batch in (None, True) else 4 * trained
        )  # until the last micro-batch
        return Memory(
            4 * total / processes,
            4 * shard + unsharded,
            moments * shard,
            2 * size * gathered,
            activations,
        )
    unsharded = accumulated if autocast else 0  # see `coalesce_reductions`
    offloaded = strategy.endswith("offload")
    resident = (
        0 if offloaded and device != "cpu" else 1
    )  # fraction of offloadable state on the device
    if strategy.startswith("zero3"):
        # weights stay gathered from forward to backward if they are reused within this many parameters
        gathered = total if 2 * total <= float(zero.get("stage3_max_reuse_distance", 1e9)) else 0
        masters = 0 if autocast and not offloaded else 4  # fp32 weights are the masters
        weight, state = (
            resident * size / processes,
            resident * (masters + moments) * shard,
        )  # of one weight, of all
        return Memory(
            weight * total, weight * trained + unsharded, state, size * gathered, activations
        )
    bucket = float(zero.get("reduce_bucket_size", 5e8))
    buckets = bucket * (1 + bool(zero.get("overlap_comm"))) + min(
        bucket, trained
    )  # and a copy to reduce
    if strategy == "zero1":
        gradients: float = size * trained
    elif offloaded:
        gradients = resident * 4 * shard + unsharded
    else:  # shards are views of unsharded gradients; or else accumulated shards and those of a micro-batch
        gradients = unsharded or size * shard * (1 + accumulates)
    return Memory(
        size * total, gradients, resident * (4 + moments) * shard, size * buckets, activations
    )


def micro_batch_size(settings: TrainingSettings, size: int, length: int) -> int:
    """`size` texts of `length` tokens, or as many as `--max_tokens_per_batch` allows."""
    limit = settings.max_tokens_per_batch
    return min(size, max(1, limit // length)) if limit else size


def strategy_of(accelerator: Accelerator) -> tuple[str, dict[str, Any]]:
    """(one of STRATEGIES, `zero_optimization` of the DeepSpeed config)."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return (
            "fsdp2"
            if accelerator.is_fsdp2
            else "ddp"
            if accelerator.num_processes > 1
            else "single",
            {},
        )
    zero = plugin.deepspeed_config["zero_optimization"]
    sections = (zero.get(f"offload_{what}") or {} for what in ("optimizer", "param"))  # null: none
    offloads = any(section.get("device") not in (None, "none") for section in sections)
    numbers = {name: value for name, value in zero.items() if value != "auto"}
    return f"zero{plugin.zero_stage}" + "_offload" * offloads, numbers


def fit_batch_size(
    accelerator: Accelerator,
    model: torch.nn.Module,
    train: Split,
    tokenizer: Any,
    settings: Settings,
) -> Settings:
    """Replaces `--per_device_batch_size auto` by the largest micro-batch of the longest texts that fits all ranks. Call
    this before `accelerator.prepare`. Raises UserError if not even one text fits."""
    if settings.per_device_batch_size != "auto":
        return settings
    longest = int(train.lengths.max())
    strategy, zero = strategy_of(accelerator)
    device, precision = accelerator.device.type, str(accelerator.mixed_precision)
    most = -(-settings.global_batch_size // accelerator.num_processes)
    by_length, collate = train.longest(most), collator_of(train, tokenizer, accelerator.device)
    usable = usable_memory(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def fits(size: int) -> bool:
        inputs = collate(by_length[: micro_batch_size(settings, size, longest)]).inputs
        shapes = {
            name: tuple(tensor.shape) for name, tensor in inputs.items() if "mask" not in name
        }
        activations = count_activations(
            model, shapes, device, precision, uses_autocast(strategy, settings)
        )
        sized = replace(settings, per_device_batch_size=size)
        step = (
            strategy,
            accelerator.num_processes,
            model,
            sized,
            zero,
            precision,
            activations,
            device,
        )
        return sum(memory_of(*step)) <= usable

    sizes = sorted(
        {-(-most // parts) for parts in range(1, most + 1)}
    )  # each divides the rank's samples evenly
    # the largest needs no accumulation, and may take less memory than smaller ones
    count = (
        len(sizes)
        if fits(most)
        else bisect.bisect_left(sizes[:-1], True, key=lambda size: not fits(size))
    )
    count = min(gather_object([count]))
    if count == 0:
        raise UserError(
            f"--per_device_batch_size auto: not even one text of {longest} tokens fits into {size_text(usable)}: pass "
            "--gradient_checkpointing true, a smaller --max_length, or another strategy (docs/scaling.md)"
        )
    size = sizes[count - 1]
    line = f"--per_device_batch_size auto: {size} (texts of up to {longest} tokens, {size_text(usable)} usable)"
    launch.log_on_main(accelerator, line)
    return replace(settings, per_device_batch_size=size)


def usable_memory(device: str, processes: int) -> float:
    """Bytes that a step may use in each of `processes` on this machine: a part of the GPU's free memory, or of the
    machine's or container's."""
    if device == "cuda":
        torch.cuda.empty_cache()  # what a teacher has used, say
        return _USABLE_OF_GPU * torch.cuda.mem_get_info()[0]
    free = psutil.virtual_memory().available
    limit, used, stat = container_memory()
    if limit.isdigit():
        # the page cache counts as used, though the kernel drops it when memory is needed
        cached = sum(map(int, re.findall(r"(?m)^(?:in)?active_file (\d+)", stat)))
        free = min(free, int(limit) - int(used) + cached)
    return _USABLE_OF_CPU * max(0, free) / processes
