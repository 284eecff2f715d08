"""The settings of recipes/pretrain.py."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from pydantic import field_validator

from toolkit.config.sections import PretrainedSettings, TextSettings, TrainingSettings, section


@section
class EncoderSettings(PretrainedSettings):
    """The pretrained encoder."""

    new_head: bool = False
    """Add a masked-language head, tied to the embeddings, to an encoder without one."""


@section
class MaskingSettings:
    """Which tokens are masked."""

    mlm_probability: str | None = None
    """Fraction of tokens to mask, or `0.30:0.15`, from the first step to the last; default: 0.15, or 0.30 for
    ModernBERT and EuroBERT."""
    whole_word_mask: bool = False
    """Mask whole words instead of single tokens; Chinese words are found by jieba."""

    @field_validator("mlm_probability", mode="before")
    @classmethod
    def _check(cls, value: object) -> object:
        if value is not None and not re.fullmatch(
            r"0?\.\d*[1-9]\d*(:0?\.\d*[1-9]\d*)?", str(value)
        ):
            raise ValueError("must be a number between 0 and 1 (0.15), or two of them (0.30:0.15)")
        return value and str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """The settings of a recipe on texts without labels."""

    targets: ClassVar[str] = "toolkit.features.pretraining.data:Masks"

    model: EncoderSettings
    data: TextSettings
    masking: MaskingSettings
    training: TrainingSettings
