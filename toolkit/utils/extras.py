"""The extras of pyproject.toml: optional packages, imported where they are used."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from unittest import mock

from toolkit.errors import UserError
from toolkit.utils.versions import check_requirements


def is_installed(package: str) -> bool:
    """`package` is the name by which it is imported."""
    return importlib.util.find_spec(package) is not None


def install_command(*extras: str) -> str:
    names = ",".join(extras)
    in_a_clone = f"pip install -c constraints.txt -e '.[{names}]'"
    return f"pip install 'finetune-toolkit[{names}]' (in a clone: {in_a_clone})"


def require_extra(what: str, extra: str, *packages: str) -> None:
    """Raises UserError, with the install command, if a package that `what` needs is missing or too
    old. `packages`: the names by which they are imported; by default the extra's."""
    packages = packages or (extra,)
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise UserError(f"{what} needs {' and '.join(missing)}: {install_command(extra)}")
    check_requirements(extra, packages)


@contextlib.contextmanager
def no_statistics() -> Iterator[None]:
    """Turns off the usage statistics of openvino and nncf: from its import on, openvino sends them
    to Google Analytics without asking, in a process forked beside threads, for which a command may
    wait forever at its end."""
    with mock.patch.dict(os.environ, {"CI": "true", "NNCF_CI": "1"}):
        yield
