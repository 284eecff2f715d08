"""Titles of texts: the settings of recipes/title.py, and what the core asks of this feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from toolkit.config.sections import LongTrainingSettings, PretrainedSettings, TextSettings, section
from toolkit.utils.features import Feature, Problem

KIND = "encoder-decoder"
"""`model_type` in the config.json of models that write titles."""


@section
class TitleDataSettings(TextSettings):
    """Where the texts and titles are."""

    title_column: str | None = None
    """Found by its name (title, summary, ...) when not given."""
    max_target_length: int = Field(default=32, ge=2)
    """Tokens of a title, its end token included; longer ones are cut in training, and none longer are written."""


@section
class GenerationSettings:
    """How titles are written and judged."""

    num_beams: int = Field(default=4, ge=1)
    """Beams of the search; 1 takes the likeliest token each time."""
    length_penalty: float = 1.0
    """Above 0 it favours longer titles, below 0 shorter ones; for beams."""
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    """No sequence of so many tokens occurs twice in a title; 0 allows it."""
    rouge_segmenter: Literal["auto", "word", "jieba", "char"] = "auto"
    """What ROUGE counts: words, Chinese words by jieba, or characters; `auto` looks at the references."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TitleSettings:
    """The settings of a recipe on texts and their titles."""

    model: PretrainedSettings
    data: TitleDataSettings
    generation: GenerationSettings
    training: LongTrainingSettings


class TitlesFeature(Feature):
    """Models that write titles."""

    tasks: ClassVar = {"title": TitleSettings}
    problems: ClassVar = {"title_generation": Problem(metric="rougeL", hub_task="summarization")}
    first_settings = ("title_column",)

    def faults(self, values: Mapping[str, Any]) -> Iterable[str]:
        if str(values.get("num_beams")) == "1" and values.get("length_penalty") is not None:
            yield "--length_penalty has no effect with --num_beams 1: use more beams, or drop it"

    def targets(self, settings: Any) -> Any:
        if not isinstance(settings.data, TitleDataSettings):
            return None
        from toolkit.features.titles.data import Titles

        return Titles


FEATURE = TitlesFeature()
