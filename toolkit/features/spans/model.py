"""Loads token classifiers: any `AutoModelForTokenClassification` checkpoint, with equal weights in
every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import set_seed
from transformers import AutoModelForTokenClassification

from toolkit.config import PretrainedSettings
from toolkit.errors import UserError, listing
from toolkit.features.spans.windows import tag_names
from toolkit.models.attention import choose_attention
from toolkit.models.classifier import configure, from_pretrained, set_dropout
from toolkit.pretrained import load_config, refuse_random

STRIDE = "window_stride"
"""The key in config.json for --stride."""


def load_tagger(
    settings: PretrainedSettings, labels: Sequence[str], stride: int | None, seed: int
) -> Any:
    """The pretrained encoder with a head for the tags of these labels, in float32 on the CPU; a new
    head is initialized by the seed. Raises UserError if the model cannot be loaded."""
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    config.id2label = dict(enumerate(tag_names(labels)))
    config.label2id = {tag: index for index, tag in config.id2label.items()}
    setattr(config, STRIDE, stride)
    set_dropout(config, settings.dropout)
    set_seed(seed)
    model, loading = from_pretrained(
        AutoModelForTokenClassification,
        name,
        config,
        settings.attn_implementation,
        ignore_mismatched_sizes=True,  # replaces a head of another size
    )
    new = [*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])]
    prefix = f"{model.base_model_prefix}."
    refuse_random(
        name, (key for key in new if key.startswith(prefix) and "pooler" not in key)
    )
    configure(model, settings)
    return model


def load_saved_tagger(settings: PretrainedSettings) -> Any:
    """A fine-tuned token classifier. Raises UserError if weights are missing."""
    name = str(settings.model_name_or_path)
    config = load_config(settings)
    model, loading = from_pretrained(AutoModelForTokenClassification, name, config)
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing:
        raise UserError(
            f"{name} lacks {listing(missing, 2)}: with no trained token classification head its "
            "spans would be random: name the model/ of a run of recipes/ner.py"
        )
    choose_attention(model, settings.attn_implementation)
    return model


def labels_of_tags(config: Any) -> list[str]:
    """The labels of a saved model, in the order of its tags. Raises UserError for other tags than
    O, B-A, I-A, B-B, ..."""
    tags = [config.id2label[index] for index in range(config.num_labels)]
    labels = [tag[2:] for tag in tags[1::2]]
    if tags != tag_names(labels):
        raise UserError(
            f"{config.name_or_path}: id2label in config.json is {listing(tags)}, not O, B-PER, "
            "I-PER, ...: toolkit reads token classifiers of recipes/ner.py; use transformers' "
            "pipeline"
        )
    return labels
