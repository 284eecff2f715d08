"""The last layer computes what the classifier reads, and nothing else, where nobody else reads it.

A BERT-like classifier reads one position of the last layer, the first token's. That layer's query, output
projection and feed-forward network are then needed for that position alone; keys and values for all. The
logits and gradients are the same. A training step needs 1/1.16 of the operations with 6 layers and 1/1.07 with 12;
those of a 6-layer MiniLM ran 1.11 to 1.13 times as fast on two CPU cores (32 sentences of 20 to 40 tokens), and its
predictions 1.08 times.

The classifier says so by an option of its call of the encoder. It reaches the last layer as transformers' own options
do, is there again when activations are recomputed, and is absent when anybody else calls the encoder.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert

# classifiers whose head reads `hidden_states[:, 0]` and nothing else, and the folders of their families
_FAMILIES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "xlm_roberta", "Camembert": "camembert",
             "Electra": "electra"}  # fmt: skip
_CLASSIFIER, _ATTENTION = "ForSequenceClassification", "Attention"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = {"torch", "deepspeed", "accelerate", "transformers"}
"""Their hooks move parameters, or are asleep; those of others may read what the last layer computes."""


class _Classifier(torch.nn.Module):
    head_name: str
    head_class: Any
    """What reads `hidden_states[:, 0]` and nothing else."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        if _only_head_reads(self, options):
            options["first_token_only"] = True
        return super().forward(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, labels, **options
        )


class _Attention(torch.nn.Module):
    """Of the last layer."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, H) -> (B, S, H), or (B, 1, H)."""
        if not options.pop("first_token_only", False):
            return super().forward(hidden_states, attention_mask, *args, **options)
        theirs: Any = self
        context, weights = _attend_from_first(theirs.self, hidden_states, attention_mask, **options)
        return theirs.output(context, hidden_states[:, :1]), weights


def _attend_from_first(
    attention: Any, states: Tensor, mask: Tensor | None, past_key_values: None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """BertSelfAttention.forward for the first query: (B, S, H) -> (B, 1, H)."""
    heads = (states.shape[0], -1, attention.num_attention_heads, attention.attention_head_size)
    query = attention.query(states[:, :1]).view(heads).transpose(1, 2)  # (B, nh, 1, hs)
    key = attention.key(states).view(heads).transpose(1, 2)  # (B, nh, S, hs)
    value = attention.value(states).view(heads).transpose(1, 2)  # (B, nh, S, hs)
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
    return output.reshape(states.shape[0], 1, -1).contiguous(), weights


@functools.cache
def _classes(family: str) -> tuple[type, type]:
    """Ours, made of transformers' classifier and attention, with their names, which `save_pretrained` writes."""
    folder = _FAMILIES[family]
    theirs = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    name, head = ("bert.pooler", "BertPooler") if family == "Bert" else ("classifier", f"{family}ClassificationHead")
    reads = {"head_name": name, "head_class": getattr(theirs, head)}
    made = [(_CLASSIFIER, _Classifier, reads), (_ATTENTION, _Attention, {})]
    classifier, attention = (
        type(family + end, (ours, getattr(theirs, family + end)), {"__module__": __name__, **values})
        for end, ours, values in made
    )
    return classifier, attention


def __getattr__(name: str) -> Any:
    """Where pickle looks for one of them."""
    for family in _FAMILIES:
        if name in (family + _CLASSIFIER, family + _ATTENTION):
            return _classes(family)[name.endswith(_ATTENTION)]
    raise AttributeError(name)


def read_first_token_only(model: Any) -> bool:
    """Makes the last layer of a known classifier compute its first position only, where its logits are all that is
    asked for; says whether it does.

    Parameters and what is saved stay as they are. Whoever asks for hidden states or attentions, calls the encoder or a
    layer, hooks the last layer or puts another head in place gets every position, as transformers computes it. Left
    alone: other architectures, decoders, other attentions, and, with a warning, a model whose logits of a probe are not
    the same afterwards: transformers then computes it in a way not known here.
    """
    family = type(model).__name__.removesuffix(_CLASSIFIER)
    if family not in _FAMILIES or model.config.is_decoder or not _attends_as_known(model.config):
        return False
    parts, ours = (model, model.base_model.encoder.layer[-1].attention), _classes(family)
    theirs = tuple(type(part) for part in parts)
    if theirs != tuple(each.__bases__[1] for each in ours):
        return False
    expected = _logits_of_probe(model)
    _set_classes(parts, ours)
    try:
        same = torch.allclose(_logits_of_probe(model), expected, rtol=1e-3, atol=1e-4)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):  # of another layer's shapes or arguments
        same = False
    if not same:
        _set_classes(parts, theirs)
        warnings.warn(
            f"transformers {transformers.__version__} computes the last layer of {type(model).__name__} in a way that "
            "is not known here: it computes every position, which takes longer",
            stacklevel=2,
        )
    return same


def _set_classes(parts: Sequence[Any], classes: Sequence[type]) -> None:
    for part, kind in zip(parts, classes, strict=True):
        part.__class__ = kind


def _attends_as_known(config: Any) -> bool:
    return config._attn_implementation in ("sdpa", "eager")


def _only_head_reads(model: Any, options: dict[str, Any]) -> bool:
    """Whether nobody but a head of transformers' own sees what the last layer computes in this call."""
    base = model.base_model
    config, layers = base.config, [*getattr(getattr(base, "encoder", None), "layer", ())]
    if config.output_hidden_states or config.output_attentions or not _attends_as_known(config):
        return False
    if any(value is not None and value is not False for name, value in options.items() if name != "return_dict"):
        return False  # it may ask for more
    # layers may have been put in place, or copied, since the model was loaded
    *others, last = [isinstance(getattr(layer, "attention", None), _Attention) for layer in layers] or [False]
    if any(others) or not last:
        return False
    head = model.get_submodule(model.head_name)
    head = getattr(head, "original_module", head)  # peft's wrapper around a head that is trained whole
    if getattr(head.forward, "__func__", None) is not model.head_class.forward:
        return False
    return not any(map(_is_watched, itertools.chain((base, base.encoder, head), layers[-1].modules())))


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
