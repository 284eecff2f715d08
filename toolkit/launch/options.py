"""What follows the script, the accelerate YAML and the DeepSpeed JSON -> what to start.

`accelerate launch script.py --config_file X` passes X to the script, and starts one process per
machine without reading it. Here the first process of each machine becomes the launcher that X asks
for, and the others exit.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import Parser, UserError, first_line
from toolkit.launch import environment
from toolkit.launch.environment import parse_int, timeout_variable
from toolkit.launch.machines import TWO_NODE_FILES, Machines, find_machines
from toolkit.utils.compat import require
from toolkit.utils.files import read_yaml, templates

_LAUNCH = (
    "config_file", "num_processes", "machine_rank", "main_process_ip", "main_process_port",
    "max_restarts",
)  # fmt: skip
OPTIONS = (*_LAUNCH, *environment.TIMEOUTS, "deepspeed_config", "local_rank")
"""Options that are taken from a script's arguments before its settings are parsed; each takes a
value."""
DEEPSPEED_CONFIG = "TOOLKIT_DEEPSPEED_CONFIG"
_ONE_PROCESS = ("NO", False)  # YAML reads NO as false
_TYPES = (*_ONE_PROCESS, "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP")
_SET_BY_LAUNCHERS = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|MASTER_ADDR"
    r"|MASTER_PORT|(GROUP|ROLE|TORCHELASTIC|ACCELERATE|FSDP|OMPI|PMI|PMIX|MV2|SLURM_STEP)_.*"
    r"|MPI_LOCAL.*|SLURM_(PROCID|LOCALID|STEPID)|TORCH_NCCL_ASYNC_ERROR_HANDLING)$"
)
# options of `accelerate launch` that a config file after the script replaces
_REPLACED = ("num_processes", "mixed_precision", "cpu", "use_deepspeed", "use_fsdp")


@dataclass(frozen=True)
class Request:
    """What to start."""

    config_file: Path
    script: tuple[str, ...]
    """The script and its settings, without launch options."""
    argv: tuple[str, ...]
    """The command line as typed, without Python."""
    processes: int
    """Over all machines."""
    machines: Machines
    max_restarts: int
    use_cpu: bool

    def command(self) -> list[str]:
        """The command line of each process."""
        program, *words = self.script
        start = [program]
        if program.endswith("toolkit/__main__.py"):  # `python -m toolkit`
            start = ["-m", "toolkit"]
        return [sys.executable, "-u", *start, *words]


def split_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits a script's arguments into (launch options: str or None, the rest in order).

    Raises UserError.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    for name in OPTIONS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    return parser.parse_known_args(list(argv))


def take_options(argv: list[str]) -> tuple[list[str], Request | None]:
    """(the arguments without launch options, what they ask to start).

    `argv` is `sys.argv`. Sets the variables of timeouts and of `--deepspeed_config`. Exits in all
    but the first process of a machine if there is something to start. Raises UserError.
    """
    options, rest = split_arguments(argv[1:])
    script = [argv[0], *rest]
    for name in environment.TIMEOUTS:
        value = getattr(options, name)
        if value is not None:
            parse_int(f"--{name} (seconds)", value, minimum=1)
            os.environ[timeout_variable(name)] = value
    if options.deepspeed_config:
        os.environ[DEEPSPEED_CONFIG] = options.deepspeed_config
    present = [name for name in _LAUNCH if getattr(options, name) is not None]
    if not present:
        return script, None
    place = environment.place_of(os.environ)
    if place.local_rank != 0:
        raise SystemExit(0)  # local rank 0 starts all processes of this machine
    if options.config_file is None:
        raise UserError(
            f"--{present[0]} needs a config file: add --config_file accelerate_configs/ddp.yaml "
            "(or another file of that folder)"
        )
    request = plan_launch(options, script, os.environ, argv)
    _refuse_other_launch(place, request)
    return script, request


def _refuse_other_launch(place: environment.Place, request: Request) -> None:
    """Raises UserError if the words before the script ask for another launch than the config file
    after it, which would replace it."""
    path, count = request.config_file, request.machines.count
    local = place.local_world_size
    machines = place.world_size // local
    # one process may be its machine's launcher; `accelerate launch` starts all it can by default
    other = place.launcher != "accelerate" and local not in (1, request.processes // count)
    if other or machines > count:
        raise UserError(
            f"{place.launcher} started {place.world_size} processes on {machines} machine(s), and "
            f"{path} asks for {request.processes} on {count}: pass --num_processes after the "
            f"script, or use {TWO_NODE_FILES}"
        )
    outer = environment.accelerate_options()
    for name in _REPLACED:
        if getattr(outer, name, None):
            raise UserError(
                f"--{name} before the script has no effect with --config_file {path} after it: "
                "put it after, or leave it out"
            )


def plan_launch(
    options: argparse.Namespace,
    script: Sequence[str],
    env: Mapping[str, str],
    argv: Sequence[str] = (),
) -> Request:
    """Raises UserError for a config file that is missing, unreadable or incomplete, or still holds
    a placeholder."""
    path = find_file(str(options.config_file), script[0], "accelerate_configs")
    config = read_config(path)
    machines = find_machines(vars(options), config, path, env)
    processes = count_processes(options, config, path, machines.count)
    restarts = parse_int("--max_restarts", options.max_restarts or 0, minimum=0)
    use_cpu = bool(config.get("use_cpu"))
    return Request(path, tuple(script), tuple(argv), processes, machines, restarts, use_cpu)


def count_processes(
    options: argparse.Namespace, config: Mapping[str, Any], path: Path, machines: int
) -> int:
    """Processes over all machines; by default one for each of this one's devices on each."""
    kind = config["distributed_type"]
    number = options.num_processes or config.get("num_processes")
    if number is None:
        number = machines
        if kind not in (*_ONE_PROCESS, "MULTI_CPU") and not config.get("use_cpu"):
            import torch

            number *= torch.accelerator.device_count() or 1  # none: the CPU
    processes = parse_int("num_processes", number, path, minimum=1)
    if processes % machines:
        raise UserError(
            f"{path}: {processes} processes cannot be divided equally among {machines} machines: "
            "pass another --num_processes (of all machines)"
        )
    return processes


def read_config(path: Path) -> dict[str, Any]:
    """Reads an accelerate config file. Raises UserError."""
    config = read_yaml(path)
    kind = config.get("distributed_type") if isinstance(config, dict) else None
    if kind not in _TYPES:
        raise UserError(
            f"{path}: distributed_type {kind} is not supported: start from one of "
            "accelerate_configs/ (a file of settings stands before all options, without a name)"
        )
    return dict(config)


def find_file(name: str, script: str, folder: str) -> Path:
    """Looks for a file in the current folder, the script's repository and our templates.

    Raises UserError.
    """
    if Path(name).is_file():
        return Path(name)
    for root in (Path(script).resolve().parent.parent, templates()):
        if (root / name).is_file():
            return (root / name).resolve()
    known = sorted(file.name for file in (templates() / folder).glob("*"))
    raise UserError(f"there is no config file {name}: {folder}/ holds {', '.join(known)}")


def clean_environment(env: MutableMapping[str, str]) -> None:
    """Removes the variables of an outer launcher."""
    if environment.user_threads(env) is None:
        env.pop(environment.THREADS, None)
    for name in list(env):
        if _SET_BY_LAUNCHERS.match(name):
            del env[name]


def accelerate_environment(request: Request) -> dict[str, str]:
    """The variables by which accelerate tells its processes what the config file asks for.

    Raises UserError if it cannot read the file.
    """
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    validate = require(launch, "_validate_launch_command", "accelerate")
    words = [
        "--config_file", str(request.config_file), "--num_processes", str(request.processes),
        "--num_cpu_threads_per_process", "1", "script",
    ]  # fmt: skip
    try:
        options, config, has_precision = validate(
            launch.launch_command_parser().parse_args(words)
        )
        options.num_machines = 1  # several are the launcher's work, not accelerate's
        options.main_process_port = 0
        if options.use_deepspeed:
            fields = [*config.deepspeed_config, *["mixed_precision"] * has_precision]
            options.deepspeed_fields_from_accelerate_config = ",".join(fields)
            env = prepare_deepspeed_cmd_env(options)[1]
        else:
            env = prepare_multi_gpu_env(options)
    except (ValueError, AssertionError, OSError, RuntimeError) as error:
        raise UserError(f"accelerate cannot start this: {first_line(error)}") from error
    ours = (environment.THREADS, "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")
    changed = {
        name: value
        for name, value in env.items()
        if name not in ours and os.environ.get(name) != value
    }
    if request.use_cpu:
        changed["ACCELERATE_USE_CPU"] = "true"  # it does so for a single process only
    return changed
