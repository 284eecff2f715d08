"""Computing only what the classifier reads changes no number."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.bert import modeling_bert

from toolkit.config import ModelSettings
from toolkit.models.classifier import load_saved_classifier
from toolkit.models.first_token import read_first_token_only

SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 50}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make(family: str, attention: str) -> torch.nn.Module:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SMALL, **OFF, num_labels=3, pad_token_id=0)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation=attention).double().train()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "electra"])
@pytest.mark.parametrize("padded", [True, False])
def test_same_logits_and_gradients(family: str, attention: str, padded: bool) -> None:
    model = make(family, attention)
    shortened = copy.deepcopy(model)
    assert read_first_token_only(shortened)
    input_ids = torch.randint(3, 50, (4, 17), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": input_ids}
    if padded:
        inputs["attention_mask"] = (torch.arange(17) < torch.tensor([[17], [3], [9], [1]])).long()
    logits, expected = shortened(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for outputs in (logits, expected):
        outputs.square().sum().backward()
    for (name, mine), theirs in zip(shortened.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_the_last_layer_really_does_less(tmp_path: Path) -> None:
    """In training, and where a saved model labels a file or is exported."""
    model = make("bert", "sdpa")
    model.save_pretrained(tmp_path)
    read_first_token_only(model)
    for computes in (model, load_saved_classifier(ModelSettings(model_name_or_path=str(tmp_path)))):
        widths: list[int] = []
        dense = computes.bert.encoder.layer[-1].intermediate.dense
        dense.register_forward_hook(lambda module, inputs, output, widths=widths: widths.append(output.shape[1]))
        computes(input_ids=torch.ones(2, 9, dtype=torch.long))
        assert widths == [1]


def test_gradient_checkpointing_and_saving(tmp_path) -> None:
    model = make("bert", "sdpa").float()
    reference = copy.deepcopy(model)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    assert read_first_token_only(model)
    input_ids = torch.randint(3, 50, (2, 11))
    model(input_ids=input_ids).logits.sum().backward()
    reference(input_ids=input_ids).logits.sum().backward()
    torch.testing.assert_close(model.bert.embeddings.word_embeddings.weight.grad,
                               reference.bert.embeddings.word_embeddings.weight.grad)  # fmt: skip
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=input_ids).logits, model.eval()(input_ids=input_ids).logits)
    assert loaded.bert(input_ids=input_ids).last_hidden_state.shape[1] == 11


class Doubled(modeling_bert.BertSelfAttention):
    def forward(self, hidden_states: torch.Tensor, *given: object, **named: object) -> object:
        return super().forward(2 * hidden_states, *given, **named)


def test_a_layer_that_computes_otherwise_is_left_alone() -> None:
    """As after a change in transformers."""
    model = make("bert", "sdpa").eval()
    model.bert.encoder.layer[-1].attention.self.__class__ = Doubled
    ids = torch.arange(3, 20)[None]
    expected = model(input_ids=ids).logits
    with pytest.warns(UserWarning, match="in a way that is not known here"):
        assert not read_first_token_only(model)
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_others_are_left_alone() -> None:
    config = transformers.DistilBertConfig(dim=24, n_layers=1, n_heads=2, hidden_dim=30, vocab_size=50)
    assert not read_first_token_only(transformers.DistilBertForSequenceClassification(config))
