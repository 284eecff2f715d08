"""Promise 2, for every size up to two global batches plus 1 (tests/once_worker.py does the counting)."""

from pathlib import Path

import pytest

from tests.runs import MORE_WAYS, WAYS, recipe, slow_but

PER_DEVICE = {"single": 4, "ddp x2": 3, "ddp x3": 2, "zero3 x2": 2, "zero3 x3": 2}


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", slow_but(PER_DEVICE, *list(PER_DEVICE)[:-1]))
def test_every_size(way: str, tiny_model: Path) -> None:
    words = [*(WAYS | MORE_WAYS)[way], tiny_model, str(PER_DEVICE[way])]
    finished = recipe(*words, script="tests/once_worker.py").succeeded()
    assert "every sample exactly once" in finished.out
