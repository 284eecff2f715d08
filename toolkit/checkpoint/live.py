"""The training state in this process's memory, under any strategy, as flat fragments of named parameters.

A strategy decides which elements of a parameter a process owns, and in which tensor it keeps the fp32 master
and the optimizer's state of them. Everything above works on `Fragment`s alone: to restore a checkpoint is to
fill each of them with the same elements of whatever was saved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from toolkit.checkpoint.optimizer_state import kept_of, remember_groups
from toolkit.errors import UserError
from toolkit.utils.compat import require
from toolkit.utils.modules import unwrapped


@dataclass
class Fragment:
    """Consecutive elements of one parameter (or buffer) that this process owns."""

    name: str
    start: int
    """First element, in the parameter's row-major order."""
    values: torch.Tensor
    """(n,) view of the fp32 master; of the parameter itself where it is frozen."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """(n,) views of what the optimizer keeps of each element, by its own keys (`exp_avg`, `momentum_buffer`)."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What it keeps in another shape, such as Adafactor's rows and columns; whole parameters alone have it."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Numbers and tensors of one, such as `step`; the same for parameters that are flattened together."""


def live_state(accelerator: Accelerator, model: Any, optimizer: Any = None) -> LiveState:
    """The state of a prepared model and optimizer. DeepSpeed's model knows its optimizer."""
    inner = getattr(optimizer, "optimizer", optimizer)
    module = unwrapped(model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        inner = model.optimizer
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
        return LiveState(module, inner)
    reshard(module)
    if any(_is_sharded(parameter) for parameter in module.parameters()):
        return ShardedState(module, inner)
    return LiveState(module, inner)


def reshard(module: torch.nn.Module) -> None:
    """FSDP2's outermost unit keeps its parameters whole from an evaluation to the next backward."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class LiveState:
    """One process, or data parallel: every process holds everything. Other strategies are subclasses."""

    strategy_files = "whole"
    """How docs/checkpoints.md calls the files this state is saved as: whole, slices or deepspeed."""

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        """`optimizer` holds `state` and `param_groups`: under ZeRO that is the one inside DeepSpeed's."""
        self.module, self.optimizer = module, optimizer
        self.world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        remember_groups(optimizer)

    @property
    def strategy(self) -> str:
        """As `CheckpointReader.strategy` names it."""
        return "ddp" if self.world > 1 else "single"

    def holders(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """The tensors that the optimizer keeps state of, each with the trained parameters that lie in it; the same
        names in the same order in every process."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield parameter, [name]

    def fragments(self) -> Iterator[Fragment]:
        """Every piece this process owns, parameters in the model's order, tied ones once, then buffers."""
        for name, parameter in self.module.named_parameters():
            fragment = self.trained(name, parameter) if parameter.requires_grad else self.frozen(name, parameter)
            if fragment is not None:
                yield fragment
        for name, buffer in persistent_buffers(self.module):
            yield Fragment(name, 0, buffer.data.view(-1))

    def trained(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        fragment = self.frozen(name, parameter)
        if fragment is not None:
            kept = kept_of(self.optimizer, parameter)
            fragment.state = {key: _local(value)[1].view(-1) for key, value in kept.elements.items()}
            fragment.factors, fragment.scalars = kept.factors, kept.scalars
        return fragment

    def frozen(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        """The piece without the optimizer's state. Its values are a view: what is written into them must arrive."""
        start, local = _local(parameter)
        return Fragment(name, start, local.view(-1)) if local.numel() or not _is_sharded(parameter) else None

    def whole_weights(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Parameters (the fp32 masters, where they are trained) and persistent buffers, whole, in rank 0's host memory;
        elsewhere none of them. Collective; one parameter at a time is on `device`."""
        pieces = {part.name: part for part in self.fragments()}
        weights, keeps = {}, self.world == 1 or torch.distributed.get_rank() == 0
        for name, parameter in self.module.named_parameters():
            whole = torch.zeros(whole_shape(parameter), dtype=torch.float32, device=device)
            if part := pieces.get(name):
                whole.view(-1).narrow(0, part.start, part.values.numel()).copy_(part.values)
            if self.world > 1:  # the largest of a byte and zeros is that byte, however many processes have it
                torch.distributed.reduce(whole.view(-1).view(torch.uint8), 0, torch.distributed.ReduceOp.MAX)
            if keeps:
                weights[name] = whole.cpu()
        return weights | {name: buffer.cpu() for name, buffer in persistent_buffers(self.module) if keeps}

    def before_loading(self) -> None:
        """Collective: brings parameters into the form in which fragments may be written."""

    def after_loading(self, steps: int) -> None:
        """Collective: the weights the model computes with follow the masters. `steps`: taken so far."""


class ShardedState(LiveState):
    """FSDP2: each process holds some rows of every parameter, as a DTensor."""

    strategy_files = "slices"
    strategy = "fsdp2"


class ZeroState(LiveState):
    """What ZeRO's stages have in common: the optimizer sees flat masters alone, each of many parameters."""

    strategy_files = "deepspeed"

    def __init__(self, module: torch.nn.Module, zero: Any, engine: Any) -> None:
        super().__init__(module, zero.optimizer)
        self.zero, self.engine = zero, engine

    @property
    def strategy(self) -> str:
        return f"zero{self.engine.zero_optimization_stage()}"

    def flattened(self) -> Iterator[tuple[torch.Tensor, list[Any]]]:
        """Each flat master, with its parameters."""
        raise NotImplementedError

    def holders(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for master, parameters in self.flattened():
            yield master, [names[id(parameter)] for parameter in parameters]

    def part(self, name: str, start: int, master: torch.Tensor, here: int, count: int) -> Fragment:
        """`count` elements from `start` on of a parameter, which lie at `here` in a flat master."""

        def cut(flat: torch.Tensor) -> torch.Tensor:
            return flat.data.view(-1).narrow(0, here, count)

        kept = kept_of(self.optimizer, master)
        parts = {key: cut(value) for key, value in kept.elements.items()}
        return Fragment(name, start, cut(master), parts, kept.factors, kept.scalars)

    def after_loading(self, steps: int) -> None:
        self.engine.global_steps = steps
        self.engine.global_samples = steps * self.engine.train_batch_size()


class FlatState(ZeroState):
    """ZeRO-1 and 2, and DeepSpeed's BF16_Optimizer: per parameter group one flat fp32 master, of which
    each process owns a range that begins and ends anywhere inside parameters."""

    def __init__(self, module: torch.nn.Module, zero: Any, engine: Any) -> None:
        super().__init__(module, zero, engine)
        names = ("single_partition_of_fp32_groups", "round_robin_bit16_groups")
        if hasattr(zero, "bf16_groups"):  # BF16_Optimizer
            names = ("fp32_groups_flat_partition", "bf16_groups")
        self.masters, self.groups = (require(zero, name, "deepspeed") for name in names)
        self.places: dict[int, tuple[int, int]] = {}
        """id of a parameter -> (group, its first element in the group's flat buffer)."""
        for number, group in enumerate(self.groups):
            # BF16_Optimizer leaves no gaps
            one_by_one = itertools.accumulate((each.numel() for each in group), initial=0)
            offsets = getattr(zero, "round_robin_bit16_offsets", {number: list(one_by_one)[:-1]})[number]
            self.places |= {id(each): (number, offset) for each, offset in zip(group, offsets, strict=True)}

    def flattened(self) -> Iterator[tuple[torch.Tensor, list[Any]]]:
        yield from zip(self.masters, self.groups, strict=True)

    def trained(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        """None where other processes own all of it."""
        if not parameter.numel():
            return None  # DeepSpeed leaves it out of its groups
        number, offset = self.places[id(parameter)]
        master = self.masters[number]
        begin = torch.distributed.get_rank(self.zero.real_dp_process_group[number]) * master.numel()
        first, end = max(offset, begin), min(offset + parameter.numel(), begin + master.numel())
        return self.part(name, first - offset, master, first - begin, end - first) if first < end else None

    def after_loading(self, steps: int) -> None:
        self.zero.update_lp_params()
        super().after_loading(steps)


class Stage3State(ZeroState):
    """ZeRO-3: each process owns a shard of every parameter; the last ones are padded."""

    def __init__(self, module: torch.nn.Module, zero: Any, engine: Any) -> None:
        if getattr(zero, "swap_optimizer", False):
            raise UserError(
                "an optimizer offloaded to NVMe is not in DeepSpeed's checkpoints, and cannot be resumed: set "
                "offload_optimizer.device to cpu in the DeepSpeed config"
            )
        for name in ("fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat", "fp16_groups", "grad_position"):
            require(zero, name, "deepspeed")
        super().__init__(module, zero, engine)

    def flattened(self) -> Iterator[tuple[torch.Tensor, list[Any]]]:
        yield from zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True)

    def trained(self, name: str, parameter: Any) -> Fragment | None:
        group, offset, count = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start, owned = self._owned(parameter, count)
        master = self.zero.fp32_partitioned_groups_flat[group]
        return self.part(name, start, master, offset, owned) if owned else None

    def frozen(self, name: str, parameter: Any) -> Fragment | None:
        if not hasattr(parameter, "ds_tensor"):
            return super().frozen(name, parameter)
        start, owned = self._owned(parameter, parameter.ds_tensor.numel())
        return Fragment(name, start, parameter.ds_tensor.data.view(-1).narrow(0, 0, owned)) if owned else None

    def _owned(self, parameter: Any, shard: int) -> tuple[int, int]:
        """(first element, number of elements) of this process's shard, without its padding."""
        start = torch.distributed.get_rank(parameter.ds_process_group) * shard
        return start, max(0, min(shard, parameter.ds_numel - start))

    def before_loading(self) -> None:
        # also releases small parameters that are kept whole between steps
        self.zero.checkpoint_event_prologue()

    def after_loading(self, steps: int) -> None:
        """As DeepSpeed's own loading ends: its compute copies are remade from the masters."""
        zero = self.zero
        for master, compute, group in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, zero.fp16_partitioned_groups,
            strict=True,
        ):  # fmt: skip
            if master.numel():
                compute.data.copy_(master.data)
            for parameter, piece in zip(group, zero.unflatten(compute, group), strict=True):
                parameter.data = piece.data
        zero.checkpoint_event_epilogue()
        super().after_loading(steps)


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
    """Of a parameter that may be sharded."""
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def _is_sharded(parameter: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _local(parameter: Any) -> tuple[int, torch.Tensor]:
    """(first element, local part) of a DTensor sharded by rows, or of a plain tensor."""
    if not _is_sharded(parameter):
        return 0, parameter.data
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if any(offsets[1:]):
        raise RuntimeError(f"a parameter sharded by columns cannot be saved: {parameter.placements}")
    row = math.prod(parameter.shape[1:])
    return (offsets[0] * row if offsets else 0), parameter.to_local().data
