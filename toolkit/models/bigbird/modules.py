"""Replaces the forward pass of two modules of transformers' BigBird.

`toolkit.models.bigbird.install` sets these classes on existing instances: parameters, names, hooks
and saved files do not change. The attention depends only on the batch's length and the module's
constants: a short batch does not affect later ones, and a layer recomputed in the backward pass
chooses the same.

B samples, nh heads, S tokens, H = nh * hs hidden
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions as Output,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.big_bird import modeling_big_bird as theirs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from toolkit.errors import UserError
from toolkit.models.bigbird.attention import TILE, flex, gathered
from toolkit.models.bigbird.plan import Pattern
from toolkit.pretrained import full_attention_up_to

_SPARSE = {"gathered": gathered, "flex": flex}
ATTENTIONS = ("auto", *_SPARSE, "full")
# as in transformers: finite, so that a text of only padding gives no NaN
_HIDDEN_SCORE = -10000.0


class SparseAttention(theirs.BigBirdAttention):
    """BigBirdAttention without dense scores; `to_mask` is None, or (B, S), true except for
    padding."""

    fast_attention: str  # one of ATTENTIONS

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        to_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, H) -> (B, S, H), and no attention weights."""
        query, key, value = (
            layer(hidden_states)
            .unflatten(2, (self.self.num_attention_heads, -1))
            .transpose(1, 2)
            for layer in (self.self.query, self.self.key, self.self.value)
        )
        is_full = runs_full(self, hidden_states.shape[1])
        attend = self._full if is_full else self._sparse
        context = attend(query, key, value, to_mask)  # (B, S, nh, hs)
        return self.output(context.reshape(hidden_states.shape), hidden_states), None

    def _sparse(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None
    ) -> Tensor:
        """Without attention dropout, as in transformers."""
        inner = self.self
        pattern = Pattern(
            # in evaluation all layers read the same blocks
            seed=inner.seed if self.training else 0,
            heads=inner.num_attention_heads,
            block=inner.block_size,
            random=inner.num_random_blocks,
            longest=inner.max_seqlen,
            length=query.shape[2],
            training=self.training,
        )
        name = self.fast_attention
        if name == "auto":
            name = "flex" if query.is_cuda and pattern.block % TILE == 0 else "gathered"
        context = _SPARSE[name](
            query, key, value, _bias(visible, query, _HIDDEN_SCORE), pattern
        )
        context = context.transpose(1, 2)
        return context if visible is None else context * visible[:, :, None, None]

    def _full(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None
    ) -> Tensor:
        bias = _bias(visible, query, torch.finfo(query.dtype).min)
        mask = None if bias is None else bias[:, None, None]
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        context, _ = attend(self, query, key, value, mask, dropout=dropout, is_causal=False)
        return context


def runs_full(part: Any, length: int) -> bool:
    """Whether a batch of `length` tokens runs full attention: by the module's setting, or as too
    short for sparse."""
    if part.fast_attention == "full" or part.attention_type != "block_sparse":
        return True
    config = part.config
    return length <= full_attention_up_to(config.block_size, config.num_random_blocks)


def _bias(visible: Tensor | None, like: Tensor, hidden: float) -> Tensor | None:
    """The bias of each key's scores, (B, S), in the dtype of the queries."""
    if visible is None:
        return None
    return like.new_zeros(visible.shape).masked_fill_(~visible, hidden)


class BigBirdModel(theirs.BigBirdModel):
    """An encoder that chooses the attention per batch. `save_pretrained` writes its name, so it is
    transformers'."""

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
        """As in transformers, for (B, S) ids or (B, S, H) embeddings and a mask (B, S). Raises
        UserError for attention weights, which are not computed."""
        if options.get("output_attentions", self.config.output_attentions):
            raise UserError(
                "the fast BigBird attention computes no attention weights: leave output_attentions "
                "out, or load the model with --attn_implementation eager"
            )
        embedded = {
            "input_ids": input_ids,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        outputs = self._encode(embedded, _visible(attention_mask), **options)
        if isinstance(outputs, Output) and outputs.hidden_states:
            # without the padding to blocks, too
            length = outputs.last_hidden_state.shape[1]
            outputs.hidden_states = tuple(
                states if states is None else states[:, :length]
                for states in outputs.hidden_states
            )
        return outputs

    @merge_with_config_defaults
    @capture_outputs
    def _encode(
        self, embedded: dict[str, Tensor | None], visible: Tensor | None, **options: Any
    ) -> Output:
        states = self.embeddings(**embedded)
        length = states.shape[1]
        missing = -length % self.config.block_size
        if missing and not runs_full(self, length):
            if visible is None:
                visible = states.new_ones(states.shape[:2], dtype=torch.bool)
            visible = F.pad(visible, (0, missing))
            states = F.pad(states, (0, 0, 0, missing))
        states = self.encoder(states, to_mask=visible).last_hidden_state
        pooled = None if self.pooler is None else self.activation(self.pooler(states[:, 0]))
        return Output(last_hidden_state=states[:, :length], pooler_output=pooled)


def _visible(attention_mask: Tensor | None) -> Tensor | None:
    """(B, S), true except for padding; None without padding, so that no kernel adds a bias of
    zeros. Masks on a GPU are not checked, which would synchronise: a batch without padding has no
    mask (`Collator`)."""
    if attention_mask is None:
        return None
    visible = attention_mask != 0
    if torch.compiler.is_compiling() or visible.device.type != "cpu":
        return visible
    return None if bool(visible.all()) else visible
