"""The training state in the ranks' memory, under any strategy, by the parameters' own names.

The strategy decides which elements of a parameter a rank has, and in which tensor their fp32 master
and optimizer state are. `Fragment` hides that: to save is to gather each tensor from its fragments,
to resume is to fill them from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.parameters import (
    full_shape,
    local,
    local_shard,
    persistent_buffers,
)
from toolkit.checkpoint.safetensors_writer import DTYPE_NAMES, Shapes, file_order
from toolkit.errors import UserError

# DeepSpeed's implementations of AdamW: the same state, but `step` is an int.
_DEEPSPEED_ADAM = ("DeepSpeedCPUAdam", "FusedAdam")
# Keys of parameter groups that the settings of a run determine, whatever a checkpoint says.
_OF_SETTINGS = ("params", "lr", "initial_lr", "weight_decay", "betas", "eps")


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
class MasterShard:
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


class LiveState:
    """One process or DDP: each rank has the full state. FSDP2: each rank has some rows of each
    parameter, as a DTensor. Subclasses are DeepSpeed's."""

    def __init__(
        self, module: torch.nn.Module, optimizer: Any, device: torch.device
    ) -> None:
        """`optimizer`: under ZeRO the torch optimizer inside DeepSpeed's. `device`: where whole
        tensors are gathered, one at a time."""
        self.module, self.optimizer, self.device = module, optimizer, device
        self.buffers = dict(persistent_buffers(module))
        self._full_shapes = {
            name: full_shape(each) for name, each in module.named_parameters()
        }
        self.sharded = any(isinstance(each, DTensor) for each in module.parameters())
        """Whether ranks have different elements."""
        self.rank, self.world = 0, 1
        if torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
            self.world = torch.distributed.get_world_size()

    @property
    def algorithm(self) -> str:
        """The optimizer's class; AdamW for DeepSpeed's classes of it."""
        name = type(self.optimizer).__name__
        return "AdamW" if name in _DEEPSPEED_ADAM else name

    def optimizer_tensors(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """The tensors that the optimizer updates, each with the names of the parameters in it; the
        same names in the same order on all ranks."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield parameter, [name]

    def master_shard(self, parameter: Any) -> MasterShard | None:
        """None if this rank has no element of a trained parameter."""
        start, values = local_shard(parameter)
        return MasterShard(parameter, 0, start, values.numel())

    def weights(self) -> Iterator[Fragment]:
        """Of all parameters (fp32 masters of trained ones), tied ones once, and of buffers."""
        for name, shard in self._master_shards():
            yield Fragment(name, shard.start, shard.view(shard.master))
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                yield Fragment(name, *local_shard(parameter))
        for name, buffer in self.buffers.items():
            yield Fragment(name, 0, buffer.data.view(-1))

    def moments(self) -> Iterator[Fragment]:
        """Of the optimizer's state of trained parameters, numbers and tensors of other shapes
        included."""
        for name, shard in self._master_shards():
            for key, value in self.optimizer.state.get(shard.master, {}).items():
                if _is_elementwise(value, shard.master):
                    yield Fragment(f"{key}.{name}", shard.start, shard.view(value))
                else:
                    yield Fragment(f"{key}.{name}", 0, _as_tensor(value).view(-1))

    def _master_shards(self) -> Iterator[tuple[str, MasterShard]]:
        for name, parameter in self.module.named_parameters():
            shard = self.master_shard(parameter) if parameter.requires_grad else None
            if shard is not None:
                yield name, shard

    def weight_shapes(self) -> Shapes:
        """What a checkpoint holds of parameters and buffers; the same on all ranks."""
        tensors = itertools.chain(self.module.named_parameters(), self.buffers.items())
        return {
            name: (_file_dtype(tensor.dtype), full_shape(tensor))
            for name, tensor in tensors
        }

    def moment_shapes(self) -> Shapes:
        """What a checkpoint holds of the optimizer's state; the same on all ranks. Raises UserError
        for state that cannot be saved."""
        shapes: Shapes = {}
        for master, names in self.optimizer_tensors():
            for key, value in self.optimizer.state.get(master, {}).items():
                elementwise = _is_elementwise(value, master)
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
            changed = {}
            for key, value in group.items():
                if key in _OF_SETTINGS:
                    continue
                if not isinstance(value, bool | int | float | str | list | tuple | None):
                    raise self._unsavable(key, value, "in a group")
                if (
                    key not in self.optimizer.defaults
                    or value != self.optimizer.defaults[key]
                ):
                    changed[key] = value
            groups.append(changed)
        return groups

    def _check_savable(self, key: Any, value: Any, elementwise: bool, name: str) -> None:
        is_tensor = isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES
        is_number = isinstance(value, bool | int | float)
        if not isinstance(key, str) or "." in key or not (is_tensor or is_number):
            raise self._unsavable(key, value, f"of {name}")
        if self.sharded and is_tensor and value.dim() and not elementwise:
            shape = list(value.shape)
            raise self._unsavable(key, value, f"of {name} of shape {shape}, under shards")

    def _unsavable(self, key: Any, value: Any, where: str) -> UserError:
        what = f"{self.algorithm} has {key} ({type(value).__name__}) {where}"
        return UserError(f"{what}, which cannot be saved: choose another optimizer, or ddp")

    def gather(
        self, shapes: Shapes, fragments: Iterable[Fragment]
    ) -> Iterator[torch.Tensor]:
        """Yields the tensors of a file in its order, one at a time: whole on rank 0, undefined on
        the others. Collective: every rank must exhaust it."""
        fragments = list(fragments)
        by_name = {each.name: each.values for each in fragments}
        owners = self._owners(fragments)
        for name in file_order(shapes):
            dtype, shape = shapes[name]
            whole = torch.empty(
                shape if self.rank == 0 else (0,), dtype=dtype, device=self.device
            )
            for start, (rank, count) in owners.get(name, {}).items():
                if self.rank == 0:
                    part = whole.view(-1).narrow(0, start, count)
                    if rank == 0:
                        part.copy_(by_name[name])
                    else:
                        torch.distributed.recv(_bytes(part), rank)
                elif self.rank == rank:
                    torch.distributed.send(_bytes(by_name[name].to(self.device, dtype)), 0)
            yield whole

    def _owners(
        self, fragments: Iterable[Fragment]
    ) -> dict[str, dict[int, tuple[int, int]]]:
        """Name -> first element of a fragment -> (rank, number of elements). Fragments of two ranks
        are equal (the first rank is taken) or disjoint. Collective."""
        own = [(each.name, each.start, each.values.numel()) for each in fragments]
        by_rank = [own] * self.world
        if self.world > 1:
            torch.distributed.all_gather_object(by_rank, own)
        owners: dict[str, dict[int, tuple[int, int]]] = {}
        for rank, entries in enumerate(by_rank):
            for name, start, count in entries:
                if count:
                    owners.setdefault(name, {}).setdefault(start, (rank, count))
        return owners

    @torch.no_grad()
    def scatter(
        self,
        shapes: Shapes,
        fragments: Iterable[Fragment],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        """Fills this rank's fragments, one whole tensor at a time. `read`: returns a tensor by its
        name, on rank 0 alone. Collective."""
        by_name = {each.name: each for each in fragments}
        for name in file_order(shapes):
            dtype, shape = shapes[name]
            if self.rank == 0:
                whole = read(name).to(self.device).contiguous()
            else:
                whole = torch.empty(shape, dtype=dtype, device=self.device)
            if self.world > 1 and whole.numel():
                torch.distributed.broadcast(_bytes(whole), 0)
            if name in by_name:
                start, values = by_name[name].start, by_name[name].values
                values.copy_(whole.view(-1).narrow(0, start, values.numel()))

    def create_moments(self, saved: Shapes, numbers: Mapping[str, Any]) -> None:
        """Replaces the optimizer's state by that of a checkpoint: numbers with their values,
        tensors to be filled by `scatter`. `saved`: the shapes by `KEY.NAME`; `numbers`: the values
        of those without dimensions."""
        keys = dict.fromkeys(entry.partition(".")[0] for entry in saved)
        for master, names in self.optimizer_tensors():
            state = {}
            for key in keys:
                with_state = [name for name in names if f"{key}.{name}" in saved]
                if with_state:  # all of them have the same number
                    state[key] = self._moment(master, key, with_state[0], saved, numbers)
            self.optimizer.state.pop(master, None)
            if state:
                self.optimizer.state[master] = state

    def _moment(
        self,
        master: torch.Tensor,
        key: str,
        name: str,
        saved: Shapes,
        numbers: Mapping[str, Any],
    ) -> Any:
        entry = f"{key}.{name}"
        dtype, shape = saved[entry]
        if entry in numbers:
            return self._number(key, numbers[entry], dtype, master.device)
        if shape != self._full_shapes[name]:  # not elementwise: no strategy shards it
            return torch.zeros(shape, dtype=dtype, device=master.device)
        if dtype.is_floating_point:  # the file has fp32, whatever the optimizer computes in
            dtype = master.dtype
        return torch.zeros_like(master.data, dtype=dtype)

    def _number(
        self, key: str, value: Any, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """The number as the optimizer stores it: torch's in a float32 tensor, others in Python."""
        optimizer = type(self.optimizer)
        if key == "step" and optimizer.__name__ in _DEEPSPEED_ADAM:
            return int(value)  # torch's AdamW has saved a float
        # Python's float was saved in float64, its int in int64
        if dtype != torch.float32 and not optimizer.__module__.startswith("torch.optim"):
            return value
        groups = self.optimizer.param_groups
        # kernels that read the step from the parameter's device
        on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        if key == "step" and not on_device:
            device = torch.device("cpu")
        return torch.tensor(float(value), device=device)

    def before_loading(self) -> None:
        """Collective: prepares the parameters for writing into fragments."""

    def after_loading(self) -> None:
        """Collective: copies the masters into the model's weights."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor that every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def _is_elementwise(value: Any, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == master.shape


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.as_tensor(value)


def _file_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
