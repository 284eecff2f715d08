"""DeepSpeed as a state by name: in which tensors it has what, and how it is loaded."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.checkpoint.parameters import range_of_stage3, reshard
from toolkit.checkpoint.state import LiveState, MasterShard
from toolkit.utils.compat import require
from toolkit.utils.modules import unwrapped


def live_state(accelerator: Accelerator, model: Any, optimizer: Any = None) -> LiveState:
    """The state of a prepared model and optimizer; under DeepSpeed the engine's optimizer is
    taken. Reshards FSDP2's root, whose parameters stay unsharded after an evaluation."""
    module, device = unwrapped(model), accelerator.device
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        strategy = Stage3State if plugin.zero_stage == 3 else FlatState
        return strategy(module, model, device)
    reshard(module)
    return LiveState(module, getattr(optimizer, "optimizer", optimizer), device)


class ZeroState(LiveState):
    """ZeRO 1 to 3: the optimizer updates flat fp32 masters, each of many parameters."""

    MASTERS = ""
    """DeepSpeed's attribute with the flat masters."""
    GROUPS = ""
    """DeepSpeed's attribute with the parameters in each."""

    def __init__(self, module: torch.nn.Module, engine: Any, device: torch.device) -> None:
        super().__init__(module, engine.optimizer.optimizer, device)
        self.sharded = True
        self.engine = engine
        self.zero = engine.optimizer
        self.masters = require(self.zero, self.MASTERS, "deepspeed")
        self.groups = require(self.zero, self.GROUPS, "deepspeed")

    def optimizer_tensors(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for master, parameters in zip(self.masters, self.groups, strict=True):
            yield master, [names[id(parameter)] for parameter in parameters]


class FlatState(ZeroState):
    """ZeRO-1 and 2: one flat fp32 master per parameter group. Each rank has a range of it, which
    begins and ends anywhere inside parameters."""

    MASTERS = "single_partition_of_fp32_groups"
    GROUPS = "round_robin_bit16_groups"

    @functools.cached_property
    def _offsets(self) -> dict[int, tuple[int, int]]:
        """id of a parameter -> (group, its first element in the group's flat buffer)."""
        by_parameter = {}
        offsets_by_group = require(self.zero, "round_robin_bit16_offsets", "deepspeed")
        for number, offsets in enumerate(offsets_by_group):
            for parameter, offset in zip(self.groups[number], offsets, strict=True):
                by_parameter[id(parameter)] = (number, offset)
        return by_parameter

    def master_shard(self, parameter: Any) -> MasterShard | None:
        if not parameter.numel():
            return None  # DeepSpeed leaves it out of its groups
        number, offset = self._offsets[id(parameter)]
        master = self.masters[number]
        begin = (
            torch.distributed.get_rank(self.zero.real_dp_process_group[number])
            * master.numel()
        )
        first = max(offset, begin)
        end = min(offset + parameter.numel(), begin + master.numel())
        if first >= end:
            return None
        return MasterShard(master, first - begin, first - offset, end - first)

    def after_loading(self) -> None:
        self.zero.update_lp_params()


class Stage3State(ZeroState):
    """ZeRO-3: each rank has a shard of each parameter; the last ranks' shards are padded."""

    MASTERS = "fp32_partitioned_groups_flat"
    GROUPS = "fp16_groups"

    def master_shard(self, parameter: Any) -> MasterShard | None:
        positions = require(self.zero, "grad_position", "deepspeed")
        group, offset, padded = positions[self.zero.get_param_id(parameter)]
        start, count = range_of_stage3(parameter, padded)
        return MasterShard(self.masters[group], offset, start, count) if count else None

    def before_loading(self) -> None:
        # a forward pass outside the engine may have left a prefetched weight
        self.engine.empty_partition_cache()
        # also reshards the small parameters that DeepSpeed keeps gathered between steps
        self.zero.checkpoint_event_prologue()

    def after_loading(self) -> None:
        """Does what DeepSpeed's load_checkpoint does at its end."""
        zero = self.zero
        shards = require(zero, "fp16_partitioned_groups_flat", "deepspeed")
        groups = zero.fp16_partitioned_groups
        for master, compute, group in zip(self.masters, shards, groups, strict=True):
            if master.numel():
                compute.data.copy_(master.data)
            for parameter, shard in zip(group, zero.unflatten(compute, group), strict=True):
                parameter.data = shard.data
            if compute.is_cuda:
                # DeepSpeed gathers in another stream, which does not wait for these copies
                torch.cuda.synchronize(compute.device)
        zero.checkpoint_event_epilogue()
