"""Two real hosts (network namespaces) whose --output_dir is not the same disk: checkpoints that need both."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import ADDRESSES, TwoHosts, two_hosts
from tests.runs import Finished, lines_of, losses_of, recipe, start
from toolkit.checkpoint import folder as folders

pytestmark = [pytest.mark.namespaces, pytest.mark.multiprocess]

# A run with both hosts up takes about 20 s on two busy cores.
SECONDS = 150
FILES = {"ddp": "accelerate_configs/2node.yaml", "zero2": "accelerate_configs/2node_zero2.yaml",
         "zero3": "accelerate_configs/2node_zero3.yaml"}  # fmt: skip


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    yield from two_hosts()


@pytest.fixture(scope="module")
def settings(tiny_model: Path, reviews: Path) -> list[str]:
    return ["--model_name_or_path", str(tiny_model), "--train_file", str(reviews), "--max_steps", "8", "--dropout", "0",
            "--mixed_precision", "no", "--report_to", "none", "--global_batch_size", "12",
            "--per_device_batch_size", "4", "--checkpoint_every", "2", "--eval_every", "100"]  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> list[float]:
    """The losses of one process on one machine, undisturbed."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    finished = recipe(*settings, "--output_dir", folder)
    assert finished.code == 0, finished.err[-3000:]
    return losses_of(folder)


@dataclass(frozen=True)
class TwoDisks:
    """One path, and what each host finds there."""

    hosts: TwoHosts
    path: Path
    on_b: Path

    @property
    def run(self) -> Path:
        return self.path / "run"

    def start(self, host: str, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        return self.hosts.start(host, command, binds={self.path: self.on_b} if host == "b" else None, **options)

    def recipe(self, way: str, *words: str | Path) -> dict[str, subprocess.Popen[str]]:
        """The same line, typed on both."""
        command = ["accelerate", "launch", "recipes/cls.py", "--config_file", FILES[way], "--main_process_ip",
                   ADDRESSES["a"], *words, "--output_dir", self.run]  # fmt: skip
        return {host: self.start(host, *command) for host in ("a", "b")}

    def finish(self, started: Mapping[str, subprocess.Popen[str]]) -> dict[str, Finished]:
        return {host: self.hosts.finish(process, SECONDS) for host, process in started.items()}

    def checkpoints(self, host: str) -> Path:
        return (self.path if host == "a" else self.on_b) / "run" / "checkpoints"

    def steps(self, host: str) -> list[int | None]:
        """Of complete checkpoints, as this disk has them."""
        return sorted(folders.step_number(folder) or 0 for folder in folders.complete(self.checkpoints(host)))


@pytest.fixture
def disks(hosts: TwoHosts, tmp_path: Path) -> TwoDisks:
    for name in ("out", "out-of-b"):
        (tmp_path / name).mkdir()
    return TwoDisks(hosts, tmp_path / "out", tmp_path / "out-of-b")


def wait_for_step(run: Path, step: int, processes: Mapping[str, subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and all(process.poll() is None for process in processes.values()):
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_bytes().splitlines()) >= step:
            return
        time.sleep(0.01)


def kill_all(hosts: TwoHosts, host: str) -> None:
    """Of what these tests have started there."""
    for process in hosts.processes(host):
        process.kill()


def assert_done(done: Mapping[str, Finished]) -> None:
    for host, finished in done.items():
        assert finished.code == 0, f"{host}: {finished.err[-3000:]}"


def assert_whole(disks: TwoDisks, reference: Sequence[float]) -> None:
    """Each step once with the reference's loss, and the same checkpoints on both disks."""
    steps = [line["step"] for line in lines_of(disks.run / "metrics.jsonl")]
    assert steps == list(range(1, len(reference) + 1))
    assert losses_of(disks.run) == pytest.approx(reference, rel=1e-5)
    assert disks.steps("a") == disks.steps("b") == [6, 8]
    for name in ("best", "last"):
        links = [disks.checkpoints(host) / name for host in ("a", "b")]
        assert [link.readlink() for link in links] == [Path("step-00000008")] * 2
    manifests = [(disks.checkpoints(host) / "step-00000008" / folders.MANIFEST).read_bytes() for host in ("a", "b")]
    assert manifests[0] == manifests[1]


def killed_and_continued(disks: TwoDisks, way: str, settings: list[str], reference: list[float]) -> str:
    """What the second start said on host a."""
    started = disks.recipe(way, *settings)
    wait_for_step(disks.run, 5, started)
    kill_all(disks.hosts, "b")
    done = disks.finish(started)
    assert done["a"].code, done["a"].err[-3000:]
    assert "rank 1 on hostB has ended without a word" in done["a"].err
    assert disks.steps("a") == disks.steps("b")
    done = disks.finish(disks.recipe(way, *settings))
    assert_done(done)
    assert_whole(disks, reference)
    assert "resuming from" in done["a"].err
    said: str = done["a"].err
    return said


def convert(run: Path, out: Path) -> Finished:
    return start([sys.executable, "-m", "toolkit", "convert", run, out])


def refused(finished: Finished) -> str:
    assert finished.code != 0
    assert len(finished.error_lines) == 1, finished.err[-3000:]
    return finished.error_lines[0]


def test_data_parallel(disks: TwoDisks, settings: list[str], reference: list[float]) -> None:
    """Rank 0's disk has all of a checkpoint: nothing has to be brought anywhere."""
    said = killed_and_continued(disks, "ddp", settings, reference)
    assert f"hostA and hostB do not share {disks.run}/checkpoints: checkpoints lie whole on hostA" in said
    assert re.search(r"bringing step-0000000[24] together: \d+ files \(.*\) from hostA to hostB", said)
    assert convert(disks.run, disks.path / "model").code == 0
    fault = refused(convert(disks.checkpoints("b").parent, disks.path / "other"))
    assert "step-00000008 lacks the files of rank 0, which lie on hostA: bring them together first: `rsync" in fault


def test_zero_2(disks: TwoDisks, settings: list[str], reference: list[float]) -> None:
    """Each disk has half of every checkpoint."""
    checkpoints, half = disks.checkpoints("a"), disks.checkpoints("a") / "step-00000008"
    said = killed_and_continued(disks, "zero2", settings, reference)
    everything = f"`rsync -a hostB:{checkpoints}/ {checkpoints}/`"
    assert f"hostA and hostB do not share {checkpoints}: each keeps the files of its own processes" in said
    assert f"before `toolkit convert`, or a resume elsewhere, type on hostA: {everything}" in said
    assert re.search(r"bringing step-0000000[24] together: .* from hostA to hostB, 1 file .* from hostB to hostA", said)
    missing = f"{half} lacks the files of rank 1, which lie on hostB: bring them together first: "
    command = f"`rsync -a hostB:{half}/ {half}/`"
    for words in ([disks.run, disks.path / "model"], ["--inspect", half]):
        assert refused(start([sys.executable, "-m", "toolkit", "convert", *words])) == f"error: {missing}{command}"
    alone = [*settings, "--max_steps", "10", "--output_dir", disks.run]
    assert missing + command in refused(recipe(*alone))  # and not the older one that is whole since the resume
    shutil.copytree(disks.checkpoints("b") / half.name, half, dirs_exist_ok=True)  # what rsync -a does
    converted = convert(disks.run, disks.path / "model")
    assert converted.code == 0, converted.err
    finished = recipe(*alone)
    assert finished.code == 0, finished.err[-3000:]
    assert f"resuming from {half}: step 8 of 10 (saved by zero2, 2 processes)" in finished.err
    assert losses_of(disks.run)[:8] == pytest.approx(reference, rel=1e-5)


@pytest.mark.slow
def test_zero_3(disks: TwoDisks, settings: list[str], reference: list[float]) -> None:
    killed_and_continued(disks, "zero3", settings, reference)
    assert "the files of rank 1, which lie on hostB" in refused(convert(disks.run, disks.path / "model"))
    shutil.copytree(disks.checkpoints("b"), disks.path / "run-of-b", symlinks=True)
    shutil.copytree(disks.run / "checkpoints" / "last", disks.path / "run-of-b" / "last", dirs_exist_ok=True)
    assert convert(disks.path / "run-of-b", disks.path / "model").code == 0


@pytest.mark.slow
def test_several_processes_on_each(disks: TwoDisks, settings: list[str], reference: list[float]) -> None:
    more = [*settings, "--num_processes", "4", "--per_device_batch_size", "3"]
    killed = disks.recipe("zero2", *more)
    wait_for_step(disks.run, 5, killed)
    kill_all(disks.hosts, "b")
    disks.finish(killed)
    done = disks.finish(disks.recipe("zero2", *more))
    assert_done(done)
    assert_whole(disks, reference)
    fault = refused(convert(disks.run, disks.path / "model"))
    assert "lacks the files of ranks 2, 3, which lie on hostB" in fault


@pytest.mark.slow
def test_a_disk_that_is_lost(disks: TwoDisks, settings: list[str], reference: list[float]) -> None:
    """The other machine comes back with an empty one; what was rescued of it is copied to the first."""
    started = disks.recipe("zero2", *settings)
    wait_for_step(disks.run, 5, started)
    kill_all(disks.hosts, "a")
    disks.finish(started)
    rescued = disks.on_b.rename(disks.on_b.with_name("rescued"))
    disks.on_b.mkdir()
    said = disks.finish(disks.recipe("zero2", *settings))["a"].err
    assert "error: no checkpoint is sound:" in said
    gone = r"zero_pp_rank_1_mp_rank_00_optim_states.pt, which rank 1 wrote, is gone from hostB:"
    assert re.search(rf"checkpoint step-00000004: \S*{gone}{disks.checkpoints('a')}/step-00000004: skipped", said)
    for step in (2, 4):
        folder = folders.step_folder(rescued / "run" / "checkpoints", step)
        shutil.copytree(folder, disks.checkpoints("a") / folder.name, dirs_exist_ok=True)
    assert_done(disks.finish(disks.recipe("zero2", *settings)))
    assert_whole(disks, reference)


@pytest.mark.slow
def test_an_old_run_is_moved_aside_on_both(disks: TwoDisks, settings: list[str], reference: list[float]) -> None:
    assert_done(disks.finish(disks.recipe("zero2", *settings)))
    done = disks.finish(disks.recipe("zero2", *settings, "--overwrite_output_dir", "--resume", "step-00000006"))
    assert_done(done)
    assert "resuming from" in done["a"].err
    assert disks.steps("a") == disks.steps("b") == [8]
    assert losses_of(disks.run) == pytest.approx(reference[6:], rel=1e-5)
    for root in (disks.path, disks.on_b):
        (aside,) = root.glob("run.old-*")
        assert [folder.name for folder in folders.complete(aside / "checkpoints")] == ["step-00000008", "step-00000006"]


@pytest.mark.slow
def test_the_best_model_is_made_again(disks: TwoDisks, settings: list[str], reference: list[float]) -> None:
    """From a checkpoint before the one that is resumed, of which each disk has a part."""
    more = [*settings, "--eval_every", "2", "--keep_checkpoints", "9", "--learning_rate", "1e-3"]
    assert_done(disks.finish(disks.recipe("zero2", *more)))
    best = (disks.checkpoints("a") / "best").resolve()
    assert best.name < "step-00000008"
    model = (disks.run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(disks.run / "model")
    done = disks.finish(disks.recipe("zero2", *more))
    assert_done(done)
    assert f"bringing {best.name} together" in done["a"].err
    assert (disks.run / "model" / "model.safetensors").read_bytes() == model


@pytest.mark.slow
def test_a_disk_that_both_share(disks: TwoDisks, settings: list[str], reference: list[float]) -> None:
    """Nothing is said, and nothing of hosts is in the manifest."""
    one = TwoDisks(disks.hosts, disks.path, disks.path)
    done = one.finish(one.recipe("zero2", *settings))
    assert_done(done)
    assert losses_of(one.run) == pytest.approx(reference, rel=1e-5)
    assert "do not share" not in done["a"].err
    for folder in folders.complete(one.checkpoints("a")):
        manifest = folders.read_manifest(folder)
        assert "disks" not in manifest
        assert {key for entry in manifest["files"].values() for key in entry} == {"bytes", "crc32"}
    assert [path.name for path in one.checkpoints("a").glob(".*")] == []
    assert convert(one.run, one.path / "model").code == 0


@pytest.mark.slow
def test_a_full_disk(disks: TwoDisks, settings: list[str]) -> None:
    """Of the second machine: both end, it says why, and what there was remains."""
    options = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disks.on_b]  # two halves of 180 kB
    subprocess.run(options, check=True)
    try:
        done = disks.finish(disks.recipe("zero2", *settings))
        assert all(finished.code for finished in done.values())
        assert "[rank 1 on hostB] error: the checkpoint" in done["b"].err
        assert "rank 1 on hostB failed: the checkpoint" in done["a"].err
        assert re.search(r"No space left|is the disk full", done["b"].err)
        assert disks.steps("a") == disks.steps("b") != []
    finally:
        subprocess.run(["umount", disks.on_b], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "event"),
    [(0, event) for event in (2, 5, 20, 43, 44, 89, 90, 91, 93, 139, 147, 149, 151)]
    + [(1, event) for event in (2, 5, 9, 14, 16, 21, 31, 32, 34, 49, 54, 56)],
)  # about where manifests appear (43 and 14, 90 and 31, ...), links change (93, 16) and old folders go (147, 54)
def test_killed_inside_a_save(
    rank: int, event: int, disks: TwoDisks, settings: list[str], reference: list[float]
) -> None:
    """At some file operation of one of the processes; then the same command goes on."""
    words = [*settings, "--deepspeed_config", "ds_configs/zero2.json", "--output_dir", disks.run]

    def once(*command: str | Path) -> dict[str, Finished]:
        started = {}
        for number, host in enumerate("ab"):
            place = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                     "MASTER_ADDR": ADDRESSES["a"], "MASTER_PORT": "29877"}  # fmt: skip
            started[host] = disks.start(host, sys.executable, *command, *words, env=place)
        return disks.finish(started)

    killed = once("tests/kill_worker.py", str(event), str(rank))
    assert killed["ab"[rank]].code == -signal.SIGKILL, killed["ab"[rank]].err[-3000:]
    assert_done(once("recipes/cls.py"))
    assert_whole(disks, reference)
