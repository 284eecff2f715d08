"""Settings: their sections, and how they are read."""

from toolkit.config.parse import build, flat, parse, sections_of
from toolkit.config.sections import (
    DataSettings,
    GenerationSettings,
    LongTaskSettings,
    LongTextSettings,
    LongTrainingSettings,
    ModelSettings,
    PretrainedSettings,
    ProblemType,
    SchedulerName,
    Task,
    TaskSettings,
    TextSettings,
    TitleDataSettings,
    TitleSettings,
    TrainingSettings,
    section,
)

__all__ = [
    "DataSettings",
    "GenerationSettings",
    "LongTaskSettings",
    "LongTextSettings",
    "LongTrainingSettings",
    "ModelSettings",
    "PretrainedSettings",
    "ProblemType",
    "SchedulerName",
    "Task",
    "TaskSettings",
    "TextSettings",
    "TitleDataSettings",
    "TitleSettings",
    "TrainingSettings",
    "build",
    "flat",
    "parse",
    "section",
    "sections_of",
]
