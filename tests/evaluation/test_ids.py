"""toolkit/evaluation/outputs.py: every sample exactly once, or an error that names it (one process)."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.faults import refusal
from tests.splits import of_lengths
from toolkit.config import TrainingSettings
from toolkit.data import progress
from toolkit.data.batches import Collator
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation import Outputs, classification_evaluation, classification_metrics, evaluation_batches, outputs
from toolkit.evaluation.outputs import ExactlyOnceError, ids_fault, predict


@pytest.mark.parametrize(
    ("found", "expected", "fault"),
    [
        ([0, 1, 2], [0, 1, 2], ""),
        ([2, 0, 1], [0, 1, 2], ""),
        ([], [], ""),
        ([0, 2], [0, 1, 2], "never predicted: rows 1"),
        ([0, 1, 1, 2], [0, 1, 2], "more than once: rows 1"),
        ([0, 1, 2, 5], [0, 1, 2], "unknown: 5"),
        ([], [4, 7], "never predicted: rows 4, 7"),
        ([0, 0, 9], [0, 3], "never predicted: rows 3; more than once: rows 0; unknown: 9"),
        ([-1, 0], [0], "unknown: -1"),
    ],
)
def test_ids_fault(found: list[int], expected: list[int], fault: str) -> None:
    assert ids_fault(np.array(found, np.int64), np.array(expected, np.int64)) == fault


class Echo(torch.nn.Module):
    """Two outputs: the sum of a sample's tokens and their number, padding not counted."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> SimpleNamespace:
        assert not self.training
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return SimpleNamespace(logits=torch.stack([(input_ids * mask).sum(1), mask.sum(1)], 1).to(torch.bfloat16))


def split_of(count: int) -> Split:
    """Sample i has (7 i mod 11) + 1 tokens, each 1, and is row 3 i of its file."""
    every = np.arange(count)
    return replace(of_lengths(every * 7 % 11 + 1), name="test", labels=every % 2, rows=every * 3)


TOKENIZER = SimpleNamespace(pad_token_id=99, padding_side="right")


@pytest.mark.parametrize("batch_size", [1, 4, 5, 64])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 23])
def test_outputs_come_in_the_order_of_the_file(accelerator: Accelerator, count: int, batch_size: int) -> None:
    split = split_of(count)
    found = predict(accelerator, Echo().train(), split, TOKENIZER, batch_size)
    assert found[:, 0].tolist() == split.lengths.tolist()  # its own tokens, and no padding
    assert found.dtype == np.float32


def test_what_takes_long_says_how_far_it_is(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    predict(accelerator, Echo(), split_of(23), TOKENIZER, 4)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"test: 4 of 23 rows, \d+ rows/s, \d\d:\d\d left", first)
    assert last.startswith("test: 23 of 23 rows")


class Losing(Collator):
    """Gives one sample the id of another."""

    def __call__(self, indices: np.ndarray) -> object:  # type: ignore[override]
        batch = super().__call__(indices)
        batch.ids[batch.ids == 6] = 3
        return batch


def test_a_sample_that_is_lost_and_one_that_is_doubled_are_an_error(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(10)
    monkeypatch.setattr(outputs, "collator_of", Losing)
    with pytest.raises(ExactlyOnceError, match=r"test: never predicted: rows 6; more than once: rows 3"):
        predict(accelerator, Echo(), split, TOKENIZER, 4)


class Diverged(Echo):
    """Has no number for samples of two tokens."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> SimpleNamespace:
        output = super().forward(input_ids, attention_mask)
        output.logits[output.logits[:, 1] == 2] = torch.inf
        return output


def test_outputs_that_are_not_finite_are_an_error_that_names_the_rows(accelerator: Accelerator) -> None:
    split = split_of(20)
    rows = ", ".join(str(row + 1) for row in split.rows[split.lengths == 2])
    refusal(predict, accelerator, Diverged(), split, TOKENIZER, 4, match=f"rows {rows}:")


def test_an_evaluation_counts_every_sample_once(accelerator: Accelerator) -> None:
    split = split_of(23)
    labels = Labels("single_label_classification", ("a", "b"), ("label",))
    gathered, model = Outputs(accelerator, split), Echo().eval()
    for batch in evaluation_batches(accelerator, split, TOKENIZER, TrainingSettings(per_device_batch_size=4)):
        logits = model(**batch.inputs).logits.float()
        gathered.add(accelerator.gather_for_metrics(batch.padded(logits, logits[:, 1])))
    found = classification_evaluation(gathered, labels, lambda *given: classification_metrics(*given, labels))
    assert found.numbers["loss"] == pytest.approx(split.lengths.mean())  # the recipe's own
    assert (found.split, found.numbers["num_samples"]) == ("test", 23)
    guesses = [int(length == 1) for length in split.lengths]  # at one token both outputs are 1: the first wins
    assert sum(guesses) == 3
    assert found.numbers["accuracy"] == pytest.approx(np.mean(split.labels == 0))
    assert found.predictions is not None
