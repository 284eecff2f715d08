"""`toolkit doctor` from beginning to end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, NoReturn

from toolkit.errors import UserError
from toolkit.features.doctor import compare, data, devices, host, job, network, peers, torch_checks, versions
from toolkit.features.doctor.compare import Node
from toolkit.features.doctor.finding import Finding, last_line, report
from toolkit.features.doctor.job import Job
from toolkit.features.doctor.network import own_host
from toolkit.features.doctor.peers import Cluster
from toolkit.launch.failure import INTERRUPTED
from toolkit.utils.versions import comparable

_TORCH_SECONDS, _CHECKS_SECONDS = 30.0, 35.0
"""To import torch: from a busy network file system it can take that long."""
_MOST_FINDINGS = 50
_TOGETHER = ("machines", "links", "all-reduce")


def run(argv: Sequence[str]) -> NoReturn:
    """Ends the process with 0 where nothing failed, 1 where something did or the line cannot be meant, 130 interrupted.

    It says so itself: with a launcher's variables left in the shell `launch.run` may take it for rank 3, and be silent.
    """
    try:
        code = _examine(job.read(argv, os.environ))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.stderr.flush()
    os._exit(code)  # threads may hang in a driver, and a process group that is broken when it is taken down


def _examine(asked: Job) -> int:
    out = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)  # NCCL_DEBUG writes to stdout

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    seen: dict[str, Any] = {"files": {}, "torch": {"broken": "it was not imported"}}
    findings, cluster = run_checks(_checks(asked, seen)), Cluster()
    if not asked.own.json:
        say(f"{own_host()}\n\n{report(findings)}\n")
    if asked.nodes.count > 1:
        cluster, together = _look_around(asked, _describe(asked, seen, findings))
        if not asked.own.json:
            say(f"the machines together\n\n{report(together)}\n")
        findings = findings + together
    failed = any(finding.level == "fail" for finding in findings)
    if asked.own.json:
        say(json.dumps(_as_dict(findings, cluster, not failed), ensure_ascii=False))
    else:
        say(last_line(findings, job.line_to_start(asked)))
    return 1 if failed else 0


# --- this machine


def _checks(asked: Job, seen: dict[str, Any]) -> dict[str, Callable[[], list[Finding]]]:
    """Area -> what looks at it; all together they take about as long as importing torch."""
    nodes, env, found = asked.nodes, dict(os.environ), network.interfaces()

    def check_files() -> list[Finding]:
        seen["files"] = data.checksums(asked.files, min(asked.own.timeout, job.DEFAULT_TIMEOUT))
        return data.check(seen["files"])

    def check_devices() -> list[Finding]:
        driver = devices.ask_driver()
        seen["torch"] = torch_checks.in_time(_TORCH_SECONDS, torch_checks.see, lambda why: {"broken": why})
        return devices.check(driver, seen["torch"], env, versions.wanted("torch"))

    return {
        "files": check_files,
        "versions": lambda: versions.check(versions.requirements()),
        "devices": check_devices,
        "host": lambda: host.check(asked.output),
        "builds": lambda: host.check_builds(env),
        "shell": lambda: host.check_shell(env),
        "network": lambda: [network.check_port(nodes), *network.check_interfaces(nodes, found)],
        "machines": lambda: network.check_addresses(nodes, found) if nodes.count > 1 else [],
    }


def run_checks(checks: Mapping[str, Callable[[], list[Finding]]], seconds: float = _CHECKS_SECONDS) -> list[Finding]:
    """Runs all side by side; one that breaks or does not end is a note, and stops nothing."""

    def look(area: str) -> list[Finding]:
        def broken(why: str) -> list[Finding]:
            return [Finding(area, area, "note", f"could not be looked at: {why}")]

        return torch_checks.in_time(seconds, checks[area], broken)

    with ThreadPoolExecutor(len(checks)) as pool:
        return [finding for found in pool.map(look, checks) for finding in found]


# --- several machines


def _look_around(asked: Job, own: Node) -> tuple[Cluster, list[Finding]]:
    nodes, seconds = asked.nodes, asked.own.timeout
    lines = {rank: job.line_elsewhere(asked, rank) for rank in range(nodes.count)}
    token = os.environ.get("TOOLKIT_TOKEN") or f"doctor at port {nodes.port}"
    try:
        found = peers.meet(own, nodes, token, seconds, lines[0 if nodes.rank else 1])
        compared = compare.check(found.nodes) if len(found.nodes) > 1 else []
        return found, [*peers.check(found, nodes, lines, seconds), *compared]
    except peers.UNREADABLE as error:
        found = Cluster([own], fault=f"a machine sent what this one cannot read ({type(error).__name__})")
        return found, peers.check(found, nodes, lines, seconds)


def _describe(asked: Job, seen: Mapping[str, Any], findings: Sequence[Finding]) -> Node:
    """This machine."""
    torch, nodes = seen["torch"], asked.nodes
    nccl = torch.get("nccl") if asked.uses_gpus else None
    bad = [finding for finding in findings if finding.level in ("warn", "fail")]
    chosen, _ = network.chosen(nodes, network.interfaces())
    return Node(
        rank=nodes.rank,
        host=own_host(),
        address=chosen.address if chosen else nodes.address_of(nodes.rank),
        interface=chosen.name if chosen else "",
        facts={name: str(value or "not installed") for name, value in comparable(asked.script).items()},
        settings=asked.settings,
        files=seen["files"],
        devices=[f"{gpu['name']} {gpu['memory'] >> 30} GiB" for gpu in torch.get("devices") or ()],
        backend="" if torch.get("broken") else f"NCCL {nccl}" if nccl else "gloo",
        environment=host.variables(os.environ),
        processes=asked.processes // nodes.count,
        listens=not any(finding.name == "port" for finding in bad),
        findings=[asdict(finding) for finding in bad[:_MOST_FINDINGS]],
    )


def _as_dict(findings: Sequence[Finding], found: Cluster, well: bool) -> dict[str, Any]:
    hosts = {node.rank: node.host for node in found.nodes}
    named = [finding if finding.host or finding.area in _TOGETHER else replace(finding, host=own_host())
             for finding in findings]  # fmt: skip
    links = [
        {"from": hosts[one], "to": hosts.get(other, f"machine {other}"), **asdict(link)}
        for (one, other), link in sorted(found.links.items())
    ]
    reduced = {hosts[rank]: said for rank, said in found.reduced.items()}
    return {
        "host": own_host(),
        "ok": well,
        "findings": [asdict(finding) for finding in named],
        "machines": [asdict(node) for node in found.nodes],
        "links": links,
        "allreduce": {"not_tried": found.not_reduced or None, "machines": reduced},
    }
