"""benchmarks/gpu.py at toy size: every part of its page, on a CPU where there is no GPU."""

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
    done = start(
        [sys.executable, "benchmarks/gpu.py", "--tiny", "--device", device], 500
    ).succeeded()
    rows = re.findall(
        r"^\| (\w+) \| [\d.]+ \| \d+ \| \d+ \| \S+ \| [\d.]+ \| [\d.]+ \|$", done.out, re.MULTILINE
    )
    trained = ["ours", "tuned", "rows0", "ours0", "rows", "cudnn", "plain"]
    evaluated = ["ours", "tuned", "rows", "cudnn"]
    assert rows == ["ours", *[*trained, *evaluated] * 2], done.out
    attentions = re.findall(
        r"^\| (\w+)(?:, freed memory kept)? \| [\d.]+ \| \d+ \| \d+ \| [\d.]+x ",
        done.out,
        re.MULTILINE,
    )
    on_gpu = ["transformers", "flex", "full", "gathered"]
    assert attentions == (
        on_gpu if device == "cuda" else ["transformers"] * 2 + ["gathered"] * 2
    ), done.out
