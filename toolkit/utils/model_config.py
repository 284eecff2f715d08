"""What the config.json of a model may hold: checked in one place, before anybody builds a model of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.errors import UserError
from toolkit.utils.files import Kinds, check_values

_MOST_LAYERS, _MOST_LABELS = 10_000, 100_000
_PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")


def _whole(most: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: type(value) is int and 0 <= value <= most, f"a whole number up to {most:,}"


_TEXTS = (lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of texts")
_NAMES = (lambda value: isinstance(value, dict) and all(key.isdecimal() for key in value), "a table by whole numbers")
_KINDS: Kinds = {
    "model_type": (lambda value: isinstance(value, str), "a text"),
    "architectures": _TEXTS,
    "problem_type": (lambda value: value in _PROBLEMS, f"one of {', '.join(_PROBLEMS)}"),
    "id2label": _NAMES,
    "num_labels": _whole(_MOST_LABELS),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "encoder_layers"), _whole(_MOST_LAYERS)),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "type_vocab_size"), _whole(2**31 - 1)),
    "transformers_weights": (lambda value: isinstance(value, str) and "/" not in value, "the name of a file beside it"),
}  # fmt: skip


def check_model_config(config: Mapping[str, Any], where: object) -> None:
    """Raises UserError for what no model can have, in the parts of an encoder-decoder too."""
    check_values(config, _KINDS, where)
    for key, value in config.items():
        if "dropout" in key and type(value) in (int, float) and not 0 <= value <= 1:
            raise UserError(f"{where}: {key} is {json.dumps(value)[:60]} and should be a number from 0 to 1")
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{where}: {key} is NaN and should be a number")
        if isinstance(value, dict) and "model_type" in value:
            check_model_config(value, f"{where}, {key}")
