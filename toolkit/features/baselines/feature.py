"""`--baselines`: comparison with simple models on the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.parse import section_in
from toolkit.config.sections import TaskSettings, section
from toolkit.utils.features import Feature, PagePart


@section
class BaselineSettings:
    """Comparison with simple models."""

    baselines: bool = True
    """At the end, compare accuracy and F1 with the largest class and with tf-idf + logistic
    regression."""


class BaselinesFeature(Feature):
    def settings(self, settings_class: type) -> Mapping[str, type]:
        if issubclass(settings_class, TaskSettings):
            return {"baselines": BaselineSettings}
        return {}

    def results(
        self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any
    ) -> Sequence[str]:
        if not section_in(settings, BaselineSettings).baselines or not evaluation.outputs:
            (folder / "baselines.json").unlink(missing_ok=True)  # of an earlier model
            return ()
        from toolkit.features.baselines.baselines import write_baselines

        split, logits = evaluation.outputs
        return write_baselines(folder, data.train if data else None, split, logits, answers)

    def page(self, page: Any) -> PagePart | None:
        from toolkit.features.baselines.baselines import doubts, read_baselines

        content = read_baselines(page.folder, page.last)
        if content is None:
            return None
        models = content["models"]
        context = {"models": models, "doubts": doubts(models)}
        return PagePart(Path(__file__).with_name("page.html"), context)


FEATURE = BaselinesFeature()
