"""`toolkit sweep RECIPE`: searches for settings, or runs several seeds or configs; each run is a child process."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from toolkit import config
from toolkit.errors import UserError, first_line
from toolkit.launch.children import run_child
from toolkit.launch.options import find_file, split_arguments
from toolkit.report.comparison import LOSS_SETTINGS, as_text, compare
from toolkit.report.files import Record, run_config
from toolkit.utils.cache import digest_of_file
from toolkit.utils.extras import require_extra

_TRIALS = 20
_STOP_SECONDS = 60.0


def run(options: argparse.Namespace, words: list[str]) -> None:
    """`words`: the recipe's arguments. Raises UserError."""
    folder = Path(options.output_dir or f"runs/sweep-{Path(options.recipe).stem}")
    sweep = Sweep(options.recipe, words, folder)
    for name in ("trials", "seeds"):
        if (count := getattr(options, name)) is not None and count < 1:
            raise UserError(f"--{name} {count}: give 1 or more")
    if not (options.search or options.seeds or options.configs):
        raise UserError(
            "toolkit sweep needs --search NAME=VALUES, --seeds N or --configs A,B: see --help"
        )
    if options.trials and not options.search:
        raise UserError("--trials has no effect without --search")
    if options.search:
        require_extra("--search", "sweep", "optuna")
    space = dict(sweep.parse_values(text) for text in options.search)
    folders = [
        find_file(config, options.recipe, "accelerate_configs").stem for config in options.configs
    ]
    for option, names in (
        ("search", [text.partition("=")[0] for text in options.search]),
        ("configs", folders),
    ):
        if len(set(names)) < len(names):
            raise UserError(f"--{option}: two have the same name: {', '.join(names)}")
    hangup = [signal.SIGHUP] * (
        signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    )  # ignored under nohup
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            study = sweep.search(space, options.search, options.trials) if space else None
            best = study.best_params if study else {}
            first = 1 if study and "seed" not in space else 0  # the search ran the first seed
            for seed in range(sweep.seed + first, sweep.seed + (options.seeds or 0)):
                sweep.run_recipe(folder / f"seed-{seed}", {**best, "seed": seed})
            for name, config in zip(folders, options.configs, strict=True):
                sweep.run_recipe(folder / name, {**best, "config_file": config})
    except Timeout:
        raise UserError(
            f"another sweep is writing to {folder}: name another --output_dir, or stop that one"
        ) from None
    comparison = compare(sweep.runs)[0]
    if best:
        print(f"\nbest settings: {shlex.join(['python', *sweep.command(best)])}")
    print(f"\n{as_text(comparison)}")
    print(f"\nwith curves: toolkit compare {shlex.quote(str(folder))}/*/ --output compare.html")


class Sweep:
    """The runs of one folder."""

    def __init__(self, recipe: str, words: Sequence[str], folder: Path) -> None:
        """Raises UserError for a missing recipe or an unknown setting."""
        if not Path(recipe).is_file() or Path(recipe).suffix != ".py":
            raise UserError(f"there is no recipe {recipe}: name recipes/cls.py, for example")
        self.recipe, self.words, self.folder = recipe, list(words), folder
        paths = [
            Path(word.rpartition("=")[2]) for word in words if word.endswith((".yaml", ".yml"))
        ]
        self.files = "".join(
            f"  # {path.name} {digest_of_file(path)}" for path in paths if path.is_file()
        )
        """The content of the YAML files among the words: a changed one makes another command."""
        self.runs: list[Path] = []
        self.settings = self._parse([])
        self.seed = int(self.settings.get("seed", 42))
        if (
            self.settings
            and self.settings["data_seed"] is None
            and not self.settings["validation_file"]
        ):
            self.words += ["--data_seed", str(self.seed)]  # the same validation rows in every run

    def _parse(self, extra: Sequence[str]) -> dict[str, Any]:
        """Checked settings of a shipped recipe; {} for others, which check their own. Raises UserError."""
        task = Path(self.recipe).stem
        if task not in config.tasks():
            return {}
        demo = Path(self.recipe).with_name(f"{task}_demo.yaml")
        arguments = [*split_arguments(self.words)[1], *extra]
        parsed: Any = config.parse(
            config.tasks()[task], arguments, demo if demo.is_file() else None
        )
        return config.flat(parsed)

    def parse_values(self, text: str) -> tuple[str, Any]:
        """(name, optuna distribution) of `--search`: `seed=1,2` or `learning_rate=1e-5:1e-4:log`. Raises UserError."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        name, _, values = text.partition("=")
        choices, (low, *high) = values.split(","), values.split(":")
        try:
            if name in LOSS_SETTINGS and self.settings.get("metric_for_best_model") in (
                "loss",
                "eval_loss",
            ):
                raise ValueError("losses under different values cannot be compared: pass another "
                                 "--metric_for_best_model, for example f1_macro")  # fmt: skip
            if (len(choices) == 1 and not high) or high[1:] not in ([], ["log"]):
                raise ValueError("write NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C")
            for value in [low, high[0]] if high else choices:
                self._parse([f"--{name}={value}"])
            if not high:
                return name, CategoricalDistribution(choices)
            if "." in values or "e" in values.lower():
                return name, FloatDistribution(float(low), float(high[0]), log=len(high) > 1)
            return name, IntDistribution(int(low), int(high[0]), log=len(high) > 1)
        except (UserError, ValueError) as error:
            raise UserError(f"--search {text}: {first_line(error)}") from error

    def run_recipe(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        while_running: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs the recipe with these settings, unless `folder` holds the finished run; moves the run of another command
        aside. A stop signal, or an error of `while_running`, stops the run with a checkpoint. Raises UserError."""
        self.runs.append(folder)
        log, record = (folder.with_name(f"{folder.name}.{ending}") for ending in ("log", "command"))
        command = shlex.join(self.command(settings)) + self.files
        if folder.exists() and record.is_file() and record.read_text(encoding="utf-8") != command:
            folder.rename(folder.with_name(f"{folder.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"))
        if (
            lock := folder / ".lock"
        ).exists():  # the run of a killed sweep may still be writing its checkpoint
            with (
                contextlib.suppress(Timeout, OSError, NotImplementedError),
                FileLock(lock, timeout=_STOP_SECONDS),
            ):
                pass
        report, config = folder / "report.html", folder / "config.json"
        # a run that was stopped has a report, too: one that resumes and is killed writes its config after it
        if (
            report.exists()
            and "stopped" not in run_config(folder)
            and report.stat().st_mtime >= config.stat().st_mtime
        ):
            return
        record.write_text(command, encoding="utf-8")
        print(f"{folder.name}:", *_options(settings), flush=True)
        settings = {**settings, "output_dir": folder}
        if (folder / "metrics.jsonl").exists() and not any(
            folder.glob("checkpoints/step-*/state.json")
        ):
            settings["overwrite_output_dir"] = "true"  # it was killed before its first checkpoint
        error = run_child(self.command(settings), log, while_running=while_running)
        if error:
            raise UserError(f"{folder.name} failed: {error}")

    def command(self, settings: Mapping[str, Any]) -> list[str]:
        return [self.recipe, *self.words, *_options(settings)]

    def search(self, space: Mapping[str, Any], texts: Sequence[str], num_trials: int | None) -> Any:
        """The optuna study after `num_trials` trials, those of a stopped sweep included. `texts`: the `--search`es."""
        from optuna import TrialPruned
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import TrialState

        study = self._open_study(
            shlex.join([self.recipe, *self.words, *(f"--search={text}" for text in texts)])
        )
        lists = [
            kind.choices for kind in space.values() if isinstance(kind, CategoricalDistribution)
        ]
        if len(lists) == len(space):
            grid = list(itertools.product(*lists))
            for values in grid:
                study.enqueue_trial(dict(zip(space, values, strict=True)), skip_if_exists=True)
            num_trials = min(num_trials or len(grid), len(grid))
        finished = sum(trial.state.is_finished() for trial in study.trials)
        for _ in range(finished, num_trials or _TRIALS):
            trial = study.ask(space)
            try:
                value = self._run_trial(trial)
            except TrialPruned:
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, value, state=TrialState.FAIL if value is None else None)
        complete = study.get_trials(states=(TrialState.COMPLETE,))
        if not complete:
            raise UserError(f"no trial finished: see {self.folder}/trial-*.log")
        self.runs = [self.folder / _name(trial) for trial in complete]
        return study

    def _open_study(self, command: str) -> Any:
        """Raises UserError for a damaged journal, and for that of another sweep."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path, command = self.folder / "study.journal", command + self.files
        try:
            storage = optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(path))
            )
            pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
            study = optuna.create_study(storage=storage, pruner=pruner, study_name="sweep", direction="maximize",
                                        load_if_exists=True)  # fmt: skip
            study.sampler = optuna.samplers.TPESampler(
                seed=len(study.trials)
            )  # the same seed would repeat its values
            for trial in study.get_trials(
                states=(optuna.trial.TrialState.RUNNING,)
            ):  # stopped: to be run next
                storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.WAITING)
        except Exception as error:  # optuna raises many kinds for a damaged line
            why = f"is not a readable journal ({first_line(error)[:200]})"
            raise UserError(f"{path} {why}: name another --output_dir, or remove it") from error
        if (earlier := study.user_attrs.get("command", "" if study.trials else command)) != command:
            remedy = f"continue it with `toolkit sweep {earlier}`, or name another --output_dir"
            raise UserError(
                f"{self.folder} holds another sweep, or its YAML files have changed: {remedy}"
            )
        study.set_user_attr("command", command)
        return study

    def _run_trial(self, trial: Any) -> float | None:
        """The best value; None for a run that failed. One that fails before its first step ends the sweep, as all
        would: its trial is not finished, and the same command runs it again."""
        folder = self.folder / _name(trial)
        try:
            self.run_recipe(folder, trial.params, while_running=lambda: _prune(trial, folder))
        except UserError as error:
            if not (folder / "metrics.jsonl").exists():
                raise UserError(f"before its first step {error}") from error
            print(f"  {error}", flush=True)
            return None
        metric, by_step = evaluations(folder)
        best = max(by_step.values(), default=None)
        print(
            "  no metric" if best is None else f"  {metric.metric} {metric.sign * best:.4f}",
            flush=True,
        )
        return best


def _prune(trial: Any, folder: Path) -> None:
    """Raises TrialPruned for a run that is worse than the median of the others at the same step."""
    from optuna import TrialPruned

    by_step = evaluations(folder)[1]
    reported = trial.study.trials[trial.number].intermediate_values
    for step in by_step.keys() - reported.keys():
        trial.report(by_step[step], step)
    if trial.should_prune():
        print(
            f"  pruned after step {max(by_step)}: worse than the median of the others", flush=True
        )
        raise TrialPruned


def _options(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


def _name(trial: Any) -> str:
    return f"trial-{trial.number:03d}"


def evaluations(folder: Path) -> tuple[Any, dict[int, float]]:
    """(--metric_for_best_model and its sign, step -> its value so far, negated if lower is better)."""
    if not (folder / "eval.jsonl").exists():
        return None, {}
    record = Record.load(folder)
    best, lines = record.best, record.training_evaluations
    return best, {
        line["step"]: best.sign * line[best.metric]
        for line in lines
        if line[best.metric] is not None
    }
