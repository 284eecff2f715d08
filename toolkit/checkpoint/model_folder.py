"""Saves a model under any strategy as a Hugging Face folder, and loads the folder's weights into a model.

With LoRA the folder has the merged model, and the sibling folder adapter/ the adapter. Nothing here imports peft; the
names of LoRA's parameters are in `lora`.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from safetensors.torch import save_file

from toolkit.checkpoint.live import TORCH_DTYPES, live_state, reshard, tied_names
from toolkit.checkpoint.lora import AdapterConfig, in_adapter, in_merged_model, live_name, merged_name, saved_name
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.restore import copy_elements
from toolkit.checkpoint.tensor_index import TensorIndex
from toolkit.errors import UserError, listing
from toolkit.pretrained import quiet_transformers
from toolkit.utils.compat import require
from toolkit.utils.files import make_readable, replace_folder, write_new
from toolkit.utils.modules import unwrapped

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAPTER_FOLDER = "adapter"
_STATE = "trainer_state.json"  # with `global_step`: as transformers' Trainer writes it
_BASE, _LORA_A, _LORA_B = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


def save_model(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: Any,
    folder: Path,
    step: int | None = None,
    dtype: str = "fp32",
) -> None:
    """Saves config, weights and tokenizer; all processes must call it, the main one writes.

    The weights are the fp32 masters, whatever the model computes in, cast to `dtype` (a key of `DTYPES`). Each folder
    is replaced atomically. A model that is not from `transformers` is saved as model.safetensors, and by its own
    `save(folder, state_dict)` if it has one. `step`: optimizer steps taken, for `read_step`.
    """
    module = unwrapped(model)
    state = _gather_state(accelerator, model, module)  # a collective where the parameters are sharded
    if accelerator.is_main_process:
        state |= {other: state[name] for other, name in tied_names(module).items()}
        lora = lora_config(module)
        plain = module.get_base_model() if lora else module
        merged = merge_lora(module, state) if lora else state
        with replace_folder(folder, overwrite=True) as draft, quiet_transformers():
            _save_weights(plain, _cast(merged, DTYPES[dtype]), draft)
            _set_dtype(draft / "config.json", DTYPES[dtype])
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(draft)
            if step is not None:
                write_new(draft / _STATE, json.dumps({"global_step": step}))
            make_readable(draft)
        if lora:  # after the model: if killed in between, a resumed run sees the model's step and saves both again
            with replace_folder(folder.with_name(ADAPTER_FOLDER), overwrite=True) as draft:
                trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
                # with trained biases (of LoraConfig's `bias`) and norms
                adapter = {saved_name(name): state[name] for name in state if in_adapter(name) or name in trained}
                save_file(_cast(adapter, DTYPES[dtype]), draft / "adapter_model.safetensors", metadata={"format": "pt"})
                write_adapter_config(module, draft)
                make_readable(draft)
    accelerator.wait_for_everyone()


def _gather_state(accelerator: Accelerator, model: Any, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, on the main process; tied parameters under one name or all their names."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED and model.zero_optimization_stage():
        state = live_state(accelerator, model).gather_weights(accelerator.device)
        return {name: state[name] for name in module.state_dict() if name in state}
    sharded = accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    return dict(accelerator.get_state_dict(model) if sharded else module.state_dict())


def _cast(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Contiguous tensors, the floating ones in `dtype`; tied ones stay one tensor. Raises UserError if a number
    becomes infinite."""
    casts: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) not in casts:
            cast = casts[id(tensor)] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
            if dtype == torch.float16 and not torch.equal(cast.isinf(), tensor.isinf()):
                raise UserError(f"{name} has a number that is infinite in fp16: pass --save_dtype bf16")
    return {name: casts[id(tensor)] for name, tensor in state.items()}


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """Sets the dtype in a transformers config: else `from_pretrained` would load the dtype the model computed in."""
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(config, ensure_ascii=False, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_weights(module: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
    if hasattr(module, "save_pretrained"):
        declared = getattr(module, "all_tied_weights_keys", {})
        copies: dict[str, torch.Tensor] = {}
        for other, name in tied_names(module).items():
            group = declared.get(other, other)
            if group != declared.get(name, name) and other in state:  # tied by the recipe: transformers would refuse it
                state[other] = copies.setdefault(group, state[other].clone())
        # by the model's names: transformers would write those of an older format (GTE, NomicBERT)
        with _skip_unwrapping():
            module.save_pretrained(folder, state_dict=state, save_original_format=False)
        return
    tied = tied_names(module)
    untied = {name: tensor for name, tensor in state.items() if name not in tied}
    save_file(untied, folder / "model.safetensors", metadata={"format": "pt"})
    if hasattr(module, "save"):
        module.save(folder, state)


@contextlib.contextmanager
def _skip_unwrapping() -> Iterator[None]:
    """Keeps transformers from importing DeepSpeed (0.4 s) to unwrap a module that is not wrapped."""
    from transformers import modeling_utils

    unwrap = require(modeling_utils, "unwrap_model", "transformers")
    modeling_utils.unwrap_model = lambda module: module
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap


def read_step(folder: Path) -> int | None:
    """The optimizer step of the weights in a model folder, if it is recorded."""
    try:
        return int(json.loads((folder / _STATE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def has_dtype(folder: Path, dtype: str) -> bool:
    """Whether a model folder's config records this dtype (a key of `DTYPES`), or none."""
    try:
        recorded = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
    except (OSError, ValueError, AttributeError):
        return True
    return recorded in (None, str(DTYPES[dtype]).removeprefix("torch."))


def lora_config(model: torch.nn.Module) -> Any | None:
    """The LoraConfig of an unwrapped model, or None for one without LoRA."""
    configs = getattr(model, "peft_config", None)
    return configs.get("default") if isinstance(configs, dict) and hasattr(model, "get_base_model") else None


def check_adapter(model: torch.nn.Module) -> None:
    """Raises UserError if the model has an adapter of peft that `merge_lora` cannot merge."""
    configs: Any = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return
    embeds = any(".lora_embedding_" in name for name, _ in model.named_parameters())
    if not lora_config(model) or len(configs) > 1 or configs["default"].peft_type != "LORA" or embeds:
        raise UserError(
            "of peft's adapters only LoRA of linear layers can be saved, made by `peft.get_peft_model(model, config)` "
            "under its default name: pass --lora_r, or merge the adapter before the training (merge_and_unload)"
        )
    AdapterConfig(Path("the model's LoRA"), configs["default"].to_dict()).check_mergeable(base_excluded=True)


def merge_lora(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A full state dict of a `model` with LoRA -> the merged model's: W + scaling * B A (Hu et al., 2021, section 4.1).

    Added in float32, returned in the base weight's dtype. Raises UserError for variants of LoRA with another formula.
    """
    merged: dict[str, torch.Tensor] = {}
    factors = {name for name in state if ".lora_" in name}
    for name, tensor in state.items():
        if not in_merged_model(name):
            continue
        layer = name.removesuffix(_BASE)
        if layer != name and layer + _LORA_A in factors and tensor.dim() == 2:
            live: Any = model.get_submodule(layer)
            # on a GPU this product would be in TF32
            left, right = (state[layer + factor].float().cpu() for factor in (_LORA_B, _LORA_A))
            delta = (live.scaling["default"] * (left @ right)).to(tensor.device)
            tensor = (tensor.float() + (delta.T if live.fan_in_fan_out else delta)).to(tensor.dtype)
            factors -= {layer + _LORA_A, layer + _LORA_B}
        merged[merged_name(name)] = tensor
    if factors:
        raise UserError(f"{listing(sorted(factors), 2)} cannot be merged for model/: use LoRA of linear layers")
    return merged


def write_adapter_config(model: torch.nn.Module, folder: Path) -> None:
    """Writes adapter_config.json, for inference."""
    config: Any = copy.copy(lora_config(model))
    config.inference_mode = True
    config.save_pretrained(folder)


def load_weights(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Copies a saved folder's weights into a prepared model, for evaluation; all processes must call it.

    Only the main process reads the folder: other nodes need not have it. With LoRA the sibling adapter/ is read.
    """
    plugin, module = accelerator.state.deepspeed_plugin, unwrapped(model)
    tensors = _tensors_for(module, folder) if accelerator.is_main_process else {}
    if accelerator.distributed_type != DistributedType.DEEPSPEED or plugin.zero_stage != 3:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        reshard(module)
        state: dict[str, Any] = {name: _read(tensor) for name, tensor in tensors.items()}
        distributed = torch.distributed.is_initialized()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=distributed, strict=False)
        set_model_state_dict(module, state, options=options)
        return
    import deepspeed

    engine: Any = model
    engine.empty_partition_cache()  # a forward pass outside the engine (FGM) may have left a prefetched weight
    targets = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for name in broadcast_object_list([[name for name in targets if name in tensors]])[0]:
        # on exit DeepSpeed broadcasts what the main process wrote
        with deepspeed.zero.GatheredParameters([targets[name]], modifier_rank=0), torch.no_grad():
            if accelerator.is_main_process:
                targets[name].copy_(_read(tensors[name]))
        if not hasattr(targets[name], "ds_id"):  # a buffer
            torch.distributed.broadcast(targets[name].data, 0)
    accelerator.wait_for_everyone()


def _read(tensor: TensorIndex) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
    copy_elements(whole.view(-1), tensor, 0)
    return whole


def _tensors_for(model: torch.nn.Module, folder: Path) -> dict[str, TensorIndex]:
    """A folder's tensors by the model's names; with LoRA those of the sibling adapter/: the others are unchanged."""
    expected = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected -= {*tied_names(model).values()}  # saved under one of their names
    has_lora = lora_config(model) is not None
    if has_lora:
        names = {saved_name(name): name for name in model.state_dict() if in_adapter(name)}
    else:  # a model may have LoRA layers that are not peft's
        names = {live_name(name): name for name in model.state_dict()}
    stored = open_checkpoint(folder.with_name(ADAPTER_FOLDER) if has_lora else folder).weights
    tensors = {names.get(name, name): tensor for name, tensor in stored.items()}
    if missing := sorted(expected - tensors.keys()):
        raise UserError(f"{folder} lacks {listing(missing, 3)}: remove it, and the run saves its best model again")
    return tensors
