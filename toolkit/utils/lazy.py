"""Names of a package that are imported on first use: `import toolkit` takes no second."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any


def offered(package: str, names_by_module: Mapping[str, Sequence[str]], name: str) -> Any:
    """The name, from the module of the package that has it. Raises AttributeError, as for a
    package's `__getattr__`."""
    for module, names in names_by_module.items():
        if name in names:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
