"""The hooks of features, which the core calls, and the list of all features.

A feature is a folder under `toolkit/features/` whose `feature.py` holds `FEATURE`, an instance of a
subclass of `Feature`. That module is imported whenever settings are parsed or `toolkit --help` is
printed, so it must not import torch. `register` adds a feature from elsewhere, before
`config.parse`."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Command:
    """A `toolkit` command."""

    name: str
    help: str
    run: str | Callable[..., Any]
    """A function of the parsed arguments, or `MODULE:FUNCTION`, imported when the command runs."""
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    """Without it `run` gets the unparsed arguments."""
    description: str = ""
    epilog: str = ""
    usage: str | None = None
    relaunches: bool = True
    """Whether launch options (`--config_file`) restart this command under a launcher, or are passed
    to it."""
    extensible: bool = False
    """Whether features may add options to this core command (`add_options`); otherwise none is
    imported."""
    passes_rest: bool = False
    """Whether `run` gets unknown arguments (a recipe's) as a second argument."""


@dataclass(frozen=True)
class PagePart:
    """What a feature adds to report.html."""

    template: Path | str
    """A Jinja template (a file or its text) with optional blocks: `summary` (below the numbers),
    `facts` (rows of the list of facts), `section` (below the classes), `mistakes` (a sentence above
    the worst mistakes)."""
    context: Mapping[str, Any]
    """The template's variables, in addition to those of report.html."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Links at the top of the page: section id -> name."""
    texts: Mapping[int, Any] = field(default_factory=dict)
    """Index of a sample -> markup of its text in the table of the worst mistakes."""


class Feature:
    """Hooks, which do nothing by default. Settings, data and runs are a recipe's. With `tasks` or
    `switches` the hooks that get `settings` are called only for these settings."""

    tasks: ClassVar[Mapping[str, type]] = {}
    """The feature's recipes: name -> class of settings."""
    switches: ClassVar[Sequence[str]] = ()
    """Settings, any of which turns the feature on."""
    files: ClassVar[Sequence[str]] = ()
    """Names of the files that `results` writes."""
    paths: ClassVar[Sequence[str]] = ()
    """Settings that are paths and may differ between machines."""
    usual_metrics: ClassVar[Mapping[str, str]] = {}
    """For the feature's targets: `problem_type` in config.json -> default
    `--metric_for_best_model`."""
    pipeline_tags: ClassVar[Mapping[str, str]] = {}
    """For the feature's targets: `problem_type` in config.json -> pipeline tag of the hub and
    `transformers`."""

    def __init__(self, *commands: Command) -> None:
        """`commands`: the feature's `toolkit` commands."""
        self.commands = commands

    def sections(self, settings_class: type) -> Mapping[str, type]:
        """Sections (`toolkit.config.section`) to add to this class of settings: field name ->
        section."""
        return {}

    def targets(self, settings: Any) -> Any:
        """The subclass of `toolkit.data.table.Targets` that these settings train on, or None."""

    def data_facts(self, settings: Any, facts: Facts, accelerator: Any) -> dict[str, Any]:
        """Facts to add to the cache key of prepared data (JSON: files, tokenizer, settings); all
        processes call it."""
        return {}

    def select_rows(
        self,
        settings: Any,
        facts: Facts,
        rows: Any,
        targets: Any,
    ) -> tuple[Any, list[str]]:
        """({split: rows} from the training rows, notes). If it has a `validation` split, no other
        split is read, and none is held out. `facts`: what `data_facts` of all features returned."""
        return {"train": rows}, []

    def collator(self, settings: Any) -> Any:
        """The subclass of `toolkit.data.batches.Collator` (or a callable like it) for training and
        evaluation; its `prepare_model` adapts the model. None: batches are padded. The first
        feature that returns one is used."""

    def run_settings(self, settings: Any, data: Any, accelerator: Any) -> Any:
        """The settings of a run that starts, changed or not. Raises UserError if they do not fit
        the data."""
        return settings

    def best_model(self, run: Any, evaluate: Callable[[Any], Any]) -> None:
        """Called in all processes after training, when `run` has loaded the best model, before the
        last evaluation. It may set `run.answers`."""

    def results(
        self,
        folder: Path,
        settings: Any,
        data: Any,
        evaluation: Any,
        answers: Any,
    ) -> Sequence[str]:
        """Writes files about an evaluation to the folder of a run or of `toolkit evaluate` (there
        `data` is None, and only the main process calls it), before the pages are written. Returns
        lines to print."""
        return ()

    def finished(self, folder: Path, settings: Any) -> Sequence[str]:
        """Called in the main process when a run has written all its files and printed its results.
        Returns further lines to print."""
        return ()

    def next_command(self, folder: Path, settings: Any) -> str | None:
        """The command printed below `next:` when the run in `folder` has ended; "" for none. The
        first feature that returns one is taken."""

    def answers(self, model: str, config: Any) -> Any:
        """Turns a saved model's outputs into answers (a `toolkit.evaluation.answers.Answers`), or
        None for other models; `config` is transformers'. The first feature that returns one is
        used."""

    def data(self, settings: Any, data: Any, tokenizer: Any, accelerator: Any) -> Any:
        """The data of a run (`toolkit.data.prepare.Prepared`), changed or not: another collator,
        further columns. Raises UserError for settings that do not fit the data."""
        return data

    def load_model(self, model: str, config: Any) -> Any:
        """Loads a saved classifier of another kind than transformers', or None for other models;
        `config` is transformers'. The first feature that returns one is used."""

    def objective(self, settings: Any, objective: Any, data: Any) -> Any:
        """The objective (`toolkit.objective.Objective`) of a run, changed or not."""
        return objective

    def model(self, run: Any, model: Any) -> None:
        """Adapts a model before it is copied or sharded. Raises UserError for one that does not fit
        the settings."""

    def add_options(self, command: str, parser: argparse.ArgumentParser) -> None:
        """Adds options to an extensible core command (`report`)."""

    def page(self, page: Any) -> PagePart | None:
        """The part to add to a run's report.html (`toolkit.report.html.Page`)."""

    def folder_page(self, folder: Path) -> Path | None:
        """Writes the page of a folder that this feature created (not a run's); None for other
        folders."""


_REGISTERED: list[Feature] = []


def register(feature: Feature) -> None:
    """Adds a feature from outside `toolkit/features/` to this process."""
    if feature not in _REGISTERED:
        _REGISTERED.append(feature)


def features() -> list[Feature]:
    """All features: those of `toolkit/features/` by name, then the registered ones."""
    return [*_installed(), *_REGISTERED]


@functools.cache
def _installed() -> tuple[Feature, ...]:
    spec = importlib.util.find_spec("toolkit.features")  # None if the folder was taken away
    folders = spec.submodule_search_locations if spec else []
    names = sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg)
    modules = [f"toolkit.features.{name}.feature" for name in names]
    return tuple(importlib.import_module(name).FEATURE for name in modules)


def hooks(name: str, settings: Any) -> list[Callable[..., Any]]:
    """The hook of each feature that is on for these settings."""
    return [getattr(feature, name) for feature in features() if _is_on(feature, settings)]


def _is_on(feature: Feature, settings: Any) -> bool:
    if feature.tasks and not isinstance(settings, tuple(feature.tasks.values())):
        return False
    if not feature.switches:
        return True
    sections = vars(settings).values()
    return any(getattr(part, name, None) for part in sections for name in feature.switches)


def write_results(
    folder: Path,
    settings: Any,
    data: Any,
    evaluation: Any,
    answers: Any,
) -> list[str]:
    """Calls the hook `results` and collects the lines."""
    lines: list[str] = []
    for results in hooks("results", settings):
        lines += results(folder, settings, data, evaluation, answers)
    return lines


def first(results: Iterable[Any]) -> Any:
    """The first that is not None."""
    return next((result for result in results if result is not None), None)
