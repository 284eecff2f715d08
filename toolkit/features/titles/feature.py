"""Title generation (recipes/title.py): the hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.features.titles.settings import KIND, TitleSettings
from toolkit.utils.features import Feature, PagePart


class TitlesFeature(Feature):
    """Title generation by encoder-decoders."""

    def answers(self, model: str, config: Any) -> Any:
        if config.model_type != KIND:
            return None
        from toolkit.features.titles.evaluation import TitleAnswers

        return TitleAnswers()

    def page(self, page: Any) -> PagePart | None:
        if page.record.problem_type != "title_generation":
            return None
        return PagePart(Path(__file__).with_name("page.html"), {})


FEATURE = TitlesFeature(recipes={"title": TitleSettings})
