"""`toolkit sweep`: trials run, are compared, and continued after a stop."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from tests.runs import ROOT, begin, lines_of, slow_but, start, wait_for_steps
from toolkit import cli
from toolkit.features.sweep import command as sweep

Sweep = Callable[..., str]
# A recipe without a model: its metric is 1 / x, and it resumes. For x == --hangs it takes one step
# and waits for its end.
RECIPE = """
import json, signal, sys, time
from pathlib import Path
options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
x, folder = float(options["x"]), Path(options["output_dir"])
if options["x"] == options.get("fails"):
    sys.exit("error: step 1: the loss is not finite")
if not Path(options.get("needs", ".")).exists():
    sys.exit("error: there is no file " + options["needs"])
(folder / "checkpoints/step-1").mkdir(parents=True, exist_ok=True)
(folder / "checkpoints/step-1/state.json").touch()
kind = "single_label_classification"
data = {"problem_type": kind, "labels": ["a", "b"], "digest": "d", "metric_for_best_model": "f1_macro"}
def write(name, mode, **content):
    with (folder / name).open(mode) as file:
        file.write(json.dumps(content) + "\\n")
def write_config(**more):
    write("config.json", "w", settings={"x": x, "seed": 1}, data=data, **more)
def stop(*_):
    write_config(stopped={"signal": "SIGTERM"})
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
write_config()
path = folder / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
for step in range(done + 1, 5):
    if step == 2 and not done and options["x"] == options.get("hangs"):
        time.sleep(60)
    write("metrics.jsonl", "a", step=step, loss=x)
    write("eval.jsonl", "a", step=step, split="validation", num_samples=2, f1_macro=1 / x)
for row, prediction in enumerate("ab"):
    write("predictions.jsonl", "a", id=row, label="a", prediction=prediction)
"""


@pytest.fixture
def run_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Sweep]:
    """Sweeps recipe.py in this process; returns what it printed."""
    (tmp_path / "recipe.py").write_text(RECIPE)

    def run(*words: Any) -> str:
        arguments = ["sweep", tmp_path / "recipe.py", "--output_dir", tmp_path / "sweep", *words]
        sweep.run(*cli.build_parser().parse_known_args(list(map(str, arguments))))
        return capsys.readouterr().out

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def values_of(tmp_path: Path) -> list[float]:
    """x of each run, in the order of the folders."""
    paths = (tmp_path / "sweep").glob("*/metrics.jsonl")
    return [lines_of(path)[0]["loss"] for path in sorted(paths)]


def test_a_range_is_searched_and_nothing_is_repeated(run_sweep: Sweep, tmp_path: Path) -> None:
    words = ("--search", "x=0.5:8:log", "--trials")
    first = run_sweep(*words, 3)
    values = values_of(tmp_path)
    assert len(set(values)) == 3
    assert f"--x={min(values)}\n" in first.split("best settings")[1]
    again = run_sweep(*words, 3)
    assert "trial-000: --x" not in again  # it is not run again
    assert again.endswith(first[first.index("\nbest settings") :])
    run_sweep(*words, 4)
    assert len(set(values_of(tmp_path))) == 4


def test_a_failed_run_and_one_without_a_first_step(run_sweep: Sweep, tmp_path: Path) -> None:
    """The second ends the sweep, if it is the first."""
    words = ("--search", "x=-4,2,1", "--fails=2", f"--needs={tmp_path / 'rows.csv'}")
    match = r"first step trial-000 failed: there is no file .*rows.csv \(.*000.log\)"
    refusal(run_sweep, *words, match=match)
    (tmp_path / "rows.csv").touch()
    (tmp_path / "sweep" / "trial-001").mkdir(parents=True)
    # killed in an earlier sweep
    (tmp_path / "sweep" / "trial-001" / "metrics.jsonl").write_text('{"step": 1}\n')
    printed = run_sweep(*words)
    assert "trial-001: --x=2\n  trial-001 failed: step 1: the loss is not finite" in printed
    assert "--x=-4\n  trial-000: best evaluation -0.2500\n" in printed
    assert "--x=1\n" in printed.split("best settings")[1]


def test_the_run_of_another_command_is_moved_aside(run_sweep: Sweep, tmp_path: Path) -> None:
    for x in (2, 1, 1):
        printed = run_sweep("--seeds", 1, f"--x={x}")
    assert not printed.startswith("seed-42")  # it was finished
    assert lines_of(tmp_path / "sweep" / "seed-42" / "metrics.jsonl")[0]["loss"] == 1
    (old,) = (tmp_path / "sweep").glob("seed-42.old-*")
    assert lines_of(old / "metrics.jsonl")[0]["loss"] == 2


CODES = {signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGKILL: -9}


@pytest.mark.parametrize("number", slow_but(CODES, signal.SIGINT))
def test_a_stopped_sweep_continues(number: int, tmp_path: Path, run_sweep: Sweep) -> None:
    words, run = ["--search", "x=4,2,1", "--hangs=2"], tmp_path / "sweep" / "trial-001"
    command = [sys.executable, "-m", "toolkit", "sweep", tmp_path / "recipe.py", *words]
    process = begin([*command, "--output_dir", tmp_path / "sweep"])
    wait_for_steps(run)
    process.send_signal(number)
    done = process.finish(30)
    assert done.code == CODES[number], done.err
    until = time.monotonic() + 20  # the child of a killed sweep gets a stop signal
    while "stopped" not in (run / "config.json").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert len(lines_of(run / "metrics.jsonl")) == 1
    again = run_sweep(*words)
    assert "trial-000: --x" not in again
    assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert sorted(values_of(tmp_path)) == [1, 2, 4]


LOSSES = ["class_weights=balanced,pos=2", "--metric_for_best_model", "loss"]
FAULTS = {
    "--learnin_rate (did you mean learning_rate?)": ["--search", "learnin_rate=1e-5:1e-4"],
    "learning_rate=1e-4:1e-5: ": ["--search", "learning_rate=1e-4:1e-5"],
    "--search dropout=0:1.5: --dropout '1.5'": ["--search", "dropout=0:1.5"],
    "--search seed=3,4: seed has two lines": ["--search", "seed=1,2", "--search", "seed=3,4"],
    "unknown setting --config_file": ["--search", "config_file=a,b"],
    "needs --search NAME=VALUES or --seeds N": [],
    "--metric_for_best_model": ["--search", *LOSSES],
    "unknown setting --sead (did you mean seed?)": ["--seeds", "2", "--sead", "1"],
}


@pytest.mark.parametrize("says", FAULTS)
def test_faults_are_named_before_anything_runs(says: str, tmp_path: Path) -> None:
    words = ["sweep", str(ROOT / "recipes" / "cls.py"), "--output_dir", str(tmp_path / "s")]
    parsed = cli.build_parser().parse_known_args([*words, *FAULTS[says]])
    refusal(sweep.run, *parsed, says=[says])
    assert not (tmp_path / "s").exists()


@pytest.mark.multiprocess
def test_a_recipe_with_a_search_and_seeds(tmp_path: Path, tiny_model: Path, reviews: Path) -> None:
    lines = ["learning_rate: 1e-3", "eval_every: 2", "global_batch_size: 22", "max_steps: 4"]
    (tmp_path / "settings.yaml").write_text("\n".join(lines))
    command = ["toolkit", "sweep", "recipes/cls.py", tmp_path / "settings.yaml"]
    command += ["--train_file", reviews, "--model_name_or_path", tiny_model, "--dropout", 0]
    command += ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"]
    command += ["--search", "weight_decay=0.1,0.2", "--seeds", 2, "--report_to", "none"]
    done = start([*command, "--output_dir", tmp_path / "sweep"]).succeeded()
    assert "mean of " in done.out
    assert "left out" not in done.out
    seeds = []
    for name in ("trial-000", "trial-001", "seed-43"):
        settings = json.loads((tmp_path / "sweep" / name / "config.json").read_text())["settings"]
        seeds.append((settings["seed"], settings["data_seed"]))
    assert seeds == [(42, 42), (42, 42), (43, 42)]
