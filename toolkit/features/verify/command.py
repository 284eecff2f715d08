"""`toolkit verify RECIPE`: compares a few steps of a recipe under each config with one process.

    one process, fp32          the reference
    other random numbers       differs if the recipe uses randomness
    other micro-batches        differs if the loss depends on the micro-batch
    each config, fp32          differs by the strategy, or by how the recipe uses it
    each config, resumed       differs from the run before if a checkpoint lacks something
    each in bf16 or fp16       may be as far from fp32 as one process in that precision

Each run is a child process, without dropout and with micro-batches of uneven sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from toolkit.errors import UserError
from toolkit.features.verify.feature import CONFIGS
from toolkit.features.verify.numbers import EVALUATION, LOSS, NORM, Numbers
from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.launch.options import count_processes, find_file, read_config, split_arguments
from toolkit.training.verified import write_record
from toolkit.utils.cache import digest_of_file
from toolkit.utils.children import run_child
from toolkit.utils.files import nan_to_none
from toolkit.utils.log import logger

# samples, a prime number, so that a mean over micro-batches differs from a mean over samples
_SAMPLES = 31
_MICRO_BATCH, _OTHER_MICRO_BATCH = 3, 5
_MARK = ".verify"  # a file in each run's folder, for which it is removed when the run is repeated
# in fp32; torch's norm of a large tensor on a CPU is off by 1e-5 and more
_FP32_NORM_FACTOR = 10
# In bf16 and fp16 a config may differ from fp32 by `_MARGIN` times the difference of one process,
# or by `_ROUNDING`. Rounding changes gradient norms more than losses, by about `_NORM_FACTOR`.
_MARGIN = 1.5
_ROUNDING = {"bf16": 1e-3, "fp16": 2e-4}
_NORM_FACTOR = 40
# so far may one process in bf16 or fp16 be from fp32: a gradient clipped with fp16's scale is not
_HALF_PRECISION = {LOSS: 0.1, NORM: 0.5, EVALUATION: 0.1}


@dataclass
class Trial:
    """A run of the recipe, and its differences from a reference run."""

    name: str
    precision: str
    command: str
    error: str = ""
    strategy: str = ""
    numbers: Numbers = field(default_factory=Numbers)
    """Empty on all machines but the first."""
    differences: dict[str, float] = field(default_factory=dict)
    """Of the figures that may differ: the loss, the gradient norm, the evaluation."""
    allowed: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def faults(self) -> list[str]:
        """The figures that differ."""
        return [name for name, each in self.differences.items() if each > self.allowed[name]]

    @property
    def agrees(self) -> bool:
        return not self.error and not self.faults

    def compare(self, reference: Trial, allowed: dict[str, float]) -> None:
        self.allowed = allowed
        if self.numbers.losses:
            only_losses = self.precision != "no"
            self.differences = self.numbers.differences(reference.numbers, only_losses)

    def lines(self) -> list[str]:
        prefix = f"{self.name:28} {self.precision:4}  "
        if self.error:
            return [f"{prefix}ended with an error: {self.error}"]
        if not self.numbers.losses:
            return [f"{prefix}the first machine has its numbers"]
        evaluations = self.numbers.evaluations.items()
        rows = {
            LOSS: [*self.numbers.losses.values()],
            NORM: [*self.numbers.grad_norms.values()],
            EVALUATION: [value for name, value in evaluations if name.endswith(" loss")],
        }
        lines: list[str] = []
        for name, values in rows.items():
            verdict = "NOT THE SAME: " if name in self.faults else ""
            if name in self.differences:
                limit = f"(allowed {self.allowed[name]:.1e})"
                verdict += f"differs by {self.differences[name]:.1e} {limit}"
            numbers = " ".join(f"{value:10.7g}" for value in values)
            lines.append(f"{'' if lines else prefix:35}{name:13} {numbers}  {verdict}".rstrip())
        if self.reason:
            lines.append(f"    -> {self.reason}")
        return lines


def run(options: argparse.Namespace, words: list[str]) -> NoReturn:
    """`words`: the command line of the recipe and of its launcher. Exits with 0, or 1 if a run
    differs."""
    if not Path(options.recipe).is_file():
        remedy = "pass its path, such as recipes/cls.py"
        raise UserError(f"there is no recipe {options.recipe}: {remedy}")
    verification = Verification(options, [word for word in words if word != "--"])
    trials = verification.run()
    faults = [trial.name for trial in trials if not trial.agrees]
    path = verification.folder / "verify.json"
    digest = digest_of_file(Path(options.recipe))
    facts = {
        "agrees": not faults,
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "digest": digest,
        "runs": [asdict(trial) | {"agrees": trial.agrees} for trial in trials],
    }
    text = json.dumps(nan_to_none(facts), indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
    write_record(digest, agreeing_strategies(trials))
    elsewhere = [trial.name for trial in trials if not trial.numbers.losses]
    verdict = "the same training everywhere"
    if elsewhere:
        verdict = f"the first machine compares {', '.join(elsewhere)}"
    if faults:
        verdict = f"NOT THE SAME everywhere: {', '.join(faults)}"
    lines = [line for trial in trials for line in trial.lines()]
    print("\n".join(["", *lines, "", f"{verdict} ({path})"]), flush=True)
    sys.exit(bool(faults))


def agreeing_strategies(trials: Sequence[Trial]) -> dict[str, bool]:
    """Strategy -> whether all of its runs agree, and those of one process."""
    alone = all(trial.agrees for trial in trials if trial.strategy in ("", "single"))
    agree = {trial.strategy: alone for trial in trials if trial.strategy not in ("", "single")}
    for trial in trials:
        if trial.strategy in agree and not trial.agrees:
            agree[trial.strategy] = False
    return agree


class Verification:
    def __init__(self, options: argparse.Namespace, words: Sequence[str]) -> None:
        """Raises UserError for a config that does not exist."""
        launch, self.words = split_arguments(words)
        self.launch: list[str] = []
        for name, value in vars(launch).items():
            if value:
                self.launch += [f"--{name}", value]
        self.options = options
        self.configs = options.config_file or CONFIGS
        self.folder = Path(options.output_dir or f"runs/verify-{Path(options.recipe).stem}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.host = socket.gethostname()  # several machines may share the folder
        self.middle = options.max_steps // 2 + 1
        exact = options.tolerance
        self.exact = {LOSS: exact, NORM: _FP32_NORM_FACTOR * exact, EVALUATION: exact}
        world = 1
        for name in self.configs:
            path = find_file(name, options.recipe, "accelerate_configs")
            config = read_config(path)
            machines = int(config.get("num_machines") or 1)
            world = max(world, count_processes(launch, config, path, machines))
        self.samples = max(_SAMPLES, 4 * world + 1)  # several micro-batches on each process

    def run(self) -> list[Trial]:
        one = self._trial(f"one-process-{self.host}", [], {})
        if not one.numbers.losses:
            file = self.folder / one.name / "metrics.jsonl"
            one.error = one.error or f"it wrote no {file}: loop over `run.steps`"
            return [one]
        trials = [one, *self._other_numbers(one)]
        reason = next((trial.reason for trial in trials if trial.reason), "")
        for config in self.configs:
            trials += self._under_config(config, one, reason)
        if self.options.mixed_precision != "no":
            trials += self._in_half_precision(one)
        return trials

    def _other_numbers(self, one: Trial) -> list[Trial]:
        """One process with other random numbers, and with other micro-batches."""
        random = self._trial(f"other-randomness-{self.host}", [], {}, seed_offset=1)
        random.compare(one, self.exact)
        if random.faults:
            random.reason = "it draws random numbers: remove them, or derive them from batch.ids"
        size = {"per_device_batch_size": _OTHER_MICRO_BATCH}
        sizes = self._trial(f"other-micro-batches-{self.host}", [], size)
        sizes.compare(one, self.exact)
        if sizes.faults:
            sizes.reason = random.reason or _reason_of_size(sizes, one)
        return [random, sizes]

    def _under_config(self, config: str, one: Trial, reason: str) -> list[Trial]:
        """A run in fp32, and one that resumes from its checkpoint."""
        name = Path(config).stem
        launch = ["--config_file", config, *self.launch]
        trial = self._trial(name, launch, {"checkpoint_every": self.middle})
        trial.compare(one, self.exact)
        if trial.faults:
            trial.reason = reason or _reason_of_strategy(trial, one)
        if trial.error:
            return [trial]
        checkpoints = self.folder / name / "checkpoints"
        settings = {"resume": checkpoints / f"step-{self.middle:08d}"}
        resumed = self._trial(f"{name}-resumed", launch, settings, after=self.middle)
        full = Trial("", "no", "", numbers=Numbers.of_run(self.folder / name, self.middle))
        resumed.compare(full, self.exact)
        if resumed.faults:
            resumed.reason = (
                "no checkpoint has all that the recipe changes: pass it to "
                "`accelerator.register_for_checkpointing`, or keep it in the optimizer's state"
            )
        shutil.rmtree(checkpoints, ignore_errors=True)
        return [trial, resumed]

    def _in_half_precision(self, one: Trial) -> list[Trial]:
        precision = {"mixed_precision": self.options.mixed_precision}
        reference = self._trial(f"one-process-half-{self.host}", [], precision)
        if reference.precision == "no" and not reference.error:  # "auto" chose fp32
            return []
        reference.compare(one, _HALF_PRECISION)
        if reference.faults:
            reference.reason = (
                "it agrees in fp32: losses, gradients or weights are used in 16 bits, or with "
                "fp16's loss scale (clip by `accelerator.clip_grad_norm_`)"
            )
        trials = [reference]
        scales = {LOSS: 1, NORM: _NORM_FACTOR, EVALUATION: 1}
        apart = [each / scales[name] for name, each in reference.differences.items()]
        rounding = _ROUNDING.get(reference.precision, 0.0)
        allowed = max([rounding, *(_MARGIN * each for each in apart)])
        for config in self.configs:
            launch = ["--config_file", config, *self.launch]
            trial = self._trial(f"{Path(config).stem}-half", launch, precision)
            trial.compare(one, {name: allowed * scale for name, scale in scales.items()})
            if trial.faults:
                what = "weights, or sums of gradients, are in 16 bits"
                trial.reason = f"if it agrees in fp32: {what} under this strategy"
            trials.append(trial)
        return trials

    def _trial(
        self,
        name: str,
        launch: list[str],
        settings: dict[str, Any],
        seed_offset: int = 0,
        after: int = 0,
    ) -> Trial:
        """Runs the recipe. Only the first machine gets numbers, of the steps after `after`."""
        folder = self.folder / name
        log = self.folder / f"{name}.log"
        command = [self.options.recipe, *self._words(folder, settings), *launch]
        trial = Trial(name, "no", shlex.join([sys.executable, *command]))
        metrics = folder / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else None
        logger.info(f"{name}: running")
        log.unlink(missing_ok=True)
        variables = {OTHER_RANDOMNESS: str(seed_offset), "ACCELERATE_DEBUG_MODE": "1"}
        trial.error = run_child(command, log, variables, seconds=self.options.time_limit)
        # not of an earlier run, on another machine
        if not trial.error and metrics.exists() and metrics.stat().st_mtime_ns != before:
            config = json.loads((folder / "config.json").read_text("utf-8"))
            trial.precision = config["world"]["mixed_precision"]
            trial.strategy = config.get("strategy", "")
            trial.numbers = Numbers.of_run(folder, after)
            shutil.rmtree(folder / "model", ignore_errors=True)  # saves disk space
        for old in self.folder.glob(f"{name}.old-*/{_MARK}"):  # moved aside by this run
            shutil.rmtree(old.parent, ignore_errors=True)
        if folder.is_dir():
            (folder / _MARK).touch()
        return trial

    def _words(self, folder: Path, settings: dict[str, Any]) -> list[str]:
        """The recipe's command line, with the settings of a trial."""
        steps = self.options.max_steps
        common = {
            "global_batch_size": self.samples,
            "max_steps": steps,
            "per_device_batch_size": _MICRO_BATCH,
            "dropout": 0,
            "mixed_precision": "no",
            "max_eval_samples": 32,
            "eval_every": max(1, steps // 2),
            "report_to": "none",
            "resume": "no",
            "output_dir": folder,
        }
        if any(word.split("=")[0] == "--global_batch_size" for word in self.words):
            del common["global_batch_size"]
        words = list(self.words)
        for name, value in (common | settings).items():
            words += [f"--{name}", str(value)]
        return [*words, "--overwrite_output_dir"]


def _reason_of_size(trial: Trial, one: Trial) -> str:
    """Why one process with other micro-batches gives other numbers."""
    first, expected = trial.numbers.losses.get(1, 0.0), one.numbers.losses[1]
    if math.isclose(first, expected, rel_tol=trial.allowed[LOSS]):
        return (
            "gradients are changed inside the loop over micro-batches: change them once, after it"
        )
    if 0.5 < first / expected < 0.75:  # as the number of micro-batches, 7 instead of 11
        return "the losses are divided by the micro-batch's size: give step.mean one per sample"
    return "a sample's loss depends on the others of its micro-batch (pairs, BatchNorm)"


def _reason_of_strategy(trial: Trial, one: Trial) -> str:
    """Why a config gives other numbers, if one process gives the same with any micro-batches."""
    if trial.numbers.tokens != one.numbers.tokens:
        return "its steps use other samples: take the batches of step.micro_batches"
    if trial.faults == [EVALUATION]:
        return "only the evaluation differs: compute it from all rows, which outputs are gathered"
    allowed = trial.allowed[LOSS]
    if not math.isclose(trial.numbers.losses[1], one.numbers.losses[1], rel_tol=allowed):
        return "the first loss differs: a layer is initialised differently on each rank (seed?)"
    norms = trial.numbers.grad_norms[1], one.numbers.grad_norms[1]
    if math.isclose(*norms, rel_tol=trial.allowed[NORM]):
        return (
            "only the first step agrees: weights or gradients are changed outside the optimizer, "
            "or it needs unsharded parameters, or state differs by rank"
        )
    return "the gradient differs: a part of it is not averaged over processes"
