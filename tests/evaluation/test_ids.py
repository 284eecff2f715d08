"""toolkit/evaluation/outputs.py: every sample exactly once, or an error that names it (one process). (Promise 2.)

The order of the outputs: tests/test_exactly_once.py.
"""

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.faults import refusal
from tests.splits import of_lengths
from toolkit.data.batches import Collator
from toolkit.data.labels import Labels
from toolkit.data.tokens import Split
from toolkit.evaluation import classification_metrics, outputs
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.outputs import ExactlyOnceError, predict
from toolkit.launch.signals import StopRequested

TOKENIZER = SimpleNamespace(pad_token_id=99, padding_side="right")


def outputs_of(accelerator: Any, split: Split, **options: Any) -> outputs.Outputs:
    return outputs.Outputs(accelerator, split, TOKENIZER, outputs.BatchSizes(4), **options)


def test_a_stop_signal_of_any_rank_ends_an_evaluation() -> None:
    stop = torch.tensor([0, int(signal.SIGTERM)])
    ranks = SimpleNamespace(device=torch.device("cpu"), gather=lambda signals: stop)
    ours = outputs_of(ranks, of_lengths(np.ones(2, np.int64)))
    with pytest.raises(StopRequested, match="15"):
        ours.add([torch.tensor([0, -1, 1, -1]), torch.ones(4)])


class Echo(torch.nn.Module):
    """Two outputs in bf16: the sum of a sample's tokens and their number, padding not counted."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> SimpleNamespace:
        assert not self.training
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.stack([(input_ids * mask).sum(1), mask.sum(1)], 1)
        return SimpleNamespace(logits=logits.bfloat16())


def split_of(count: int) -> Split:
    """Sample i has (7 i mod 11) + 1 tokens, each 1, and is row 3 i of its file."""
    every = np.arange(count)
    return replace(of_lengths(every * 7 % 11 + 1), name="test", labels=every % 2, rows=every * 3)


def test_lost_and_duplicated_samples_raise(accelerator: Accelerator, monkeypatch: Any) -> None:
    class WrongIds(Collator):
        def __call__(self, indices: np.ndarray) -> Any:
            batch = super().__call__(indices)
            batch.ids[batch.ids == 6] = 3
            batch.ids[batch.ids == 9] = 100
            return batch

    monkeypatch.setattr(outputs, "collator_of", WrongIds)
    fault = "test: never predicted: ids 6, 9; more than once: ids 3; unknown: ids 100"
    with pytest.raises(ExactlyOnceError, match=fault):
        predict(accelerator, Echo(), split_of(10), TOKENIZER, 4)


def test_outputs_that_are_not_finite_raise_with_the_rows(accelerator: Accelerator) -> None:
    split, model = split_of(20), Echo()

    def diverge(*call: Any) -> None:
        call[-1].logits[call[-1].logits[:, 1] == 2] = torch.inf  # of samples of two tokens

    model.register_forward_hook(diverge)
    rows = ", ".join(str(row + 1) for row in split.rows[split.lengths == 2])
    refusal(predict, accelerator, model, split, TOKENIZER, 4, match=f"rows {rows}:")


def test_a_recipes_loss_and_metrics(accelerator: Accelerator) -> None:
    split, model = split_of(23), Echo()
    answers = ClassAnswers(Labels("single_label_classification", ("a", "b"), ("label",)))

    def evaluation_of(is_trial: bool, metrics: Any) -> dict[str, Any]:
        ours = outputs_of(accelerator, split, answers=answers, is_trial=is_trial)
        for batch in ours.batches(model):
            logits = model(**batch.inputs).logits
            ours.add(accelerator.gather_for_metrics((batch.ids, logits, logits[:, 1])))
        return ours.evaluation(metrics).numbers

    for wrong in (lambda logits, truth: {}, lambda logits, *, truth, labels: {}):
        refusal(evaluation_of, True, wrong, says=["metrics(logits, labels, and the labels' names"])

    def with_own(*call: Any) -> dict[str, Any]:
        return {**classification_metrics(*call), "mine": 1}

    trial, numbers = (evaluation_of(is_trial, with_own) for is_trial in (True, False))
    assert trial.keys() == numbers.keys()
    assert numbers.items() >= {"num_samples": 23, "mine": 1}.items()
    assert numbers["loss"] == pytest.approx(split.lengths.mean())  # the recipe's loss
    assert numbers["accuracy"] == pytest.approx(np.mean(split.labels == 0))  # equal logits: class 0
