"""Settings: their sections, and how they are read."""

from toolkit.config.parse import build as build
from toolkit.config.parse import fields_of as fields_of
from toolkit.config.parse import flat as flat
from toolkit.config.parse import parse as parse
from toolkit.config.parse import section_in as section_in
from toolkit.config.parse import sections_of as sections_of
from toolkit.config.parse import settings_of_features as settings_of_features
from toolkit.config.parse import tasks as tasks
from toolkit.config.sections import DataSettings as DataSettings
from toolkit.config.sections import DistillationSettings as DistillationSettings
from toolkit.config.sections import LongTaskSettings as LongTaskSettings
from toolkit.config.sections import LongTextSettings as LongTextSettings
from toolkit.config.sections import ModelSettings as ModelSettings
from toolkit.config.sections import ObjectiveSettings as ObjectiveSettings
from toolkit.config.sections import PretrainedSettings as PretrainedSettings
from toolkit.config.sections import ProblemType as ProblemType
from toolkit.config.sections import SchedulerName as SchedulerName
from toolkit.config.sections import TaskSettings as TaskSettings
from toolkit.config.sections import TextSettings as TextSettings
from toolkit.config.sections import TrainingSettings as TrainingSettings
from toolkit.config.sections import section as section
