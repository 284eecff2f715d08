"""`toolkit sweep RECIPE`: searches for settings, or repeats a run with several seeds."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.report.comparison import LOSS_SETTINGS, as_text, compare
from toolkit.report.recipe_runs import RecipeRuns
from toolkit.report.record import Record
from toolkit.utils.extras import require_extra

_TRIALS = 20
_PRUNE_AFTER = 4  # trials, with which others are compared


def run(options: argparse.Namespace, words: list[str]) -> None:
    """`words`: the recipe's arguments. Raises UserError."""
    _check(options)
    folder = Path(options.output_dir or f"runs/sweep-{Path(options.recipe).stem}")
    runs = RecipeRuns(options.recipe, words, folder)
    settings = runs.settings
    seed = int(settings.get("seed", 42))
    if settings and settings["data_seed"] is None and not settings["validation_file"]:
        runs.words += ["--data_seed", str(seed)]  # the same validation rows in every run
    space = _parse_space(options.search, runs)
    names: list[str] = []
    best: dict[str, Any] = {}
    with runs.locked():
        if space:
            best, names = search(runs, space, options.trials)
        seeds = range(seed, seed + (options.seeds or 0))
        if space and "seed" not in space:
            seeds = seeds[1:]  # the search ran the first
        for number in seeds:
            runs.run(f"seed-{number}", {**best, "seed": number})
            names.append(f"seed-{number}")
    comparison = compare([folder / name for name in names])[0]
    if best:
        print(f"\nbest settings: {shlex.join(['python', *runs.command(best)])}")
    print(f"\n{as_text(comparison)}")
    print(f"\nwith curves: toolkit compare {shlex.quote(str(folder))}/*/ --output compare.html")


def _check(options: argparse.Namespace) -> None:
    for name in ("trials", "seeds"):
        count = getattr(options, name)
        if count is not None and count < 1:
            raise UserError(f"--{name} {count}: give 1 or more")
    if not options.search and not options.seeds:
        raise UserError("toolkit sweep needs --search NAME=VALUES or --seeds N: see --help")
    if options.trials and not options.search:
        raise UserError("--trials has no effect without --search")
    if options.search:
        require_extra("--search", "sweep", "optuna")


def _parse_space(texts: list[str], runs: RecipeRuns) -> dict[str, Any]:
    """Setting -> optuna distribution. Raises UserError."""
    space: dict[str, Any] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name in space:
            raise UserError(f"--search: two have the same name: {name}")
        try:
            if name in LOSS_SETTINGS and "loss" in str(runs.settings.get("metric_for_best_model")):
                remedy = "pass another --metric_for_best_model, for example f1_macro"
                raise UserError(f"losses under different values cannot be compared: {remedy}")
            space[name] = _distribution(values)
            for value in values.removesuffix(":log").replace(":", ",").split(","):
                runs.parse([f"--{name}={value}"])
        except (UserError, ValueError) as error:
            raise UserError(f"--search {text}: {first_line(error)}") from error
    return space


def _distribution(values: str) -> Any:
    """`1,2` or `1e-5:1e-4:log` -> an optuna distribution. Raises ValueError."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if "," in values:
        return CategoricalDistribution(values.split(","))
    low, *high = values.split(":")
    if not high or high[1:] not in ([], ["log"]):
        raise ValueError("write NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C")
    log = len(high) > 1
    if "." in values or "e" in values.removesuffix(":log").lower():
        return FloatDistribution(float(low), float(high[0]), log=log)
    return IntDistribution(int(low), int(high[0]), log=log)


def search(
    runs: RecipeRuns, space: Mapping[str, Any], trials: int | None
) -> tuple[dict[str, Any], list[str]]:
    """(the best settings, the names of the runs that finished). A stopped search continues: from
    the results of the runs that are there the sampler draws the same settings again."""
    import optuna
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=0)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_PRUNE_AFTER)
    study = optuna.create_study(sampler=sampler, pruner=pruner, direction="maximize")
    count = trials or _TRIALS
    if all(isinstance(values, CategoricalDistribution) for values in space.values()):
        grid = list(itertools.product(*(values.choices for values in space.values())))
        for values in grid:
            study.enqueue_trial(dict(zip(space, values, strict=True)))
        count = min(trials or len(grid), len(grid))
    for _ in range(count):
        trial = study.ask(dict(space))
        value = run_trial(runs, trial)
        status = runs.status(trial_name(trial))
        if status == "pruned":
            study.tell(trial, state=TrialState.PRUNED)
        elif value is None:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, value)
    finished = study.get_trials(states=(TrialState.COMPLETE,))
    if not finished:
        raise UserError(f"no trial finished: see {runs.folder}/trial-*.log")
    return study.best_params, [trial_name(trial) for trial in finished]


def run_trial(runs: RecipeRuns, trial: Any) -> float | None:
    """The best value of a trial; None for one that failed. Raises UserError for a run that fails
    before its first step, as all would: the same command runs it again."""
    from optuna import TrialPruned

    name = trial_name(trial)
    folder = runs.folder / name
    ran = True
    try:
        ran = runs.run(name, trial.params, while_running=lambda: report_and_prune(trial, folder))
    except TrialPruned:
        runs.set_status(name, "pruned")
    except UserError as error:
        if not (folder / "metrics.jsonl").exists():
            raise UserError(f"before its first step {error}") from error
        runs.set_status(name, "failed")
        print(f"  {error}", flush=True)
    report(trial, folder)
    values = evaluations(folder)
    if runs.status(name) == "failed" or not values:
        return None
    if ran:
        print(f"  best evaluation {max(values.values()):.4f}", flush=True)
    return max(values.values())


def report(trial: Any, folder: Path) -> None:
    """Reports the evaluations so far to optuna."""
    reported = trial.study.trials[trial.number].intermediate_values
    for step, value in evaluations(folder).items():
        if step not in reported:
            trial.report(value, step)


def report_and_prune(trial: Any, folder: Path) -> None:
    """Raises TrialPruned for a run that is worse than the median of the others at the same step."""
    from optuna import TrialPruned

    report(trial, folder)
    if trial.should_prune():
        print("  pruned: worse than the median of the others at this step", flush=True)
        raise TrialPruned


def trial_name(trial: Any) -> str:
    return f"trial-{trial.number:03d}"


def evaluations(folder: Path) -> dict[int, float]:
    """Step -> --metric_for_best_model, negated if lower is better."""
    if not (folder / "eval.jsonl").exists():
        return {}
    record = Record.load(folder)
    metric = record.best.metric
    lines = record.training_evaluations
    known = [line for line in lines if line[metric] is not None]
    return {line["step"]: record.best.sign * line[metric] for line in known}
