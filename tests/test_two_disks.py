"""Promise: two hosts (network namespaces) need not share the disk of --output_dir: checkpoints are
on the first one's only."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.failing_worker import STEPS
from tests.hosts import ADDRESSES, TwoHosts
from tests.matrix import REVIEWS, runs
from tests.runs import assert_same_run, losses_of, slow_but, start, train, wait_for_steps
from toolkit.checkpoint import folder as folders

pytestmark = pytest.mark.namespaces

# A run with both hosts up takes about 20 s on two busy cores.
SECONDS = 300
SETTINGS = [*REVIEWS, *"--max_steps 8 --per_device_batch_size 4 --checkpoint_every 2".split()]
SETTINGS += ["--eval_every", 99]


@pytest.mark.parametrize("file", slow_but(["2node_zero2", "2node", "2node_zero3"], "2node_zero2"))
def test_killed_and_continued(file: str, hosts: TwoHosts, tmp_path: Path) -> None:
    """Host B is killed after step 4 and comes back with an empty disk; then one process on the first host converts and
    resumes."""
    disk, disk_of_b = tmp_path / "out", tmp_path / "out-of-b"
    disk.mkdir()
    disk_of_b.mkdir()
    run = disk / "run"
    words = ["--config_file", f"accelerate_configs/{file}.yaml", "--main_process_ip", ADDRESSES["a"],
             *SETTINGS, "--output_dir", run]  # fmt: skip

    def start_both(*script: str) -> dict[str, Any]:
        command = ["accelerate", "launch", *script, *words]
        return hosts.start_both({"a": command, "b": command}, binds={"b": {disk: disk_of_b}})

    started = start_both("tests/failing_worker.py", "stands still", "1")  # which takes no fifth
    wait_for_steps(run, STEPS, started.values(), SECONDS)
    for process in hosts.processes("b"):
        process.kill()
    done = hosts.finish_both(started, SECONDS)
    assert done["a"].code, done["a"].err[-3000:]
    assert "hostB" in done["a"].err
    assert folders.readable(run / "checkpoints")
    shutil.rmtree(disk_of_b / "run", ignore_errors=True)

    done = hosts.finish_both(start_both("recipes/cls.py"), SECONDS)
    done["b"].succeeded()
    assert "resuming from" in done["a"].succeeded().err
    expected = runs("single").run("two disks", "recipes.cls", SETTINGS)
    assert_same_run(run, expected)
    saved = {"step-00000006", "step-00000008", "best", "last"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == saved
    for name in ("best", "last"):
        assert (run / "checkpoints" / name).readlink() == Path("step-00000008")
    assert list((disk_of_b / "run" / "checkpoints").glob("*")) == []

    start(["toolkit", "convert", run, disk / "model"]).succeeded()
    message = train(*SETTINGS, "--max_steps", "10", "--output_dir", run)
    assert f"resuming from {run / 'checkpoints' / 'step-00000008'}: step 8 of 10" in message
    assert losses_of(run)[:8] == pytest.approx(losses_of(expected), rel=1e-5)
