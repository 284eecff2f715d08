"""LoRA's parameters by name, and adapters merged by peft, one layer at a time.

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
from toolkit.errors import UserError, listing
from toolkit.utils.files import read_table

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
_TRAINED_HEAD = ".modules_to_save.default."
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that change the base model's weights too."""


def adapter_tensors(checkpoint: Checkpoint, config: Path) -> dict[str, Stored]:
    """What peft's adapter_model.safetensors holds. Raises UserError if other parameters were
    trained."""
    biases = {"all": ".bias", "lora_only": ".base_layer.bias"}
    bias = biases.get(str(read_table(config, {}).get("bias")), "\n")
    tensors = {}
    others = []
    for name, tensor in checkpoint.tensors.items():
        is_bias = name.endswith(bias) and ".original_module." not in name
        if ".lora_" in name or _TRAINED_HEAD in name or is_bias:
            tensors[_saved_name(name)] = tensor
        else:
            others.append(name)
    if others and checkpoint.excluded:  # without what is frozen, all of it was trained
        fault = f"{listing(others, 3)} was trained and is not part of the adapter"
        raise UserError(f"{checkpoint.path}: {fault}: pass --merge_lora")
    return tensors


def _saved_name(name: str) -> str:
    """peft's name in a file of a live model's parameter."""
    name = re.sub(r"(\.lora_\w+)\.default\b", r"\1", name.replace(_TRAINED_HEAD, "."))
    return re.sub(r"(\.lora_(?:embedding_[AB]|magnitude_vector))\.weight$", r"\1", name)


def without_lora(checkpoint: Checkpoint) -> Checkpoint:
    """What the merged model has of a live model or an adapter's file, by the base model's names."""
    names = {}
    for name in checkpoint.tensors:
        is_other_head = re.search(r"\.original_module\.|\.modules_to_save\.(?!default\.)", name)
        if ".lora_" not in name and not is_other_head:
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            names[name] = plain.replace(_TRAINED_HEAD, ".")
    return checkpoint.renamed(names)


def merged_layers(
    checkpoint: Checkpoint, config: Path, model: ModelClass, weights: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The parameters of all layers with LoRA, each of which peft merges when it is read.

    `weights`: the model's without LoRA, by the class's names. Raises UserError if the checkpoint
    does not have the parameters that the adapter's config promises.
    """
    import peft
    from peft.tuners.lora import LoraLayer

    settings: Any = peft.PeftConfig.from_pretrained(str(config.parent))
    start = str(getattr(settings, "init_lora_weights", "")).lower()
    if start.startswith(_CHANGES_BASE):
        raise UserError(f"{config}: {start} changes the base model's weights: merge it with peft")
    settings.init_lora_weights = False  # nothing to compute on the meta device
    available = dict(weights)
    for name, tensor in checkpoint.tensors.items():
        if ".lora_" in name:
            available[_saved_name(name).removeprefix(PREFIX)] = tensor
    unused = available.keys() - weights.keys()
    injected = copy.deepcopy(model.model)
    peft.inject_adapter_in_model(settings, injected, low_cpu_mem_usage=True)
    merged: dict[str, Stored] = {}
    for path, layer in injected.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        state: dict[str, Stored] = {}
        for name, parameter in layer.named_parameters():
            saved_name = _saved_name(f"{path}.{name}".replace(".base_layer.", "."))
            shape = tuple(parameter.shape)
            if saved_name not in available or available[saved_name].shape != shape:
                missing = f"{saved_name} of shape {list(shape)}"
                raise UserError(f"{checkpoint.path} lacks {missing}, which {config} promises")
            state[name] = available[saved_name]
            unused.discard(saved_name)
        for name, parameter in layer.get_base_layer().named_parameters():
            read = functools.partial(_merge, layer, state, name)
            merged[f"{path}.{name}"] = Stored(tuple(parameter.shape), torch.float32, read)
    if unused:
        names = listing(sorted(unused), 3)
        raise UserError(f"{checkpoint.path} has {names}, which {config} does not promise")
    return merged


def _merge(layer: Any, state: Mapping[str, Stored], name: str) -> list[torch.Tensor]:
    """A parameter of a layer with LoRA, merged in fp32."""
    layer = copy.deepcopy(layer)  # to fill the model's own would keep the memory
    weights = {key: tensor.read().float() for key, tensor in state.items()}
    layer.load_state_dict(weights, assign=True)
    layer.merge()
    return [layer.get_base_layer().get_parameter(name).detach()]
