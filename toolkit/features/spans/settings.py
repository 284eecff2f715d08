"""The settings of recipes/ner.py."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field

from toolkit.config.sections import (
    PretrainedSettings,
    TextSettings,
    TrainingSettings,
    section,
)


@section
class SpanDataSettings(TextSettings):
    """Texts and their spans, or tokens and their tags."""

    text_column: str | None = None
    """The column of texts, or of lists of tokens; default: by its name or content."""
    spans_column: str | None = None
    """A list of {start, end, label} or [start, end, label] of each text, in characters, end
    exclusive; or a list of the tags of its tokens; default: by its name (entities, ner_tags, ...)."""
    token_separator: Literal["space", "none"] | None = None
    """What stands between the tokens of a list or of CoNLL columns in the text that is made of
    them; default: a space, but nothing beside a Chinese or Japanese character, nor in a file whose
    tokens are all single characters."""
    max_length: int | None = Field(default=None, ge=3)
    """Tokens of a window: a longer text is read in several. Default: the model's limit."""
    stride: int | None = Field(default=None, ge=0)
    """Tokens that a window has in common with the next one; default: a quarter of max_length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanSettings:
    """The settings of a recipe on texts and labelled spans."""

    targets: ClassVar[str] = "toolkit.features.spans.data:Spans"

    model: PretrainedSettings
    data: SpanDataSettings
    training: TrainingSettings
