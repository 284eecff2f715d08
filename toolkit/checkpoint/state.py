"""The training state in the ranks' memory, under any strategy, by the parameters' own names.

The strategy decides which elements of a parameter a rank has, and in which tensor their fp32 master
and optimizer state are. `Fragment` hides that: to save is to gather each tensor from its fragments,
to resume is to fill them from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.parameters import (
    full_shape,
    local,
    local_shard,
    persistent_buffers,
    range_of_stage3,
    reshard,
)
from toolkit.checkpoint.safetensors_writer import DTYPE_NAMES, Shapes, file_order
from toolkit.errors import UserError
from toolkit.utils.compat import require
from toolkit.utils.modules import unwrapped

DEEPSPEED_ADAM = ("DeepSpeedCPUAdam", "FusedAdam")
"""DeepSpeed's implementations of AdamW: the same state, but `step` is an int."""
# Keys of parameter groups that the settings of a run determine, whatever a checkpoint says.
_OF_SETTINGS = ("params", "lr", "initial_lr", "weight_decay", "betas", "eps")
_NONE = object()


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of one tensor of a checkpoint, on this rank."""

    name: str
    """Of a parameter or buffer; `KEY.NAME` of an optimizer's state of it."""
    start: int
    """First element, in the whole tensor's row-major order."""
    values: torch.Tensor
    """(n,) view of what the rank has."""


@dataclass(frozen=True)
class Place:
    """Where this rank has its elements of a trained parameter."""

    master: torch.Tensor
    """What the optimizer updates; its state has the same shape."""
    offset: int
    """The first of the elements in this rank's part of the master."""
    start: int
    """The first of the elements in the parameter."""
    count: int

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """(count,) elements of the master, or of state of its shape."""
        return local(tensor).view(-1).narrow(0, self.offset, self.count)


def live_state(accelerator: Accelerator, model: Any, optimizer: Any = None) -> LiveState:
    """The state of a prepared model and optimizer; under DeepSpeed the engine's optimizer is
    taken."""
    module, device = unwrapped(model), accelerator.device
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        strategy = Stage3State if plugin.zero_stage == 3 else FlatState
        return strategy(module, model.optimizer, model, device)
    reshard(module)
    inner = getattr(optimizer, "optimizer", optimizer)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return ShardedState(module, inner, device)
    return LiveState(module, inner, device)


class LiveState:
    """One process or DDP: each rank has the full state. Subclasses are the other strategies."""

    sharded = False
    """Whether ranks have different elements."""

    def __init__(self, module: torch.nn.Module, optimizer: Any, device: torch.device) -> None:
        """`optimizer`: under ZeRO the torch optimizer inside DeepSpeed's. `device`: where whole
        tensors are gathered, one at a time."""
        self.module, self.optimizer, self.device = module, optimizer, device
        self.buffers = dict(persistent_buffers(module))
        self._full_shapes = {name: full_shape(each) for name, each in module.named_parameters()}
        self.rank, self.world = 0, 1
        if torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
            self.world = torch.distributed.get_world_size()

    def broadcast(self, content: Any) -> Any:
        """Rank 0's JSON-like content, on all ranks. Collective."""
        contents = [content]
        if self.world > 1:
            torch.distributed.broadcast_object_list(contents, 0)
        return contents[0]

    @property
    def strategy(self) -> str:
        """single, ddp, zero1, zero2, zero3 or fsdp2."""
        return "ddp" if self.world > 1 else "single"

    def optimizer_tensors(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """The tensors that the optimizer updates, each with the names of the parameters in it; the
        same names in the same order on all ranks."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield parameter, [name]

    def place(self, parameter: Any) -> Place | None:
        """None if this rank has no element of a trained parameter."""
        start, values = local_shard(parameter)
        return Place(parameter, 0, start, values.numel())

    def weights(self) -> Iterator[Fragment]:
        """Of all parameters, in the model's order, tied ones once (fp32 masters of trained ones);
        then of buffers."""
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                yield Fragment(name, *local_shard(parameter))
            elif place := self.place(parameter):
                yield Fragment(name, place.start, place.view(place.master))
        for name, buffer in self.buffers.items():
            yield Fragment(name, 0, buffer.data.view(-1))

    def moments(self) -> Iterator[Fragment]:
        """Of the optimizer's state of trained parameters, numbers and tensors of other shapes
        included."""
        for name, parameter in self.module.named_parameters():
            place = self.place(parameter) if parameter.requires_grad else None
            if place is None:
                continue
            for key, value in self.optimizer.state.get(place.master, {}).items():
                if _is_elementwise(key, value, place.master):
                    yield Fragment(f"{key}.{name}", place.start, place.view(value))
                else:
                    yield Fragment(f"{key}.{name}", 0, _as_tensor(value).view(-1))

    def weight_shapes(self) -> Shapes:
        """What a checkpoint holds of parameters and buffers; the same on all ranks."""
        tensors = itertools.chain(self.module.named_parameters(), self.buffers.items())
        return {name: (_file_dtype(tensor.dtype), full_shape(tensor)) for name, tensor in tensors}

    def optimizer_shapes(self) -> Shapes:
        """What a checkpoint holds of the optimizer's state; the same on all ranks. Raises UserError
        for state that cannot be saved."""
        shapes: Shapes = {}
        for master, names in self.optimizer_tensors():
            for key, value in self.optimizer.state.get(master, {}).items():
                elementwise = _is_elementwise(key, value, master)
                self._check_savable(key, value, elementwise, names[0])
                tensor = _as_tensor(value)
                for name in names:
                    shape = self._full_shapes[name] if elementwise else tuple(tensor.shape)
                    shapes[f"{key}.{name}"] = (_file_dtype(tensor.dtype), shape)
        return shapes

    def changed_groups(self) -> list[dict[str, Any]]:
        """By parameter group the values that the optimizer itself has changed (its own counters,
        say). Raises UserError for those that JSON cannot hold."""
        groups = []
        for group in self.optimizer.param_groups:
            values = {key: value for key, value in group.items() if key not in _OF_SETTINGS}
            for key, value in values.items():
                if not isinstance(value, bool | int | float | str | list | tuple | None):
                    what = f"{type(self.optimizer).__name__} has {key} ({type(value).__name__}) in a group"
                    raise UserError(f"{what}, which cannot be saved: choose another optimizer")
            defaults = self.optimizer.defaults
            groups.append({key: value for key, value in values.items() if value != defaults.get(key, _NONE)})
        return groups

    def _check_savable(self, key: Any, value: Any, elementwise: bool, name: str) -> None:
        is_tensor = isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES
        what = f"{type(self.optimizer).__name__} has {key} ({type(value).__name__}) of {name}"
        if not isinstance(key, str) or "." in key or not (is_tensor or _is_number(value)):
            raise UserError(f"{what}, which cannot be saved: choose another optimizer")
        if self.sharded and not elementwise and _as_tensor(value).dim():
            fault = f"of shape {list(value.shape)}, which {self.strategy} cannot save"
            raise UserError(f"{what} {fault}: launch with ddp (accelerate_configs/)")

    def gather(self, shapes: Shapes, fragments: Iterable[Fragment]) -> Iterator[torch.Tensor]:
        """Yields the tensors of a file in its order, one at a time: whole on rank 0, undefined on
        the others. Collective: every rank must exhaust it."""
        by_name = {each.name: each for each in fragments}
        places = self._places_by_rank(by_name)
        for name in file_order(shapes):
            dtype, shape = shapes[name]
            ranges = {rank: table[name] for rank, table in enumerate(places) if name in table}
            if ranges.get(0) == (0, math.prod(shape)):
                ranges = {}  # rank 0 has all of it
            if self.rank == 0:
                yield self._receive(dtype, shape, by_name.get(name), ranges)
            else:
                if self.rank in ranges and ranges[self.rank][1]:
                    values = by_name[name].values.to(self.device, dtype)
                    torch.distributed.send(_bytes(values), 0)
                yield torch.empty(0)

    def _places_by_rank(self, fragments: Mapping[str, Fragment]) -> list[dict[str, tuple[int, int]]]:
        """By rank: name -> first element and number of elements of its fragment."""
        mine = {name: (each.start, each.values.numel()) for name, each in fragments.items()}
        places = [mine] * self.world
        if self.world > 1:
            torch.distributed.all_gather_object(places, mine)
        return places

    def _receive(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        mine: Fragment | None,
        ranges: Mapping[int, tuple[int, int]],
    ) -> torch.Tensor:
        """On rank 0: a whole tensor of its own fragment and those of other ranks."""
        if not ranges and mine is not None:
            return mine.values.to(dtype).view(shape)
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        for rank, (start, count) in ranges.items():
            target = whole.view(-1).narrow(0, start, count)
            if rank == 0 and mine is not None:
                target.copy_(mine.values)
            elif count:
                torch.distributed.recv(_bytes(target), rank)
        return whole

    @torch.no_grad()
    def scatter(self, shapes: Shapes, fragments: Iterable[Fragment], read: Callable[[str], torch.Tensor]) -> None:
        """Fills this rank's fragments, one whole tensor at a time. `read`: of a name, on rank 0
        alone. Collective."""
        by_name = {each.name: each for each in fragments}
        for name in file_order(shapes):
            dtype, shape = shapes[name]
            if self.rank == 0:
                whole = read(name).to(self.device).contiguous()
            else:
                whole = torch.empty(shape, dtype=dtype, device=self.device)
            if self.world > 1 and whole.numel():
                torch.distributed.broadcast(_bytes(whole), 0)
            if fragment := by_name.get(name):
                count = fragment.values.numel()
                fragment.values.copy_(whole.view(-1).narrow(0, fragment.start, count))

    def create_moments(self, saved: Shapes, numbers: Mapping[str, Any]) -> None:
        """Replaces the optimizer's state by that of a checkpoint: numbers with their values,
        tensors to be filled by `scatter`. `saved`: the shapes by `KEY.NAME`; `numbers`: the values
        of those without dimensions."""
        keys: dict[str, list[str]] = {}
        for entry in saved:
            key, _, name = entry.partition(".")
            keys.setdefault(name, []).append(key)
        for master, names in self.optimizer_tensors():
            current = self.optimizer.state.pop(master, {})
            name = next((each for each in names if each in keys), names[0])
            state: dict[str, Any] = {}
            for key in keys.get(name, []):
                entry = f"{key}.{name}"
                dtype, shape = saved[entry]
                if entry in numbers:
                    state[key] = self._number(key, numbers[entry], dtype, master.device)
                elif shape == self._full_shapes[name]:
                    dtype = master.dtype if dtype.is_floating_point else dtype
                    state[key] = _zeros_like(master, dtype, current.get(key))
                else:
                    state[key] = torch.zeros(shape, dtype=dtype, device=master.device)
            if state:
                self.optimizer.state[master] = state

    def _number(self, key: str, value: Any, dtype: torch.dtype, device: torch.device) -> Any:
        """The number as the optimizer keeps it: torch's in a float32 tensor, others in Python."""
        kind = type(self.optimizer)
        if key == "step" and kind.__name__ in DEEPSPEED_ADAM:
            return int(value)
        if dtype != torch.float32 and not kind.__module__.startswith("torch.optim"):
            return value
        # as torch does: fused kernels read the step on the parameter's device
        groups = self.optimizer.param_groups
        fused = any(group.get("fused") or group.get("capturable") for group in groups)
        return torch.tensor(float(value), device=device if fused or key != "step" else "cpu")

    def before_loading(self) -> None:
        """Collective: prepares the parameters for writing into fragments."""

    def after_loading(self) -> None:
        """Collective: copies the masters into the model's weights."""


class ShardedState(LiveState):
    """FSDP2: each rank has some rows of each parameter, as a DTensor."""

    sharded = True
    strategy = "fsdp2"


class ZeroState(LiveState):
    """ZeRO 1 to 3: the optimizer updates flat fp32 masters, each of many parameters."""

    sharded = True

    def __init__(
        self, module: torch.nn.Module, zero: Any, engine: Any, device: torch.device, masters: str, groups: str
    ) -> None:  # fmt: skip
        """`masters`, `groups`: DeepSpeed's names for the flat masters, and for the parameters in
        each."""
        super().__init__(module, zero.optimizer, device)
        self.zero, self.engine = zero, engine
        self.masters = require(zero, masters, "deepspeed")
        self.groups = require(zero, groups, "deepspeed")

    @property
    def strategy(self) -> str:
        return f"zero{self.engine.zero_optimization_stage()}"

    def optimizer_tensors(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for master, parameters in zip(self.masters, self.groups, strict=True):
            yield master, [names[id(parameter)] for parameter in parameters]


class FlatState(ZeroState):
    """ZeRO-1 and 2, and DeepSpeed's BF16_Optimizer: one flat fp32 master per parameter group. Each
    rank has a range of it, which begins and ends anywhere inside parameters."""

    def __init__(self, module: torch.nn.Module, zero: Any, engine: Any, device: torch.device) -> None:
        names = ("single_partition_of_fp32_groups", "round_robin_bit16_groups")
        if hasattr(zero, "bf16_groups"):  # BF16_Optimizer
            names = ("fp32_groups_flat_partition", "bf16_groups")
        super().__init__(module, zero, engine, device, *names)
        self._offsets: dict[int, tuple[int, int]] = {}
        """id of a parameter -> (group, its first element in the group's flat buffer)."""
        all_offsets = getattr(zero, "round_robin_bit16_offsets", None)
        for number, group in enumerate(self.groups):
            if all_offsets is None:  # BF16_Optimizer leaves no gaps
                sizes = (each.numel() for each in group)
                offsets = list(itertools.accumulate(sizes, initial=0))[:-1]
            else:
                offsets = all_offsets[number]
            for parameter, offset in zip(group, offsets, strict=True):
                self._offsets[id(parameter)] = (number, offset)

    def place(self, parameter: Any) -> Place | None:
        if not parameter.numel():
            return None  # DeepSpeed leaves it out of its groups
        number, offset = self._offsets[id(parameter)]
        master = self.masters[number]
        begin = torch.distributed.get_rank(self.zero.real_dp_process_group[number]) * master.numel()
        first = max(offset, begin)
        end = min(offset + parameter.numel(), begin + master.numel())
        if first >= end:
            return None
        return Place(master, first - begin, first - offset, end - first)

    def after_loading(self) -> None:
        self.zero.update_lp_params()


class Stage3State(ZeroState):
    """ZeRO-3: each rank has a shard of each parameter; the last ranks' shards are padded."""

    def __init__(self, module: torch.nn.Module, zero: Any, engine: Any, device: torch.device) -> None:
        for name in ("fp16_partitioned_groups_flat", "grad_position"):
            require(zero, name, "deepspeed")
        super().__init__(module, zero, engine, device, "fp32_partitioned_groups_flat", "fp16_groups")

    def place(self, parameter: Any) -> Place | None:
        group, offset, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start, count = range_of_stage3(parameter, padded)
        return Place(self.masters[group], offset, start, count) if count else None

    def before_loading(self) -> None:
        self.engine.empty_partition_cache()  # a forward pass outside the engine may have left a prefetched weight
        # also reshards the small parameters that DeepSpeed keeps gathered between steps
        self.zero.checkpoint_event_prologue()

    def after_loading(self) -> None:
        """Does what DeepSpeed's load_checkpoint does at its end."""
        zero = self.zero
        shards, groups = zero.fp16_partitioned_groups_flat, zero.fp16_partitioned_groups
        for master, compute, group in zip(self.masters, shards, groups, strict=True):
            if master.numel():
                compute.data.copy_(master.data)
            for parameter, shard in zip(group, zero.unflatten(compute, group), strict=True):
                parameter.data = shard.data
            if compute.is_cuda:  # DeepSpeed gathers in another stream, which does not wait for these copies
                torch.cuda.synchronize(compute.device)
        zero.checkpoint_event_epilogue()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor that every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def _is_elementwise(key: str, value: Any, master: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != master.shape:
        return False
    return bool(value.dim()) or key != "step"  # of a parameter without dimensions


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.as_tensor(value)


def _file_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _zeros_like(master: torch.Tensor, dtype: torch.dtype, existing: Any) -> torch.Tensor:
    """The existing state if it fits, since others may refer to it."""
    if isinstance(existing, torch.Tensor) and (existing.shape, existing.dtype) == (master.shape, dtype):
        return existing
    return torch.zeros_like(master.data, dtype=dtype)
