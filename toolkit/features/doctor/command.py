"""Runs the checks of `toolkit doctor` and prints their findings."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from toolkit.errors import UserError, first_line, printable
from toolkit.features.doctor import devices, host, peers
from toolkit.features.doctor.finding import Areas, Finding, report, summary
from toolkit.features.doctor.job import Job, parse
from toolkit.launch.failure import INTERRUPTED
from toolkit.utils.log import logger
from toolkit.utils.timeouts import call_with_timeout

_CHECK_SECONDS = 35.0
"""Timeout of a check: importing torch from a busy network file system takes up to 30 s."""


def run(words: Sequence[str]) -> NoReturn:
    """Exits with 0 if nothing failed, 1 if something failed or the command line is wrong, 130 after Ctrl-C.

    It prints errors without `launch.run`, which is silent on ranks other than 0: the shell may have a launcher's RANK.
    """
    try:
        code = _check(parse(words, os.environ))
    except UserError as error:
        logger.error(f"error: {error}")
        code = 1
    except KeyboardInterrupt:
        logger.error("interrupted")
        code = INTERRUPTED
    sys.stderr.flush()
    os._exit(code)  # threads may hang in a driver, and destroying a broken process group may hang


def _check(job: Job) -> int:
    out = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)  # NCCL_DEBUG writes to stdout
    os.environ["PYTHONSAFEPATH"] = "1"  # so that collect_env's `python -m pip` imports nothing from this folder
    machine, as_json = printable(socket.gethostname(), 100), job.options.json
    hardware, areas = check_machine(job)
    output: dict[str, Any] = {"host": machine, "environment": hardware.environment}
    if not as_json:
        print(f"{machine}\n\n{report(areas)}\n", file=out, flush=True)
    if job.nodes.count > 1:
        between, output["allreduce"] = peers.check(job, uses_nccl=bool(hardware.nccl) and not job.use_cpu)
        if not as_json:
            print(f"between the machines\n\n{report(between)}\n", file=out, flush=True)
        areas |= between
    findings = [{"area": area, **asdict(finding)} for area, group in areas.items() for finding in group]
    levels = [finding["level"] for finding in findings]
    output |= {"ok": "fail" not in levels, "findings": findings}
    print(json.dumps(output, ensure_ascii=False) if as_json else summary(levels), file=out, flush=True)
    return 0 if output["ok"] else 1


def check_machine(job: Job) -> tuple[devices.Devices, Areas]:
    """Takes about as long as the import of torch; a check that raises or times out becomes a note."""
    env, install = dict(os.environ), host.install_command("torch")
    hardware = devices.Devices()
    try:
        hardware = call_with_timeout(_CHECK_SECONDS, devices.query_devices)
        areas = {"devices": list(devices.check(hardware, env, install))}
    except Exception as error:
        text = f"torch cannot be imported: {type(error).__name__}: {printable(first_line(error))}"
        areas = {"devices": [Finding("torch", "fail", text, install)]}
    checks: dict[str, Iterator[Finding]] = {
        "files": host.check_files(job.files),
        "versions": host.check_versions(),
        "host": host.check_disk(Path(job.options.output_dir or "runs")),
        "builds": host.check_builds(env),
        "shell": host.check_shell(env),
        "network": host.check_interfaces(job.nodes),
    }
    for area, check in checks.items():
        try:
            areas[area] = call_with_timeout(_CHECK_SECONDS, partial(list, check))
        except Exception as error:
            areas[area] = [Finding(area, "note", f"could not be checked: {printable(first_line(error))}")]
    return hardware, areas
