"""Masked-language models that compute logits at masked positions only."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForMaskedLM

from toolkit.data.batches import IGNORED
from toolkit.errors import UserError, listing
from toolkit.features.pretraining.settings import EncoderSettings
from toolkit.models.classifier import configure, from_pretrained, set_dropout
from toolkit.objective.losses import token_losses
from toolkit.pretrained import load_config, refuse_random


def load_masked_model(settings: EncoderSettings, seed: int) -> Any:
    """An encoder with masked-language head for batches of `MaskingCollator`, in float32 on the CPU,
    with equal weights on all ranks. Raises UserError if it cannot be loaded, or has no head and
    `new_head` is off."""
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    if config.is_encoder_decoder:
        raise UserError(f"model {name} is no encoder: take one like BERT (docs/models.md)")
    set_dropout(config, settings.dropout)
    config.tie_word_embeddings = settings.new_head or getattr(
        config, "tie_word_embeddings", True
    )
    set_seed(seed)
    attention = settings.attn_implementation
    model, loading = from_pretrained(AutoModelForMaskedLM, name, config, attention)
    prefix = f"{model.base_model_prefix}."
    missing = set(loading["missing_keys"])
    pooler = {key for key in missing if "pooler" in key}
    encoder = {key for key in missing if key.startswith(prefix)}
    refuse_random(name, encoder - pooler)
    if pooler:
        model.base_model.pooler = None  # do not save a random pooler
    head = sorted(missing - encoder)
    if head and not settings.new_head:
        why = f"has no weights of a masked-language head ({listing(head, 3)})"
        way = "take the pretrained checkpoint with its head, or pass --new_head true to train one"
        raise UserError(f"model {name} {why}: {way}")
    configure(model, settings)
    predict_masked_only(model)
    return model


def predict_masked_only(model: Any) -> None:
    """Makes a masked-language model compute `logits` (B, K, V) at the positions in the input
    `target_positions` (B, K), without that input at all positions.

    Done by hooks: parameters, their names and ties do not change."""
    model.register_forward_pre_hook(_store_positions, with_kwargs=True)
    model.base_model.register_forward_hook(_select_masked)


def _store_positions(model: Any, args: Any, inputs: dict[str, Any]) -> Any:
    model.base_model.target_positions = inputs.pop("target_positions", None)
    return args, inputs


def _select_masked(encoder: Any, _: Any, output: Any) -> None:
    """Hidden states (B, S, H) -> (B, K, H)."""
    if encoder.target_positions is not None:
        hidden = output.last_hidden_state
        places = encoder.target_positions[..., None].expand(-1, -1, hidden.shape[-1])
        output.last_hidden_state = hidden.gather(1, places)


def masked_sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(B, K, V), (B, K) -> (B, 3) float32: of each text the sum of losses, the correct tokens, and
    all masked tokens."""
    correct = (logits.argmax(-1) == labels).sum(dim=1)
    tokens = (labels != IGNORED).sum(dim=1)
    return torch.stack([token_losses(logits, labels), correct, tokens], dim=-1)
