"""Fast, exact BigBird attention (Zaheer et al. 2020, arXiv:2007.14062) for any BigBird of
transformers.

    from transformers import AutoModelForSequenceClassification
    from toolkit.models import bigbird

    model = bigbird.install(AutoModelForSequenceClassification.from_pretrained("some-bigbird"))

It computes the same as transformers' block_sparse attention in training and evaluation, with the
same random blocks, without building dense [S, S] weights, and without changing numpy's generator.
Batches too short for the pattern (up to 704 tokens with blocks of 64 and 3 random blocks) run full
attention, and later batches run sparse again. `save_pretrained` writes an ordinary BigBird.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.models.big_bird import modeling_big_bird as theirs
from transformers.utils import output_capturing

from toolkit.errors import UserError, did_you_mean
from toolkit.models.bigbird.modules import ATTENTIONS, BigBirdModel, SparseAttention
from toolkit.utils.compat import require

Model = TypeVar("Model", bound=torch.nn.Module)


def install(model: Model, attention: str = "auto") -> Model:
    """Installs the fast attention in every BigBird encoder of `model`, in place, and returns
    `model`.

    `model` is any BigBird of transformers (bare, wrapped, with any head, or the encoder of an
    EncoderDecoderModel); decoders do not change. `attention`:

    - `auto`: `flex` for batches on CUDA, `gathered` elsewhere.
    - `gathered`, `flex`: two implementations of the same sparse attention.
    - `full`: full attention by SDPA for every length, as with `attention_type="original_full"`.

    Raises UserError for an unknown name, and for a model without a sparse BigBird encoder.
    """
    if attention not in ATTENTIONS:
        raise UserError(
            f"--attn_implementation {attention}: a BigBird has no such attention"
            f"{did_you_mean(attention, ATTENTIONS)}. It has {', '.join(ATTENTIONS)} (all tokens "
            "attend to all), and eager (transformers' own, slow)"
        )
    encoders = list(_encoders(model))
    if not encoders:
        raise UserError(f"{type(model).__name__} has no BigBird encoder")
    for encoder in encoders:
        _install(encoder, attention)
    return model


def stay_sparse(model: torch.nn.Module) -> None:
    """For transformers' own attention, which would be full for good after its first short batch."""
    for encoder in _encoders(model):
        encoder.register_forward_pre_hook(_set_sparse)


def _set_sparse(encoder: theirs.BigBirdModel, args: Any) -> None:
    encoder.set_attention_type("block_sparse")


def _encoders(model: torch.nn.Module) -> Iterator[theirs.BigBirdModel]:
    for part in model.modules():
        if isinstance(part, theirs.BigBirdModel) and not part.config.is_decoder:
            yield part


def _install(encoder: theirs.BigBirdModel, attention: str) -> None:
    if attention == "full":
        # saved with the model, which is then loaded as it was trained
        encoder.config.attention_type = "original_full"
    elif encoder.config.attention_type == "block_sparse":
        encoder.set_attention_type("block_sparse")  # a short batch may have changed it
    else:
        raise UserError(
            "this BigBird's config.json says attention_type original_full: load it with "
            "attention_type='block_sparse', or install attention='full'"
        )
    for part in encoder.modules():
        # the same function in one operator, which saves one tensor, not four
        if isinstance(getattr(part, "intermediate_act_fn", None), NewGELUActivation):
            part.intermediate_act_fn = GELUTanh()
    # Subclasses keep parameters, hooks, copies and `isinstance`, and transformers' decorators of
    # methods, which record hidden states and read the config.
    encoder.__class__ = BigBirdModel
    encoder.fast_attention = attention
    for layer in encoder.encoder.layer:
        layer.attention.__class__ = SparseAttention
        layer.attention.fast_attention = attention
    # transformers registers a class for recording hidden states when it creates an instance, by
    # this key; from 5.23 on the registry makes it of the model itself
    registry = require(output_capturing, "_CAN_RECORD_REGISTRY", "transformers")
    dict.__setitem__(registry, str(BigBirdModel), encoder._can_record_outputs)
