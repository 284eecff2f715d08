"""`--baselines`: what simple models reach on the same rows."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.config.parse import has_section
from toolkit.config.sections import TrainingSettings, section
from toolkit.utils.features import Feature


@section
class BaselineSettings:
    """What simple models reach."""

    baselines: bool = True
    """At the end, set accuracy and F1 beside those of the largest class and of tf-idf with logistic regression."""


class BaselinesFeature(Feature):
    """The model beside simple ones, at the end of a run."""

    def sections(self, settings_class: type) -> Mapping[str, type]:
        return {"baselines": BaselineSettings} if has_section(settings_class, TrainingSettings) else {}


FEATURE = BaselinesFeature()
