"""`--config_file X` after the script: honoured by starting again what X asks for.

`accelerate launch script.py --config_file X` hands X to the script and starts one process per
machine without reading it. Here the first process of each machine becomes the launcher that
`accelerate launch --config_file X script.py ...` would have been; its siblings leave.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import yaml

from toolkit.errors import UserError, did_you_mean
from toolkit.init import templates
from toolkit.launch.environment import MARKER, TIMEOUTS, place_of, whole
from toolkit.launch.network import check_port
from toolkit.launch.nodes import Nodes, find_nodes
from toolkit.launch.restarts import stop_with_parent

DEFAULT_PORT = 29500
_OURS = ("config_file", "num_processes", "machine_rank", "machines", "main_process_ip", "main_process_port",
         "max_restarts")  # fmt: skip
OPTIONS = (*_OURS, *TIMEOUTS, "deepspeed_config", "local_rank")
"""What is read from a script's arguments before its own settings are; each takes a value."""
_INHERITED = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|(GROUP|ROLE|TORCHELASTIC|ACCELERATE|FSDP|OMPI|PMI|PMIX|MV2|SLURM_STEP)_.*|MPI_LOCAL.*"
    r"|SLURM_(PROCID|LOCALID|STEPID)|TORCH_NCCL_ASYNC_ERROR_HANDLING)$"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """A script's arguments -> (launch options: text or None, the rest in order). Raises UserError."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=None)
    for name in OPTIONS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    parser.add_argument("--deepspeed", action="store_true")  # a bare flag many DeepSpeed scripts take
    options, rest = parser.parse_known_args(list(argv))
    del options.deepspeed
    return options, rest


def relaunch_if_requested(argv: list[str], module: str | None = None) -> tuple[list[str], argparse.Namespace]:
    """Becomes the launcher when a config file is given; otherwise returns (arguments, options).

    `argv` is `sys.argv`: the script and its arguments. `module` names the package for `python -m`.
    """
    options, rest = split(argv[1:])
    _hand_down_timeouts(options)
    given = [name for name in _OURS if getattr(options, name) is not None]
    if not given:
        return [argv[0], *rest], options
    if place_of(os.environ).local_rank != 0:
        raise SystemExit(0)  # the first process of this machine starts all that the file asks for
    if options.config_file is None:
        raise UserError(
            f"--{given[0]} needs a config file to start from: add --config_file "
            "accelerate_configs/ddp.yaml (or another file of that folder)"
        )
    arguments, requested = plan(options, [argv[0], *rest], os.environ, module)
    nodes = requested["nodes"]
    if nodes["count"] > 1:
        line = f"this is machine {nodes['rank']} ({socket.gethostname()}) of {nodes['count']}: {nodes['how']}"
        print(line, file=sys.stderr, flush=True)
    _become_launcher(arguments, requested)
    return None


def _hand_down_timeouts(options: argparse.Namespace) -> None:
    for name, (variable, _) in TIMEOUTS.items():
        value = getattr(options, name)
        if value is not None:
            if whole(name, value) < 1:
                raise UserError(f"--{name} {value}: give a number of seconds, 1 or more")
            os.environ[variable] = value


def plan(
    options: argparse.Namespace, script: Sequence[str], env: Mapping[str, str], module: str | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Options -> (arguments for accelerate's launcher, what the processes are told was requested).

    Raises UserError for a file that is missing, unreadable, incomplete or still holds a placeholder.
    """
    path = find_file(str(options.config_file), script[0], "accelerate_configs")
    config = read_config(path)
    count = whole("num_machines", config.get("num_machines") or 1, path)
    processes = _processes(options, config, path, count)
    nodes = find_nodes(vars(options), config, path, env) if count > 1 else _this_node(options, config, path)
    # its launcher needs no port: each starts the processes of its node, and these find each other
    arguments = ["--config_file", str(path), "--num_processes", str(processes), "--main_process_port", "0"]
    if count > 1:
        arguments += ["--main_process_ip", nodes.first, "--machine_rank", str(nodes.rank)]
        if config["distributed_type"] == "DEEPSPEED":
            # DeepSpeed's own default, pdsh, would quietly run one machine's worth without a hostfile
            arguments += ["--deepspeed_multinode_launcher", "standard"]
    if options.max_restarts is not None:
        if whole("max_restarts", options.max_restarts) < 0:
            raise UserError(f"--max_restarts {options.max_restarts}: give a number of restarts, 0 or more")
        arguments += ["--max_restarts", options.max_restarts]
    section = config.get("deepspeed_config") or {}
    if not isinstance(section, dict):
        raise UserError(
            f"{path}: deepspeed_config is a section: write `deepspeed_config_file: {section}` indented below it"
        )
    if wanted := options.deepspeed_config or section.get("deepspeed_config_file"):
        arguments += ["--deepspeed_config_file", str(find_file(str(wanted), script[0], "ds_configs"))]
    if config.get("distributed_type") == "MULTI_CPU" and processes > 1:
        arguments.append("--multi_gpu")  # without it `accelerate launch` starts one process, silently
    if module:
        arguments.append("--module")
    requested = {"config_file": str(path), "num_processes": processes, "nodes": asdict(nodes),
                 "use_cpu": bool(config.get("use_cpu")), "started": time.strftime("%Y%m%d-%H%M%S")}  # fmt: skip
    return [*arguments, module or script[0], *script[1:]], requested


def _this_node(options: argparse.Namespace, config: Mapping[str, Any], path: Path) -> Nodes:
    """Of a run on one machine. What is only for several is not ignored in silence."""
    given = [f"--{name}" for name in ("machines", "machine_rank", "main_process_ip") if getattr(options, name)]
    if config.get("machines"):
        given.append("its list of machines")
    if given:
        raise UserError(
            f"{path} is for one machine (num_machines: 1), so {given[0]} would have no effect: use "
            "accelerate_configs/2node.yaml (or 2node_zero2.yaml, 2node_zero3.yaml), or leave it out"
        )
    wanted = options.main_process_port or config.get("main_process_port") or DEFAULT_PORT
    port = check_port(whole("main_process_port", wanted, path), f"{path}: main_process_port ")
    return Nodes(1, 0, "", ("127.0.0.1",), port)


def _processes(options: argparse.Namespace, config: Mapping[str, Any], path: Path, machines: int) -> int:
    """Over all machines; on several, without a number, as many on each as this one has devices."""
    wanted = options.num_processes or config.get("num_processes")
    if wanted is None:
        wanted = machines * (1 if config.get("use_cpu") else _devices()) if machines > 1 else 1
    processes = whole("num_processes", wanted, path)
    if processes < 1:
        raise UserError(f"{path}: num_processes is {processes}: at least one is needed")
    if processes > 1 and config["distributed_type"] == "NO":
        raise UserError(f"{path} runs one process, not {processes}: use accelerate_configs/ddp.yaml")
    if processes % machines:
        raise UserError(
            f"{path}: {processes} processes cannot be divided equally among {machines} machines: "
            f"pass --num_processes {machines * max(1, processes // machines)}"
        )
    return processes


def _devices() -> int:
    """The visible devices; 1 on a machine without any, which computes on its CPU."""
    import torch

    return torch.accelerator.device_count() or 1


def read_config(path: Path) -> dict[str, Any]:
    """An accelerate config file as a dict, its names checked. Raises UserError."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict) or "distributed_type" not in loaded:
        raise UserError(
            f"{path} is not an accelerate config (it has no distributed_type): see accelerate_configs/ "
            "for one to start from"
        )
    return loaded


def find_file(name: str, script: str, folder: str) -> Path:
    """A file as named from here, or from the repository the script lies in. Raises UserError."""
    # the folder the recipe lies in, or our own files where `python -m toolkit` was typed
    roots = [Path(script).resolve().parent.parent, templates()]
    if Path(name).is_file():
        return Path(name)
    for root in roots:
        if (root / name).is_file():
            return (root / name).resolve()
    near = [Path.cwd() / folder, *(root / folder for root in roots)]
    known = sorted({file.name for place in near if place.is_dir() for file in place.iterdir()})
    listed = f"; {folder}/ holds {', '.join(known)}" if known else f" (looked in {Path.cwd()} and {roots[0]})"
    raise UserError(f"there is no config file {name}{did_you_mean(Path(name).name, known)}{listed}")


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer launcher put there for its own world."""
    kept = {name: value for name, value in env.items() if not _INHERITED.match(name)}
    if "TORCHELASTIC_RUN_ID" in env and env.get("OMP_NUM_THREADS") == "1":
        kept.pop("OMP_NUM_THREADS")  # torchrun's default for several processes, not the user's wish
    return kept


def _become_launcher(arguments: Sequence[str], requested: Mapping[str, Any]) -> NoReturn:
    if place_of(os.environ).launcher in ("accelerate", "torchrun"):
        stop_with_parent()  # accelerate's launcher, which was typed, hands no signal on when it is told to stop
    env = clean_environment(os.environ)
    env[MARKER] = json.dumps(requested)
    if requested["use_cpu"]:
        env["ACCELERATE_USE_CPU"] = "true"  # accelerate's launcher hands it on to one process only
    if requested["nodes"]["count"] == 1:
        env.setdefault("TOOLKIT_TOKEN", secrets.token_hex(16))  # known to this run's processes alone
    env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its page of warning
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of every address without a name
    os.environ.clear()
    os.environ.update(env)
    from toolkit.launch.launcher import launch  # torch and accelerate

    launch(arguments)
