"""`--tune_thresholds`, `--calibrate`, `--abstain_below`: the settings and the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from toolkit.config.parse import section_in
from toolkit.config.sections import TaskSettings, Values, needs, section
from toolkit.utils.features import Feature, PagePart


@section
class DecisionSettings:
    """How probabilities become answers; tuned on the validation rows at the end and saved with the
    model."""

    tune_thresholds: str | None = Field(
        default=None, pattern=r"^(f1|precision_at_recall=(0?\.\d+|1))$"
    )
    """For two classes or several labels: f1, or precision_at_recall=0.9: the best precision with a
    recall of at least 90 %."""
    positive_class: str | None = None
    """With two classes, the one whose threshold is tuned; the second one when not given."""
    calibrate: bool = False
    """Divide the logits by a temperature, so that of answers with probability 0.8 about 80 % are
    right."""
    abstain_below: float | None = Field(default=None, gt=0, lt=1)
    """Give no answer (null, an empty cell) where its probability is lower; for one class per
    text."""

    @staticmethod
    def contradictions(values: Values) -> Iterator[str]:
        yield from needs(values, "positive_class", "tune_thresholds")

    @property
    def any(self) -> bool:
        return bool(
            self.tune_thresholds or self.calibrate or self.abstain_below is not None
        )


class DecisionsFeature(Feature):
    """Decisions, tuned on the validation rows with the best model."""

    def settings(self, settings_class: type) -> Mapping[str, type]:
        return (
            {"decisions": DecisionSettings}
            if issubclass(settings_class, TaskSettings)
            else {}
        )

    def data(self, settings: Any, data: Any, tokenizer: Any, accelerator: Any) -> Any:
        decisions = section_in(settings, DecisionSettings)
        if decisions.any:
            from toolkit.features.decisions.tune import check

            check(decisions, data.labels)
        return data

    def best_model(self, run: Any, evaluate: Callable[[Any], Any]) -> None:
        from toolkit.features.decisions.tune import tune_and_save

        tune_and_save(run, section_in(run.settings, DecisionSettings), evaluate)

    def answers(self, model: str, config: Any) -> Any:
        from toolkit.evaluation.answers import labels_of
        from toolkit.features.decisions.decisions import saved_decisions

        return saved_decisions(model, labels_of(config))

    def page(self, page: Any) -> PagePart | None:
        effect = page.last.numbers.get("decisions")
        if effect is None:
            return None
        template = Path(__file__).with_name("page.html")
        return PagePart(template, {"effect": effect}, {"decisions": "Decisions"})


FEATURE = DecisionsFeature()
