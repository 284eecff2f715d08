"""The training state in this process's memory, under any strategy, as flat pieces of named parameters.

A strategy decides which elements of a parameter a process owns and where it keeps the fp32 master and
Adam's moments. Everything above works on `Fragment`s alone: to restore a checkpoint is to fill each of
them with the same elements of whatever was saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from toolkit.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")
# By the names safetensors uses, as in `TensorIndex.dtype`.
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass
class Fragment:
    """Consecutive elements of one parameter (or buffer) that this process owns."""

    name: str
    start: int
    """First element, in the parameter's row-major order."""
    values: torch.Tensor
    """(n,) view of the fp32 master; of the parameter itself where it is frozen."""
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    """(n,) views of `exp_avg` and `exp_avg_sq`; empty for what is not trained."""
    adam: dict[str, Any] = field(default_factory=dict)
    """The optimizer's state that holds `step`; shared by parameters that are flattened together."""


def live_state(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> LiveState:
    """The state of a prepared model and optimizer."""
    inner = getattr(optimizer, "optimizer", optimizer)
    module = accelerator.unwrap_model(model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        if stage == 3:
            return Stage3State(module, inner, model)
        if stage in (1, 2):
            return FlatState(module, inner, model)
        if not isinstance(inner, torch.optim.Optimizer):
            raise UserError(
                "ZeRO stage 0 in bf16 or fp16 keeps its fp32 weights where they cannot be saved by name: "
                "set zero_optimization.stage to 1 in the DeepSpeed config, or train with --mixed_precision no"
            )
        return WholeState(module, inner)
    if any(_is_divided(parameter) for parameter in module.parameters()):
        return ShardedState(module, inner)
    return WholeState(module, inner)


class LiveState:
    """What all strategies have in common."""

    strategy_files = "whole"
    """How docs/checkpoints.md calls the files this state is saved as: whole, slices or deepspeed."""

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        self.module, self.optimizer = module, optimizer

    def fragments(self) -> Iterator[Fragment]:
        """Every piece this process owns, parameters in the model's order, tied ones once, then buffers."""
        for name, parameter in self.module.named_parameters():
            fragment = self.trained(name, parameter) if parameter.requires_grad else self.frozen(name, parameter)
            if fragment is not None:
                yield fragment
        for name, buffer in persistent_buffers(self.module):
            yield Fragment(name, 0, buffer.data.view(-1))

    def trained(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        moments, adam = adam_state(self.optimizer, parameter)
        return Fragment(name, 0, _flat(parameter.data), {key: _flat(value) for key, value in moments.items()}, adam)

    def frozen(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        return Fragment(name, 0, _flat(parameter.data))

    def before_loading(self) -> None:
        """Collective: brings parameters into the form in which fragments may be written."""

    def after_loading(self, steps: int) -> None:
        """Collective: the weights the model computes with follow the masters. `steps`: taken so far."""


class WholeState(LiveState):
    """One process, or data parallel: every process holds everything."""


class FlatState(LiveState):
    """ZeRO-1 and 2, and DeepSpeed's BF16_Optimizer: per parameter group one flat fp32 master, of which
    each process owns a range that begins and ends anywhere inside parameters."""

    strategy_files = "deepspeed"

    def __init__(self, module: torch.nn.Module, optimizer: Any, engine: Any) -> None:
        super().__init__(module, optimizer)
        self.engine = engine
        names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        self.masters = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
        self.places = self._places()

    def _places(self) -> dict[int, tuple[int, int]] | None:
        """id of a parameter -> (group, first element on the group's line); None where DeepSpeed's own mapping
        has to say it (BF16_Optimizer). The mapping does not know that `round_robin_gradients` reorders."""
        zero = self.optimizer
        if not hasattr(zero, "round_robin_bit16_groups"):
            return None
        found = {}
        for number, group in enumerate(zero.round_robin_bit16_groups):
            for parameter, offset in zip(group, zero.round_robin_bit16_offsets[number], strict=True):
                found[id(parameter)] = (number, offset)
        return found

    def _place(self, parameter: Any) -> tuple[int, int, int, int] | None:
        """(group, first element in the parameter, first element in this process's master, elements)."""
        if not parameter.numel():
            return None  # DeepSpeed leaves it out of its groups
        if self.places is None:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None:
                return None
            there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            return mapping.param_group_index, there.start, here.start, here.numel
        number, offset = self.places[id(parameter)]
        size = self.masters[number].numel()
        begin = torch.distributed.get_rank(self.optimizer.real_dp_process_group[number]) * size
        first, end = max(offset, begin), min(offset + parameter.numel(), begin + size)
        return (number, first - offset, first - begin, end - first) if first < end else None

    def trained(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        place = self._place(parameter)
        if place is None:
            return None  # other processes own all of it
        number, start, here, count = place
        master = self.masters[number]
        moments, adam = adam_state(self.optimizer.optimizer, master)

        def part(flat: torch.Tensor) -> torch.Tensor:
            return flat.data.view(-1).narrow(0, here, count)

        return Fragment(name, start, part(master), {key: part(value) for key, value in moments.items()}, adam)

    def after_loading(self, steps: int) -> None:
        self.optimizer.update_lp_params()
        self.engine.global_steps = steps
        self.engine.global_samples = steps * self.engine.train_batch_size()


class Stage3State(LiveState):
    """ZeRO-3: each process owns the same share of every parameter, padded in the last ones."""

    strategy_files = "deepspeed"

    def __init__(self, module: torch.nn.Module, optimizer: Any, engine: Any) -> None:
        super().__init__(module, optimizer)
        self.engine = engine
        if getattr(optimizer, "swap_optimizer", False):
            raise UserError(
                "an optimizer offloaded to NVMe is not in DeepSpeed's checkpoints, and cannot be resumed: set "
                "offload_optimizer.device to cpu in the DeepSpeed config"
            )

    def trained(self, name: str, parameter: Any) -> Fragment | None:
        zero = self.optimizer
        group, offset, count = zero.grad_position[zero.get_param_id(parameter)]
        start, owned = self._owned(parameter, count)
        if not owned:
            return None
        master = zero.fp32_partitioned_groups_flat[group]
        moments, adam = adam_state(zero.optimizer, master)
        parts = {key: value.data.view(-1).narrow(0, offset, owned) for key, value in moments.items()}
        return Fragment(name, start, master.data.view(-1).narrow(0, offset, owned), parts, adam)

    def frozen(self, name: str, parameter: Any) -> Fragment | None:
        if not hasattr(parameter, "ds_tensor"):
            return super().frozen(name, parameter)
        start, owned = self._owned(parameter, parameter.ds_tensor.numel())
        return Fragment(name, start, parameter.ds_tensor.data.view(-1).narrow(0, 0, owned)) if owned else None

    def _owned(self, parameter: Any, share: int) -> tuple[int, int]:
        """(first element, number of elements) of this process's share, without its padding."""
        start = torch.distributed.get_rank(parameter.ds_process_group) * share
        return start, max(0, min(share, parameter.ds_numel - start))

    def before_loading(self) -> None:
        # also releases small parameters that are kept whole between steps
        self.optimizer.checkpoint_event_prologue()

    def after_loading(self, steps: int) -> None:
        """As DeepSpeed's own loading ends: its compute copies are remade from the masters."""
        zero = self.optimizer
        for master, compute, group in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, zero.fp16_partitioned_groups,
            strict=True,
        ):  # fmt: skip
            if master.numel():
                compute.data.copy_(master.data)
            for parameter, piece in zip(group, zero.unflatten(compute, group), strict=True):
                parameter.data = piece.data
        zero.checkpoint_event_epilogue()
        self.engine.global_steps = steps
        self.engine.global_samples = steps * self.engine.train_batch_size()


class ShardedState(LiveState):
    """FSDP2: rows of every parameter are divided among processes as DTensors."""

    strategy_files = "slices"

    def trained(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        start, local = _local(parameter)
        if not local.numel():
            return None
        moments, adam = adam_state(self.optimizer, parameter)
        parts = {key: _flat(_local(value)[1]) for key, value in moments.items()}
        return Fragment(name, start, _flat(local), parts, adam)

    def frozen(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        start, local = _local(parameter)
        return Fragment(name, start, _flat(local)) if local.numel() else None


def adam_state(optimizer: Any, parameter: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(moments, the optimizer's own state of the parameter), made as its first step would make them."""
    state = optimizer.state[parameter]
    if "exp_avg" not in state:
        group = optimizer.param_groups[0]
        on_device = group.get("fused") or group.get("capturable")
        # AdamW's own choice: the fused kernel reads the count where the parameter lies
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
        for key in MOMENTS:
            state[key] = torch.zeros_like(parameter.data, memory_format=torch.preserve_format)
    return {key: state[key] for key in MOMENTS}, state


def set_adam_step(state: dict[str, Any], steps: float) -> None:
    if isinstance(state.get("step"), torch.Tensor):
        state["step"].fill_(steps)
    else:
        state["step"] = int(steps)


def adam_step(state: dict[str, Any]) -> float:
    step = state.get("step", 0)
    return float(step.item()) if isinstance(step, torch.Tensor) else float(step)


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a state_dict holds besides parameters, shared ones once."""
    seen = set()
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Another name of a parameter -> the name under which it is saved."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    everything = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in everything if first[id(parameter)] != name}


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Of a parameter that may be divided."""
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view, never a copy: what is written into it must arrive."""
    return tensor.view(-1)


def _is_divided(parameter: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _local(parameter: Any) -> tuple[int, torch.Tensor]:
    """(first element, local part) of a DTensor divided by rows, or of a plain tensor."""
    if not _is_divided(parameter):
        return 0, parameter.data
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if any(offsets[1:]):
        raise RuntimeError(f"a parameter divided by columns cannot be saved: {parameter.placements}")
    row = math.prod(parameter.shape[1:])
    return (offsets[0] * row if offsets else 0), parameter.to_local().data
