"""Promise: two hosts (network namespaces) need not share the disk of --output_dir: checkpoints are
on the first one's only."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.failing_worker import STEPS
from tests.hosts import ADDRESSES, TwoHosts
from tests.runs import (
    Finished,
    Process,
    lines_of,
    losses_of,
    slow_but,
    start,
    train,
    wait_for_steps,
)  # fmt: skip
from toolkit.checkpoint import folder as folders

pytestmark = [pytest.mark.namespaces, pytest.mark.multiprocess]

# A run with both hosts up takes about 20 s on two busy cores.
SECONDS = 300
FILES = {"ddp": "2node", "zero2": "2node_zero2", "zero3": "2node_zero3"}


@pytest.fixture(scope="module")
def settings(tiny_job: list[str]) -> list[str]:
    words = "--max_steps 8 --global_batch_size 12 --checkpoint_every 2 --eval_every 99"
    return [*tiny_job, *words.split()]


@dataclass(frozen=True)
class TwoDisks:
    """One path, with another disk on host B."""

    hosts: TwoHosts
    path: Path
    on_b: Path

    @property
    def run(self) -> Path:
        return self.path / "run"

    def recipe(
        self, way: str, *words: str | Path, script: Sequence[str] = ("recipes/cls.py",)
    ) -> dict[str, Process]:
        file = f"accelerate_configs/{FILES[way]}.yaml"
        launch = ["--config_file", file, "--main_process_ip", ADDRESSES["a"]]
        command = ["accelerate", "launch", *script, *launch, *words, "--output_dir", self.run]
        binds = {"b": {self.path: self.on_b}}
        return self.hosts.start_both(dict.fromkeys(("a", "b"), command), binds=binds)

    def train(self, way: str, *words: str | Path) -> dict[str, Finished]:
        done = self.finish(self.recipe(way, *words))
        return {host: finished.succeeded() for host, finished in done.items()}

    def kill_host_b(self, way: str, *words: str | Path) -> dict[str, Finished]:
        """The results of a run whose host B is killed after step 4; its rank takes no fifth."""
        started = self.recipe(way, *words, script=("tests/failing_worker.py", "stands still", "1"))
        wait_for_steps(self.run, STEPS, started.values(), SECONDS)
        for process in self.hosts.processes("b"):
            process.kill()
        return self.finish(started)

    def finish(self, started: Mapping[str, Process]) -> dict[str, Finished]:
        return self.hosts.finish_both(started, SECONDS)

    def checkpoints(self, host: str) -> Path:
        return (self.path if host == "a" else self.on_b) / "run" / "checkpoints"

    def steps(self, host: str) -> list[int | None]:
        readable = folders.readable(self.checkpoints(host))
        return sorted(folders.step_number(folder) or 0 for folder in readable)


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
    for host, names in {"a": {"step-00000006", "step-00000008"}, "b": set()}.items():
        paths = list(disks.checkpoints(host).glob("*"))
        assert {path.name for path in paths if not path.is_symlink()} == names
        assert list(disks.checkpoints(host).glob(".*")) == []


@pytest.mark.parametrize("way", slow_but(FILES, "zero2"))
def test_killed_and_continued(
    way: str, disks: TwoDisks, settings: list[str], reference: Path
) -> None:
    """Host B is killed and comes back with an empty disk; then one process on the first host
    converts and resumes."""
    done = disks.kill_host_b(way, *settings)
    assert done["a"].code, done["a"].err[-3000:]
    assert "hostB" in done["a"].err
    assert disks.steps("a")
    shutil.rmtree(disks.on_b / "run", ignore_errors=True)
    message = disks.train(way, *settings)["a"].err
    assert_whole(disks, reference)
    assert "resuming from" in message
    start(["toolkit", "convert", disks.run, disks.path / "model"]).succeeded()
    message = train(*settings, "--max_steps", "10", "--output_dir", disks.run)
    assert f"resuming from {disks.checkpoints('a') / 'step-00000008'}: step 8 of 10" in message
    assert losses_of(disks.run)[:8] == pytest.approx(losses_of(reference), rel=1e-5)
