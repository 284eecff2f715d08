"""Two hosts (network namespaces): every way to start a run on both, and their errors."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults import Fault
from tests.hosts import ADDRESSES, INTERFACE, NAMES, TwoHosts
from tests.runs import ROOT, Finished, Process, losses_of, run_of, slow_but, wait_for_steps

pytestmark = [pytest.mark.namespaces, pytest.mark.multiprocess]

LITERAL = ["accelerate", "launch", "recipes/cls.py", "--config_file"]
FIRST = ["--main_process_ip", ADDRESSES["a"]]
# A run with both hosts up takes about 20 s on two free cores.
SECONDS = 300


@pytest.fixture(scope="module")
def settings(tiny_job: list[str]) -> list[str]:
    return [*tiny_job, "--max_steps", "6", "--global_batch_size", "12"]


def on_both(*command: str | Path) -> dict[str, list[str]]:
    return {host: [str(word) for word in command] for host in ("a", "b")}


def assert_run(
    done: Mapping[str, Finished], folder: Path, reference: Path, processes: int = 2
) -> None:
    for finished in done.values():
        finished.succeeded()
    assert json.loads((folder / "config.json").read_text())["world"]["num_processes"] == processes
    assert f"machines: hostA (rank{'s' * (processes > 2)} 0" in done["a"].err
    assert losses_of(folder) == pytest.approx(losses_of(reference), rel=1e-5)


@pytest.mark.parametrize("name", slow_but(["2node", "2node_zero2", "2node_zero3"], "2node_zero3"))
def test_the_literal_command_with_the_address_in_the_file(
    name: str, hosts: TwoHosts, settings: list[str], reference: Path, tmp_path: Path
) -> None:
    shipped = (ROOT / "accelerate_configs" / f"{name}.yaml").read_text(encoding="utf-8")
    file = tmp_path / f"{name}.yaml"
    file.write_text(shipped.replace("ADDRESS_OF_MACHINE_0", ADDRESSES["a"]), encoding="utf-8")
    fresh = dict.fromkeys("ab", name == "2node_zero3")  # as typed, once
    done = hosts.run_both(
        on_both(*LITERAL, file, *settings, "--output_dir", tmp_path / "run"), SECONDS, fresh=fresh
    )
    assert_run(done, tmp_path / "run", reference)
    assert (
        "this is machine 0 (hostA) of 2: 10.77.0.1 is an address of this machine" in done["a"].err
    )
    assert (
        "this is machine 1 (hostB) of 2: 10.77.0.1 is not an address of this machine"
        in done["b"].err
    )


WORKER = [
    "accelerate",
    "launch",
    "tests/hosts_worker.py",
    "--config_file",
    "accelerate_configs/2node.yaml",
]
# source of each host's rank -> (arguments, environment by host)
RANKS: dict[str, tuple[list[str], dict[str, dict[str, str]]]] = {
    "NODE_RANK": (FIRST, {"a": {"NODE_RANK": "0"}, "b": {"NODE_RANK": "1"}}),
    "SLURM_NODEID": (
        ["--main_process_ip", "hostA"],
        {"a": {"SLURM_NODEID": "0"}, "b": {"SLURM_NODEID": "1"}},
    ),
    "main_process_ip of the other": (["--main_process_ip", ADDRESSES["b"]], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", RANKS)
def test_rank_of_each_host(way: str, hosts: TwoHosts) -> None:
    words, env = RANKS[way]
    done = hosts.run_both(on_both(*WORKER, *words), SECONDS, env=env)
    for rank, host in enumerate("ba" if "of the other" in way else "ab"):
        output = done[host].succeeded().out
        assert f"rank {rank} of 2 on {NAMES[host]} GLOO_SOCKET_IFNAME={INTERFACE}" in output


def launcher_words(name: str, host: str, folder: Path) -> list[str]:
    number, hostfile = str("ab".index(host)), folder / "hostfile"
    hostfile.write_text("hostA slots=1\nhostB slots=1\n", encoding="utf-8")
    words = {
        "deepspeed --hostfile --no_ssh": ["deepspeed", "--hostfile", str(hostfile), "--no_ssh", "--node_rank", number,
                                          "--master_addr", ADDRESSES["a"]],
        # by name: torchrun finds out which host serves the rendezvous by resolving its own name, on Debian 127.0.1.1
        "torchrun c10d": ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d",
                          "--rdzv_endpoint", "hostA:29700", "--rdzv_id", folder.name],
        # the variables that `srun --nodes 2 --ntasks 2` sets for each task, by its documentation
        "srun": ["env", f"SLURM_PROCID={number}", "SLURM_STEP_NUM_TASKS=2", "SLURM_LOCALID=0",
                 f"SLURM_NODEID={number}", "SLURM_STEP_TASKS_PER_NODE=1(x2)", "MASTER_ADDR=hostA",
                 "SLURM_JOB_ID=77", "SLURM_STEP_ID=0", sys.executable],
    }  # fmt: skip
    return words[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepspeed --hostfile --no_ssh", "torchrun c10d", "srun"])
def test_another_launcher(
    name: str, hosts: TwoHosts, settings: list[str], reference: Path, tmp_path: Path
) -> None:
    words = ["recipes/cls.py", *settings, "--output_dir", str(tmp_path / "run")]
    done = hosts.run_both(
        {host: [*launcher_words(name, host, tmp_path), *words] for host in ("a", "b")}, SECONDS
    )
    assert_run(done, tmp_path / "run", reference)
    strategy = json.loads((tmp_path / "run" / "config.json").read_text())["world"][
        "distributed_type"
    ]
    assert strategy == ("DEEPSPEED" if "deepspeed" in name else "MULTI_CPU")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun(hosts: TwoHosts, settings: list[str], reference: Path, tmp_path: Path) -> None:
    """Open MPI itself, which starts its part on the other host through a program like ssh."""
    agent = tmp_path / "like-ssh"
    agent.write_text(f'#!/bin/sh\nshift\n{hosts.shell_on("b")} "$*"\n', encoding="utf-8")
    agent.chmod(0o755)
    command = ["mpirun", "--allow-run-as-root", "--host", "hostA:1,hostB:1", "-np", "2", "--mca", "plm_rsh_agent",
               agent, "--mca", "plm", "rsh", "-x", f"MASTER_ADDR={ADDRESSES['a']}", "-x", "PATH", "-x", "TOOLKIT_CACHE",
               sys.executable, "recipes/cls.py", *settings, "--output_dir", tmp_path / "run"]  # fmt: skip
    assert_run({"a": hosts.run("a", command, SECONDS)}, tmp_path / "run", reference)


def error_of(finished: Finished, *says: str) -> str:
    """The one error line, which has these words; `accelerate launch` adds a traceback after it."""
    (line,) = (text.partition("error: ")[2] for text in finished.error_lines)
    assert finished.code != 0
    assert [words for words in says if words not in line] == [], line
    return line


def test_missing_machine(hosts: TwoHosts, fault: Fault) -> None:
    """Each host starts a run on another port."""
    command = [*WORKER, *FIRST, "--rendezvous_timeout", "6", "--main_process_port"]
    done = hosts.run_both({"a": [*command, "29600"], "b": [*command, "29700"]}, SECONDS)
    says = ("machine 1 did not come within 6 s", "start the same command there, with --main_process_ip 10.77.0.1",
            "toolkit doctor --main_process_ip 10.77.0.1")  # fmt: skip
    fault("the other machine does not come", error_of(done["a"], *says))
    assert (
        "start the same command there, with --main_process_ip 10.77.0.1 there too" in done["a"].err
    )
    says = ("hostB could not reach the first machine in 6 s", "toolkit doctor --main_process_ip 10.77.0.1",
            "10.77.0.1:29700: the machine answers, but nothing listens on this port")  # fmt: skip
    fault("the first machine is not there", error_of(done["b"], *says))


def test_two_first_machines(hosts: TwoHosts, fault: Fault) -> None:
    words = [*FIRST, "--machine_rank", "0"]
    command = on_both(
        *WORKER, *words, "--rendezvous_timeout", "600"
    )  # the time of a machine that does not come
    done = hosts.run_both(command, SECONDS)
    for host in ("a", "b"):
        error_of(
            done[host], "two are machine 0, on hostA and hostB", "--machine_rank on each machine"
        )
    fault("both machines are started as machine 0", error_of(done["b"]))


@pytest.mark.slow
def test_different_data_and_settings(
    hosts: TwoHosts, settings: list[str], reviews: Path, tmp_path: Path
) -> None:
    shorter = tmp_path / "shorter.csv"
    shorter.write_text(
        "".join(reviews.read_text(encoding="utf-8").splitlines(keepends=True)[:-3]),
        encoding="utf-8",
    )
    command = _command("2node", settings, tmp_path / "run")
    for finished in hosts.run_both(
        on_both(*command), SECONDS, binds={"b": {reviews: shorter}}
    ).values():
        error_of(finished, "the content of the train data is ", "on hostA and ")
    done = hosts.run_both({"a": command, "b": [*command, "--learning_rate", "1e-3"]}, SECONDS)
    for host in ("a", "b"):
        error_of(done[host], "the settings are not the same everywhere: learning_rate is ")
    assert not (tmp_path / "run").exists()  # before anything was written


def _command(file: str, settings: Sequence[str], folder: Path, *more: str) -> list[str]:
    return [
        *LITERAL,
        f"accelerate_configs/{file}.yaml",
        *FIRST,
        *settings,
        "--output_dir",
        str(folder),
        *more,
    ]


def _training(
    hosts: TwoHosts, command: Sequence[str], folder: Path, steps: int, **options: Any
) -> dict[str, Process]:
    started = hosts.start_both(on_both(*command), **options)
    wait_for_steps(folder, steps, started.values(), SECONDS)
    return started


def _worker(hosts: TwoHosts, host: str) -> psutil.Process:
    """The process that trains on this host: the launcher's child."""
    (worker,) = [process for process in hosts.processes(host) if not process.children()]
    return worker


@pytest.fixture(scope="module")
def long_settings(settings: list[str]) -> list[str]:
    """Enough steps to break something; a checkpoint every tenth."""
    return [*settings, "--max_steps", "400", "--eval_every", "1000", "--checkpoint_every", "10",
            "--lr_scheduler_type", "constant"]  # fmt: skip


@pytest.fixture(scope="module")
def long_reference(
    tmp_path_factory: pytest.TempPathFactory, long_settings: list[str]
) -> list[float]:
    folder = tmp_path_factory.mktemp("long-reference") / "run"
    return losses_of(run_of([*long_settings, "--max_steps", "40"], folder))


STATIC = [
    "--nnodes",
    "2",
    "--nproc_per_node",
    "1",
    "--master_addr",
    ADDRESSES["a"],
    "--master_port",
    "29701",
]


def _start_words(starter: str, host: str, folder: Path) -> list[str]:
    """What is typed on a host, up to the settings."""
    number = str("ab".index(host))
    if starter == "ours":
        return [
            sys.executable,
            "recipes/cls.py",
            "--config_file",
            "accelerate_configs/2node.yaml",
            *FIRST,
        ]
    if starter == "accelerate":
        file = folder.parent / "before.yaml"
        shipped = (ROOT / "accelerate_configs" / "2node.yaml").read_text(encoding="utf-8")
        file.write_text(shipped.replace("ADDRESS_OF_MACHINE_0", ADDRESSES["a"]), encoding="utf-8")
        return ["accelerate", "launch", "--config_file", str(file), "--machine_rank", number, "--num_processes", "2",
                "recipes/cls.py"]  # fmt: skip
    if starter == "torchrun":
        return ["torchrun", *STATIC, "--node_rank", number, "recipes/cls.py"]
    return [*launcher_words("deepspeed --hostfile --no_ssh", host, folder.parent), "recipes/cls.py"]


STARTERS = ("ours", "accelerate", "torchrun", "deepspeed")
BREAKS = {  # what happens on host b -> what host a says, if it is not LOST
    "its rank is killed": {"ours": "rank 1 on hostB was killed by SIGKILL"},
    "its launcher is killed": dict.fromkeys(
        STARTERS[1:], "the launcher on hostB (rank 1) was killed"
    ),
    "it is stopped": {},
    "the cable is pulled": {},
}
LOST = "lost the connection to hostB (rank 1)"
END_SECONDS = 60


@pytest.mark.parametrize("starter", slow_but(STARTERS, "ours"))
@pytest.mark.parametrize("what", slow_but(BREAKS, "the cable is pulled"))
def test_a_failure_of_one_host_ends_both_within_a_minute(
    what: str, starter: str, hosts: TwoHosts, long_settings: list[str], tmp_path: Path, fault: Fault
) -> None:
    """With one line on the other host that names this one and the cause, whoever has started the run."""
    folder = tmp_path / "run"
    settings = [*long_settings, "--max_steps", "100000", "--output_dir", str(folder)]
    started = hosts.start_both(
        {host: [*_start_words(starter, host, folder), *settings] for host in ("a", "b")}
    )
    wait_for_steps(folder, 12, started.values(), SECONDS)
    here = {host: hosts.processes(host) for host in ("a", "b")}
    worker = _worker(hosts, "b")
    breaks = {
        "its rank is killed": lambda: worker.kill(),
        "its launcher is killed": lambda: worker.parent().kill(),
        "it is stopped": lambda: [process.suspend() for process in here["b"]],
        "the cable is pulled": hosts.cut,
    }
    try:
        breaks[what]()
        done = started["a"].finish(END_SECONDS)
        for process in here["b"] if what == "it is stopped" else ():
            process.resume()  # it learns now that the run is over
        alive = psutil.wait_procs([*here["a"], *here["b"]], END_SECONDS)[1]
    finally:
        hosts.heal()
    assert alive == []
    line = error_of(done, BREAKS[what].get(starter, LOST))
    fault(
        f"two machines, started by {starter}: {what}", line, "the steps since the last checkpoint"
    )


@pytest.mark.parametrize("name", slow_but(["2node", "2node_zero2"], "2node"))
def test_the_same_command_resumes(
    name: str,
    hosts: TwoHosts,
    long_settings: list[str],
    long_reference: list[float],
    tmp_path: Path,
) -> None:
    """After a silent network, exactly."""
    folder = tmp_path / "run"
    command = _command(name, long_settings, folder, "--peer_timeout", "8")
    started = _training(hosts, command, folder, 12)
    try:
        hosts.silence()
        done = hosts.finish_both(started)
    finally:
        hosts.heal()
    error_of(done["a"], LOST)
    error_of(done["b"], "lost the connection to hostA (rank 0)")
    again = hosts.run_both(on_both(*command, "--max_steps", "40"), SECONDS)
    assert "resuming from" in again["a"].succeeded().err
    assert losses_of(folder) == pytest.approx(long_reference, rel=1e-5)


@pytest.mark.parametrize("what", slow_but(["a rank is killed", "a silence"], "a rank is killed"))
def test_launchers_survive(
    what: str,
    hosts: TwoHosts,
    long_settings: list[str],
    long_reference: list[float],
    tmp_path: Path,
) -> None:
    """A killed rank, by `--max_restarts`; a silence shorter than `--peer_timeout`, as when a switch fails over."""
    more = ["--max_restarts", "1"] if "killed" in what else []
    command = _command("2node", long_settings, tmp_path / "run", "--max_steps", "40", *more)
    started = _training(hosts, command, tmp_path / "run", 12 if "killed" in what else 3)
    if "killed" in what:
        _worker(hosts, "b").kill()
        while "error:" not in (line := started["a"].line("err")):
            assert line
        assert "rank 1 on hostB was killed by SIGKILL" in line
    else:
        hosts.silence()
        try:
            time.sleep(20)  # the default is 30
        finally:
            hosts.heal()
    done = hosts.finish_both(started, SECONDS)
    for finished in done.values():
        finished.succeeded()
    assert (
        ("attempt 2 of 2" in done["a"].err)
        == ("resuming from" in done["a"].err)
        == ("killed" in what)
    )
    assert losses_of(tmp_path / "run") == pytest.approx(long_reference, rel=1e-5)


@pytest.mark.slow
def test_permanent_failure_is_not_restarted(
    hosts: TwoHosts, settings: list[str], tmp_path: Path
) -> None:
    more = ["--checkpoint_every", "2", "--max_restarts", "3", "--label_column", "nothing"]
    done = hosts.run_both(on_both(*_command("2node", settings, tmp_path / "run", *more)), SECONDS)
    for finished in done.values():
        error_of(finished, "nothing")


@pytest.mark.slow
def test_sigterm_of_accelerate_launch_stops_both(
    hosts: TwoHosts, long_settings: list[str], tmp_path: Path
) -> None:
    """`accelerate launch` forwards no signal; and the other machine's launcher would wait for this one."""
    folder = tmp_path / "run"
    fresh = dict.fromkeys("ab", True)
    started = _training(hosts, _command("2node", long_settings, folder), folder, 3, fresh=fresh)
    signalled = time.monotonic()
    started["b"].send_signal(signal.SIGTERM)
    done = hosts.finish_both(started)
    assert time.monotonic() - signalled < 40
    assert done["a"].code != 0
    assert "stopped by SIGTERM after step" in done["a"].err
    assert not hosts.processes("b")
