"""Runs the checks of `toolkit doctor` and prints their findings, each with its remedy."""

from __future__ import annotations

import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

from toolkit.errors import first_line, printable
from toolkit.features.doctor import machine, network
from toolkit.features.doctor.machine import Finding
from toolkit.launch.machines import find_machines
from toolkit.utils.timeouts import call_with_timeout

_CHECK_SECONDS = 60.0
"""Of one check: importing torch from a busy network file system takes up to 30 s."""


def run(options: Namespace) -> None:
    """Exits with 0 if nothing failed, with 1 if something did."""
    checks: list[Callable[[], Iterable[Finding]]] = [
        machine.check_gpus,
        machine.check_shared_memory,
        lambda: machine.check_disk(Path(options.output_dir)),
    ]
    if options.main_process_ip:
        config = {"num_machines": options.num_machines}
        machines = find_machines(vars(options), config, Path("this line"), os.environ)
        checks.append(lambda: network.check(machines, options.timeout))
    print(printable(socket.gethostname(), 100), flush=True)
    levels = []
    for check in checks:
        for finding in _findings(check, _CHECK_SECONDS + 2 * options.timeout):
            levels.append(finding.level)
            print(f"  {finding.level:<4}  {finding.name:<13}  {finding.text}")
            if finding.remedy:
                print(f"  {'':<4}  {'':<13}  -> {finding.remedy}")
    print(f"failures: {levels.count('FAIL')}, warnings: {levels.count('warn')}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int("FAIL" in levels))  # a thread may hang in a driver, or in a broken process group


def _findings(check: Callable[[], Iterable[Finding]], seconds: float) -> list[Finding]:
    """A check that raises or times out becomes a note."""
    try:
        return call_with_timeout(seconds, lambda: list(check()))
    except Exception as error:
        why = f"could not be checked: {printable(first_line(error))}"
        return [Finding("doctor", "note", why)]
