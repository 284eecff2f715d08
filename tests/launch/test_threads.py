"""OMP_NUM_THREADS=1 counts if the user has set it, not if a launcher has."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import REPOSITORY
from tests.runs import start
from toolkit.launch import environment
from toolkit.launch.environment import MARKER, user_threads
from toolkit.launch.relaunch import clean_environment

DDP = ["--config_file", str(REPOSITORY / "accelerate_configs" / "ddp.yaml")]
SCRIPT = """
import os, sys
from toolkit import launch
launch.start(__name__)
import torch
from toolkit.launch.environment import place_of
from toolkit.launch.world import _set_threads

def main():
    os.sched_getaffinity = lambda _: set(range(8))
    place = place_of(os.environ)
    _set_threads(place)
    sys.stdout.write(f"{place.local_world_size} x {torch.get_num_threads()}\\n")

if __name__ == "__main__":
    launch.run(main)
"""
# name -> (words before the script, words after it, processes)
WAYS: dict[str, tuple[list[str], list[str], int]] = {
    "torchrun": (["torchrun", "--standalone", "--nproc_per_node", "2"], [], 2),
    "python and a file": ([sys.executable], DDP, 2),
    "accelerate, one process": (["accelerate", "launch", "--num_processes", "1"], [], 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_threads_of_each_launcher(way: str, tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(SCRIPT)
    before, behind, processes = WAYS[way]
    for threads, expected in ((None, 8 // processes), ("1", 1)):
        command = ["env", *(["-u", "OMP_NUM_THREADS"] if threads is None else [f"OMP_NUM_THREADS={threads}"])]
        finished = start([*command, *before, script, *behind], fresh=True).succeeded()
        assert finished.out.split("\n").count(f"{processes} x {expected}") == processes, finished


TORCHRUN, ACCELERATE, OURS = ({name: "x"} for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", MARKER))
ONE = {"OMP_NUM_THREADS": "1"}
OPTION = "/bin/accelerate launch --num_cpu_threads_per_process 1 cls.py"


@pytest.mark.parametrize(
    ("env", "above", "expected"),
    [
        # (environment, (command line, environment) of each ancestor, the user's number)
        ({}, [], None),
        ({"OMP_NUM_THREADS": ""}, [], None),
        ({"OMP_NUM_THREADS": "many"}, [], None),
        (TORCHRUN | {"OMP_NUM_THREADS": "4,2"}, [("torchrun cls.py", {})], 4),
        (ONE, [("bash", {})], 1),
        (ONE | TORCHRUN, [("torchrun cls.py", {})], None),
        (ONE | TORCHRUN, [("torchrun cls.py", ONE), ("bash", {})], 1),
        (ONE | OURS, [("python cls.py --config_file ddp.yaml", {})], None),
        (ONE | OURS, [("python cls.py --config_file ddp.yaml", ONE), ("bash", {})], 1),
        (ONE | OURS, [("python cls.py", ONE | ACCELERATE), ("/bin/accelerate launch cls.py", {})], None),
        (ONE | ACCELERATE, [(OPTION, {})], 1),
        (ONE, [("deepspeed cls.py", ONE)], 1),  # set for a container, say
    ],
)
def test_user_threads(
    env: dict[str, str],
    above: list[tuple[str, dict[str, str]]],
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parents = [SimpleNamespace(cmdline=line.split, environ=lambda env=env: env) for line, env in above]
    monkeypatch.setattr(environment.psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
    assert user_threads(env) == expected
    assert clean_environment(env).get("OMP_NUM_THREADS") == (env.get("OMP_NUM_THREADS") if expected else None)
