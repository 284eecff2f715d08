"""Saves a model under any strategy as a Hugging Face folder, and loads such a folder's weights.

With LoRA the folder has the merged model, and the sibling folder adapter/ the adapter. A live model
of peft has, under `base_model.model.`,

    X.base_layer.weight                   frozen, of a layer X with LoRA
    X.lora_A.default.weight (r, in)       trained
    X.lora_B.default.weight (out, r)      trained
    H.original_module.*                   the head H before training
    H.modules_to_save.default.*           the trained head
    all other parameters                  frozen, under the base model's names
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.checkpoint.folder import TensorFile
from toolkit.checkpoint.parameters import tied_names
from toolkit.checkpoint.safetensors_writer import (
    DTYPES,
    cast,
    file_order,
    write_in_dtype,
)
from toolkit.checkpoint.state import LiveState
from toolkit.checkpoint.strategies import live_state
from toolkit.errors import UserError, listing
from toolkit.utils.files import read_json_object, replace_folder, write_new

ADAPTER_FOLDER = "adapter"
_MODEL_FILE, _ADAPTER_FILE = "model.safetensors", "adapter_model.safetensors"
LENGTH_FILE = "sentence_bert_config.json"  # sentence-transformers' name
_RECORD = "trainer_state.json"  # with `global_step`: as transformers' Trainer writes it
_PREFIX, _BASE, _HEAD = "base_model.model.", ".base_layer.", ".modules_to_save.default."
_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
# Fields of peft's config for variants whose merged weight is not W + scaling * B A.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "megatron_config", "arrow_config",
    "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip
# Values of init_lora_weights that change the base weights too, which checkpoints leave out.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


def save_model(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: Any,
    folder: Path,
    step: int | None = None,
    dtype: str = "fp32",
) -> None:
    """Saves config, weights and tokenizer; all processes must call it, the main one writes.

    The weights are the fp32 masters, whatever the model computes in, cast to `dtype` (a key of
    `DTYPES`). Each folder is replaced atomically. A model that is not from `transformers` is saved
    as model.safetensors, and by its own `save(folder, state_dict)` if it has one. `step`: optimizer
    steps taken, for `read_step`. Raises OSError, and UserError for a number that `dtype` cannot
    hold."""
    live = live_state(accelerator, model)
    state = _gather_weights(live)
    if live.rank == 0:
        with replace_folder(folder, overwrite=True) as draft:
            _write_model(live.module, state, draft, DTYPES[dtype])
            write_config_files(live.module, tokenizer, draft, DTYPES[dtype])
            if step is not None:
                write_new(draft / _RECORD, json.dumps(_record(step, dtype)))
        if lora_config(live.module):
            # after the model: a run that is killed in between saves both again
            with replace_folder(folder.with_name(ADAPTER_FOLDER), overwrite=True) as draft:
                _write_adapter(live.module, state, draft, DTYPES[dtype])
    accelerator.wait_for_everyone()


def _gather_weights(live: LiveState) -> dict[str, torch.Tensor]:
    """The whole state dict in rank 0's host memory; without numbers on other ranks. Collective."""
    shapes = live.weight_shapes()
    tensors = live.gather(shapes, live.weights())
    state = {name: next(tensors).cpu() for name in file_order(shapes)}
    for other, name in tied_names(live.module).items():
        state[other] = state[name]
    return state


def _write_model(
    module: Any,
    state: dict[str, torch.Tensor],
    folder: Path,
    dtype: torch.dtype,
) -> None:
    plain = module
    if lora_config(module):
        plain, state = module.get_base_model(), merge_lora(module, state)
    # transformers ties those that it declares when it loads: one that only the recipe has tied is
    # saved under both names
    tied = getattr(plain, "all_tied_weights_keys", tied_names(plain))
    once = {name: tensor for name, tensor in state.items() if name not in tied}
    _write_tensors(once, folder / _MODEL_FILE, dtype)
    if hasattr(plain, "save") and not hasattr(plain, "save_pretrained"):
        plain.save(
            folder, {name: cast(name, tensor, dtype) for name, tensor in state.items()}
        )


def _write_adapter(
    module: Any,
    state: Mapping[str, torch.Tensor],
    folder: Path,
    dtype: torch.dtype,
) -> None:
    adapter = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            adapter[_saved_name(name)] = state[name]
    _write_tensors(adapter, folder / _ADAPTER_FILE, dtype)
    write_adapter_config(module, folder)


def _write_tensors(
    state: Mapping[str, torch.Tensor], path: Path, dtype: torch.dtype
) -> None:
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    write_in_dtype(path, shapes, dtype, lambda name: [state[name]])


def write_config_files(
    module: Any,
    tokenizer: Any,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """A model folder without weights: config, tokenizer. `dtype`: in which `from_pretrained` loads
    the weights."""
    plain = module.get_base_model() if lora_config(module) else module
    config: Any = copy.deepcopy(getattr(plain, "config", None))
    if hasattr(plain, "save_pretrained"):  # a user's model class may have none
        config.architectures = [type(plain).__name__.removeprefix("FSDP")]
        config.dtype = dtype or config.dtype
        config.save_pretrained(folder)
        if plain.can_generate():  # the lengths and the beam search of generated texts
            plain.generation_config.save_pretrained(folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
        write_length(tokenizer.model_max_length, folder)


def write_length(max_length: int, folder: Path) -> None:
    """Writes the length of training, in tokens, where servers look for it: Text Embeddings
    Inference and vLLM would else read as many tokens as the model has positions."""
    content = {"max_seq_length": max_length, "do_lower_case": False}
    (folder / LENGTH_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_step(folder: Path) -> int | None:
    """The optimizer step of the weights in a model folder, if it is recorded."""
    return _read_record(folder).get("global_step")


def has_model(folder: Path, step: int, dtype: str) -> bool:
    """Whether the folder has the model of this step in this dtype."""
    return _record(step, dtype) == _read_record(folder)


def _record(step: int, dtype: str) -> dict[str, Any]:
    return {"global_step": step, "save_dtype": dtype}


def _read_record(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(UserError):
        return read_json_object(folder / _RECORD)
    return {}


def lora_config(model: torch.nn.Module) -> Any | None:
    """The LoraConfig of an unwrapped model, or None for one without LoRA."""
    if not hasattr(model, "get_base_model"):
        return None
    configs: Any = model.peft_config
    return configs.get("default")


def check_adapter(model: torch.nn.Module) -> None:
    """Raises UserError if the model has an adapter of peft that `merge_lora` cannot merge."""
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return
    config = lora_config(model)
    factors = [name for name, _ in model.named_parameters() if ".lora_" in name]
    is_plain = all(name.endswith((_LORA_A, _LORA_B)) for name in factors)
    if not config or len(configs) > 1 or config.peft_type != "LORA" or not is_plain:
        raise UserError(
            "of peft's adapters only LoRA of linear layers can be saved, made by "
            "`peft.get_peft_model(model, config)` under its default name: pass --lora_r, or merge "
            "the adapter before the training (merge_and_unload)"
        )
    variants = [field for field in _UNSUPPORTED if getattr(config, field, None)]
    initial = str(config.init_lora_weights).lower()
    if initial.startswith(_BASE_CHANGING):
        variants.append(f"init_lora_weights={initial}")
    if variants:
        remedy = "which cannot be saved: use plain LoRA"
        raise UserError(f"the model's LoRA uses {listing(variants)}, {remedy}")


def merge_lora(
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A full state dict of a `model` with LoRA, in fp32 on the CPU (on a GPU the product could be
    in TF32) -> the merged model's: W + scaling * B A (Hu et al., 2021, section 4.1)."""
    merged = {}
    for name, tensor in state.items():
        if ".lora_" in name or ".original_module." in name:
            continue
        layer = name.removesuffix(f"{_BASE}weight")
        if layer + _LORA_A in state:
            live: Any = model.get_submodule(layer)
            delta = live.scaling["default"] * (
                state[layer + _LORA_B] @ state[layer + _LORA_A]
            )
            tensor = tensor + (delta.T if live.fan_in_fan_out else delta)  # (out, in)
        merged[name.removeprefix(_PREFIX).replace(_BASE, ".").replace(_HEAD, ".")] = tensor
    return merged


def write_adapter_config(model: torch.nn.Module, folder: Path) -> None:
    """Writes adapter_config.json, for inference."""
    config: Any = copy.copy(lora_config(model))
    config.inference_mode = True
    config.save_pretrained(folder)


def load_weights(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Copies the weights that `save_model` wrote into a prepared model, for evaluation; all
    processes must call it. With LoRA those of the sibling adapter/, since all others are unchanged.

    Only the main process reads: other nodes need not have the folder."""
    live = live_state(accelerator, model)
    path = folder / _MODEL_FILE
    if lora_config(live.module):
        path = folder.with_name(ADAPTER_FOLDER) / _ADAPTER_FILE
    file = TensorFile(path, live)
    tied = tied_names(live.module)
    saved_names = {}
    for name in live.module.state_dict():
        if _saved_name(name) in file.shapes:
            saved_names[tied.get(name, name)] = _saved_name(name)
    trained = [name for name, each in live.module.named_parameters() if each.requires_grad]
    missing = [name for name in trained if name not in saved_names]
    if missing:
        remedy = "remove it, and the run saves its best model again"
        raise UserError(f"{path} lacks {listing(missing, 3)}: {remedy}")
    shapes = {
        name: shape for name, shape in live.weight_shapes().items() if name in saved_names
    }

    def read(name: str) -> torch.Tensor:
        return file.read(saved_names[name]).to(shapes[name][0])

    live.before_loading()
    live.scatter(shapes, live.weights(), read)
    live.after_loading()


def _saved_name(name: str) -> str:
    """peft's name of a live model's parameter in `adapter_model.safetensors`."""
    for factor in (".lora_A.", ".lora_B."):
        name = name.replace(f"{factor}default.", factor)
    return name.replace(_HEAD, ".")
