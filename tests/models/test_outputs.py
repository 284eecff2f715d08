"""Hidden states and attentions of our classifiers are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.architectures import ARCHITECTURES, make_architecture
from tests.faults import refusal
from toolkit.config import ModelSettings
from toolkit.data.labels import Labels
from toolkit.models.classifier import load_classifier

LABELS = Labels("single_label_classification", ("neg", "pos"), ("label",))
TEXTS = ("a fine film", "the story, dull as it is, goes on and on")
IDS = torch.arange(2 * 61).view(2, 61) % 15 + 5
INPUTS: dict[str, Any] = {"input_ids": IDS, "attention_mask": (torch.arange(61) < torch.tensor([[61], [40]])).long()}


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "LoRA" not in name])
def test_outputs_of_every_architecture(name: str, tmp_path: Path) -> None:
    options = ["output_hidden_states", "output_attentions"]
    make_architecture(name, tmp_path, TEXTS * 20)
    attention = None if name == "BigBird" else "eager"  # which computes attention weights
    settings = ModelSettings(model_name_or_path=str(tmp_path), attn_implementation=attention)
    mine = load_classifier(settings, LABELS, seed=1).eval()
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    theirs.config.pad_token_id = mine.config.pad_token_id
    theirs.load_state_dict(mine.state_dict())
    if name == "BigBird":
        refusal(mine, **INPUTS, output_attentions=True, match="computes no attention weights")
        options = ["output_hidden_states"]
    for option in options:
        outputs, expected = (model(**INPUTS, **{option: True}) for model in (mine, theirs))
        key = option.removeprefix("output_")
        assert len(outputs[key]) == len(expected[key]) > 0
        torch.testing.assert_close(outputs[key], expected[key], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)
    # the input of a custom head
    states = [model.base_model(**INPUTS).last_hidden_state for model in (mine, theirs)]
    assert states[0].shape[:2] == IDS.shape
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
