"""`--padding_free`: logits and gradients equal those of padded batches, by each attention kernel."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests import inputs
from tests.architectures import make_architecture
from tests.faults import refusal
from tests.matrix import runs
from tests.models.test_first_token import width_of_last
from tests.test_architectures import assert_predicts
from toolkit.config import ModelSettings
from toolkit.data.batches import Batch, Collator
from toolkit.data.labels import Labels
from toolkit.data.tokenizer import load_tokenizer
from toolkit.data.tokens import Split
from toolkit.features.padding_free.collator import PackedCollator, round_up
from toolkit.models.classifier import load_classifier

FAMILIES = (
    "BERT", "RoBERTa", "XLM-R", "ModernBERT", "ELECTRA", "ERNIE", "DistilBERT", "NomicBERT", "GTE",
)  # fmt: skip
LENGTHS = [60, 33, 20, 5, 3, 1, 1]
CPU = torch.device("cpu")
Models = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, reviews: Path) -> Models:
    """(model, tokenizer) of an architecture; the weights are the same each time."""
    folder, texts = tmp_path_factory.mktemp("models"), list(pd.read_csv(reviews)["text"][:120])
    folder_of = functools.cache(lambda name: make_architecture(name, folder / name, texts))

    def load_architecture(name: str, **settings: Any) -> tuple[Any, Any]:
        pretrained = ModelSettings(model_name_or_path=str(folder_of(name)), dropout=0, **settings)
        labels = Labels("single_label_classification", ("neg", "pos"), ("label",))
        return load_classifier(pretrained, labels, seed=1), load_tokenizer(pretrained)

    return load_architecture


def collators_of(tokenizer: Any) -> tuple[Collator, PackedCollator]:
    ids = np.random.default_rng(0).integers(5, len(tokenizer), sum(LENGTHS)).astype(np.int32)
    numbers = np.arange(len(LENGTHS))
    split = Split("train", Path(), ids, np.cumsum([0, *LENGTHS]), numbers % 2, numbers)
    return Collator(split, tokenizer, CPU), PackedCollator(split, tokenizer, CPU)


def logits_and_gradients(classifier: Any, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logits = classifier(**batch.inputs).logits
    weights = [weight for weight in classifier.parameters() if weight.requires_grad]
    return logits, list(torch.autograd.grad(logits.square().sum(), weights))


@pytest.mark.parametrize("on_gpu", [False, True], ids=["", "with padding texts"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_equal(
    name: str, on_gpu: bool, load: Models, accelerator: Any
) -> None:
    """By padded attention; by `varlen_attn`, which needs a GPU: tests/test_gpu.py."""
    classifier, tokenizer = load(name)
    padded, packed = collators_of(tokenizer)
    indices = np.arange(len(LENGTHS))
    names = [name for name, weight in classifier.named_parameters() if weight.requires_grad]
    expected, gradients = logits_and_gradients(classifier.train(), padded(indices))
    packed.prepare_model(accelerator, classifier)
    packed.rounds_up = on_gpu
    batch = packed(indices)
    assert batch.inputs["input_ids"].shape == (1, 128 if on_gpu else 123)
    assert name != "BERT" or width_of_last(classifier, **batch.inputs) == 1  # the first tokens only
    logits, packed_gradients = logits_and_gradients(classifier, batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.detach().std()))
    for weight, one, other in zip(names, packed_gradients, gradients, strict=True):
        if not weight.endswith(("key.bias", "k_lin.bias")):  # 0: softmax ignores them
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
    # padded batches still work
    assert torch.equal(classifier(**padded(indices).inputs).logits, expected)


def test_a_row(tokenizer: Any) -> None:
    _, packed = collators_of(tokenizer)
    packed.rounds_up = True
    batch = packed(np.array([2, 0, 6]))
    assert (batch.tokens, batch.samples, batch.ids.tolist()) == (81, 3, [2, 0, 6])
    for indices, lengths in (([2, 0, 6], (20, 60, 1, 7)), ([4, 5], (3, 1, 3, 1))):
        mask: Any = packed(np.array(indices)).inputs["attention_mask"]
        assert mask.lengths == lengths  # padding texts are no longer than the longest text
    assert len({round_up(tokens) for tokens in range(1024, 16385)}) == 4 * 8 + 1
    for tokens in range(64, 5000):
        assert tokens <= round_up(tokens) <= tokens * 9 / 8


def test_unsupported_models_are_refused(load: Models, accelerator: Any) -> None:
    fine, tokenizer = load("BERT")
    _, packed = collators_of(tokenizer)
    eager, _ = load("BERT", attn_implementation="eager")
    pooled, _ = load("ModernBERT")
    pooled.config.classifier_pooling = "mean"
    refused = [(load(name)[0], "For") for name in ("DeBERTa-v3", "ALBERT", "BigBird", "Qwen3")]
    refused += [(pooled, "logits"), (torch.nn.Linear(2, 2), "Linear"), (eager, "'eager'")]
    for model, says in refused:
        refusal(packed.prepare_model, accelerator, model, says=["--padding_free", says])
    inputs = packed(np.arange(7)).inputs
    with pytest.raises(AttributeError, match="Packed"):  # not prepared
        fine(**inputs)
    packed.prepare_model(accelerator, fine)
    for reads in ({"output_hidden_states": True}, {"output_attentions": True}):
        refusal(fine, **inputs, **reads, says=["--padding_free", "hidden states and attentions"])


def test_the_saved_model_is_an_ordinary_one() -> None:
    """`toolkit predict` reads the columns that the run learned from."""
    run = runs("single")["padding-free pairs"]
    assert "padding_free" not in (run / "model" / "config.json").read_text(encoding="utf-8")
    assert_predicts(run, inputs.uneven_reviews())
