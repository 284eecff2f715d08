"""BigBird's sparse attention (Zaheer et al. 2020, arXiv:2007.14062), exact and fast, on any BigBird of transformers.

    from transformers import AutoModelForSequenceClassification
    from toolkit.models import bigbird

    model = bigbird.install(AutoModelForSequenceClassification.from_pretrained("some-bigbird"))

The numbers are those of transformers' block_sparse attention, in training and evaluation, random plan included; the
dense [S, S] weights, which it builds and throws away on each forward, are not built, and numpy's generator does not
change. A batch too short for the pattern (704 tokens or fewer at block 64 and 3 random blocks) runs full attention, and
later ones run sparse again. `save_pretrained` writes an ordinary BigBird.
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
    """Gives every BigBird encoder in `model` the fast attention, in place, and returns `model`.

    `model` is any BigBird of transformers (with any head, bare, wrapped, or the encoder of an EncoderDecoderModel;
    decoders are not changed). `attention`:

    - `auto`: by the device of each batch: `flex` on CUDA, `gathered` elsewhere.
    - `gathered`, `flex`: one way to compute the same sparse attention.
    - `full`: full attention by SDPA for every length, as with `attention_type="original_full"`: other numbers.

    Raises UserError for an unknown name and a model without a sparse BigBird encoder.
    """
    if attention not in ATTENTIONS:
        raise UserError(
            f"--attn_implementation {attention}: a BigBird has no such attention{did_you_mean(attention, ATTENTIONS)}. "
            f"It has {', '.join(ATTENTIONS)} (all tokens attend to all), and eager (transformers' own, slow)"
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
    if attention != "full":
        if encoder.config.attention_type != "block_sparse":
            raise UserError("this BigBird's config.json says attention_type original_full: load it with "
                            "attention_type='block_sparse', or install attention='full'")  # fmt: skip
        encoder.set_attention_type("block_sparse")  # a short batch may have changed it, for good
    for part in encoder.modules():  # the same function in one operator, which keeps one tensor, not four
        if isinstance(getattr(part, "intermediate_act_fn", None), NewGELUActivation):
            part.intermediate_act_fn = GELUTanh()
    for part in (encoder, *(layer.attention for layer in encoder.encoder.layer)):
        # a subclass of the very class: parameters, hooks, copies and `isinstance` stay as they are, and transformers'
        # decorators, which record hidden states and read the config, apply to methods
        part.__class__ = BigBirdModel if part is encoder else SparseAttention
        part.fast_attention = attention
    # hidden states are recorded by the name of the class, which transformers enters when it builds one
    require(output_capturing, "_CAN_RECORD_REGISTRY", "transformers")[encoder] = encoder._can_record_outputs
