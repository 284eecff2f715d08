"""A small model of awkward shapes, optimizers of many kinds, and saving without a run; for the tests and workers in
this folder and in tests/conversion."""

import functools
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import nn

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.parameters import tied_names
from toolkit.checkpoint.state import LiveState
from toolkit.checkpoint.strategies import live_state

State = dict[str, torch.Tensor]
assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Odd(nn.Module):
    """Sizes that no world size divides, a tied weight, buffers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 7)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.linspace(-1, 1, 5))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("small", torch.arange(3, dtype=torch.bfloat16))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (B, S) -> the loss."""
        if self.training:
            self.count += 1
            self.mean += 0.25
            self.small += 1
        hidden = torch.tanh(self.first(self.embed(tokens))) * self.scale  # (B, S, 11)
        logits = self.head(self.second(hidden)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class Counting(torch.optim.SGD):
    """With momentum, and a counter in its groups, as schedule-free optimizers have."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
        super().step(closure)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "counting": functools.partial(Counting, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}


def make_peft(model: Path, **options: Any) -> Any:
    """A classifier of three labels with LoRA matrices that are not 0."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    return adapted(base, **options)


def adapted(model: Any, **options: Any) -> Any:
    import peft

    usual = {"task_type": "SEQ_CLS", "r": 3, "lora_alpha": 5, "target_modules": ["query", "value"]}
    config = peft.LoraConfig(init_lora_weights=False, **{**usual, **options})
    return peft.get_peft_model(model, config)


def accelerator_of(plugin: Any = None) -> Any:
    """What `live_state` reads of an accelerator."""
    state = SimpleNamespace(deepspeed_plugin=plugin)
    return SimpleNamespace(device=torch.device("cpu"), state=state)


def save_state(live: LiveState, folder: Path, step: int) -> None:
    """As toolkit/training/checkpoints.py; all ranks must call it."""
    tables = {
        folders.WEIGHTS_FILE: live.weight_shapes(),
        folders.OPTIMIZER_FILE: live.moment_shapes(),
    }
    optimizer = {"class": live.algorithm, "groups": live.changed_groups()}
    facts = {"step": step, "tied": tied_names(live.module), "excluded": {}, "optimizer": optimizer}
    weights, moments = tables.values()
    tensors = itertools.chain(
        live.gather(weights, live.weights()), live.gather(moments, live.moments())
    )
    if live.rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folders.save(folder, tables, tensors, facts, lambda draft: None)
    for _ in tensors:  # of other ranks
        pass


# ---- in workers

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# option in a way's name -> its part of DeepSpeed's zero_optimization
ZERO_OPTIONS: dict[str, dict[str, Any]] = {
    "aligned": {"parameter_alignment": True},
    "elastic": {"elastic_checkpoint": True},
    "hpz": {"zero_hpz_partition_size": 2},
    "offload": OFFLOAD,
    "persistent": {"stage3_param_persistence_threshold": 10_000_000},
    "robin": {"round_robin_gradients": True},
    "subgroups": {"sub_group_size": 40},
    "swapped": {**OFFLOAD, "offload_param": {"device": "cpu"}},
}


def start_group() -> None:
    # nothing to compile
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    PartialState(cpu=True)  # for accelerate's broadcasts


class Way:
    """A model and its optimizer under a strategy: `single`, `ddp`, `fsdp`, `zero2-offload`, `zero3-bf16-subgroups`."""

    def __init__(self, module: nn.Module, strategy: str, optimizer: str = "adamw") -> None:
        strategy, *options = strategy.split("-")
        self.module = self.engine = module
        self.is_zero = strategy.startswith("zero")
        if strategy == "fsdp":
            shard_by_rows(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = [{"params": trained[n::2], "weight_decay": 0.1 * n} for n in range(2)]
        self.optimizer: Any = OPTIMIZERS[optimizer](groups)
        self.plugin = None
        if strategy == "ddp":
            self.engine = nn.parallel.DistributedDataParallel(module)
        if self.is_zero:
            self._start_deepspeed(int(strategy[-1]), options)
            self.plugin = SimpleNamespace(zero_stage=int(strategy[-1]))

    def live(self) -> LiveState:
        return live_state(accelerator_of(self.plugin), self.engine, self.optimizer)

    def _start_deepspeed(self, stage: int, options: list[str]) -> None:
        import deepspeed

        zero: dict[str, Any] = {"stage": stage}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": "bf16" in options},
        }
        for option in options:
            zero.update(ZERO_OPTIONS.get(option, {}))
        if "optimizer" in options:  # DeepSpeed's BF16_Optimizer
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        self.engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=self.optimizer, config=config
        )

    def update(self, loss: torch.Tensor) -> None:
        """Backward and an optimizer step."""
        if self.is_zero:
            self.engine.backward(loss)
            self.engine.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        if self.is_zero:
            self.engine.destroy()


def shard_by_rows(module: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(module.second, mesh=mesh)
    fully_shard(module, mesh=mesh)


def whole_state(module: nn.Module) -> State:
    """Parameters, unsharded, and persistent buffers, without the toolkit's code; on all ranks."""
    persistent = module.state_dict().keys()
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: _unshard(tensor) for name, tensor in tensors if name in persistent}


def _unshard(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.data.detach().clone()
    return tensor.detach().clone()
