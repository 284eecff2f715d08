"""Comparison of runs from their files: metrics with confidence intervals and tests, speed and memory."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.utils import disp_len

from toolkit.errors import UserError, listing
from toolkit.report.bootstrap import Scores, intervals, p_values, scores_of
from toolkit.report.files import dumps
from toolkit.report.record import Record, format_number, format_setting, run_config

LOSS_SETTINGS = {"loss", "focal_gamma", "class_weights", "pos_weight", "label_smoothing_factor"}
"""Settings that define the loss: losses of runs that differ in them cannot be compared."""
TRAINING_LOSS_SETTINGS = LOSS_SETTINGS | {
    "sampling", "r_drop_alpha", "fgm_epsilon", "teacher", "distillation_temperature", "distillation_alpha"
}  # fmt: skip
_OUTPUT_SETTINGS = {
    "output_dir", "overwrite_output_dir", "resume", "run_name", "project", "report_to", "logging_steps",
    "keep_checkpoints", "checkpoint_every", "checkpoint_in_background",
}  # fmt: skip
"""Settings that do not affect training."""
_FILE_SETTINGS = {"train_file", "validation_file", "test_file", "dataset_name", "label_names_file"}
_MICRO_BATCH_SETTINGS = {
    "per_device_batch_size", "per_device_eval_batch_size", "max_tokens_per_batch", "gradient_checkpointing"
}  # fmt: skip
_SIGNIFICANT = 0.05
_MANY_TESTS = 5


class ComparedRun:
    def __init__(self, folder: Path, name: str) -> None:
        """Raises UserError where the folder holds no run."""
        run_config(folder)
        self.folder, self.name = folder, name
        self.record = Record.load(folder)
        self.identity = self.record.config.get("identity", {})

    @cached_property
    def predictions(self) -> list[dict[str, Any]]:
        """The lines of predictions.jsonl; [] where they are not those of the last evaluation."""
        lines = list(self.record.predictions(self.folder))
        return lines if len(lines) == self.record.last.numbers.get("num_samples") else []

    @cached_property
    def scores(self) -> Scores:
        return scores_of(self.predictions, self.record.problem_type, self.record.data["labels"])

    @cached_property
    def rows(self) -> str:
        """Identifies the evaluated rows and their labels."""
        rows = [(line["id"], line.get("label", line.get("reference"))) for line in self.predictions]
        return dumps([self.record.last.split, self.record.data.get("labels"), rows])

    @property
    def strategy(self) -> str:
        """`one process`, `2 x ZeRO-3`."""
        world = self.record.config["world"]
        kind = world["distributed_type"]
        if kind == "NO":
            return "one process"
        stage = ((world["deepspeed"] or {}).get("zero_optimization") or {}).get("stage")
        name = {"FSDP": "FSDP2"}.get(kind, "DDP" if kind.startswith("MULTI") else kind)
        return f"{world['num_processes']} x {name if stage is None else f'ZeRO-{stage}'}"

    def loss_settings(self, names: Collection[str] = LOSS_SETTINGS) -> dict[str, Any]:
        """Settings of the loss that are not the default."""
        settings = {name: self.record.settings.get(name) for name in sorted(names)}
        return {name: value for name, value in settings.items() if value not in (None, 0, "cross_entropy")}

    def settings(self, ignored: Collection[str] = ()) -> dict[str, Any]:
        """The settings that affect training; for the model its digest instead of its path."""
        settings = self.record.settings
        settings = settings | {"model_name_or_path": self.identity.get("model", settings.get("model_name_or_path"))}
        return {name: value for name, value in settings.items() if name not in _OUTPUT_SETTINGS | {*ignored}}

    def summary(self) -> dict[str, Any]:
        record, world = self.record, self.record.config["world"]
        step, total = record.cost["steps"], record.data["total_steps"]
        unfinished = record.config.get("stopped") or (step < total and not (self.folder / "report.html").exists())
        return {
            "folder": str(self.folder),
            "strategy": self.strategy,
            "mixed_precision": world["mixed_precision"],
            "device": world["device"],
            "unfinished": f"step {step} of {total}" if unfinished else None,
            **record.cost,
        }


def compare(folders: Sequence[str | Path]) -> tuple[dict[str, Any], list[ComparedRun]]:
    """(the object that `toolkit compare --json` prints, the compared runs, the best first).

    Raises UserError for folders without a run, and where no two runs can be compared.
    """
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder).rstrip("/") for folder in folders]
    runs = [ComparedRun(Path(folder), name) for folder, name in zip(folders, names, strict=True)]
    rows = collections.Counter(run.rows for run in runs if run.predictions).most_common(1)
    reference = next((run for run in runs if run.predictions and run.rows == rows[0][0]), None)
    left_out = {run.name: reason for run in runs if (reason := _reason_to_leave_out(run, reference))}
    if reference is None or len(left_out) == len(runs) - 1 > 0:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise UserError(f"these runs cannot be compared: {reasons}")
    best = reference.record.best
    runs = [run for run in runs if run.name not in left_out]
    values = {run.name: run.record.last.numbers[best.metric] for run in runs}  # None: it was not finite
    runs.sort(key=lambda run: math.inf if values[run.name] is None else -best.sign * values[run.name])
    return {
        "metric": best.metric,
        "greater_is_better": best.sign > 0,
        "split": reference.record.last.split,
        "num_samples": reference.record.last.numbers["num_samples"],
        "settings": _differing_settings(runs),
        "runs": _measure(runs, best.metric),
        "seeds": _seeds(runs),
        "strategies": _strategies(runs),
        "other_loss": _differing_loss(*runs),
        "left_out": left_out,
    }, runs


def _reason_to_leave_out(run: ComparedRun, reference: ComparedRun | None) -> str:
    """Why a run cannot be compared with the reference; "" if it can."""
    record = run.record
    if not record.last.numbers:
        return "it was not evaluated yet"
    if reference is None or not run.predictions:
        return "its predictions.jsonl is not from its last evaluation (was it killed?): resume it until it ends"
    other = reference.record
    if record.problem_type != other.problem_type or record.data.get("labels") != other.data.get("labels"):
        return f"it has other labels than {reference.name}"
    if (metric := other.best.metric) not in record.last.numbers:
        return f"it has no {metric}, the --metric_for_best_model of {reference.name}"
    if metric == "loss" and (names := _differing_loss(run, reference)):
        return f"runs are compared by loss, and its loss is defined differently than {reference.name}'s ({names})"
    if run.rows == reference.rows:
        return ""
    seeds = {
        settings["seed"] if settings.get("data_seed") is None else settings["data_seed"]
        for settings in (record.settings, other.settings)
    }
    by_seed = not record.settings.get("validation_file") and len(seeds) > 1 and record.last.split == "validation"
    hint = " (the seed chose them: pass the same --data_seed to all runs)" if by_seed else ""
    return f"it was evaluated on other rows than {reference.name}{hint}"


def _differing_loss(*runs: ComparedRun) -> str:
    """The settings in which the losses of these runs differ."""
    return ", ".join(_differing({run.name: run.loss_settings() for run in runs}))


def _measure(runs: Sequence[ComparedRun], metric: str) -> list[dict[str, Any]]:
    """Each run's metrics with their intervals, and its differences from the first run, the best."""
    best, measured = runs[0], []
    for run, (metrics, differences) in zip(runs, intervals([run.scores for run in runs]), strict=True):
        numbers, against_best = run.record.last.numbers, None
        if run is not best:
            p = p_values(run.scores, best.scores)
            against_best = {name: {**difference, "p": p[name]} for name, difference in differences.items()}
        others: Any = {name: {"value": numbers[name]} for name in (metric, "loss") if name in numbers.keys() - metrics}
        measured.append({"name": run.name, "metrics": metrics | others, "against_best": against_best, **run.summary()})
    return measured


def _differing_settings(runs: Sequence[ComparedRun]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, where they differ. Paths of files with the same content do not count."""
    same_data = len({run.identity.get("data") for run in runs}) == 1
    return _differing({run.name: run.settings(_FILE_SETTINGS if same_data else ()) for run in runs})


def _differing(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    names = dict.fromkeys(name for each in settings.values() for name in each)
    values = {name: {run: each.get(name) for run, each in settings.items()} for name in names}
    return {name: by_run for name, by_run in values.items() if len(set(map(dumps, by_run.values()))) > 1}


def _groups(runs: Sequence[ComparedRun], key: Callable[[ComparedRun], Any]) -> list[list[ComparedRun]]:
    """Groups of at least two runs with the same key."""
    groups: dict[str, list[ComparedRun]] = collections.defaultdict(list)
    for run in runs:
        groups[dumps(key(run))].append(run)
    return [group for group in groups.values() if len(group) > 1]


def _seeds(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Mean and spread over runs that differ only in the seed."""
    spreads = []
    for group in _groups(runs, lambda run: [run.settings({*_FILE_SETTINGS, "seed"}), run.record.data["digest"],
                                            run.strategy]):  # fmt: skip
        by_seed = {run.record.settings.get("seed"): run for run in group}.values()
        if len(by_seed) > 1:
            numbers = pd.DataFrame([run.record.last.numbers for run in by_seed])[["loss", *group[0].scores.values]]
            spread = numbers.astype(float).agg(["mean", "std", "min", "max"])
            spread.index = pd.Index(["mean", "sd", "low", "high"])
            spreads.append({"runs": [run.name for run in by_seed], "metrics": spread.to_dict()})
    return spreads


def _strategies(runs: Sequence[ComparedRun]) -> dict[str, float]:
    """For runs of the same job under different strategies: run -> the largest relative difference of a step's loss from
    the first of them."""
    differences = {}
    for group in _groups(runs, lambda run: [run.settings(_FILE_SETTINGS | _MICRO_BATCH_SETTINGS),
                                            run.record.data["digest"]]):  # fmt: skip
        if len({run.strategy for run in group}) > 1:
            first = {step["step"]: step["loss"] for step in group[0].record.steps}
            for run in group:
                steps = [step for step in run.record.steps if step["loss"] is not None and first.get(step["step"])]
                relative = (abs(step["loss"] / first[step["step"]] - 1) for step in steps)
                differences[run.name] = max(relative, default=0.0)
    return differences


# Tables and sentences, for the terminal and the page


def as_text(comparison: dict[str, Any]) -> str:
    lines = [f"{comparison['num_samples']:,} rows of {comparison['split']}; sorted by {comparison['metric']}; in "
             "brackets 95 % confidence intervals (bootstrap)"]  # fmt: skip
    for title, table in tables(comparison):
        lines += ["", *([f"{title}:"] if title else []), *_aligned(table)]
    return "\n".join([*lines, "", *verdicts(comparison)])


def tables(comparison: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """(title, rows of cells); the first row is the header."""
    runs, strategies = comparison["runs"], comparison["strategies"]
    metrics = [name for name in runs[0]["metrics"] if name != "loss"] + ["loss"] * (not comparison["other_loss"])
    results = [
        {"run": run["name"]}
        | {setting: format_setting(values[run["name"]]) for setting, values in comparison["settings"].items()}
        | {name: _with_interval(run["metrics"][name]) for name in metrics}
        for run in runs
    ]
    costs = [
        {
            "run": run["name"],
            "processes": run["strategy"],
            "precision": run["mixed_precision"] or "no",
            "steps": format_number(run["steps"]),
            "training": _or_dash(run["seconds"], "{:,.1f} s"),
            "samples/s": _or_dash(run["samples_per_second"], "{:,.0f}"),
            "peak memory": _or_dash((run["peak_memory_bytes"] or 0) / 2**30, "{:.2f} GiB"),
        }
        | ({"largest loss difference": _or_dash(strategies.get(run["name"]), "{:.1e}")} if strategies else {})
        for run in runs
    ]
    seeds = [
        {"runs": ", ".join(group["runs"]), "seeds": str(len(group["runs"]))}
        | {name: "{mean:.4f} ± {sd:.4f} ({low:.4f} to {high:.4f})".format(**group["metrics"][name])
           for name in metrics if name in group["metrics"]}
        for group in comparison["seeds"]
    ]  # fmt: skip
    titles = ("", "What each took", "Over seeds: mean ± standard deviation (lowest to highest)")
    return [
        (title, [list(rows[0]), *(list(row.values()) for row in rows)])
        for title, rows in zip(titles, (results, costs, seeds), strict=True)
        if rows
    ]


def verdicts(comparison: dict[str, Any]) -> list[str]:
    """Sentences: whether the best run is significantly better than the others, and which runs were left out."""
    best, *others = comparison["runs"]
    lines = []
    if others:
        unclear = [run["name"] for run in others if not clearly_worse(comparison, run)]
        all_others = "the other" if len(others) == 1 else f"all {len(others)} others"
        verdict = f"but not clearly better than {listing(unclear)}" if unclear else f"clearly better than {all_others}"
        lines.append(f"Best by {comparison['metric']}: {best['name']}, {verdict}")
    for run in others:
        clear = "clearly worse" if clearly_worse(comparison, run) else "no clear difference"
        tests = ", ".join(
            f"{name} {test['difference']:+.4f} [{test['low']:+.4f}, {test['high']:+.4f}] p {test['p']:.2g}"
            for name, test in run["against_best"].items()
        )
        lines.append(f"{run['name']} against {best['name']}: {clear} ({tests})")
    if others:
        lines.append("p: McNemar's exact test of accuracy, a paired permutation test of the rest, on the same rows")
    if len(others) >= _MANY_TESTS:
        lines.append(f"of {len(others)} tests some have p < {_SIGNIFICANT} by chance, and the best of many runs owes "
                     "something to chance: confirm it on unseen rows (--test_file)")  # fmt: skip
    if comparison["other_loss"]:
        lines.append(f"losses are not compared: they are defined differently ({comparison['other_loss']})")
    lines += [f"{run['name']} is not finished ({run['unfinished']})" for run in comparison["runs"] if run["unfinished"]]
    return lines + [f"left out: {name}: {why}" for name, why in comparison["left_out"].items()]


def clearly_worse(comparison: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether this run's difference from the best one in the metric of the comparison is significant."""
    tests = run["against_best"]
    return bool((tests.get(comparison["metric"]) or next(iter(tests.values())))["p"] < _SIGNIFICANT)


def _or_dash(value: float | None, form: str) -> str:
    return form.format(value) if value else "–"


def _with_interval(metric: dict[str, float]) -> str:
    value = "–" if metric["value"] is None else f"{metric['value']:.4f}"
    return f"{value} [{metric['low']:.4f}, {metric['high']:.4f}]" if "low" in metric else value


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(disp_len, column)) for column in zip(*table, strict=True)]  # a Chinese character takes two
    padded = ([cell + " " * (most - disp_len(cell)) for cell, most in zip(row, widths, strict=True)] for row in table)
    return ["  ".join(row).rstrip() for row in padded]
