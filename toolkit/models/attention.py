"""Installs a model's attention, and spares a GPU casts and synchronisations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from toolkit.pretrained import encoder_config


def choose_attention(model: Any, attention: str | None) -> None:
    """Installs an attention in a BigBird encoder, by default the fast one; `eager` is
    transformers'. In other models only casts and checks become fewer. Raises UserError for an
    unknown name."""
    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _mask_without_check)
    share_casts(model)
    config = encoder_config(model.config)
    if config.model_type != "big_bird":
        return
    from toolkit.models import bigbird  # takes a second

    is_sparse = config.attention_type == "block_sparse"
    if attention != "eager":
        bigbird.install(model, attention or ("auto" if is_sparse else "full"))
    elif is_sparse:
        bigbird.stay_sparse(model)


def _mask_without_check(
    *args: Any, attention_mask: Tensor | None = None, **options: Any
) -> Any:
    """transformers' mask of `sdpa` attention. On a GPU, where it would synchronise, it does not
    check whether anything is masked: our batches have a mask only with padding."""
    if attention_mask is not None and attention_mask.device.type != "cpu":
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, attention_mask=attention_mask, **options)


def share_casts(model: torch.nn.Module) -> None:
    """Makes autocast cast the input of a layer's query, key and value once, not three times.

    Outputs do not change; the three gradients of that input are added before they are cast back,
    not after. A step of BERT-base with 256 texts of 128 tokens took 0.95 of the time on an H100.
    Modules that have more than these three are left as they are: ALBERT's adds its input to its
    output.
    """
    for part in model.modules():
        layers = {
            name: type(layer)
            for name, layer in part.named_children()
            if next(layer.parameters(), None) is not None
        }
        if layers == dict.fromkeys(("query", "key", "value"), torch.nn.Linear):
            part.register_forward_pre_hook(_cast_input)


def _cast_input(attention: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    device = args[0].device.type if args else "meta"
    casts = device != "meta" and torch.is_autocast_enabled(device)
    if not casts or args[0].dtype != torch.float32:
        return args
    return (args[0].to(torch.get_autocast_dtype(device)), *args[1:])
