"""Promises on two hosts (network namespaces): every way to start gives the results of one process,
with two ranks and with sixteen; a machine that is missing, double or different is an error on both;
whatever happens to one of them ends the run on both within a minute, with one line that names it;
they need not share the disk of --output_dir: checkpoints are on the first one's only."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.failing_worker import STEPS
from tests.hosts import ADDRESSES, HOSTS, NAMES, TwoHosts
from tests.matrix import REVIEWS, runs
from tests.runs import (
    ROOT,
    Finished,
    Process,
    assert_same_run,
    slow_but,
    start,
    train,
    wait_for_steps,
)
from toolkit.checkpoint import folder as folders

pytestmark = pytest.mark.namespaces

TWO_NODE = "accelerate_configs/2node.yaml"
FIRST = ["--main_process_ip", ADDRESSES["a"]]
# A run with both hosts up takes about 20 s on two free cores.
SECONDS = 300
SETTINGS = [*REVIEWS, "--max_steps", 6, "--per_device_batch_size", 4]
# enough steps to break something
LONG = [*SETTINGS, *"--max_steps 400 --eval_every 1000 --checkpoint_every 10".split()]
LONG += ["--lr_scheduler_type", "constant"]
FORTY = [*LONG, "--max_steps", 40]
# more ranks than an evaluation's last batches have samples
SIXTEEN = [*SETTINGS, "--global_batch_size", 37]


def on_both(*command: Any) -> dict[str, list[Any]]:
    return {host: [*command] for host in HOSTS}


def literal(folder: Path, *settings: Any, file: str | Path = TWO_NODE) -> list[Any]:
    """The command line of the docs."""
    words = ["accelerate", "launch", "recipes/cls.py", "--config_file", file, *FIRST]
    return [*words, *settings, "--output_dir", folder]


def with_address(name: str, folder: Path) -> Path:
    """The shipped file, with the first host's address written into it."""
    shipped = (ROOT / "accelerate_configs" / f"{name}.yaml").read_text(encoding="utf-8")
    file = folder / f"{name}.yaml"
    file.write_text(shipped.replace("ADDRESS_OF_MACHINE_0", ADDRESSES["a"]), encoding="utf-8")
    return file


def assert_run(
    done: Mapping[str, Finished], folder: Path, settings: list[Any] = SETTINGS, ranks: int = 2
) -> None:
    for finished in done.values():
        finished.succeeded()
    assert json.loads((folder / "config.json").read_text())["world"]["num_processes"] == ranks
    expected = runs("single").run(f"two hosts, {ranks} ranks", "recipes.cls", settings)
    assert_same_run(folder, expected)


def assert_forty_steps(folder: Path) -> None:
    assert_same_run(folder, runs("single").run("two hosts, 40 steps", "recipes.cls", FORTY))


def error_of(finished: Finished, *says: str) -> str:
    """The one error line, which has these words; `accelerate launch` adds a traceback after it."""
    (line,) = (text.partition("error: ")[2] for text in finished.error_lines)
    assert finished.code != 0
    assert [words for words in says if words not in line] == [], line
    return line


# --- ways to start


@pytest.mark.parametrize("name", slow_but(["2node", "2node_zero2", "2node_zero3"], "2node_zero3"))
def test_the_literal_command_with_an_address(name: str, hosts: TwoHosts, tmp_path: Path) -> None:
    command = literal(tmp_path / "run", *SETTINGS, file=with_address(name, tmp_path))
    without = [word for word in command if word not in FIRST]
    fresh = dict.fromkeys(HOSTS, name == "2node_zero3")  # as typed, once
    done = hosts.run_both(on_both(*without), SECONDS, fresh=fresh)
    assert_run(done, tmp_path / "run")
    for rank, host in enumerate(HOSTS):
        assert f"this is machine {rank} ({NAMES[host]}) of 2: " in done[host].err


# name -> what is typed on a host before the script; for srun the variables that `srun --nodes 2 --ntasks 2` sets, by
# its documentation. torchrun finds out which host serves the rendezvous by resolving its own name.
TORCHRUN = "torchrun --nnodes 2 --nproc_per_node 1"
SRUN = """SLURM_PROCID={rank} SLURM_LOCALID=0 SLURM_NODEID={rank} SLURM_STEP_NUM_TASKS=2 MASTER_ADDR=hostA
    SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_JOB_ID=77 SLURM_STEP_ID=0"""
LAUNCHERS = {
    "deepspeed": "deepspeed --hostfile {hostfile} --no_ssh --node_rank {rank} --master_addr {first}",
    "accelerate": "accelerate launch --config_file {file} --machine_rank {rank} --num_processes 2",
    "torchrun": f"{TORCHRUN} --node_rank {{rank}} --master_addr {{first}} --master_port 29701",
    "torchrun c10d": f"{TORCHRUN} --rdzv_backend c10d --rdzv_endpoint hostA:29700 --rdzv_id {{id}}",
    "srun": f"env {SRUN} {{python}}",
}


def other_launcher(name: str, host: str, folder: Path) -> list[str]:
    hostfile = folder / "hostfile"
    hostfile.write_text("hostA slots=1\nhostB slots=1\n", encoding="utf-8")
    places = {"hostfile": hostfile, "file": with_address("2node", folder), "id": folder.name}
    places |= {"rank": HOSTS.index(host), "first": ADDRESSES["a"], "python": sys.executable}
    return LAUNCHERS[name].format(**places).split()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepspeed", "torchrun c10d", "srun"])
def test_another_launcher(name: str, hosts: TwoHosts, tmp_path: Path) -> None:
    words = ["recipes/cls.py", *SETTINGS, "--output_dir", tmp_path / "run"]
    commands = {host: [*other_launcher(name, host, tmp_path), *words] for host in HOSTS}
    assert_run(hosts.run_both(commands, SECONDS), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2node", "2node_zero2", "2node_zero3", "2node_fsdp2"])
def test_eight_ranks_on_each(name: str, hosts: TwoHosts, tmp_path: Path) -> None:
    words = ["--rendezvous_timeout", 600, "--num_processes", 16]
    file = f"accelerate_configs/{name}.yaml"
    command = literal(tmp_path / "run", *SIXTEEN, *words, file=file)
    # sixteen starts of torch and DeepSpeed on two cores
    assert_run(hosts.run_both(on_both(*command), 900), tmp_path / "run", SIXTEEN, 16)


# --- machines that cannot start together


def test_missing_machine(hosts: TwoHosts, tmp_path: Path) -> None:
    """Each host starts a run on another port."""
    words = ["--rendezvous_timeout", "6", "--main_process_port"]
    ports = {"a": "29600", "b": "29700"}
    commands = {host: literal(tmp_path / "run", *words, port) for host, port in ports.items()}
    done = hosts.run_both(commands, SECONDS)
    says = ("machine 1 did not come within 6 s", "--main_process_ip 10.77.0.1", "toolkit doctor")
    error_of(done["a"], *says)
    says = ("hostB could not reach the first machine", "10.77.0.1:29700", "toolkit doctor")
    error_of(done["b"], *says)


@pytest.mark.slow
def test_different_data_and_settings(hosts: TwoHosts, reviews: Path, tmp_path: Path) -> None:
    lines = reviews.read_text(encoding="utf-8").splitlines(keepends=True)
    shorter = tmp_path / "shorter.csv"
    shorter.write_text("".join(lines[:-3]), encoding="utf-8")
    command = literal(tmp_path / "run", *SETTINGS)
    done = hosts.run_both(on_both(*command), SECONDS, binds={"b": {reviews: shorter}})
    for finished in done.values():
        error_of(finished, "train data", "on hostA and ")
    done = hosts.run_both({"a": command, "b": [*command, "--learning_rate", "1e-3"]}, SECONDS)
    for finished in done.values():
        error_of(finished, "learning_rate is ")
    assert not (tmp_path / "run").exists()  # before anything was written


# --- what happens during a run


def begin_run(
    hosts: TwoHosts, commands: Mapping[str, list[Any]], folder: Path, steps: int, **options: Any
) -> dict[str, Process]:
    started = hosts.start_both(commands, **options)
    wait_for_steps(folder, steps, started.values(), SECONDS)
    return started


def worker_on_b(hosts: TwoHosts) -> psutil.Process:
    """The process that trains there: the launcher's child."""
    (worker,) = [process for process in hosts.processes("b") if not process.children()]
    return worker


STARTERS = ("ours", "accelerate", "torchrun", "deepspeed")
BREAKS = {  # what happens on host b -> what host a says, if it is not LOST
    "its rank is killed": {"ours": "rank 1 on hostB was killed by SIGKILL"},
    "its launcher is killed": {},
    "it is stopped": {},
    "the cable is pulled": {},
}
LOST = "lost the connection to hostB (rank 1)"
END_SECONDS = 60


@pytest.mark.parametrize("starter", slow_but(STARTERS, "ours"))
@pytest.mark.parametrize("what", slow_but(BREAKS, "the cable is pulled"))
def test_a_failure_ends_both(what: str, starter: str, hosts: TwoHosts, tmp_path: Path) -> None:
    """Within a minute, with one line on the other host that names this one and the cause."""
    folder, commands = tmp_path / "run", {}
    words = ["recipes/cls.py", *LONG, "--max_steps", 100_000, "--output_dir", folder]
    for host in HOSTS:
        if starter == "ours":
            commands[host] = [sys.executable, *words, "--config_file", TWO_NODE, *FIRST]
        else:
            commands[host] = [*other_launcher(starter, host, tmp_path), *words]
    started = begin_run(hosts, commands, folder, 12)
    here = {host: hosts.processes(host) for host in HOSTS}
    worker = worker_on_b(hosts)
    breaks: dict[str, Callable[[], object]] = {
        "its rank is killed": worker.kill,
        "its launcher is killed": lambda: worker.parent().kill(),
        "it is stopped": lambda: [process.suspend() for process in here["b"]],
        "the cable is pulled": hosts.cut,
    }
    try:
        breaks[what]()
        done = started["a"].finish(END_SECONDS)
        if what == "it is stopped":
            for process in here["b"]:
                process.resume()  # it learns now that the run is over
        alive = psutil.wait_procs([*here["a"], *here["b"]], END_SECONDS)[1]
    finally:
        hosts.heal()
    assert alive == []
    error_of(done, BREAKS[what].get(starter, LOST))


def test_the_same_command_resumes(hosts: TwoHosts, tmp_path: Path) -> None:
    """After a silent network, exactly."""
    folder = tmp_path / "run"
    command = literal(folder, *LONG, "--peer_timeout", "8")
    started = begin_run(hosts, on_both(*command), folder, 12)
    try:
        hosts.silence()
        done = hosts.finish_both(started)
    finally:
        hosts.heal()
    error_of(done["a"], LOST)
    error_of(done["b"], "lost the connection to hostA (rank 0)")
    again = hosts.run_both(on_both(*command, "--max_steps", "40"), SECONDS)
    assert "resuming from" in again["a"].succeeded().err
    assert_forty_steps(folder)


SILENT = "20 s are silent"  # fewer than `--peer_timeout` (30), as when a switch fails over


@pytest.mark.parametrize("what", slow_but(["a rank is killed", SILENT], "a rank is killed"))
def test_a_run_that_goes_on(what: str, hosts: TwoHosts, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = literal(folder, *FORTY, "--max_restarts", "1")
    started = begin_run(hosts, on_both(*command), folder, 12 if what != SILENT else 3)
    if what == SILENT:
        hosts.silence()
        time.sleep(20)
        hosts.heal()
    else:
        worker_on_b(hosts).kill()
    done = hosts.finish_both(started, SECONDS)
    for finished in done.values():
        finished.succeeded()
    restarts = "resuming from" in done["a"].err
    assert restarts == ("rank 1 on hostB was killed by SIGKILL" in done["a"].err)
    assert restarts == (what != SILENT)
    assert_forty_steps(folder)


@pytest.mark.slow
def test_permanent_failure_is_not_restarted(hosts: TwoHosts, tmp_path: Path) -> None:
    words = ["--checkpoint_every", "2", "--max_restarts", "3", "--label_column", "nothing"]
    done = hosts.run_both(on_both(*literal(tmp_path / "run", *SETTINGS, *words)), SECONDS)
    for finished in done.values():
        error_of(finished, "nothing")


@pytest.mark.slow
def test_sigterm_of_accelerate_launch_stops_both(hosts: TwoHosts, tmp_path: Path) -> None:
    """It forwards no signal; and the other machine's launcher would wait for this one."""
    folder, fresh = tmp_path / "run", dict.fromkeys(HOSTS, True)
    command = literal(folder, *LONG)
    started = begin_run(hosts, on_both(*command), folder, 3, fresh=fresh)
    signalled = time.monotonic()
    started["b"].send_signal(signal.SIGTERM)
    done = hosts.finish_both(started)
    assert time.monotonic() - signalled < 40
    assert done["a"].code != 0
    assert "stopped by SIGTERM after step" in done["a"].err
    assert not hosts.processes("b")


EIGHT = [*SETTINGS, *"--max_steps 8 --checkpoint_every 2 --eval_every 99".split()]


@pytest.mark.parametrize("name", slow_but(["2node_zero2", "2node", "2node_zero3"], "2node_zero2"))
def test_disks_that_are_not_shared(name: str, hosts: TwoHosts, tmp_path: Path) -> None:
    """Host B is killed after step 4 and comes back with an empty disk; then one process on the
    first host converts and resumes."""
    disk, disk_of_b = tmp_path / "out", tmp_path / "out-of-b"
    disk.mkdir()
    disk_of_b.mkdir()
    run = disk / "run"
    words = [
        "--config_file",
        f"accelerate_configs/{name}.yaml",
        *FIRST,
        *EIGHT,
        "--output_dir",
        run,
    ]

    def start_both(*script: str) -> dict[str, Any]:
        command = ["accelerate", "launch", *script, *words]
        return hosts.start_both(on_both(*command), binds={"b": {disk: disk_of_b}})

    started = start_both("tests/failing_worker.py", "stands still", "1")  # which takes no fifth
    wait_for_steps(run, STEPS, started.values(), SECONDS)
    for process in hosts.processes("b"):
        process.kill()
    error_of(hosts.finish_both(started, SECONDS)["a"], "hostB")
    assert folders.readable(run / "checkpoints")
    shutil.rmtree(disk_of_b / "run", ignore_errors=True)

    done = hosts.finish_both(start_both("recipes/cls.py"), SECONDS)
    done["b"].succeeded()
    assert "resuming from" in done["a"].succeeded().err
    assert_same_run(run, runs("single").run("two disks", "recipes.cls", EIGHT))
    saved = {"step-00000006", "step-00000008", "best", "last"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == saved
    assert list((disk_of_b / "run" / "checkpoints").glob("*")) == []

    start(["toolkit", "convert", run, disk / "model"]).succeeded()
    message = train(*EIGHT, "--max_steps", "10", "--output_dir", run)
    assert f"resuming from {run / 'checkpoints' / 'step-00000008'}: step 8 of 10" in message
