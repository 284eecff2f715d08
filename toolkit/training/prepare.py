"""Prepares a model and its optimizer for the training loop: makes the config of DeepSpeed, FSDP2 or DDP match the
settings, and ZeRO reduce gradients once per step."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DynamoBackend

from toolkit import launch
from toolkit.checkpoint.model_folder import check_adapter
from toolkit.checkpoint.parameters import floating_buffers, full_shape, persistent_buffers
from toolkit.config import TrainingSettings
from toolkit.data.batches import collator_of
from toolkit.data.tokens import Split
from toolkit.errors import Faults, UserError
from toolkit.models.layers import outer_layers
from toolkit.pretrained import attention_dropout, encoder_config
from toolkit.training.checks import check_before_prepare, check_tokenizer
from toolkit.training.estimate import fit_batch_size
from toolkit.training.half_precision import (
    choose_precision,
    choose_reduction,
    keep_scale_with_gradients,
)
from toolkit.training.optimizer import make_scheduler
from toolkit.training.steps import Schedule, Steps
from toolkit.utils import memory
from toolkit.utils.compat import require

# of one layer: training or evaluation, with or without a mask, one text or several
_MAX_GRAPHS = 32
# part of a DeepSpeed config -> the values with which a run can use it, and why
_LIMITED: dict[str, tuple[list[Any], str]] = {
    **dict.fromkeys(("optimizer", "scheduler", "torch_autocast"), ([], "use the settings instead")),
    "activation_checkpointing": ([], "it has no effect: pass --gradient_checkpointing true"),
    **dict.fromkeys(("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
                    ([], "it trains with its own Adam, not with --optimizer")),
    "tensor_parallel.autotp_size": ([0, 1], "its processes would need the same texts"),
    "data_efficiency": ([], "it has no effect: the settings choose samples and tokens"),
    **dict.fromkeys(("checkpoint.writer", "datastates_ckpt"),
                    ([], "its files may be written only after the checkpoint counts as complete")),
    **dict.fromkeys(("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),
                    (["cpu", "none"], "what is on NVMe is not in a checkpoint, nor as fp32 weights in model/")),
    "zero_optimization.compute_grad_norm": ([True], "each step's gradient norm is checked"),
    "managed_gradient_accumulation": ([True], "the settings decide when gradients are reduced"),
    "data_types.grad_accum_dtype": ([None], "the precision decides it"),
    "gradient_allreduce_op": (["mean"], "a sum grows with the number of processes"),
}  # fmt: skip


def prepare(
    accelerator: Accelerator,
    settings: TrainingSettings,
    model: Any,
    optimizer: Any,
    train: Split,
    tokenizer: Any,
) -> tuple[Any, Any, AcceleratedScheduler, Steps]:
    """(model, optimizer, scheduler, steps), prepared for the strategy of this launch; all processes call this.

    First sets the tokens of a micro-batch, and replaces `--per_device_batch_size auto` by a number, in
    `steps.settings`: the strategy's config needs the number of micro-batches before `accelerator.prepare`. The schedule
    is not prepared, since accelerate would step it once per process. Raises UserError for settings, a model or an
    optimizer that the strategy cannot train.
    """
    check_tokenizer(tokenizer)
    collator_of(train, tokenizer, accelerator.device).prepare_model(accelerator, model)
    settings = settings.limit_tokens(accelerator.device.type, int(train.lengths.max()))
    settings = fit_batch_size(accelerator, model, train, tokenizer, settings)
    steps = Steps(accelerator, train, tokenizer, settings)
    align_strategy(accelerator, model, optimizer, settings, steps.schedule)
    if accelerator.is_fsdp2:
        _broadcast_weights(accelerator, model)
    launch.explain_failures(memory.explain_without_batch)
    with explain_config_errors():
        model, optimizer = accelerator.prepare(model, optimizer)
    launch.explain_failures()
    coalesce_reductions(accelerator, settings)
    steps.checks.watch(model, optimizer)
    if (settings.warmup_steps or 0) >= (total := steps.schedule.total_steps):
        line = f"--warmup_steps {settings.warmup_steps}: the run has {total} steps, and never reaches --learning_rate"
        launch.log_on_main(accelerator, line)
    return model, optimizer, make_scheduler(optimizer, settings, total), steps


def _broadcast_weights(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Gives all processes rank 0's weights, of which FSDP2 makes shards, as DDP and ZeRO do."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            on_device = tensor.detach().to(accelerator.device)
            torch.distributed.broadcast(on_device, 0)
            tensor.data.copy_(on_device)


def align_strategy(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    settings: TrainingSettings,
    schedule: Schedule,
) -> None:
    """Sets the accelerator's accumulation, and those values of a DeepSpeed config that accelerate would not set by the
    settings (clipping becomes 1.0) or not at all (for a `model` without a config).

    Raises UserError with all values of the DeepSpeed config that contradict the settings or that no run can use, for an
    accelerate config that compiles the model, flash attention in fp32, flex attention with dropout, and what
    `check_before_prepare` refuses.
    """
    if (backend := accelerator.state.dynamo_plugin.backend) != DynamoBackend.NO:
        why = f"dynamo_backend: {backend.value} in the accelerate config compiles the model, and renames its weights"
        raise UserError(f"{why}: remove it, and pass --torch_compile true")
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    if attention.startswith("flash_attention") and accelerator.mixed_precision == "no":
        raise UserError(
            f"--attn_implementation {attention} needs bf16 or fp16: pass --mixed_precision bf16"
        )
    if attention == "flex_attention" and (
        accelerator.device.type == "cpu" or attention_dropout(model.config)
    ):
        why = "has no dropout, and on a CPU no backward pass"
        raise UserError(
            f"--attn_implementation {attention} {why}: pass --dropout 0, or leave it out"
        )
    check_adapter(model)
    for tensor in (*model.parameters(), *(buffer for _, buffer in persistent_buffers(model))):
        if not tensor.is_contiguous():  # checkpoints, ZeRO and FSDP2 take its elements in a row
            tensor.data = tensor.data.contiguous()
    accelerator.gradient_accumulation_steps = schedule.accumulation
    if (
        accelerator.ddp_handler is not None
    ):  # broadcast running means, but not constants, in each step
        accelerator.ddp_handler.broadcast_buffers = any(floating_buffers(model))
    if accelerator.scaler is not None:  # the schedule would count a step that a fused kernel skips
        optimizer._step_supports_amp_scaling = False
        keep_scale_with_gradients(accelerator)
    check_before_prepare(accelerator, model, optimizer)
    faults = Faults()
    if accelerator.is_fsdp2:
        _choose_fsdp_units(accelerator, model)
    if settings.torch_compile:
        compile_layers(accelerator, model)
    choose_precision(accelerator, model, settings)
    reduced_in = choose_reduction(accelerator, settings)
    plugin, micro = accelerator.state.deepspeed_plugin, schedule.micro_batch_size
    if plugin is None:
        return
    config = plugin.deepspeed_config
    if plugin.zero_stage == 0:
        faults.add(
            'the DeepSpeed config has "zero_optimization.stage" 0: set it to 1, or launch with ddp.yaml'
        )
    samples = micro * schedule.accumulation * accelerator.num_processes
    values: dict[str, tuple[Any, str]] = {
        "gradient_clipping": (
            settings.max_grad_norm,
            f"--max_grad_norm {settings.max_grad_norm:g}",
        ),
        "gradient_accumulation_steps": (
            schedule.accumulation,
            f"the settings need {schedule.accumulation}",
        ),
        "train_micro_batch_size_per_gpu": (
            micro,
            f"--per_device_batch_size {settings.per_device_batch_size} "
            f"and --max_tokens_per_batch {settings.max_tokens_per_batch}",
        ),
        "train_batch_size": (samples, f"--global_batch_size {settings.global_batch_size}"),
    }
    if reduced_in:
        values["communication_data_type"] = (reduced_in, "--half_precision_gradients true")
    for key, (value, source) in values.items():
        if config.get(key, "auto") not in ("auto", value):
            faults.add(
                f'the DeepSpeed config has "{key}": {config[key]}, but {source}: write "auto" in that file'
            )
    for key, (usable, why) in _LIMITED.items():
        *sections, name = key.split(".")
        part = reduce(lambda part, section: part.get(section) or {}, sections, config)
        if name in part and part[name] not in usable:
            other = f" or write {json.dumps(usable[0])}" if usable else ""
            faults.add(
                f'the DeepSpeed config has "{key}": {json.dumps(part[name])}: remove it{other}: {why}'
            )
    # by default accelerate replaces any optimizer in host memory, SGD or Lion too, by DeepSpeed's Adam
    offloads = (config["zero_optimization"].get("offload_optimizer") or {}).get("device") == "cpu"
    replaces = offloads and config.get("zero_force_ds_cpu_optimizer", False)
    if replaces and type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        replaced = f"which makes an Adam of {type(optimizer).__name__}"
        faults.add(
            f'the DeepSpeed config has "zero_force_ds_cpu_optimizer": true, {replaced}: remove it'
        )
    faults.raise_if_any()
    config.update({key: value for key, (value, _) in values.items()})
    if offloads and not replaces:
        config["zero_force_ds_cpu_optimizer"] = False
    zero = {name: value for name, value in config["zero_optimization"].items() if value is not None}
    config["zero_optimization"] = zero  # accelerate fails on `"offload_optimizer": null`
    config["zero_allow_untested_optimizer"] = True  # allow optimizers outside DeepSpeed's list
    if not hasattr(getattr(model, "config", None), "hidden_size"):
        _set_bucket_sizes(zero, model)
    if plugin.zero_stage == 3:  # needed to gather the final weights
        zero["stage3_gather_16bit_weights_on_model_save"] = True


@contextlib.contextmanager
def explain_config_errors() -> Iterator[None]:
    """Raises UserError for a DeepSpeed config with an unknown key, a value of the wrong type or a removed feature."""
    try:
        yield
    except Exception as error:  # by name: DeepSpeed is imported only where it is used
        if type(error).__name__ not in ("ValidationError", "DeepSpeedConfigError"):
            raise
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "the DeepSpeed config")
        fault, *_ = " ".join(str(error).split()).split(" For further information")
        raise UserError(f"{file}: DeepSpeed refuses it: {fault}") from error


def _choose_fsdp_units(accelerator: Accelerator, model: Any) -> None:
    """Makes FSDP2 gather one layer (`outer_layers`) at a time. Accelerate's default, transformers'
    `_no_split_modules`, includes embeddings, or is empty (BigBird)."""
    plugin, layers = (
        accelerator.state.fsdp_plugin,
        {type(layer).__name__ for layer in outer_layers(model)},
    )
    if (names := plugin.transformer_cls_names_to_wrap) and set(names) != layers:
        effect = f"has no effect: the units are the model's layers ({', '.join(sorted(layers))})"
        launch.log_on_main(
            accelerator, f"fsdp_transformer_layer_cls_to_wrap: {', '.join(names)} {effect}"
        )
    plugin.transformer_cls_names_to_wrap = sorted(layers)
    # accelerate makes units of the embeddings and the head, too: a parameter with several names (tied weights, a bias
    # of BERT's head, embeddings that T5's encoder and decoder share) would be in two units
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    for name in ("get_input_embeddings", "get_output_embeddings"):
        part = getattr(model, name, lambda: None)()
        if part is not None and any(uses[id(each)] > 1 for each in part.parameters()):
            setattr(model, name, lambda: None)


def compile_layers(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Compiles each layer in place: the names of parameters do not change, and layers share their code. Graphs are
    dynamic in the number of texts and tokens. Raises UserError for models and strategies that this does not suit."""
    plugin, config, why = accelerator.state.deepspeed_plugin, getattr(model, "config", None), ""
    if plugin is not None and plugin.zero_stage == 3:
        why = "ZeRO-3 gathers each weight in a hook, which breaks the graph: launch with zero2.yaml, ddp.yaml or fsdp2"
    elif getattr(config, "is_encoder_decoder", False):
        why = f"the key-value cache of a {type(model).__name__} grows with each token of a title"
    elif getattr(encoder_config(config), "attention_type", "") == "block_sparse":
        why = "BigBird's sparse attention has different blocks for each length (its kernel is compiled anyway)"
    if why:
        raise UserError(f"--torch_compile cannot be used: {why}; or leave it out")
    if accelerator.device.type == "cpu":
        launch.log_on_main(
            accelerator, "torch_compile: on a CPU steps are slower (0.86x the speed when measured)"
        )
    # it would cut each layer in two or more graphs, to reduce gradients earlier; a layer is a graph of its own already
    torch._dynamo.config.optimize_ddp = False
    for layer in outer_layers(model):
        layer.compile(dynamic=True, recompile_limit=_MAX_GRAPHS)


def _set_bucket_sizes(zero: dict[str, Any], model: torch.nn.Module) -> None:
    """Sets the sizes as accelerate does, with the model's largest width in place of a config's `hidden_size`."""
    shapes = map(full_shape, model.parameters())
    width = max((min(shape) for shape in shapes if len(shape) > 1), default=1)
    sizes = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    zero.update({name: size for name, size in sizes.items() if zero.get(name) == "auto"})


def coalesce_reductions(accelerator: Accelerator, settings: TrainingSettings) -> None:
    """Makes ZeRO-2 and ZeRO-3 reduce gradients once per optimizer step, as DDP does, not after each micro-batch. Call
    this after `accelerator.prepare`. Until the last micro-batch each process accumulates unsharded gradients, 4 bytes
    per trained parameter.

    Does nothing for 16-bit weights, which are meant to save memory, and for ZeRO-1, which reduces once anyway. See
    DeepSpeed's pull request 7992.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return
    wrapper, block = accelerator.deepspeed_engine_wrapped, contextlib.ExitStack()
    engine, each_batch = wrapper.engine, settings.sync_each_batch
    is_half = any(
        each.dtype != torch.float32 for each in engine.module.parameters() if each.requires_grad
    )
    if plugin.zero_stage == 1 and each_batch:
        launch.log_on_main(
            accelerator, "sync_each_batch: ZeRO-1 reduces gradients once a step all the same"
        )
    elif plugin.zero_stage > 1 and is_half and each_batch is False:
        line = "sync_each_batch: with 16-bit weights ZeRO reduces gradients after each micro-batch"
        launch.log_on_main(accelerator, line)
    if plugin.zero_stage < 2 or each_batch or is_half:
        return

    def backward(loss: torch.Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """`DeepSpeedEngineWrapper.backward`, with all micro-batches of a step in one `coalesce_grad_reduction`."""
        if not sync_gradients and not engine.inside_no_sync_ctxt:
            block.enter_context(engine.coalesce_grad_reduction())
        engine.set_gradient_accumulation_boundary(sync_gradients)
        engine.backward(loss, **options)
        if sync_gradients:
            block.close()  # reduces
            engine.set_gradient_accumulation_boundary(True)  # leaving the block has reset it
            engine.step()

    require(wrapper, "backward", "accelerate")
    require(engine, "coalesce_grad_reduction", "deepspeed")
    wrapper.backward = backward
