"""`toolkit doctor` from beginning to end."""

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
from toolkit.features.doctor import devices, host, job, network, peers, versions
from toolkit.features.doctor.finding import Finding, report, summary
from toolkit.features.doctor.job import Job
from toolkit.launch.failure import INTERRUPTED
from toolkit.utils.log import logger
from toolkit.utils.timeouts import call_with_timeout

_CHECK_SECONDS = 35.0
"""To import torch: from a busy network file system it can take that long."""


def run(words: Sequence[str]) -> NoReturn:
    """Ends the process with 0 where nothing failed, 1 where something did or the line makes no sense, 130 interrupted.

    It prints its errors itself: with a launcher's variables left in the shell `launch.run` may take it for rank 3,
    which is silent.
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
    os._exit(code)  # threads may hang in a driver, and a process group that is broken when it is taken down


def _examine(line: Job) -> int:
    out = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)  # NCCL_DEBUG writes to stdout
    os.environ["PYTHONSAFEPATH"] = "1"  # collect_env starts `python -m pip`: not a file of the current folder
    machine, nodes, as_json = printable(socket.gethostname(), 100), line.nodes, line.options.json
    hardware, findings = look_at_machine(line)
    output: dict[str, Any] = {"host": machine, "environment": hardware.environment}
    if not as_json:
        print(f"{machine}\n\n{report(findings)}\n", file=out, flush=True)
    if nodes.count > 1:
        lines = {rank: job.line_elsewhere(line, rank) for rank in range(nodes.count)}
        uses_nccl = bool(hardware.nccl) and not line.use_cpu
        script, seconds = str(line.script or ""), line.options.timeout
        together, output["allreduce"] = peers.check(nodes, script, seconds, uses_nccl, lines)
        if not as_json:
            print(f"the machines together\n\n{report(together)}\n", file=out, flush=True)
        findings += together
    failed = any(finding.level == "fail" for finding in findings)
    output |= {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
    text = json.dumps(output, ensure_ascii=False) if as_json else summary(findings, job.line_to_start(line))
    print(text, file=out, flush=True)
    return 1 if failed else 0


def look_at_machine(line: Job) -> tuple[devices.Devices, list[Finding]]:
    """Takes about as long as the import of torch; a check that breaks or does not end is a note."""
    env, install = dict(os.environ), versions.install_command("torch")
    hardware = devices.Devices()
    try:
        hardware = call_with_timeout(_CHECK_SECONDS, devices.look)
        findings = [*devices.check(hardware, env, install)]
    except Exception as error:
        text = f"torch cannot be imported: {type(error).__name__}: {printable(first_line(error))}"
        findings = [Finding("devices", "torch", "fail", text, install)]
    checks: dict[str, Iterator[Finding]] = {
        "files": host.check_files(line.files),
        "versions": versions.check(),
        "host": host.check_disk(Path(line.options.output_dir or "runs")),
        "builds": host.check_builds(env),
        "shell": host.check_shell(env),
        "network": network.check_interfaces(line.nodes),
    }
    for area, check in checks.items():
        try:
            findings += call_with_timeout(_CHECK_SECONDS, partial(list, check))
        except Exception as error:
            findings.append(Finding(area, area, "note", f"could not be checked: {printable(first_line(error))}"))
    return hardware, findings
