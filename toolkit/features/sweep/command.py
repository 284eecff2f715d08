"""`toolkit sweep RECIPE`: real runs of a recipe with settings that are searched for, several seeds, or several configs.

Each run is the recipe started as a child, as it would be typed: whatever the launch options say holds for it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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

from toolkit.errors import UserError, did_you_mean, first_line, last_error
from toolkit.launch.relaunch import split
from toolkit.launch.restarts import stop_with_parent
from toolkit.utils.files import refuse_link_out

_INSTALL = "pip install 'finetune-toolkit[sweep]'"
_TRIALS = 20
_LOOK_SECONDS = 1.0
_STUDY = "study.journal"
# before the median of the others says anything
_FIRST_TRIALS = 4


def run(options: argparse.Namespace, words: list[str]) -> None:
    """`words` are the recipe's. Raises UserError."""
    folder = Path(options.output_dir or f"runs/sweep-{Path(options.recipe).stem}")
    sweep = Sweep(options.recipe, words, folder)
    searched = dict(sweep.searched(text) for text in options.search)
    for name, value in (("trials", options.trials), ("seeds", options.seeds)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: give 1 or more")
    if not (searched or options.seeds or options.configs):
        raise UserError("toolkit sweep needs --search NAME=VALUES, --seeds N or --configs A,B: see --help")
    if searched and importlib.util.find_spec("optuna") is None:
        raise UserError(f"--search needs a package that is not installed: {_INSTALL}")
    signal.signal(signal.SIGTERM, _stop)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            _run_all(sweep, searched, options)
    except Timeout:
        raise UserError(f"{folder}: another sweep writes to it: name another --output_dir, or stop that one") from None


def _run_all(sweep: Sweep, searched: Mapping[str, Any], options: argparse.Namespace) -> None:
    try:
        found = sweep.search(searched, options.trials) if searched else {}
        if options.seeds:
            sweep.run_seeds(found, options.seeds)
        for config in filter(None, (options.configs or "").split(",")):
            sweep.run_plain(Path(config).stem, found, ["--config_file", config])
    except (KeyboardInterrupt, SystemExit):
        sweep.end()
        print(f"stopped: the same command goes on in {sweep.folder}", file=sys.stderr, flush=True)
        raise
    sweep.compare(found)


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


class Sweep:
    """The runs of one folder."""

    def __init__(self, recipe: str, words: Sequence[str], folder: Path) -> None:
        """Raises UserError for a recipe that is not there, and settings that it does not have."""
        if not Path(recipe).is_file() or Path(recipe).suffix != ".py":
            raise UserError(f"there is no recipe {recipe}: name recipes/cls.py, say")
        self.recipe, self.words, self.folder = recipe, list(words), folder
        self.child: Popen[bytes] | None = None
        self.runs: list[Path] = []
        self.as_good: list[str] = []
        """Trials with the very value of the best one."""
        self.all_alike = False
        settings = self._settings()
        # with the same rows held back every run is judged on the same ones
        same_rows = settings and settings["data_seed"] is None and not settings["validation_file"]
        self.same_rows = ["--data_seed", str(settings["seed"])] if settings and same_rows else []
        self.first_seed = int(settings["seed"]) if settings else 42

    def _settings(self, **more: Any) -> dict[str, Any] | None:
        """All settings, where the recipe is one of ours; others check their own."""
        from toolkit import config

        task, path = Path(self.recipe).stem, Path(self.recipe)
        if task not in config.tasks():
            return None
        _, given = split(self.words)
        demo, added = path.with_name(f"{task}_demo.yaml"), [f"--{name}={value}" for name, value in more.items()]
        parsed: Any = config.parse(config.tasks()[task], [*given, *added], demo if demo.is_file() else None)
        return config.flat(parsed)

    def searched(self, text: str) -> tuple[str, Any]:
        """`learning_rate=1e-5:1e-4:log` -> (name, what optuna draws from). Raises UserError."""
        name, equals, values = text.partition("=")
        from toolkit.features.compare.command import OF_LOSS

        settings = self._settings()
        if not equals or not values:
            raise UserError(f"--search {text}: write NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C")
        if settings is not None and name not in settings:
            raise UserError(
                f"--search {text}: {Path(self.recipe).name} has no setting {name}{did_you_mean(name, settings)}"
            )
        if settings is not None and name in OF_LOSS and settings["metric_for_best_model"] in ("loss", "eval_loss"):
            raise UserError(
                f"--search {text}: each value makes the loss another quantity, so the loss cannot choose among them: "
                "pass --metric_for_best_model f1_macro, say"
            )
        if name == "output_dir" or name in vars(split([])[0]):
            raise UserError(f"--search {text}: each run has a folder of its own, and configs are named by --configs")
        if ":" not in values:
            choices = values.split(",")
            if len(choices) < 2:
                raise UserError(f"--search {text}: one value is no search: pass --{name} {values}, or name several")
            self._check(text, name, choices)
            return name, choices
        bounds = _range(text, values)
        self._check(text, name, [str(bound) for bound in bounds[:2]])
        return name, bounds

    def _check(self, text: str, name: str, values: Sequence[str]) -> None:
        for value in values:
            try:
                self._settings(**{name: value})
            except UserError as error:
                raise UserError(f"--search {text}: {first_line(error)}") from error

    # Runs

    def run_plain(self, name: str, settings: Mapping[str, Any], more: Sequence[str] = ()) -> None:
        """One run of its own, where it is not done yet. Raises UserError where it fails."""
        folder = self.folder / name
        self.runs.append(folder)
        if not finished(folder):
            print(f"{name}: {_said(settings)}", flush=True)
            if self._run(folder, settings, more, lambda: False):
                raise UserError(f"{name} failed: {self._why(folder)}")

    def run_seeds(self, settings: Mapping[str, Any], count: int) -> None:
        """The search has run the best settings with the first one."""
        searched = bool(settings) and "seed" not in settings
        for seed in range(self.first_seed + searched, self.first_seed + count):
            self.run_plain(f"seed-{seed}", {**settings, "seed": seed})

    def _run(self, folder: Path, settings: Mapping[str, Any], more: Sequence[str], ends: Callable[[], bool]) -> int:
        """The exit code of the recipe with these settings; `ends` is asked now and then whether to stop it."""
        command = [sys.executable, *self._command(folder, settings, more)]
        with folder.with_name(f"{folder.name}.log").open("ab") as log:
            self.child = Popen(
                command, stdin=DEVNULL, stdout=log, stderr=STDOUT, start_new_session=True, preexec_fn=stop_with_parent
            )
        while True:
            try:
                return self.child.wait(_LOOK_SECONDS)
            except TimeoutExpired:
                if ends():
                    self.end()

    def _command(self, folder: Path, settings: Mapping[str, Any], more: Sequence[str]) -> list[str]:
        words = [
            *self.words,
            *more,
            *self.same_rows,
            *itertools.chain(*((f"--{n}", str(v)) for n, v in settings.items())),
        ]
        # of a run that was killed before it had a checkpoint nothing can go on
        begun = (folder / "metrics.jsonl").exists() and not any(folder.glob("checkpoints/step-*/manifest.json"))
        return [self.recipe, *words, "--output_dir", str(folder), *(["--overwrite_output_dir"] if begun else [])]

    def end(self) -> None:
        """Stops the child as SIGTERM does, with a checkpoint, and waits for it."""
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C ends the waiting, not the child's checkpoint
                self.child.wait()

    def _why(self, folder: Path) -> str:
        log = folder.with_name(f"{folder.name}.log")
        return f"{last_error(log.read_text(encoding='utf-8', errors='replace'))} ({log})"

    # The search

    def search(self, searched: Mapping[str, Any], most: int | None) -> dict[str, Any]:
        """The best settings after so many trials."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = self.folder / _STUDY
        refuse_link_out(path, self.folder)
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(path))
            study = optuna.create_study(
                study_name="sweep",
                storage=optuna.storages.JournalStorage(backend),
                direction="maximize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=_FIRST_TRIALS),
            )
        except Exception as error:  # optuna fails where a line surprises it
            raise UserError(
                f"{path} is no journal of a sweep ({first_line(error)[:200]}): name another --output_dir, or remove it"
            ) from error
        self._refuse_other_search(study, searched)
        lists = [values for values in searched.values() if isinstance(values, list)]
        if len(lists) == len(searched):
            grid = list(itertools.product(*lists))
            most = min(most or len(grid), len(grid))
            for values in grid:
                study.enqueue_trial(dict(zip(searched, values, strict=True)), skip_if_exists=True)
        self._trials(study, searched, most or _TRIALS)
        done = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
        if not done:
            raise UserError(f"no trial came to its end: see {self.folder}/trial-*.log")
        best = max(done, key=lambda trial: trial.value)
        self.as_good = [_name(trial.number) for trial in done if trial.value == best.value and trial is not best]
        self.all_alike = 0 < len(self.as_good) == len(done) - 1
        return dict(best.params)

    def _refuse_other_search(self, study: Any, searched: Mapping[str, Any]) -> None:
        asked = {"search": {name: list(values) for name, values in searched.items()}, "recipe": self.recipe,
                 "settings": self.words}  # fmt: skip
        before = study.user_attrs.get("asked", asked)
        if odd := [name for name in asked if before.get(name) != asked[name]]:
            raise UserError(
                f"{self.folder} holds a sweep with another {odd[0]}: {json.dumps(before[odd[0]], ensure_ascii=False)}; "
                "type that again to go on, or name another --output_dir"
            )
        study.set_user_attr("asked", asked)

    def _trials(self, study: Any, searched: Mapping[str, Any], most: int) -> None:
        import optuna

        states = optuna.trial.TrialState
        while True:
            left = [trial for trial in study.trials if trial.state == states.RUNNING]  # of a sweep that was stopped
            ended = [trial for trial in study.trials if trial.state.is_finished()]
            if not left and len(ended) >= most:
                break
            if left:
                trial = optuna.trial.Trial(study, left[0]._trial_id)
            else:  # the same whether the sweep was stopped in between or not
                study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
                trial = study.ask()
            settings = {name: _drawn(trial, name, values) for name, values in searched.items()}
            self._trial(study, trial, settings, most)
        self.runs += [self.folder / _name(trial.number) for trial in study.trials if trial.state == states.COMPLETE]

    def _trial(self, study: Any, trial: Any, settings: dict[str, Any], most: int) -> None:
        from optuna.trial import TrialState

        folder, pruned = self.folder / _name(trial.number), False
        print(f"{folder.name} of {most}: {_said(settings)}", flush=True)

        def ends() -> bool:
            nonlocal pruned
            reported = len(trial.storage.get_trial(trial._trial_id).intermediate_values)
            for step, value in evaluations(folder)[1][reported:]:
                trial.report(value, step)
            pruned = pruned or trial.should_prune()
            return pruned

        code = 0 if finished(folder) else self._run(folder, settings, (), ends)
        by, found = evaluations(folder)
        values = [value for _, value in found]
        if pruned:
            study.tell(trial, state=TrialState.PRUNED)
            print(f"  pruned after step {found[-1][0]}: worse than the median of the others", flush=True)
        elif code or not values:
            study.tell(trial, state=TrialState.FAIL)
            if not (folder / "metrics.jsonl").exists():
                raise UserError(f"{folder.name} failed before its first step: {self._why(folder)}")
            print(f"  failed: {self._why(folder)}", flush=True)
        else:
            study.tell(trial, max(values))
            best = "  (best so far)" if study.best_trial.number == trial.number else ""
            print(f"  {by.metric} {abs(max(values)):.4f}{best}", flush=True)

    def compare(self, found: Mapping[str, Any]) -> None:
        from toolkit.features.compare.command import clearly_worse, compare, shown

        print()
        if found:
            typed = shlex.join(["python", self.recipe, *self.words, *itertools.chain(
                *((f"--{name}", str(value)) for name, value in found.items()))])  # fmt: skip
            if self.all_alike:
                print(f"no settings are best: all {len(self.as_good) + 1} trials reached the same; the first of them:")
            print(f"{'' if self.all_alike else 'best settings: '}{_said(found)}\n  {typed}")
            if self.as_good and not self.all_alike:
                print(f"  as good: {', '.join(self.as_good)}")
        compared = compare(self.runs)[0]
        _, *others = compared["runs"]
        if found and not self.all_alike and others and not any(clearly_worse(compared, run) for run in others):
            print("  on these rows no run is clearly worse than the best")
        print("\n".join(["", *shown(compared)]))
        print(f"\nonce more, with the curves: toolkit compare {shlex.quote(str(self.folder))}/*/ --output compare.html")


def _name(number: int) -> str:
    return f"trial-{number:03d}"


def _said(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                    for name, value in settings.items()) or "as given"  # fmt: skip


def _range(text: str, values: str) -> tuple[float, float, bool]:
    """(low, high, whether it is logarithmic), of whole numbers ints. Raises UserError."""
    low, high, *kind = values.split(":")
    try:
        bounds = (int(low), int(high)) if "." not in values and "e" not in values.lower() else (float(low), float(high))
    except ValueError:
        raise UserError(f"--search {text}: {low!r} to {high!r} is no range of numbers; a list is A,B,C") from None
    if kind not in ([], ["log"]):
        raise UserError(f"--search {text}: behind the range stands `:log` or nothing, not :{':'.join(kind)}")
    if not bounds[0] < bounds[1]:
        raise UserError(f"--search {text}: {low} is not below {high}")
    if kind and bounds[0] <= 0:
        raise UserError(f"--search {text}: a logarithmic range begins above 0")
    return (*bounds, bool(kind))


def _drawn(trial: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    low, high, log = values
    suggest = trial.suggest_int if isinstance(low, int) else trial.suggest_float
    return suggest(name, low, high, log=log)


def finished(folder: Path) -> bool:
    """Whether the run in a folder came to its end."""
    with contextlib.suppress(OSError, ValueError):
        return (folder / "report.html").exists() and "stopped" not in json.loads(
            (folder / "config.json").read_text("utf-8")
        )
    return False


def evaluations(folder: Path) -> tuple[Any, list[tuple[int, float]]]:
    """(by what a run chooses its best model, the step and value of each evaluation of its validation rows so far); a
    greater value is better."""
    from toolkit.report.files import by_step
    from toolkit.report.record import Record

    if not (folder / "eval.jsonl").exists():
        return None, []
    record = Record.load(folder)
    best, lines = record.best, by_step(record.during)
    return best, [(line["step"], best.sign * line[best.metric]) for line in lines if line[best.metric] is not None]
