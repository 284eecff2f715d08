"""Masked-language models that compute logits at masked positions only.

Done by hooks: all ranks call the same modules equally often, as sharded parameters need, and parameters, their names
and ties do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch.utils.checkpoint import checkpoint
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM

from toolkit.data.batches import IGNORED
from toolkit.errors import UserError, listing
from toolkit.features.pretraining.settings import EncoderSettings
from toolkit.models.classifier import configure, cpu_attention, from_pretrained, set_dropout
from toolkit.pretrained import load_config, refuse_random

LossFn = Callable[
    [torch.Tensor, torch.Tensor], torch.Tensor
]  # logits (N, V), tokens (N,), some IGNORED -> (N,)
MAX_LOGITS = 1 << 24
"""Logits computed at a time on a CPU: 64 MiB in fp32. If there are more, backward recomputes them. On a GPU four times
as many, since each part reads the whole output layer."""


def token_cross_entropy(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """(N, V), (N,) -> (N,) float32, 0 for padding."""
    return F.cross_entropy(logits.float(), truth, reduction="none")


def load_masked_model(settings: EncoderSettings, tokenizer: Any, loss_fn: LossFn, seed: int) -> Any:
    """An encoder with masked-language head for batches of `MaskingCollator`, in float32 on the CPU, with equal weights
    on all ranks. Raises UserError if it cannot be loaded, or has no head and `new_head` is off."""
    name, config = str(settings.model_name_or_path), load_config(settings)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or config.is_encoder_decoder:
        why = f"transformers has no masked-language head for a {config.model_type}"
        raise UserError(f"model {name}: {why}: take an encoder like BERT (docs/models.md)")
    set_dropout(config, settings.dropout)
    config.tie_word_embeddings = settings.new_head or getattr(config, "tie_word_embeddings", True)
    set_seed(seed)
    model, loading = from_pretrained(
        AutoModelForMaskedLM, name, config, settings.attn_implementation
    )
    missing, prefix = sorted(loading["missing_keys"]), f"{model.base_model_prefix}."
    refuse_random(name, (key for key in missing if key.startswith(prefix) and "pooler" not in key))
    if any("pooler" in key for key in missing):
        model.base_model.pooler = None  # do not save a random pooler
    if (head := [key for key in missing if not key.startswith(prefix)]) and not settings.new_head:
        why = f"has no weights of a masked-language head ({listing(head, 3)})"
        way = "take the pretrained checkpoint with its head, or pass --new_head true to train a new one"
        raise UserError(f"model {name} {why}: {way}")
    configure(model, settings)
    predict_masked_only(model, loss_fn)
    return model


def predict_masked_only(model: Any, loss_fn: LossFn) -> None:
    """Makes a masked-language model accept `target_positions` and `target_ids` (B, K) and then return `logits`
    (B, K, 2): the loss of each masked token, and in evaluation 1 if the most probable token is correct."""
    masked, decoder = SimpleNamespace(positions=None, ids=None), model.get_output_embeddings()
    training, ids = model.training, torch.full((1, 8), 3)
    with torch.no_grad(), cpu_attention(model):
        logits = model.eval()(input_ids=ids).logits[:, 2]
        expected, padding = loss_fn(logits, ids[:, 2]), loss_fn(logits, torch.full((1,), IGNORED))
    if expected.shape != (1,):
        raise UserError(
            f"loss_fn returns shape {tuple(expected.shape)}: return one loss per token (reduction='none')"
        )
    if padding.any():  # how much of it there is depends on the number of processes
        raise UserError(f"loss_fn has a loss for padding: multiply it by (truth != {IGNORED})")

    def store_targets(_: Any, args: Any, inputs: dict[str, Any]) -> Any:
        masked.positions, masked.ids = (
            inputs.pop("target_positions", None),
            inputs.pop("target_ids", None),
        )
        return args, inputs

    def select_masked(_: Any, __: Any, output: Any) -> None:
        if masked.positions is not None:
            hidden = output.last_hidden_state  # (B, S, H) -> (B, K, H)
            output.last_hidden_state = hidden.gather(
                1, masked.positions[..., None].expand(-1, -1, hidden.shape[-1])
            )

    def losses_of(
        decoder: Any, states: torch.Tensor, truth: torch.Tensor
    ) -> torch.Tensor:  # (N, H), (N,) -> (N, 2)
        logits = F.linear(states, decoder.weight, decoder.bias)
        losses = loss_fn(logits, truth).float()
        correct = (
            torch.zeros_like(losses) if decoder.training else (logits.argmax(-1) == truth).float()
        )
        return torch.stack([losses, correct], dim=-1)

    def decode(decoder: Any, hidden: torch.Tensor) -> torch.Tensor:  # one module call for all parts
        if masked.ids is None:
            return F.linear(hidden, decoder.weight, decoder.bias)
        states, truth, most = (
            hidden.flatten(0, 1),
            masked.ids.flatten(),
            MAX_LOGITS * (4 if hidden.is_cuda else 1),
        )
        rows = max(1, most // decoder.out_features)
        recompute = partial(checkpoint, losses_of, use_reentrant=False, preserve_rng_state=False)
        compute = recompute if len(truth) > rows and torch.is_grad_enabled() else losses_of
        losses = [
            compute(decoder, *part)
            for part in zip(states.split(rows), truth.split(rows), strict=True)
        ]
        return torch.cat(losses).view(*hidden.shape[:2], 2)

    model.register_forward_pre_hook(store_targets, with_kwargs=True)
    model.base_model.register_forward_hook(select_masked)
    decoder.forward = MethodType(
        decode, decoder
    )  # bound: that of a copy of the model reads the copy's weights
    with torch.no_grad(), cpu_attention(model):
        try:
            probe = model(
                input_ids=ids, target_positions=torch.tensor([[2]]), target_ids=ids[:, 2:3]
            ).logits
        except (RuntimeError, IndexError):  # another part of the head reads the logits
            probe = expected
    model.train(training)
    if probe.shape != (1, 1, 2) or not torch.allclose(probe[0, 0, :1], expected, atol=1e-3):
        raise UserError(
            f"{type(model).__name__} has a masked-language head of another kind: take another encoder"
        )
