"""Checksums of the files that settings name, to be compared between machines."""

from __future__ import annotations

import functools
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from toolkit.errors import plain
from toolkit.features.doctor.finding import Finding, Level
from toolkit.features.doctor.torch_checks import NO_ANSWER, in_time
from toolkit.utils.cache import digest_of_file
from toolkit.utils.units import size_text

_MODEL_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin", ".pt", ".vocab", ".jinja")
_MOST_FILES, _MOST_NAMED = 1000, 64


def checksums(files: Mapping[str, Path], seconds: float) -> dict[str, dict[str, Any]]:
    """Setting -> {path, bytes, digest, files: {name: digest}}, or {path, missing}, or {path, unread: why}."""
    deadline, found = time.monotonic() + seconds, {}
    for setting, path in files.items():
        left = max(0.0, deadline - time.monotonic())
        found[setting] = {"path": plain(path)}
        found[setting] |= in_time(left, functools.partial(_content, path, setting), lambda why: {"unread": why})
    return found


def _content(path: Path, setting: str) -> dict[str, Any]:
    """Of a model's folder what a model is loaded from counts, of another folder all."""
    if not path.exists():
        return {"missing": True}
    if not path.is_dir():
        digest = digest_of_file(path)
        return {"bytes": path.stat().st_size, "digest": digest, "files": {path.name: digest}}
    if setting == "model_name_or_path":
        files = [file for file in sorted(path.iterdir()) if file.suffix in _MODEL_SUFFIXES]
    else:
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    found = {file.relative_to(path).as_posix(): digest_of_file(file) for file in files[:_MOST_FILES]}
    digest = xxhash.xxh3_64(str(found).encode()).hexdigest()
    size = sum(file.stat().st_size for file in files)
    return {"bytes": size, "digest": digest, "files": dict(list(found.items())[:_MOST_NAMED])}


def check(entries: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Checks that the files are on this machine."""
    found = []
    for name, entry in entries.items():
        path, quoted = entry["path"], shlex.quote(entry["path"])
        if entry.get("missing"):
            text = f"there is no {path} (looked in {Path.cwd()})"
            found.append(
                Finding("files", name, "fail", text, f"bring {quoted} to this machine, or start in its folder")
            )
        elif why := entry.get("unread"):
            level: Level = "note" if NO_ANSWER in why else "fail"
            found.append(Finding("files", name, level, f"{path} was not read to the end: {why}", f"ls -la {quoted}"))
        else:
            text = f"{path}: {size_text(entry['bytes'])}, content {entry['digest']}"
            found.append(Finding("files", name, "ok", text))
    return found
