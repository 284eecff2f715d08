"""Checksums of the files that settings name, to be compared between machines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from toolkit.doctor.finding import Finding, Level, plain, size_of

_BLOCK = 8 << 20
_MODEL_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin", ".pt", ".vocab", ".jinja")
_MOST_FILES, _MOST_NAMED = 1000, 64


def checksums(files: Mapping[str, Path], seconds: float) -> dict[str, dict[str, Any]]:
    """Setting -> {path, bytes, digest, files: {name: digest}}, or {path, missing}, or {path, unread: why}."""
    deadline = time.monotonic() + seconds
    return {name: _entry(path, name, deadline) for name, path in files.items()}


def _entry(path: Path, setting: str, deadline: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": plain(path)}
    if not path.exists():
        return {**entry, "missing": True}
    try:
        files = _files_of(path, setting)
        found = {name: digest_of(file, deadline) for name, file in files.items()}
        size = sum(file.stat().st_size for file in files.values())
    except TimeoutError:
        return {**entry, "unread": "there was no time to read it to the end"}
    except OSError as error:
        return {**entry, "unread": str(error.strerror or error)}
    listed = "\n".join(f"{name} {digest}" for name, digest in found.items())
    digest = xxhash.xxh3_64(listed.encode()).hexdigest() if path.is_dir() else next(iter(found.values()))
    return {**entry, "bytes": size, "digest": digest, "files": dict(list(found.items())[:_MOST_NAMED])}


def _files_of(path: Path, setting: str) -> dict[str, Path]:
    """Name -> file, sorted: of a model's folder what a model is loaded from, of another folder all."""
    if path.is_file():
        return {path.name: path}
    if setting == "model_name_or_path":
        return {file.name: file for file in sorted(path.iterdir()) if file.suffix in _MODEL_SUFFIXES}
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    return {file.relative_to(path).as_posix(): file for file in files[:_MOST_FILES]}


def digest_of(path: Path, deadline: float = float("inf")) -> str:
    """xxh3 of the content. Raises OSError, TimeoutError."""
    hasher = xxhash.xxh3_64()
    with path.open("rb") as opened:
        while block := opened.read(_BLOCK):
            if time.monotonic() > deadline:
                raise TimeoutError
            hasher.update(block)
    return hasher.hexdigest()


def check(entries: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Checks that the files are on this machine."""
    found = []
    for name, entry in entries.items():
        path = entry["path"]
        if entry.get("missing"):
            text = f"there is no {path} (looked in {Path.cwd()})"
            found.append(Finding("files", name, "fail", text, f"bring {path} to this machine, or start in its folder"))
        elif why := entry.get("unread"):
            level: Level = "note" if "time" in why else "fail"
            found.append(Finding("files", name, level, f"{path}: {why}", f"ls -la {path}"))
        else:
            found.append(Finding("files", name, "ok", f"{path}: {size_of(entry['bytes'])}, content {entry['digest']}"))
    return found
