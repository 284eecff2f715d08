"""Checkpoints of two hosts (network namespaces) that do not share the disk of --output_dir."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.failing_worker import STEPS
from tests.hosts import ADDRESSES, TwoHosts
from tests.runs import Finished, Process, lines_of, losses_of, slow_but, start, train, wait_for_steps
from toolkit.checkpoint import folder as folders

pytestmark = [pytest.mark.namespaces, pytest.mark.multiprocess]

# A run with both hosts up takes about 20 s on two busy cores.
SECONDS = 300
FILES = {"ddp": "2node", "zero2": "2node_zero2", "zero3": "2node_zero3"}


@pytest.fixture(scope="module")
def settings(tiny_job: list[str]) -> list[str]:
    return [*tiny_job, "--max_steps", "8", "--global_batch_size", "12", "--checkpoint_every", "2", "--eval_every", "99"]


@dataclass(frozen=True)
class TwoDisks:
    """One path, with another disk on host B."""

    hosts: TwoHosts
    path: Path
    on_b: Path

    @property
    def run(self) -> Path:
        return self.path / "run"

    def start(self, *command: str | Path, **options: Any) -> dict[str, Process]:
        binds = {"b": {self.path: self.on_b}}
        return self.hosts.start_both(dict.fromkeys(("a", "b"), command), binds=binds, **options)

    def recipe(self, way: str, *words: str | Path, script: Sequence[str] = ("recipes/cls.py",)) -> dict[str, Process]:
        launch = ["--config_file", f"accelerate_configs/{FILES[way]}.yaml", "--main_process_ip", ADDRESSES["a"]]
        return self.start("accelerate", "launch", *script, *launch, *words, "--output_dir", self.run)

    def train(self, way: str, *words: str | Path) -> dict[str, Finished]:
        return {host: finished.succeeded() for host, finished in self.finish(self.recipe(way, *words)).items()}

    def kill_host_b(self, way: str, *words: str | Path, rank: int = 1) -> dict[str, Finished]:
        """The results of a run whose host B is killed after step 4; its `rank` takes no fifth."""
        started = self.recipe(way, *words, script=("tests/failing_worker.py", "stands still", str(rank)))
        wait_for_steps(self.run, STEPS, started.values(), SECONDS)
        for process in self.hosts.processes("b"):
            process.kill()
        return self.finish(started)

    def finish(self, started: Mapping[str, Process]) -> dict[str, Finished]:
        return self.hosts.finish_both(started, SECONDS)

    def checkpoints(self, host: str) -> Path:
        return (self.path if host == "a" else self.on_b) / "run" / "checkpoints"

    def steps(self, host: str) -> list[int | None]:
        return sorted(folders.step_number(folder) or 0 for folder in folders.readable(self.checkpoints(host)))


@pytest.fixture
def disks(hosts: TwoHosts, tmp_path: Path) -> TwoDisks:
    for name in ("out", "out-of-b"):
        (tmp_path / name).mkdir()
    return TwoDisks(hosts, tmp_path / "out", tmp_path / "out-of-b")


def assert_whole(disks: TwoDisks, reference: Path) -> None:
    """Each step once with the reference's loss, and checkpoints on the first disk only."""
    assert [line["step"] for line in lines_of(disks.run / "metrics.jsonl")] == list(range(1, 9))
    assert losses_of(disks.run) == pytest.approx(losses_of(reference), rel=1e-5)
    assert (disks.steps("a"), disks.steps("b")) == ([6, 8], [])
    for name in ("best", "last"):
        assert (disks.checkpoints("a") / name).readlink() == Path("step-00000008")
    for host in ("a", "b"):
        there = sorted(path.name for path in disks.checkpoints(host).glob("*") if not path.is_symlink())
        assert there == (["step-00000006", "step-00000008"] if host == "a" else [])
        assert list(disks.checkpoints(host).glob(".*")) == []


@pytest.mark.parametrize("way", slow_but(FILES, "zero2"))
def test_killed_and_continued(way: str, disks: TwoDisks, settings: list[str], reference: Path) -> None:
    """The first host has the whole checkpoint: one process there converts and resumes it."""
    done = disks.kill_host_b(way, *settings)
    assert done["a"].code, done["a"].err[-3000:]
    assert "hostB" in done["a"].err
    assert disks.steps("a")
    message = disks.train(way, *settings)["a"].err
    assert_whole(disks, reference)
    assert "resuming from" in message
    start(["toolkit", "convert", disks.run, disks.path / "model"]).succeeded()
    message = train(*settings, "--max_steps", "10", "--output_dir", disks.run)
    assert f"resuming from {disks.checkpoints('a') / 'step-00000008'}: step 8 of 10" in message
    assert losses_of(disks.run)[:8] == pytest.approx(losses_of(reference), rel=1e-5)


@pytest.mark.slow
def test_several_processes_on_each(disks: TwoDisks, settings: list[str], reference: Path) -> None:
    """The other machine comes back with an empty disk."""
    more = [*settings, "--num_processes", "4", "--per_device_batch_size", "3"]
    disks.kill_host_b("zero2", *more, rank=2)
    shutil.rmtree(disks.on_b / "run")
    disks.train("zero2", *more)
    assert_whole(disks, reference)


@pytest.mark.slow
def test_an_old_run_is_moved_aside(disks: TwoDisks, settings: list[str], reference: Path) -> None:
    """And the best model is made again, from a checkpoint before the one that is resumed."""
    more = [*settings, "--eval_every", "2", "--keep_checkpoints", "9", "--learning_rate", "1e-3"]
    disks.train("zero2", *more)
    best = (disks.checkpoints("a") / "best").resolve()
    assert best.name < "step-00000008"
    model = (disks.run / "model" / "model.safetensors").read_bytes()
    disks.train("zero2", *more, "--overwrite_output_dir", "--resume", "step-00000008")
    assert (disks.run / "model" / "model.safetensors").read_bytes() == model
    (aside,) = disks.path.glob("run.old-*")
    assert len(folders.readable(aside / "checkpoints")) == 4


@pytest.mark.slow
def test_a_full_disk(disks: TwoDisks, settings: list[str]) -> None:
    """Of the first host: both end, its error says why, and earlier checkpoints remain."""
    size = 1000  # KiB; a checkpoint has about 360
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disks.path], check=True)
    try:
        done = disks.finish(disks.recipe("zero2", *settings))
        assert all(finished.code for finished in done.values())
        assert re.search(r"\[rank 0 on host.\] error: .*(No space left|is the disk full)", done["a"].err)
        assert disks.steps("a") == [2]
    finally:
        subprocess.run(["umount", disks.path], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("event", [2, 12, 25, 38, 50, 62])
def test_killed_inside_a_save(event: int, disks: TwoDisks, settings: list[str], reference: Path) -> None:
    """At a file operation of the first rank; then the same command resumes."""
    words = [*settings, "--deepspeed_config", "ds_configs/zero2.json", "--output_dir", disks.run]

    def once(*command: str | Path) -> dict[str, Finished]:
        world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES["a"],
                 "MASTER_PORT": "29877"}  # fmt: skip
        places = {host: {"RANK": str(number), **world} for number, host in enumerate("ab")}
        return disks.finish(disks.start(sys.executable, *command, *words, env=places))

    killed = once("tests/kill_worker.py", str(event), "0")
    assert killed["a"].code == -signal.SIGKILL, killed["a"].err[-3000:]
    for finished in once("recipes/cls.py").values():
        finished.succeeded()
    assert_whole(disks, reference)
