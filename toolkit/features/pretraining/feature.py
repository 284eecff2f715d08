"""Continued pretraining (recipes/pretrain.py): the hooks."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from toolkit.features.pretraining.settings import PretrainSettings
from toolkit.utils.features import Feature

_PROBLEM = "masked_language_modeling"
_MASKED_30_PERCENT = ("modernbert", "eurobert")  # at least, in their pretraining


class PretrainingFeature(Feature):
    """Masked-language modelling on texts without labels."""

    tasks: ClassVar = {"pretrain": PretrainSettings}
    usual_metrics: ClassVar = {_PROBLEM: "loss"}
    pipeline_tags: ClassVar = {_PROBLEM: "fill-mask"}
    paths = ("init_new_tokens",)

    def targets(self, settings: Any) -> Any:
        from toolkit.features.pretraining.data import Masks

        return Masks

    def collator(self, settings: Any) -> Any:
        from toolkit.features.pretraining.data import MaskingCollator
        from toolkit.pretrained import load_config

        default = "0.30" if load_config(settings.model).model_type in _MASKED_30_PERCENT else "0.15"
        first, _, last = (settings.masking.mlm_probability or default).partition(":")
        return partial(
            MaskingCollator,
            seed=settings.training.seed,
            probabilities=(float(first), float(last or first)),
        )

    def next_command(self, folder: Path, settings: Any) -> str | None:
        from toolkit.pretrained import load_config

        recipe = "bigbird" if load_config(settings.model).model_type == "big_bird" else "cls"
        model = shlex.quote(str(folder / "model"))
        return f"python recipes/{recipe}.py --model_name_or_path {model} --train_file YOUR_FILE.csv"


FEATURE = PretrainingFeature()
