"""Masked-language models that compute logits at masked positions only.

Done by hooks: all ranks call the same modules equally often, as sharded parameters need, and parameters, their names
and ties do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
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
    """An encoder with masked-language head for batches of `MaskingCollator`, in float32 on the CPU,
    with equal weights on all ranks. Raises UserError if it cannot be loaded, or has no head and
    `new_head` is off."""
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or config.is_encoder_decoder:
        why = f"transformers has no masked-language head for a {config.model_type}"
        raise UserError(f"model {name}: {why}: take an encoder like BERT (docs/models.md)")
    set_dropout(config, settings.dropout)
    config.tie_word_embeddings = settings.new_head or getattr(config, "tie_word_embeddings", True)
    set_seed(seed)
    attention = settings.attn_implementation
    model, loading = from_pretrained(AutoModelForMaskedLM, name, config, attention)
    missing = sorted(loading["missing_keys"])
    prefix = f"{model.base_model_prefix}."
    refuse_random(name, (key for key in missing if key.startswith(prefix) and "pooler" not in key))
    if any("pooler" in key for key in missing):
        model.base_model.pooler = None  # do not save a random pooler
    head = [key for key in missing if not key.startswith(prefix)]
    if head and not settings.new_head:
        why = f"has no weights of a masked-language head ({listing(head, 3)})"
        way = "take the pretrained checkpoint with its head, or pass --new_head true to train one"
        raise UserError(f"model {name} {why}: {way}")
    configure(model, settings)
    predict_masked_only(model, loss_fn)
    return model


class MaskedHead:
    """Selects the states of masked positions, and computes their losses, some at a time."""

    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn
        self.positions: torch.Tensor | None = None
        """(B, K), of the batch in the model; None: plain logits."""
        self.ids: torch.Tensor | None = None
        """(B, K): the original tokens there."""

    def __deepcopy__(self, memo: Any) -> MaskedHead:
        return self  # the hooks of a copied model and its output layer must share one

    def store_targets(self, _: Any, args: Any, inputs: dict[str, Any]) -> Any:
        """A hook before the model's forward."""
        self.positions = inputs.pop("target_positions", None)
        self.ids = inputs.pop("target_ids", None)
        return args, inputs

    def select_masked(self, _: Any, __: Any, output: Any) -> None:
        """A hook after the encoder's forward: (B, S, H) -> (B, K, H)."""
        if self.positions is not None:
            hidden = output.last_hidden_state
            places = self.positions[..., None].expand(-1, -1, hidden.shape[-1])
            output.last_hidden_state = hidden.gather(1, places)

    def decode(self, decoder: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The output layer's forward: (B, K, H) -> (B, K, 2); one module call for all parts."""
        if self.ids is None:
            return F.linear(hidden, decoder.weight, decoder.bias)
        states = hidden.flatten(0, 1)
        truth = self.ids.flatten()
        most = MAX_LOGITS
        if hidden.is_cuda:
            most *= 4
        rows = max(1, most // decoder.out_features)
        losses_of: Any = self.losses_of
        if len(truth) > rows and torch.is_grad_enabled():
            losses_of = partial(
                checkpoint, self.losses_of, use_reentrant=False, preserve_rng_state=False
            )
        parts = zip(states.split(rows), truth.split(rows), strict=True)
        losses = [losses_of(decoder, *part) for part in parts]
        return torch.cat(losses).view(*hidden.shape[:2], 2)

    def losses_of(self, decoder: Any, states: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """(N, H), (N,) -> (N, 2): losses, and in evaluation 1 for a correct token."""
        logits = F.linear(states, decoder.weight, decoder.bias)
        losses = self.loss_fn(logits, truth).float()
        correct = torch.zeros_like(losses)
        if not decoder.training:
            correct = (logits.argmax(-1) == truth).float()
        return torch.stack([losses, correct], dim=-1)


def predict_masked_only(model: Any, loss_fn: LossFn) -> None:
    """Makes a masked-language model accept `target_positions` and `target_ids` (B, K) and then
    return `logits` (B, K, 2): the loss of each masked token, and in evaluation 1 if the most
    probable token is correct. Raises UserError for a loss or a head that does not allow that."""
    head = MaskedHead(loss_fn)
    decoder = model.get_output_embeddings()
    training = model.training
    model.eval()
    ids = torch.full((1, 8), 3)
    with torch.no_grad(), cpu_attention(model):
        logits = model(input_ids=ids).logits[:, 2]
        expected = loss_fn(logits, ids[:, 2])
        padding = loss_fn(logits, torch.full((1,), IGNORED))
    if expected.shape != (1,):
        shape = tuple(expected.shape)
        remedy = "return one loss per token (reduction='none')"
        raise UserError(f"loss_fn returns shape {shape}: {remedy}")
    if padding.any():  # how much of it there is depends on the number of processes
        raise UserError(f"loss_fn has a loss for padding: multiply it by (truth != {IGNORED})")

    def decode(decoder: Any, hidden: torch.Tensor) -> torch.Tensor:
        return head.decode(decoder, hidden)

    model.register_forward_pre_hook(head.store_targets, with_kwargs=True)
    model.base_model.register_forward_hook(head.select_masked)
    # bound: that of a copy of the model reads the copy's weights
    decoder.forward = MethodType(decode, decoder)
    with torch.no_grad(), cpu_attention(model):
        inputs = {"target_positions": torch.tensor([[2]]), "target_ids": ids[:, 2:3]}
        try:
            probe = model(input_ids=ids, **inputs).logits
        except (RuntimeError, IndexError):  # another part of the head reads the logits
            probe = expected
    model.train(training)
    if probe.shape != (1, 1, 2) or not torch.allclose(probe[0, 0, :1], expected, atol=1e-3):
        kind = type(model).__name__
        raise UserError(f"{kind} has a masked-language head of another kind: take another encoder")
