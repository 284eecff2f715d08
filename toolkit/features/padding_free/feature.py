"""`--padding_free`: the hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.parse import section_in
from toolkit.config.sections import TaskSettings, section
from toolkit.utils.features import Feature


@section
class PaddingFreeSettings:
    """Batches without padding."""

    padding_free: bool = False
    """Pack the texts of a micro-batch into one row: the same losses without padding (except in
    attention, at times)."""


class PaddingFreeFeature(Feature):
    """Packed batches, and classifiers that accept them."""

    def settings(self, settings_class: type) -> Mapping[str, type]:
        if issubclass(settings_class, TaskSettings):
            return {"padding_free": PaddingFreeSettings}
        return {}

    def data(self, settings: Any, data: Any, tokenizer: Any, accelerator: Any) -> Any:
        if not section_in(settings, PaddingFreeSettings).padding_free:
            return data
        from toolkit.features.padding_free.collator import PackedCollator

        return data.with_collator(PackedCollator)


FEATURE = PaddingFreeFeature()
