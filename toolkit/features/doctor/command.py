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
from toolkit.features.doctor import devices, host, job, peers, versions
from toolkit.features.doctor.finding import Finding, in_area, report, summary
from toolkit.features.doctor.job import Job
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
        code = _examine(job.read(words, os.environ))
    except UserError as error:
        logger.error(f"error: {error}")
        code = 1
    except KeyboardInterrupt:
        logger.error("interrupted")
        code = INTERRUPTED
    sys.stderr.flush()
    os._exit(code)  # threads may hang in a driver, and destroying a broken process group may hang


def _examine(line: Job) -> int:
    out = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)  # NCCL_DEBUG writes to stdout
    os.environ["PYTHONSAFEPATH"] = "1"  # so that collect_env's `python -m pip` imports nothing from this folder
    machine, nodes, as_json = printable(socket.gethostname(), 100), line.nodes, line.options.json
    hardware, findings = look_at_machine(line)
    output: dict[str, Any] = {"host": machine, "environment": hardware.environment}
    if not as_json:
        print(f"{machine}\n\n{report(findings)}\n", file=out, flush=True)
    if nodes.count > 1:
        lines = {rank: job.line_elsewhere(line, rank) for rank in range(nodes.count)}
        uses_nccl = bool(hardware.nccl) and not line.use_cpu
        script, seconds = str(line.script or ""), line.options.timeout
        peer_findings, output["allreduce"] = peers.check(nodes, script, seconds, uses_nccl, lines)
        peer_findings = in_area("machines", peer_findings)
        if not as_json:
            print(f"between the machines\n\n{report(peer_findings)}\n", file=out, flush=True)
        findings += peer_findings
    failed = any(finding.level == "fail" for finding in findings)
    output |= {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
    text = json.dumps(output, ensure_ascii=False) if as_json else summary(findings, job.line_to_start(line))
    print(text, file=out, flush=True)
    return 1 if failed else 0


def look_at_machine(line: Job) -> tuple[devices.Devices, list[Finding]]:
    """Takes about as long as the import of torch; a check that raises or times out becomes a note."""
    env, install = dict(os.environ), versions.install_command("torch")
    hardware = devices.Devices()
    try:
        hardware = call_with_timeout(_CHECK_SECONDS, devices.look)
        findings = in_area("devices", devices.check(hardware, env, install))
    except Exception as error:
        text = f"torch cannot be imported: {type(error).__name__}: {printable(first_line(error))}"
        findings = [Finding("torch", "fail", text, install, "devices")]
    checks: dict[str, Iterator[Finding]] = {
        "files": host.check_files(line.files),
        "versions": versions.check(),
        "host": host.check_disk(Path(line.options.output_dir or "runs")),
        "builds": host.check_builds(env),
        "shell": host.check_shell(env),
        "network": host.check_interfaces(line.nodes),
    }
    for area, check in checks.items():
        try:
            findings += in_area(area, call_with_timeout(_CHECK_SECONDS, partial(list, check)))
        except Exception as error:
            findings.append(Finding(area, "note", f"could not be checked: {printable(first_line(error))}", area=area))
    return hardware, findings
