"""Private names of other packages are looked up here, so that an error names a version that lacks one.

docs/compatibility.md lists every such name, why we need it and what breaks without it.
"""

from __future__ import annotations

import importlib.metadata
import operator
from typing import Any

from toolkit.errors import UserError

# The versions the tests were run with; the same as in constraints.txt.
TESTED = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}


def require(owner: Any, name: str, package: str) -> Any:
    """`owner.name`, where `name` may have dots.

    Raises UserError, with what to install, where the installed version of `package` has no such thing.
    """
    try:
        return operator.attrgetter(name)(owner)
    except AttributeError as error:
        where = getattr(owner, "__name__", type(owner).__name__)
        here = importlib.metadata.version(package)
        raise UserError(
            f"{package} {here} has no {where}.{name} any more, which this toolkit needs: "
            f"pip install '{package}=={TESTED[package]}' (docs/compatibility.md)"
        ) from error
