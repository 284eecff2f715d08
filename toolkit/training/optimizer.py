"""The optimizer and its groups of parameters, a schedule counted in optimizer steps, and the strategy's own config
brought in line with the settings."""

from __future__ import annotations

import ast
import importlib
import inspect
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
from toolkit.errors import Faults, UserError, did_you_mean, first_line
from toolkit.launch import say
from toolkit.models.layers import distances, outer_layers
from toolkit.pretrained import encoder_config
from toolkit.training.lion import Lion
from toolkit.training.steps import Schedule

# transformers.Trainer's: biases and every kind of norm are not decayed
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
    "sgd": torch.optim.SGD,
}
# Of one layer: in training or not, with a mask or none, of one text or several
_MOST_GRAPHS = 32

# They look at a parameter's rows and columns, or at its norm
_NEEDS_WHOLE_PARAMETERS = ("adafactor", "came", "lamb", "lars", "muon", "shampoo", "soap")


def make_optimizer(model: torch.nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """`--optimizer` for the trained parameters. Raises UserError for one that cannot be made."""
    name = settings.optimizer
    kind, given = _optimizer_class(name), _arguments(settings.optimizer_args)
    if kind is torch.optim.AdamW:
        given = {"fused": True} | given
    groups = parameter_groups(model, settings.weight_decay, settings.learning_rate, settings.layerwise_lr_decay)
    try:
        return kind(groups, lr=settings.learning_rate, **given)
    except (TypeError, ValueError) as error:
        takes = [known for known in inspect.signature(kind).parameters if known not in ("params", "lr", "weight_decay")]
        asked = f"--optimizer {name} --optimizer_args {settings.optimizer_args}"
        raise UserError(f"{asked}: {first_line(error)}; {kind.__name__} takes {', '.join(takes)}") from error


def _optimizer_class(name: str) -> Any:
    if name.lower() in _OPTIMIZERS:
        return _OPTIMIZERS[name.lower()]
    module, _, attribute = name.rpartition(".")
    if not module:
        known = [*_OPTIMIZERS, "MODULE.CLASS"]
        raise UserError(f"--optimizer {name}{did_you_mean(name, known)}: there are {', '.join(known)}")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--optimizer {name} cannot be imported: {first_line(error)}") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError(f"--optimizer {name} is no torch.optim.Optimizer")
    return kind


def _arguments(text: str | None) -> dict[str, Any]:
    """`momentum=0.9,betas=(0.9,0.95)` as Python reads the arguments of a call; nothing in it is run."""
    try:
        call = ast.parse(f"_({text or ''})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(word.arg is None for word in call.keywords) or not isinstance(call.func, ast.Name):
            raise ValueError("each argument has a name")
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise UserError(
            f"--optimizer_args {text}: {first_line(error)}; write momentum=0.9,nesterov=True or betas=(0.9,0.95)"
        ) from error
    for name, setting in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if name in given:
            raise UserError(f"--optimizer_args {text}: {name} is --{setting}'s: give it there")
    return given


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, learning_rate: float = 0.0, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """The trained parameters as an optimizer takes them: decayed ones, and those without decay (biases, norms).

    The groups are made by name: a strategy that shards parameters leaves them without a shape. With `layer_decay`
    there are two for each layer, the head's first, and each layer's learning rate is so much of that above it (Howard
    and Ruder, 2018; Clark et al., 2020, "ELECTRA"). Raises UserError for a model without layers.
    """
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], _NO_DECAY))
    far = distances(model) if layer_decay is not None else {}
    if layer_decay is not None and not far:
        raise UserError(f"--layerwise_lr_decay {layer_decay}: {type(model).__name__} has no list of layers")
    found: dict[tuple[int, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found.setdefault((far.get(id(parameter), 0), name not in decayed), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for (distance, plain), parameters in sorted(found.items()):
        rate = {} if layer_decay is None else {"lr": learning_rate * layer_decay**distance}
        groups.append({"params": parameters, "weight_decay": 0.0 if plain else weight_decay, **rate})
    return groups


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

    Raises UserError with every number of that file that contradicts the settings, and for an optimizer that pieces of
    parameters would turn into another one.
    """
    accelerator.gradient_accumulation_steps = schedule.accumulation
    if accelerator.ddp_handler is not None:  # running means are rank 0's; constants need no broadcast at each step
        running = (buffer.is_floating_point() for _, buffer in persistent_buffers(model))
        accelerator.ddp_handler.broadcast_buffers = any(running)
    name, faults = type(optimizer).__name__, Faults()
    if name.lower().endswith(_NEEDS_WHOLE_PARAMETERS) and (accelerator.is_fsdp2 or accelerator.state.deepspeed_plugin):
        faults.add(
            f"{name} computes with whole parameters, and ZeRO and FSDP2 hand an optimizer pieces of them: its updates "
            "would be others. Launch it with accelerate_configs/ddp.yaml, or take one that works weight by weight "
            "(--optimizer adamw, lion or sgd)"
        )
    if accelerator.is_fsdp2:
        faults.raise_if_any()
        _choose_units(accelerator.state.fsdp_plugin, model)
    if settings.torch_compile:
        compile_layers(accelerator, model)
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
    for key, value in meant.items():
        if config.get(key, "auto") not in ("auto", value):
            source = names.get(key, "the settings")
            faults.add(f'the DeepSpeed config says "{key}": {config[key]}, and {source}: write "auto" in that file')
    for key in ("optimizer", "scheduler"):
        if key in config:
            faults.add(f'the DeepSpeed config has a section "{key}": remove it, the settings decide')
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


def compile_layers(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Compiles a model's layers one by one, in place: what a checkpoint holds keeps its names, and layers share their
    code. A graph takes any number of texts of any length. Raises UserError where it could not."""
    plugin, config, why = accelerator.state.deepspeed_plugin, getattr(model, "config", None), ""
    if plugin is not None and plugin.zero_stage == 3:
        why = "ZeRO-3 gathers each weight in a hook, where a graph would end: launch with zero2.yaml, ddp.yaml or fsdp2"
    elif getattr(config, "is_encoder_decoder", False):
        why = f"a {type(model).__name__} keeps keys and values that grow with each token of a title"
    elif getattr(encoder_config(config), "attention_type", "") == "block_sparse":
        why = "BigBird's sparse attention chooses its blocks anew for each length (its kernel is compiled anyway)"
    if why:
        raise UserError(f"--torch_compile cannot be used: {why}; or leave it out")
    if accelerator.device.type == "cpu":
        say(accelerator, "torch_compile: on a CPU it makes steps slower (0.86x as fast when it was measured)")
    for layer in outer_layers(model):
        layer.compile(dynamic=True, recompile_limit=_MOST_GRAPHS)


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
