"""toolkit/launch/relaunch.py: `--config_file X` after the script -> the arguments of what X asks for."""

from __future__ import annotations

import json
import socket
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from tests.conftest import REPOSITORY
from tests.launch.test_environment import DEEPSPEED, HYDRA, OPEN_MPI, SRUN, TORCHRUN
from tests.launch.test_nodes import ELSEWHERE, FIRST, SECOND, pretend_network
from toolkit.errors import UserError
from toolkit.launch import accelerate_cli, relaunch
from toolkit.launch.environment import TIMEOUTS, Place, ddp_seconds, place_of, rendezvous_seconds
from toolkit.launch.network import free_port
from toolkit.launch.nodes import RENDEZVOUS_PORT
from toolkit.launch.relaunch import (
    MARKER,
    Options,
    clean_environment,
    plan,
    read_config,
    relaunch_if_requested,
    split,
)

SCRIPT = str(REPOSITORY / "recipes" / "cls.py")
CONFIGS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))
ONE_MACHINE = [path for path in CONFIGS if not path.name.startswith("2node")]
TWO_MACHINES = [path for path in CONFIGS if path.name.startswith("2node")]
DEEPSPEED_FILES = sorted((REPOSITORY / "ds_configs").glob("*.json"))


def by_name(path: Path) -> str:
    return path.name


def understood(arguments: list[str]) -> Namespace:
    """As accelerate's own launcher reads them."""
    return launch_command_parser().parse_args(arguments)


def planned(path: Path | str, env: dict[str, str] | None = None, **options: str) -> tuple[Namespace, dict[str, Any]]:
    found = plan(Options(config_file=str(path), **options), [SCRIPT, "--seed", "3"], env or {})
    arguments = understood(found.arguments)
    if found.nodes is None:
        assert found.asked["num_machines"] == 1
    else:  # the launcher is told what was found out
        assert (found.nodes.count, found.nodes.rank) == (found.asked["num_machines"], arguments.machine_rank)
        there = (arguments.main_process_ip, arguments.main_process_port)
        assert (found.nodes.first, found.nodes.port) == there
    return arguments, found.asked


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is looked up outside, and `FIRST` is another machine's address."""
    pretend_network(monkeypatch, [ELSEWHERE])


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def deepspeed_file_of(arguments: Namespace) -> str | None:
    """Its name; it must lie in ds_configs/."""
    if arguments.deepspeed_config_file is None:
        return None
    path = Path(arguments.deepspeed_config_file).resolve()
    assert path in DEEPSPEED_FILES
    return path.name


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str = "", name: str = "mine.yaml", **values: object) -> Path:
        path = tmp_path / name
        path.write_text(text or yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("argv", "options", "rest"),
    [
        ([], Options(), []),
        (["--seed", "3"], Options(), ["--seed", "3"]),
        (["--config_file", "x.yaml", "--seed", "3"], Options(config_file="x.yaml"), ["--seed", "3"]),
        (["a.yaml", "--config-file=x.yaml", "--seed", "3"], Options(config_file="x.yaml"), ["a.yaml", "--seed", "3"]),
        (
            ["--num_processes", "2", "--machine_rank=1", "--main_process_ip", "h", "--main-process-port", "5"],
            Options(num_processes="2", machine_rank="1", main_process_ip="h", main_process_port="5"),
            [],
        ),
        (
            ["--machines", "a,b", "--max-restarts", "2", "--rendezvous_timeout=9", "--ddp-timeout", "8", "x"],
            Options(machines="a,b", max_restarts="2", rendezvous_timeout="9", ddp_timeout="8"),
            ["x"],
        ),
        # deepspeed's launcher adds --local_rank; many of its scripts take a bare --deepspeed
        (
            ["--local_rank=1", "--deepspeed", "--deepspeed_config", "z.json", "--train_file", "t"],
            Options(deepspeed_config="z.json", local_rank="1"),
            ["--train_file", "t"],
        ),
        (["num_processes", "--train_file", "config_file"], Options(), ["num_processes", "--train_file", "config_file"]),
        (["--config_file", "a", "--config_file", "b"], Options(config_file="b"), []),
    ],
)
def test_split(argv: list[str], options: Options, rest: list[str]) -> None:
    assert split(argv) == (options, rest)


@pytest.mark.parametrize("name", ["config_file", "machines", "max_restarts", "rendezvous_timeout", "ddp_timeout"])
@pytest.mark.parametrize("argv", [["--{}"], ["--{}", "--seed"], ["--{}="]])
def test_split_needs_a_value(argv: list[str], name: str) -> None:
    with pytest.raises(UserError, match=f"--{name} needs a value"):
        split([word.format(name) for word in argv])


@pytest.mark.parametrize("path", CONFIGS, ids=by_name)
def test_accelerate_itself_accepts_the_file(path: Path) -> None:
    loaded, written = load_config_from_file(str(path)), yaml.safe_load(path.read_text())
    assert loaded.num_machines == written["num_machines"] == (2 if path in TWO_MACHINES else 1)
    if path in TWO_MACHINES:  # their number of processes is that of the devices
        assert "num_processes" not in written
        assert loaded.main_process_port == RENDEZVOUS_PORT
    else:
        assert loaded.num_processes == written["num_processes"]


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=by_name)
def test_deepspeed_files_hold_their_stage_and_leave_the_rest_to_the_settings(path: Path) -> None:
    loaded = json.loads(path.read_text())
    assert loaded["zero_optimization"]["stage"] == int(path.stem[4])
    assert ("offload_optimizer" in loaded["zero_optimization"]) == ("offload" in path.stem)
    assert ("offload_param" in loaded["zero_optimization"]) == (path.stem == "zero3_offload")
    ours = (
        "gradient_clipping",
        "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
    )
    assert {loaded[name] for name in ours} == {"auto"}
    assert not {"optimizer", "scheduler"} & set(loaded)


def test_each_deepspeed_file_belongs_to_a_config() -> None:
    pointed = {(read_config(path).get("deepspeed_config") or {}).get("deepspeed_config_file") for path in CONFIGS}
    assert {f"ds_configs/{path.name}" for path in DEEPSPEED_FILES} == pointed - {None}


@pytest.mark.parametrize("path", ONE_MACHINE, ids=by_name)
def test_plan_of_one_machine(path: Path) -> None:
    arguments, asked = planned(path)
    assert arguments.config_file == str(path)
    assert (arguments.training_script, arguments.training_script_args) == (SCRIPT, ["--seed", "3"])
    assert arguments.num_processes == (1 if path.stem == "single" else 2)
    assert asked == {"config_file": str(path), "num_processes": arguments.num_processes, "num_machines": 1}
    assert deepspeed_file_of(arguments) == (f"{path.stem}.json" if path.stem.startswith("zero") else None)
    assert arguments.main_process_port


@pytest.mark.parametrize("path", TWO_MACHINES, ids=by_name)
@pytest.mark.parametrize("address", ["10.0.0.7", "gpu1.cluster"])
def test_plan_of_two_machines(path: Path, address: str) -> None:
    options = {"main_process_ip": address, "machine_rank": "1", "num_processes": "16", "main_process_port": "1234"}
    arguments, asked = planned(path, **options)
    assert (arguments.main_process_ip, arguments.main_process_port) == (address, 1234)
    assert (arguments.machine_rank, arguments.num_processes) == (1, 16)
    assert (asked["num_processes"], asked["num_machines"]) == (16, 2)
    stage = path.stem.partition("_")[2]
    assert deepspeed_file_of(arguments) == (f"{stage}.json" if stage else None)
    assert arguments.deepspeed_multinode_launcher == ("standard" if stage else None)  # not pdsh


@pytest.mark.parametrize(("seen", "each"), [(0, 1), (1, 1), (8, 8)])
def test_without_a_number_two_machines_run_a_process_for_each_device(
    devices: Callable[[int], None], seen: int, each: int
) -> None:
    devices(seen)
    arguments, asked = planned(TWO_MACHINES[0], main_process_ip=FIRST, machine_rank="1")
    assert arguments.num_processes == asked["num_processes"] == 2 * each


@pytest.mark.parametrize("name", ["machines", "main_process_ip", "machine_rank"])
def test_options_of_several_machines_are_refused_with_a_file_for_one(name: str) -> None:
    """Each machine would quietly train for itself."""
    value = {"machines": f"{FIRST},{SECOND}", "main_process_ip": FIRST, "machine_rank": "1"}[name]
    with pytest.raises(UserError, match=f"(?s)--{name}.*num_machines|num_machines.*--{name}"):
        planned("accelerate_configs/ddp.yaml", **{name: value})


def test_a_list_of_machines_in_a_file_that_counts_one_is_refused(config_file: Callable[..., Path]) -> None:
    path = config_file(distributed_type="MULTI_GPU", num_processes=2, machines=[FIRST, SECOND])
    with pytest.raises(UserError, match="num_machines"):
        planned(path)


@pytest.mark.parametrize(("processes", "suggested"), [("5", "4"), ("1", "2"), ("3", "2")])
def test_processes_that_the_machines_cannot_share(processes: str, suggested: str) -> None:
    with pytest.raises(UserError, match=f"--num_processes {suggested}$"):
        planned(TWO_MACHINES[0], main_process_ip="h", machine_rank="0", num_processes=processes)


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp2"])
def test_num_processes_overrides_the_file(name: str) -> None:
    arguments, asked = planned(f"accelerate_configs/{name}.yaml", num_processes="7")
    assert arguments.num_processes == asked["num_processes"] == 7


@pytest.mark.parametrize("processes", ["0", "-2", "two", "1.5"])
def test_numbers_of_processes_that_cannot_be(processes: str) -> None:
    with pytest.raises(UserError, match="num_processes"):
        planned("accelerate_configs/ddp.yaml", num_processes=processes)


def test_several_processes_of_a_file_for_one() -> None:
    """accelerate starts one for it."""
    with pytest.raises(UserError, match=r"ddp\.yaml"):
        planned("accelerate_configs/single.yaml", num_processes="2")


@pytest.mark.parametrize("port", ["x", "99999", "-5"])
def test_ports_that_cannot_be(port: str) -> None:
    with pytest.raises(UserError, match=r"port"):
        planned("accelerate_configs/ddp.yaml", main_process_port=port)
    with pytest.raises(UserError, match=rf"main_process_port.*{port}"):
        planned(TWO_MACHINES[0], main_process_ip=FIRST, machine_rank="0", main_process_port=port)


def test_restarts_are_handed_on() -> None:
    assert planned("accelerate_configs/ddp.yaml", max_restarts="3")[0].max_restarts == 3
    two = {"main_process_ip": FIRST, "machine_rank": "0"}
    assert planned(TWO_MACHINES[0], **two, max_restarts="3")[0].max_restarts == 3
    assert planned("accelerate_configs/ddp.yaml")[0].max_restarts == 0


@pytest.mark.parametrize("restarts", ["x", "1.5", "-1"])
def test_numbers_of_restarts_that_cannot_be(restarts: str) -> None:
    with pytest.raises(UserError, match=rf"max_restarts.*{restarts}"):
        planned("accelerate_configs/ddp.yaml", max_restarts=restarts)


def test_a_taken_port_is_replaced_on_one_machine_and_kept_on_two() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        taken = str(holder.getsockname()[1])
        assert planned("accelerate_configs/ddp.yaml", main_process_port=taken)[0].main_process_port != int(taken)
        options = {"main_process_ip": "h", "machine_rank": "0", "main_process_port": taken}
        assert planned(TWO_MACHINES[0], **options)[0].main_process_port == int(taken)
    free = str(free_port())
    assert planned("accelerate_configs/ddp.yaml", main_process_port=free)[0].main_process_port == int(free)


def test_files_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, _ = planned("accelerate_configs/zero3.yaml")
    assert arguments.config_file == str(REPOSITORY / "accelerate_configs/zero3.yaml")
    assert arguments.deepspeed_config_file == str(REPOSITORY / "ds_configs/zero3.json")


def test_another_deepspeed_file_goes_before_that_of_the_config() -> None:
    arguments, _ = planned("accelerate_configs/zero2.yaml", deepspeed_config="ds_configs/zero3.json")
    assert Path(arguments.deepspeed_config_file).name == "zero3.json"


@pytest.mark.parametrize(("processes", "flag"), [(2, True), (3, True)])
def test_multi_cpu_is_told_to_start_several(config_file: Callable[..., Path], processes: int, flag: bool) -> None:
    path = config_file(distributed_type="MULTI_CPU", num_processes=processes)
    assert planned(path)[0].multi_gpu is flag


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("accelerate_configs/ddpp.yaml", "did you mean ddp.yaml?"),
        ("accelerate_configs/zero2-offload.yaml", "did you mean zero2_offload.yaml?"),
        ("zzz", "2node_zero3.yaml"),
    ],
)
def test_an_unknown_file_names_the_nearest_and_all(name: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        planned(name)
    assert name in str(caught.value)
    assert part in str(caught.value)


def test_an_unknown_deepspeed_file(config_file: Callable[..., Path]) -> None:
    values = {"distributed_type": "DEEPSPEED", "num_processes": 2}
    path = config_file(**values, deepspeed_config={"deepspeed_config_file": "ds_configs/zero4.json"})
    with pytest.raises(UserError, match=r"zero4\.json.*did you mean zero"):
        planned(path)


@pytest.mark.parametrize(
    "text",
    ["", "- a\n", "a: [\n", "num_processes: 2\n", "distributed_type: MULTI_GPU\nnum_machines: two\n",
     "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: ds_configs/zero2.json\n"],
)  # fmt: skip
def test_files_that_are_no_accelerate_config(config_file: Callable[..., Path], text: str) -> None:
    path = config_file(text or "\n")
    with pytest.raises(UserError) as caught:
        planned(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_is_started_as_one() -> None:
    arguments = plan(Options(config_file="accelerate_configs/ddp.yaml"), [SCRIPT, "a.csv"], {}, "toolkit").arguments
    assert (understood(arguments).module, understood(arguments).training_script) == (True, "toolkit")
    assert understood(arguments).training_script_args == ["a.csv"]


OTHERS = {"HOME": "/h", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "NODE_RANK": "1"}


@pytest.mark.parametrize("outer", [TORCHRUN, DEEPSPEED, OPEN_MPI, HYDRA, SRUN])
def test_a_clean_environment_is_nobodys_world(outer: dict[str, str]) -> None:
    kept = clean_environment(outer | OTHERS)
    assert place_of(kept) == Place("python", 0, 1, 0, 1)
    assert kept.items() >= OTHERS.items()


@pytest.mark.parametrize(
    ("env", "kept"),
    [
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, False),  # torchrun's default
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "x"}, True),
        ({"OMP_NUM_THREADS": "1"}, True),
    ],
)
def test_the_users_number_of_threads_stays(env: dict[str, str], kept: bool) -> None:
    assert ("OMP_NUM_THREADS" in clean_environment(env)) is kept


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> list[Any]:
    """What the process would have replaced itself with."""
    calls: list[Any] = []
    for name in ("NODE_RANK", "SLURM_NODEID", *(variable for variable, _ in TIMEOUTS.values())):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(relaunch.os, "execve", lambda *call: calls.append(call))
    return calls


@pytest.fixture
def found_peers(monkeypatch: pytest.MonkeyPatch, replaced: list[Any]) -> list[Any]:
    """What the machines would have met with; nothing has been replaced by then."""
    calls: list[Any] = []

    def meet(*call: object) -> None:
        assert replaced == []
        calls.append(call)

    monkeypatch.setattr(relaunch, "find_peers", meet)
    return calls


def test_without_launch_options_nothing_is_replaced(replaced: list[Any]) -> None:
    arguments, options = relaunch_if_requested([SCRIPT, "--seed", "3", "--deepspeed_config", "z.json"])
    assert (arguments, options.deepspeed_config) == ([SCRIPT, "--seed", "3"], "z.json")
    assert replaced == []


def test_a_config_replaces_the_process_with_the_launcher(replaced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setattr(relaunch, "find_peers", lambda *_: pytest.fail("one machine meets nobody"))
    relaunch_if_requested([SCRIPT, "--seed", "3", "--config_file", "accelerate_configs/ddp.yaml"])
    ((_, command, env),) = replaced
    assert command[1:3] == ["-m", "toolkit.launch.accelerate_cli"]
    assert command[-3:] == [SCRIPT, "--seed", "3"]
    assert json.loads(env[MARKER])["num_processes"] == 2
    assert "ACCELERATE_MIXED_PRECISION" not in env
    assert env["OMP_NUM_THREADS"]


def test_only_the_first_process_of_a_machine_starts_again(replaced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        relaunch_if_requested([SCRIPT, "--config_file", "accelerate_configs/ddp.yaml"])
    assert left.value.code == 0
    assert replaced == []


def test_the_first_process_of_another_machine_starts_there(
    replaced: list[Any], found_peers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TORCHRUN | {"RANK": "2", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    options = ["--config_file", "accelerate_configs/2node.yaml", "--main_process_ip", "h", "--num_processes", "4"]
    relaunch_if_requested([SCRIPT, *options])
    ((_, command, _),) = replaced
    assert understood(command[3:]).machine_rank == 1
    assert understood(command[3:]).num_processes == 4
    assert [(machines.rank, processes) for machines, processes, *_ in found_peers] == [(1, 4)]


def test_several_machines_meet_before_anything_is_started(
    replaced: list[Any], found_peers: list[Any], devices: Callable[[int], None]
) -> None:
    devices(2)
    options = ["--main_process_ip", FIRST, "--machine_rank", "0", "--rendezvous_timeout", "7"]
    relaunch_if_requested([SCRIPT, "--config_file", "accelerate_configs/2node.yaml", *options])
    ((machines, processes, script, seconds),) = found_peers
    assert (machines.count, machines.rank, machines.first, machines.port) == (2, 0, FIRST, RENDEZVOUS_PORT)
    assert (processes, script, seconds) == (4, SCRIPT, 7)
    ((_, command, env),) = replaced
    assert understood(command[3:]).num_processes == json.loads(env[MARKER])["num_processes"] == 4


@pytest.mark.parametrize("argument", [["--num_processes", "2"], ["--machines", f"{FIRST},{SECOND}"],
                                      ["--max_restarts", "1"], ["--machine_rank=0"]])  # fmt: skip
def test_launch_options_without_a_config(replaced: list[Any], argument: list[str]) -> None:
    name = argument[0].partition("=")[0]
    with pytest.raises(UserError, match=rf"{name} .* add --config_file"):
        relaunch_if_requested([SCRIPT, *argument])
    assert replaced == []


SECONDS_OF = {"rendezvous_timeout": (rendezvous_seconds, 60), "ddp_timeout": (ddp_seconds, 1800)}


@pytest.mark.parametrize("name", SECONDS_OF)
def test_how_long_is_waited_needs_no_config(replaced: list[Any], name: str) -> None:
    """Whatever launched the script."""
    seconds, usual = SECONDS_OF[name]
    assert seconds() == usual
    assert relaunch_if_requested([SCRIPT, f"--{name}", "77", "--seed", "3"])[0] == [SCRIPT, "--seed", "3"]
    assert seconds() == 77
    assert replaced == []


@pytest.mark.parametrize("name", SECONDS_OF)
def test_how_long_is_waited_reaches_the_processes_that_are_started(replaced: list[Any], name: str) -> None:
    relaunch_if_requested([SCRIPT, "--config_file", "accelerate_configs/ddp.yaml", f"--{name}=77"])
    ((_, command, env),) = replaced
    assert env[TIMEOUTS[name][0]] == "77"
    assert command[-1] == SCRIPT


@pytest.mark.parametrize("name", SECONDS_OF)
@pytest.mark.parametrize("seconds", ["0", "-5", "x", "1.5"])
def test_a_patience_that_cannot_be_names_its_option(replaced: list[Any], name: str, seconds: str) -> None:
    with pytest.raises(UserError, match=rf"{name}.*{seconds}"):
        relaunch_if_requested([SCRIPT, f"--{name}={seconds}"])


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed"])
def test_accelerate_reads_the_file_without_the_list_of_machines(
    config_file: Callable[..., Path], tmp_path: Path, listed: bool
) -> None:
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 2}
    path = config_file(**values, **({"machines": [FIRST, SECOND]} if listed else {}))
    before = path.read_text()
    (tmp_path / "copies").mkdir()
    handed = accelerate_cli._without_ours(path, tmp_path / "copies")
    assert yaml.safe_load(handed.read_text()) == values
    assert load_config_from_file(str(handed)).num_machines == 2
    assert path.read_text() == before
    assert (handed == path) is not listed
