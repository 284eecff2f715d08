"""LoRA's parameters by name; peft merges them, one layer at a time.

A live model has, under `base_model.model.`,

    X.base_layer.weight, X.base_layer.bias                 frozen, of a layer with LoRA
    X.lora_A.default.weight, X.lora_B.default.weight, ...  trained
    X.lora_embedding_A.default, ...                        trained, of an embedding
    H.original_module.*, H.modules_to_save.default.*       a head before training, and after it

and an adapter's file X.lora_A.weight, H.*.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.conversion.model_class import ModelClass
from toolkit.conversion.stored import Checkpoint, Stored
from toolkit.errors import UserError, explain_errors, listing
from toolkit.utils.files import read_json_object
from toolkit.utils.timeouts import interrupt_after

ADAPTER_CONFIG = "adapter_config.json"
_FAULT = f"peft cannot use its {ADAPTER_CONFIG}"
PREFIX = "base_model.model."
_TRAINED_HEAD = ".modules_to_save.default."
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that change the base model's weights too."""
_SECONDS = 30.0  # to match the names of layers with a config's patterns


def is_adapted(checkpoint: Checkpoint) -> bool:
    """Whether it has an adapter of peft, of whatever kind."""
    names = r"\.lora_|^base_model\.model\.|^prompt_embeddings$"
    return any(re.search(names, name) for name in checkpoint.tensors)


def _saved_name(name: str) -> str:
    """peft's name in a file of a live model's parameter."""
    name = re.sub(r"(\.lora_\w+)\.default\b", r"\1", name.replace(_TRAINED_HEAD, "."))
    return re.sub(r"(\.lora_(?:embedding_[AB]|magnitude_vector))\.weight$", r"\1", name)


def without_lora(checkpoint: Checkpoint) -> Checkpoint:
    """What the merged model has of a live model or an adapter's file, by the base model's names."""
    names = {}
    for name in checkpoint.tensors:
        is_other_head = re.search(
            r"\.original_module\.|\.modules_to_save\.(?!default\.)", name
        )
        if ".lora_" not in name and not is_other_head:
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            names[name] = plain.replace(_TRAINED_HEAD, ".")
    return checkpoint.renamed(names)


def read_config(checkpoint: Checkpoint, folder: Path | None) -> Any:
    """peft's config of an adapter, in the folder that has one. Raises UserError if none has, and
    for an adapter that cannot be merged."""
    import peft

    if folder is None:
        remedy = "pass the folder that has it as --config_from"
        raise UserError(f"{checkpoint.path} has no {ADAPTER_CONFIG}: {remedy}")
    path = folder / ADAPTER_CONFIG
    settings = read_json_object(path)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"{path}: peft_type {kind}: only LoRA is merged here, others by peft"
        )
    start = str(settings.get("init_lora_weights")).lower()
    if start.startswith(_CHANGES_BASE) or settings.get("trainable_token_indices"):
        what = f"trainable_token_indices, or init_lora_weights {start}"
        raise UserError(
            f"{path}: {what}, changes the base model's weights: merge it with peft"
        )
    with explain_errors(f"{folder}: {_FAULT}"):
        config: Any = peft.PeftConfig.from_pretrained(str(folder))
        config.modules_to_save = list(config.modules_to_save or ())
    config.init_lora_weights = False  # nothing to compute on the meta device
    return config


def refuse_without_head(checkpoint: Checkpoint, config: Any, model: ModelClass) -> None:
    """Raises UserError if the checkpoint lacks a module that its config says was trained whole."""
    saved = model.fit(without_lora(checkpoint))
    for name in model.shapes:
        is_promised = any(f".{part}." in f".{name}" for part in config.modules_to_save)
        if is_promised and name not in saved:
            promise = f"{ADAPTER_CONFIG} says that it was trained (modules_to_save)"
            raise UserError(
                f"{checkpoint.path} lacks {name}, and its {promise}: copy it again"
            )


def merged_layers(
    checkpoint: Checkpoint, config: Any, model: ModelClass, weights: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The parameters of all layers with LoRA, each of which peft merges when it is read.

    `config`: of the adapter. `weights`: the model's without LoRA, by the class's names. Raises
    UserError if the checkpoint does not have the parameters that the config promises.
    """
    added = {}
    for name, tensor in checkpoint.tensors.items():
        if ".lora_" in name:
            added[_saved_name(name).removeprefix(PREFIX)] = tensor
    available = {**weights, **added}
    merged: dict[str, Stored] = {}
    fault = f"{checkpoint.path}: {_FAULT}"
    with explain_errors(fault), interrupt_after(_SECONDS):
        layers = _lora_layers(config, model)
    for path, layer in layers.items():
        state: dict[str, Stored] = {}
        for name, parameter in layer.named_parameters():
            saved_name = _saved_name(f"{path}.{name}".replace(".base_layer.", "."))
            shape = tuple(parameter.shape)
            if saved_name not in available or available[saved_name].shape != shape:
                missing = f"{saved_name} of shape {list(shape)}"
                raise UserError(
                    f"{checkpoint.path} lacks {missing}, which its {ADAPTER_CONFIG} promises"
                )
            state[name] = available[saved_name]
            added.pop(saved_name, None)
        for name, parameter in layer.get_base_layer().named_parameters():
            read = functools.partial(_merge, layer, state, name)
            merged[f"{path}.{name}"] = Stored(tuple(parameter.shape), torch.float32, read)
    if added:
        names = listing(sorted(added), 3)
        raise UserError(
            f"{checkpoint.path} has {names}, which its {ADAPTER_CONFIG} does not promise"
        )
    return merged


def _lora_layers(config: Any, model: ModelClass) -> dict[str, Any]:
    """The layers to which peft adds LoRA, by their names, on the meta device."""
    import peft
    from peft.tuners.lora import LoraLayer

    adapted = copy.deepcopy(model.model)
    peft.inject_adapter_in_model(config, adapted, low_cpu_mem_usage=True)
    layers = adapted.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, LoraLayer)}


def _merge(layer: Any, state: Mapping[str, Stored], name: str) -> list[torch.Tensor]:
    """A parameter of a layer with LoRA, merged in fp32."""
    layer = copy.deepcopy(layer)  # to fill the model's own would keep the memory
    weights = {key: tensor.read().float() for key, tensor in state.items()}
    layer.load_state_dict(weights, assign=True)
    layer.merge()
    return [layer.get_base_layer().get_parameter(name).detach()]
