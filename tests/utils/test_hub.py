"""toolkit/pretrained.py: without a network a hub name fails within seconds, with the alternatives
and the environment variables that count."""

import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.faults import refusal
from tests.runs import free_port
from toolkit.config import ModelSettings
from toolkit.data.read import read_hub
from toolkit.data.tokenizer import load_tokenizer
from toolkit.pretrained import load_plain_tokenizer, use_cache_if_unreachable


@pytest.fixture
def closed(monkeypatch: Any) -> str:
    """A hub on a closed port."""
    hub = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    use_cache_if_unreachable.cache_clear()
    return hub


def test_unreachable_hub(closed: str) -> None:
    started = time.monotonic()
    says = ["nobody/no-", closed, "HF_ENDPOINT=", "HTTPS_PROXY"]
    settings = ModelSettings(model_name_or_path="nobody/no-model")
    line = refusal(load_tokenizer, settings, says=[*says, "modelscope download --"])
    assert "secret" not in line + refusal(read_hub, "nobody/no-data", says=says)
    assert time.monotonic() - started < 100
    refusal(load_plain_tokenizer, "./nothing", says=["./nothing", "give a folder"])


def test_offline_mode_is_named(closed: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    says = ["no folder here", "offline mode"]
    for kind in ("model", "dataset"):
        refusal(use_cache_if_unreachable, "nobody/nothing", kind, says=says)


def test_the_copy_in_the_cache(closed: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("toolkit.pretrained.try_to_load_from_cache", lambda *_, **__: str(tmp_path))
    use_cache_if_unreachable("nobody/no-model")
    assert closed in capsys.readouterr().err
    assert constants.HF_HUB_OFFLINE
