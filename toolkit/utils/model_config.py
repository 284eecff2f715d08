"""Validates a model's config.json before a model is built from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.errors import UserError
from toolkit.utils.files import Kinds, check_values

_MAX_LAYERS, _MAX_LABELS = 10_000, 100_000
_PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")


def _whole_number(maximum: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) is int and 0 <= value <= maximum, f"a whole number up to {maximum:,}"


_STRINGS = (lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of strings")
_NAMES = (lambda value: isinstance(value, dict) and all(key.isdecimal() for key in value), "a table of integer keys")
_KINDS: Kinds = {
    "model_type": (lambda value: isinstance(value, str), "a string"),
    "architectures": _STRINGS,
    "problem_type": (lambda value: value in _PROBLEMS, f"one of {', '.join(_PROBLEMS)}"),
    "id2label": _NAMES,
    "num_labels": _whole_number(_MAX_LABELS),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "encoder_layers"), _whole_number(_MAX_LAYERS)),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "type_vocab_size"), _whole_number(2**31 - 1)),
    "transformers_weights": (lambda value: isinstance(value, str) and "/" not in value, "a file name without a folder"),
}  # fmt: skip


def check_model_config(config: Mapping[str, Any], where: object) -> None:
    """Raises UserError for impossible values, also in the nested configs of an encoder-decoder."""
    check_values(config, _KINDS, where)
    for key, value in config.items():
        if "dropout" in key and type(value) in (int, float) and not 0 <= value <= 1:
            raise UserError(f"{where}: {key} is {json.dumps(value)[:60]} and should be a number from 0 to 1")
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{where}: {key} is NaN and should be a number")
        if isinstance(value, dict) and "model_type" in value:
            check_model_config(value, f"{where}, {key}")
