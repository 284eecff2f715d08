"""LoRA by names: what peft calls the parameters of a live model, and what they add to a weight. Imports no torch.

Under `base_model.model.` a live model holds

    X.base_layer.weight                                       frozen (and X.base_layer.bias), of a layer with LoRA
    X.lora_A.NAME.weight (r, in), X.lora_B.NAME.weight (out, r)          trained
    X.lora_embedding_A.NAME (r, in), X.lora_embedding_B.NAME (out, r)    trained, of an embedding
    H.original_module.*, H.modules_to_save.NAME.*             the head before training, and the trained one
    everything else                                           frozen, under its own name

NAME is the adapter's, `default` where none was given.
"""

from __future__ import annotations

import re
from typing import Any

PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<layer>.*)\.lora_(?P<kind>embedding_)?(?P<factor>[AB])\.(?P<adapter>[^.]+)(?P<end>\.weight)?$")
_TRAINED_HEAD = re.compile(r"\.modules_to_save\.[^.]+\.")


def is_adapters(name: str) -> bool:
    """Whether a parameter of a live model belongs to the adapter: the rest is the base model's."""
    return ".lora_" in name or _TRAINED_HEAD.search(name) is not None


def stays(name: str) -> bool:
    """Whether a parameter of a live model has a place in the merged model."""
    return ".lora_" not in name and ".original_module." not in name


def merged_name(name: str) -> str:
    """A live parameter's name in the merged model."""
    return _TRAINED_HEAD.sub(".", name.removeprefix(PREFIX).replace(".base_layer.", "."))


def saved_name(name: str) -> str:
    """A live parameter's name in `adapter_model.safetensors`, as peft has it there."""
    if match := FACTOR.match(name):
        return f"{match['layer']}.lora_{match['kind'] or ''}{match['factor']}{match['end'] or ''}"
    return _TRAINED_HEAD.sub(".", name)


def weight_change(a: Any, b: Any, scaling: float) -> Any:
    """scaling * B A (Hu et al., 2021, section 4.1): what is added to a weight of shape (out, in), in the factors' kind
    (numpy's or torch's arrays, fp32)."""
    change = b @ a
    change *= scaling
    return change
