"""Finds a model's layers and their distance from the head; keeps some, freezes or reinitializes
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from toolkit.errors import UserError
from toolkit.pretrained import whole_weights


def outer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model's encoder and decoder, without lists nested in a layer."""
    return [layer for stack in _stacks(model) for layer in stack]


def _stacks(model: Any) -> list[torch.nn.ModuleList]:
    """The encoder's and the decoder's layers; the head may have a list, too."""
    base = getattr(model, "base_model", model)
    stacks: dict[str, torch.nn.ModuleList] = {}
    for name, part in base.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(part, torch.nn.ModuleList) and not is_nested:
            stacks[name] = part
    return [
        stack
        for stack in stacks.values()
        if not all(isinstance(item, torch.nn.Linear) for item in stack)
    ]


def distances(model: torch.nn.Module) -> dict[int, int]:
    """id of a parameter -> its distance from the head: 0 for the head (and a pooler or last norm),
    1 for the top layer, the number of layers + 1 for embeddings. A decoder's layers count
    separately. Empty without layers."""
    stacks = _stacks(model)
    if not stacks:
        return {}
    distance_of = {
        id(parameter): len(stack) - place
        for stack in stacks
        for place, layer in enumerate(stack)
        for parameter in layer.parameters()
    }
    bottom = 1 + max(map(len, stacks))
    is_before_layers = True
    for name, parameter in model.named_parameters():
        if id(parameter) in distance_of:
            is_before_layers = False
        elif is_before_layers or "embed" in name:
            distance_of[id(parameter)] = bottom
        else:
            distance_of[id(parameter)] = 0
    return distance_of


def keep_layers(model: Any, count: int) -> None:
    """Keeps `count` layers, evenly spaced from the first to the last, as DistilBERT started from
    six of BERT's twelve (Sanh et al., 2019). Raises UserError if there are fewer, or they share
    weights."""
    layers = _layers_of(model, count, "num_hidden_layers")
    total = len(layers)
    places = np.linspace(0, total - 1, count).round().astype(int).tolist()
    kept = [layers[place] for place in places]
    del layers[:]
    layers.extend(kept)
    config = model.config
    for key, value in list(vars(config).items()):
        # a list with an entry per layer; DeBERTa's `pos_att_type` is none
        if isinstance(value, list) and len(value) == total and key != "pos_att_type":
            setattr(config, key, [value[place] for place in places])
    config.num_hidden_layers = count


def freeze_layers(model: Any, count: int, reinitialized: int = 0) -> None:
    """Freezes the embeddings and the first `count` layers. Raises UserError if there are fewer, or
    one of them is among the last ones that were `reinitialized`."""
    total = len(_layers_of(model, count, "freeze_layers"))
    if count + reinitialized > total:
        raise UserError(
            f"--freeze_layers {count} and --reinit_layers {reinitialized}: of {total} layers some "
            "would be random, and stay so: lower one of them"
        )
    distance_of = distances(model)
    for parameter in model.parameters():
        if distance_of[id(parameter)] > total - count:
            parameter.requires_grad_(False)


def reinit_layers(model: Any, count: int, seed: int) -> None:
    """Initializes the top `count` layers (and a pooler) as for pretraining, equally in every
    process (Zhang et al., 2021, "Revisiting Few-sample BERT Fine-tuning")."""
    layers = _layers_of(model, count, "reinit_layers")
    new_model = _new_model(model, seed)
    new_layers = _layers_of(new_model, count, "reinit_layers")
    for layer, new_layer in list(zip(layers, new_layers, strict=True))[-count:]:
        layer.load_state_dict(new_layer.state_dict())
    pooler = getattr(model.base_model, "pooler", None)
    if pooler is not None:
        pooler.load_state_dict(new_model.base_model.pooler.state_dict())


def reinit_head(model: Any, seed: int) -> None:
    """Initializes what is not the base model, equally in every process."""
    new_model = _new_model(model, seed)
    for name, part in model.named_children():
        if name != model.base_model_prefix:
            part.load_state_dict(new_model.get_submodule(name).state_dict())


def _new_model(model: Any, seed: int) -> Any:
    """One of the same class and sizes, as before pretraining."""
    with torch.random.fork_rng(devices=[]), whole_weights():
        set_seed(seed)
        return type(model)(model.config)


def _layers_of(model: Any, count: int, setting: str) -> torch.nn.ModuleList:
    """The longest stack. Raises UserError if it has fewer than `count` layers, or they share their
    weights."""
    layers = max(_stacks(model), key=len, default=torch.nn.ModuleList())
    in_config = getattr(model.config, "num_hidden_layers", 0)
    if len(layers) < in_config:
        raise UserError(
            f"--{setting} {count}: the {in_config} layers of the model share their weights: leave "
            "it out"
        )
    if count > len(layers):
        raise UserError(f"--{setting} {count}: the model has only {len(layers)} layers")
    return layers
