"""`toolkit sweep RECIPE`: searches for settings, or repeats a run with several seeds."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.report.comparison import LOSS_SETTINGS, compare
from toolkit.report.recipe_runs import RecipeRuns
from toolkit.report.record import Record
from toolkit.utils.extras import require_extra

_TRIALS = 20


def run(options: argparse.Namespace, words: list[str]) -> None:
    """`words`: the recipe's arguments. Raises UserError."""
    if not options.search and not options.seeds:
        raise UserError("toolkit sweep needs --search NAME=VALUES or --seeds N: see --help")
    folder = Path(options.output_dir or f"runs/sweep-{Path(options.recipe).stem}")
    runs = RecipeRuns(options.recipe, words, folder)
    seed = int(runs.settings.get("seed", 42))
    if (
        runs.settings.get("data_seed", seed) is None
        and not runs.settings["validation_file"]
    ):
        runs.words += ["--data_seed", str(seed)]  # the same validation rows in every run
    seeds = range(seed, seed + (options.seeds or 0))
    space = _parse_space(options.search, runs)
    names: list[str] = []
    best: dict[str, Any] = {}
    with runs.locked():
        if space:
            best, names = search(runs, space, options.trials)
            seeds = seeds[1:]  # the search ran the first
        for number in seeds:
            runs.run(f"seed-{number}", {**best, "seed": number})
            names.append(f"seed-{number}")
    comparison = compare([folder / name for name in names])
    if best:
        print(f"\nbest settings: {shlex.join(['python', *runs.command(best)])}")
    print(f"\n{comparison}")
    print(
        f"\nwith curves: toolkit compare {shlex.quote(str(folder))}/*/ --output compare.html"
    )


def _parse_space(texts: list[str], runs: RecipeRuns) -> dict[str, Any]:
    """Setting -> optuna distribution. Raises UserError."""
    if texts:
        require_extra("--search", "sweep", "optuna")
    space: dict[str, Any] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name in space:
            raise UserError(f"--search {text}: {name} has two lines")
        if name in LOSS_SETTINGS and "loss" in str(
            runs.settings.get("metric_for_best_model")
        ):
            remedy = "pass another --metric_for_best_model, for example f1_macro"
            raise UserError(f"--search {text}: its losses cannot be compared: {remedy}")
        try:
            space[name] = _distribution(values)
            for value in re.split("[,:]", values.removesuffix(":log")):
                runs.parse([f"--{name}={value}"])
        except (UserError, ValueError) as error:
            syntax = "NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C"
            raise UserError(f"--search {text}: {first_line(error)} ({syntax})") from error
    return space


def _distribution(values: str) -> Any:
    """`1,2` or `1e-5:1e-4:log` -> an optuna distribution. Raises ValueError."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if "," in values:
        return CategoricalDistribution(values.split(","))
    low, high = values.removesuffix(":log").split(":")
    log = values.endswith(":log")
    if re.search("[.eE]", values):
        return FloatDistribution(float(low), float(high), log=log)
    return IntDistribution(int(low), int(high), log=log)


def search(
    runs: RecipeRuns, space: Mapping[str, Any], trials: int | None
) -> tuple[dict[str, Any], list[str]]:
    """(the best settings, the names of the runs that finished). A stopped search continues: from
    the results of the runs that are there the sampler draws the same settings again."""
    import optuna
    from optuna.distributions import CategoricalDistribution

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    count = trials or _TRIALS
    if all(isinstance(values, CategoricalDistribution) for values in space.values()):
        grid = list(itertools.product(*(values.choices for values in space.values())))[
            :trials
        ]
        count = len(grid)
        for values in grid:
            study.enqueue_trial(dict(zip(space, values, strict=True)))
    names = []
    for number in range(count):
        name = f"trial-{number:03d}"
        trial = study.ask(dict(space))
        value = run_trial(runs, name, trial.params)
        if value is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, value)
            names.append(name)
    if not names:
        raise UserError(f"no trial finished: see {runs.folder}/trial-*.log")
    return study.best_params, names


def run_trial(runs: RecipeRuns, name: str, settings: Mapping[str, Any]) -> float | None:
    """Runs a trial, unless that is done, and returns its best evaluation; None for one that fails.
    Raises UserError for a run that fails before its first step, as all would: the same command runs
    it again."""
    folder = runs.folder / name
    try:
        runs.run(name, settings)
    except UserError as error:
        if not (folder / "metrics.jsonl").exists():
            raise UserError(f"before its first step {error}") from error
        runs.set_status(name, str(error))
    if runs.status(name) != "finished":
        print(f"  {runs.status(name)}", flush=True)
        return None
    value = best_evaluation(Record.load(folder))
    print(f"  {name}: best evaluation {value:.4f}", flush=True)
    return value


def best_evaluation(record: Record) -> float:
    """The run's best `--metric_for_best_model`, negated if lower is better; a correlation may be
    undefined in all evaluations."""
    best = record.best
    numbers = [line[best.metric] for line in record.training_evaluations]
    values = [best.sign * number for number in numbers if number is not None]
    return max(values, default=-math.inf)
