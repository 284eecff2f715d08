"""`--tune_thresholds`, `--calibrate`, `--abstain_below`: the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.config.parse import section_in
from toolkit.config.sections import TaskSettings
from toolkit.features.decisions.settings import DecisionSettings
from toolkit.utils.features import Feature, PagePart


class DecisionsFeature(Feature):
    """Decisions, tuned on the validation rows with the best model."""

    def sections(self, settings_class: type) -> Mapping[str, type]:
        return {"decisions": DecisionSettings} if issubclass(settings_class, TaskSettings) else {}

    def faults(self, values: Mapping[str, Any]) -> Iterable[str]:
        if values.get("positive_class") is not None and values.get("tune_thresholds") is None:
            yield "--positive_class needs --tune_thresholds"

    def run_settings(self, settings: Any, data: Any, accelerator: Any) -> Any:
        decisions = section_in(settings, DecisionSettings)
        if decisions.any:
            from toolkit.features.decisions.decisions import check

            check(decisions, data.labels)
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
        from toolkit.features.decisions.charts import coverage, reliability

        charts = [reliability(effect["before"], effect["after"])]
        charts += [coverage(effect["coverage"], effect["abstain_below"])] if "coverage" in effect else []
        context = {"effect": effect, "charts": charts}
        return PagePart(Path(__file__).with_name("page.html"), context, {"decisions": "Decisions"})


FEATURE = DecisionsFeature()
