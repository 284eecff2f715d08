"""The extras of pyproject.toml: optional packages, imported where they are used."""

from __future__ import annotations

import importlib.util

from toolkit.errors import UserError
from toolkit.utils.versions import check_requirements


def is_installed(package: str) -> bool:
    """`package` is the name by which it is imported."""
    return importlib.util.find_spec(package) is not None


def install_command(*extras: str) -> str:
    names = ",".join(extras)
    return (
        f"pip install 'finetune-toolkit[{names}]' (in a clone: pip install -c constraints.txt -e "
        f"'.[{names}]')"
    )


def require_extra(what: str, extra: str, *packages: str) -> None:
    """Raises UserError, with the install command, if a package that `what` needs is missing or too
    old. `packages`: the names by which they are imported; by default the extra's."""
    packages = packages or (extra,)
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise UserError(f"{what} needs {' and '.join(missing)}: {install_command(extra)}")
    check_requirements(extra)
