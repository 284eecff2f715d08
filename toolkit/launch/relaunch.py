"""`--config_file X` after the script: honoured by starting again what X asks for.

`accelerate launch script.py --config_file X` hands X to the script and starts one process per
machine without reading it. Here the first process of each machine replaces itself with
`accelerate launch --config_file X script.py ...`; its siblings leave.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from toolkit.errors import UserError, did_you_mean
from toolkit.launch.environment import free_port, place_of

MARKER = "TOOLKIT_LAUNCH"
PLACEHOLDER = "ADDRESS_OF_MACHINE_0"
DEFAULT_PORT = 29500
_OURS = ("config_file", "num_processes", "machine_rank", "main_process_ip", "main_process_port")
_DEEPSPEED = ("deepspeed_config", "local_rank")
_INHERITED = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|(GROUP|ROLE|TORCHELASTIC|ACCELERATE|FSDP|OMPI|PMI|PMIX|MV2|SLURM_STEP)_.*|MPI_LOCAL.*"
    r"|SLURM_(PROCID|LOCALID|STEPID)|TORCH_NCCL_ASYNC_ERROR_HANDLING)$"
)


@dataclass(frozen=True)
class Options:
    """The launch options found among a script's arguments."""

    config_file: str | None = None
    num_processes: str | None = None
    machine_rank: str | None = None
    main_process_ip: str | None = None
    main_process_port: str | None = None
    deepspeed_config: str | None = None
    local_rank: str | None = None


def split(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """A script's arguments -> (launch options, the rest in order). Raises UserError."""
    found: dict[str, str] = {}
    rest: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not token.startswith("--") or name not in _OURS + _DEEPSPEED:
            if token != "--deepspeed":  # a bare flag many DeepSpeed scripts take
                rest.append(token)
            continue
        if not equals:
            value = next(tokens, "")
        if not value or value.startswith("--"):
            raise UserError(f"--{name} needs a value")
        found[name] = value
    return Options(**found), rest


def relaunch_if_asked(argv: list[str], module: str | None = None) -> tuple[list[str], Options]:
    """Replaces this process when a config file is given; otherwise returns (arguments, options).

    `argv` is `sys.argv`: the script and its arguments. `module` names the package for `python -m`.
    """
    options, rest = split(argv[1:])
    given = [name for name in _OURS if getattr(options, name) is not None]
    if not given:
        return [argv[0], *rest], options
    place = place_of(os.environ)
    if place.local_rank != 0:
        raise SystemExit(0)  # the first process of this machine starts all that the file asks for
    if options.config_file is None:
        raise UserError(
            f"--{given[0]} says how to launch but no config file does: add --config_file "
            "accelerate_configs/ddp.yaml (or another file of that folder)"
        )
    command, asked = plan(options, [argv[0], *rest], os.environ, module)
    _replace_process(command, asked)
    return None


def plan(
    options: Options, script: Sequence[str], env: Mapping[str, str], module: str | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Options -> (arguments for accelerate's launcher, what was asked for).

    Raises UserError for a file that is missing, unreadable, incomplete or still holds a placeholder.
    """
    path = find_beside(str(options.config_file), script[0], "accelerate_configs")
    config = read_config(path)
    machines = _whole("num_machines", config.get("num_machines") or 1, path)
    processes = _whole("num_processes", options.num_processes or config.get("num_processes") or machines, path)
    if processes < 1:
        raise UserError(f"{path}: num_processes is {processes}: at least one is needed")
    if processes > 1 and config["distributed_type"] == "NO":
        raise UserError(f"{path} runs one process, not {processes}: use accelerate_configs/ddp.yaml")
    if processes % machines:
        raise UserError(
            f"{path}: {processes} processes cannot be shared equally by {machines} machines: "
            f"pass --num_processes {machines * max(1, processes // machines)}"
        )
    arguments = ["--config_file", str(path), "--num_processes", str(processes)]
    arguments += _meeting_point(options, config, path, machines, env)
    section = config.get("deepspeed_config") or {}
    if not isinstance(section, dict):
        raise UserError(f"{path}: deepspeed_config holds lines of its own: `deepspeed_config_file: {section}` below it")
    deepspeed_file = section.get("deepspeed_config_file")
    if options.deepspeed_config or deepspeed_file:
        wanted = str(options.deepspeed_config or deepspeed_file)
        arguments += ["--deepspeed_config_file", str(find_beside(wanted, script[0], "ds_configs"))]
    if config.get("distributed_type") == "MULTI_CPU" and processes > 1:
        arguments.append("--multi_gpu")  # without it `accelerate launch` starts one process, silently
    if module:
        arguments.append("--module")
    return [*arguments, module or script[0], *script[1:]], {
        "config_file": str(path),
        "num_processes": processes,
        "num_machines": machines,
    }


def _meeting_point(
    options: Options, config: Mapping[str, Any], path: Path, machines: int, env: Mapping[str, str]
) -> list[str]:
    wanted = options.main_process_port or config.get("main_process_port") or DEFAULT_PORT
    port = _whole("main_process_port", wanted, path)
    if not 0 <= port <= 65535:
        raise UserError(f"{path}: main_process_port {port} is no TCP port: choose one from 1024 to 65535")
    if machines == 1:
        return ["--main_process_port", str(free_port(port))]
    address = options.main_process_ip or config.get("main_process_ip")
    if not address or PLACEHOLDER in str(address):
        raise UserError(
            f"{path}: main_process_ip is still {address!r}: write the first machine's address on that line, or "
            "pass --main_process_ip ADDRESS (on the first machine, `hostname -I` shows it)"
        )
    rank = _machine_rank(options, config, env)
    if rank is None or not 0 <= rank < machines:
        raise UserError(
            f"{path} is for {machines} machines and this one does not know which it is: pass --machine_rank 0 "
            f"on the first and up to {machines - 1} on the others (or set NODE_RANK)"
        )
    return ["--main_process_ip", str(address), "--main_process_port", str(port), "--machine_rank", str(rank)]


def _machine_rank(options: Options, config: Mapping[str, Any], env: Mapping[str, str]) -> int | None:
    several = int(env.get("GROUP_WORLD_SIZE", "1")) > 1  # an outer launcher that spans machines
    candidates = [
        options.machine_rank,
        env.get("NODE_RANK"),
        env.get("SLURM_NODEID"),
        env.get("GROUP_RANK") if several else None,
        config.get("machine_rank"),
    ]
    given = next((value for value in candidates if value is not None), None)
    return None if given is None else _whole("machine_rank", given, None)


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


def find_beside(name: str, script: str, folder: str) -> Path:
    """A file as named from here, or from the repository the script lies in. Raises UserError."""
    # the repository of the script, or of this package where `python -m toolkit` was typed
    roots = [Path(script).resolve().parent.parent, Path(__file__).resolve().parents[2]]
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


def _replace_process(arguments: Sequence[str], asked: Mapping[str, Any]) -> NoReturn:
    env = clean_environment(os.environ)
    env[MARKER] = json.dumps(dict(asked))
    env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its page of warning
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "toolkit.launch.accelerate_cli", *arguments]
    os.execve(sys.executable, command, env)


def _whole(name: str, value: object, path: Path | None) -> int:
    try:
        return int(str(value))
    except ValueError as error:
        where = f"{path}: " if path else ""
        raise UserError(f"{where}{name} must be a whole number, not {value!r}") from error
