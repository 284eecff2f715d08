"""Python imports this module at its start: the packages of TESTS_WITHOUT (names by commas) are not installed."""

import importlib.metadata
import os
from importlib.machinery import PathFinder

_HIDDEN = set(os.environ.get("TESTS_WITHOUT", "").split(","))
_find_spec, _from_name = PathFinder.find_spec, importlib.metadata.Distribution.from_name


def _find(name, path=None, target=None):
    return None if name.partition(".")[0] in _HIDDEN else _find_spec(name, path, target)


def _distribution(name):
    if name.lower().replace("-", "_") in _HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return _from_name(name)


PathFinder.find_spec = staticmethod(_find)
importlib.metadata.Distribution.from_name = _distribution
