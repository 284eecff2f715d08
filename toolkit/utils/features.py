"""The hooks of features, which the core calls, and the list of all features.

A feature is a folder under `toolkit/features/` whose `feature.py` holds `FEATURE`, an instance of a
subclass of `Feature`. That module is imported whenever settings are parsed or `toolkit --help` is
printed, so it must not import torch. `register` adds a feature from elsewhere, before
`config.parse`. What belongs to a task (targets, collator, metric) stands in its `Targets`, which
the class of its settings names."""

from __future__ import annotations

import argparse
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    passes_rest: bool = False
    """Whether `run` gets unknown arguments (a recipe's) as a second argument."""


@dataclass(frozen=True)
class PagePart:
    """What a feature adds to report.html."""

    template: Path | str
    """A Jinja template (a file or its text) with optional blocks: `summary` (below the numbers),
    `facts` (rows of the list of facts), `section` (below the classes)."""
    context: Mapping[str, Any]
    """The template's variables, in addition to those of report.html."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Links at the top of the page: section id -> name."""


class Feature:
    """The hooks, which do nothing by default. A feature looks at its settings by itself, and does
    nothing if it is off. In a run all processes call `data`, `model`, `best_model`, `results`."""

    affects_training = False
    """Whether its settings change how a run trains: a resumed run reports those that changed."""

    def __init__(
        self, *commands: Command, recipes: Mapping[str, type] | None = None
    ) -> None:
        """`commands`: the feature's `toolkit` commands. `recipes`: its recipes, name -> class of
        settings."""
        self.commands = commands
        self.recipes = recipes or {}

    def settings(self, settings_class: type) -> Mapping[str, type]:
        """Sections (`toolkit.config.section`) to add to this class of settings: field name ->
        section."""
        return {}

    def data(self, settings: Any, data: Any, tokenizer: Any, accelerator: Any) -> Any:
        """The data of a run (`toolkit.data.prepare.Data`), changed or not: another collator,
        further columns. Raises UserError for settings that do not fit the data."""
        return data

    def model(self, run: Any, model: Any) -> None:
        """Adapts a model before it is copied or sharded. Raises UserError for one that does not fit
        the settings."""

    def best_model(self, run: Any, evaluate: Callable[[Any], Any]) -> None:
        """Called after training, when `run` has loaded the best model, before the last evaluation.
        It may set `run.answers`."""

    def results(
        self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any
    ) -> Sequence[str]:
        """Writes files about an evaluation to the folder of a run or of `toolkit evaluate` (there
        `data` is None, and only the main process calls it), before the pages are written. Returns
        lines to print."""
        return ()

    def answers(self, model: str, config: Any) -> Any:
        """Turns a saved model's outputs into answers (a `toolkit.evaluation.answers.Answers`), or
        None for other models; `config` is transformers'. The first feature that returns one is
        used."""

    def load_model(self, model: str, config: Any) -> Any:
        """Loads a saved classifier of another kind than transformers', or None for other models;
        `config` is transformers'. The first feature that returns one is used."""

    def objective(self, settings: Any, objective: Any, data: Any) -> Any:
        """The objective (`toolkit.objective.Objective`) of a run, changed or not."""
        return objective

    def page(self, page: Any) -> PagePart | None:
        """The part to add to a run's report.html (`toolkit.report.html.Page`)."""


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
    folders = importlib.import_module("toolkit.features").__path__
    names = sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg)
    modules = [
        importlib.import_module(f"toolkit.features.{name}.feature") for name in names
    ]
    return tuple(module.FEATURE for module in modules)
