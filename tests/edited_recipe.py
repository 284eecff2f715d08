"""Runs `main` of a recipe that a test has written, as a job of tests/matrix.py: its path is the first argument."""

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    path = Path(sys.argv.pop(1))
    spec = importlib.util.spec_from_file_location(f"edited_{abs(hash(path))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    module.main()
