"""`toolkit doctor`'s command line: the very one a run is started with, and what to look at beside."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toolkit.doctor.finding import Finding, plain
from toolkit.errors import UserError, did_you_mean
from toolkit.launch import relaunch
from toolkit.launch.machines import MEETING_PORT, Machines, find_machines, is_own, whole
from toolkit.launch.wire import is_loopback, own_addresses

DEFAULT_TIMEOUT = 30.0
_LONGEST_TIMEOUT = 600.0
_FILES = ("train_file", "validation_file", "test_file")
_FOLDERS = ("dataset_name", "model_name_or_path")
# may differ between machines, or says nothing about the run
_NOT_COMPARED = ("output_dir", "machine_rank", "main_process_ip", "machines", "local_rank", "config_file")
_MOST_SETTINGS, _MOST_CHARACTERS = 200, 500


@dataclass(frozen=True)
class Job:
    """What was asked for, as this machine understands it."""

    script: Path | None = None
    settings: dict[str, str] = field(default_factory=dict)
    """Those to be compared, in one spelling."""
    files: dict[str, Path] = field(default_factory=dict)
    """Setting -> the file or folder it names, there or not."""
    output: Path = Path("runs")
    config_file: Path | None = None
    processes: int | None = None
    """Over all machines; None where every machine takes its devices."""
    machines: Machines | None = None
    """Where there are several."""
    port: int = relaunch.DEFAULT_PORT
    uses_gpus: bool = True
    token: str = ""
    """As given; empty where the machines' names have to do."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds the machines have to meet."""
    as_json: bool = False
    typed: tuple[str, ...] = ()
    """The arguments, for the line to type elsewhere."""
    faults: tuple[Finding, ...] = ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"toolkit doctor: {message}; see toolkit doctor --help")


def parser() -> argparse.ArgumentParser:
    """The doctor's own options; launch options and settings are read by `read`."""
    made = _Parser(
        prog="toolkit doctor",
        usage="toolkit doctor [RECIPE.py] [SETTINGS.yaml] [--name value ...] [--config_file FILE | --peers A,B] "
        "[--token T] [--timeout SECONDS] [--json]",
        description="Looks for what will keep a run from starting or working, on this machine and, with --peers or a "
        "config file of several machines, between them: type the same on each. It ends in seconds.",
        epilog="The line a run is started with works as it is, `toolkit doctor` for `accelerate launch`: "
        "--config_file, --num_processes, --machine_rank, --machines, --main_process_ip, --main_process_port; files "
        "that settings name are compared by content. Exit codes: 0 nothing failed, 1 something did, 130 interrupted.",
        allow_abbrev=False,
    )
    add_options(made)
    return made


def add_options(made: argparse.ArgumentParser) -> None:
    """Those that only the doctor has."""
    made.add_argument(
        "--peers", metavar="A,B", help="all machines' addresses, the first one first; --machines is alike"
    )
    made.add_argument("--token", metavar="T", help="a word all machines give, to keep strangers out [$TOOLKIT_TOKEN]")
    made.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT, metavar="SECONDS", help="to wait for the others [30]"
    )
    made.add_argument("--json", action="store_true", help="one JSON object instead of text")


def read(argv: Sequence[str], env: Mapping[str, str]) -> Job:
    """Arguments -> the job. Raises UserError for what cannot be meant."""
    own, others = parser().parse_known_args(list(argv))
    if not 1 <= own.timeout <= _LONGEST_TIMEOUT:
        raise UserError(f"--timeout {own.timeout:g}: give seconds from 1 to {_LONGEST_TIMEOUT:.0f}")
    options, rest = relaunch.split(others)
    script, yaml_file, given = _words(rest)
    _refuse_unknown(given)
    faults: list[Finding] = []
    if script is not None and not script.is_file():
        faults.append(_missing("recipe", script))
    settings = {**_from_yaml(yaml_file, faults), **given}
    path, config = _config(options, script)
    machines = _machines(own.peers, options, config, path, env)
    default_port = MEETING_PORT if machines else relaunch.DEFAULT_PORT
    processes = options.num_processes or config.get("num_processes")
    deepspeed = _deepspeed_file(options, config, script)
    return Job(
        script=script,
        settings=_compared({**settings, **_launch_settings(options, config, deepspeed)}),
        files=_named_files(settings),
        output=Path(settings.get("output_dir") or "runs"),
        config_file=path,
        processes=whole("num_processes", processes, path) if processes is not None else None,
        machines=machines,
        port=machines.port if machines else _port(options, config, default_port),
        uses_gpus=not config.get("use_cpu", False),
        token=own.token or env.get("TOOLKIT_TOKEN") or "",
        timeout=own.timeout,
        as_json=own.json,
        typed=tuple(argv),
        faults=tuple(faults),
    )


def _words(rest: Sequence[str]) -> tuple[Path | None, Path | None, dict[str, str]]:
    """Words that are no launch options -> (script, YAML file, settings)."""
    script = yaml_file = None
    settings: dict[str, str] = {}
    words = list(rest)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            alone = not words or words[0].startswith("--") or words[0].endswith(".py")  # a switch
            settings[name.replace("-", "_")] = value if equals else "true" if alone else words.pop(0)
        elif word.endswith(".py") and script is None:
            script = Path(word)
        elif word.endswith((".yaml", ".yml")) and yaml_file is None:
            yaml_file = Path(word)
        else:
            raise UserError(f"{word!r} is neither a RECIPE.py, nor a SETTINGS.yaml, nor `--name value`")
    return script, yaml_file, settings


def _refuse_unknown(given: Mapping[str, str]) -> None:
    """A name that is mistyped would check nothing, and all would be well."""
    from toolkit import config

    tasks = (config.TaskSettings, config.LongTaskSettings, config.TitleSettings)
    sections = [section for task in tasks for section in config.sections_of(task).values()]
    settings = {field.name for section in sections for field in dataclasses.fields(section)}
    options = {"peers", "token", "timeout", "json", *relaunch.Options.__dataclass_fields__}
    unknown = [name for name in given if name not in settings]
    if unknown:
        listed = "; ".join(f"--{name}{did_you_mean(name, settings | options)}" for name in unknown)
        raise UserError(f"neither an option of toolkit doctor nor a setting of a recipe: {listed}")


def _from_yaml(path: Path | None, faults: list[Finding]) -> dict[str, str]:
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        faults.append(_missing("settings", path))
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = f"{path} is not valid YAML: {' '.join(str(error).split())}"
        faults.append(Finding("files", "settings", "fail", text, f"mend {path}"))
        return {}
    if not isinstance(loaded, dict):
        return {}
    return {str(name): json.dumps(value) if isinstance(value, list | dict) else str(value)
            for name, value in loaded.items()}  # fmt: skip


def _missing(what: str, path: Path) -> Finding:
    text = f"there is no {path} (looked in {Path.cwd()})"
    return Finding("files", what, "fail", text, "bring the same files to all machines, and start in the same folder")


def _config(options: relaunch.Options, script: Path | None) -> tuple[Path | None, dict[str, Any]]:
    if options.config_file is None:
        return None, {}
    path = relaunch.find_beside(options.config_file, str(script or "recipe.py"), "accelerate_configs")
    return path, relaunch.read_config(path)


def _machines(
    peers: str | None, options: relaunch.Options, config: Mapping[str, Any], path: Path | None, env: Mapping[str, str]
) -> Machines | None:
    listed = peers or options.machines
    if listed:
        names = [name.strip() for name in listed.split(",") if name.strip()]
        if len(names) == 1:
            raise UserError(
                f"--peers names {names[0]} alone: name all machines, this one too (its addresses: {_own_addresses()})"
            )
        _refuse_strange_names(names, options, env)
        config = {**config, "num_machines": len(names)}
        listed = ",".join(names)
    if int(config.get("num_machines") or 1) == 1:
        return None
    given = {**vars(options), "machines": listed}
    try:
        return find_machines(given, config, path or Path("--peers"), env)
    except UserError as error:
        raise UserError(f"{error}. This machine's addresses: {_own_addresses()}") from error


def _refuse_strange_names(names: Sequence[str], options: relaunch.Options, env: Mapping[str, str]) -> None:
    """Addresses that mean every machine itself, and lists without this machine."""
    for name in names:
        if name == "localhost" or is_loopback(name):
            raise UserError(f"{name} means each machine itself: give the address by which the others reach it "
                            f"(`hostname -I` there; this machine's addresses: {_own_addresses()})")  # fmt: skip
    numbered = options.machine_rank or env.get("NODE_RANK") or env.get("SLURM_NODEID")
    if not numbered and not any(is_own(name) for name in names):
        raise UserError(
            f"none of {', '.join(names)} is an address of this machine ({_own_addresses()}): name this one too, or "
            "pass --machine_rank where its address is another's to translate"
        )


def _own_addresses() -> str:
    return ", ".join(address for address in own_addresses() if not is_loopback(address)) or "none"


def _port(options: relaunch.Options, config: Mapping[str, Any], default: int) -> int:
    port = whole("main_process_port", options.main_process_port or config.get("main_process_port") or default, None)
    if not 0 < port <= 65535:
        raise UserError(f"main_process_port {port} is no TCP port: choose one from 1024 to 65535")
    return port


def _launch_settings(options: relaunch.Options, config: Mapping[str, Any], deepspeed: Path | None) -> dict[str, str]:
    """Launch options as they will count, and the content of the files they name."""
    found = {name: str(value) for name, value in vars(options).items() if value is not None}
    if config:
        own = ("machine_rank", "main_process_ip", "machines")
        found["config_file_content"] = _digest({name: value for name, value in config.items() if name not in own})
    if deepspeed is not None:
        try:
            found["deepspeed_config_content"] = _digest(json.loads(deepspeed.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            found["deepspeed_config_content"] = "unreadable"
    found.pop("deepspeed_config", None)
    return found


def _deepspeed_file(options: relaunch.Options, config: Mapping[str, Any], script: Path | None) -> Path | None:
    section = config.get("deepspeed_config")
    named = options.deepspeed_config or (section.get("deepspeed_config_file") if isinstance(section, dict) else None)
    return relaunch.find_beside(str(named), str(script or "recipe.py"), "ds_configs") if named else None


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _compared(settings: Mapping[str, str]) -> dict[str, str]:
    kept = {name: one_spelling(value) for name, value in sorted(settings.items()) if name not in _NOT_COMPARED}
    return dict(list(kept.items())[:_MOST_SETTINGS])


def one_spelling(value: str) -> str:
    """`3e-5` and `0.00003`, `True` and `true` are one value."""
    try:
        meant = yaml.safe_load(value)
    except yaml.YAMLError:
        meant = value
    if isinstance(meant, bool):
        return str(meant).lower()
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return plain(value, _MOST_CHARACTERS)


def _named_files(settings: Mapping[str, str]) -> dict[str, Path]:
    """A name that is neither a path nor there is the hub's."""
    found = {name: Path(settings[name]).expanduser() for name in _FILES if settings.get(name)}
    for name in _FOLDERS:
        value = settings.get(name) or ""
        if value and (Path(value).expanduser().exists() or value.startswith((".", "/", "~"))):
            found[name] = Path(value).expanduser()
    return found


def line_elsewhere(job: Job, rank: int) -> str:
    """What to type on machine `rank`: the same as here, with its own number where a number was typed."""
    words = _without(job.typed, {"--token": 1})
    if any(word.startswith("--machine_rank") for word in words):
        words = [*_without(words, {"--machine_rank": 1}), "--machine_rank", str(rank)]
    if job.token and "TOOLKIT_TOKEN" not in os.environ:
        words += ["--token", "THE_SAME"]
    return shlex.join(["toolkit", "doctor", *words])


def line_to_start(job: Job) -> str:
    """`accelerate launch ...` for what was looked at; empty where no recipe was named."""
    if job.script is None:
        return ""
    words = _without(job.typed, {"--token": 1, "--timeout": 1, "--json": 0})
    words = ["--machines" if word == "--peers" else word for word in words if word != str(job.script)]
    if job.machines and job.config_file is None:
        words += ["--config_file", "accelerate_configs/2node.yaml"]
    return shlex.join(["accelerate", "launch", str(job.script), *words])


def _without(words: Sequence[str], options: Mapping[str, int]) -> list[str]:
    """Leaves options out (name -> how many values follow it)."""
    kept, skip = [], 0
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip -= 1
        elif name in options:
            skip = 0 if equals else options[name]
        else:
            kept.append(word)
    return kept
