"""Replaces the forward pass of two modules of transformers' BigBird.

`toolkit.models.bigbird.install` sets these classes on existing instances: parameters, names, hooks and saved files do
not change. The attention depends only on the batch's length and the module's constants: a short batch does not affect
later ones, and a layer recomputed in the backward pass chooses the same.

B samples, nh heads, S tokens, H = nh * hs hidden
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output
from transformers.models.big_bird import modeling_big_bird as theirs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from toolkit.errors import UserError
from toolkit.models.attention import scaled_dot_product_attention
from toolkit.models.bigbird.attention import TILE, flex, gathered
from toolkit.models.bigbird.plan import Pattern
from toolkit.pretrained import full_attention_up_to

_SPARSE = {"gathered": gathered, "flex": flex}
ATTENTIONS = ("auto", *_SPARSE, "full")
_HIDDEN_SCORE = -10000.0  # as in transformers: finite, so that a text of only padding gives no NaN


class SparseAttention(theirs.BigBirdAttention):
    """BigBirdAttention without dense scores; `to_mask` is None, or (B, S), true except for padding."""

    fast_attention: str  # one of ATTENTIONS

    def forward(
        self, hidden_states: Tensor, *args: Any, to_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, H) -> (B, S, H), and no attention weights."""
        heads = (self.self.num_attention_heads, -1)
        projections = (self.self.query, self.self.key, self.self.value)
        query, key, value = (
            layer(hidden_states).unflatten(2, heads).transpose(1, 2) for layer in projections
        )
        attend = self._full if runs_full(self, hidden_states.shape[1]) else self._sparse
        context = (
            attend(query, key, value, to_mask).transpose(1, 2).reshape(hidden_states.shape)
        )  # (B, nh, S, hs)
        return self.output(context, hidden_states), None

    def _sparse(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        inner, length = self.self, query.shape[2]
        seed = inner.seed if self.training else 0  # in evaluation all layers read the same blocks
        pattern = Pattern(seed, inner.num_attention_heads, inner.block_size, inner.num_random_blocks,
                          inner.max_seqlen, length, self.training)  # fmt: skip
        name = self.fast_attention
        if name == "auto":
            name = "flex" if query.is_cuda and pattern.block % TILE == 0 else "gathered"
        # without attention dropout, as in transformers
        context = _SPARSE[name](query, key, value, _bias(visible, query, _HIDDEN_SCORE), pattern)
        return context if visible is None else context * visible[:, None, :, None]

    def _full(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        bias = _bias(visible, query, torch.finfo(query.dtype).min)
        mask = None if bias is None else bias[:, None, None]
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, mask, dropout)


def runs_full(part: Any, length: int) -> bool:
    """Whether a batch of `length` tokens runs full attention: by the module's setting, or as too short for sparse."""
    short = length <= full_attention_up_to(part.config.block_size, part.config.num_random_blocks)
    return short or part.fast_attention == "full" or part.attention_type != "block_sparse"


def _bias(visible: Tensor | None, like: Tensor, hidden: float) -> Tensor | None:
    """The bias of each key's scores, (B, S), in the dtype of the queries."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~visible, hidden
    )


class BigBirdModel(theirs.BigBirdModel):
    """An encoder that chooses the attention per batch. `save_pretrained` writes its name, so it is transformers'."""

    fast_attention: str  # one of ATTENTIONS

    def set_attention_type(self, value: str) -> None:
        """As in transformers, and saved with the model, which is then loaded as it was trained."""
        super().set_attention_type(value)
        self.config.attention_type = value

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As in transformers, for (B, S) ids or (B, S, H) embeddings and a mask (B, S). Raises UserError for attention
        weights, which are not computed, and for unsuitable inputs."""
        if options.get("output_attentions", self.config.output_attentions):
            raise UserError("the fast BigBird attention computes no attention weights: leave output_attentions "
                            "out, or load the model with --attn_implementation eager")  # fmt: skip
        if attention_mask is not None and attention_mask.dim() != 2:
            raise UserError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: BigBird takes (samples, tokens)"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("BigBird takes either input_ids or inputs_embeds")
        # not on a GPU, where the check synchronises
        if attention_mask is None and input_ids is not None and input_ids.device.type == "cpu":
            self.warn_if_padding_and_no_attention_mask(input_ids, None)
        embedded = {"input_ids": input_ids, "token_type_ids": token_type_ids, "position_ids": position_ids,
                    "inputs_embeds": inputs_embeds}  # fmt: skip
        outputs = self._encode(embedded, _visible(attention_mask), **options)
        if isinstance(outputs, Output) and (
            states := outputs.hidden_states
        ):  # without the padding to blocks, too
            length = outputs.last_hidden_state.shape[1]
            outputs.hidden_states = tuple(
                each if each is None else each[:, :length] for each in states
            )
        return outputs

    @merge_with_config_defaults
    @capture_outputs
    def _encode(
        self, embedded: dict[str, Tensor | None], visible: Tensor | None, **options: Any
    ) -> Output:
        ids, embeds = embedded["input_ids"], embedded["inputs_embeds"]
        tokens = (
            cast(Tensor, embeds)[..., 0] if ids is None else ids
        )  # (B, S); positions may be (1, S)
        length = tokens.shape[1]
        if not runs_full(self, length):
            visible, embedded = self._padded(tokens, visible, embedded)
        hidden = self.encoder(self.embeddings(**embedded), to_mask=visible).last_hidden_state
        pooled = None if self.pooler is None else self.activation(self.pooler(hidden[:, 0]))
        return Output(last_hidden_state=hidden[:, :length], pooler_output=pooled)

    def _padded(
        self, tokens: Tensor, visible: Tensor | None, embedded: dict[str, Tensor | None]
    ) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        """Pads the mask and the inputs to a multiple of the block, as transformers does."""
        length, block = tokens.shape[1], self.config.block_size
        missing = -length % block
        if (
            embedded["position_ids"] is None
            and length + missing > self.config.max_position_embeddings
        ):
            raise UserError(
                f"{length} tokens, padded to blocks of {block}, do not fit the {self.config.max_position_embeddings} "
                f"positions of this BigBird: pass --max_length {self.config.max_position_embeddings // block * block}"
            )
        if missing:
            embedded = {name: self._pad(name, value, missing) for name, value in embedded.items()}
            visible = torch.ones_like(tokens, dtype=torch.bool) if visible is None else visible
            visible = F.pad(visible, (0, missing))
        return visible, embedded

    def _pad(self, name: str, value: Tensor | None, missing: int) -> Tensor | None:
        """`_pad_to_block_size` without its log line, which would break a compiled graph."""
        padding = self.config.pad_token_id or 0
        if value is None:
            return None
        if name == "inputs_embeds":
            ids = torch.full((len(value), missing), padding, dtype=torch.long, device=value.device)
            return torch.cat([value, self.embeddings(ids)], dim=1)
        return F.pad(value, (0, missing), value=0 if name == "token_type_ids" else padding)


def _visible(attention_mask: Tensor | None) -> Tensor | None:
    """(B, S), true except for padding; None without padding, so that no kernel adds a bias of zeros. Masks on a GPU are
    not checked, which would synchronise: a batch without padding has no mask (`Collator`)."""
    if attention_mask is None:
        return None
    visible = attention_mask != 0
    if not torch.compiler.is_compiling() and visible.device.type == "cpu" and bool(visible.all()):
        return None
    return visible
