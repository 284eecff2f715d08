"""The last layer computes what the classifier reads, and nothing else, where nobody else reads it.

A BERT-like classifier reads one position of the last layer, the first token's. That layer's query, output
projection and feed-forward network are then needed for that position alone; keys and values for all. The
logits and gradients are the same. A training step needs 1/1.16 of the operations with 6 layers and 1/1.07 with 12;
those of a 6-layer MiniLM ran 1.11 to 1.13 times as fast on two CPU cores (32 sentences of 20 to 40 tokens), and its
predictions 1.08 times.

The classifier passes an option to the encoder, which hands it on to the last layer as transformers' own options, also
when activations are recomputed. It is absent when anybody else calls the encoder. It is True, or, where one row holds
several texts, the positions (N,) of their first tokens.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert

# classifiers whose head reads `hidden_states[:, 0]` and nothing else, and the folders of their families
_FAMILIES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "xlm_roberta", "Camembert": "camembert",
             "Electra": "electra"}  # fmt: skip
_CLASSIFIER = "ForSequenceClassification"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = {"torch", "deepspeed", "accelerate", "transformers", "toolkit"}
"""Their hooks move parameters, or are inactive, or know this; those of others may read what the last layer computes."""


def _classify(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    **options: Any,
) -> Any:
    """The classifier's forward."""
    if only_head_reads(self, options):
        options["first_token_only"] = True
    return type(self).forward(
        self, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, labels, **options
    )


def _attend(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The forward of the last layer's attention: (B, S, H) -> (B, S, H), or (B, 1, H), of N texts (N, 1, H)."""
    firsts = options.pop("first_token_only", None)
    if firsts is None:
        return type(self).forward(self, hidden_states, attention_mask, *args, **options)
    first_states = hidden_states[:, :1] if firsts is True else hidden_states[0, firsts, None]
    context, weights = _attend_from_first(self.self, first_states, hidden_states, attention_mask, **options)
    return self.output(context, first_states), weights


# pickle finds a bound method by its name: a model that is loaded so has transformers' own forward again
_classify.__name__ = _attend.__name__ = "forward"


def _attend_from_first(
    attention: Any, first_states: Tensor, states: Tensor, mask: Tensor | None, past_key_values: None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """BertSelfAttention.forward for the first query: (B, 1, H) and (B, S, H) -> (B, 1, H)."""
    heads = (attention.num_attention_heads, attention.attention_head_size)
    query = attention.query(first_states).unflatten(-1, heads).transpose(1, 2)  # (B, nh, 1, hs)
    key = attention.key(states).unflatten(-1, heads).transpose(1, 2)  # (B, nh, S, hs)
    value = attention.value(states).unflatten(-1, heads).transpose(1, 2)  # (B, nh, S, hs)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, modeling_bert.eager_attention_forward
    )
    output, weights = attend(
        attention,
        query,
        key,
        value,
        None if mask is None else mask[:, :, :1],
        dropout=attention.dropout.p if attention.training else 0.0,
        scaling=attention.scaling,
        **options,
    )
    return output.reshape(first_states.shape[0], 1, -1).contiguous(), weights


def read_first_token_only(model: Any) -> bool:
    """Lets the last layer of a known classifier compute its first position only, where nothing but logits is read.
    Returns whether it does.

    Parameters, classes and what is saved stay as they are. Whoever reads hidden states or attentions, calls the encoder
    or a layer, hooks the last layer or replaces the head gets every position, as transformers computes it. Other
    architectures, decoders and other attentions are not changed, nor, with a warning, a model whose logits of a probe
    differ afterwards: this version of transformers computes them in another way.
    """
    family = type(model).__name__.removesuffix(_CLASSIFIER)
    if family not in _FAMILIES or model.config.is_decoder or not _is_known_attention(model.config):
        return False
    attention = model.base_model.encoder.layer[-1].attention
    theirs = f"transformers.models.{_FAMILIES[family]}.modeling_{_FAMILIES[family]}"
    if type(model).__module__ != theirs or "forward" in vars(model):
        return False
    if (type(attention).__module__, type(attention).__name__) != (theirs, f"{family}Attention"):
        return False
    expected = _logits_of_probe(model)
    model.forward, attention.forward = MethodType(_classify, model), MethodType(_attend, attention)
    try:
        same = torch.allclose(_logits_of_probe(model), expected, rtol=1e-3, atol=1e-4)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):  # of another layer's shapes or arguments
        same = False
    if not same:
        del model.forward, attention.forward
        warnings.warn(
            f"transformers {transformers.__version__} computes the last layer of {type(model).__name__} in a way that "
            "is not known here: it computes every position, which takes longer",
            stacklevel=2,
        )
    return same


def _head_of(model: Any) -> Any:
    """transformers' own head, which reads `hidden_states[:, 0]` and nothing else; None where another took its place."""
    family = type(model).__name__.removesuffix(_CLASSIFIER)
    name, kind = ("bert.pooler", "BertPooler") if family == "Bert" else ("classifier", f"{family}ClassificationHead")
    head = model.get_submodule(name)
    head = getattr(head, "original_module", head)  # peft wraps a head that is trained whole
    is_original = (type(head).__module__, type(head).__name__) == (type(model).__module__, kind)
    return head if is_original and "forward" not in vars(head) else None


def _is_known_attention(config: Any) -> bool:
    return config._attn_implementation in ("sdpa", "eager")


def only_head_reads(model: Any, options: Mapping[str, Any]) -> bool:
    """Whether transformers' own head alone reads what the last layer computes in this call."""
    base = model.base_model
    config, layers = base.config, [*getattr(getattr(base, "encoder", None), "layer", ())]
    if config.output_hidden_states or config.output_attentions or not _is_known_attention(config):
        return False
    if any(value is not None and value is not False for name, value in options.items() if name != "return_dict"):
        return False  # it may need more
    # layers may have been replaced, or copied, since the model was loaded
    *others, last = [_attends_from_first(layer) for layer in layers] or [False]
    if any(others) or not last:
        return False
    if (head := _head_of(model)) is None:
        return False
    return not any(map(_is_watched, itertools.chain((base, base.encoder, head), layers[-1].modules())))


def _attends_from_first(layer: Any) -> bool:
    forward = getattr(getattr(layer, "attention", None), "forward", None)
    return getattr(forward, "__func__", None) is _attend


def _is_watched(module: Any) -> bool:
    hooks = itertools.chain.from_iterable(getattr(module, kind).values() for kind in _HOOKS)
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] not in _LIBRARIES for hook in hooks)


@torch.no_grad()
def _logits_of_probe(model: Any) -> Tensor:
    """Of two short samples, one of them padded, without dropout; no random number is drawn."""
    training, ids = model.training, torch.arange(2, 10).view(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    logits: Tensor = model.eval()(input_ids=ids, attention_mask=mask).logits
    model.train(training)
    return logits
