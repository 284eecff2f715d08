"""`--folds` and `--label_corrections`: the settings and the hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from toolkit.config.parse import has_section, section_in
from toolkit.config.sections import DataSettings, Pairs, section
from toolkit.utils.features import Feature


@section
class FoldSettings:
    """Out-of-fold predictions, and corrected labels."""

    alternatives: ClassVar[Pairs] = (
        *((name, "folds", "each fold is evaluated on a part of the training rows")
          for name in ("validation_file", "test_file", "validation_split", "max_eval_samples")),
        *((name, "folds", "they are tuned for one model, and folds train several")
          for name in ("tune_thresholds", "calibrate", "abstain_below")),
    )  # fmt: skip

    folds: int | None = Field(default=None, ge=2, le=100)
    """Cross-validation: N models, each trained without a part of the training rows, find wrong labels in that part."""
    label_corrections: str | None = None
    """JSONL, as saved by the page of `--folds`: corrected labels of training rows, and rows to leave out."""

    @staticmethod
    def contradictions(values: Mapping[str, Any]) -> Iterator[str]:
        if values.get("folds") is None:
            return
        if values.get("output_dir") is None:
            yield "--folds needs --output_dir, where the same command continues with the next unfinished fold"
        if (
            str(values.get("overwrite_output_dir", False)).lower() == "true"
            or values.get("resume", "auto") != "auto"
        ):
            yield "--folds always resumes: drop --overwrite_output_dir and --resume, or name another --output_dir"


class FoldsFeature(Feature):
    """Cross-validation, and training rows with corrected labels."""

    switches = ("folds", "label_corrections")
    paths = ("label_corrections",)

    def sections(self, settings_class: type) -> Mapping[str, type]:
        return {"folds": FoldSettings} if has_section(settings_class, DataSettings) else {}

    def data_facts(
        self, settings: Any, facts: Mapping[str, Any], accelerator: Any
    ) -> dict[str, Any]:
        from toolkit.features.folds.split import data_facts

        folds = section_in(settings, FoldSettings)
        return data_facts(settings, folds.folds, folds.label_corrections, facts, accelerator)

    def select_rows(
        self, settings: Any, facts: Mapping[str, Any], rows: Any, targets: Any
    ) -> tuple[Any, list[str]]:
        from toolkit.features.folds.split import select_rows

        return select_rows(
            settings, section_in(settings, FoldSettings).label_corrections, facts, rows, targets
        )

    def run_settings(self, settings: Any, data: Any, accelerator: Any) -> Any:
        if "fold" not in data.feature_facts:
            return settings
        from toolkit.features.folds.split import settings_of_fold

        return settings_of_fold(accelerator, settings, data.feature_facts["fold"])

    def results(
        self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any
    ) -> Sequence[str]:
        if data is None or "fold" not in data.feature_facts:
            return ()
        from toolkit.features.folds.page import finish_fold

        return finish_fold(folder, data, evaluation)

    def next_command(self, folder: Path, settings: Any) -> str | None:
        return (
            None if section_in(settings, FoldSettings).folds is None else ""
        )  # the next fold starts by itself

    def folder_page(self, folder: Path) -> Path | None:
        from toolkit.features.folds.split import FOLDS

        if not (folder / FOLDS).is_file():
            return None
        from toolkit.features.folds.page import write_folds

        write_folds(folder)
        return folder / "report.html"


FEATURE = FoldsFeature()
