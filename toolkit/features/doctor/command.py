"""Runs the checks of `toolkit doctor` and prints their findings, each with its remedy."""

from __future__ import annotations

import json
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from toolkit.errors import UserError, first_line, printable
from toolkit.features.doctor import machine, network
from toolkit.features.doctor.machine import Finding
from toolkit.launch.machines import find_machines
from toolkit.utils.timeouts import call_with_timeout

_CHECK_SECONDS = 60.0
"""Of one check: importing torch from a busy network file system takes up to 30 s."""
_MARKS = {"ok": "ok", "note": "--", "warn": "!!", "fail": "FAIL"}


def run(options: Namespace) -> None:
    """Exits with 0 if nothing failed, with 1 if something did."""
    stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)  # NCCL_DEBUG writes to stdout
    checks: list[Callable[[], Iterable[Finding]]] = [
        machine.check_gpus,
        machine.check_shared_memory,
        partial(machine.check_disk, Path(options.output_dir)),
    ]
    if options.main_process_ip:
        checks.append(partial(_check_network, options))
    findings: list[Finding] = []
    for check in checks:
        findings += _findings(check, _CHECK_SECONDS + 2 * options.timeout)
    failed = any(finding.level == "fail" for finding in findings)
    host = printable(socket.gethostname(), 100)
    if options.json:
        facts = {"host": host, "ok": not failed, "findings": list(map(asdict, findings))}
        print(json.dumps(facts, ensure_ascii=False), file=stdout)
    else:
        print(host, *_lines(findings), sep="\n", file=stdout)
    stdout.flush()
    sys.stderr.flush()
    os._exit(int(failed))  # a thread may hang in a driver, or in a broken process group


def _check_network(options: Namespace) -> Iterable[Finding]:
    config = {"num_machines": options.num_machines}
    try:
        machines = find_machines(vars(options), config, Path("this line"), os.environ)
    except UserError as error:
        return [Finding("machines", "fail", str(error))]
    return network.check(machines, options.timeout)


def _findings(check: Callable[[], Iterable[Finding]], seconds: float) -> list[Finding]:
    """A check that raises or times out becomes a note."""
    try:
        return call_with_timeout(seconds, lambda: list(check()))
    except Exception as error:
        why = f"could not be checked: {printable(first_line(error))}"
        return [Finding("doctor", "note", why)]


def _lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, its remedy below it, and a summary."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        mark = _MARKS[finding.level]
        lines.append(f"  {mark:<4}  {finding.name:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"  {'':<4}  {'':<{width}}  -> {finding.remedy}")
    levels = [finding.level for finding in findings]
    failures, warnings = levels.count("fail"), levels.count("warn")
    return [*lines, f"failures: {failures}, warnings: {warnings}"]
