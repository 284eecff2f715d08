"""The hooks of features, which the core calls, and the list of all features.

A feature is a folder under `toolkit/features/` whose `feature.py` holds `FEATURE`, an instance of a subclass of
`Feature`. That module is imported whenever settings are parsed or `toolkit --help` is printed, so it must not import
torch. `register` adds a feature from elsewhere, before `config.parse`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from toolkit.errors import UserError, did_you_mean


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
    """Whether launch options (`--config_file`) restart this command under a launcher, or are passed to it."""
    extensible: bool = False
    """Whether features may add options to this core command (`add_options`); otherwise none is imported."""
    passes_rest: bool = False
    """Whether `run` gets unknown arguments (a recipe's) as a second argument."""


@dataclass(frozen=True)
class PagePart:
    """What a feature adds to report.html."""

    template: Path | str
    """A Jinja template (a file or its text) with optional blocks: `summary` (below the numbers), `facts` (rows of the
    list of facts), `section` (below the classes), `mistakes` (a sentence above the worst mistakes)."""
    context: Mapping[str, Any]
    """The template's variables, in addition to those of report.html."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Links at the top of the page: section id -> name."""
    texts: Mapping[int, Any] = field(default_factory=dict)
    """Index of a sample -> markup of its text in the table of the worst mistakes."""


class Feature:
    """Hooks, which do nothing by default. Settings, data and runs are a recipe's. With `tasks` or `switches` the hooks
    that get `settings` are called only for these settings."""

    tasks: ClassVar[Mapping[str, type]] = {}
    """The feature's recipes: name -> class of settings."""
    switches: ClassVar[Sequence[str]] = ()
    """Settings, any of which turns the feature on."""
    first_settings: ClassVar[Sequence[str]] = ()
    """Settings for the short `--help`; `--help_all` lists all."""
    files: ClassVar[Sequence[str]] = ()
    """Names of the files that `results` writes."""
    paths: ClassVar[Sequence[str]] = ()
    """Settings that are paths and may differ between machines."""
    exclusive: ClassVar[Sequence[tuple[str, str, str]]] = ()
    """(setting, setting, why they exclude each other)."""
    usual_metrics: ClassVar[Mapping[str, str]] = {}
    """For the feature's targets: `problem_type` in config.json -> default `--metric_for_best_model`."""
    pipeline_tags: ClassVar[Mapping[str, str]] = {}
    """For the feature's targets: `problem_type` in config.json -> pipeline tag of the hub and `transformers`."""

    def __init__(self, *commands: Command) -> None:
        """`commands`: the feature's `toolkit` commands."""
        self.commands = commands

    def sections(self, settings_class: type) -> Mapping[str, type]:
        """Sections (`toolkit.config.section`) to add to this class of settings: field name -> section."""
        return {}

    def faults(self, values: Mapping[str, Any]) -> Iterable[str]:
        """Contradictions in the flat, unparsed settings, a sentence each."""
        return ()

    def targets(self, settings: Any) -> Any:
        """The subclass of `toolkit.data.table.Targets` that these settings train on, or None."""

    def data_facts(self, settings: Any, facts: Mapping[str, Any], accelerator: Any) -> dict[str, Any]:
        """Facts to add to the cache key of prepared data (JSON: files, tokenizer, settings); all processes call it."""
        return {}

    def select_rows(self, settings: Any, facts: Mapping[str, Any], rows: Any, targets: Any) -> tuple[Any, list[str]]:
        """({split: rows} from the training rows, notes). If it has a `validation` split, no other split is read, and
        none is held out. `facts`: what `data_facts` of all features returned."""
        return {"train": rows}, []

    def collator(self, settings: Any) -> Any:
        """The subclass of `toolkit.data.batches.Collator` (or a callable like it) for training and evaluation; its
        `prepare_model` adapts the model. None: batches are padded. The first feature that returns one is used."""

    def run_settings(self, settings: Any, data: Any, accelerator: Any) -> Any:
        """The settings of a run that starts, changed or not. Raises UserError if they do not fit the data."""
        return settings

    def best_model(self, run: Any, evaluate: Callable[[Any], Any]) -> None:
        """Called in all processes after training, when `run` has loaded the best model, before the last evaluation. It
        may set `run.answers`."""

    def results(self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any) -> Sequence[str]:
        """Writes files about an evaluation to the folder of a run or of `toolkit evaluate` (there `data` is None, and
        only the main process calls it), before the pages are written. Returns lines to print."""
        return ()

    def finished(self, folder: Path, settings: Any) -> Sequence[str]:
        """Called in the main process when a run has written all its files and printed its results. Returns further
        lines to print."""
        return ()

    def next_command(self, folder: Path, settings: Any) -> str | None:
        """The command printed below `next:` when the run in `folder` has ended; "" for none. The first feature that
        returns one is taken."""

    def answers(self, model: str, config: Any) -> Any:
        """Turns a saved model's outputs into answers (a `toolkit.evaluation.answers.Answers`), or None for other
        models; `config` is transformers'. The first feature that returns one is used."""

    def add_options(self, command: str, parser: argparse.ArgumentParser) -> None:
        """Adds options to an extensible core command (`report`)."""

    def page(self, page: Any) -> PagePart | None:
        """The part to add to a run's report.html (`toolkit.report.html.Page`)."""

    def folder_page(self, folder: Path) -> Path | None:
        """Writes the page of a folder that this feature created (not a run's); None for other folders."""


_REGISTERED: list[Feature] = []


def register(feature: Feature) -> None:
    """Adds a feature from outside `toolkit/features/` to this process. Raises UserError for an invalid one."""
    if _validate(feature, "register") not in _REGISTERED:
        _REGISTERED.append(feature)


def features() -> list[Feature]:
    """All features: those of `toolkit/features/` by name, then the registered ones."""
    return [*_installed(), *_REGISTERED]


@functools.cache
def _installed() -> tuple[Feature, ...]:
    spec = importlib.util.find_spec("toolkit.features")
    folders = (spec.submodule_search_locations if spec else None) or []
    names = sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg)
    modules = [f"toolkit.features.{name}.feature" for name in names]
    imported = [importlib.import_module(name) for name in modules if importlib.util.find_spec(name)]
    return tuple(_validate(getattr(module, "FEATURE", None), module.__name__) for module in imported)


def _validate(feature: Any, where: str) -> Feature:
    """Raises UserError for a misspelt hook, or anything but an instance of `Feature`."""
    if not isinstance(feature, Feature):
        raise UserError(f"{where}: FEATURE must be an instance of a subclass of Feature, not {feature!r}")
    if isinstance(feature.switches, str):
        raise UserError(f"{where}: {type(feature).__name__}.switches is a string: write ({feature.switches!r},)")
    hooks = {*dir(Feature), "commands"}
    names = {name for name in dir(type(feature)) if not name.startswith("_")}
    if unknown := sorted(names - hooks):
        hint = did_you_mean(unknown[0], hooks)
        raise UserError(f"{where}: {type(feature).__name__}.{unknown[0]} is not a hook{hint}; begin other names with _")
    return feature


def hooks(name: str, settings: Any) -> Iterator[Callable[..., Any]]:
    """The hook of each feature that has one and is on for these settings."""
    for feature in features():
        tasks = tuple(feature.tasks.values())
        hook, switches = getattr(feature, name), feature.switches
        if getattr(hook, "__func__", None) is getattr(Feature, name) or (tasks and not isinstance(settings, tasks)):
            continue
        if not switches or any(getattr(part, each, None) for part in vars(settings).values() for each in switches):
            yield hook


def write_results(folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any) -> list[str]:
    """Calls the hook `results` and collects the lines. Raises UserError if one returns anything else."""
    lines: list[str] = []
    for results in hooks("results", settings):
        of_feature = results(folder, settings, data, evaluation, answers)
        if not isinstance(of_feature, list | tuple):
            name = f"{type(results.__self__).__name__}.results"  # type: ignore[attr-defined]
            raise UserError(f"{name} returned {of_feature!r}: return a list of lines, or an empty list")
        lines += map(str, of_feature)
    return lines


def first(results: Iterable[Any]) -> Any:
    """The first that is not None."""
    return next((result for result in results if result is not None), None)
