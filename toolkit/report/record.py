"""What the files of a run say, for the model card, report.html and comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import demo
from toolkit.evaluation import Best, Evaluation
from toolkit.report.files import read_lines, run_config


@dataclass(frozen=True)
class Record:
    """The content of a run's files."""

    folder: Path
    config: dict[str, Any]
    """config.json."""
    steps: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    evaluations: list[dict[str, Any]]
    """The lines of eval.jsonl, without those on truncated texts (`--compare_max_length`), which are
    no results of the run."""

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Raises UserError if `folder` holds no run."""
        config = json.dumps(run_config(folder), ensure_ascii=False)
        config = config.replace(f"{Path.home()}/", "~/")
        steps = list(read_lines(folder / "metrics.jsonl"))
        lines = read_lines(folder / "eval.jsonl")
        evaluations = [line for line in lines if "max_length" not in line]
        return cls(folder, json.loads(config), steps, evaluations)

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["settings"]

    @property
    def language(self) -> str:
        return self.settings.get("language") or "en"

    @property
    def data(self) -> dict[str, Any]:
        return self.config["data"]

    @property
    def problem_type(self) -> str:
        return self.data["problem_type"]

    @property
    def last(self) -> Evaluation:
        """The last evaluation, that of the rows in predictions.jsonl; without numbers if there is
        none."""
        return self.evaluation_at(None)

    def evaluation_at(self, step: int | None) -> Evaluation:
        """The last evaluation of the weights after `step`, or of any."""
        for line in reversed(self.evaluations):
            if step in (None, line["step"]):
                return Evaluation(line["split"], line, None)
        return Evaluation("validation", {}, None)

    @property
    def training_evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of the split that is evaluated during training."""
        return [
            line
            for line in self.evaluations
            if line["split"] == self.evaluations[0]["split"]
        ]

    @property
    def best(self) -> Best:
        """The run's metric for the best model, before any evaluation."""
        greater = self.settings.get("greater_is_better")
        return Best(self.data["metric_for_best_model"], greater_is_better=greater)

    def predictions(self) -> Iterator[dict[str, Any]]:
        """The lines of predictions.jsonl; a run that was killed in an evaluation has none."""
        return read_lines(self.folder / "predictions.jsonl")

    @property
    def base_model(self) -> str:
        return public_name(self.settings["model_name_or_path"])

    @property
    def data_name(self) -> str:
        """The name of the data set, or of the training file."""
        settings = self.settings
        if settings.get("dataset_name"):
            return public_name(settings["dataset_name"])
        return Path(str(settings.get("train_file") or settings.get("test_file"))).name


def results(numbers: dict[str, Any]) -> dict[str, float | None]:
    """The metrics of an evaluation that are a single number; None: not finite."""
    return {
        name: value for name, value in numbers.items() if isinstance(value, float | None)
    }


def hub_name(name: str | None) -> str | None:
    """The name on the hub of a model or data set; None for a local one."""
    if not name or name.startswith(demo.PREFIX):
        return demo.demo_entry(name).origin or None
    if name.startswith(("/", ".", "~")) or Path(name).exists():
        return None
    return name


def public_name(name: str) -> str:
    """The name on the hub, or the last part of a local path: its folders mean nothing elsewhere,
    and may contain a user's name."""
    return hub_name(name) or Path(name.removeprefix(demo.PREFIX)).name
