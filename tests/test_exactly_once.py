"""Promise 2, for every size up to two global batches plus 1 (tests/once_worker.py does the counting)."""

import pytest

from tests import inputs
from tests.matrix import runs
from tests.runs import slow_but

PER_DEVICE = {"single": 4, "ddp x2": 3, "ddp x3": 2, "zero3 x2": 2, "zero3 x3": 2}


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", slow_but(PER_DEVICE, *list(PER_DEVICE)[:-1]))
def test_every_size(way: str) -> None:
    runs(way).run("every size", "tests.once_worker", [inputs.tiny_model, PER_DEVICE[way]])
    assert "every sample exactly once" in runs(way).log("every size")
