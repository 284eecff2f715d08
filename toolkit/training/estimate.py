"""How much memory a step takes on each process, known before it is taken.

Activations are counted, not guessed: the model runs forward and backward on tensors without data (torch's
FakeTensorMode), and the bytes of all that lives at a time are added up. What a strategy keeps of weights, gradients and
AdamW's state follows from what it shards (Rajbhandari et al. 2020, "ZeRO", section 3) and from the buffers that
DeepSpeed 0.19 and torch's FSDP2 allocate beside it.
"""

from __future__ import annotations

import bisect
import gc
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
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
from toolkit.memory import is_out_of_memory
from toolkit.training.optimizer import outer_layers
from toolkit.units import size_text

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2")
Settings = TypeVar("Settings", bound=TrainingSettings)
_PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What the C library's heap takes for activations, times their bytes: measured (benchmarks/results/memory.md).
_CPU_HEAP = 1.4
# of the memory that is free: the rest is for what libraries allocate without torch, and for fragments
_USABLE = 0.9


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch at their largest, forward and backward."""

    alone: int
    """Without the parameters' gradients."""
    with_gradients: int
    """With those: they come as the activations go, so this is less than the sum of both."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one process at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    """AdamW's moments, and under ZeRO the fp32 weights."""
    buffers: float
    """What is gathered of sharded weights, and what gradients are collected in before they are sent."""
    activations: float = 0
    process: float = 0
    """On a CPU: the interpreter and its libraries."""

    @property
    def peak(self) -> float:
        return float(sum(astuple(self)))


class _Living(TorchDispatchMode):
    """Counts the bytes of the storages that live, and the most there were at a time."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.living = self.most = self.gradients = self.most_with_gradients = 0
        self._seen = WeakIdKeyDictionary({tensor.untyped_storage(): 0 for tensor in parameters.values()})
        for tensor in parameters.values():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._take_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, made)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = self._seen[storage] = storage.nbytes()
        weakref.finalize(storage, self._free, size)
        self.living += size
        self.most = max(self.most, self.living)
        self.most_with_gradients = max(self.most_with_gradients, self.living + self.gradients)

    def _free(self, size: int) -> None:
        self.living -= size

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.gradients += parameter.grad.nbytes
        parameter.grad = None


def count_activations(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, int]], precision: str, device: str, cast: bool = False
) -> Activations:
    """Of a model on the CPU, for inputs of these shapes, as `device` would compute them. `cast`: the weights
    themselves are in `precision`, as under DeepSpeed, instead of being cast on the way (autocast)."""
    dtype = _PRECISIONS[precision]
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = _placed(
            model,
            lambda tensor: torch.empty(
                tensor.shape, dtype=dtype if cast and tensor.is_floating_point() else tensor.dtype, device=device
            ),
        )
        inputs = {name: torch.ones(shape, dtype=torch.long, device=device) for name, shape in shapes.items()}
        with _Living(parameters) as counted:
            _forward_and_backward(
                model, parameters, inputs, torch.autocast(device, dtype, enabled=precision != "no" and not cast)
            )
    return Activations(counted.most, counted.most_with_gradients)


def _placed(model: torch.nn.Module, place: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other tensors in place of a model's own, by name."""
    with torch.no_grad():
        placed = {name: place(tensor).requires_grad_(tensor.requires_grad) for name, tensor in model.named_parameters()}
        return {**placed, **{name: place(tensor) for name, tensor in model.named_buffers()}}


def _forward_and_backward(
    model: torch.nn.Module,
    parameters: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    autocast: AbstractContextManager[Any],
) -> None:
    options = {"use_cache": False} if "decoder_input_ids" in inputs else {}
    model.train()
    with autocast:
        logits = torch.func.functional_call(model, parameters, kwargs={**inputs, **options}).logits  # (B, ..., C)
        classes = logits.float().flatten(0, -2)
    torch.nn.functional.cross_entropy(
        classes, torch.zeros(len(classes), dtype=torch.long, device=classes.device)
    ).backward()


def state(
    strategy: str, processes: int, model: torch.nn.Module, precision: str, device: str, zero: Mapping[str, Any]
) -> Memory:
    """What a strategy keeps of a model on each process. `zero`: `zero_optimization` of its DeepSpeed config."""
    every = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if strategy in ("single", "ddp"):
        return Memory(4 * every, 4 * trained, 8 * trained, 0)
    low, part = _PRECISIONS[precision].itemsize, trained / processes
    if strategy == "fsdp2":
        layers = [sum(p.numel() for p in layer.parameters()) for layer in outer_layers(model)]
        gathered = every - sum(layers) + 2 * max(layers, default=0)  # the rest of the model, a layer and the next one
        return Memory(4 * every / processes, 4 * part, 8 * part, 2 * low * gathered)
    stage, on_host = int(strategy[4]), strategy.endswith("offload") and device != "cpu"
    optimizer = 0 if on_host else 12 * part
    bucket = zero.get("reduce_bucket_size", 5e8)
    if stage == 3:
        # at each step whole weights are kept from forward to backward while they are reused within so many
        whole = every if 2 * every <= float(zero.get("stage3_max_reuse_distance", 1e9)) else 0
        return Memory(0 if on_host else low * every / processes, 0 if on_host else low * part, optimizer, low * whole)
    # a page of a CPU's that nobody writes to takes no memory
    buffers = min(float(bucket), trained) if device == "cpu" else float(bucket) * (1 + bool(zero.get("overlap_comm")))
    gradients = low * trained if stage == 1 else 0 if on_host else 4 * part
    return Memory(low * every, gradients, optimizer, low * buffers)


def with_activations(memory: Memory, strategy: str, counted: Activations, accumulates: bool, device: str) -> Memory:
    """The peak of a step. On a GPU, in one process, gradients grow as activations shrink, unless an earlier micro-batch
    has left them; a CPU's heap keeps what it gave to either, and holes between them."""
    if device == "cpu":
        return replace(memory, activations=_CPU_HEAP * counted.alone)
    gradients = memory.gradients
    if strategy == "single" and not accumulates:
        gradients = min(gradients, counted.with_gradients - counted.alone)
    return replace(memory, gradients=gradients, activations=counted.alone)


def strategy_of(accelerator: Accelerator) -> tuple[str, dict[str, Any]]:
    """(one of STRATEGIES, `zero_optimization` of the DeepSpeed config)."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return "fsdp2" if accelerator.is_fsdp2 else "ddp" if accelerator.num_processes > 1 else "single", {}
    zero = plugin.deepspeed_config["zero_optimization"]
    offloads = any(zero.get(f"offload_{what}", {}).get("device", "none") != "none" for what in ("optimizer", "param"))
    return f"zero{plugin.zero_stage}" + "_offload" * offloads, zero


def fit_batch_size(
    accelerator: Accelerator, model: torch.nn.Module, train: Split, tokenizer: Any, settings: Settings
) -> Settings:
    """The settings with the largest micro-batch that fits, the same on all ranks, for `--per_device_batch_size auto`.

    Before `accelerator.prepare`. The longest texts are tried: on a GPU forward and backward, beside as much memory as
    weights, gradients and optimizer will take; on a CPU by the estimate. Raises UserError where not even one fits.
    """
    if settings.per_device_batch_size != "auto":
        return settings
    most = -(-settings.global_batch_size // accelerator.num_processes)
    sizes = sorted({-(-most // parts) for parts in range(1, most + 1)})  # each divides the work evenly
    fits = _Fits(accelerator, model, train, tokenizer, settings)
    found = bisect.bisect_left(sizes, True, key=lambda size: not fits(size))
    smallest = min(gather_object([found]))
    if smallest == 0:
        raise UserError(
            f"--per_device_batch_size auto: not even one text of {fits.longest} tokens fits ({fits.free}): pass "
            "--gradient_checkpointing true, a smaller --max_length, or a strategy that shards more "
            "(`toolkit estimate` shows what each takes)"
        )
    size = sizes[smallest - 1]
    launch.say(accelerator, f"--per_device_batch_size auto: {size} ({fits.free}, texts of up to {fits.longest} tokens)")
    return replace(settings, per_device_batch_size=size)


class _Fits:
    """Whether a micro-batch of so many of the longest texts fits this process's memory."""

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, train: Split, tokenizer: Any, settings: TrainingSettings
    ) -> None:
        self.accelerator, self.model, self.settings, self.device = accelerator, model, settings, accelerator.device
        self.by_length = np.argsort(-train.lengths, kind="stable")
        self.longest = int(train.lengths.max())
        self.collate = collator_of(train, tokenizer, self.device)
        self.precision = str(accelerator.mixed_precision)
        self.strategy, zero = strategy_of(accelerator)
        self.cast = self.strategy.startswith("zero") and self.precision != "no"
        self.state = state(self.strategy, accelerator.num_processes, model, self.precision, self.device.type, zero)
        self.bytes = self._free_bytes()
        self.free = f"{size_text(self.bytes)} free"

    def _free_bytes(self) -> int:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]
        own = sum(tensor.nbytes for tensor in self.model.parameters())  # the weights are here already
        return free_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + own

    def __call__(self, size: int) -> bool:
        if tokens := self.settings.max_tokens_per_batch:
            size = min(size, max(1, tokens // self.longest))
        inputs = self.collate(self.by_length[:size]).inputs
        if self.device.type == "cuda":
            return self._tried(inputs)
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items() if name != "attention_mask"}
        counted = count_activations(self.model, shapes, self.precision, self.device.type, self.cast)  # type: ignore[arg-type]
        return with_activations(self.state, self.strategy, counted, True, self.device.type).peak <= _USABLE * self.bytes

    def _tried(self, inputs: dict[str, torch.Tensor]) -> bool:
        dtype = _PRECISIONS[self.precision] if self.cast else torch.float32
        try:
            parameters = _placed(
                self.model, lambda tensor: tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            )
            own = sum(tensor.nbytes * (1 + tensor.requires_grad) for tensor in parameters.values())
            beside = torch.empty(
                max(0, int(self.state.peak + (1 - _USABLE) * self.bytes) - own), dtype=torch.uint8, device=self.device
            )
            _forward_and_backward(
                self.model,
                parameters,
                inputs,
                torch.autocast(self.device.type, dtype, enabled=self.precision != "no" and not self.cast),
            )
            del beside
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            parameters = {}
            gc.collect()
            torch.cuda.empty_cache()
        return True


def free_memory() -> int:
    """Bytes that this machine, or the container, has left."""
    free = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) - int(used.read_text()))
    return max(0, free)
