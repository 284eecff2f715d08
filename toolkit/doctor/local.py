"""All checks of this machine, side by side, so that the slowest one decides how long they take."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from toolkit.cache import cache_folder
from toolkit.doctor import builds, devices, network, shell, versions
from toolkit.doctor.finding import Finding, plain
from toolkit.doctor.job import Job
from toolkit.doctor.torch_process import TorchProcess

TORCH_SECONDS = 30.0
"""To import torch: from a busy network file system it can take that long."""
_SECONDS = 35.0
Check = Callable[[], list[Finding]]


def checks(job: Job, torch: TorchProcess, others: Sequence[str]) -> dict[str, Check]:
    """Area -> what looks at it. `others` are the addresses of the other machines."""
    env = dict(os.environ)
    machines = job.machines
    own = machines.addresses[machines.rank] if machines and machines.rank < len(machines.addresses) else None

    def host() -> list[Finding]:
        from toolkit.doctor import host  # it needs Unix

        return host.check(job.output, cache_folder())

    def of_devices() -> list[Finding]:
        wanted = next((line[5:] for line in versions.requirements()[versions.OURS] if line.startswith("torch")), "")
        return devices.check(devices.ask_driver(), torch.sees(TORCH_SECONDS), env, wanted.split(";")[0])

    return {
        "versions": versions.check,
        "devices": of_devices,
        "host": host,
        "builds": lambda: builds.check(env),
        "shell": lambda: shell.check(env, network.interface_names(), job.config_file is not None),
        "network": lambda: [
            *network.check_interfaces(others, own, env),
            *network.check_firewall(job.port, others),
        ],
    }


def run_checks(todo: dict[str, Check], seconds: float = _SECONDS) -> list[Finding]:
    """Every check in a thread of its own; one that breaks or does not end is a note, and stops nothing."""
    found: dict[str, list[Finding]] = {}

    def run(area: str, check: Check) -> None:
        try:
            found[area] = check()
        except Exception as error:
            text = plain(f"could not be looked at: {type(error).__name__}: {error}")
            found[area] = [Finding(area, area, "note", text)]

    threads = {area: threading.Thread(target=run, args=(area, check), daemon=True) for area, check in todo.items()}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [Finding(area, area, "note", f"no answer in {seconds:.0f} s") for area in todo if area not in found]
    return [*(finding for area in todo for finding in found.get(area, [])), *late]
