"""`toolkit doctor`'s command line: the very one a run is started with, and what to look at beside."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import config
from toolkit.doctor.finding import plain
from toolkit.errors import UserError, did_you_mean
from toolkit.launch import relaunch
from toolkit.launch.network import check_port, is_loopback, is_own, own_addresses
from toolkit.launch.nodes import Nodes, find_nodes, whole
from toolkit.plain_yaml import read_yaml

DEFAULT_TIMEOUT = 30.0
_LONGEST_TIMEOUT = 600.0
_FILES = ("train_file", "validation_file", "test_file", "label_names_file", "label_corrections")
_FOLDERS = ("dataset_name", "model_name_or_path")
# may differ between machines, or says nothing about the run
_NOT_COMPARED = ("output_dir", "machine_rank", "main_process_ip", "machines", "local_rank", "config_file",
                 "deepspeed_config")  # fmt: skip
_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}


@dataclass(frozen=True)
class Job:
    """What was asked for, as this machine understands it."""

    script: Path | None
    settings: dict[str, str]
    """Those to be compared, in one spelling."""
    files: dict[str, Path]
    """Setting -> the file or folder it names, there or not."""
    output: Path
    config_file: Path | None
    processes: int | None
    """Over all machines; None where every machine takes its devices."""
    machines: Nodes | None
    """Where there are several."""
    port: int
    uses_gpus: bool
    token: str
    timeout: float
    """Seconds the machines wait for each other."""
    as_json: bool
    typed: tuple[str, ...]
    """The arguments, for the line to type elsewhere."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"toolkit doctor: {message}; see toolkit doctor --help")


def _parser() -> argparse.ArgumentParser:
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
    made.add_argument("--peers", metavar="A,B", help="all machines' addresses, the first one first; as --machines")
    made.add_argument("--token", metavar="T", help="a word all machines give, to keep strangers out [$TOOLKIT_TOKEN]")
    made.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT, metavar="SECONDS", help="to wait for the others [30]"
    )
    made.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return made


def read(argv: Sequence[str], env: Mapping[str, str]) -> Job:
    """Arguments -> the job. Raises UserError for what cannot be meant."""
    own, others = _parser().parse_known_args(list(argv))
    if not 1 <= own.timeout <= _LONGEST_TIMEOUT:
        raise UserError(f"--timeout {own.timeout:g}: give seconds from 1 to {_LONGEST_TIMEOUT:.0f}")
    options, rest = relaunch.split(others)
    script, yaml_file, given = _words(rest)
    if missing := next((path for path in (script, yaml_file) if path and not path.is_file()), None):
        raise UserError(f"there is no {missing} (looked in {Path.cwd()}): bring the same files to all machines")
    _refuse_unknown(given, script)
    path = _found(options.config_file, script, "accelerate_configs")
    launched = relaunch.read_config(path) if path else {}
    machines = _machines(own.peers or options.machines, options, launched, path or Path("--peers"), env)
    settings = {**_from_yaml(yaml_file), **given}
    settings |= {name: value for name, value in vars(options).items() if value is not None}
    in_file = {f"config_file.{name}": str(value) for name, value in launched.items() if name not in _NOT_COMPARED}
    compared = {**settings, **in_file}
    section = launched.get("deepspeed_config")
    named = options.deepspeed_config or (section.get("deepspeed_config_file") if isinstance(section, dict) else None)
    deepspeed = _found(named, script, "ds_configs")
    processes = options.num_processes or launched.get("num_processes")
    port = options.main_process_port or launched.get("main_process_port") or relaunch.DEFAULT_PORT
    port = machines.port if machines else check_port(whole("main_process_port", port, None), "main_process_port ")
    return Job(
        script=script,
        settings={name: one_spelling(value) for name, value in sorted(compared.items()) if name not in _NOT_COMPARED},
        files={**_named_files(settings), **({"deepspeed_config": deepspeed} if deepspeed else {})},
        output=Path(settings.get("output_dir") or "runs"),
        config_file=path,
        processes=whole("num_processes", processes, path) if processes is not None else None,
        machines=machines,
        port=port,
        uses_gpus=not launched.get("use_cpu", False),
        token=own.token or env.get("TOOLKIT_TOKEN") or "",
        timeout=own.timeout,
        as_json=own.json,
        typed=tuple(argv),
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


def _refuse_unknown(given: Mapping[str, str], script: Path | None) -> None:
    """A name that is mistyped would check nothing, and all would be well. A recipe may have settings of its own."""
    tasks = (config.TaskSettings, config.LongTaskSettings, config.TitleSettings)
    sections = [section for task in tasks for section in config.sections_of(task).values()]
    settings = {field.name for section in sections for field in dataclasses.fields(section)}
    recipe = set(re.findall(r"\w+", script.read_text(encoding="utf-8", errors="replace"))) if script else set()
    if unknown := [name for name in given if name not in settings | recipe]:
        options = {"peers", "token", "timeout", "json", *relaunch.OPTIONS}
        listed = "; ".join(f"--{name}{did_you_mean(name, settings | options)}" for name in unknown)
        raise UserError(f"neither an option of toolkit doctor nor a setting of a recipe: {listed}")


def _from_yaml(path: Path | None) -> dict[str, str]:
    loaded = read_yaml(path) if path else {}
    known = loaded if isinstance(loaded, dict) else {}
    return {str(name): json.dumps(value, default=str) if isinstance(value, list | dict) else str(value)
            for name, value in known.items()}  # fmt: skip


def _found(name: object, script: Path | None, folder: str) -> Path | None:
    return relaunch.find_file(str(name), str(script or "recipe.py"), folder) if name else None


def _machines(
    listed: str | None, options: argparse.Namespace, launched: Mapping[str, Any], path: Path, env: Mapping[str, str]
) -> Nodes | None:
    here = ", ".join(address for address in own_addresses() if not is_loopback(address)) or "none"
    if listed:
        names = [name.strip() for name in listed.split(",") if name.strip()]
        listed, launched = ",".join(names), {**launched, "num_machines": len(names)}
        numbered = options.machine_rank or env.get("NODE_RANK") or env.get("SLURM_NODEID")
        if len(names) == 1:
            raise UserError(f"--peers names {listed} alone: name all machines, this one too (its addresses: {here})")
        if not numbered and not any(map(is_own, names)):
            raise UserError(
                f"none of {', '.join(names)} is an address of this machine ({here}): name this one too, or pass "
                "--machine_rank where its address is another's to translate"
            )
    if whole("num_machines", launched.get("num_machines") or 1, path) == 1:
        return None
    try:
        return find_nodes({**vars(options), "machines": listed}, launched, path, env)
    except UserError as error:
        raise UserError(f"{error}. This machine's addresses: {here}") from error


def one_spelling(value: str) -> str:
    """`3e-5` and `0.00003`, `True` and `true` are one value."""
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return _WORDS.get(value.lower(), plain(value, 500))


def _named_files(settings: Mapping[str, str]) -> dict[str, Path]:
    """A name that is neither a path nor there is the hub's."""
    found = {name: Path(settings[name]).expanduser() for name in (*_FILES, *_FOLDERS) if settings.get(name)}
    return {
        name: path
        for name, path in found.items()
        if name in _FILES or path.exists() or settings[name].startswith((".", "/", "~"))
    }


def line_elsewhere(job: Job, rank: int) -> str:
    """What to type on machine `rank`: the same as here, with its own number where a number was typed."""
    line = re.sub(r"(--machine_rank[ =])\d+", rf"\g<1>{rank}", shlex.join(_typed(job, {"--token"})))
    token = " --token THE_SAME" if job.token and "TOOLKIT_TOKEN" not in os.environ else ""
    return f"toolkit doctor {line}{token}"


def line_to_start(job: Job) -> str:
    """`accelerate launch ...` for what was looked at; empty where no recipe was named."""
    if job.script is None:
        return ""
    words = _typed(job, {"--token", "--timeout", "--json"})
    words.remove(str(next(word for word in words if Path(word) == job.script)))
    words = [re.sub("^--peers", "--machines", word) for word in words]
    more = ["--config_file", "accelerate_configs/2node.yaml"] if job.machines and job.config_file is None else []
    return shlex.join(["accelerate", "launch", str(job.script), *words, *more])


def _typed(job: Job, without: Collection[str]) -> list[str]:
    """The arguments without some options; the token is nobody's to see."""
    kept, words = [], iter(job.typed)
    for word in words:
        if word.partition("=")[0] not in without:
            kept.append(word)
        elif "=" not in word and word != "--json":
            next(words, "")
    return kept
