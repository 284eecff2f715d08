"""The settings of recipes/title.py."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field

from toolkit.config.sections import LongTrainingSettings, PretrainedSettings, TextSettings, section

KIND = "encoder-decoder"
"""`model_type` in the config.json of models that write titles."""
Segmenter = Literal["auto", "word", "jieba", "char"]
"""word: runs of a-z and 0-9 in lower case without stemming, as in published English results.
jieba: Chinese words, English ones and numbers; char: Chinese characters, all other words and
numbers.
auto: jieba, char or word, depending on the references."""


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
    length_penalty: float = 1.0
    """For more than one beam: above 0 it favours longer titles, below 0 shorter ones."""
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    """No n-gram of this many tokens occurs twice in a title; 0: no limit."""
    rouge_segmenter: Segmenter = "auto"
    """What ROUGE counts: words, Chinese words by jieba, or characters; `auto` looks at the
    references."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TitleSettings:
    """The settings of a recipe on texts and their titles."""

    targets: ClassVar[str] = "toolkit.features.titles.data:Titles"

    model: PretrainedSettings
    data: TitleDataSettings
    generation: GenerationSettings
    training: LongTrainingSettings
