"""`--teacher`: the settings and the hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from toolkit.config.parse import section_in
from toolkit.config.sections import Pairs, TaskSettings, section
from toolkit.utils.features import Feature


@section
class DistillationSettings:
    """Distillation from a fine-tuned model."""

    needs: ClassVar[Mapping[str, str]] = {
        "distillation_temperature": "teacher",
        "distillation_alpha": "teacher",
    }
    conflicts: ClassVar[Pairs] = (
        ("r_drop_alpha", "teacher", "its second pass has no teacher"),
        ("fgm_epsilon", "teacher", "its second pass has no teacher"),
    )

    teacher: str | None = None
    """A classifier for the same labels, a run's model folder or a hub name; its outputs are
    cached."""
    distillation_temperature: float = Field(default=2.0, gt=0)
    """Divides the logits of teacher and student: above 1 probabilities become softer."""
    distillation_alpha: float = Field(default=0.5, ge=0, le=1)
    """The weight of the teacher's loss; the labels' loss has the rest."""


class DistillationFeature(Feature):
    """A column of the teacher's logits, and a term of the objective that reads it."""

    def settings(self, settings_class: type) -> Mapping[str, type]:
        if not issubclass(settings_class, TaskSettings):
            return {}
        return {"distillation": DistillationSettings}

    def data(self, settings: Any, data: Any, tokenizer: Any, accelerator: Any) -> Any:
        if section_in(settings, DistillationSettings).teacher is None:
            return data
        from toolkit.features.distillation.teacher import add_teacher_logits

        return add_teacher_logits(accelerator, settings, data, tokenizer)

    def objective(self, settings: Any, objective: Any, data: Any) -> Any:
        distillation = section_in(settings, DistillationSettings)
        if distillation.teacher is None:
            return objective
        from toolkit.features.distillation.losses import with_teacher

        return with_teacher(
            objective,
            data.labels.problem_type,
            distillation.distillation_alpha,
            distillation.distillation_temperature,
        )


FEATURE = DistillationFeature()
