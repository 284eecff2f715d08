"""`toolkit doctor`'s command line: the one that a run is started with, and the doctor's own options."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import config
from toolkit.errors import Parser, UserError, did_you_mean
from toolkit.launch import relaunch
from toolkit.launch.network import reachable_addresses
from toolkit.launch.nodes import Nodes, find_nodes
from toolkit.utils.plain_yaml import read_yaml

_LONGEST_TIMEOUT = 600.0
_FILES = ("train_file", "validation_file", "test_file", "label_names_file", "label_corrections", "deepspeed_config")
_FOLDERS = ("dataset_name", "model_name_or_path")


@dataclass(frozen=True)
class Job:
    """A run, as this machine would start it."""

    timeout: float
    """Seconds that the machines wait for each other."""
    json: bool
    """Whether one JSON object is printed instead of text."""
    words: Sequence[str]
    """The command line."""
    script: Path | None
    files: dict[str, Path]
    """Setting -> the file or folder that it names, there or not."""
    output: Path
    config_file: Path | None
    nodes: Nodes


def _parser() -> argparse.ArgumentParser:
    """The doctor's own options; `read` parses launch options and settings."""
    parser = Parser(
        prog="toolkit doctor",
        usage="toolkit doctor [RECIPE.py] [SETTINGS.yaml] [--name value ...] [--config_file FILE | --peers A,B] "
        "[--timeout SECONDS] [--json]",
        description="Looks for what will keep a run from starting or working, on this machine and, with --peers or a "
        "config file of several machines, between them: type the same on each. It ends in seconds.",
        epilog="The line a run is started with works as it is, `toolkit doctor` for `accelerate launch`: "
        "--config_file, --num_processes, --machine_rank, --machines, --main_process_ip, --main_process_port. "
        "Exit codes: 0 nothing failed, 1 something did, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--peers", metavar="A,B", help="all machines' addresses, the first one first; as --machines")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="to wait for the other machines [30]"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def read(words: Sequence[str], env: Mapping[str, str]) -> Job:
    """Raises UserError for a line that no run could be started with."""
    own, others = _parser().parse_known_args(list(words))
    if not 1 <= own.timeout <= _LONGEST_TIMEOUT:
        raise UserError(f"--timeout {own.timeout:g}: give seconds from 1 to {_LONGEST_TIMEOUT:.0f}")
    options, rest = relaunch.split(others)
    script, yaml_file, settings = _split_settings(rest)
    if missing := next((path for path in (script, yaml_file) if path and not path.is_file()), None):
        raise UserError(f"there is no {missing} (looked in {Path.cwd()}): copy the same files to all machines")
    _refuse_unknown(settings, script)
    values = read_yaml(yaml_file) if yaml_file else {}
    in_yaml = {name: str(value) for name, value in values.items()} if isinstance(values, dict) else {}
    settings = {**in_yaml, **settings}
    path = _find(options.config_file, script, "accelerate_configs")
    launch_config = relaunch.read_config(path) if path else {}
    section = launch_config.get("deepspeed_config")
    in_file = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if deepspeed := _find(options.deepspeed_config or in_file, script, "ds_configs"):
        settings["deepspeed_config"] = str(deepspeed)
    if own.peers:
        options.machines = own.peers
        names = [name for name in own.peers.split(",") if name.strip()]
        if len(names) == 1:
            here = ", ".join(reachable_addresses())
            raise UserError(f"--peers names {names[0]} alone: name all machines, this one too (its addresses: {here})")
        launch_config = {**launch_config, "num_machines": len(names)}
    nodes = find_nodes(vars(options), launch_config, path or Path("this line"), env)
    output = Path(settings.get("output_dir") or "runs")
    return Job(own.timeout, own.json, words, script, _named_files(settings), output, path, nodes)


def _split_settings(rest: Sequence[str]) -> tuple[Path | None, Path | None, dict[str, str]]:
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


def _refuse_unknown(settings: Mapping[str, str], script: Path | None) -> None:
    """A file named by a mistyped setting would not be checked. A recipe may have settings of its own."""
    sections = [section for task in config.TASKS.values() for section in config.sections_of(task).values()]
    known = {field.name for section in sections for field in dataclasses.fields(section)}
    recipe = set(re.findall(r"\w+", script.read_text(encoding="utf-8", errors="replace"))) if script else set()
    if unknown := [name for name in settings if name not in known | recipe]:
        options = {"peers", "timeout", "json", *relaunch.OPTIONS}
        listed = "; ".join(f"--{name}{did_you_mean(name, known | options)}" for name in unknown)
        raise UserError(f"neither an option of toolkit doctor nor a setting of a recipe: {listed}")


def _find(name: str | None, script: Path | None, folder: str) -> Path | None:
    return relaunch.find_file(str(name), str(script or "recipe.py"), folder) if name else None


def _named_files(settings: Mapping[str, str]) -> dict[str, Path]:
    """A model or a data set that is neither a path nor there is the hub's."""
    paths = {name: Path(settings[name]).expanduser() for name in (*_FILES, *_FOLDERS) if settings.get(name)}
    return {
        name: path
        for name, path in paths.items()
        if name in _FILES or path.exists() or settings[name].startswith((".", "/", "~"))
    }


def line_elsewhere(job: Job, rank: int) -> str:
    """What to type on machine `rank`: the same as here, with its number where this line has one."""
    return "toolkit doctor " + re.sub(r"(--machine_rank[ =])\d+", rf"\g<1>{rank}", shlex.join(job.words))


def line_to_start(job: Job) -> str:
    """`accelerate launch ...` for this line; empty where it names no recipe."""
    if job.script is None:
        return ""
    _, words = _parser().parse_known_args([re.sub("^--peers", "--machines", word) for word in job.words])
    words.remove(str(next(word for word in words if Path(word) == job.script)))
    more = ["--config_file", "accelerate_configs/2node.yaml"] if job.nodes.count > 1 and not job.config_file else []
    return shlex.join(["accelerate", "launch", str(job.script), *words, *more])
