"""`toolkit doctor`'s command line: the very one a run is started with, and what to look at beside."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import config
from toolkit.errors import Parser, UserError, did_you_mean, plain
from toolkit.launch import relaunch
from toolkit.launch.environment import whole
from toolkit.launch.network import reachable_addresses
from toolkit.launch.nodes import Nodes, find_nodes
from toolkit.utils.plain_yaml import read_yaml

DEFAULT_TIMEOUT = 30.0
_LONGEST_TIMEOUT = 600.0
_FILES = ("train_file", "validation_file", "test_file", "label_names_file", "label_corrections", "deepspeed_config")
_FOLDERS = ("dataset_name", "model_name_or_path")
# may differ between machines, or says nothing about the run
_NOT_COMPARED = ("output_dir", "machine_rank", "main_process_ip", "machines", "local_rank", "config_file",
                 "deepspeed_config")  # fmt: skip
_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}


@dataclass(frozen=True)
class Job:
    """What was asked for, as this machine understands it."""

    own: argparse.Namespace
    """The doctor's own options: `timeout` (seconds the machines wait for each other), `json`."""
    typed: Sequence[str]
    """The arguments, for the line to type elsewhere."""
    script: Path | None
    settings: dict[str, str]
    """Those to be compared, in one spelling."""
    files: dict[str, Path]
    """Setting -> the file or folder it names, there or not."""
    output: Path
    config_file: Path | None
    processes: int
    """Over all machines; 0 where every machine takes its devices."""
    nodes: Nodes
    uses_gpus: bool


def _parser() -> argparse.ArgumentParser:
    """The doctor's own options; launch options and settings are read by `read`."""
    made = Parser(
        prog="toolkit doctor",
        usage="toolkit doctor [RECIPE.py] [SETTINGS.yaml] [--name value ...] [--config_file FILE | --peers A,B] "
        "[--timeout SECONDS] [--json]",
        description="Looks for what will keep a run from starting or working, on this machine and, with --peers or a "
        "config file of several machines, between them: type the same on each. It ends in seconds.",
        epilog="The line a run is started with works as it is, `toolkit doctor` for `accelerate launch`: "
        "--config_file, --num_processes, --machine_rank, --machines, --main_process_ip, --main_process_port; files "
        "that settings name are compared by content. TOOLKIT_TOKEN, a variable with the same secret on all machines, "
        "keeps strangers out. Exit codes: 0 nothing failed, 1 something did, 130 interrupted.",
        allow_abbrev=False,
    )
    made.add_argument("--peers", metavar="A,B", help="all machines' addresses, the first one first; as --machines")
    made.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT, metavar="SECONDS", help="to wait for the others [30]"
    )
    made.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return made


def read(argv: Sequence[str], env: Mapping[str, str]) -> Job:
    """Arguments -> the job. Raises UserError for what cannot be meant."""
    if any(word.partition("=")[0] == "--token" for word in argv):
        raise UserError(
            "--token would show the secret in the list of processes: set the variable TOOLKIT_TOKEN instead"
        )
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
    nodes = _nodes(own.peers or options.machines, options, launched, path or Path("this line"), env)
    in_yaml = read_yaml(yaml_file) if yaml_file else None
    settings = {**_texts(in_yaml), **given, **_texts(vars(options))}
    compared = settings | {f"config_file.{name}": value for name, value in _texts(launched).items()
                           if name not in _NOT_COMPARED}  # fmt: skip
    section = launched.get("deepspeed_config")
    named = options.deepspeed_config or (section.get("deepspeed_config_file") if isinstance(section, dict) else None)
    if deepspeed := _found(named, script, "ds_configs"):
        settings["deepspeed_config"] = str(deepspeed)
    return Job(
        own=own,
        typed=argv,
        script=script,
        settings={name: one_spelling(value) for name, value in sorted(compared.items()) if name not in _NOT_COMPARED},
        files=_named_files(settings),
        output=Path(settings.get("output_dir") or "runs"),
        config_file=path,
        processes=whole("num_processes", options.num_processes or launched.get("num_processes") or 0, path),
        nodes=nodes,
        uses_gpus=not launched.get("use_cpu", False),
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
    sections = [section for task in config.tasks().values() for section in config.sections_of(task).values()]
    settings = {field.name for section in sections for field in dataclasses.fields(section)}
    recipe = set(re.findall(r"\w+", script.read_text(encoding="utf-8", errors="replace"))) if script else set()
    if unknown := [name for name in given if name not in settings | recipe]:
        options = {"peers", "token", "timeout", "json", *relaunch.OPTIONS}
        listed = "; ".join(f"--{name}{did_you_mean(name, settings | options)}" for name in unknown)
        raise UserError(f"neither an option of toolkit doctor nor a setting of a recipe: {listed}")


def _texts(values: object) -> dict[str, str]:
    """Of what a YAML file holds, or options: the names and values, where there are any."""
    known = values if isinstance(values, dict) else {}
    return {str(name): str(value) for name, value in known.items() if value is not None}


def _found(name: object, script: Path | None, folder: str) -> Path | None:
    return relaunch.find_file(str(name), str(script or "recipe.py"), folder) if name else None


def _nodes(
    listed: str | None, options: argparse.Namespace, launched: Mapping[str, Any], path: Path, env: Mapping[str, str]
) -> Nodes:
    if not listed:
        return find_nodes(vars(options), launched, path, env)
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if len(names) == 1:
        here = ", ".join(reachable_addresses())
        raise UserError(f"--peers names {names[0]} alone: name all machines, this one too (its addresses: {here})")
    return find_nodes(
        {**vars(options), "machines": ",".join(names)}, {**launched, "num_machines": len(names)}, path, env
    )


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
    return "toolkit doctor " + re.sub(r"(--machine_rank[ =])\d+", rf"\g<1>{rank}", shlex.join(job.typed))


def line_to_start(job: Job) -> str:
    """`accelerate launch ...` for what was looked at; empty where no recipe was named."""
    if job.script is None:
        return ""
    words = _typed(job, {"--timeout", "--json"})
    words.remove(str(next(word for word in words if Path(word) == job.script)))
    words = [re.sub("^--peers", "--machines", word) for word in words]
    more = ["--config_file", "accelerate_configs/2node.yaml"] if job.nodes.count > 1 and not job.config_file else []
    return shlex.join(["accelerate", "launch", str(job.script), *words, *more])


def _typed(job: Job, without: Collection[str]) -> list[str]:
    """The arguments without some options."""
    kept, words = [], iter(job.typed)
    for word in words:
        if word.partition("=")[0] not in without:
            kept.append(word)
        elif "=" not in word and word != "--json":
            next(words, "")
    return kept
