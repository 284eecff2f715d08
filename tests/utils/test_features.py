"""toolkit/utils/features.py: a section of a feature is part of all settings."""

import pytest

from tests.faults import refusal
from toolkit import config
from toolkit.config import section
from toolkit.utils import features
from toolkit.utils.features import Feature


class Mine:
    """A section."""

    word_of_mine: str = "a"


def test_a_section_of_a_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    class Added(Feature):
        def settings(self, settings_class: type) -> dict[str, type]:
            return {"mine": part}

    monkeypatch.setattr(features, "_REGISTERED", [Added()])
    part: type = Mine
    refusal(config.build, config.TaskSettings, {}, says=["Mine", "@section"])
    part = section(Mine)
    # they may change in a finished run
    assert "word_of_mine" in config.settings_of_features(config.build(config.TaskSettings, {}))
