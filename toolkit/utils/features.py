"""What a feature may do: the hooks that the core calls, and the table of all features.

A feature is a folder under `toolkit/features/` whose `feature.py` holds `FEATURE`, an instance of a class derived from
`Feature`. That module is imported whenever settings are parsed or `toolkit --help` is printed: it imports no torch. A
feature that lives elsewhere is added by `register`, before `config.parse`.
"""

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

from toolkit.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Command:
    """A row of the table of `toolkit` commands."""

    name: str
    help: str
    run: str | Callable[..., Any]
    """A function, or `MODULE:FUNCTION`, which is imported when the command runs. It gets the parsed arguments."""
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    """Without it `run` gets the words of the command line as they are, and parses them itself."""
    description: str = ""
    epilog: str = ""
    usage: str | None = None
    relaunches: bool = True
    """Whether launch options (`--config_file`) start this command again under a launcher; otherwise they are its own
    arguments."""
    extensible: bool = False
    """Whether features may add options to this command of the core (`add_options`); if not, none is imported."""
    passes_rest: bool = False
    """Whether `run` gets, as a second argument, the words that this command does not know: those of a recipe."""


@dataclass(frozen=True)
class PagePart:
    """What a feature adds to report.html."""

    template: Path | str
    """A Jinja template, a file or its text, of blocks that are each optional: `summary` (below the numbers), `facts`
    (rows of the list of facts), `section` (below the classes), `mistakes` (a sentence above the worst mistakes)."""
    context: Mapping[str, Any]
    """The template's variables, beside those of report.html."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Links at the top of the page: id of a section -> its name."""
    texts: Mapping[int, Any] = field(default_factory=dict)
    """Place of a sample -> markup of its text in the table of the worst mistakes."""


class Feature:
    """Hooks, each of which does nothing by default. Settings, data and runs are those that a recipe works with."""

    tasks: ClassVar[Mapping[str, type]] = {}
    """Recipes of its own: name -> class of settings."""
    first_settings: ClassVar[Sequence[str]] = ()
    """Settings that `--help` lists; `--help_all` lists all."""
    files: ClassVar[Sequence[str]] = ()
    """Names of the files that `results` writes."""
    paths: ClassVar[Sequence[str]] = ()
    """Settings that are paths, which may differ between machines."""
    exclusive: ClassVar[Sequence[tuple[str, str, str]]] = ()
    """Pairs of settings that cannot both be given, and why."""
    usual_metrics: ClassVar[Mapping[str, str]] = {}
    """Of targets of its own: `problem_type` in config.json -> the usual `--metric_for_best_model`."""

    pipeline_tags: ClassVar[Mapping[str, str]] = {}
    """Of targets of its own: `problem_type` in config.json -> the hub's pipeline tag, `transformers.pipeline` takes."""

    def __init__(self, *commands: Command) -> None:
        """`commands`: rows of the table of `toolkit` commands."""
        self.commands = commands

    def sections(self, settings_class: type) -> Mapping[str, type]:
        """Sections (`toolkit.config.section`) that this class of settings gets: field name -> section."""
        return {}

    def faults(self, values: Mapping[str, Any]) -> Iterable[str]:
        """What contradicts itself in the settings that were given (flat, unparsed), a sentence each."""
        return ()

    def targets(self, settings: Any) -> Any:
        """The class of targets (derived from `toolkit.data.rows.Targets`) that these settings learn, or None."""
        return None

    def data_facts(self, settings: Any, facts: Mapping[str, Any], accelerator: Any) -> dict[str, Any]:
        """What prepared data depend on beside `facts` (JSON: files, tokenizer, settings); all processes call it."""
        return {}

    def select_rows(self, settings: Any, facts: Mapping[str, Any], rows: Any, targets: Any) -> tuple[Any, list[str]]:
        """({split: rows} made of the training rows, notes). With a `validation` among them no other split is read, and
        none is held back. `facts`: what `data_facts` of all features returned."""
        return {"train": rows}, []

    def collator(self, settings: Any) -> Any:
        """What makes the batches of a run with these settings, in training and evaluation: a class derived from
        `toolkit.data.batches.Collator`, or what is called as one; its `prepare_model` makes the model take them. None:
        they are padded. The first feature that returns one is taken."""
        return None

    def untrained_model(self, settings: Any) -> tuple[Any, dict[str, int]] | None:
        """(the model that a run with these settings begins with, the tokens of a text in each of its inputs), where
        this feature trains another model than a classifier."""
        return None

    def run_settings(self, settings: Any, data: Any, accelerator: Any) -> Any:
        """The settings of a run that begins now, changed or as they are. Raises UserError where the data cannot have
        them."""
        return settings

    def best_model(self, run: Any, evaluate: Callable[[Any], Any]) -> None:
        """Called in all processes when training has ended and `run` has loaded the best model, before the last
        evaluation. It may set `run.answers`."""

    def results(self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any) -> Sequence[str]:
        """Writes what belongs beside an evaluation, in the folder of a run or of `toolkit evaluate` (there `data` is
        None, and only the main process calls it), before the pages are written. Returns lines for the screen."""
        return ()

    def finished(self, folder: Path, settings: Any) -> Sequence[str]:
        """Called in the main process when a run has ended and all of its files and pages are written and its results
        printed. Returns further lines for the screen."""
        return ()

    def next_command(self, folder: Path, settings: Any) -> str | None:
        """The command printed below `next:` when the run in `folder` has ended; None: the same run with another seed.
        The first feature that returns one is taken."""
        return None

    def answers(self, model: str, config: Any) -> Any:
        """How a saved model's outputs become answers (`toolkit.evaluation.answers.Answers`), where this feature knows
        it; `config` is transformers'. The first feature that returns one is taken."""
        return None

    def add_options(self, command: str, parser: argparse.ArgumentParser) -> None:
        """Adds options to a command of the core (`report`)."""

    def page(self, page: Any) -> PagePart | None:
        """What is added to a run's report.html (`toolkit.report.html.Page`)."""
        return None

    def folder_page(self, folder: Path) -> Path | None:
        """Writes the page of a folder that this feature made and that is no run's; None for other folders."""
        return None


_REGISTERED: list[Feature] = []


def register(feature: Feature) -> None:
    """Adds a feature that lies outside `toolkit/features/`, for this process. Raises UserError for what is none."""
    if _checked(feature, "register") not in _REGISTERED:
        _REGISTERED.append(feature)


def features() -> list[Feature]:
    """All features: those of `toolkit/features/` in the order of their names, then the registered ones."""
    return [*_installed(), *_REGISTERED]


@functools.cache
def _installed() -> tuple[Feature, ...]:
    spec = importlib.util.find_spec("toolkit.features")
    folders = (spec.submodule_search_locations if spec else None) or []
    names = sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg)
    modules = [f"toolkit.features.{name}.feature" for name in names]
    imported = [importlib.import_module(name) for name in modules if importlib.util.find_spec(name)]
    return tuple(_checked(getattr(module, "FEATURE", None), module.__name__) for module in imported)


def _checked(feature: Any, where: str) -> Feature:
    """Raises UserError for what would be ignored in silence: a misspelt hook, or no instance of `Feature`."""
    if not isinstance(feature, Feature):
        raise UserError(f"{where}: FEATURE must be an instance of a class derived from Feature, and is {feature!r}")
    hooks = {*dir(Feature), "commands"}
    names = {name for name in dir(type(feature)) if not name.startswith("_")}
    if unknown := sorted(names - hooks):
        hint = did_you_mean(unknown[0], hooks)
        raise UserError(f"{where}: {type(feature).__name__}.{unknown[0]} is no hook{hint}; begin other names with _")
    return feature


def write_results(folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any) -> list[str]:
    """Calls `results` of each feature: their lines. Raises UserError for a hook that returns anything else."""
    lines: list[str] = []
    for feature in features():
        of_feature = feature.results(folder, settings, data, evaluation, answers)
        if not isinstance(of_feature, list | tuple):
            name = f"{type(feature).__name__}.results"
            raise UserError(f"{name} returned {of_feature!r}: return a list of lines for the screen, or an empty one")
        lines += map(str, of_feature)
    return lines


def first(results: Iterable[Any]) -> Any:
    """The first that is not None."""
    return next((result for result in results if result is not None), None)
