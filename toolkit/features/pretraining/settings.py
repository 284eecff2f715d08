"""The settings of recipes/pretrain.py."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pydantic import Field

from toolkit.config.sections import (
    PretrainedSettings,
    TextSettings,
    TrainingSettings,
    section,
)


@section
class EncoderSettings(PretrainedSettings):
    """The pretrained encoder."""

    new_head: bool = False
    """Add a masked-language head, tied to the embeddings, to an encoder without one."""


@section
class MaskingSettings:
    """Which tokens are masked."""

    mlm_probability: float = Field(default=0.15, gt=0, lt=1)
    """Fraction of tokens to mask."""
    whole_word_mask: bool = False
    """Mask whole words instead of single tokens; Chinese words are found by jieba."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """The settings of a recipe on texts without labels."""

    targets: ClassVar[str] = "toolkit.features.pretraining.data:Masks"

    model: EncoderSettings
    data: TextSettings
    masking: MaskingSettings
    training: TrainingSettings
