"""`--teacher`: the settings and the hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from toolkit.config.parse import section_in
from toolkit.config.sections import TaskSettings, Values, conflict, needs, section
from toolkit.utils.features import Feature


@section
class DistillationSettings:
    """Distillation from a fine-tuned model."""

    teacher: str | None = None
    """A classifier for the same labels, a run's model folder or a hub name; its outputs are
    cached."""
    distillation_temperature: float = Field(default=2.0, gt=0)
    """Divides the logits of teacher and student: above 1 probabilities become softer."""
    distillation_alpha: float = Field(default=0.5, ge=0, le=1)
    """The weight of the teacher's loss; the labels' loss has the rest."""

    @staticmethod
    def contradictions(values: Values) -> Iterator[str]:
        for name in ("distillation_temperature", "distillation_alpha"):
            yield from needs(values, name, "teacher")
        for name in ("r_drop_alpha", "fgm_epsilon"):
            yield from conflict(values, name, "teacher", "its second pass has no teacher")


class DistillationFeature(Feature):
    """A column of the teacher's logits, and a term of the objective that reads it."""

    affects_training = True

    def settings(self, settings_class: type) -> Mapping[str, type]:
        if not issubclass(settings_class, TaskSettings):
            return {}
        return {"distillation": DistillationSettings}

    def data(self, settings: Any, data: Any, tokenizer: Any, accelerator: Any) -> Any:
        teacher = section_in(settings, DistillationSettings).teacher
        if teacher is None:
            return data
        from toolkit.features.distillation.teacher import add_teacher_logits

        return add_teacher_logits(accelerator, settings, teacher, data, tokenizer)

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
