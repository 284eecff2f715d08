"""toolkit/launch/relaunch.py: `--config_file X` after the script -> the launcher's arguments and the request.
toolkit/launch/launcher.py: which of several failures is reported."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.conftest import REPOSITORY
from tests.faults import refusal
from tests.launch.test_environment import DEEPSPEED, HYDRA, OPEN_MPI, SRUN, TORCHRUN
from tests.launch.test_nodes import ELSEWHERE, FIRST, SECOND, pretend_network
from tests.runs import fork
from toolkit.launch import environment, launcher
from toolkit.launch.environment import FAILURE_DETECTOR, GPU_PEER_TIMEOUT, MARKER, TIMEOUTS, timeout_seconds
from toolkit.launch.network import free_port
from toolkit.launch.nodes import PLACEHOLDER, RENDEZVOUS_PORT
from toolkit.launch.relaunch import (
    clean_environment,
    count_processes,
    plan_launch,
    relaunch_if_requested,
    split_arguments,
)

SCRIPT = str(REPOSITORY / "recipes" / "cls.py")
CONFIGS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))
TWO_MACHINES = [path for path in CONFIGS if path.name.startswith("2node")]
DEEPSPEED_FILES = sorted((REPOSITORY / "ds_configs").glob("*.json"))
by_name = attrgetter("name")


def planned(path: Path | str, **options: str) -> tuple[Namespace, dict[str, Any]]:
    """(arguments as accelerate's launcher parses them, the request that the processes get)."""
    words = [f"--{name}={value}" for name, value in options.items()]
    line, requested = plan_launch(split_arguments(["--config_file", str(path), *words])[0], [SCRIPT, "--seed", "3"], {})
    return launch_command_parser().parse_args(line), requested


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host name is resolved outside, and `FIRST` is another machine's address."""
    pretend_network(monkeypatch, [ELSEWHERE])


def deepspeed_file_of(arguments: Namespace) -> str | None:
    if arguments.deepspeed_config_file is None:
        return None
    path = Path(arguments.deepspeed_config_file).resolve()
    assert path in DEEPSPEED_FILES
    return path.name


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str = "", **values: object) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(text or yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("argv", "options", "rest"),
    [
        ("a.yaml --config-file=x.yaml --seed 3", {"config_file": "x.yaml"}, "a.yaml --seed 3"),
        ("--num_processes 2 --machine_rank=1 --main_process_ip h --main-process-port 5",
         {"num_processes": "2", "machine_rank": "1", "main_process_ip": "h", "main_process_port": "5"}, ""),
        ("--machines a,b --max-restarts 2 --rendezvous_timeout=9 --ddp-timeout 8 x",
         {"machines": "a,b", "max_restarts": "2", "rendezvous_timeout": "9", "ddp_timeout": "8"}, "x"),
        # deepspeed's launcher adds --local_rank; many of its scripts take the flag --deepspeed
        ("--local_rank=1 --deepspeed --deepspeed_config z.json --train_file t",
         {"deepspeed_config": "z.json", "local_rank": "1", "deepspeed": True}, "--train_file t"),
        ("num_processes --train_file config_file", {}, "num_processes --train_file config_file"),
        ("--config_file a --config_file b", {"config_file": "b"}, ""),
    ],
)  # fmt: skip
def test_split(argv: str, options: dict[str, Any], rest: str) -> None:
    parsed, remaining = split_arguments(argv.split())
    assert {name: value for name, value in vars(parsed).items() if value is not None} == options
    assert remaining == rest.split()


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=by_name)
def test_deepspeed_files(path: Path) -> None:
    loaded = json.loads(path.read_text())
    assert loaded["zero_optimization"]["stage"] == int(path.stem[4])
    assert ("offload_optimizer" in loaded["zero_optimization"]) == ("offload" in path.stem)
    assert ("offload_param" in loaded["zero_optimization"]) == (path.stem == "zero3_offload")
    ours = ("gradient_clipping", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    assert {loaded[name] for name in ours} == {"auto"}
    assert not {"optimizer", "scheduler"} & set(loaded)
    assert any(f"deepspeed_config_file: ds_configs/{path.name}\n" in config.read_text() for config in CONFIGS)


@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in TWO_MACHINES], ids=by_name)
def test_plan_of_one_machine(path: Path) -> None:
    assert load_config_from_file(str(path)).num_machines == 1  # accelerate itself accepts it
    assert "mixed_precision" not in yaml.safe_load(path.read_text())  # the hardware decides
    arguments, requested = planned(path)
    assert (arguments.config_file, requested["config_file"]) == (str(path), str(path))
    assert (arguments.training_script, arguments.training_script_args) == (SCRIPT, ["--seed", "3"])
    assert arguments.num_processes == requested["num_processes"] == (1 if path.stem == "single" else 2)
    assert (requested["nodes"]["count"], requested["nodes"]["rank"]) == (1, 0)
    assert deepspeed_file_of(arguments) == (f"{path.stem}.json" if path.stem.startswith("zero") else None)


@pytest.mark.parametrize("path", TWO_MACHINES, ids=by_name)
def test_plan_of_two_machines(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert (config.num_machines, config.main_process_ip) == (2, PLACEHOLDER)
    assert config.main_process_port == RENDEZVOUS_PORT != 29500  # the typed `accelerate launch` holds that one
    left_out = {"num_processes", "machine_rank", "machines", "mixed_precision"}
    assert not left_out & set(yaml.safe_load(path.read_text()))
    options = {"main_process_ip": "gpu1.cluster", "machine_rank": "1", "num_processes": "16"}
    arguments, requested = planned(path, **options, main_process_port="1234")
    assert (arguments.main_process_ip, arguments.machine_rank, arguments.num_processes) == ("gpu1.cluster", 1, 16)
    nodes = requested["nodes"]
    assert (nodes["count"], nodes["rank"], list(nodes["addresses"]), nodes["port"]) == (2, 1, ["gpu1.cluster"], 1234)
    stage = path.stem.partition("_")[2].replace("fsdp2", "")
    assert deepspeed_file_of(arguments) == (f"{stage}.json" if stage else None)
    assert arguments.deepspeed_multinode_launcher == ("standard" if stage else None)  # not pdsh


@pytest.mark.parametrize(("now", "says"), [(7, "by the kernel: out of memory"), (6, "a scheduler")])
def test_out_of_memory_kills_are_told_apart(now: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert launcher._count_oom_kills() >= 0
    monkeypatch.setattr(launcher, "_count_oom_kills", lambda: now)
    assert launcher._report_exit(-9, "rank 3", 6) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("codes", "stopped", "reported"),
    [((-signal.SIGABRT, 1, -signal.SIGKILL), (), 2),  # NCCL aborts ranks whose peer is gone
     ((1, -signal.SIGABRT), (), 1),
     ((-signal.SIGTERM, 3), (0,), 1), ((-signal.SIGABRT, 3), (0,), 1),  # by torch, after the failure
     ((3, -signal.SIGKILL), (1,), 1)],  # it was dead when torch sent SIGTERM
)  # fmt: skip
def test_a_kill_is_reported_not_what_it_causes(
    codes: tuple[int, ...], stopped: tuple[int, ...], reported: int, no_launcher: None,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    failures = {rank: ProcessFailure(rank, rank, code, str(tmp_path / "none")) for rank, code in enumerate(codes)}
    monkeypatch.setattr(launcher, "_stopped", {})
    monkeypatch.setattr(launcher, "_close_process", lambda *_: None)
    for rank in stopped:
        launcher._close(SimpleNamespace(proc=SimpleNamespace(pid=rank)))  # type: ignore[arg-type]

    def fail(_: Any) -> None:
        raise ChildFailedError("cls.py", failures)

    reports: list[tuple[int, str]] = []
    monkeypatch.setattr(launcher, "launch_command", fail)
    monkeypatch.setattr(launcher, "_report_exit", lambda code, who, *_: reports.append((code, who)))
    launcher._launch(Namespace(num_processes=3), tmp_path / "exit_code", 0)
    assert reports == [(codes[reported], f"rank {reported}")]
    (tmp_path / "exit_code").write_text("141")  # a rank has reported
    assert launcher._launch(Namespace(num_processes=3), tmp_path / "exit_code", 0) == 141
    assert len(reports) == 1


ONE_FAILS = """
import os, signal, sys, time
from pathlib import Path
ready = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(1)
    ready.touch()
    signal.pause()
while not ready.exists():
    time.sleep(0.01)
sys.exit("rank 1 failed")
"""


@pytest.mark.multiprocess
def test_a_rank_that_torch_stops_was_not_killed(tmp_path: Path) -> None:
    """torch sends SIGTERM to the others when a rank has failed. And SIGHUP stops no launcher started by `nohup`."""
    script, starts = tmp_path / "script.py", tmp_path / "starts.py"
    script.write_text(ONE_FAILS)
    starts.write_text(
        "import signal, sys\nfrom toolkit.launch.launcher import launch\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nlaunch(sys.argv[1:])\n"
    )
    options = ["--config_file", "accelerate_configs/ddp.yaml", "--main_process_port", str(free_port())]
    with fork([starts, *options, script, tmp_path / "ready"]) as process:
        done = process.finish()
    assert (done.code, done.err) == (1, "rank 1 failed\n")


def test_launcher_waits_for_its_ranks_though_each_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--max_restarts`, after a failure that would recur. Ctrl-C reaches the launcher alone: it forwards it, also
    while torch waits for the ranks."""
    forwarded: list[int] = []

    def stop(*_: object, **__: object) -> None:
        raise SignalException("", signal.SIGTERM)

    def send(*numbers: int) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(launcher, "_forward_signal", lambda number, _: forwarded.append(number))
    monkeypatch.setattr(launcher, "_close_process", lambda *_: send(signal.SIGINT))
    monkeypatch.setattr(launcher, "launch_command", stop)
    monkeypatch.setattr(launcher.psutil, "wait_procs", lambda *_, **__: send(*before))
    (tmp_path / "code").write_text("1")
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        launcher._close(SimpleNamespace(proc=SimpleNamespace(pid=0)), signal.SIGINT)  # type: ignore[arg-type]
        assert launcher._launch(Namespace(num_processes=2), tmp_path / "code", 0) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert forwarded == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]


STOPS = """
import ctypes, os, sys
from toolkit.launch.exit_state import stop_with_parent
stop_with_parent(int(sys.argv[1]) or os.getppid())
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
"""


@pytest.mark.parametrize(("parent", "number"), [("0", "15"), ("1", "0"), ("-1", "0")])
def test_process_stops_with_its_launcher_only(parent: str, number: str) -> None:
    """In Ray or a notebook the parent is a thread, which may end earlier."""
    done = subprocess.run([sys.executable, "-c", STOPS, parent], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [number]


@pytest.mark.parametrize(("devices", "each"), [(0, 1), (8, 8)])
def test_default_processes_of_two_machines(monkeypatch: pytest.MonkeyPatch, devices: int, each: int) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    arguments, requested = planned(TWO_MACHINES[0], main_process_ip=FIRST, machine_rank="1")
    assert arguments.num_processes == requested["num_processes"] == 2 * each


@pytest.mark.parametrize(("kind", "processes"), [("MULTI_GPU", 8), ("DEEPSPEED", 8), ("MULTI_CPU", 1), ("NO", 1)])
def test_default_processes_of_one_machine(monkeypatch: pytest.MonkeyPatch, kind: str, processes: int) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    options: Any = SimpleNamespace(num_processes=None)
    assert count_processes(options, {"distributed_type": kind}, Path("mine.yaml"), 1) == processes


TWO = {"main_process_ip": FIRST, "machine_rank": "0"}


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        # each machine would silently train on its own
        ("ddp", {"machines": f"{FIRST},{SECOND}"}, "(?s)num_machines.*--machines"),
        ("ddp", {"main_process_ip": FIRST}, "(?s)num_machines.*--main_process_ip"),
        ("ddp", {"machine_rank": "1"}, "(?s)num_machines.*--machine_rank"),
        ("2node", {**TWO, "num_processes": "5"}, "--num_processes 4$"),
        ("2node", {**TWO, "num_processes": "1"}, "--num_processes 2$"),
        ("ddp", {"num_processes": "0"}, "num_processes"),
        ("ddp", {"num_processes": "1.5"}, "num_processes"),
        ("single", {"num_processes": "2"}, r"ddp\.yaml"),  # accelerate starts one for it
        ("ddp", {"main_process_port": "99999"}, "main_process_port 99999"),
        ("ddp", {"max_restarts": "1.5"}, r"max_restarts.*1\.5"),
        ("ddp", {"max_restarts": "-1"}, "max_restarts.*-1"),
        ("ddpp", {}, r"ddpp.*did you mean accelerate_configs/ddp\.yaml\?"),
        ("zzz", {}, r"zzz.*2node_zero3\.yaml"),
        ("zero2", {"deepspeed_config": "ds_configs/zero4.json"}, r"zero4\.json.*did you mean ds_configs/zero"),
        ("ddp", {"deepspeed_config": "ds_configs/zero3.json"}, "ddp.yaml does not use DeepSpeed"),
    ],
)
def test_invalid_options(path: str, options: dict[str, str], words: str) -> None:
    refusal(planned, f"accelerate_configs/{path}.yaml", **options, match=words)


@pytest.mark.parametrize(
    "text",
    ["- a\n", "a: [\n", "num_processes: 2\n", "distributed_type: MULTI_GPU\nnum_machines: two\n",
     "distributed_type: MULTI_GPU\nnum_processes: 2\nmachines: [a, b]\n",
     "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: ds_configs/zero2.json\n"],
)  # fmt: skip
def test_invalid_config_files(config_file: Callable[..., Path], text: str) -> None:
    path = config_file(text)
    refusal(planned, path, says=[str(path)])


def test_options_override_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # files are found from another folder
    options = {"num_processes": "7", "max_restarts": "3", "deepspeed_config": "ds_configs/zero3.json"}
    arguments, requested = planned("accelerate_configs/zero2.yaml", **options)
    assert arguments.config_file == str(REPOSITORY / "accelerate_configs/zero2.yaml")
    assert arguments.num_processes == requested["num_processes"] == 7
    assert (arguments.max_restarts, deepspeed_file_of(arguments)) == (3, "zero3.json")


OTHERS = {"HOME": "/h", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "NODE_RANK": "1"}


@pytest.mark.parametrize("outer", [TORCHRUN, DEEPSPEED, OPEN_MPI, HYDRA, SRUN])
def test_clean_environment(outer: dict[str, str]) -> None:
    cleaned = clean_environment(outer | OTHERS)
    assert environment.place_of(cleaned) == environment.Place("python", 0, 1, 0, 1)
    assert cleaned.items() >= OTHERS.items()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> list[tuple[list[str], dict[str, str]]]:
    """(arguments, environment) of each launch, which does not take place."""
    calls: list[tuple[list[str], dict[str, str]]] = []
    for name in ("NODE_RANK", "SLURM_NODEID", FAILURE_DETECTOR, *(variable for variable, _ in TIMEOUTS.values())):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "launch", lambda arguments: calls.append((list(arguments), dict(os.environ))))
    return calls


def test_process_becomes_the_launcher(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    line = ["--seed", "3", "--config_file", "accelerate_configs/ddp.yaml", "--failure_detector", "off"]
    relaunch_if_requested([SCRIPT, *line])
    ((command, env),) = launched
    assert command[-3:] == [SCRIPT, "--seed", "3"]
    assert json.loads(env[MARKER])["num_processes"] == 2
    assert "ACCELERATE_MIXED_PRECISION" not in env
    assert env["OMP_NUM_THREADS"]
    assert env[FAILURE_DETECTOR] == "off"


def test_several_processes_on_cpus(launched: list[Any], config_file: Callable[..., Path]) -> None:
    path = config_file(distributed_type="MULTI_CPU", num_processes=2, use_cpu=True, gpu_ids=1)
    arguments = planned(path)[0]
    assert (arguments.multi_gpu, arguments.gpu_ids) == (True, "1")
    relaunch_if_requested([SCRIPT, "--config_file", str(path)])
    ((_, env),) = launched
    assert env["ACCELERATE_USE_CPU"] == "true"
    refusal(planned, config_file("distributed_type: NO\nnum_processes: 2\n"), match="runs one process, not 2")
    path = config_file("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: [0, 2]\nmixed_precision: no\n")
    arguments = planned(path)[0]
    assert (arguments.gpu_ids, arguments.mixed_precision) == ("0,2", "no")


def test_only_local_rank_0_relaunches(launched: list[Any]) -> None:
    os.environ.update(TORCHRUN)
    with pytest.raises(SystemExit) as left:
        relaunch_if_requested([SCRIPT, "--config_file", "accelerate_configs/ddp.yaml"])
    assert (left.value.code, launched) == (0, [])


TORCHRUN_8 = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}
POD = {"RANK": "0", "WORLD_SIZE": "2"}  # of a PyTorchJob


@pytest.mark.parametrize(
    ("outer", "before", "behind", "says"),
    [
        # a config file for one machine, and several started
        *((outer, "", "--config_file accelerate_configs/ddp.yaml", "2node.yaml")
          for outer in (SRUN | {"SLURM_PROCID": "0"}, TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, POD)),
        (TORCHRUN_8, "", "--config_file accelerate_configs/zero3.yaml", "--num_processes 8 after"),
        (TORCHRUN_8, "", "--config_file accelerate_configs/ddp.yaml --num_processes 8", ""),
        (TORCHRUN_8 | {"CROSS_SIZE": "1"}, "", "--config_file accelerate_configs/zero3.yaml", "deepspeed started 8"),
        (TORCHRUN_8 | {"ACCELERATE_USE_CPU": "no"}, "", "--config_file accelerate_configs/ddp.yaml", ""),
        # the parent's options
        *((TORCHRUN_8 | {"ACCELERATE_USE_CPU": "no"}, option, "--config_file accelerate_configs/ddp.yaml",
           option.partition(" ")[0].partition("=")[0])
          for option in ("--num_processes 4", "--num-processes=4", "--mixed_precision no", "--use_fsdp")),
        ({}, "--num_cpu_threads_per_process 2", "--config_file accelerate_configs/ddp.yaml --num_processes 4", ""),
        ({}, "", "--config_file accelerate_configs/2node.yaml --main_process_ip 10.0.0.1", ""),
        # a flag without effect
        (TORCHRUN_8, "", "--deepspeed", "under torchrun: pass --deepspeed_config"),
        ({}, "", "--deepspeed --config_file accelerate_configs/ddp.yaml", "zero2.yaml"),
        (DEEPSPEED, "", "--deepspeed", ""), ({}, "", "--deepspeed --deepspeed_config ds_configs/zero2.json", ""),
    ],
)  # fmt: skip
def test_what_would_have_no_effect(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, outer: dict[str, str], before: str, behind: str, says: str
) -> None:
    """Each would silently train another way than requested, or a model per machine."""
    line = ["python", "/bin/accelerate", "launch", *before.split(), SCRIPT, *behind.split()]
    parent = SimpleNamespace(cmdline=lambda: line, environ=dict)
    monkeypatch.setattr(environment.psutil, "Process", lambda: SimpleNamespace(parents=lambda: [parent]))
    monkeypatch.setattr("toolkit.launch.relaunch.stop_with_parent", lambda: None)
    os.environ.update(outer)
    if says:
        refusal(relaunch_if_requested, [SCRIPT, *behind.split()], says=[says])
    else:
        relaunch_if_requested([SCRIPT, *behind.split()])
    assert len(launched) == (not says and "--config_file" in behind)


@pytest.mark.parametrize(
    ("argument", "match"),
    [("--failure_detector=no", "on.*off"), ("--max_restarts", "expected one argument"),
     *((f"--{option}", "add --config_file")  # launch options without one
       for option in ("num_processes=2", "machines=a,b", "max_restarts=1", "machine_rank=0")),
     *((f"--{name}={seconds}", seconds) for name in TIMEOUTS for seconds in ("0", "x"))],
)  # fmt: skip
def test_refused_before_a_launch(launched: list[Any], argument: str, match: str) -> None:
    refusal(relaunch_if_requested, [SCRIPT, argument], match=rf"{argument[2:].partition('=')[0]}.*{match}")
    assert launched == []


@pytest.mark.parametrize(("option", "usual"), [("rendezvous_timeout", 60), ("ddp_timeout", 1800), ("peer_timeout", 14)])
def test_timeouts_reach_the_processes(launched: list[Any], option: str, usual: int) -> None:
    assert (timeout_seconds(option), timeout_seconds(option, GPU_PEER_TIMEOUT)) == (usual, 120)
    assert relaunch_if_requested([SCRIPT, f"--{option}", "77", "--seed", "3"])[0] == [SCRIPT, "--seed", "3"]
    assert timeout_seconds(option) == timeout_seconds(option, GPU_PEER_TIMEOUT) == 77
    relaunch_if_requested([SCRIPT, "--config_file", "accelerate_configs/ddp.yaml", f"--{option}=78"])
    ((command, env),) = launched
    assert (env[TIMEOUTS[option][0]], command[-1]) == ("78", SCRIPT)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed"])
def test_config_copy_without_machines(config_file: Callable[..., Path], tmp_path: Path, listed: bool) -> None:
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 2}
    path = config_file(**values, **({"machines": [FIRST, SECOND]} if listed else {}))
    before = path.read_text()
    (tmp_path / "copies").mkdir()
    handed = launcher._drop_machines(path, tmp_path / "copies")
    assert yaml.safe_load(handed.read_text()) == values
    assert path.read_text() == before
    assert (handed == path) is not listed
