"""The tokenizer of a model: loads it, identifies it, and compares it with the model.

What differs between models (padding side, token types, positions) is decided here."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from toolkit import pretrained
from toolkit.config import PretrainedSettings
from toolkit.data.jieba_tokenizer import MARK, load_words_first, words_first
from toolkit.errors import UserError

HEAD_TOKENS = "head_tokens"
"""The key in tokenizer_config.json, which transformers saves, loads (to `init_kwargs`) and does not
interpret: how many of a long text's first tokens are read, before its last ones."""
_OWN_POSITIONS = ("camembert", "mpnet", "longformer", "data2vec-text", "xmod")
"""Architectures that count positions from pad_token_id + 1, as RoBERTa does."""


def load_tokenizer(settings: PretrainedSettings) -> Any:
    """One that puts the CLS token first pads on the right: padding before it would shift BERT's
    positions, and a text's outputs would depend on the longest of its batch. Raises UserError when
    there is none, it cannot pad, or it does not support `--tokenizer` or `--do_lower_case`."""
    name = str(settings.model_name_or_path)
    options = {}
    if settings.do_lower_case is not None:
        options["do_lower_case"] = settings.do_lower_case
    if settings.tokenizer == "jieba":
        with pretrained.explain_load_errors(name) as path:
            tokenizer = load_words_first(path, **options)
        pretrained.refuse_unusable(tokenizer, name)
    else:
        tokenizer = pretrained.load_plain_tokenizer(name, **options)
        if getattr(tokenizer, "init_kwargs", {}).get(MARK):
            tokenizer = words_first(tokenizer)
    if options:
        _check_case(tokenizer, **options)
    begins_with_cls = tokenizer.cls_token_id in tokenizer("a")["input_ids"][:1]
    if begins_with_cls:
        tokenizer.padding_side = "right"
    return tokenizer


def _check_case(tokenizer: Any, do_lower_case: bool) -> None:
    """Raises UserError for a tokenizer that ignores the option."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    lowers = normalizer is not None and "a" in normalizer.normalize_str("A")
    if lowers != do_lower_case:
        raise UserError(
            f"--do_lower_case {do_lower_case}: {type(tokenizer).__name__} has no such option: "
            "leave it out, and change the texts"
        )


def set_truncation(tokenizer: Any, settings: Any) -> None:
    """Sets which tokens of a long text are read, as the section of a task's data says, for this run
    and everyone who loads its model; a task without these settings reads the beginning."""
    side = getattr(settings, "truncation_side", None)
    if side:
        tokenizer.truncation_side = side
        tokenizer.init_kwargs["truncation_side"] = side
    if not hasattr(settings, HEAD_TOKENS) or side:
        tokenizer.init_kwargs.pop(HEAD_TOKENS, None)
    elif settings.head_tokens:
        tokenizer.init_kwargs[HEAD_TOKENS] = settings.head_tokens


def head_tokens_of(tokenizer: Any) -> int:
    """How many of a long text's first tokens are read, before its last ones; 0: no such limit.
    Raises UserError for anything else in tokenizer_config.json."""
    head = tokenizer.init_kwargs.get(HEAD_TOKENS) or 0
    if not isinstance(head, int) or head < 0:
        raise UserError(
            f"{HEAD_TOKENS} in tokenizer_config.json is {head!r}, no number of tokens"
        )
    return head


def reading_beginnings(tokenizer: Any) -> Any:
    """A copy that truncates texts at their end."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.truncation_side = "right"
    tokenizer.init_kwargs.pop(HEAD_TOKENS, None)
    return tokenizer


def separator_of(tokenizer: Any) -> str:
    """Joins the texts of several columns: a special token, which no tokenizer drops as white
    space."""
    return str(tokenizer.sep_token or tokenizer.eos_token or "\n")


def fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers that make the same tokens of a text that they need not truncate."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("truncation", None)
        state.pop("padding", None)
        described = json.dumps(state, sort_keys=True)
    else:
        vocabulary = sorted(tokenizer.get_vocab().items())
        described = json.dumps([vocabulary, repr(tokenizer)])
    described += getattr(backend, "segmenter", "")
    return hashlib.sha256(f"{type(tokenizer).__name__}{described}".encode()).hexdigest()[
        :32
    ]


def has_token_types(config: Any) -> bool:
    """Whether the model has a token type for each text of a pair; else only the separator
    distinguishes them."""
    return getattr(pretrained.encoder_config(config), "type_vocab_size", 2) != 1


def choose_max_length(
    max_length: int | None, tokenizer: Any, config: Any, pair: bool = False
) -> int:
    """`max_length`, or by default the model's limit. Raises UserError if the model has fewer
    positions, or no token is left for the text, or for its end after `head_tokens`."""
    config = pretrained.encoder_config(config)
    positions = getattr(config, "max_position_embeddings", None) or 0
    kind = getattr(config, "model_type", "")
    if positions and ("roberta" in kind or kind in _OWN_POSITIONS):
        positions -= (config.pad_token_id or 0) + 1
    if max_length is None:
        limits = [positions, tokenizer.model_max_length]
        max_length = min((limit for limit in limits if 0 < limit < 10**6), default=512)
    special = tokenizer.num_special_tokens_to_add(pair)
    head = head_tokens_of(tokenizer)
    if max_length <= special + head:
        first = f" and {head} first ones (--head_tokens)" if head else ""
        raise UserError(
            f"--max_length {max_length} leaves no token for the text after {special} special "
            f"tokens{first}"
        )
    if 0 < positions < max_length:
        longer = ""
        if kind == "bert":
            longer = (
                ", or train a BigBird of it (recipes/bigbird.py, or toolkit to-bigbird)"
            )
        raise UserError(
            f"--max_length {max_length}: the model has {positions} positions; pass at most that"
            f"{longer}"
        )
    return max_length
