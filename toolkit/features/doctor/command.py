"""Runs the checks of `toolkit doctor` and prints their findings."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from toolkit.errors import Parser, UserError, did_you_mean, first_line, printable
from toolkit.features.doctor import devices, host, peers
from toolkit.features.doctor.finding import Finding, report, summary
from toolkit.launch import options as launch_options
from toolkit.launch.machines import Machines, find_machines
from toolkit.launch.signals import INTERRUPTED
from toolkit.utils.log import logger
from toolkit.utils.timeouts import call_with_timeout

_CHECK_SECONDS = 35.0
"""Of one check: importing torch from a busy network file system takes up to 30 s."""
_LONGEST_TIMEOUT = 600.0


def run(words: Sequence[str]) -> NoReturn:
    """Exits with 0 if nothing failed, 1 if something did or the command line is wrong, 130 after
    Ctrl-C.

    It prints errors without `launch.run`, which is silent on ranks other than 0: the shell may have
    a launcher's RANK.
    """
    try:
        code = _check(words)
    except UserError as error:
        logger.error(f"error: {error}")
        code = 1
    except KeyboardInterrupt:
        logger.error("interrupted")
        code = INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may hang in a driver, and destroying a broken process group may hang


def _parser() -> Parser:
    parser = Parser(
        prog="toolkit doctor",
        description="Finds problems that keep a run from starting or working, on this machine and, with --peers or a "
        "config file of several machines, between them: type the same command on each. It takes seconds.",
        epilog="Launch options as after a recipe: --config_file, --machine_rank, --main_process_ip, "
        "--main_process_port. Exit codes: 0 nothing failed, 1 something did, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--peers", metavar="A,B", help="all machines' addresses, the first one first"
    )
    parser.add_argument("--output_dir", default="runs", help="where a run would write [runs]")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="to wait for the others [30]"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def _machines(peers_option: str | None, words: Sequence[str]) -> tuple[Machines, bool]:
    """(the machines, whether a run would compute on CPUs), from launch options."""
    options, rest = launch_options.split_arguments(words)
    if rest:
        hint = did_you_mean(
            rest[0].lstrip("-"), [*launch_options.OPTIONS, "peers", "timeout", "output_dir"]
        )
        raise UserError(f"toolkit doctor takes no settings of a recipe: {rest[0]}{hint}")
    path, config = Path("this line"), dict[str, Any]()
    if options.config_file:
        path = launch_options.find_file(options.config_file, "recipe.py", "accelerate_configs")
        config = launch_options.read_config(path)
    if peers_option:
        options.main_process_ip, *others = peers_option.split(",")
        config["num_machines"] = 1 + len(others)
    return find_machines(vars(options), config, path, os.environ), bool(config.get("use_cpu"))


def _check(words: Sequence[str]) -> int:
    options, rest = _parser().parse_known_args(list(words))
    if not 1 <= options.timeout <= _LONGEST_TIMEOUT:
        raise UserError(
            f"--timeout {options.timeout:g}: give seconds from 1 to {_LONGEST_TIMEOUT:.0f}"
        )
    machines, use_cpu = _machines(options.peers, rest)
    out = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)  # NCCL_DEBUG writes to stdout
    os.environ["PYTHONSAFEPATH"] = (
        "1"  # so that collect_env's `python -m pip` imports nothing from this folder
    )
    hardware = call_with_timeout(_CHECK_SECONDS, devices.query_devices)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "devices": partial(devices.check, hardware, os.environ),
        "versions": host.check_versions,
        "host": partial(host.check_disk, Path(options.output_dir)),
        "builds": partial(host.check_builds, os.environ),
        "shell": partial(host.check_shell, os.environ),
        "network": partial(host.check_interfaces, machines),
    }
    if machines.count > 1:
        uses_nccl = bool(hardware.nccl) and not use_cpu
        checks["between the machines"] = partial(peers.check, machines, options.timeout, uses_nccl)
    areas = {area: _findings(area, check, options.timeout) for area, check in checks.items()}
    name, levels = (
        printable(socket.gethostname(), 100),
        [each.level for group in areas.values() for each in group],
    )
    failed = "fail" in levels
    if options.json:
        findings = [
            {"area": area, **asdict(each)} for area, group in areas.items() for each in group
        ]
        facts = {
            "host": name,
            "ok": not failed,
            "findings": findings,
            "environment": hardware.environment,
        }
        print(json.dumps(facts, ensure_ascii=False), file=out, flush=True)
    else:
        print(f"{name}\n\n{report(areas)}\n\n{summary(levels)}", file=out, flush=True)
    return int(failed)


def _findings(area: str, check: Callable[[], Iterable[Finding]], timeout: float) -> list[Finding]:
    """A check that raises or times out becomes a note."""
    seconds = _CHECK_SECONDS + 2 * timeout
    try:
        return call_with_timeout(seconds, lambda: list(check()))
    except Exception as error:
        return [Finding(area, "note", f"could not be checked: {printable(first_line(error))}")]
