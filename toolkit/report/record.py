"""A run's files, read for the model card, report.html and comparisons; and how numbers and names are written."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from toolkit import demo
from toolkit.errors import UserError
from toolkit.evaluation import Best, Evaluation
from toolkit.evaluation.outputs import drop_redundant_f1
from toolkit.report.files import by_step, read_lines
from toolkit.utils.files import refuse_link_out

# our name -> what readers see
METRICS = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "f1_macro": "F1 (macro)",
    "f1_micro": "F1 (micro)",
    "f1_weighted": "F1 (weighted)",
    "ece": "Expected calibration error",
    "brier": "Brier score",
    "mse": "Mean squared error",
    "mae": "Mean absolute error",
    "pearson": "Pearson correlation",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
}


@dataclass(frozen=True)
class Record:
    """A run's files."""

    config: dict[str, Any]
    """config.json, with `~` for the user's home folder."""
    steps: list[dict[str, Any]]
    """The lines of metrics.jsonl, each step once."""
    evaluations: list[dict[str, Any]]
    """The lines of eval.jsonl, single numbers only; without comparisons."""
    comparisons: list[dict[str, Any]]
    """Evaluations of texts that were cut on purpose: no results of the run, no candidates for the best."""
    last: Evaluation
    """The evaluation whose rows predictions.jsonl holds."""

    @classmethod
    def load(cls, folder: Path, last: Evaluation | None = None) -> Record:
        """`last`: by default the last one in eval.jsonl. Raises OSError where config.json is missing."""
        config = (folder / "config.json").read_text(encoding="utf-8")
        if Path.home().name:
            config = re.sub(re.escape(str(Path.home())) + r'(?=["/ ])', "~", config)
        lines = [  # without the confusion matrix, which is large for many classes
            {"step": line["step"], "split": line["split"],
             **{name: value for name, value in line.items() if isinstance(value, int | float | None)}}
            for line in read_lines(folder / "eval.jsonl")
        ]  # fmt: skip
        evaluations, comparisons = ([line for line in lines if ("max_length" in line) == cut] for cut in (False, True))
        steps = by_step(read_lines(folder / "metrics.jsonl"))
        return cls(json.loads(config), steps, evaluations, comparisons, last or last_evaluation(folder))

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["settings"]

    @property
    def data(self) -> dict[str, Any]:
        return self.config["data"]

    @property
    def problem_type(self) -> str:
        return self.data["problem_type"]

    @property
    def last_step(self) -> int | None:
        return self.evaluations[-1]["step"] if self.evaluations else None

    @property
    def metric_names(self) -> list[str]:
        """The names of the evaluations' numbers, but for a micro F1 that is always the accuracy once more."""
        return list(dict.fromkeys(name for line in self.evaluations for name in drop_redundant_f1(line)))

    @property
    def during(self) -> list[dict[str, Any]]:
        """The evaluations of the split that is evaluated while the run trains."""
        return [line for line in self.evaluations if line["split"] == self.evaluations[0]["split"]]

    @property
    def best(self) -> Best:
        """The metric that chooses the run's best model, before the first evaluation."""
        metric, greater = self.settings.get("metric_for_best_model"), self.settings.get("greater_is_better")
        return Best(metric, self.problem_type, greater_is_better=greater)

    @cached_property
    def saved_step(self) -> int | None:
        """The best step so far; in a run that was killed it need not be that of the last evaluation."""
        best = self.best
        for line in self.during:
            best.update(Evaluation(line["split"], line, None), line["step"])
        return best.step or None

    @property
    def cost(self) -> dict[str, Any]:
        """Seconds of training steps (no evaluation), the median speed, the most memory of a process."""
        timed = [step for step in self.steps if step.get("samples_per_second")]
        peaks = [step["peak_memory_bytes"] for step in self.steps if step.get("peak_memory_bytes")]
        return {
            "steps": self.steps[-1]["step"] if self.steps else 0,
            "seconds": sum(step["samples"] / step["samples_per_second"] for step in timed) or None,
            **{
                name: statistics.median(values) if (values := [step[name] for step in timed if name in step]) else None
                for name in ("samples_per_second", "tokens_per_second")
            },
            "peak_memory_bytes": max(peaks, default=None),
        }

    def predictions(self, folder: Path) -> Iterator[dict[str, Any]]:
        """The lines of predictions.jsonl, with the answers that `--abstain_below` withheld (`held_back`), which metrics
        count, too."""
        names = self.data.get("labels") or ()
        by_name = self.last.numbers.get("decisions", {}).get("thresholds", {})
        thresholds = np.array([by_name.get(name, 0.5) for name in names])
        for line in read_lines(folder / "predictions.jsonl"):
            if line.get("prediction", "") is None and "probabilities" in line:
                probabilities = np.array(line["probabilities"], float).clip(1e-12)  # null becomes a NaN
                scores = np.log(probabilities) - np.log(thresholds / (1 - thresholds))
                line |= {"prediction": names[int(scores.argmax())], "held_back": True}
            yield line

    def metric_title(self, name: str) -> str:
        """`f1_macro` -> `F1 (macro)`; for several labels, accuracy counts exact sets only."""
        if name == "accuracy" and self.problem_type == "multi_label_classification":
            return "Accuracy (all labels right)"
        if name == "loss" and self.problem_type == "title_generation":
            return "Loss (of a title's token)"
        if name == "loss" and self.settings.get("class_weights"):
            return "Loss (weighted by class)"
        return METRICS.get(name) or name.replace("_", " ")

    def results(self, numbers: dict[str, Any] | None = None) -> dict[str, float | None]:
        """An evaluation's single numbers by title, the loss last; by default those of the last evaluation."""
        numbers = drop_redundant_f1(self.last.numbers if numbers is None else numbers)
        names = sorted((name for name, value in numbers.items() if isinstance(value, float | None)), key="loss".__eq__)
        return {self.metric_title(name): numbers[name] for name in names}

    @property
    def readings(self) -> list[tuple[int, dict[str, float | None]]]:
        """(tokens read of each text, the results) of the last model, its own length first; empty for one length."""
        others = {line["max_length"]: self.results(line) for line in self.comparisons if line["step"] == self.last_step}
        return [(self.data["max_length"], self.results()), *sorted(others.items(), reverse=True)] if others else []

    @property
    def base(self) -> str:
        """The base model's name for readers elsewhere: demo names become the origin's, paths their last part."""
        name = str(self.settings["model_name_or_path"])
        return demo.demo_entry(name).origin or without_folders(name)

    @property
    def data_name(self) -> str:
        """The data set's name, or the training file's without its folders."""
        if not self.settings.get("dataset_name"):
            return Path(str(self.settings.get("train_file") or self.settings.get("test_file"))).name
        name = without_folders(self.settings["dataset_name"].removeprefix(demo.PREFIX))
        configuration = self.settings.get("dataset_config_name")
        return f"{name} ({configuration})" if configuration else name


def last_evaluation(folder: Path, step: int | None = None) -> Evaluation:
    """The last one in eval.jsonl (of the weights of `step`), comparisons apart; without numbers if there is none."""
    lines = (line for line in read_lines(folder / "eval.jsonl") if "max_length" not in line)
    *_, last = [{}, *(line for line in lines if step in (None, line["step"]))]
    last.pop("step", None)
    return Evaluation(last.pop("split", "validation"), last, None)


def run_config(folder: Path) -> dict[str, Any]:
    """config.json of a run. Raises UserError where `folder` holds none."""
    if not (folder / "config.json").is_file():
        runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        hint = f": did you mean {runs[0]}?" if runs else ""
        raise UserError(f"{folder} is not a run folder: it has no config.json{hint}")
    for name in ("config.json", "metrics.jsonl", "eval.jsonl", "predictions.jsonl"):
        refuse_link_out(folder / name, folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / 'config.json'} is not JSON ({error})") from None
    if "data" not in config:
        hint = f": did you mean {folder.parent}?" if (folder.parent / "metrics.jsonl").is_file() else ""
        raise UserError(f"{folder} is not a run folder, its config.json is a model's{hint}")
    return dict(config)


def is_local(name: str) -> bool:
    """Whether a model or data set is a folder here, and not a name on the hub."""
    return name.startswith(("/", "./", "../", "~")) or Path(name).exists()


def without_folders(name: str) -> str:
    """A path's last part: folders mean nothing elsewhere, and may name a user."""
    return Path(name).resolve().name if is_local(name) else name


def render(template: str | Path, context: Mapping[str, Any], **filters: Any) -> str:
    """A template of this folder by its name, or a feature's file; values are escaped in HTML. `number`, `breakable` and
    `filters` are its filters."""
    environment = _environment(str(template).endswith(".html"), filters)
    if isinstance(template, Path):
        return environment.from_string(template.read_text(encoding="utf-8")).render(context)
    return environment.get_template(template).render(context)


def render_blocks(template: str | Path, context: Mapping[str, Any], **filters: Any) -> dict[str, Markup]:
    """Each block of a feature's HTML template, a file or its text, by its name."""
    text = template.read_text(encoding="utf-8") if isinstance(template, Path) else template
    loaded = _environment(True, filters).from_string(text)
    return {name: Markup("".join(block(loaded.new_context(dict(context))))) for name, block in loaded.blocks.items()}


def _environment(escapes: bool, filters: Mapping[str, Any]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=escapes,
    )
    environment.filters |= {"number": number, "breakable": _breakable, **filters}
    return environment


def number(value: Any) -> str:
    """`7677` -> `7,677`, `0.745603` -> `0.7456`, `5e-05` -> `5e-05`; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def _breakable(name: Any) -> Markup:
    """A file's or a class's name that a browser may break after `_` and `/`, rather than within a word."""
    return Markup(re.sub("([_/])", r"\1<wbr>", str(escape(name))))


def plain(value: Any) -> str:
    """A setting's value: `5e-05`, `bf16`; a dash for None."""
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
