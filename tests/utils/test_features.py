"""What a feature's author gets wrong ends the start with a line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults import refusal
from toolkit import cli
from toolkit.utils import features
from toolkit.utils.features import Command, Feature


class Misspelt(Feature):
    def result(self) -> None:
        """No hook."""


@pytest.mark.parametrize(
    ("feature", "says"),
    [(Misspelt(), ["Misspelt.result", "did you mean results"]), (Misspelt, ["instance"]), (None, ["FEATURE"])],
)
def test_a_hook_that_does_not_exist(feature: Any, says: list[str]) -> None:
    refusal(features.register, feature, says=says)


def test_a_command_that_exists_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_REGISTERED", [Feature(Command("report", "another", print))])
    refusal(cli.commands, says=["`toolkit report`"])
    monkeypatch.setattr("sys.argv", ["toolkit", "--help"])
    with pytest.raises(SystemExit, match=r"^error: two commands .*`toolkit report`"):
        cli.main()
