"""toolkit/pretrained.py: where a hub cannot be reached, the error names the environment variables that count."""

import pytest
from huggingface_hub import constants

from tests.faults import refusal
from tests.runs import free_port
from toolkit.pretrained import load_plain_tokenizer, use_cache_if_unreachable


@pytest.mark.parametrize("offline", [True, False])
def test_the_variables_of_an_unreachable_hub(
    offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    says = ["no folder here", "HTTPS_PROXY", *["offline mode"] * offline]
    for kind in ("model", "dataset"):
        use_cache_if_unreachable.cache_clear()
        assert "secret" not in refusal(use_cache_if_unreachable, "nobody/nothing", kind, says=says)
    refusal(load_plain_tokenizer, "./nothing", says=["./nothing", "give a folder"])
