"""Commands that take the model as an argument name it as it was typed; recipes name their setting."""

from collections.abc import Sequence

import pytest

from tests.runs import start


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["predict", "./no-such", "--text", "x"], "error: ./no-such cannot be loaded"),
        (["to-bigbird", "./no-such", "out"], "error: ./no-such cannot be loaded"),
        (
            ["prepare", "--train_file", "x.csv", "--model_name_or_path", "./no-such"],
            "error: --model_name_or_path ./no-such cannot",
        ),
    ],
)
def test_missing_model(words: Sequence[str], named: str) -> None:
    start(["toolkit", *words]).says_in_one_line(named)
