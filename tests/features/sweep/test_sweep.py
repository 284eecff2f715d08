"""`toolkit sweep`: trials run, are pruned, compared, and continued after a stop."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.faults import refusal
from tests.runs import ROOT, begin, lines_of, start, wait_for_steps
from toolkit import cli
from toolkit.errors import UserError
from toolkit.features.sweep import command as sweep
from toolkit.utils import children

Sweep = Callable[..., str]
# A recipe without a model: its metric is 1 / x; it sleeps in each step, and resumes. For x == --hangs it takes one step
# and waits for its end.
RECIPE = """
import json, os, signal, sys, time
from pathlib import Path
options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
x, folder = float(options["x"]), Path(options["output_dir"])
if options["x"] == options.get("fails"):
    sys.exit("error: step 1: the loss is not finite")
if not Path(options.get("needs", ".")).exists():
    sys.exit("error: there is no file " + options["needs"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "checkpoints/step-1").mkdir(parents=True, exist_ok=True)
(folder / "checkpoints/step-1/state.json").touch()
data = {"problem_type": "single_label_classification", "labels": ["a", "b"], "total_steps": 4, "digest": "d",
        "metric_for_best_model": "f1_macro"}
world = {"num_processes": 1, "distributed_type": "NO", "deepspeed": None, "mixed_precision": "no", "device": "c"}
config = {"settings": {"x": x, "seed": 1}, "data": data, "world": world}
def write(**more):
    (folder / "config.json").write_text(json.dumps({**config, **more}))
def stop(*_):
    write(stopped={"signal": "SIGTERM"})
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
write()
path = folder / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
for step in range(done + 1, 5):
    if step == 2 and not done and options["x"] == options.get("hangs"):
        time.sleep(60)
    time.sleep(float(options.get("takes", 0.05)))
    line = {"step": step, "loss": x, "samples": 1, "samples_per_second": 1.0}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\\n")
    with (folder / "eval.jsonl").open("a") as file:
        file.write(json.dumps({**line, "split": "validation", "num_samples": 2, "f1_macro": 1 / x}) + "\\n")
lines = [json.dumps({"id": place, "label": "a", "prediction": "ab"[place]}) + "\\n" for place in (0, 1)]
(folder / "predictions.jsonl").write_text("".join(lines))
(folder / "report.html").touch()
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.py").write_text(RECIPE)
    return tmp_path / "recipe.py"


@pytest.fixture
def run_sweep(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """Sweeps `recipe` in this process; returns what it printed."""

    def run(*words: Any) -> str:
        arguments = ["sweep", str(recipe), "--output_dir", str(tmp_path / "sweep")]
        arguments += [*map(str, words)]
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            sweep.run(*cli.build_parser().parse_known_args(arguments))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return capsys.readouterr().out

    return run


def values_of(tmp_path: Path) -> list[float]:
    """x of each run, in the order of the folders."""
    return [
        lines_of(path)[0]["loss"] for path in sorted((tmp_path / "sweep").glob("*/metrics.jsonl"))
    ]


def test_a_range_is_searched_and_the_same_command_repeats_nothing(
    run_sweep: Sweep, tmp_path: Path
) -> None:
    words = ("--search", "x=0.5:8:log", "--takes=0", "--trials")
    first = run_sweep(*words, 3)
    values = values_of(tmp_path)
    assert len(set(values)) == 3
    assert f"--x={min(values)}\n" in first.split("best settings")[1]
    again = run_sweep(*words, 3)
    assert "trial-000: --x" not in again  # it is not run again
    assert again.endswith(first[first.index("\nbest settings") :])
    run_sweep(*words, 4)
    assert len(set(values_of(tmp_path))) == 4
    with (
        FileLock(tmp_path / "sweep" / ".lock"),
        pytest.raises(UserError, match="another command is writing"),
    ):
        run_sweep(*words, 4)


def test_all_values_of_a_list_are_tried_and_a_failed_run_is_recorded(
    run_sweep: Sweep, tmp_path: Path
) -> None:
    (tmp_path / "sweep" / "trial-001").mkdir(parents=True)
    # killed in an earlier sweep
    (tmp_path / "sweep" / "trial-001" / "metrics.jsonl").write_text('{"step": 1}\n')
    printed = run_sweep("--search", "x=-4,2,1", "--fails=2")
    assert "trial-001: --x=2\n  trial-001 failed: step 1: the loss is not finite" in printed
    assert "--x=-4\n  trial-000: best evaluation -0.2500\n" in printed
    assert "--x=1\n" in printed.split("best settings")[1]


def test_a_run_without_a_first_step_ends_the_sweep_which_repeats_it(
    run_sweep: Sweep, tmp_path: Path
) -> None:
    words = ("--search", "x=4,2", "--takes=0", f"--needs={tmp_path / 'rows.csv'}")
    with pytest.raises(
        UserError, match=r"first step trial-000 failed: there is no file .*rows.csv \(.*000.log\)"
    ):
        run_sweep(*words)
    (tmp_path / "rows.csv").touch()
    run_sweep(*words)
    assert sorted(values_of(tmp_path)) == [2, 4]


def test_the_run_of_another_command_is_not_taken_for_this_one(
    run_sweep: Sweep, tmp_path: Path
) -> None:
    for x in (2, 1, 1):
        printed = run_sweep("--seeds", 1, f"--x={x}", "--takes=0")
    assert not printed.startswith("seed-42")  # it was finished
    assert lines_of(tmp_path / "sweep" / "seed-42" / "metrics.jsonl")[0]["loss"] == 1
    (old,) = (tmp_path / "sweep").glob("seed-42.old-*")
    assert lines_of(old / "metrics.jsonl")[0]["loss"] == 2


def test_a_trial_below_the_median_is_pruned(
    run_sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_POLL_SECONDS", 0.1)
    # runs take long enough for their first steps to be compared
    printed = run_sweep("--search", "x=1,2,3,4,50", "--takes=0.2", "--hangs=50")
    assert "trial-004: --x=50\n  pruned" in printed
    assert json.loads((tmp_path / "sweep/trial-004/config.json").read_text())["stopped"]
    assert len(lines_of(tmp_path / "sweep/trial-004/metrics.jsonl")) == 1
    assert "trial-004 " not in printed.split("best settings")[1]


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
    pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_stopped_sweep_continues(
    number: int, code: int, recipe: Path, tmp_path: Path, run_sweep: Sweep
) -> None:
    words = ["--search", "x=4,2,1", "--takes=0", "--hangs=2"]
    run = tmp_path / "sweep" / "trial-001"
    command = [sys.executable, *"-m toolkit sweep".split(), recipe]
    command += ["--output_dir", tmp_path / "sweep", *words]
    process = begin(command)
    wait_for_steps(run)
    os.kill(process.pid, number)
    done = process.finish(30)
    assert done.code == code, done.err
    until = time.monotonic() + 20
    while (
        "stopped" not in json.loads((run / "config.json").read_text()) and time.monotonic() < until
    ):
        time.sleep(0.05)  # the child of a killed sweep gets a stop signal
    assert len(lines_of(run / "metrics.jsonl")) == 1
    again = run_sweep(*words)
    assert "trial-000: --x" not in again
    assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert sorted(values_of(tmp_path)) == [1, 2, 4]


@pytest.mark.parametrize(("words", "expected"), [
    (["--search", "learnin_rate=1e-5:1e-4"], "--learnin_rate (did you mean learning_rate?)"),
    (["--search", "learning_rate=1e-4:1e-5"], "learning_rate=1e-4:1e-5: "),
    (["--search", "learning_rate=0:1e-5:log"], "log"),
    (["--search", "dropout=0:1.5"], "--search dropout=0:1.5: --dropout '1.5'"),
    (["--search", "seed=1,2", "--search", "seed=3,4"], "--search seed=3,4: seed has two lines"),
    (["--search", "seed=1"], "NAME=A,B,C"),
    (["--search", "config_file=a,b"], "unknown setting --config_file"),
    ([], "needs --search NAME=VALUES or --seeds N"),
    (["--search", "class_weights=balanced,pos=2", "--metric_for_best_model", "loss"], "--metric_for_best_model"),
    (["--seeds", "2", "--sead", "1"], "unknown setting --sead (did you mean seed?)"),
])  # fmt: skip
def test_faults_are_named_before_anything_runs(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    options, rest = cli.build_parser().parse_known_args(
        ["sweep", str(ROOT / "recipes" / "cls.py"), "--output_dir", str(tmp_path / "s"), *words]
    )
    refusal(sweep.run, options, rest, says=[expected])
    assert not (tmp_path / "s").exists()


@pytest.mark.multiprocess
def test_a_real_recipe_with_a_search_and_seeds(
    tmp_path: Path, tiny_model: Path, reviews: Path
) -> None:
    (tmp_path / "settings.yaml").write_text(
        "learning_rate: 1e-3\neval_every: 2\nglobal_batch_size: 22\n"
    )
    command = ["toolkit", "sweep", "recipes/cls.py", tmp_path / "settings.yaml", "--train_file", reviews, "--max_steps",
               4, "--model_name_or_path", tiny_model, "--search", "weight_decay=0.1,0.2", "--seeds", 2, "--config_file",
               "accelerate_configs/ddp.yaml", "--dropout", 0, "--mixed_precision", "no", "--report_to", "none",
               "--output_dir", tmp_path / "sweep"]  # fmt: skip
    done = start(command).succeeded()
    assert "mean of " in done.out
    settings = {name: json.loads((tmp_path / "sweep" / name / "config.json").read_text())["settings"]
                for name in ("trial-000", "trial-001", "seed-43")}  # fmt: skip
    assert {each["data_seed"] for each in settings.values()} == {42}
    assert [settings[name]["seed"] for name in ("trial-000", "seed-43")] == [42, 43]
    assert "left out" not in done.out
