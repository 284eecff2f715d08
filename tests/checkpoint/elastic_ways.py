"""A small model of awkward shapes, optimizers of many kinds, and all strategies, for the workers in this folder."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from toolkit.checkpoint.parameters import persistent_buffers
from toolkit.checkpoint.state import LiveState
from toolkit.checkpoint.strategies import live_state

Masters = Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Trained parameter -> (its unsharded fp32 master, its unsharded moments), without the toolkit's code."""
SAVED_AFTER, TRAINED_ON = 2, 5
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# option in a way's name -> its part of the DeepSpeed config
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "robin": {"zero_optimization": {"round_robin_gradients": True}},
    "subgroups": {"zero_optimization": {"sub_group_size": 40}},
    "persistent": {"zero_optimization": {"stage3_param_persistence_threshold": 10_000_000}},
    "offload": {"zero_optimization": OFFLOAD},
    "swapped": {"zero_optimization": {**OFFLOAD, "offload_param": {"device": "cpu"}}},
}


class Lion(torch.optim.Optimizer):
    """Chen et al. (2023): one moment for each weight; and a counter in its groups, as
    schedule-free optimizers have."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                moment = state.setdefault("exp_avg", torch.zeros_like(weight))
                weight.sub_(torch.lerp(moment, weight.grad, 0.1).sign(), alpha=group["lr"])
                moment.lerp_(weight.grad, 0.01)


ADAM = ("exp_avg", "exp_avg_sq")
# name of a model -> its optimizer, if not AdamW, and the keys of its elementwise state
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
    "momentum": (functools.partial(torch.optim.SGD, momentum=0.9), ("momentum_buffer",)),
    "lion": (Lion, ("exp_avg",)),
    "adafactor": (torch.optim.Adafactor, ("row_var", "col_var", "variance")),
}


class Odd(nn.Module):
    """Sizes that no world size divides, a tied weight, buffers of three dtypes."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 7)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        if model == "scalar":  # neither DeepSpeed nor FSDP2 takes it
            self.gain = nn.Parameter(torch.tensor(0.75))
        if model == "empty":
            self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.linspace(-1, 1, 5))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("small", torch.arange(3, dtype=torch.bfloat16))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)
        if model in ("frozen", "rows", "half"):
            self.first.bias.requires_grad_(False)
            self.second.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean += 0.25
            self.small += 1
        hidden = torch.tanh(self.first(self.embed(tokens))) * self.scale  # (B, S, 11)
        hidden = self.second(hidden) * getattr(self, "gain", 1.0)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.roll(1, 1).flatten())


@dataclass
class Way:
    state: LiveState
    engine: Any
    """Computes the loss."""
    update: Callable[[torch.Tensor], None]
    """Backward and an optimizer step."""
    masters: Masters
    close: Callable[[], None] = field(default=lambda: None)


def start_group() -> None:
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    # DeepSpeed refuses fp16 on CPU because it is slow
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    type(deepspeed.get_accelerator()).supported_dtypes = lambda _: dtypes
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True


def build(model: str, name: str) -> Way:
    """`single x1`, `ddp x2`, `fsdp x3`, `zero2-bf16-offload x2`, ..."""
    torch.manual_seed(11)
    strategy, *options = name.split()[0].split("-")
    module = Odd(model)
    make, keys = OPTIMIZERS.get(model, (torch.optim.AdamW, ADAM))
    optimizer = make(list(groups_of(module)), lr=0.01)
    if strategy.startswith("zero"):
        engine = engine_of(module, optimizer, int(strategy[-1]), options)
        return with_deepspeed(engine, options, keys)
    if strategy == "fsdp":
        return sharded_by_rows(module, make, keys)
    engine = nn.parallel.DistributedDataParallel(module) if strategy == "ddp" else module

    def masters(parameter: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        state = optimizer.state[parameter]
        return parameter.data, {key: state[key] for key in keys if key in state}

    return with_torch(engine, optimizer, masters)


def groups_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for number in range(2):
        yield {"params": parameters[number::2], "weight_decay": 0.1 * number}


def accelerator_of(plugin: Any) -> Any:
    """What `live_state` reads of an accelerator."""
    state = SimpleNamespace(deepspeed_plugin=plugin)
    return SimpleNamespace(device=torch.device("cpu"), state=state)


def with_torch(engine: Any, optimizer: Any, masters: Masters) -> Way:
    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    accelerator = accelerator_of(None)
    return Way(live_state(accelerator, engine, optimizer), engine, update, masters)


def sharded_by_rows(module: nn.Module, make: Any, keys: Sequence[str]) -> Way:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(module.second, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = make(list(groups_of(module)), lr=0.01)  # of the sharded parameters

    def masters(parameter: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        state = optimizer.state[parameter]
        return parameter.full_tensor(), {key: state[key].full_tensor() for key in keys}

    return with_torch(module, optimizer, masters)


def engine_of(module: nn.Module, optimizer: Any, stage: int, options: Sequence[str]) -> Any:
    """DeepSpeed's engine, with some of `OPTIONS`."""
    import deepspeed

    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
                              "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
                              "zero_force_ds_cpu_optimizer": False}  # fmt: skip
    for option in options:
        for key, value in OPTIONS[option].items():
            config[key] = {**config.get(key, {}), **value}
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def with_deepspeed(engine: Any, options: list[str], keys: Sequence[str]) -> Way:
    def update(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    accelerator = accelerator_of(SimpleNamespace(zero_stage=engine.zero_optimization_stage()))
    masters = flat_masters_of(engine) if "robin" in options else masters_of(engine, keys)
    return Way(live_state(accelerator, engine), engine, update, masters, engine.destroy)


def masters_of(engine: Any, keys: Sequence[str]) -> Masters:
    """By DeepSpeed's public functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    def masters(parameter: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            # DeepSpeed links the state after the first group's step
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        moments = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
        return safe_get_full_fp32_param(parameter), moments

    return masters


def flat_masters_of(engine: Any) -> Masters:
    """From the flat groups: the public functions ignore round_robin_gradients' order."""
    zero = engine.optimizer

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.detach())
        return torch.cat(parts)

    def masters(parameter: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for number, group in enumerate(zero.round_robin_bit16_groups):
            start = 0
            for other in group:
                if other is parameter:
                    flat = zero.single_partition_of_fp32_groups[number]
                    state = zero.optimizer.state[flat]
                    end = start + parameter.numel()
                    moments = {key: gather(state[key])[start:end] for key in ADAM}
                    return gather(flat)[start:end], moments
                start += other.numel()
        raise AssertionError("it is in no group")

    return masters


def take_step(way: Way, step: int) -> float:
    """One step on the same six samples whatever the world size; returns their mean loss."""
    tokens = torch.randint(13, (6, 5), generator=torch.Generator().manual_seed(100 + step))
    way.engine.train()
    loss = way.engine(tokens[dist.get_rank() :: dist.get_world_size()])
    way.update(loss)
    whole = loss.detach().double()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


def truth_of(way: Way) -> dict[str, torch.Tensor]:
    """`weight.X` (the fp32 masters), `exp_avg.X`, `exp_avg_sq.X`, `step.X`, `frozen.X`, `buffer.X`,
    unsharded, on all ranks. Fails where a weight is not its master in the model's dtype."""
    actual: dict[str, torch.Tensor] = {}
    steps = dict(sorted(_steps(way).items()))
    for name, parameter in way.state.module.named_parameters():
        copy = _unshard(parameter)
        if not parameter.requires_grad:
            actual[f"frozen.{name}"] = copy
        elif not copy.numel():
            actual[f"weight.{name}"] = copy
        else:
            master, moments = way.masters(parameter)
            for key, value in {"weight": master, **moments}.items():
                value = value.detach().clone()
                if value.numel() == copy.numel():
                    value = value.view(copy.shape)
                actual[f"{key}.{name}"] = value
            if name in steps:
                actual[f"step.{name}"] = torch.tensor(steps[name])
            assert torch.equal(copy, actual[f"weight.{name}"].to(copy.dtype)), name
    for name, buffer in persistent_buffers(way.state.module):
        actual[f"buffer.{name}"] = buffer.clone()
    return actual


def _unshard(parameter: Any) -> torch.Tensor:
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor().detach().clone()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.detach().clone()
    return parameter.data.clone()


def _steps(way: Way) -> dict[str, float]:
    """On all ranks; fails where they differ."""
    own = {}
    for each in way.state.moments():
        if each.name.startswith("step."):
            own[each.name.removeprefix("step.")] = float(each.values)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    steps: dict[str, float] = {}
    for rank in ranks:
        assert all(steps.get(name, count) == count for name, count in rank.items()), ranks
        steps |= rank
    return steps
