"""`toolkit verify RECIPE`: compares a few steps of a recipe under each config with one process.

    one-process            the reference, in fp32
    other-randomness       differs if the recipe uses randomness
    other-micro-batches    differs if the loss depends on the micro-batch
    CONFIG                 differs by the strategy, or by how the recipe uses it
    CONFIG-resumed         differs from the run before if a checkpoint lacks something
    CONFIG-half            in bf16 or fp16: may be as far from fp32 as one process in that precision

Each run is a child process, without dropout and with micro-batches of uneven sizes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from toolkit.config import ModelSettings
from toolkit.errors import UserError
from toolkit.features.verify.feature import CONFIGS
from toolkit.features.verify.numbers import (
    EVALUATION,
    LOSS,
    NORM,
    Numbers,
    differences,
    numbers_of,
)
from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.launch.options import find_file, split_arguments
from toolkit.training.verified import record_path
from toolkit.utils.cache import digest_of_file
from toolkit.utils.children import run_child
from toolkit.utils.files import nan_to_none
from toolkit.utils.log import logger

SAME, DIFFERENT, FAILED = "same", "NOT THE SAME", "FAILED"
# samples, a prime number, so that a mean over micro-batches differs from a mean over samples
_SAMPLES = 31
_MICRO_BATCH, _OTHER_MICRO_BATCH = 3, 5
# in fp32; rounding changes a gradient norm more than a loss
_FP32_NORM_FACTOR = 10
# In bf16 and fp16 a config may differ from fp32 by `_MARGIN` times the difference of one process,
# or by `_ROUNDING`. Rounding changes gradient norms more than losses, by about `_NORM_FACTOR`.
# Evaluations do not count: rounding changes their metrics in jumps.
_MARGIN = 1.5
_ROUNDING = {"bf16": 1e-3, "fp16": 2e-4}
_NORM_FACTOR = 40
# so far may one process in bf16 or fp16 be from fp32: a gradient clipped with fp16's scale is not
_HALF_PRECISION = {LOSS: 0.1, NORM: 0.5}
_HEADER = (
    f"{'run':28} {'precision':9}  {'result':12}  largest relative difference (allowed)"
)


@dataclass
class Trial:
    """A run of the recipe, and its differences from a reference run."""

    name: str
    command: str
    result: str = SAME
    """SAME, DIFFERENT or FAILED."""
    reason: str = ""
    """The error of a run that failed; why a run may differ."""
    precision: str = ""
    strategy: str = "single"
    numbers: Numbers = field(default_factory=dict)
    """Empty if it failed."""
    differences: dict[str, float] = field(default_factory=dict)
    """Of the figures: the loss, the gradient norm, in fp32 the evaluation."""
    allowed: dict[str, float] = field(default_factory=dict)

    def fail(self, error: str) -> None:
        self.result, self.reason = FAILED, error

    def compare(self, reference: Numbers, allowed: dict[str, float], reason: str) -> None:
        """`reason`: why it would differ."""
        if self.result == FAILED:
            return
        self.allowed = allowed
        self.differences = differences(self.numbers, reference, allowed)
        apart = []
        for name, each in self.differences.items():
            if each > allowed[name]:
                apart.append(f"the {name} by {each:.1e}")
        if apart:
            self.result = DIFFERENT
            self.reason = f"it differs in {', '.join(apart)}: {reason}"

    def row(self) -> str:
        cells = []
        for name, each in self.differences.items():
            cells.append(f"{name} {each:.1e} ({self.allowed[name]:.1e})")
        if self.result == SAME and not cells:
            cells = ["the reference"]
        precision = self.precision.replace("no", "fp32")
        row = f"{self.name:28} {precision:9}  {self.result:12}  {', '.join(cells)}"
        if self.reason:
            row += f"\n    -> {self.reason}"
        return row


def run(options: argparse.Namespace, words: list[str]) -> NoReturn:
    """`words`: the command line of the recipe and of its launcher. Prints a row when a run ends.
    Exits with 0, or 1 if one differs or fails. Raises OSError for a recipe that cannot be read, and
    UserError for a model folder that answers otherwise than when it was saved, or may do."""
    if Path(options.recipe).is_dir():
        if words:
            raise UserError(f"a model folder is verified without {' '.join(words)}")
        _verify_model(options.recipe)
        sys.exit(0)
    digest = digest_of_file(Path(options.recipe))
    verification = Verification(options, [word for word in words if word != "--"])
    trials = []
    print(_HEADER, flush=True)
    for trial in verification.trials():
        print(trial.row(), flush=True)
        trials.append(trial)
    _write_record(digest, trials)
    verdicts = []
    for result in (DIFFERENT, FAILED):
        names = [trial.name for trial in trials if trial.result == result]
        if names:
            verdicts.append(f"{result}: {', '.join(names)}")
    path = verification.folder / "verify.json"
    facts = {
        "agrees": not verdicts,
        "digest": digest,
        "runs": [asdict(trial) for trial in trials],
    }
    text = json.dumps(nan_to_none(facts), indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
    print(f"\n{'; '.join(verdicts) or 'the same training everywhere'} ({path})", flush=True)
    sys.exit(bool(verdicts))


def _verify_model(folder: str) -> None:
    # these import torch
    from toolkit.evaluation.self_test import FILE, check_folder
    from toolkit.pretrained import load_config

    load_config(ModelSettings(model_name_or_path=folder))
    if not check_folder(folder):
        remedy = "`toolkit convert` of the run's checkpoint makes a folder with it"
        raise UserError(f"{folder} has no {FILE}: {remedy}")
    print(f"{folder} answers as when it was saved: the same tokens and outputs")


def _write_record(digest: str, trials: Sequence[Trial]) -> None:
    """Records the strategies of which all runs agree, if those of one process do, and no others."""
    disagree = {trial.strategy for trial in trials if trial.result != SAME}
    for strategy in {trial.strategy for trial in trials}:
        path = record_path(digest, strategy)
        path.parent.mkdir(parents=True, exist_ok=True)
        if disagree & {strategy, "single"}:
            path.unlink(missing_ok=True)
        else:
            path.touch()


class Verification:
    def __init__(self, options: argparse.Namespace, words: Sequence[str]) -> None:
        """Raises UserError for a config that does not exist, and FileExistsError."""
        launch, self.words = split_arguments(words)
        self.launch: list[str] = []
        for name, value in vars(launch).items():
            if value:
                self.launch += [f"--{name}", value]
        if options.max_steps < 2:
            why = "a run that is stopped in the middle and resumed has at least 2"
            raise UserError(f"--max_steps {options.max_steps}: {why}")
        self.options = options
        self.configs = options.config_file or CONFIGS
        for name in self.configs:
            find_file(name, options.recipe, "accelerate_configs")
        stamp = time.strftime("%Y%m%d-%H%M%S")
        default = f"runs/verify-{Path(options.recipe).stem}-{stamp}"
        self.folder = Path(options.output_dir or default)
        self.folder.mkdir(parents=True)
        self.middle = min(options.max_steps // 2 + 1, options.max_steps - 1)
        exact = options.tolerance
        self.exact = {LOSS: exact, NORM: _FP32_NORM_FACTOR * exact, EVALUATION: exact}

    def trials(self) -> Iterator[Trial]:
        """Runs one after another; without its reference nothing else is run."""
        one = self._trial("one-process")
        yield one
        if one.result == FAILED:
            return
        random = self._trial("other-randomness", randomness=1)
        reason = "it draws random numbers: remove them, or derive them from batch.ids"
        random.compare(one.numbers, self.exact, reason)
        yield random
        sizes = self._trial("other-micro-batches", per_device_batch_size=_OTHER_MICRO_BATCH)
        reason = "the loss or the gradient of a sample depends on its micro-batch"
        sizes.compare(one.numbers, self.exact, reason)
        yield sizes
        for config in self.configs:
            yield from self._under_config(config, one)
        if self.options.mixed_precision != "no":
            yield from self._in_half_precision(one)

    def _under_config(self, config: str, one: Trial) -> Iterator[Trial]:
        """A run in fp32, and one that resumes from its checkpoint."""
        name = Path(config).stem
        trial = self._trial(name, config, checkpoint_every=self.middle)
        reason = (
            "if the runs above agree, it depends on the number of processes or on shards"
        )
        trial.compare(one.numbers, self.exact, reason)
        yield trial
        if trial.result == FAILED:
            return
        checkpoints = self.folder / name / "checkpoints"
        source = checkpoints / f"step-{self.middle:08d}"
        resumed = self._trial(f"{name}-resumed", config, after=self.middle, resume=source)
        reason = (
            "no checkpoint has all that it changes: accelerator.register_for_checkpointing"
        )
        resumed.compare(numbers_of(self.folder / name, self.middle), self.exact, reason)
        yield resumed
        shutil.rmtree(checkpoints, ignore_errors=True)

    def _in_half_precision(self, one: Trial) -> Iterator[Trial]:
        """In the precision that the option names, or that `auto` chooses here if it is not fp32."""
        precision = self.options.mixed_precision
        reference = self._trial("one-process-half", mixed_precision=precision)
        reason = (
            "losses, gradients or weights are used in 16 bits, or with fp16's loss scale"
        )
        reference.compare(one.numbers, _HALF_PRECISION, reason)
        yield reference
        if reference.precision not in _ROUNDING:
            return
        apart = reference.differences
        apart_in_loss = max(apart[LOSS], apart[NORM] / _NORM_FACTOR)
        limit = max(_ROUNDING[reference.precision], _MARGIN * apart_in_loss)
        limits = {LOSS: limit, NORM: _NORM_FACTOR * limit}
        for config in self.configs:
            name = f"{Path(config).stem}-half"
            trial = self._trial(name, config, mixed_precision=precision)
            reason = "weights, or sums of gradients, are in 16 bits under this strategy"
            trial.compare(one.numbers, limits, reason)
            yield trial

    def _trial(
        self,
        name: str,
        config: str = "",
        randomness: int = 0,
        after: int = 0,
        **settings: Any,
    ) -> Trial:
        """Runs the recipe under a config, or in one process, with these settings. Its numbers are
        of the steps after `after`."""
        folder = self.folder / name
        command = [self.options.recipe, *self._words(folder, settings)]
        if config:
            command += ["--config_file", config, *self.launch]
        trial = Trial(name, shlex.join([sys.executable, *command]))
        log = self.folder / f"{name}.log"
        logger.info(f"{name}: running, its output is in {log}")
        variables = {OTHER_RANDOMNESS: str(randomness), "ACCELERATE_DEBUG_MODE": "1"}
        error = run_child(command, log, variables, seconds=self.options.time_limit)
        if error:
            trial.fail(error)
        elif not (folder / "metrics.jsonl").exists():
            trial.fail(f"it wrote no {folder}/metrics.jsonl: loop over `run.steps`")
        else:
            facts = json.loads((folder / "config.json").read_text("utf-8"))
            trial.precision = facts["world"]["mixed_precision"]
            trial.strategy = facts["strategy"]
            trial.numbers = numbers_of(folder, after)
            shutil.rmtree(folder / "model", ignore_errors=True)  # saves disk space
        return trial

    def _words(self, folder: Path, settings: Mapping[str, Any]) -> list[str]:
        """The recipe's command line, with the settings of a trial."""
        steps = self.options.max_steps
        common = {
            "global_batch_size": _SAMPLES,
            "max_steps": steps,
            "per_device_batch_size": _MICRO_BATCH,
            "dropout": 0,
            "mixed_precision": "no",
            "max_eval_samples": 32,
            "eval_every": max(1, steps // 2),
            "report_to": "none",
            "output_dir": folder,
        }
        if any(word.split("=")[0] == "--global_batch_size" for word in self.words):
            del common["global_batch_size"]
        words = list(self.words)
        for name, value in {**common, **settings}.items():
            words += [f"--{name}", str(value)]
        return words
