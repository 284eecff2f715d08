"""Token classification (recipes/ner.py): the hooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.features.spans.settings import SpanSettings
from toolkit.utils.features import Feature, PagePart


class SpansFeature(Feature):
    """Token classification."""

    def answers(self, model: str, config: Any) -> Any:
        architectures = config.architectures or ()
        if not any(name.endswith("ForTokenClassification") for name in architectures):
            return None
        from toolkit.features.spans.evaluation import SpanAnswers
        from toolkit.features.spans.model import STRIDE, labels_of_tags

        return SpanAnswers(labels_of_tags(config), getattr(config, STRIDE, None))

    def results(
        self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any
    ) -> Sequence[str]:
        if not isinstance(settings, SpanSettings) or evaluation.predictions is None:
            return ()
        from toolkit.features.spans.mistakes import summary

        content = summary(evaluation.predictions())
        f1 = content["intervals"]["f1"]
        interval = f"95 % interval of f1 over texts: {f1['low']:.4f} to {f1['high']:.4f}"
        kinds = "missed {missed}, invented {invented}, wrong label {label}, wrong border {border}"
        return [f"  {interval}; spans: {kinds.format(**content['kinds'])}"]

    def page(self, page: Any) -> PagePart | None:
        if page.record.problem_type != "token_classification":
            return None
        from toolkit.features.spans.mistakes import summary

        lines = list(page.record.predictions())
        if not lines:
            return None
        links = {"spans": "Spans", "worst-spans": "Worst mistakes"}
        context = summary(lines, page.texts)
        return PagePart(Path(__file__).with_name("page.html"), context, links)


FEATURE = SpansFeature(recipes={"ner": SpanSettings})
