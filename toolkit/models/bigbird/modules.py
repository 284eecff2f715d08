"""transformers' BigBird with the forward pass replaced in two of its modules, and nothing else.

Both classes take over instances that exist (`toolkit.models.bigbird.install`): parameters, names, hooks and what is
saved stay as they are. Which attention runs is decided by the batch and the module's constants alone, never kept:
a short batch changes nothing for later ones, and a layer recomputed in the backward pass decides alike.

B samples, S tokens, H = nh * hs hidden
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output
from transformers.models.big_bird import modeling_big_bird as theirs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from toolkit.errors import UserError
from toolkit.models.bigbird import blocked, flex, gathered
from toolkit.models.bigbird.plan import Pattern
from toolkit.pretrained import full_attention_up_to

_BACKENDS: dict[str, ModuleType] = {"blocked": blocked, "gathered": gathered, "flex": flex}
_BY_DEVICE = {"cpu": "blocked", "cuda": "flex"}
ATTENTIONS = ("auto", *_BACKENDS, "full")
_HIDDEN_SCORE = -10000.0  # transformers' own: finite, so that a row of nothing but padding stays a number


class SparseAttention(theirs.BigBirdAttention):
    """BigBirdAttention without dense scores; its `to_mask` is None, or (B, S) with true for all but padding."""

    fast_attention: str  # one of ATTENTIONS

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, to_mask: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, S, H) -> (B, S, H), and no attention weights."""
        if self.attention_type != "block_sparse":
            return super().forward(hidden_states, *args, to_mask=to_mask, **options)
        query, key, value = (layer(hidden_states) for layer in (self.self.query, self.self.key, self.self.value))
        if runs_full(self.config, self.fast_attention, hidden_states.shape[1]):
            context = self._full(query, key, value, to_mask)
        else:
            context = self._sparse(query, key, value, to_mask)
        return self.output(context, hidden_states), None

    def _sparse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        name = self.fast_attention
        if name == "auto":
            name = _BY_DEVICE.get(query.device.type, "gathered")
        elif name == "blocked" and query.device.type != "cpu":
            raise UserError(f"attention='blocked' is for the CPU, the model is on {query.device}: say 'auto'")
        inner = self.self
        pattern = Pattern(
            inner.seed, inner.num_attention_heads, inner.block_size, inner.num_random_blocks, inner.max_seqlen
        )
        # transformers leaves attention dropout out here, and so do we
        context = _BACKENDS[name].attend(
            query, key, value, _bias(visible, query, _HIDDEN_SCORE), pattern, self.training
        )
        return context if visible is None else context * visible.unsqueeze(-1)

    def _full(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        heads = (*query.shape[:2], self.self.num_attention_heads, -1)
        q, k, v = (x.view(heads).transpose(1, 2) for x in (query, key, value))  # (B, nh, S, hs)
        bias = _bias(visible, query, torch.finfo(query.dtype).min)
        mask = None if bias is None else bias[:, None, None].expand(-1, 1, query.shape[1], -1)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        context = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        return context.transpose(1, 2).reshape(query.shape)


def runs_full(config: Any, attention: str, length: int) -> bool:
    """Whether a batch of so many tokens runs full attention: asked for, or too short for the pattern."""
    return attention == "full" or length <= full_attention_up_to(config.block_size, config.num_random_blocks)


def _bias(visible: torch.Tensor | None, like: torch.Tensor, hidden: float) -> torch.Tensor | None:
    """What is added to the scores of each key, (B, S), in the type of the queries."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, hidden)


class BigBirdModel(theirs.BigBirdModel):
    """BigBirdModel, an encoder, that decides per batch. Its name is transformers', which `save_pretrained` writes."""

    fast_attention: str  # one of ATTENTIONS

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As transformers' for (B, S) ids or (B, S, H) embeddings and a mask (B, S).

        Raises UserError for attention weights, which are never computed, and for inputs that do not fit.
        """
        inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "position_ids": position_ids,
                  "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}  # fmt: skip
        if self.attention_type != "block_sparse":  # someone called set_attention_type: theirs, slow and full
            return super().forward(**inputs, **options)
        if options.get("output_attentions", self.config.output_attentions):
            raise UserError("the fast BigBird attention computes no attention weights: leave output_attentions "
                            "out, or call toolkit.models.bigbird.uninstall(model) first")  # fmt: skip
        if attention_mask is not None and attention_mask.dim() != 2:
            raise UserError(f"attention_mask has shape {tuple(attention_mask.shape)}: BigBird takes (samples, tokens)")
        return self._encode(**inputs, **options)

    @merge_with_config_defaults
    @capture_outputs
    def _encode(self, input_ids: Any, inputs_embeds: Any, attention_mask: Any, **inputs: Any) -> Output:
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("BigBird takes either input_ids or inputs_embeds")
        tokens = input_ids if input_ids is not None else inputs_embeds[..., 0]  # (B, S)
        length = tokens.shape[1]
        if attention_mask is None and input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, None)
        visible = _visible(attention_mask)
        embedded = {name: inputs.get(name) for name in ("token_type_ids", "position_ids")}
        embedded |= {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        if not runs_full(self.config, self.fast_attention, length):
            visible, embedded = self._padded(tokens, visible, embedded)
        hidden = self.encoder(self.embeddings(**embedded), to_mask=visible).last_hidden_state
        pooled = None if self.pooler is None else self.activation(self.pooler(hidden[:, 0]))
        return Output(last_hidden_state=hidden[:, :length], pooler_output=pooled)

    def _padded(
        self, tokens: torch.Tensor, visible: torch.Tensor | None, embedded: dict[str, Any]
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Everything at a multiple of the block, padded as transformers does."""
        length, block = tokens.shape[1], self.config.block_size
        missing = -length % block
        if embedded["position_ids"] is None and length + missing > self.config.max_position_embeddings:
            raise UserError(
                f"{length} tokens do not fit a BigBird of {self.config.max_position_embeddings} positions in blocks of "
                f"{block}: cut the text at --max_length {self.config.max_position_embeddings // block * block}"
            )
        if missing:
            embedded = {name: self._pad(name, value, missing) for name, value in embedded.items()}
            visible = torch.ones_like(tokens, dtype=torch.bool) if visible is None else visible
            visible = F.pad(visible, (0, missing))
        return visible, embedded

    def _pad(self, name: str, value: torch.Tensor | None, missing: int) -> torch.Tensor | None:
        """`_pad_to_block_size` without its line in the log, which would break a compiled graph."""
        padding = self.config.pad_token_id or 0
        if value is None:
            return None
        if name == "inputs_embeds":
            ids = torch.full((len(value), missing), padding, dtype=torch.long, device=value.device)
            return torch.cat([value, self.embeddings(ids)], dim=1)
        return F.pad(value, (0, missing), value=0 if name == "token_type_ids" else padding)


def _visible(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """(B, S), true where a token is to be read; None where all are, so that no kernel adds a bias of zeros."""
    if attention_mask is None:
        return None
    visible = attention_mask != 0
    if not torch.compiler.is_compiling() and visible.device.type in ("cpu", "cuda") and bool(visible.all()):
        return None
    return visible
