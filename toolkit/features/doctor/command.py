"""Runs the checks of `toolkit doctor` and prints their findings, each with its remedy."""

from __future__ import annotations

import os
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from toolkit.features.doctor import machine, network
from toolkit.features.doctor.machine import Finding
from toolkit.launch.machines import find_machines


def run(options: Namespace) -> None:
    """Exits with 0 if nothing failed, with 1 if something did. Raises UserError for options of
    several machines that do not fit."""
    print(socket.gethostname(), flush=True)
    levels = []
    for finding in _findings(options):
        levels.append(finding.level)
        print(f"  {finding.level:<4}  {finding.name:<13}  {finding.text}", flush=True)
        if finding.remedy:
            print(f"  {'':<4}  {'':<13}  -> {finding.remedy}", flush=True)
    print(f"failures: {levels.count('FAIL')}, warnings: {levels.count('warn')}")
    sys.stdout.flush()
    os._exit(int("FAIL" in levels))  # a thread may hang in a broken process group


def _findings(options: Namespace) -> Iterator[Finding]:
    yield from machine.check_gpus()
    yield from machine.check_shared_memory()
    yield machine.check_disk(Path(options.output_dir))
    if options.main_process_ip:
        config = {"num_machines": options.num_machines}
        machines = find_machines(vars(options), config, Path("this line"), os.environ)
        yield from network.check(machines, options.rendezvous_timeout)
