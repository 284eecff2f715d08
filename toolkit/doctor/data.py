"""The content of the files that settings name, told in a few characters, to be compared between machines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from toolkit.doctor.finding import Finding, Level, plain, size_of

AREA = "files"
_BLOCK = 1 << 20
_WHOLE_BYTES = 2 << 30
"""Larger files are told by parts: the whole of a 100 GB file takes minutes to read."""
_PARTS, _PART_BYTES = 64, 8 << 20
_MODEL_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin", ".pt", ".vocab", ".jinja")
_MOST_FILES = 1000
_MOST_NAMED = 64


def checksums(files: Mapping[str, Path], seconds: float) -> dict[str, dict[str, Any]]:
    """Setting -> {path, bytes, digest, files: {name: digest}}, or {path, missing}, or {path, unread: why}."""
    deadline = time.monotonic() + seconds
    return {name: _entry(path, name, deadline) for name, path in files.items()}


def _entry(path: Path, setting: str, deadline: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": plain(path)}
    if not path.exists():
        return {**entry, "missing": True}
    try:
        found = {name: digest_of(file, deadline) for name, file in _content(path, setting).items()}
        size = sum(file.stat().st_size for file in _content(path, setting).values())
    except TimeoutError:
        return {**entry, "unread": "there was no time to read it to the end"}
    except OSError as error:
        return {**entry, "unread": str(error.strerror or error)}
    together = xxhash.xxh3_64("\n".join(f"{name} {digest}" for name, digest in found.items()).encode()).hexdigest()
    digest = together if path.is_dir() else next(iter(found.values()))
    return {**entry, "bytes": size, "digest": digest, "files": dict(list(found.items())[:_MOST_NAMED])}


def _content(path: Path, setting: str) -> dict[str, Path]:
    """Name -> file, sorted: of a model's folder what a model is loaded from, of another folder all."""
    if path.is_file():
        return {path.name: path}
    if setting == "model_name_or_path":
        return {file.name: file for file in sorted(path.iterdir()) if file.suffix in _MODEL_SUFFIXES}
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith("."))
    return {file.relative_to(path).as_posix(): file for _, file in zip(range(_MOST_FILES), files, strict=False)}


def digest_of(path: Path, deadline: float = float("inf")) -> str:
    """xxh3 of the content, or of the size and 64 parts of a file above 2 GiB. Raises OSError, TimeoutError."""
    size = path.stat().st_size
    whole = size <= _WHOLE_BYTES
    hasher = xxhash.xxh3_64() if whole else xxhash.xxh3_64(str(size).encode())
    spread = [number * (size - _PART_BYTES) // (_PARTS - 1) for number in range(_PARTS)]  # the last one ends with it
    parts = [(0, size)] if whole else [(start, _PART_BYTES) for start in spread]
    with path.open("rb", buffering=0) as opened:
        for start, length in parts:
            opened.seek(start)
            while length > 0 and (block := opened.read(min(_BLOCK, length))):
                if time.monotonic() > deadline:
                    raise TimeoutError
                hasher.update(block)
                length -= len(block)
    return hasher.hexdigest()


def check(entries: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Of this machine: whether they are there."""
    found = []
    for name, entry in entries.items():
        path = entry["path"]
        if entry.get("missing"):
            text = f"there is no {path} (looked in {Path.cwd()})"
            found.append(Finding(AREA, name, "fail", text, f"bring {path} to this machine, or start in its folder"))
        elif entry.get("unread"):
            level: Level = "note" if "time" in str(entry["unread"]) else "fail"
            found.append(Finding(AREA, name, level, f"{path}: {entry['unread']}", f"ls -la {path}"))
        else:
            text = f"{path}: {size_of(entry['bytes'])}, content {entry['digest']}"
            found.append(Finding(AREA, name, "ok", text))
    return found
