"""What a feature's author gets wrong ends the start with a line."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from toolkit import cli, config
from toolkit.config import section
from toolkit.utils import features
from toolkit.utils.features import Command, Feature


class Misspelt(Feature):
    def result(self) -> None:
        """No hook."""


class Switched(Feature):
    switches = "word_of_mine"


@pytest.mark.parametrize(
    ("feature", "says"),
    [(Misspelt(), ["Misspelt.result", "did you mean results"]), (Misspelt, ["instance"]), (None, ["FEATURE"]),
     (Switched(), ["Switched.switches", "('word_of_mine',)"])],
)  # fmt: skip
def test_invalid_feature(feature: Any, says: list[str]) -> None:
    refusal(features.register, feature, says=says)


@pytest.mark.parametrize("lines", [None, "a line", 3])
def test_results_must_be_lines(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Feature):
        def results(self, *arguments: Any) -> Any:
            return lines

    monkeypatch.setattr(features, "features", lambda: [Silent()])
    says = ["Silent.results", repr(lines), "list of lines"]
    refusal(features.write_results, Path(), None, None, None, None, says=says)


class Plain:
    word: str = "a"


@section
class Marked:
    """A section."""

    word_of_mine: str = "a"


@pytest.mark.parametrize("part", [Plain, Marked])
def test_a_section_of_a_feature(part: type, monkeypatch: pytest.MonkeyPatch) -> None:
    class Added(Feature):
        def sections(self, settings_class: type) -> dict[str, type]:
            return {"mine": part}

    monkeypatch.setattr(features, "_REGISTERED", [Added()])
    if part is Plain:
        refusal(config.build, config.TaskSettings, {}, says=["Plain", "@section"])
    else:
        # they may change in a finished run
        assert "word_of_mine" in config.settings_of_features(config.build(config.TaskSettings, {}))
        monkeypatch.setattr(Added, "switches", ("word_of_mind",))
        refusal(config.build, config.TaskSettings, {}, says=["Added.switches", "word_of_mind"])


def test_duplicate_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_REGISTERED", [Feature(Command("report", "another", print))])
    refusal(cli.commands, says=["`toolkit report`"])
    monkeypatch.setattr("sys.argv", ["toolkit", "--help"])
    with pytest.raises(SystemExit, match=r"^error: two commands .*`toolkit report`"):
        cli.main()
