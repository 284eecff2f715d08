"""Continued pretraining (recipes/pretrain.py): the hooks."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from toolkit.features.pretraining.settings import PretrainSettings
from toolkit.utils.features import Feature

_PROBLEM = "masked_language_modeling"
_OFTEN_MASKED = ("modernbert", "modernvbert", "eurobert", "neobert")
"""Kinds of models (`model_type`) that were pretrained with about 30 % of their tokens masked."""


class PretrainingFeature(Feature):
    """Masked-language modelling on texts without labels."""

    tasks: ClassVar = {"pretrain": PretrainSettings}
    usual_metrics: ClassVar = {_PROBLEM: "loss"}
    pipeline_tags: ClassVar = {_PROBLEM: "fill-mask"}
    first_settings = ("mlm_probability", "whole_word_mask", "new_head")
    paths = ("init_new_tokens",)

    def targets(self, settings: Any) -> Any:
        if not isinstance(settings, PretrainSettings):
            return None
        from toolkit.features.pretraining.data import Masks

        return Masks

    def collator(self, settings: Any) -> Any:
        if not isinstance(settings, PretrainSettings):
            return None
        from toolkit.features.pretraining.data import MaskingCollator
        from toolkit.pretrained import load_config

        often = settings.masking.mlm_probability is None and load_config(settings.model).model_type in _OFTEN_MASKED
        schedule = (settings.masking.mlm_probability or ("0.30" if often else "0.15")).split(":")
        probabilities = (float(schedule[0]), float(schedule[-1]))
        return partial(MaskingCollator, seed=settings.training.seed, probabilities=probabilities)

    def untrained_model(self, settings: Any) -> tuple[Any, dict[str, int]] | None:
        if not isinstance(settings, PretrainSettings):
            return None
        from toolkit.data.tokens import choose_max_length, load_tokenizer
        from toolkit.features.pretraining.model import load_masked_model
        from toolkit.pretrained import load_config

        tokenizer = load_tokenizer(settings.model)
        model = load_masked_model(settings.model, tokenizer, lambda logits, truth: logits, settings.training.seed)
        length = choose_max_length(settings.data.max_length, tokenizer, load_config(settings.model))
        return model, {"input_ids": length}


FEATURE = PretrainingFeature()
