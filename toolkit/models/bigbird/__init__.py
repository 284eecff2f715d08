"""Fast, exact BigBird attention (Zaheer et al. 2020, arXiv:2007.14062) for any BigBird of transformers.

    from transformers import AutoModelForSequenceClassification
    from toolkit.models import bigbird

    model = bigbird.install(AutoModelForSequenceClassification.from_pretrained("some-bigbird"))

It computes the same as transformers' block_sparse attention in training and evaluation, with the same random blocks,
without building dense [S, S] weights, and without changing numpy's generator. Batches too short for the pattern (up to
704 tokens with blocks of 64 and 3 random blocks) run full attention, and later batches run sparse again.
`save_pretrained` writes an ordinary BigBird.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.models.big_bird import modeling_big_bird as theirs
from transformers.utils import output_capturing

from toolkit.errors import UserError, did_you_mean
from toolkit.models.bigbird.modules import ATTENTIONS, BigBirdModel, SparseAttention
from toolkit.utils.compat import require

Model = TypeVar("Model", bound=torch.nn.Module)


def install(model: Model, attention: str = "auto") -> Model:
    """Installs the fast attention in every BigBird encoder of `model`, in place, and returns `model`.

    `model` is any BigBird of transformers (bare, wrapped, with any head, or the encoder of an EncoderDecoderModel);
    decoders do not change. `attention`:

    - `auto`: `flex` for batches on CUDA, `gathered` elsewhere.
    - `gathered`, `flex`: two implementations of the same sparse attention.
    - `full`: full attention by SDPA for every length, as with `attention_type="original_full"`.

    Raises UserError for an unknown name, and for a model without a sparse BigBird encoder.
    """
    if attention not in ATTENTIONS:
        raise UserError(
            f"--attn_implementation {attention}: a BigBird has no such attention{did_you_mean(attention, ATTENTIONS)}. "
            f"It has {', '.join(ATTENTIONS)} (all tokens attend to all), and eager (transformers' own, slow)"
        )
    parts = (part for part in model.modules() if isinstance(part, theirs.BigBirdModel))
    encoders = [part for part in parts if not part.config.is_decoder]
    if not encoders:
        raise UserError(f"{type(model).__name__} has no BigBird encoder")
    for encoder in encoders:
        _install(encoder, attention)
    return model


def _install(encoder: theirs.BigBirdModel, attention: str) -> None:
    if attention != "full":
        if encoder.config.attention_type != "block_sparse":
            raise UserError("this BigBird's config.json says attention_type original_full: load it with "
                            "attention_type='block_sparse', or install attention='full'")  # fmt: skip
        encoder.set_attention_type("block_sparse")  # a short batch may have changed it
    else:
        encoder.config.attention_type = (
            "original_full"  # saved with the model, which is then loaded as it was trained
        )
    for (
        part
    ) in encoder.modules():  # the same function in one operator, which saves one tensor, not four
        if isinstance(getattr(part, "intermediate_act_fn", None), NewGELUActivation):
            part.intermediate_act_fn = GELUTanh()
    for part in (encoder, *(layer.attention for layer in encoder.encoder.layer)):
        # a subclass keeps parameters, hooks, copies and `isinstance`, and transformers' decorators of methods, which
        # record hidden states and read the config
        part.__class__ = BigBirdModel if part is encoder else SparseAttention
        part.fast_attention = attention
    # transformers registers a class for recording hidden states when it creates an instance, by this key; from 5.23 on
    # the registry makes it of the model itself
    registry = require(output_capturing, "_CAN_RECORD_REGISTRY", "transformers")
    dict.__setitem__(registry, str(type(encoder)), encoder._can_record_outputs)
