"""Token classification (recipes/ner.py): the hooks."""

from __future__ import annotations

from typing import Any

from toolkit.features.spans.settings import SpanSettings
from toolkit.utils.features import Feature


class SpansFeature(Feature):
    """Token classification."""

    def answers(self, model: str, config: Any) -> Any:
        architectures = config.architectures or ()
        if not any(name.endswith("ForTokenClassification") for name in architectures):
            return None
        from toolkit.features.spans.evaluation import SpanAnswers
        from toolkit.features.spans.model import STRIDE, labels_of_tags

        return SpanAnswers(labels_of_tags(config), getattr(config, STRIDE, None))


FEATURE = SpansFeature(recipes={"ner": SpanSettings})
