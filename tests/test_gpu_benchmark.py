"""benchmarks/gpu.py at toy size: every part of its page, on a CPU where there is no GPU."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from tests.runs import start


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_part_of_the_page(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here (torch.cuda.is_available() is false)")
    done = start([sys.executable, "benchmarks/gpu.py", "--tiny", "--device", device], 500).succeeded()
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| \d+ \| \d+ \| \S+ \| [\d.]+ \| [\d.]+ \|$", done.out, re.MULTILINE)
    trained, evaluated = ["ours", "rows", "ours0", "rows0", "tuned", "plain"], ["ours", "rows", "tuned"]
    assert rows == [*[*trained, *evaluated] * 2, "ours"], done.out
    assert re.search(r"\| transformers \| .*\n(\| flex .*\n\| full .*\n)?\| gathered \|", done.out)
