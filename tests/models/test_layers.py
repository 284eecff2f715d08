"""toolkit/models/layers.py: layers that are kept, frozen or reinitialized, of any model."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.faults import refusal
from tests.models.test_classifier import frozen
from tests.training.test_optimizer import LAYERS, tiny
from toolkit.models.layers import freeze_layers, keep_layers, outer_layers, reinit_layers

FAMILIES = [family for family in LAYERS if family != "albert"]


def names(model: Any, layer: torch.nn.Module) -> set[str]:
    ids = {id(parameter) for parameter in layer.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_embeddings_and_the_first_layers_are_frozen(family: str, count: int) -> None:
    model = tiny(family)
    freeze_layers(model, count)
    expected = {name for name, _ in model.named_parameters() if "embed" in name}
    expected.update(*(names(model, layer) for layer in outer_layers(model)[:count]))
    assert frozen(model) == expected != set()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_top_layers_are_reinitialized_by_the_seed(family: str) -> None:
    model = tiny(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # unlike any initialization
    before = copy.deepcopy(model.state_dict())
    states = []
    for seed in (3, 3, 4):
        model.load_state_dict(before)
        state = torch.random.get_rng_state()
        reinit_layers(model, 1, seed)
        assert torch.equal(state, torch.random.get_rng_state())  # the head's weights do not change
        states.append(copy.deepcopy(model.state_dict()))
    changed = {name for name in before if not torch.equal(before[name], states[0][name])}
    top = names(model, outer_layers(model)[-1])
    assert top <= changed
    assert all("pooler" in name for name in changed - top)
    assert all(torch.equal(states[0][name], states[1][name]) for name in before)
    assert any(not torch.equal(states[0][name], states[2][name]) for name in changed)


def test_more_layers_than_the_model_has() -> None:
    """And frozen layers are not random."""
    for change in (freeze_layers, lambda model, count: reinit_layers(model, count, 1), keep_layers):
        refusal(change, tiny("bert"), 3, match="_layers 3: the model has only 2 layers")
        refusal(change, tiny("albert"), 1, match="_layers 1: the 2 layers of the model share")
    refusal(freeze_layers, tiny("bert"), 1, 2, match="--freeze_layers 1 and --reinit_layers 2")


@pytest.mark.parametrize("family", ["modernbert", "qwen3", "longformer"])
def test_kept_layers_are_evenly_spaced(family: str) -> None:
    """So are the values that the config has for each layer."""
    model: Any = torch.nn.Module()
    model.config = AutoConfig.for_model(family, num_hidden_layers=12)
    key = "attention_window" if family == "longformer" else "layer_types"
    values = ["full_attention", "sliding_attention"] * 6 if key == "layer_types" else [*range(12)]
    setattr(model.config, key, values)
    model.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Dropout()) for _ in range(12))
    before, places = list(model.layers), [0, 2, 4, 7, 9, 11]  # as DistilBERT's
    keep_layers(model, 6)
    assert [before.index(layer) for layer in model.layers] == places
    assert model.config.num_hidden_layers == 6
    assert getattr(model.config, key) == [values[place] for place in places]
