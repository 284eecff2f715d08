"""Weight decay chosen by name, a schedule counted in optimizer steps, and the strategy's own config brought in
line with the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from toolkit.checkpoint.live import persistent_buffers
from toolkit.config import TrainingSettings
from toolkit.errors import Faults
from toolkit.training.steps import Schedule

# transformers.Trainer's: biases and every kind of norm are not decayed
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

# They look at a parameter's rows and columns, or at its norm
_NEEDS_WHOLE_PARAMETERS = ("adafactor", "came", "lamb", "lars", "muon", "shampoo", "soap")


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as an optimizer takes them: decayed ones, and those without decay (biases, norms).

    The groups are made by name: a strategy that shards parameters leaves them without a shape.
    """
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], _NO_DECAY))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in named if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_scheduler(optimizer: Any, settings: TrainingSettings, total_steps: int) -> AcceleratedScheduler:
    """The schedule that `--lr_scheduler_type` names, for a prepared optimizer: one step of it per optimizer step.

    An optimizer step that fp16 skips is none. It is not handed to `accelerator.prepare`, which would step it once
    per process.
    """
    warmup = settings.warmup_steps
    if warmup is None:
        warmup = math.ceil(total_steps * (settings.warmup_ratio or 0.0))
    innermost = optimizer
    while hasattr(innermost, "optimizer"):
        innermost = innermost.optimizer
    schedule = get_scheduler(
        settings.lr_scheduler_type, innermost, num_warmup_steps=warmup, num_training_steps=total_steps
    )
    return AcceleratedScheduler(schedule, optimizer, split_batches=True)  # a step counts once, not per process


def align_strategy(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, settings: TrainingSettings, schedule: Schedule
) -> None:
    """Tells the accelerator the accumulation, and a DeepSpeed config what the settings mean, where `auto`
    would mean something else (clipping at 1.0, whatever was asked) or nothing (a `model` without a config).

    Raises UserError with every number of that file that contradicts the settings, and for an optimizer that ZeRO
    would turn into another one.
    """
    accelerator.gradient_accumulation_steps = schedule.accumulation
    if accelerator.ddp_handler is not None:  # running means are rank 0's; constants need no broadcast at each step
        running = (buffer.is_floating_point() for _, buffer in persistent_buffers(model))
        accelerator.ddp_handler.broadcast_buffers = any(running)
    if accelerator.is_fsdp2:
        _choose_units(accelerator.state.fsdp_plugin, model)
    plugin, micro_batch_size = accelerator.state.deepspeed_plugin, schedule.micro_batch_size
    if plugin is None:
        return
    config = plugin.deepspeed_config
    meant: dict[str, float | bool] = {
        "gradient_clipping": settings.max_grad_norm,
        "gradient_accumulation_steps": schedule.accumulation,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "train_batch_size": micro_batch_size * schedule.accumulation * accelerator.num_processes,
    }
    names = {
        "gradient_clipping": f"--max_grad_norm {settings.max_grad_norm:g}",
        "train_batch_size": f"--global_batch_size {settings.global_batch_size}",
        "train_micro_batch_size_per_gpu": f"--per_device_batch_size {settings.per_device_batch_size}",
    }
    faults = Faults()
    for key, value in meant.items():
        if config.get(key, "auto") not in ("auto", value):
            source = names.get(key, "the settings")
            faults.add(f'the DeepSpeed config says "{key}": {config[key]}, and {source}: write "auto" in that file')
    for key in ("optimizer", "scheduler"):
        if key in config:
            faults.add(f'the DeepSpeed config has a section "{key}": remove it, the settings decide')
    name = type(optimizer).__name__
    if name.lower().endswith(_NEEDS_WHOLE_PARAMETERS):
        faults.add(
            f"{name} computes with whole parameters, and ZeRO hands an optimizer flat pieces of many: its updates "
            "would be others. Launch it with accelerate_configs/ddp.yaml, or take one that works weight by weight "
            "(AdamW, SGD)"
        )
    faults.raise_if_any()
    config.update(meant)
    config["zero_allow_untested_optimizer"] = True  # any optimizer of a recipe, not only DeepSpeed's list
    if not hasattr(getattr(model, "config", None), "hidden_size"):
        _fill_sizes(config["zero_optimization"], model)
    if plugin.zero_stage == 3:  # otherwise the final weights could not be gathered
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def _choose_units(plugin: Any, model: Any) -> None:
    """FSDP2 gathers a model's layers one at a time: `outer_layers`. transformers' `_no_split_modules`, accelerate's
    choice, names embeddings too, or nothing (BigBird)."""
    plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in outer_layers(model)})
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or model.get_input_embeddings().weight is head.weight:
        return
    if sum(parameter is head.weight for _, parameter in model.named_parameters(remove_duplicate=False)) > 1:
        # a decoder's embedding too: accelerate would give the head a unit of its own, and the weight would be in two
        model.get_output_embeddings = lambda: None


def outer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What stands in a model's `ModuleList`s, but for those inside another layer."""
    lists = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)}
    outer = [part for name, part in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return [layer for part in outer for layer in part]


def _fill_sizes(zero: dict[str, Any], model: torch.nn.Module) -> None:
    """Sizes of buckets, as accelerate takes them from a transformers model's hidden size."""
    shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in model.parameters()]
    width = max((min(shape) for shape in shapes if len(shape) > 1), default=1)
    sizes = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    zero.update({name: size for name, size in sizes.items() if zero.get(name) == "auto"})


def set_schedule(scheduler: AcceleratedScheduler, steps: int) -> None:
    """Puts the schedule where it is after so many optimizer steps: `transformers`' are functions of the step alone."""
    schedule = scheduler.scheduler
    schedule.last_epoch = steps
    schedule._step_count = steps + 1
    rates = [function(steps) * base for function, base in zip(schedule.lr_lambdas, schedule.base_lrs, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any] | None:
    """Of fp16's loss scale; None where none is used."""
    scaler = _deepspeed_scaler(optimizer)
    if scaler is not None:
        return {name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)}
    if accelerator.scaler is None:
        return None
    state = accelerator.scaler.state_dict()
    return {"cur_scale": state["scale"], "torch": state} if state else None


def set_scaler(accelerator: Accelerator, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Under another strategy the scale alone is taken over: it finds the rest within a few steps."""
    scaler = _deepspeed_scaler(optimizer)
    if state is None or not math.isfinite(state["cur_scale"]):
        return
    if scaler is not None:
        for name in _SCALER_FIELDS:
            if name in state and hasattr(scaler, name):
                setattr(scaler, name, state[name])
    elif accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(
            state.get("torch") or {**accelerator.scaler.state_dict(), "scale": state["cur_scale"]}
        )


def _deepspeed_scaler(optimizer: Any) -> Any:
    """Only where it changes: in fp32 and bf16 it is the number 1."""
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None
