"""`--baselines`: what simple models reach on the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.parse import has_section, section_in
from toolkit.config.sections import TrainingSettings, section
from toolkit.utils.features import Feature, PagePart


@section
class BaselineSettings:
    """What simple models reach."""

    baselines: bool = True
    """At the end, set accuracy and F1 beside those of the largest class and of tf-idf with logistic regression."""


class BaselinesFeature(Feature):
    """The model beside simple ones, at the end of a run."""

    files = ("baselines.json",)

    def sections(self, settings_class: type) -> Mapping[str, type]:
        return {"baselines": BaselineSettings} if has_section(settings_class, TrainingSettings) else {}

    def results(self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any) -> Sequence[str]:
        from toolkit.features.baselines.baselines import write_baselines

        if not section_in(settings, BaselineSettings).baselines:
            (folder / self.files[0]).unlink(missing_ok=True)  # of the same run with other settings
            return ()
        return write_baselines(folder, data, evaluation.outputs, answers) if evaluation.outputs else ()

    def page(self, page: Any) -> PagePart | None:
        from toolkit.features.baselines.baselines import read_baselines

        content = read_baselines(page.folder, page.last)
        if content is None:
            return None
        titles = [page.record.metric_title(name) for name in next(iter(content["models"].values()))]
        return PagePart(Path(__file__).with_name("page.html"), {"baselines": content, "titles": titles})


FEATURE = BaselinesFeature()
