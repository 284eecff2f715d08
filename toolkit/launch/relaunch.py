"""`--config_file X` after the script: starts the script again as X requests.

`accelerate launch script.py --config_file X` passes X to the script and starts one process per machine without reading
it. Here the first process of each machine becomes the launcher that `accelerate launch --config_file X script.py ...`
would have been; the other processes exit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from toolkit.errors import Parser, UserError, did_you_mean
from toolkit.launch import environment
from toolkit.launch.exit_state import stop_with_parent
from toolkit.launch.nodes import TWO_NODE_FILES, find_nodes
from toolkit.utils.extras import require_extra
from toolkit.utils.files import read_yaml, templates
from toolkit.utils.log import logger

_LAUNCH = ("config_file", "num_processes", "machine_rank", "machines", "main_process_ip", "main_process_port",
           "max_restarts")  # fmt: skip
OPTIONS = (*_LAUNCH, *environment.TIMEOUTS, "failure_detector", "deepspeed_config", "local_rank")
"""Options that are taken from a script's arguments before its settings are parsed; each takes a value."""
_SET_BY_LAUNCHERS = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|(GROUP|ROLE|TORCHELASTIC|ACCELERATE|FSDP|OMPI|PMI|PMIX|MV2|SLURM_STEP)_.*|MPI_LOCAL.*"
    r"|SLURM_(PROCID|LOCALID|STEPID)|TORCH_NCCL_ASYNC_ERROR_HANDLING)$"
)


# options of `accelerate launch` that a config file after the script replaces
_REPLACED = re.compile(r"(--(?:num.processes|mixed.precision|main.process.ip|cpu|use[-_][\w-]+))(?:=.*)?")


def split_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits a script's arguments into (launch options: str or None, the rest in order). Raises UserError."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=None)
    for name in OPTIONS:
        choices = ("on", "off") if name == "failure_detector" else None
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", choices=choices)
    parser.add_argument("--deepspeed", action="store_true", default=None)  # a flag that many DeepSpeed scripts take
    return parser.parse_known_args(list(argv))


def relaunch_if_requested(argv: list[str], module: str | None = None) -> tuple[list[str], argparse.Namespace]:
    """Becomes the launcher if there is `--config_file`; otherwise returns (arguments, options).

    `argv` is `sys.argv`; `module` names the package for `python -m`.
    """
    options, rest = split_arguments(argv[1:])
    for name, (variable, _) in environment.TIMEOUTS.items():
        if (value := getattr(options, name)) is not None:
            environment.parse_int(f"--{name} (seconds)", value, minimum=1)
            os.environ[variable] = value
    if options.failure_detector:
        os.environ[environment.FAILURE_DETECTOR] = options.failure_detector
    present = [name for name in _LAUNCH if getattr(options, name) is not None]
    if not present:
        if options.deepspeed and not options.deepspeed_config:
            launcher = environment.place_of(os.environ).launcher
            if launcher != "deepspeed" and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
                remedy = "pass --deepspeed_config ds_configs/zero2.json"
                raise UserError(f"--deepspeed has no effect under {launcher}: {remedy}")
        return [argv[0], *rest], options
    place = environment.place_of(os.environ)
    if place.local_rank != 0:
        raise SystemExit(0)  # local rank 0 starts all processes of this machine
    if options.config_file is None:
        why = f"--{present[0]} needs a config file"
        raise UserError(f"{why}: add --config_file accelerate_configs/ddp.yaml (or another file of that folder)")
    arguments, requested = plan_launch(options, [argv[0], *rest], os.environ, module)
    _refuse_other_launch(place, module or argv[0], requested)
    count, rank, source = (requested["nodes"][name] for name in ("count", "rank", "rank_source"))
    if count > 1:
        logger.info(f"this is machine {rank} ({socket.gethostname()}) of {count}: {source}")
    if module and str(Path.cwd()) not in map(os.path.abspath, sys.path):
        # `-m` would import from the current folder, perhaps a downloaded one, which this process does not
        os.environ["PYTHONSAFEPATH"] = "1"
    return _become_launcher(arguments, {**requested, "argv": argv})


def _refuse_other_launch(place: environment.Place, script: str, requested: Mapping[str, Any]) -> None:
    """Raises UserError if the words before the script ask for another launch than the config file after it, which would
    replace it."""
    path, count, local = requested["config_file"], requested["nodes"]["count"], place.local_world_size
    if count == 1 and place.world_size > local:
        why = f"this was started on several machines ({place.launcher}, {place.world_size} processes)"
        raise UserError(f"{why}, and {path} is for one: each would train a separate model: use {TWO_NODE_FILES}")
    if place.launcher not in ("accelerate", "environment") and 1 < local != requested["num_processes"] // count:
        raise UserError(
            f"{place.launcher} started {local} processes on {socket.gethostname()}, and {path} asks for "
            f"{requested['num_processes'] // count}: pass --num_processes {local * count} after the script"
        )
    words = environment.accelerate_launch_words() or ()
    before = words[: words.index(script)] if script in words else ()
    if option := next(filter(None, map(_REPLACED.fullmatch, before)), None):
        raise UserError(f"{option[1]} before the script has no effect with --config_file {path} after it: put it after")


def plan_launch(
    options: argparse.Namespace, script: Sequence[str], env: Mapping[str, str], module: str | None = None
) -> tuple[list[str], dict[str, Any]]:
    """(arguments for accelerate's launcher, the request that the processes get as JSON).

    Raises UserError for a config file that is missing, unreadable or incomplete, or still holds a placeholder.
    """
    path = find_file(str(options.config_file), script[0], "accelerate_configs")
    config = read_config(path)
    uses_deepspeed = config["distributed_type"] == "DEEPSPEED"
    if uses_deepspeed:
        require_extra(str(options.config_file), "deepspeed")
    nodes = find_nodes(vars(options), config, path, env)
    processes = count_processes(options, config, path, nodes.count)
    # no port: each launcher starts the processes of its node, which then join the rendezvous
    arguments = ["--config_file", str(path), "--num_processes", str(processes), "--main_process_port", "0"]
    if nodes.count > 1:
        arguments += ["--main_process_ip", nodes.first, "--machine_rank", str(nodes.rank)]
        if uses_deepspeed:  # its default, pdsh, silently runs on one machine if there is no hostfile
            arguments += ["--deepspeed_multinode_launcher", "standard"]
    if (ids := config.get("gpu_ids")) not in (None, "all"):  # a text for accelerate; YAML may read a number or a list
        arguments += ["--gpu_ids", ",".join(map(str, ids)) if isinstance(ids, list) else str(ids)]
    if config.get("mixed_precision") is False:  # `no` without quotes, on which accelerate fails
        arguments += ["--mixed_precision", "no"]
    if options.max_restarts is not None:
        environment.parse_int("--max_restarts", options.max_restarts, minimum=0)
        arguments += ["--max_restarts", options.max_restarts]
    section = config.get("deepspeed_config") or {}
    if not isinstance(section, dict):
        remedy = f"write `deepspeed_config_file: {section}` indented below it"
        raise UserError(f"{path}: deepspeed_config is a section: {remedy}")
    if (options.deepspeed or options.deepspeed_config) and not uses_deepspeed:
        raise UserError(
            f"{path} does not use DeepSpeed, so --deepspeed{'_config' * bool(options.deepspeed_config)} would have no "
            "effect: use accelerate_configs/zero2.yaml, or leave it out"
        )
    if name := options.deepspeed_config or section.get("deepspeed_config_file"):
        arguments += ["--deepspeed_config_file", str(find_file(str(name), script[0], "ds_configs"))]
    if config["distributed_type"] == "MULTI_CPU" and processes > 1:
        arguments.append("--multi_gpu")  # otherwise `accelerate launch` silently starts one process
    if module:
        arguments.append("--module")
    requested = {"config_file": str(path), "num_processes": processes, "nodes": asdict(nodes),
                 "use_cpu": bool(config.get("use_cpu")), "started": time.strftime("%Y%m%d-%H%M%S")}  # fmt: skip
    return [*arguments, module or script[0], *script[1:]], requested


def count_processes(options: argparse.Namespace, config: Mapping[str, Any], path: Path, machines: int) -> int:
    """Processes over all machines; the default is this one's number of devices on each."""
    number = options.num_processes or config.get("num_processes")
    if number is None:
        number = machines
        if config["distributed_type"] not in ("NO", False, "MULTI_CPU") and not config.get("use_cpu"):
            import torch

            number *= torch.accelerator.device_count() or 1  # none: the CPU
    processes = environment.parse_int("num_processes", number, path, minimum=1)
    if processes > 1 and config["distributed_type"] in ("NO", False):  # YAML reads NO as false
        raise UserError(f"{path} runs one process, not {processes}: use accelerate_configs/ddp.yaml")
    if processes % machines:
        remedy = f"pass --num_processes {machines * max(1, processes // machines)}"
        raise UserError(f"{path}: {processes} processes cannot be divided equally among {machines} machines: {remedy}")
    return processes


def read_config(path: Path) -> dict[str, Any]:
    """Reads an accelerate config file. Raises UserError."""
    loaded = read_yaml(path)
    if not isinstance(loaded, dict) or "distributed_type" not in loaded:
        remedy = "start from one of accelerate_configs/"
        raise UserError(f"{path} is not an accelerate config (it has no distributed_type): {remedy}")
    return loaded


def find_file(name: str, script: str, folder: str) -> Path:
    """Looks for a file in the current folder, the script's repository and our templates. Raises UserError."""
    roots = [Path(script).resolve().parent.parent, templates()]
    if Path(name).is_file():
        return Path(name)
    for root in roots:
        if (root / name).is_file():
            return (root / name).resolve()
    near = [Path.cwd() / folder, *(root / folder for root in roots)]
    known = sorted({file.name for place in near if place.is_dir() for file in place.iterdir()})
    hint = f"; {folder}/ holds {', '.join(known)}" if known else f" (looked in {Path.cwd()} and {roots[0]})"
    near_name = did_you_mean(Path(name).name, known).replace("mean ", f"mean {folder}/")
    raise UserError(f"there is no config file {name}{near_name}{hint}")


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of an outer launcher."""
    clean = {name: value for name, value in env.items() if not _SET_BY_LAUNCHERS.match(name)}
    if environment.user_threads(env) is None:
        clean.pop(environment.THREADS, None)
    return clean


def _become_launcher(arguments: Sequence[str], requested: Mapping[str, Any]) -> NoReturn:
    if "TORCHELASTIC_RUN_ID" in os.environ or environment.accelerate_launch_words() is not None:
        stop_with_parent()  # `accelerate launch` forwards no stop signal
    env = clean_environment(os.environ)
    env[environment.MARKER] = json.dumps(requested)
    if requested["use_cpu"]:
        env["ACCELERATE_USE_CPU"] = "true"  # accelerate's launcher sets it for a single process only
    env.setdefault(environment.THREADS, "1")  # torchrun's default, without its long warning
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of every address without a host name
    os.environ.clear()
    os.environ.update(env)
    from toolkit.launch.launcher import launch  # torch and accelerate

    launch(arguments)
