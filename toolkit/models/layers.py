"""Finds a model's layers and their distance from the head; keeps some, freezes or reinitializes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from toolkit.errors import UserError
from toolkit.pretrained import whole_weights


def outer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a model's `ModuleList`s, without lists nested in a layer."""
    return [layer for stack in _stacks(model) for layer in stack]


def _stacks(model: Any) -> list[list[torch.nn.Module]]:
    modules = getattr(
        model, "base_model", model
    ).named_modules()  # the rest is a head, which may have a list, too
    lists = {name: part for name, part in modules if isinstance(part, torch.nn.ModuleList)}
    outer = [
        part
        for name, part in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    ]
    outer = [part for part in outer if not all(isinstance(item, torch.nn.Linear) for item in part)]
    # Funnel's items are blocks of layers
    return [
        [
            layer
            for item in part
            for layer in (item if isinstance(item, torch.nn.ModuleList) else [item])
        ]
        for part in outer
    ]


def distances(model: torch.nn.Module) -> dict[int, int]:
    """id of a parameter -> its distance from the head: 0 for the head (and a pooler or last norm), 1 for the top layer,
    the number of layers + 1 for embeddings. A decoder's layers count separately. Empty without layers."""
    stacks = _stacks(model)
    distance_of = {
        id(parameter): len(stack) - place
        for stack in stacks
        for place, layer in enumerate(stack)
        for parameter in layer.parameters()
    }
    bottom, below = 1 + max(map(len, stacks), default=0), True
    for name, parameter in model.named_parameters() if distance_of else ():
        below = below and id(parameter) not in distance_of  # before the first layer
        if id(parameter) not in distance_of:
            distance_of[id(parameter)] = bottom if below or "embed" in name else 0
    return distance_of


def keep_layers(model: Any, count: int, name: str) -> None:
    """Keeps `count` layers, evenly spaced from the first to the last, as DistilBERT started from six of BERT's twelve
    (Sanh et al., 2019). Raises UserError if there are fewer, or they share weights."""
    layers = _layers_of(model, count, "num_hidden_layers", name)
    total = len(layers)
    places = np.linspace(0, total - 1, count).round().astype(int).tolist()
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    stack = next((part for part in lists if [*part] == layers), None)
    if stack is None:
        raise UserError(
            f"--num_hidden_layers {count}: the layers of {name} are in blocks: leave it out"
        )
    for place in sorted(set(range(total)) - set(places), reverse=True):
        del stack[place]
    for key, value in list(
        vars(model.config).items()
    ):  # lists with an entry per layer; not DeBERTa's of two kinds
        if isinstance(value, list) and len(value) == total and key != "pos_att_type":
            setattr(model.config, key, [value[place] for place in places])
    model.config.num_hidden_layers = count


def freeze_layers(model: Any, count: int, name: str, reinitialized: int = 0) -> None:
    """Freezes the embeddings and the first `count` layers. Raises UserError if there are fewer, or one of them is
    among the last ones that were `reinitialized`."""
    layers = _layers_of(model, count, "freeze_layers", name)
    if reinitialized and count + reinitialized > len(layers):
        why = f"of the {len(layers)} layers of {name} some would be random, and stay so"
        raise UserError(
            f"--freeze_layers {count} and --reinit_layers {reinitialized}: {why}: lower one of them"
        )
    distance_of = distances(model)
    for parameter in model.parameters():
        if distance_of[id(parameter)] > len(layers) - count:
            parameter.requires_grad_(False)


def reinit_layers(model: Any, count: int, name: str, seed: int) -> None:
    """Initializes the top `count` layers (and a pooler) as for pretraining, equally in every process (Zhang et al.,
    2021, "Revisiting Few-sample BERT Fine-tuning")."""
    layers = _layers_of(model, count, "reinit_layers", name)
    with torch.random.fork_rng(devices=[]), whole_weights():
        set_seed(seed)
        new_model = type(model)(model.config)
    for old, new in list(zip(layers, _longest(new_model), strict=True))[-count:]:
        old.load_state_dict(new.state_dict())
    if pooler := getattr(model.base_model, "pooler", None):
        pooler.load_state_dict(new_model.base_model.pooler.state_dict())


def _longest(model: torch.nn.Module) -> list[torch.nn.Module]:
    return max(_stacks(model), key=len, default=[])


def _layers_of(model: Any, count: int, setting: str, name: str) -> list[torch.nn.Module]:
    layers, config_count = _longest(model), getattr(model.config, "num_hidden_layers", 0)
    if len(layers) < config_count:
        raise UserError(
            f"--{setting} {count}: the {config_count} layers of {name} share their weights: leave it out"
        )
    if count > len(layers):
        raise UserError(f"--{setting} {count}: {name} has only {len(layers)} layers")
    if setting != "freeze_layers" and any(
        isinstance(layer, torch.nn.LayerNorm) for layer in outer_layers(model)
    ):
        raise UserError(
            f"--{setting} {count}: {name} (XLM) has lists of norms, not of layers: leave it out"
        )
    return layers
