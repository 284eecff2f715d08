"""The training state in this rank's memory, under any strategy, as flat fragments of named parameters.

The strategy decides which elements of a parameter a rank has, and in which tensors their fp32 masters and optimizer
state are. Saving and restoring work on `Fragment`s alone: restoring a checkpoint fills each fragment with the same
elements of the saved tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from toolkit.checkpoint.tensor_index import DTYPES
from toolkit.errors import UserError
from toolkit.utils.compat import require
from toolkit.utils.files import as_json
from toolkit.utils.modules import unwrapped

TORCH_DTYPES: dict[str, torch.dtype] = {dtype: getattr(torch, name) for dtype, (_, name, _) in DTYPES.items()}
"""torch's dtypes by safetensors' names, as in `TensorIndex.dtype`."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_JSON_SCALARS = (bool, int, float, str, type(None))


@dataclass
class State:
    """An optimizer's state of one tensor, by the optimizer's keys."""

    elements: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the same shape (`exp_avg`, `momentum_buffer`)."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of another shape, such as Adafactor's rows and columns (Shazeer and Stern, 2018)."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """0-dimensional tensors, numbers, bools, strings, None (`step`)."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """Anything else: it cannot be saved."""


def split_state(
    optimizer: Any, tensor: torch.Tensor, view: Callable[[Any], torch.Tensor] = lambda values: values
) -> State:
    """An optimizer's state of a tensor, by kind; empty before the first step. `view`: of tensors of its shape."""
    state = State()
    for key, value in optimizer.state.get(tensor, {}).items():
        if not isinstance(key, str) or "." in key:
            state.unknown[str(key)] = value
        elif not isinstance(value, torch.Tensor):
            (state.scalars if isinstance(value, _JSON_SCALARS) else state.unknown)[key] = value
        elif value.dtype not in DTYPE_NAMES:
            state.unknown[key] = value
        elif value.shape == tensor.shape and (value.dim() or key != "step"):
            state.elements[key] = view(value)
        else:
            (state.factors if value.dim() else state.scalars)[key] = value
    return state


@dataclass
class Fragment:
    """Consecutive elements of one parameter (or buffer) on this rank."""

    name: str
    start: int
    """First element, in the parameter's row-major order."""
    values: torch.Tensor
    """(n,) view of the fp32 master; of the parameter itself if it is frozen."""
    state: State = field(default_factory=State)
    """Its `elements` are (n,) views. Only unsharded parameters have `factors`; all parameters of one flat master share
    the `scalars`."""


def live_state(accelerator: Accelerator, model: Any, optimizer: Any = None) -> LiveState:
    """The state of a prepared model and optimizer; under DeepSpeed the engine's optimizer is taken."""
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
                "the fp32 weights of ZeRO stage 0 in bf16 or fp16 cannot be saved by name: "
                "set zero_optimization.stage to 1 in the DeepSpeed config"
            )
        return LiveState(module, inner)
    reshard(module)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return ShardedState(module, inner)
    return LiveState(module, inner)


def reshard(module: torch.nn.Module) -> None:
    """Reshards FSDP2's modules: the root keeps its parameters unsharded from an evaluation to the next backward."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


class LiveState:
    """One process or DDP: each rank has the full state. Subclasses are the other strategies."""

    file_format = "whole"
    """`state` in the manifest: whole, slices or deepspeed (see docs/checkpoints.md)."""

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        """`optimizer`: under ZeRO the torch optimizer inside DeepSpeed's."""
        self.module, self.optimizer = module, optimizer
        self.rank, self.world = 0, 1
        if torch.distributed.is_initialized():
            self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        remember_groups(optimizer)

    @property
    def strategy(self) -> str:
        """See `CheckpointReader.strategy`."""
        return "ddp" if self.world > 1 else "single"

    def optimizer_tensors(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """The tensors that the optimizer updates, each with the names of the parameters it contains; the same names in
        the same order on all ranks."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield parameter, [name]

    def fragments(self) -> Iterator[Fragment]:
        """Fragments of all parameters on this rank, in the model's order, tied ones once; then of the buffers."""
        for name, parameter in self.module.named_parameters():
            make_fragment = self.trained_fragment if parameter.requires_grad else self.frozen_fragment
            if fragment := make_fragment(name, parameter):
                yield fragment
        for name, buffer in persistent_buffers(self.module):
            yield Fragment(name, 0, buffer.data.view(-1))

    def trained_fragment(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        """None if this rank has no element of the parameter."""
        fragment = self.frozen_fragment(name, parameter)
        if fragment is not None:
            fragment.state = split_state(self.optimizer, parameter, lambda value: _local_shard(value)[1])
        return fragment

    def frozen_fragment(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        start, local = _local_shard(parameter)
        is_whole = local.numel() == math.prod(full_shape(parameter))
        return Fragment(name, start, local) if local.numel() or is_whole else None

    def gather_weights(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Unsharded parameters (fp32 masters of trained ones) and persistent buffers in rank 0's host memory; empty on
        other ranks. Collective; one parameter at a time is on `device`."""
        fragments, weights = {fragment.name: fragment for fragment in self.fragments()}, {}
        for name, parameter in self.module.named_parameters():
            full = torch.zeros(full_shape(parameter), dtype=torch.float32, device=device)
            if fragment := fragments.get(name):
                full.view(-1).narrow(0, fragment.start, fragment.values.numel()).copy_(fragment.values)
            if self.world > 1:  # the maximum of a byte and zeros is that byte, however many ranks have it
                torch.distributed.reduce(full.view(-1).view(torch.uint8), 0, torch.distributed.ReduceOp.MAX)
            if self.rank == 0:
                weights[name] = full.cpu()
        return weights | {name: buffer.cpu() for name, buffer in persistent_buffers(self.module) if self.rank == 0}

    def before_loading(self) -> None:
        """Collective: prepares the parameters for writing into fragments."""

    def after_loading(self, steps: int) -> None:
        """Collective: copies the masters into the model's weights. `steps`: taken so far."""


class ShardedState(LiveState):
    """FSDP2: each rank has some rows of each parameter, as a DTensor."""

    file_format = "slices"
    strategy = "fsdp2"

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        super().__init__(module, optimizer)
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor) and [each.is_shard(0) for each in parameter.placements] != [True]:
                raise UserError(
                    f"{name} is sharded as {parameter.placements}, which cannot be saved: use FSDP2 without replicas "
                    "or tensor parallelism"
                )


class ZeroState(LiveState):
    """ZeRO 1 to 3: the optimizer updates flat fp32 masters, each of many parameters."""

    file_format = "deepspeed"

    def __init__(self, module: torch.nn.Module, zero: Any, engine: Any, masters: str, groups: str) -> None:
        """`masters`, `groups`: DeepSpeed's names for the flat masters, and for the parameters in each."""
        super().__init__(module, zero.optimizer)
        self.zero, self.engine = zero, engine
        self.masters, self.groups = (require(zero, name, "deepspeed") for name in (masters, groups))

    @property
    def strategy(self) -> str:
        return f"zero{self.engine.zero_optimization_stage()}"

    def optimizer_tensors(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for master, parameters in zip(self.masters, self.groups, strict=True):
            yield master, [names[id(parameter)] for parameter in parameters]

    def fragment(self, name: str, start: int, master: torch.Tensor, offset: int, count: int) -> Fragment:
        """Elements [start, start + count) of a parameter, which begin at `offset` in a flat master."""

        def narrow(flat: torch.Tensor) -> torch.Tensor:
            return flat.data.view(-1).narrow(0, offset, count)

        return Fragment(name, start, narrow(master), split_state(self.optimizer, master, narrow))

    def after_loading(self, steps: int) -> None:
        self.engine.global_steps = steps
        self.engine.global_samples = steps * self.engine.train_batch_size()


class FlatState(ZeroState):
    """ZeRO-1 and 2, and DeepSpeed's BF16_Optimizer: one flat fp32 master per parameter group. Each rank has a range of
    it, which begins and ends anywhere inside parameters."""

    def __init__(self, module: torch.nn.Module, zero: Any, engine: Any) -> None:
        names = ("single_partition_of_fp32_groups", "round_robin_bit16_groups")
        if hasattr(zero, "bf16_groups"):  # BF16_Optimizer
            names = ("fp32_groups_flat_partition", "bf16_groups")
        super().__init__(module, zero, engine, *names)
        self.offsets: dict[int, tuple[int, int]] = {}
        """id of a parameter -> (group, its first element in the group's flat buffer)."""
        for number, group in enumerate(self.groups):
            # BF16_Optimizer leaves no gaps
            without_gaps = itertools.accumulate((each.numel() for each in group), initial=0)
            offsets = getattr(zero, "round_robin_bit16_offsets", {number: list(without_gaps)[:-1]})[number]
            self.offsets |= {id(each): (number, offset) for each, offset in zip(group, offsets, strict=True)}

    def trained_fragment(self, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
        if not parameter.numel():
            return None  # DeepSpeed leaves it out of its groups
        number, offset = self.offsets[id(parameter)]
        master = self.masters[number]
        begin = torch.distributed.get_rank(self.zero.real_dp_process_group[number]) * master.numel()
        first, end = max(offset, begin), min(offset + parameter.numel(), begin + master.numel())
        return self.fragment(name, first - offset, master, first - begin, end - first) if first < end else None

    def after_loading(self, steps: int) -> None:
        self.zero.update_lp_params()
        super().after_loading(steps)


class Stage3State(ZeroState):
    """ZeRO-3: each rank has a shard of each parameter; the last ranks' shards are padded."""

    def __init__(self, module: torch.nn.Module, zero: Any, engine: Any) -> None:
        if getattr(zero, "swap_optimizer", False):
            raise UserError(
                "DeepSpeed does not save an optimizer offloaded to NVMe: set offload_optimizer.device to cpu in the "
                "DeepSpeed config"
            )
        for name in ("fp16_partitioned_groups_flat", "grad_position"):
            require(zero, name, "deepspeed")
        super().__init__(module, zero, engine, "fp32_partitioned_groups_flat", "fp16_groups")

    def trained_fragment(self, name: str, parameter: Any) -> Fragment | None:
        group, offset, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start, count = _range_of_stage3(parameter, padded)
        return self.fragment(name, start, self.masters[group], offset, count) if count else None

    def before_loading(self) -> None:
        # also reshards the small parameters that DeepSpeed keeps gathered between steps
        self.zero.checkpoint_event_prologue()

    def after_loading(self, steps: int) -> None:
        """Does what DeepSpeed's load_checkpoint does at its end."""
        zero = self.zero
        for master, compute, group in zip(
            self.masters, zero.fp16_partitioned_groups_flat, zero.fp16_partitioned_groups, strict=True
        ):
            if master.numel():
                compute.data.copy_(master.data)
            for parameter, shard in zip(group, zero.unflatten(compute, group), strict=True):
                parameter.data = shard.data
            if compute.is_cuda:  # DeepSpeed gathers in another stream, which does not wait for these copies
                torch.cuda.synchronize(compute.device)
        zero.checkpoint_event_epilogue()
        super().after_loading(steps)


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state_dict has, shared ones once. Its keys may be others: activation checkpointing strips a
    prefix there."""
    for name, buffer in module.named_buffers():
        owner, _, short = name.rpartition(".")
        if short not in module.get_submodule(owner)._non_persistent_buffers_set:
            yield name, buffer


def floating_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent ones that are not integers: running means, but not counts."""
    return ((name, buffer) for name, buffer in persistent_buffers(module) if buffer.is_floating_point())


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Another name of a parameter -> the name under which it is saved."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in parameters if first[id(parameter)] != name}


def full_shape(parameter: Any) -> tuple[int, ...]:
    """The unsharded shape of a parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _range_of_stage3(parameter: Any, padded: int) -> tuple[int, int]:
    """(first element, number of elements) of this rank's shard under ZeRO-3; `padded`: its elements with padding."""
    start = torch.distributed.get_rank(parameter.ds_process_group) * padded
    return start, max(0, min(padded, parameter.ds_numel - start))


def _local_shard(parameter: Any) -> tuple[int, torch.Tensor]:
    """(first element, (n,) view) of this rank's shard: of ZeRO-3, of a DTensor sharded by rows, or the whole tensor."""
    if hasattr(parameter, "ds_tensor"):
        start, count = _range_of_stage3(parameter, parameter.ds_tensor.numel())
        return start, parameter.ds_tensor.data.view(-1)[:count]
    if not isinstance(parameter, DTensor):
        return 0, parameter.data.view(-1)
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    row = math.prod(parameter.shape[1:])
    return (offsets[0] * row if offsets else 0), parameter.to_local().data.view(-1)


# Not an attribute of the optimizer: torch would pickle it, and DeepSpeed and accelerate wrap the optimizer.
_INITIAL_GROUPS: WeakKeyDictionary[Any, list[dict[str, Any]]] = WeakKeyDictionary()


def remember_groups(optimizer: Any) -> None:
    """Remembers the current hyperparameters of an optimizer and those it wraps, for `changed_hyperparameters`."""
    while optimizer is not None:
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in _INITIAL_GROUPS:
            defaults = optimizer.defaults if optimizer.state else {}  # its groups may have changed already
            _INITIAL_GROUPS[optimizer] = [_hyperparameters({**group, **defaults}) for group in optimizer.param_groups]
        optimizer = getattr(optimizer, "optimizer", None)


def changed_hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """The hyperparameters of each parameter group that the optimizer has changed since `remember_groups`."""
    pairs: Any = itertools.zip_longest(optimizer.param_groups, _INITIAL_GROUPS.get(optimizer, []), fillvalue={})
    return [
        {key: value for key, value in _hyperparameters(group).items() if key not in initial or value != initial[key]}
        for group, initial in pairs
    ]


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group_json(value) for key, value in group.items() if key not in ("params", "initial_lr")}


def group_json(value: Any) -> Any:
    """A hyperparameter as JSON can hold it; a tensor as a table, which `restore` makes a tensor of."""
    if isinstance(value, torch.Tensor):
        dtype = DTYPE_NAMES.get(value.dtype, value.dtype)  # a dtype is not JSON: it cannot be saved
        return {"dtype": dtype, "device": value.device.type, "values": value.tolist()}
    if isinstance(value, Mapping):
        return {key: group_json(item) for key, item in value.items()}
    return [*map(group_json, value)] if isinstance(value, list | tuple) else as_json(value)


def is_json(value: Any) -> bool:
    """Whether JSON can hold the value and give it back."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    return all(map(is_json, value)) if isinstance(value, list) else isinstance(value, _JSON_SCALARS)
