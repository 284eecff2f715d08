"""Commands that take the model as an argument name it as it was typed; recipes name their setting."""

from __future__ import annotations

import sys

import pytest

from tests.faults import refusal
from toolkit import cli


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["predict", "./no-such", "--text", "x"], "./no-such cannot be loaded"),
        (["estimate", "./no-such"], "./no-such cannot be loaded"),
        (["to-bigbird", "./no-such", "out"], "./no-such cannot be loaded"),
        (["estimate", "cls", "--model_name_or_path", "./no-such"], "--model_name_or_path ./no-such cannot"),
    ],
)
def test_missing_model(words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> None:
    monkeypatch.setattr(sys, "argv", ["toolkit", *words])
    refusal(cli._run, cli.commands(), match=f"^{named}")
