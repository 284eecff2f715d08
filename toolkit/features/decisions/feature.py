"""Thresholds, a temperature, no answer where the model is not sure: the settings, and what the core asks of this
feature."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from toolkit.config.parse import section_in
from toolkit.config.sections import TaskSettings, section
from toolkit.utils.features import Feature, PagePart


def _criterion(text: str | None) -> str | None:
    if text is None or re.fullmatch(r"f1|precision_at_recall=(0?\.\d+|1)|cost=\d*\.?\d+:\d*\.?\d+", text):
        return text
    raise ValueError(
        "give f1, precision_at_recall=0.9 (the best precision that still finds 90 %), or cost=1:5 (what a false alarm "
        "and a miss cost)"
    )


@section
class DecisionSettings:
    """How probabilities become answers, tuned on the validation rows at the end and kept with the model."""

    tune_thresholds: Annotated[str | None, AfterValidator(_criterion)] = None
    """f1, and for two classes or several labels precision_at_recall=0.9, or cost=1:5 (of a false alarm : of a miss)."""
    positive_class: str | None = None
    """Of two classes the one that the threshold is for; the second in their order when not given."""
    calibrate: bool = False
    """Divide the logits by a temperature, so that of answers with probability 0.8 about 80 % are right."""
    abstain_below: float | None = Field(default=None, gt=0, lt=1)
    """Give no answer (null, an empty cell) where the probability of the answer is lower; for one class per text."""

    @property
    def any(self) -> bool:
        """Whether anything is to be tuned."""
        return bool(self.tune_thresholds or self.calibrate or self.abstain_below is not None)


class DecisionsFeature(Feature):
    """Decisions, tuned on the validation rows by the best model."""

    def sections(self, settings_class: type) -> Mapping[str, type]:
        return {"decisions": DecisionSettings} if issubclass(settings_class, TaskSettings) else {}

    def faults(self, values: Mapping[str, Any]) -> Iterable[str]:
        if values.get("positive_class") is not None and values.get("tune_thresholds") is None:
            yield "--positive_class is given without --tune_thresholds, which it is for"

    def run_settings(self, settings: Any, data: Any, accelerator: Any) -> Any:
        own = section_in(settings, DecisionSettings)
        if own.any or own.positive_class:
            from toolkit.features.decisions.decisions import check

            check(own, data.labels)
        return settings

    def best_model(self, run: Any, evaluate: Callable[[Any], Any]) -> None:
        from toolkit.features.decisions.decisions import tune_and_save

        tune_and_save(run, section_in(run.settings, DecisionSettings), evaluate)

    def answers(self, model: str, config: Any) -> Any:
        from toolkit.evaluation.answers import labels_of
        from toolkit.features.decisions.decisions import saved_decisions

        return saved_decisions(model, labels_of(config))

    def page(self, page: Any) -> PagePart | None:
        effect = page.last.numbers.get("decisions")
        if effect is None:
            return None
        from toolkit.report import curves

        charts = [curves.reliability(effect["before"], effect["after"])]
        charts += [curves.coverage(effect["coverage"], effect["abstain_below"])] if "coverage" in effect else []
        context = {"effect": effect, "charts": charts}
        return PagePart(Path(__file__).with_name("page.html"), context, {"decisions": "Decisions"})


FEATURE = DecisionsFeature()
