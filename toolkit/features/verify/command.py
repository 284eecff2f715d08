"""`toolkit verify RECIPE`: compares the losses and gradient norms of a few steps under each config with one process.

Each run is a child process, without dropout and with micro-batches of uneven sizes. Two more runs in one process, one
with other random numbers and one with other micro-batches, help to explain a difference.
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
from functools import partial
from pathlib import Path
from typing import NoReturn

from toolkit.errors import UserError
from toolkit.features.verify.feature import CONFIGS
from toolkit.launch.children import run_child
from toolkit.launch.environment import OTHER_RANDOMNESS
from toolkit.launch.options import count_processes, find_file, read_config, split_arguments
from toolkit.utils.files import nan_to_none
from toolkit.utils.log import logger

# samples, a prime number, so that a mean over micro-batches differs from a mean over samples; micro-batch sizes
_SAMPLES, _SIZE, _OTHER_SIZE = 31, 3, 5
_MARK = ".verify"  # a file in each run's folder, for which it is removed when the run is repeated
# Tolerances in bf16 and fp16: a config may differ from fp32 by `_MARGIN` times the difference of one process, or by
# `_ROUNDING`; differences of gradient norms, which rounding affects more than losses, count by `_GRADIENT_WEIGHT`.
_MARGIN, _ROUNDING, _GRADIENT_WEIGHT = 1.5, {"bf16": 1e-3, "fp16": 2e-4}, 1 / 40


@dataclass
class Trial:
    """A run of the recipe, and its difference from a reference run."""

    name: str
    precision: str
    command: str
    allowed: float
    error: str = ""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Tokens per step: equal if a step took the same samples."""
    difference: float | None = None
    """The largest relative difference of a step's loss or (weighted) gradient norm."""
    reason: str = ""

    @property
    def agrees(self) -> bool:
        return not self.error and (self.difference is None or self.difference <= self.allowed)

    def difference_from(self, other: Trial, steps: int | None = None) -> float:
        """The largest difference in the first `steps`, without those that fp16 skips, whose gradient is infinite."""
        if len(self.losses) != len(other.losses):
            return math.inf
        weight, differences = 1.0 if self.precision == "no" else _GRADIENT_WEIGHT, [0.0]
        for mine, theirs, factor in (
            (self.losses, other.losses, 1.0),
            (self.grad_norms, other.grad_norms, weight),
        ):
            pairs = [
                (a, b)
                for a, b in zip(mine[:steps], theirs[:steps], strict=True)
                if math.isfinite(a + b)
            ]
            differences += [factor * abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
        return max(differences)

    def compare(self, reference: Trial, reason: str, allowed: float | None = None) -> None:
        self.allowed = self.allowed if allowed is None else allowed
        self.difference = self.difference_from(reference) if self.losses else None
        self.reason = "" if self.agrees or self.error else reason

    def lines(self) -> list[str]:
        prefix = f"{self.name:28} {self.precision:4}  "
        if self.error:
            return [f"{prefix}ended with an error: {self.error}"]
        if not self.losses:
            return [f"{prefix}the first machine has its numbers"]
        verdict = "" if self.agrees else "  NOT THE SAME:"
        if self.difference is not None:
            verdict += f"  differs by {self.difference:.1e} (allowed {self.allowed:.1e})"
        losses, norms = (
            " ".join(f"{value:10.7g}" for value in values)
            for values in (self.losses, self.grad_norms)
        )
        reason = [f"    -> {self.reason}"] if self.reason else []
        return [
            f"{prefix}loss          {losses}{verdict}",
            f"{'':35}gradient norm {norms}",
            *reason,
        ]


def run(options: argparse.Namespace, words: list[str]) -> NoReturn:
    """`words`: the command line of the recipe and of its launcher. Exits with 0, or 1 if a run differs."""
    if not Path(options.recipe).is_file():
        raise UserError(
            f"there is no recipe {options.recipe}: pass its path, such as recipes/cls.py"
        )
    verification = Verification(options, [word for word in words if word != "--"])
    trials = verification.run()
    faults = [trial.name for trial in trials if not trial.agrees]
    path, runs = (
        verification.folder / "verify.json",
        [asdict(trial) | {"agrees": trial.agrees} for trial in trials],
    )
    facts = {
        "agrees": not faults,
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "runs": runs,
    }
    path.write_text(
        json.dumps(nan_to_none(facts), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    elsewhere = [trial.name for trial in trials if not trial.losses]
    verdict = (
        f"the first machine compares {', '.join(elsewhere)}"
        if elsewhere
        else "the same training everywhere"
    )
    verdict = f"NOT THE SAME everywhere: {', '.join(faults)}" if faults else verdict
    print(
        "\n".join(
            ["", *(line for trial in trials for line in trial.lines()), "", f"{verdict} ({path})"]
        ),
        flush=True,
    )
    sys.exit(bool(faults))


class Verification:
    def __init__(self, options: argparse.Namespace, words: Sequence[str]) -> None:
        """Raises UserError for a config that does not exist."""
        launch, self.words = split_arguments(words)
        self.launch = [
            word for name, value in vars(launch).items() if value for word in (f"--{name}", value)
        ]
        self.options, self.configs = options, options.config_file or CONFIGS
        self.folder = Path(options.output_dir or f"runs/verify-{Path(options.recipe).stem}")
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [find_file(name, options.recipe, "accelerate_configs") for name in self.configs]
        configs = {path: read_config(path) for path in paths}
        machines = [int(config.get("num_machines") or 1) for config in configs.values()]
        world = max(map(partial(count_processes, launch), configs.values(), configs, machines))
        self.samples = max(_SAMPLES, 4 * world + 1)  # several micro-batches on each process

    def run(self) -> list[Trial]:
        host, precision = (
            socket.gethostname(),
            self.options.mixed_precision,
        )  # several machines may share the folder
        one = self._trial(f"one-process-{host}", "no", [])
        if not one.losses:
            file = self.folder / one.name / "metrics.jsonl"
            one.error = one.error or f"it wrote no {file}: call run.after or run.log"
            return [one]
        random = self._trial(f"other-randomness-{host}", "no", [], seed_offset=1)
        size = self._trial(f"other-micro-batches-{host}", "no", [], _OTHER_SIZE)
        random.compare(
            one,
            "it draws its own random numbers (dropout?): remove them, or derive them from batch.ids",
        )
        size.compare(one, random.reason or _reason_of_size(size, one))
        trials, references = [one, random, size], dict[str, Trial]()
        for name in self.configs:
            config, stem = ["--config_file", name, *self.launch], Path(name).stem
            trials.append(trial := self._trial(stem, "no", config))
            trial.compare(one, random.reason or size.reason or _reason_of_strategy(trial, one))
            other = (
                self._trial(f"{stem}-{precision}", precision, config)
                if precision != "no"
                else trial
            )
            if (kind := other.precision) == "no":  # "auto" chose fp32
                continue
            if other.losses and kind not in references:
                trials.append(reference := self._trial(f"one-process-{kind}-{host}", kind, []))
                reference.compare(one, "", math.inf)
                references[kind] = reference
            half_precision = references[kind].difference if other.losses else None
            reason = trial.reason or f"it agrees in fp32: weights, or gradient sums, are in {kind}"
            other.compare(
                one, reason, max(_ROUNDING.get(kind, 0.0), _MARGIN * (half_precision or 0.0))
            )
            trials.append(other)
        return trials

    def _trial(
        self, name: str, precision: str, launch: list[str], size: int = _SIZE, seed_offset: int = 0
    ) -> Trial:
        """Runs the recipe. Only the first machine gets numbers."""
        folder, log, steps = self.folder / name, self.folder / f"{name}.log", self.options.max_steps
        settings = {"global_batch_size": self.samples, "max_steps": steps, "per_device_batch_size": size, "dropout": 0,
                    "mixed_precision": precision, "max_eval_samples": 32, "eval_every": steps, "report_to": "none",
                    "resume": "no", "output_dir": folder}  # fmt: skip
        if any(word.split("=")[0] == "--global_batch_size" for word in self.words):
            del settings["global_batch_size"]
        words = [
            *self.words,
            *(word for key, value in settings.items() for word in (f"--{key}", str(value))),
        ]
        command = [sys.executable, self.options.recipe, *words, "--overwrite_output_dir", *launch]
        trial, metrics = (
            Trial(name, precision, shlex.join(command), self.options.tolerance),
            folder / "metrics.jsonl",
        )
        before = metrics.stat().st_mtime_ns if metrics.exists() else None
        logger.info(f"{name}, {precision}: running")
        log.unlink(missing_ok=True)
        error = run_child(command[1:], log, {OTHER_RANDOMNESS: str(seed_offset)})
        if error:
            trial.error = error
        elif (
            metrics.exists() and metrics.stat().st_mtime_ns != before
        ):  # not of an earlier run, on another machine
            lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
            columns = ([line[key] for line in lines] for key in ("loss", "grad_norm", "tokens"))
            trial.losses, norms, trial.tokens = columns
            trial.grad_norms = [
                math.inf if norm is None else norm for norm in norms
            ]  # of a step that fp16 skipped
            trial.precision = json.loads((folder / "config.json").read_text("utf-8"))["world"][
                "mixed_precision"
            ]
            shutil.rmtree(
                folder / "model", ignore_errors=True
            )  # saves disk space; a user's recipe may write none
        for old in self.folder.glob(f"{name}.old-*/{_MARK}"):  # moved aside by this run
            shutil.rmtree(old.parent, ignore_errors=True)
        if folder.is_dir():
            (folder / _MARK).touch()
        return trial


def _reason_of_size(trial: Trial, one: Trial) -> str:
    """Why one process with other micro-batches gives other numbers."""
    if not trial.losses or math.isclose(trial.losses[0], one.losses[0], rel_tol=trial.allowed):
        return (
            "gradients are changed inside the loop over micro-batches: change them once, after it"
        )
    if (
        0.5 < trial.losses[0] / one.losses[0] < 0.75
    ):  # as the number of micro-batches, 7 instead of 11
        return "the losses are divided by the micro-batch's size: give step.mean one undivided loss per sample"
    return "a sample's loss depends on the other samples of its micro-batch (contrastive pairs, BatchNorm)"


def _reason_of_strategy(trial: Trial, one: Trial) -> str:
    """Why a config gives other numbers, if one process gives the same with any micro-batches."""
    if trial.tokens != one.tokens:
        return "its steps use other samples (a custom loader or order?): take the batches of step.micro_batches"
    if trial.difference_from(one, 1) <= trial.allowed:
        return "only the first step agrees: an optimizer that needs unsharded parameters, or state that differs by rank"
    if math.isclose(trial.losses[0], one.losses[0], rel_tol=trial.allowed):
        return "the gradient differs: a part of it is not averaged over processes"
    return "the first loss differs: a layer is initialised differently on each rank (seed?)"
