"""Formats numbers with units."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Bytes as `1.34 GB`, `12.5 MB`, `980 bytes`: powers of ten, three digits."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * power:
            value = size / power
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{size:.0f} bytes"
