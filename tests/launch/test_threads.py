"""OMP_NUM_THREADS: a user's 1 is obeyed, a launcher's is not, whatever started the processes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import REPOSITORY
from tests.runs import start
from toolkit.launch import environment
from toolkit.launch.environment import MARKER, users_threads
from toolkit.launch.relaunch import clean_environment

DDP = ["--config_file", str(REPOSITORY / "accelerate_configs" / "ddp.yaml")]
SCRIPT = """
import os, sys
from toolkit import launch
launch.start(__name__)
import torch
from toolkit.launch.environment import place_of
from toolkit.launch.world import _use_cpu_well

def main():
    os.sched_getaffinity = lambda _: set(range(8))
    place = place_of(os.environ)
    _use_cpu_well(place)
    sys.stdout.write(f"{place.local_world_size} x {torch.get_num_threads()}\\n")

if __name__ == "__main__":
    launch.run(main)
"""
# name -> (before the script, behind it, processes)
WAYS: dict[str, tuple[list[str], list[str], int]] = {
    "torchrun": (["torchrun", "--standalone", "--nproc_per_node", "2"], [], 2),
    "python and a file": ([sys.executable], DDP, 2),
    "accelerate, one process": (["accelerate", "launch", "--num_processes", "1"], [], 1),
}
MORE: dict[str, tuple[list[str], list[str], int]] = {
    "python": ([sys.executable], [], 1),
    "accelerate": (["accelerate", "launch", *DDP], [], 2),
    "accelerate, file after": (["accelerate", "launch"], DDP, 2),
    "torchrun and a file": (["torchrun", "--standalone", "--nproc_per_node", "2"], DDP, 2),
    "deepspeed": (["deepspeed", "--num_gpus", "2"], [], 2),
}


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in MORE)])
def test_the_users_threads(way: str, tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(SCRIPT)
    before, behind, processes = {**WAYS, **MORE}[way]
    for threads, expected in ((None, 8 // processes), ("1", 1)):
        command = ["env", *(["-u", "OMP_NUM_THREADS"] if threads is None else [f"OMP_NUM_THREADS={threads}"])]
        finished = start([*command, *before, script, *behind], fresh=True).succeeded()
        assert finished.out.split("\n").count(f"{processes} x {expected}") == processes, finished


OURS = {MARKER: "{}"}


@pytest.mark.parametrize(
    ("value", "above", "expected"),
    [
        # (value here, (command line, environment) of each process above it, what the user set)
        (None, [], None),
        ("", [], None),
        ("many", [], None),
        ("4,2", [("torchrun cls.py", {})], 4),
        ("1", [("bash", {})], 1),
        ("1", [("python cls.py", {})], 1),
        ("1", [("python /bin/torchrun cls.py", {})], None),
        ("1", [("python -m torch.distributed.run cls.py", {})], None),
        ("1", [("python /bin/torchrun cls.py", {"OMP_NUM_THREADS": "1"}), ("bash", {})], 1),
        ("1", [("python cls.py --config_file ddp.yaml", {})], None),  # ours
        ("1", [("python cls.py --config_file ddp.yaml", {"OMP_NUM_THREADS": "1"}), ("bash", {})], 1),
        (
            "1",
            [("python cls.py", {"OMP_NUM_THREADS": "1"}), ("/bin/accelerate launch cls.py --config_file x", {})],
            None,
        ),
        ("1", [("/bin/accelerate launch --num_cpu_threads_per_process 1 cls.py", {})], 1),
        ("1", [("deepspeed cls.py", {"OMP_NUM_THREADS": "1"})], 1),  # of a container, say
    ],
)
def test_who_set_the_threads(
    value: str | None, above: list[tuple[str, dict[str, str]]], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = [SimpleNamespace(cmdline=line.split, environ=lambda env=env: env) for line, env in above]
    monkeypatch.setattr(environment.psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
    env = ({} if value is None else {"OMP_NUM_THREADS": value}) | (OURS if "ddp.yaml" in str(above) else {})
    assert users_threads(env) == expected
    assert clean_environment(env).get("OMP_NUM_THREADS") == (value if expected else None)
