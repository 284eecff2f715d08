"""Looks up private names of other packages, so that a version that lacks one gives a clear error.

docs/compatibility.md lists every such name, and why we need it.
"""

from __future__ import annotations

import importlib.metadata
import operator
from typing import Any

from toolkit.errors import UserError

# The versions the tests ran with, as in constraints.txt.
TESTED = {
    "torch": "2.13.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "transformers": "5.23.0",
}


def require(owner: Any, name: str, package: str) -> Any:
    """`owner.name`, where `name` may have dots. Raises UserError, with the version to install, if
    there is none."""
    try:
        return operator.attrgetter(name)(owner)
    except AttributeError as error:
        module = getattr(owner, "__name__", type(owner).__name__)
        installed = importlib.metadata.version(package)
        raise UserError(
            f"{package} {installed} has no {module}.{name} any more, which this toolkit needs: "
            f"pip install '{package}=={TESTED[package]}' (docs/compatibility.md)"
        ) from error
