"""Promise 2, for every size up to two global batches plus 1 (tests/once_worker.py does the counting)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import MORE_WAYS, WAYS, recipe

WORLDS = {
    "single": (WAYS["single"], 4),
    "ddp x2": (WAYS["ddp x2"], 3),
    "ddp x3": (WAYS["ddp x3"], 2),
    "zero3 x2": (WAYS["zero3 x2"], 2),
    "zero3 x3": (MORE_WAYS["zero3 x3"], 2),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("world", [*list(WORLDS)[:-1], pytest.param("zero3 x3", marks=pytest.mark.slow)])
def test_every_size(world: str, tiny_model: Path) -> None:
    way, per_device = WORLDS[world]
    finished = recipe(*way, tiny_model, str(per_device), script="tests/once_worker.py").succeeded()
    assert "every sample exactly once" in finished.out
