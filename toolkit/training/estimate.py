"""How much memory a step takes on each process, known before it is taken.

Activations are counted: the model runs forward and backward on tensors without data (torch's FakeTensorMode), and the
bytes of all that lives at a time are added up. What a strategy keeps of weights, gradients and AdamW's state follows
from what it shards (Rajbhandari et al. 2020, "ZeRO", section 3) and the buffers of DeepSpeed 0.19 and torch's FSDP2.
"""

from __future__ import annotations

import bisect
import gc
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from toolkit import launch
from toolkit.config import TrainingSettings
from toolkit.data.batches import collator_of
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.models.layers import outer_layers
from toolkit.utils.memory import is_out_of_memory
from toolkit.utils.units import size_text

Settings = TypeVar("Settings", bound=TrainingSettings)
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2")
_PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What the C library's heap takes for activations, times their bytes: measured (benchmarks/results/memory.md).
_CPU_HEAP = 1.6
# Of the memory that is free: the rest is for what is allocated without torch, and for fragments.
_USABLE = 0.9


@dataclass(frozen=True)
class Memory:
    """Bytes on one process at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    """AdamW's moments, and under ZeRO the fp32 weights."""
    buffers: float
    """What is gathered of sharded weights, and what gradients are collected in before they are sent; on a CPU with the
    holes that it leaves in the heap."""
    activations: float = 0
    process: float = 0
    """On a CPU: the interpreter and its libraries."""

    @property
    def peak(self) -> float:
        return float(sum(astuple(self)))


class _Living(TorchDispatchMode):
    """Counts the bytes of the storages that are made and still live, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.living = self.most = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, made)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen[storage] = size = storage.nbytes()
            weakref.finalize(storage, self._free, size)
            self.living += size
            self.most = max(self.most, self.living)

    def _free(self, size: int) -> None:
        self.living -= size


class Trial:
    """Forward and backward of a model that is on the CPU, on `device`. `cast`: weights are in `precision`, with no cast
    on the way (autocast)."""

    def __init__(self, model: torch.nn.Module, precision: str, device: str, cast: bool = False) -> None:
        self.model, self.device, self.dtype = model, device, _PRECISIONS[precision]
        self.cast = precision != "no" and cast
        self.autocast = precision != "no" and not self.cast

    def count(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Bytes of the activations at their largest, for inputs of these shapes; parameters' gradients are not
        counted."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            weights = self._weights(torch.empty_like)
            inputs = {name: torch.ones(shape, dtype=torch.long, device=self.device) for name, shape in shapes.items()}
            with _Living() as counted:
                counted._seen.update({weight.untyped_storage(): 0 for weight in weights.values()})
                self._compute(weights, inputs)
        return counted.most

    def fits(self, inputs: dict[str, torch.Tensor], beside: float) -> bool:
        """Whether the device can hold it, with `beside` bytes in use for weights, gradients and all else."""
        weights: dict[str, torch.Tensor] = {}
        try:
            weights = self._weights(torch.Tensor.to)
            left = int(beside) - sum(weight.nbytes for weight in weights.values())
            held = torch.empty(max(0, left), dtype=torch.uint8, device=self.device)
            self._compute(weights, inputs)
            del held
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            weights.clear()
            gc.collect()
            torch.cuda.empty_cache()
        return True

    def _weights(self, make: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters and buffers on the device, by name; a gradient is dropped as soon as it is there."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        found = {}
        for name, own in named.items():
            dtype = self.dtype if self.cast and own.is_floating_point() else own.dtype
            found[name] = make(own.detach(), device=self.device, dtype=dtype).requires_grad_(own.requires_grad)
            if own.requires_grad:
                found[name].register_post_accumulate_grad_hook(_drop_gradient)
        return found

    def _compute(self, weights: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
        options = {"use_cache": False} if "decoder_input_ids" in inputs else {}
        with torch.autocast(self.device, self.dtype, enabled=self.autocast):
            logits = torch.func.functional_call(self.model.train(), weights, kwargs={**inputs, **options}).logits
        classes = logits.float().flatten(0, -2)  # (B, C), of titles (B T, V)
        torch.nn.functional.cross_entropy(classes, torch.zeros_like(classes[:, 0], dtype=torch.long)).backward()


def _drop_gradient(weight: torch.Tensor) -> None:
    weight.grad = None


def computes_in_cast_weights(strategy: str, settings: TrainingSettings) -> bool:
    """Whether the weights that a layer reads are bf16 or fp16, and autocast finds nothing to cast."""
    return settings.half_precision_weights and strategy.startswith(("zero", "fsdp2"))


def state(
    strategy: str, processes: int, model: torch.nn.Module, settings: TrainingSettings, device: str,
    zero: Mapping[str, Any], precision: str,
) -> Memory:  # fmt: skip
    """What a strategy keeps of a model on each process. `zero`: `zero_optimization` of its DeepSpeed config."""
    every = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if strategy in ("single", "ddp"):
        return Memory(4 * every, 4 * trained, 8 * trained, 0)
    cast = computes_in_cast_weights(strategy, settings)
    low, part = _PRECISIONS[precision].itemsize if cast else 4, trained / processes
    # weights that are gathered and freed leave holes in a CPU's heap, which keeps them: as much as was measured
    holes = 2.0 * low * every if device == "cpu" else 0.0
    if strategy == "fsdp2":
        layers = [sum(weight.numel() for weight in layer.parameters()) for layer in outer_layers(model)]
        gathered = every - sum(layers) + 2 * max(layers, default=0)  # what is in no layer, a layer and the next one
        whole = 0 if settings.sync_each_batch in (None, True) else 4 * trained  # kept until the last micro-batch
        return Memory(4 * every / processes, 4 * part + whole, 8 * part, 2 * low * gathered + holes)
    on_host = strategy.endswith("offload") and device != "cpu"
    kept = 0 if on_host else 1
    if strategy.startswith("zero3"):
        # weights stay gathered from forward to backward while they are reused within so many
        whole = every if 2 * every <= float(zero.get("stage3_max_reuse_distance", 1e9)) else 0
        if device == "cpu":
            holes += 4 * part  # at the step gradients are copied: a GPU has room where the activations were
        adam = 12 if cast or strategy.endswith("offload") or device == "cpu" else 8  # fp32 weights are the masters
        return Memory(kept * low * every / processes, kept * low * part, kept * adam * part, low * whole + holes)
    size = float(zero.get("reduce_bucket_size", 5e8))
    bucket = size * (1 + bool(zero.get("overlap_comm")))
    if device == "cpu":  # a page that nobody writes to takes no memory
        bucket = min(size, trained)
    bucket += min(size, trained)  # the one that is reduced is copied for it
    gradients = low * trained if strategy == "zero1" else kept * 4 * part
    return Memory(low * every, gradients, kept * 12 * part, low * bucket)


def with_activations(memory: Memory, counted: int, device: str) -> Memory:
    return replace(memory, activations=counted * (_CPU_HEAP if device == "cpu" else 1))


def strategy_of(accelerator: Accelerator) -> tuple[str, dict[str, Any]]:
    """(one of STRATEGIES, `zero_optimization` of the DeepSpeed config)."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return "fsdp2" if accelerator.is_fsdp2 else "ddp" if accelerator.num_processes > 1 else "single", {}
    zero = plugin.deepspeed_config["zero_optimization"]
    offloads = any(zero.get(f"offload_{what}", {}).get("device", "none") != "none" for what in ("optimizer", "param"))
    numbers = {name: value for name, value in zero.items() if value != "auto"}
    return f"zero{plugin.zero_stage}" + "_offload" * offloads, numbers


def fit_batch_size(
    accelerator: Accelerator, model: torch.nn.Module, train: Split, tokenizer: Any, settings: Settings
) -> Settings:
    """The settings with the largest micro-batch that fits, the same on all ranks, for `--per_device_batch_size auto`.

    Before `accelerator.prepare`. The longest texts are tried: on a GPU forward and backward, beside as much memory as
    weights, gradients and optimizer will take; on a CPU, and where a strategy shards weights, by the estimate. Raises
    UserError where not even one fits.
    """
    if settings.per_device_batch_size != "auto":
        return settings
    device, longest, (strategy, zero) = accelerator.device, int(train.lengths.max()), strategy_of(accelerator)
    precision = str(accelerator.mixed_precision)
    trial = Trial(model, precision, device.type, computes_in_cast_weights(strategy, settings))
    kept = state(strategy, accelerator.num_processes, model, settings, device.type, zero, precision)
    most = -(-settings.global_batch_size // accelerator.num_processes)
    by_length, collate = train.longest(most), collator_of(train, tokenizer, device)
    free = free_bytes(device, model)

    def fits(size: int) -> bool:
        limit = settings.max_tokens_per_batch
        inputs = collate(by_length[: min(size, max(1, limit // longest)) if limit else size]).inputs
        if device.type == "cuda" and not strategy.startswith(("zero3", "fsdp2")):  # there no GPU need hold it whole
            return trial.fits(inputs, kept.peak + (1 - _USABLE) * free)
        counted = trial.count({name: tuple(tensor.shape) for name, tensor in inputs.items() if "mask" not in name})
        return with_activations(kept, counted, device.type).peak <= _USABLE * free

    sizes = sorted({-(-most // parts) for parts in range(1, most + 1)})  # each shares the work out evenly
    found = min(gather_object([bisect.bisect_left(sizes, True, key=lambda size: not fits(size))]))
    if found == 0:
        raise UserError(
            f"--per_device_batch_size auto: not even one text of {longest} tokens fits ({size_text(free)} free): pass "
            "--gradient_checkpointing true, a smaller --max_length, or a strategy that shards more "
            "(`toolkit estimate` shows what each takes)"
        )
    size = sizes[found - 1]
    line = f"--per_device_batch_size auto: {size} ({size_text(free)} free, texts of up to {longest} tokens)"
    launch.say(accelerator, line)
    return replace(settings, per_device_batch_size=size)


def free_bytes(device: torch.device, model: torch.nn.Module) -> int:
    """For one process of this machine; on a CPU with what the model's weights take already."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    own = sum(weight.nbytes for weight in model.parameters())
    return free_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + own


def free_memory() -> int:
    """Bytes that this machine, or the container, has left."""
    free = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) - int(used.read_text()))
    return max(0, free)
