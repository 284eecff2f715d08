"""The settings of recipes/title.py."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field

from toolkit.config.sections import (
    LongTrainingSettings,
    PretrainedSettings,
    TextSettings,
    section,
)

KIND = "encoder-decoder"
"""`model_type` in the config.json of models that write titles."""


@section
class TitleDataSettings(TextSettings):
    """Columns of texts and titles."""

    title_column: str | None = None
    """Default: detected by its name (title, summary, ...)."""
    max_target_length: int = Field(default=32, ge=2)
    """Tokens of a title, its end token included: longer ones are truncated in training; none longer
    is generated."""


@section
class GenerationSettings:
    """Beam search, and ROUGE."""

    num_beams: int = Field(default=4, ge=1)
    """Beams of the search; 1 is greedy search."""
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    """No n-gram of this many tokens occurs twice in a title; 0: no limit."""
    rouge_segmenter: Literal["auto", "jieba", "char"] = "auto"
    """What ROUGE counts: Chinese words, found by jieba, or characters; `auto` looks at the
    references, and counts English words as published results do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TitleSettings:
    """The settings of a recipe on texts and their titles."""

    targets: ClassVar[str] = "toolkit.features.titles.data:Titles"

    model: PretrainedSettings
    data: TitleDataSettings
    generation: GenerationSettings
    training: LongTrainingSettings
