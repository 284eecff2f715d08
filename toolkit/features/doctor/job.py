"""The command line of `toolkit doctor`: that of a run, and a few options."""

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
from toolkit.launch.nodes import Nodes, find_nodes
from toolkit.utils.files import read_yaml

_LONGEST_TIMEOUT = 600.0
_FILES = ("train_file", "validation_file", "test_file", "label_names_file", "label_corrections")
_FOLDERS = ("dataset_name", "model_name_or_path")


@dataclass(frozen=True)
class Job:
    """A parsed command line."""

    options: argparse.Namespace
    """`timeout` (of the rendezvous, in seconds), `json`, and the settings that name files."""
    words: Sequence[str]
    """The command line."""
    script: Path | None
    files: dict[str, Path]
    """Setting -> path, which need not exist."""
    nodes: Nodes
    use_cpu: bool

    def command_for(self, rank: int) -> str:
        """The command to type on machine `rank`: this one, with its --machine_rank."""
        return "toolkit doctor " + re.sub(r"(--machine_rank[ =])\d+", rf"\g<1>{rank}", shlex.join(self.words))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="toolkit doctor",
        usage="toolkit doctor [RECIPE.py] [SETTINGS.yaml] [--name value ...] [--config_file FILE | --peers A,B] "
        "[--timeout SECONDS] [--json]",
        description="Finds problems that keep a run from starting or working, on this machine and, with --peers or a "
        "config file of several machines, between them: type the same command on each. It takes seconds.",
        epilog="Takes the command line of a run, with `toolkit doctor` in place of `accelerate launch`: "
        "--config_file, --num_processes, --machine_rank, --machines, --main_process_ip, --main_process_port. "
        "Exit codes: 0 nothing failed, 1 something did, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--peers", metavar="A,B", help="all machines' addresses, the first one first; as --machines")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="to wait for the others [30]")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    for name in (*_FILES, *_FOLDERS, "output_dir"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser


def parse(words: Sequence[str], env: Mapping[str, str]) -> Job:
    """Raises UserError for a command line that cannot start a run."""
    options, rest = _parser().parse_known_args(list(words))
    if not 1 <= options.timeout <= _LONGEST_TIMEOUT:
        raise UserError(f"--timeout {options.timeout:g}: give seconds from 1 to {_LONGEST_TIMEOUT:.0f}")
    launch_options, rest = relaunch.split_arguments(rest)
    script, settings_file = (_first_file(rest, suffixes) for suffixes in ((".py",), (".yaml", ".yml")))
    _refuse_unknown([word for word in rest if word.startswith("--")], script)
    in_yaml = read_yaml(settings_file) if settings_file else {}
    for name, value in in_yaml.items() if isinstance(in_yaml, dict) else ():
        if getattr(options, name, "") is None and value is not None:  # the command line wins
            setattr(options, name, str(value))
    path = _find(launch_options.config_file, script, "accelerate_configs")
    launch_config = relaunch.read_config(path) if path else {}
    section = launch_config.get("deepspeed_config")
    in_section = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    deepspeed = _find(launch_options.deepspeed_config or in_section, script, "ds_configs")
    if options.peers:
        launch_options.machines = options.peers
        launch_config = {**launch_config, "num_machines": options.peers.count(",") + 1}
    nodes = find_nodes(vars(launch_options), launch_config, path or Path("this line"), env)
    files = _named_files(vars(options)) | ({"deepspeed_config": deepspeed} if deepspeed else {})
    return Job(options, words, script, files, nodes, bool(launch_config.get("use_cpu")))


def _first_file(words: Sequence[str], suffixes: tuple[str, ...]) -> Path | None:
    """The recipe, or its settings file. Raises UserError if it does not exist."""
    path = next((Path(word) for word in words if word.endswith(suffixes) and not word.startswith("-")), None)
    if path and not path.is_file():
        raise UserError(f"there is no {path} (looked in {Path.cwd()}): copy the same files to all machines")
    return path


def _refuse_unknown(words: Sequence[str], script: Path | None) -> None:
    """A file behind a misspelt setting would not be checked. Any word in the recipe may be one of its settings."""
    sections = [section for task in config.tasks().values() for section in config.sections_of(task).values()]
    known = {field.name for section in sections for field in dataclasses.fields(section)}
    recipe = re.findall(r"\w+", script.read_text(encoding="utf-8", errors="replace")) if script else []
    for word in words:
        name = word[2:].partition("=")[0].replace("-", "_")
        if name not in known.union(recipe):
            hint = did_you_mean(name, {*known, *relaunch.OPTIONS, "peers", "timeout", "json"})
            raise UserError(f"neither an option of toolkit doctor nor a setting of a recipe: --{name}{hint}")


def _find(name: str | None, script: Path | None, folder: str) -> Path | None:
    return relaunch.find_file(str(name), str(script or "recipe.py"), folder) if name else None


def _named_files(settings: Mapping[str, str]) -> dict[str, Path]:
    """Setting -> path; names of models and data sets on the hub are left out."""
    paths = {name: Path(settings[name]).expanduser() for name in (*_FILES, *_FOLDERS) if settings[name]}
    return {
        name: path
        for name, path in paths.items()
        if name in _FILES or path.exists() or settings[name].startswith((".", "/", "~"))
    }
