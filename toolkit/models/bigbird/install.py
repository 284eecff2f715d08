"""Putting the fast attention into a model, and taking it out again."""

from __future__ import annotations

from typing import TypeVar

import torch
from transformers.models.big_bird import modeling_big_bird as theirs
from transformers.utils import output_capturing

from toolkit.compat import require
from toolkit.errors import UserError, did_you_mean
from toolkit.models.bigbird.modules import ATTENTIONS, BigBirdModel, SparseAttention

Model = TypeVar("Model", bound=torch.nn.Module)


def install(model: Model, attention: str = "auto") -> Model:
    """Gives every BigBird encoder in `model` the fast attention, in place, and returns `model`.

    `model` is any BigBird of transformers (with any head, bare, wrapped, or the encoder of an EncoderDecoderModel;
    decoders are left alone). `attention`:

    - `auto`: by the device of each batch: `blocked` on a CPU, `flex` on CUDA, `gathered` elsewhere.
    - `blocked`, `gathered`, `flex`: one way to compute the same sparse attention.
    - `full`: full attention by SDPA for every length, as with `attention_type="original_full"`: other numbers.

    Raises UserError for an unknown name and a model without a sparse BigBird encoder.
    """
    if attention not in ATTENTIONS:
        raise UserError(
            f"attention={attention!r} is none of {', '.join(ATTENTIONS)}{did_you_mean(attention, ATTENTIONS)}"
        )
    encoders = [
        part for part in model.modules() if isinstance(part, theirs.BigBirdModel) and not part.config.is_decoder
    ]
    if not encoders:
        raise UserError(f"{type(model).__name__} has no BigBird encoder to make fast")
    for encoder in encoders:
        _install(encoder, attention)
    return model


def _install(encoder: theirs.BigBirdModel, attention: str) -> None:
    if encoder.config.attention_type != "block_sparse" and attention != "full":
        raise UserError("this BigBird's config.json says attention_type original_full: load it with "
                        "attention_type='block_sparse', or install attention='full'")  # fmt: skip
    encoder.set_attention_type("block_sparse")  # a short batch may have changed it, for good
    for layer in encoder.encoder.layer:
        layer.attention.__class__ = SparseAttention
        layer.attention.fast_attention = attention
    encoder.__class__ = BigBirdModel
    encoder.fast_attention = attention
    # hidden states are recorded by the name of the class, which transformers enters when it builds one
    require(output_capturing, "_CAN_RECORD_REGISTRY", "transformers")[encoder] = encoder._can_record_outputs


def uninstall(model: Model) -> Model:
    """Gives transformers' own attention back, in place, and returns `model`."""
    for part in model.modules():
        if isinstance(part, SparseAttention):
            part.__class__ = theirs.BigBirdAttention
        elif isinstance(part, BigBirdModel):
            part.__class__ = theirs.BigBirdModel
    return model
