"""Packages that only some users need: the extras of pyproject.toml, which are imported where they are used."""

from __future__ import annotations

import importlib.util

from toolkit.errors import UserError


def is_installed(package: str) -> bool:
    """Whether this package, by the name that is imported, is there."""
    return importlib.util.find_spec(package) is not None


def install_command(*extras: str) -> str:
    """What to type for these extras."""
    names = ",".join(extras)
    return f"pip install 'finetune-toolkit[{names}]' (in a clone: pip install -c constraints.txt -e '.[{names}]')"


def require_extra(what: str, extra: str, *packages: str) -> None:
    """Raises UserError, with what to type, where `what` needs a package that is not installed. `packages`: their
    names as they are imported; that of the extra when not given."""
    missing = [name for name in packages or (extra,) if not is_installed(name)]
    if missing:
        raise UserError(f"{what} needs {' and '.join(missing)}: {install_command(extra)}")
