"""`toolkit compare RUN...`: which of several runs is better, how sure that is, and what each took."""

from __future__ import annotations

import collections
import statistics
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import UserError, listing
from toolkit.report import curves
from toolkit.report.bootstrap import Scores, chance, interval, mcnemar, resampled, scores_of
from toolkit.report.files import by_step, dumps
from toolkit.report.record import Record, number, plain, render, run_config
from toolkit.utils.files import replace_file, writing

_NAMES = {"output_dir", "overwrite_output_dir", "resume", "run_name", "project", "report_to", "logging_steps",
          "keep_checkpoints", "checkpoint_every", "checkpoint_in_background"}  # fmt: skip
"""Settings that say where a run lies and what it keeps, not what it learns."""
_FILES = {"train_file", "validation_file", "test_file", "dataset_name", "label_names_file"}
_SAME_LOSS = {"per_device_batch_size", "per_device_eval_batch_size", "max_tokens_per_batch", "gradient_checkpointing"}
OF_LOSS = {"loss", "focal_gamma", "class_weights", "pos_weight", "label_smoothing_factor"}
"""Settings that make the loss another quantity: values of two such losses say nothing about each other."""
_OF_TRAINING_LOSS = {*OF_LOSS, "sampling", "r_drop_alpha", "fgm_epsilon", "teacher", "distillation_temperature",
                     "distillation_alpha"}  # fmt: skip
_MOST_DRAWN = 8
_CLEAR = 0.05
_MANY = 5


class Compared:
    """One run of a comparison."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises UserError where the folder holds no run."""
        run_config(folder)
        self.folder, self.name = folder, name
        self.record = Record.load(folder)
        self.identity = self.record.config.get("identity", {})

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Of predictions.jsonl, where that is of the last evaluation."""
        lines = list(self.record.predictions(self.folder))
        return lines if len(lines) == self.record.last.numbers.get("num_samples") else []

    @cached_property
    def scores(self) -> Scores | None:
        return scores_of(self.lines, self.record.problem_type, self.record.data["labels"]) if self.lines else None

    @cached_property
    def rows(self) -> int:
        """Of which rows the last evaluation was: the same number for the same ones."""
        split, labels = self.record.last.split, self.record.data.get("labels")
        return hash(
            dumps([split, labels, [(line["id"], line.get("label", line.get("reference"))) for line in self.lines]])
        )

    @property
    def strategy(self) -> str:
        """`one process`, `2 x ZeRO-3`."""
        world = self.record.config["world"]
        count, kind = world["num_processes"], world["distributed_type"]
        stage = ((world["deepspeed"] or {}).get("zero_optimization") or {}).get("stage")
        plain = {"NO": "", "FSDP": "FSDP2"}.get(kind, "DDP" if kind.startswith("MULTI") else kind)
        named = f"ZeRO-{stage}" if stage is not None else plain
        return f"{count} x {named}" if named else "one process"

    def loss_settings(self, names: Iterable[str] = OF_LOSS) -> dict[str, Any]:
        """What the loss is made by, without defaults."""
        own = {name: self.record.settings.get(name) for name in sorted(names)}
        return {name: value for name, value in own.items() if value not in (None, 0, "cross_entropy")}

    def settings(self, but: Iterable[str] = ()) -> dict[str, Any]:
        """What decides what is learned: of a model's folder, and of files, what they hold counts, not where."""
        own = {name: value for name, value in self.record.settings.items() if name not in _NAMES | {*but}}
        own["model_name_or_path"] = self.identity.get("model", own.get("model_name_or_path"))
        return own


def compare(folders: Sequence[str | Path]) -> tuple[dict[str, Any], list[Compared]]:
    """(what `--json` prints, the runs that were compared, the best first). Raises UserError for folders without a
    run, and where no two can be compared."""
    runs = [Compared(Path(folder), name) for folder, name in zip(folders, _names_of(folders), strict=True)]
    alike, left_out = _comparable(runs)
    best = alike[0].record.best
    alike.sort(key=lambda run: -best.sign * run.record.last.numbers[best.metric])
    measured = _measured(alike, best.metric)
    found = {
        "metric": best.metric,
        "greater_is_better": best.sign > 0,
        "split": alike[0].record.last.split,
        "num_samples": alike[0].record.last.numbers["num_samples"],
        "settings": _differing(alike),
        "runs": [{**own, **_account(run), **run.record.cost} for run, own in zip(alike, measured, strict=True)],
        "seeds": _seeds(alike),
        "strategies": _strategies(alike),
        "other_loss": _differing_loss(*alike),
        "left_out": left_out,
    }
    return found, alike


def _names_of(folders: Sequence[str | Path]) -> list[str]:
    last = [Path(folder).resolve().name for folder in folders]
    return last if len(set(last)) == len(last) else [str(folder).rstrip("/") for folder in folders]


def _comparable(runs: Sequence[Compared]) -> tuple[list[Compared], dict[str, str]]:
    """(the most runs that the same rows were evaluated of, why the others are not among them)."""
    known = [run for run in runs if run.lines]
    commonest = collections.Counter(run.rows for run in known).most_common(1)
    first = next((run for run in known if run.rows == commonest[0][0]), None)
    left_out = {run.name: why for run in runs if first is None or (why := _why_not(run, first))}
    if first is None or len(left_out) == len(runs) - 1 > 0:
        said = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise UserError(f"these runs cannot be compared: {said}")
    return [run for run in runs if run.name not in left_out], left_out


def _why_not(run: Compared, first: Compared) -> str:
    mine, others = run.record, first.record
    if not mine.last.numbers:
        return "it was not evaluated yet"
    if not run.lines:
        return "its predictions.jsonl is not of its last evaluation (was it killed?): let it end"
    if mine.problem_type != others.problem_type or mine.data.get("labels") != others.data.get("labels"):
        return f"it learns other labels than {first.name}"
    if (metric := others.best.metric) not in mine.last.numbers:
        return f"it has no {metric}, by which {first.name} is judged"
    if metric == "loss" and (odd := _differing_loss(run, first)):
        return f"its loss is another than {first.name}'s ({odd}), and the loss is what they are judged by"
    if run.rows == first.rows:
        return ""
    seeds = [
        one.get("seed") if one.get("data_seed") is None else one["data_seed"]
        for one in (mine.settings, others.settings)
    ]
    held = not mine.settings.get("validation_file") and seeds[0] != seeds[1] and mine.last.split == "validation"
    why = " (the seed chose them: pass the same --data_seed to all runs)" if held else ""
    return f"it was evaluated on other rows than {first.name}{why}"


def _differing_loss(*runs: Compared) -> str:
    """The names of the settings that make the losses of these runs other quantities."""
    own = [run.loss_settings() for run in runs]
    names = dict.fromkeys(name for settings in own for name in settings)
    return ", ".join(name for name in names if len({dumps(settings.get(name)) for settings in own}) > 1)


def _account(run: Compared) -> dict[str, Any]:
    record, world = run.record, run.record.config["world"]
    done, total = record.cost["steps"], record.data["total_steps"]
    stopped = record.config.get("stopped") or (done < total and not (run.folder / "report.html").exists())
    return {
        "folder": str(run.folder),
        "strategy": run.strategy,
        "mixed_precision": world["mixed_precision"],
        "device": world["device"],
        "unfinished": f"step {done} of {total}" if stopped else None,
    }


def _measured(runs: Sequence[Compared], metric: str) -> list[dict[str, Any]]:
    """Each run's metrics with their intervals, and how it differs from the first one, the best."""
    drawn = resampled([run.scores for run in runs if run.scores])
    found = []
    for run, own in zip(runs, drawn, strict=True):
        assert run.scores
        numbers = {name: value for name, value in run.record.last.numbers.items() if name in (metric, "loss")}
        metrics: dict[str, dict[str, float]] = {
            name: {"value": value, **interval(own[name])} for name, value in run.scores.values.items()
        }
        metrics |= {name: {"value": value} for name, value in numbers.items() if name not in metrics}
        found.append({"name": run.name, "metrics": metrics, "against_best": None if run is runs[0] else {
            name: {"difference": value - runs[0].scores.values[name], **interval(own[name] - drawn[0][name]),
                   "p": _p_of(name, run.scores, runs[0].scores, own[name] - drawn[0][name])}
            for name, value in run.scores.values.items() if runs[0].scores
        }})  # fmt: skip
    return found


def _p_of(name: str, one: Scores, other: Scores, differences: np.ndarray) -> float:
    if name == "accuracy" and one.right is not None and other.right is not None:
        return mcnemar(one.right, other.right)
    return chance(differences)


def _differing(runs: Sequence[Compared]) -> dict[str, dict[str, Any]]:
    """Setting -> its value in each run, where they are not the same."""
    same_data = len({run.identity.get("data") for run in runs}) == 1
    settings = [run.settings(_FILES if same_data else ()) for run in runs]
    names = dict.fromkeys(name for own in settings for name in own)
    found = {name: {run.name: own.get(name) for run, own in zip(runs, settings, strict=True)} for name in names}
    return {name: values for name, values in found.items() if len({dumps(value) for value in values.values()}) > 1}


def _alike(runs: Sequence[Compared], key: Callable[[Compared], Any]) -> list[list[Compared]]:
    """Groups of two runs or more with the same key."""
    groups: dict[str, list[Compared]] = collections.defaultdict(list)
    for run in runs:
        groups[dumps(key(run))].append(run)
    return [group for group in groups.values() if len(group) > 1]


def _seeds(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    """Runs that only the seed tells apart: mean and spread."""
    found = []
    for group in _alike(runs, lambda run: [run.settings({*_FILES, "seed"}), run.record.data["digest"], run.strategy]):
        group = list({run.record.settings.get("seed"): run for run in group}.values())
        if len(group) < 2:
            continue
        spread = {}
        for name in ["loss", *(group[0].scores.values if group[0].scores else ())]:
            values = [float(run.record.last.numbers[name]) for run in group]
            spread[name] = {"mean": statistics.mean(values), "sd": statistics.stdev(values), "low": min(values),
                            "high": max(values)}  # fmt: skip
        found.append({"runs": [run.name for run in group], "metrics": spread})
    return found


def _strategies(runs: Sequence[Compared]) -> dict[str, float]:
    """Run -> the largest relative difference of its loss, step by step, from the first run of the same job under
    another strategy."""
    found = {}
    for group in _alike(runs, lambda run: [run.settings(_FILES | _SAME_LOSS), run.record.data["digest"]]):
        if len({run.strategy for run in group}) > 1:
            first = {step["step"]: step["loss"] for step in group[0].record.steps}
            for run in group:
                off = [abs(step["loss"] / first[step["step"]] - 1) for step in run.record.steps
                       if step["loss"] is not None and first.get(step["step"])]  # fmt: skip
                found[run.name] = max(off, default=0.0)
    return found


# What is shown


def run(options: Any) -> None:
    """`toolkit compare`."""
    found, runs = compare(options.runs)
    if options.output:
        write_page(Path(options.output), found, runs)
    if options.json:
        print(dumps(found, indent=2))
        return
    print("\n".join(shown(found)))
    print(f"\n{options.output}" if options.output else "\n--output compare.html draws the curves over each other")


def shown(found: dict[str, Any]) -> list[str]:
    """The lines in a terminal."""
    lines = [f"{found['num_samples']:,} rows of {found['split']}; best by {found['metric']} first; in brackets 95 % of "
             "1,000 bootstrap resamples"]  # fmt: skip
    for title, table in tables(found):
        lines += ["", *([f"{title}:"] if title else []), *_aligned(table)]
    return [*lines, "", *verdicts(found)]


def tables(found: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """(title, rows of cells; the first are the names of the columns)."""
    runs, metrics = found["runs"], [name for name in found["runs"][0]["metrics"] if name != "loss"]
    metrics += [] if found["other_loss"] else ["loss"]
    head = ["run", *found["settings"], *metrics]
    results = [[run["name"], *(plain(values[run["name"]]) for values in found["settings"].values()),
                *(_with_interval(run["metrics"][name]) for name in metrics)] for run in runs]  # fmt: skip
    cost = [
        [run["name"], run["strategy"], run["mixed_precision"] or "no", *_cost(run, found["strategies"])] for run in runs
    ]
    costs = ["run", "processes", "precision", "steps", "training", "samples/s", "peak memory"]
    costs += ["largest loss difference"] if found["strategies"] else []
    shown = [("", [head, *results]), ("What each took", [costs, *cost])]
    if found["seeds"]:
        names = [name for name in found["seeds"][0]["metrics"] if name != "loss" or not found["other_loss"]]
        spread = [[", ".join(group["runs"]), str(len(group["runs"])),
                   *(f"{own['mean']:.4f} ± {own['sd']:.4f} ({own['low']:.4f} to {own['high']:.4f})"
                     for own in map(group["metrics"].get, names))] for group in found["seeds"]]  # fmt: skip
        shown.append(
            ("Over seeds: mean ± standard deviation (lowest to highest)", [["runs", "seeds", *names], *spread])
        )
    return shown


def verdicts(found: dict[str, Any]) -> list[str]:
    """In words: is the best one clearly better? And what was left out."""
    best, *others = found["runs"]
    unclear = [run["name"] for run in others if not clearly_worse(found, run)]
    lines = []
    if others:
        lead = f"Best by {found['metric']}: {best['name']}"
        lines.append(f"{lead}, clearly better than {'the other' if len(others) == 1 else f'all {len(others)} others'}"
                     if not unclear else f"{lead}, but not clearly better than {listing(unclear)}")  # fmt: skip
    for run in others:
        tests = run["against_best"]
        clear = "clearly worse" if clearly_worse(found, run) else "no clear difference"
        said = ", ".join(f"{name} {own['difference']:+.4f} [{own['low']:+.4f}, {own['high']:+.4f}] p {own['p']:.2g}"
                         for name, own in tests.items())  # fmt: skip
        lines.append(f"{run['name']} against {best['name']}: {clear} ({said})")
    if others:
        lines.append("p: McNemar's exact test of accuracy, a paired bootstrap of the rest, on the same rows")
    if len(others) >= _MANY:
        lines.append(f"of {len(others)} such tests some fall below {_CLEAR} by chance, and the best of many is lucky: "
                     "confirm it on rows that chose nothing (--test_file)")  # fmt: skip
    if found["other_loss"]:
        lines.append(f"losses are not compared: they are other quantities ({found['other_loss']} differ)")
    lines += [f"{run['name']} is not finished ({run['unfinished']})" for run in found["runs"] if run["unfinished"]]
    return lines + [f"left out: {name}: {why}" for name, why in found["left_out"].items()]


def clearly_worse(found: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether the test of this run against the best one, by the metric that runs are judged by, says so."""
    tests = run["against_best"]
    return bool((tests.get(found["metric"]) or next(iter(tests.values())))["p"] < _CLEAR)


def _cost(run: dict[str, Any], strategies: dict[str, float]) -> list[str]:
    memory, seconds, speed = run["peak_memory_bytes"], run["seconds"], run["samples_per_second"]
    cells = [number(run["steps"]), f"{seconds:,.1f} s" if seconds else "–", f"{speed:,.0f}" if speed else "–",
             f"{memory / 2**30:.2f} GiB" if memory else "–"]  # fmt: skip
    return cells + ([f"{strategies[run['name']]:.1e}" if strategies.get(run["name"]) else "–"] if strategies else [])


def _with_interval(metric: dict[str, float]) -> str:
    value = "–" if metric["value"] is None else f"{metric['value']:.4f}"
    return f"{value} [{metric['low']:.4f}, {metric['high']:.4f}]" if "low" in metric else value


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    def width(text: str) -> int:  # a Chinese character takes two columns
        return sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in text)

    widest = [max(map(width, column)) for column in zip(*table, strict=True)]
    padded = ([cell + " " * (most - width(cell)) for cell, most in zip(row, widest, strict=True)] for row in table)
    return ["  ".join(row).rstrip() for row in padded]


def write_page(path: Path, found: dict[str, Any], runs: Sequence[Compared]) -> None:
    """One HTML file without the network."""
    context = {"found": found, "tables": tables(found), "verdicts": verdicts(found), "charts": _charts(runs, found),
               "left": len(runs) - _MOST_DRAWN}  # fmt: skip
    with writing(path), replace_file(path, flush=False) as draft:
        draft.write_text(render("compare.html", context), encoding="utf-8")


def _charts(runs: Sequence[Compared], found: dict[str, Any]) -> list[curves.Chart]:
    """The best runs' curves over each other."""
    drawn = runs[:_MOST_DRAWN]

    def during(run: Compared) -> list[dict[str, Any]]:
        return by_step(run.record.during)

    charts: list[tuple[str, Any, str, Callable[[Compared], list[dict[str, Any]]], Iterable[str]]] = [
        ("Training loss, a moving average", "mean", "loss", lambda run: run.record.steps, _OF_TRAINING_LOSS),
        ("Validation loss", "points", "loss", during, OF_LOSS),
        (f"{runs[0].record.metric_title(found['metric'])} on validation", "points", found["metric"], during, ()),
        ("Samples per second", "mean", "samples_per_second", lambda run: run.record.steps, ()),
    ]
    made = []
    for title, kind, name, lines, quantity in charts:
        groups: dict[str, list[Compared]] = collections.defaultdict(list)
        for run in drawn:
            groups[dumps(run.loss_settings(quantity))].append(run)
        for group in groups.values():  # a chart for each loss
            named = f"{title}: {', '.join(run.name for run in group)}" if len(groups) > 1 else title
            of_runs = [curves.Line(run.name, curves.values_of(lines(run), name), kind) for run in group]
            made.append(curves.overlaid(named, of_runs))
    return made
