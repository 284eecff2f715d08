"""toolkit/models/first_token.py: computing only the first token in the last layer changes no number."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.models.test_classifier import classifier_of
from toolkit.config import ModelSettings
from toolkit.models.classifier import load_saved_classifier
from toolkit.models.first_token import read_first_token_only
from toolkit.models.lora import add_lora

SMALL = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40,
    "vocab_size": 50, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
IDS = torch.randint(3, 50, (4, 17), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(17) < torch.tensor([[17], [3], [9], [1]])).long()


def pair(family: str) -> tuple[Any, Any]:
    """A model, and its copy that is shortened."""
    torch.manual_seed(3)
    model = classifier_of(family, SMALL, num_labels=3, pad_token_id=0).double().train()
    shortened = copy.deepcopy(model)
    read_first_token_only(shortened)
    return model, shortened


def width_of_last(model: Any, encoder: str = "bert", **options: Any) -> int:
    """How many positions (of 17) the last layer's feed-forward network computes."""
    dense = model.get_submodule(encoder).encoder.layer[-1].intermediate.dense
    with patch.object(dense, "forward", wraps=dense.forward) as forward:
        model(**{"input_ids": IDS, **options})
    return int(forward.call_args.args[0].shape[1])


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "electra"])
@pytest.mark.parametrize("kind", ["padded", "unpadded", "recomputed", "lora"])
def test_same_logits_and_gradients(family: str, kind: str) -> None:
    model, shortened = pair(family)
    if kind == "recomputed":
        shortened.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "lora":
        for each in (model, shortened):
            add_lora(each, ModelSettings(lora_r=2, lora_target_modules="all-linear"))
        states = model.state_dict().items()
        moved = {name: each + torch.randn_like(each) / 9 for name, each in states}
        for each in (model, shortened):
            each.load_state_dict(moved)
    mask = None if kind == "unpadded" else MASK
    inputs = {"input_ids": IDS, "attention_mask": mask}
    assert width_of_last(shortened, model.base_model_prefix) == 1
    logits, expected = shortened(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for outputs in (logits, expected):
        outputs.square().sum().backward()
    for (name, mine), theirs in zip(shortened.named_parameters(), model.parameters(), strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)


POOLER = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(17 * 24, 24)).double()
CHANGES: dict[str, Callable[[Any], Any]] = {
    "another head": lambda bert: setattr(bert, "pooler", POOLER),
    "the last layer twice": lambda bert: bert.encoder.layer.append(bert.encoder.layer[-1]),
    "a layer fewer": lambda bert: bert.encoder.layer.pop(-1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_position_where_it_may_be_read(change: str) -> None:
    """After these changes of a BERT."""
    reference, model = pair("bert")
    for each in (model, reference):
        CHANGES[change](each.bert)
    assert width_of_last(model) == 17
    expected = reference(input_ids=IDS).logits
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-12, atol=1e-12)


def test_a_saved_model_and_others(tmp_path: Path) -> None:
    classifier_of("bert", SMALL).save_pretrained(tmp_path)
    saved = load_saved_classifier(ModelSettings(model_name_or_path=str(tmp_path)))
    assert width_of_last(saved) == 1
    read_first_token_only(classifier_of("distilbert"))  # nothing
