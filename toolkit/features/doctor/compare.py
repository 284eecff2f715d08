"""The machines side by side: what each says of itself, and what must not differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import listing, plain
from toolkit.features.doctor.finding import Finding
from toolkit.utils.units import size_text
from toolkit.utils.versions import differences, remedy

_CLOCK_SECONDS = 2.0
# each machine has its own, and may
_OWN_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Node:
    """One machine, as it describes itself."""

    rank: int
    host: str = ""
    address: str = ""
    """By which the others reach it."""
    interface: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    """Library -> version, and the digest of the code."""
    settings: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """See `data.checksums`."""
    devices: list[str] = field(default_factory=list)
    """The names of the GPUs torch sees, with their memory."""
    backend: str = ""
    """`NCCL 2.27.3` or `gloo`; empty where torch does not work."""
    environment: dict[str, str] = field(default_factory=dict)
    """NCCL's and gloo's variables."""
    processes: int = 0
    """Asked for on each machine; 0 where nothing was asked for."""
    listens: bool = True
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Its own warnings and failures."""
    clock_offset_seconds: float | None = None
    """What its clock shows more than machine 0's."""


def check(nodes: Sequence[Node]) -> list[Finding]:
    """Compares the machines that came."""
    checks = (_check_versions, _check_settings, _check_files, check_devices, _check_variables, _check_clocks)
    return [finding for check in checks for finding in check(nodes)]


def _all_names(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _check_versions(nodes: Sequence[Node]) -> list[Finding]:
    found = [(node.host, node.facts) for node in nodes]
    if unlike := differences(found):
        return [Finding("machines", "versions", "fail", plain(unlike), plain(remedy(found)))]
    text = f"the same Python, libraries and code ({nodes[0].facts.get('code', '?')}) on all {len(nodes)}"
    return [Finding("machines", "versions", "ok", text)]


def _check_settings(nodes: Sequence[Node]) -> list[Finding]:
    """What was typed, or is in the YAML file that was named; of files the content counts, not where they lie."""
    by_content = _all_names(node.files for node in nodes)
    names = [name for name in _all_names(node.settings for node in nodes) if name not in by_content]
    found = [(node.host, {f"--{name}": node.settings.get(name, "not given") for name in names}) for node in nodes]
    if unlike := differences(found):
        mend = "type the same line on all machines, with the same files of settings"
        return [Finding("machines", "settings", "fail", plain(unlike), mend)]
    return [Finding("machines", "settings", "ok", f"the same on all ({len(names)} compared)")] if names else []


def _check_files(nodes: Sequence[Node]) -> list[Finding]:
    """The content of what settings name; what is missing is the machine's own finding too."""
    found = []
    for name in _all_names(node.files for node in nodes):
        entries = {node.host: node.files.get(name, {}) for node in nodes}
        unlike = differences([(host, {name: entry.get("digest", "MISSING")}) for host, entry in entries.items()])
        if any("unread" in entry for entry in entries.values()):
            text = "could not be compared: it was not read to the end everywhere"
            found.append(Finding("machines", name, "note", text))
        elif unlike:
            found.append(_other_content(name, entries, unlike.removeprefix(f"{name} is ")))
        elif size := entries[nodes[0].host].get("bytes"):
            found.append(Finding("machines", name, "ok", f"the same content on all ({size_text(size)})"))
    return found


def _other_content(name: str, entries: Mapping[str, Mapping[str, Any]], unlike: str) -> Finding:
    there = {host: entry for host, entry in entries.items() if "digest" in entry}
    parts = [entry.get("files", {}) for entry in there.values()]
    differ = [file for file in _all_names(parts) if len({held.get(file) for held in parts}) > 1]
    which = f" (in {listing(differ, 3)})" if len(_all_names(parts)) > 1 and differ else ""
    text = plain(f"--{name} does not have the same content: {unlike}{which}")
    return Finding("machines", name, "fail", text, "copy the right one to all machines")


def _gpus(node: Node) -> str:
    counts = Counter(node.devices)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or "none"


def check_devices(nodes: Sequence[Node]) -> list[Finding]:
    """Every machine runs the same number of processes, one per GPU."""
    counts, asked = [len(node.devices) for node in nodes], nodes[0].processes
    unlike = differences([(node.host, {"devices": _gpus(node)}) for node in nodes]).removeprefix("devices is ")
    least, most = min(counts), max(counts)
    mend = f"--num_processes {len(nodes) * max(least, 1)} on all machines ({max(least, 1)} on each)"
    if least == most == 0 or (least == most and asked <= least and not unlike):
        return [Finding("machines", "devices", "ok", f"{_gpus(nodes[0])} on each")] if least else []
    if least < most and (not asked or asked > least):
        text = f"not the same number of GPUs: {unlike}"
        larger = nodes[counts.index(most)].host
        more = f"{larger} then uses CUDA_VISIBLE_DEVICES={','.join(map(str, range(least)))}"
        mend += f"; {more if least else 'a machine without GPUs cannot join those that have some: leave it out'}"
    elif asked > least:
        text = f"{asked} processes on each machine, and {least} GPU{'s' * (least > 1)} there"
    else:
        text = f"not the same GPUs: {unlike}; every step waits for the slowest"
        return [Finding("machines", "devices", "note", text)]
    return [Finding("machines", "devices", "fail", text, mend)]


def _check_variables(nodes: Sequence[Node]) -> list[Finding]:
    """One side that uses InfiniBand waits for the other."""
    found = []
    for name in _all_names(node.environment for node in nodes):
        unlike = differences([(node.host, {name: node.environment.get(name, "not set")}) for node in nodes])
        if unlike and name not in _OWN_VARIABLES and re.fullmatch(r"(NCCL|GLOO|TORCH_NCCL|UCX|FI)_\w+", name, re.ASCII):
            mend = f"`export {name}=...` on all machines, or `unset {name}` on all"
            found.append(Finding("machines", name, "warn", unlike, mend))
    return found


def _check_clocks(nodes: Sequence[Node]) -> list[Finding]:
    offsets = {node.host: node.clock_offset_seconds for node in nodes if node.clock_offset_seconds is not None}
    if len(offsets) < 2:
        return []
    wrong = [f"{host} by {offset:+.1f} s" for host, offset in offsets.items() if abs(offset) > _CLOCK_SECONDS]
    if wrong:
        text = f"clocks differ from {nodes[0].host}'s: {', '.join(wrong)}"
        mend = "sudo timedatectl set-ntp true  (or sudo chronyc makestep)"
        return [Finding("machines", "clocks", "warn", text, mend)]
    most = max(abs(offset) for offset in offsets.values()) * 1000
    return [Finding("machines", "clocks", "ok", f"at most {max(most, 1):.0f} ms apart")]
