"""`toolkit doctor` from beginning to end."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn, TextIO

from toolkit.cache import cache_folder
from toolkit.doctor import compare, data, devices, host, job, network, peers, torch_checks, versions
from toolkit.doctor.compare import Node
from toolkit.doctor.finding import Finding, last_line, report, table
from toolkit.doctor.job import Job
from toolkit.doctor.network import own_host
from toolkit.doctor.peers import Cluster
from toolkit.errors import UserError
from toolkit.launch.failure import INTERRUPTED
from toolkit.launch.nodes import Nodes
from toolkit.versions import comparable

_TORCH_SECONDS, _CHECKS_SECONDS = 30.0, 35.0
"""To import torch: from a busy network file system it can take that long."""
_MOST_FINDINGS = 50
_TOGETHER = ("machines", "links", "all-reduce")


def run(argv: Sequence[str]) -> NoReturn:
    """Ends the process with 0 where nothing failed, 1 where something did or the line cannot be meant, 130 interrupted.

    It says so itself: with a launcher's variables left in the shell `launch.run` may take it for rank 3, and be silent.
    """
    try:
        asked = job.read(argv, os.environ)
        out = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
        os.dup2(2, 1)  # NCCL_DEBUG writes to stdout
        code = _Doctor(asked, out).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.stderr.flush()
    os._exit(code)  # threads may hang in a driver, and a process group that is broken when it is taken down


class _Doctor:
    def __init__(self, asked: Job, out: TextIO) -> None:
        self.job, self.out = asked, out
        self.findings: list[Finding] = []
        self.files: dict[str, dict[str, Any]] = {}
        self.torch: dict[str, Any] = {"broken": "it was not imported"}
        self.cluster = Cluster()

    def run(self) -> int:
        machines = self.job.machines
        self.findings = run_checks(self._checks(machines))
        self._say(own_host(), self.findings)
        if machines is not None and not any(map(network.is_this_machine, network.other_addresses(machines))):
            said = len(self.findings)
            self._look_around(machines)
            self._say("the machines together", self.findings[said:])
        failed = any(finding.level == "fail" for finding in self.findings)
        if self.job.as_json:
            print(json.dumps(self._as_dict(not failed), ensure_ascii=False), file=self.out, flush=True)
        else:
            print(last_line(self.findings, job.line_to_start(self.job)), file=self.out, flush=True)
        return 1 if failed else 0

    # --- this machine

    def _checks(self, machines: Nodes | None) -> dict[str, Callable[[], list[Finding]]]:
        """Area -> what looks at it; all together they take about as long as importing torch."""
        asked, env, found = self.job, dict(os.environ), network.interfaces()
        return {
            "files": self._check_files,
            "versions": versions.check,
            "devices": self._check_devices,
            "host": lambda: host.check(asked.output, cache_folder()),
            "builds": lambda: host.check_builds(env),
            "shell": lambda: host.check_shell(env, asked.config_file is not None),
            "network": lambda: [
                network.check_port(asked.port, machines is not None),
                *network.check_interfaces(machines, found),
            ],
            "machines": lambda: network.check_addresses(machines, found) if machines else [],
        }

    def _check_files(self) -> list[Finding]:
        self.files = data.checksums(self.job.files, min(self.job.timeout, job.DEFAULT_TIMEOUT))
        return data.check(self.files)

    def _check_devices(self) -> list[Finding]:
        driver = devices.ask_driver()
        self.torch = torch_checks.see(_TORCH_SECONDS)
        needed = next((line[5:] for line in versions.requirements()[versions.OURS] if line.startswith("torch")), "")
        return devices.check(driver, self.torch, os.environ, needed.split(";")[0])

    # --- several machines

    def _look_around(self, machines: Nodes) -> None:
        lines = {rank: job.line_elsewhere(self.job, rank) for rank in range(machines.count)}
        token = self.job.token or f"doctor at port {machines.port}"
        found = self.cluster = peers.meet(
            machines,
            token,
            self.job.timeout,
            lambda own: self._describe(machines, own),
            lines[0 if machines.rank else 1],
        )
        self.findings += found.told
        self.findings += peers.check(found, machines, lines, self.job.timeout)
        self.findings += compare.check(found.nodes) if len(found.nodes) > 1 else []

    def _describe(self, machines: Nodes, address: str) -> Node:
        """This machine; `address` is its own on the way to the others."""
        way = next((found for found in network.interfaces() if found.address == address), None)
        gpus = self.torch.get("devices") or ()
        nccl = self.torch.get("nccl") if self.job.uses_gpus else None
        bad = [finding for finding in self.findings if finding.level in ("warn", "fail")]
        return Node(
            rank=machines.rank,
            host=own_host(),
            address=address or (machines.addresses[machines.rank] if machines.rank < len(machines.addresses) else ""),
            interface=way.name if way else "",
            mtu=way.mtu if way else 0,
            facts={name: str(value or "not installed") for name, value in comparable(self.job.script).items()},
            settings=self.job.settings,
            files=self.files,
            devices=[f"{gpu['name']} {gpu['memory'] >> 30} GiB" for gpu in gpus],
            driver=next((found.text for found in self.findings if (found.name, found.level) == ("driver", "ok")), ""),
            backend="" if self.torch.get("broken") else f"NCCL {nccl}" if nccl else "gloo",
            environment=host.variables(os.environ),
            processes=(self.job.processes or 0) // machines.count,
            listens=not any(finding.name == "port" for finding in bad),
            findings=[finding.as_dict() for finding in bad[:_MOST_FINDINGS]],
        )

    # --- saying

    def _say(self, heading: str, findings: Sequence[Finding]) -> None:
        text = f"{heading}\n\n{report(findings)}\n"
        if len(self.cluster.nodes) > 1:
            text += f"\n{table(compare.rows(self.cluster.nodes))}\n"
        if not self.job.as_json:
            print(text, file=self.out, flush=True)

    def _as_dict(self, well: bool) -> dict[str, Any]:
        found, hosts = self.cluster, {node.rank: node.host for node in self.cluster.nodes}
        named = [finding if finding.host or finding.area in _TOGETHER else replace(finding, host=own_host())
                 for finding in self.findings]  # fmt: skip
        return {
            "host": own_host(),
            "ok": well,
            "findings": [finding.as_dict() for finding in named],
            "machines": [node.as_dict() for node in found.nodes],
            "links": [
                {"from": hosts[one], "to": hosts.get(other, f"machine {other}"), **asdict(link)}
                for (one, other), link in sorted(found.links.items())
            ],
            "allreduce": {
                "not_tried": found.not_reduced or None,
                "machines": {hosts[rank]: said for rank, said in found.reduced.items()},
            },
        }


def run_checks(checks: dict[str, Callable[[], list[Finding]]], seconds: float = _CHECKS_SECONDS) -> list[Finding]:
    """Runs all side by side; one that breaks or does not end is a note, and stops nothing."""
    found: dict[str, list[Finding]] = {}

    def look(area: str) -> None:
        def broken(why: str) -> list[Finding]:
            return [Finding(area, area, "note", f"could not be looked at: {why}")]

        found[area] = torch_checks.in_time(seconds, checks[area], broken)

    threads = [threading.Thread(target=look, args=(area,), daemon=True) for area in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [finding for area in checks for finding in found[area]]
