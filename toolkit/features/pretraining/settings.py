"""The settings of recipes/pretrain.py."""

from __future__ import annotations

import dataclasses
import re

from pydantic import field_validator

from toolkit.config.sections import PretrainedSettings, TextSettings, TrainingSettings, section


@section
class EncoderSettings(PretrainedSettings):
    """The pretrained encoder."""

    new_head: bool = False
    """Give an encoder without weights of a masked-language head a new one, tied to its embeddings."""
    init_new_tokens: str | None = None
    """A file of words, one a line, that become tokens; each begins as the mean of the tokens it was read as before."""


@section
class MaskingSettings:
    """Which tokens are to be predicted."""

    mlm_probability: str | None = None
    """The part of a text's tokens that is masked, or `0.30:0.15`, from the first step to the last; when not given
    0.30 for ModernBERT and its kin, and 0.15."""
    whole_word_mask: bool = False
    """Mask whole words, Chinese ones (jieba's) too, instead of single tokens."""

    @field_validator("mlm_probability", mode="before")
    @classmethod
    def _check(cls, value: object) -> object:
        if value is not None and not re.fullmatch(r"0?\.\d*[1-9]\d*(:0?\.\d*[1-9]\d*)?", str(value)):
            raise ValueError("must be a number between 0 and 1 (0.15), or two of them (0.30:0.15)")
        return value and str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """The settings of a recipe on texts without labels."""

    model: EncoderSettings
    data: TextSettings
    masking: MaskingSettings
    training: TrainingSettings
