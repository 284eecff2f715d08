"""Two hosts of eight ranks each: the losses of one process, each sample evaluated once."""

import json
import sys
from pathlib import Path

import pytest

from tests.hosts import ADDRESSES, TwoHosts
from tests.matrix import REVIEWS, runs
from tests.runs import assert_same_run, lines_of

pytestmark = [pytest.mark.namespaces, pytest.mark.slow, pytest.mark.timeout(1200)]

RANKS = 16
SETTINGS = [*REVIEWS, "--max_steps", 6, "--global_batch_size", 37, "--per_device_batch_size", 4]
SECONDS = 900  # sixteen starts of torch and DeepSpeed on two cores


@pytest.mark.parametrize("name", ["2node", "2node_zero2", "2node_zero3", "2node_fsdp2"])
def test_two_hosts_of_eight(name: str, hosts: TwoHosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "recipes/cls.py", *SETTINGS, "--output_dir", str(run), "--config_file",
               f"accelerate_configs/{name}.yaml", "--main_process_ip", ADDRESSES["a"],
               "--rendezvous_timeout", "600", "--num_processes", str(RANKS)]  # fmt: skip
    for finished in hosts.run_both(dict.fromkeys(ADDRESSES, command), SECONDS).values():
        finished.succeeded()
    assert json.loads((run / "config.json").read_text())["world"]["num_processes"] == RANKS
    assert_same_run(run, runs("single").run("sixteen ranks", "recipes.cls", SETTINGS))
    evaluated = len(lines_of(run / "predictions.jsonl"))
    assert evaluated > RANKS
    assert evaluated % RANKS  # the last batches are not full
