"""Continued pretraining (recipes/pretrain.py)."""

from toolkit.features.pretraining.settings import PretrainSettings
from toolkit.utils.features import Feature

FEATURE = Feature(recipes={"pretrain": PretrainSettings})
