"""`toolkit sweep RECIPE`: searches for settings, or runs several seeds or configs; each run is a child process."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from toolkit.errors import UserError, first_line, last_error
from toolkit.launch.relaunch import split_arguments
from toolkit.launch.restarts import stop_with_parent
from toolkit.utils.extras import require_extra
from toolkit.utils.files import refuse_link_out
from toolkit.utils.log import logger

_TRIALS = 20
_POLL_SECONDS = 1.0
_STUDY = "study.journal"
_STARTUP_TRIALS = 4
"""Trials before the first one that may be pruned."""


def run(options: argparse.Namespace, words: list[str]) -> None:
    """`words`: the recipe's arguments. Raises UserError."""
    folder = Path(options.output_dir or f"runs/sweep-{Path(options.recipe).stem}")
    sweep = Sweep(options.recipe, words, folder)
    for name, value in (("trials", options.trials), ("seeds", options.seeds)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: give 1 or more")
    if not (options.search or options.seeds or options.configs):
        raise UserError("toolkit sweep needs --search NAME=VALUES, --seeds N or --configs A,B: see --help")
    if options.search:
        require_extra("--search", "sweep", "optuna")
    space = dict(sweep.distribution(text) for text in options.search)
    signal.signal(signal.SIGTERM, _raise_exit)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            study = sweep.search(space, options.search, options.trials) if space else None
            best = study.best_params if study else {}
            first = 1 if study and "seed" not in space else 0  # the search ran the first seed
            for seed in range(sweep.seed + first, sweep.seed + (options.seeds or 0)):
                sweep.run_recipe(folder / f"seed-{seed}", {**best, "seed": seed})
            for config in filter(None, (options.configs or "").split(",")):
                sweep.run_recipe(folder / Path(config).stem, best, ["--config_file", config])
    except Timeout:
        raise UserError(f"another sweep is writing to {folder}: name another --output_dir, or stop that one") from None
    except (KeyboardInterrupt, SystemExit):
        logger.info(f"stopped: the same command continues in {folder}")
        raise
    sweep.print_report(study)


def _raise_exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


class Sweep:
    """The runs of one folder."""

    def __init__(self, recipe: str, words: Sequence[str], folder: Path) -> None:
        """Raises UserError for a missing recipe or an unknown setting."""
        if not Path(recipe).is_file() or Path(recipe).suffix != ".py":
            raise UserError(f"there is no recipe {recipe}: name recipes/cls.py, for example")
        self.recipe, self.words, self.folder = recipe, list(words), folder
        self.runs: list[Path] = []
        self.settings = self._parse([])
        self.seed = int(self.settings.get("seed", 42))
        # the same validation rows in every run
        by_seed = self.settings and self.settings["data_seed"] is None and not self.settings["validation_file"]
        self.data_seed = ["--data_seed", str(self.seed)] if by_seed else []

    def _parse(self, extra: Sequence[str]) -> dict[str, Any]:
        """Checked settings of a shipped recipe; {} for others, which check their own. Raises UserError."""
        from toolkit import config

        task = Path(self.recipe).stem
        if task not in config.tasks():
            return {}
        demo = Path(self.recipe).with_name(f"{task}_demo.yaml")
        arguments = [*split_arguments(self.words)[1], *extra]
        parsed: Any = config.parse(config.tasks()[task], arguments, demo if demo.is_file() else None)
        return config.flat(parsed)

    def distribution(self, text: str) -> tuple[str, Any]:
        """`learning_rate=1e-5:1e-4:log` -> (name, optuna's distribution). Raises UserError."""
        from optuna import distributions

        from toolkit.report.comparison import LOSS_SETTINGS

        name, _, values = text.partition("=")
        choices, (low, *high) = values.split(","), values.split(":")
        try:
            if name == "output_dir":
                raise ValueError("each run needs another folder")
            if name in LOSS_SETTINGS and self.settings.get("metric_for_best_model") in ("loss", "eval_loss"):
                raise ValueError("losses under different values cannot be compared: pass another "
                                 "--metric_for_best_model, for example f1_macro")  # fmt: skip
            if (len(choices) == 1 and not high) or high[1:] not in ([], ["log"]):
                raise ValueError("write NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C")
            for value in [low, high[0]] if high else choices:
                self._parse([f"--{name}={value}"])
            if not high:
                return name, distributions.CategoricalDistribution(choices)
            if "." in values or "e" in values.lower():
                return name, distributions.FloatDistribution(float(low), float(high[0]), log=len(high) > 1)
            return name, distributions.IntDistribution(int(low), int(high[0]), log=len(high) > 1)
        except (UserError, ValueError) as error:
            raise UserError(f"--search {text}: {first_line(error)}") from error

    def run_recipe(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        extra: Sequence[str] = (),
        is_pruned: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Runs the recipe with these settings, unless `folder` holds the finished run. Returns False if it was pruned.
        A run that is pruned, or whose sweep is stopped, saves a checkpoint. Raises UserError."""
        self.runs.append(folder)
        if is_finished(folder):
            return True
        print(f"{folder.name}: {_text(settings)}", flush=True)
        command = [sys.executable, *self._command(settings, [*extra, *self.data_seed]), "--output_dir", str(folder)]
        if (folder / "metrics.jsonl").exists() and not any(folder.glob("checkpoints/step-*/manifest.json")):
            command.append("--overwrite_output_dir")  # it was killed before its first checkpoint
        log = folder.with_name(f"{folder.name}.log")
        with log.open("ab") as output:
            child = Popen(command, stdin=DEVNULL, stdout=output, stderr=STDOUT, start_new_session=True,
                          preexec_fn=stop_with_parent)  # fmt: skip
            try:
                while child.poll() is None and not is_pruned():
                    with contextlib.suppress(TimeoutExpired):
                        child.wait(_POLL_SECONDS)
                pruned = child.poll() is None
            finally:
                child.terminate()
                child.wait()
        if child.returncode and not pruned:
            error = last_error(log.read_text(encoding="utf-8", errors="replace"))
            raise UserError(f"{folder.name} failed: {error} ({log})")
        return not pruned

    def _command(self, settings: Mapping[str, Any], extra: Sequence[str] = ()) -> list[str]:
        options = itertools.chain(*((f"--{name}", str(value)) for name, value in settings.items()))
        return [self.recipe, *self.words, *extra, *options]

    def search(self, space: Mapping[str, Any], texts: Sequence[str], num_trials: int | None) -> Any:
        """The optuna study after `num_trials` trials, those of a stopped sweep included."""
        study = self._open_study(texts)
        if all(hasattr(values, "choices") for values in space.values()):
            grid = list(itertools.product(*(values.choices for values in space.values())))
            num_trials = min(num_trials or len(grid), len(grid))
            for choices in grid:
                study.enqueue_trial(dict(zip(space, choices, strict=True)), skip_if_exists=True)
        # not study.optimize(), which records a trial that Ctrl-C stops as failed
        for _ in range((num_trials or _TRIALS) - sum(trial.state.is_finished() for trial in study.trials)):
            trial = study.ask(dict(space))
            state, value = self._run_trial(study, trial)
            study.tell(trial, value, state)
        complete = _complete(study)
        if not complete:
            raise UserError(f"no trial finished: see {self.folder}/trial-*.log")
        self.runs = [self.folder / _name(trial) for trial in complete]
        return study

    def _open_study(self, texts: Sequence[str]) -> Any:
        """Raises UserError for a damaged journal, and for that of another sweep."""
        import optuna
        from optuna.trial import TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = self.folder / _STUDY
        refuse_link_out(path, self.folder)
        try:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
            pruner = optuna.pruners.MedianPruner(n_startup_trials=_STARTUP_TRIALS)
            study = optuna.create_study(storage=storage, pruner=pruner, study_name="sweep", direction="maximize",
                                        load_if_exists=True)  # fmt: skip
            # a resumed sampler with the same seed would draw the same values again
            study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
            for trial in study.get_trials(states=(TrialState.RUNNING,)):  # stopped with the sweep: run next
                storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
        except Exception as error:  # optuna raises many kinds for a damaged line
            raise UserError(
                f"{path} is not a readable journal ({first_line(error)[:200]}): name another --output_dir, or remove it"
            ) from error
        command = {"search": list(texts), "recipe": self.recipe, "settings": self.words}
        earlier = study.user_attrs.get("command", command)
        if changed := [name for name, value in command.items() if earlier.get(name) != value]:
            raise UserError(
                f"{self.folder} holds a sweep with another {changed[0]}: {json.dumps(earlier.get(changed[0]))}; repeat "
                "that command to continue it, or name another --output_dir"
            )
        study.set_user_attr("command", command)
        return study

    def _run_trial(self, study: Any, trial: Any) -> tuple[Any, float | None]:
        """(optuna's state, the best value). Raises UserError for a run that failed before its first step: all would."""
        from optuna.trial import TrialState

        folder = self.folder / _name(trial)

        def is_pruned() -> bool:
            reported = study.trials[trial.number].intermediate_values
            for step, value in evaluations(folder)[1].items():
                if step not in reported:
                    trial.report(value, step)
            return bool(trial.should_prune())

        try:
            finished = self.run_recipe(folder, trial.params, is_pruned=is_pruned)
            metric, values = evaluations(folder)
            if not values:
                raise UserError(f"{folder.name} failed: it was never evaluated")
        except UserError as error:
            if not (folder / "metrics.jsonl").exists():
                study.tell(trial, state=TrialState.FAIL)
                raise UserError(f"before its first step {error}") from error
            print(f"  {error}", flush=True)
            return TrialState.FAIL, None
        if not finished:
            print(f"  pruned after step {max(values)}: worse than the median of the others", flush=True)
            return TrialState.PRUNED, None
        value = max(values.values())
        best = "  (best so far)" if all(other.value < value for other in _complete(study)) else ""
        print(f"  {metric} {abs(value):.4f}{best}", flush=True)
        return TrialState.COMPLETE, value

    def print_report(self, study: Any) -> None:
        """The best settings, and the comparison of all runs."""
        from toolkit.report.comparison import as_text, compare

        comparison = compare(self.runs)[0]
        print()
        if study:
            best = study.best_trial
            as_good = [_name(trial) for trial in _complete(study) if trial.value == best.value and trial != best]
            print(f"best settings: {_text(best.params)}\n  {shlex.join(['python', *self._command(best.params)])}")
            if as_good:
                print(f"  as good: {', '.join(as_good)}")
            print()
        print(as_text(comparison))
        print(f"\nwith curves: toolkit compare {shlex.quote(str(self.folder))}/*/ --output compare.html")


def _name(trial: Any) -> str:
    return f"trial-{trial.number:03d}"


def _text(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                    for name, value in settings.items()) or "as given"  # fmt: skip


def _complete(study: Any) -> list[Any]:
    from optuna.trial import TrialState

    return list(study.get_trials(states=(TrialState.COMPLETE,)))


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder has finished."""
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return (folder / "report.html").exists() and "stopped" not in config
    return False


def evaluations(folder: Path) -> tuple[str, dict[int, float]]:
    """(--metric_for_best_model, step -> its value so far, negated where lower is better)."""
    from toolkit.report.record import Record

    if not (folder / "eval.jsonl").exists():
        return "", {}
    record = Record.load(folder)
    metric, sign = record.best.metric, record.best.sign
    return metric, {
        line["step"]: sign * line[metric] for line in record.training_evaluations if line[metric] is not None
    }
