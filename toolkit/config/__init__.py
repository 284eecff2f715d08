"""Settings: their sections, and how they are read."""

from toolkit.config.parse import (
    build,
    fields_of,
    flat,
    parse,
    section_in,
    sections_of,
    settings_after_training,
    tasks,
)
from toolkit.config.sections import (
    DataSettings,
    LongTaskSettings,
    LongTextSettings,
    ModelSettings,
    ObjectiveSettings,
    PretrainedSettings,
    ProblemType,
    SchedulerName,
    TaskSettings,
    TextSettings,
    TrainingSettings,
    section,
)

__all__ = [
    "DataSettings",
    "LongTaskSettings",
    "LongTextSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "PretrainedSettings",
    "ProblemType",
    "SchedulerName",
    "TaskSettings",
    "TextSettings",
    "TrainingSettings",
    "build",
    "fields_of",
    "flat",
    "parse",
    "section",
    "section_in",
    "sections_of",
    "settings_after_training",
    "tasks",
]
