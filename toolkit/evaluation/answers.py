"""How a model's outputs become answers; features derive other ways from these classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from toolkit.config import ModelSettings
from toolkit.data.labels import MULTI, Labels, problem_of
from toolkit.data.read import Table
from toolkit.errors import UserError, listing
from toolkit.evaluation.classification import classification_metrics
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, Outputs, predict
from toolkit.utils.features import features, first

_SINGLE = "single_label_classification"


class Answers:
    """Of a saved model, whatever its outputs are; of a run that trains one."""

    why_none = ""
    """Why a sample has no answer (None)."""

    def load(self, settings: ModelSettings) -> Any:
        """The saved model. Raises UserError where it cannot be loaded."""
        raise NotImplementedError

    def outputs(self, accelerator: Any, model: Any, split: Any, tokenizer: Any, *sizes: Any) -> Any:
        """The outputs of a whole split, in its order, on the main process, None on the others; all call it. `sizes` as
        `toolkit.evaluation.outputs.predict`."""
        raise NotImplementedError

    def answers(self, outputs: Any) -> Iterator[dict[str, Any]]:
        """`prediction`, and what else predictions.jsonl has of each sample."""
        raise NotImplementedError

    def metrics(self, outputs: Any, truth: Sequence[Any]) -> dict[str, Any]:
        """The numbers of eval.jsonl but the loss; `truth` as people write it."""
        raise NotImplementedError

    def evaluation(self, evaluation: Evaluation, compute_metrics: ComputeMetrics) -> Evaluation:
        """An evaluation of the plain outputs -> one by these answers; on the main process."""
        return evaluation

    def describe(self, evaluation: Evaluation) -> list[str]:
        """Lines for the screen: what these answers change in an evaluation."""
        return []


@dataclass(frozen=True)
class ClassAnswers(Answers):
    """The likeliest class, the labels above 0.5, or the numbers."""

    labels: Labels

    def load(self, settings: ModelSettings) -> Any:
        from toolkit.models.classifier import load_saved_classifier  # transformers: not for a report

        return load_saved_classifier(settings)

    def outputs(self, accelerator: Any, model: Any, split: Any, tokenizer: Any, *sizes: Any) -> Any:
        return predict(accelerator, model, split, tokenizer, *sizes)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """(N, C) logits -> (N, C) float32: softmax, or a sigmoid per class; regression keeps its numbers."""
        tensor = torch.from_numpy(logits)
        if self.labels.problem_type == _SINGLE:
            return tensor.softmax(dim=-1).numpy()
        return tensor.sigmoid().numpy() if self.labels.problem_type == MULTI else logits

    def adjusted(self, logits: np.ndarray) -> np.ndarray:
        """(N, C) logits -> (N, C) of which the greatest, or those above 0, are the answer: what metrics are made of."""
        return logits

    def abstains(self, probability: float) -> bool:
        """Whether no answer is given where the answer's probability is this."""
        return False

    def answers(self, outputs: np.ndarray) -> Iterator[dict[str, Any]]:
        """Of each row of (N, C) logits its prediction, and its probabilities with six digits."""
        labels = self.labels
        for chances, row in zip(self.probabilities(outputs), self.adjusted(outputs), strict=True):
            rounded = [round(float(chance), 6) for chance in chances]
            if labels.problem_type == "regression":
                yield {"prediction": rounded[0] if labels.size == 1 else rounded}
            elif labels.problem_type == _SINGLE:
                place = int(row.argmax())
                answer = None if self.abstains(chances[place]) else labels.names[place]
                yield {"prediction": answer, "probabilities": rounded}
            else:
                yield {"prediction": readable(row > 0, labels), "probabilities": rounded}

    def metrics(self, outputs: np.ndarray, truth: Sequence[Any]) -> dict[str, Any]:
        import datasets  # half a second with pandas: a run has its labels as numbers

        table = Table(datasets.Dataset.from_dict({"label": list(truth)}), "texts", "")
        encoded = replace(self.labels, columns=("label",)).encode(table, np.arange(len(truth)))
        return classification_metrics(self.adjusted(outputs), encoded, self.labels)

    def prediction_lines(self, rows: np.ndarray, logits: np.ndarray, truth: np.ndarray) -> Iterator[dict[str, Any]]:
        """The lines of predictions.jsonl: id (row in the source, from 0), label, prediction, probabilities (in the
        order of the classes)."""
        for row, label, answer in zip(rows, truth, self.answers(logits), strict=True):
            yield {"id": int(row), "label": readable(label, self.labels), **answer}


def classification_evaluation(outputs: Outputs, labels: Labels, compute_metrics: ComputeMetrics) -> Evaluation:
    """The evaluation of gathered logits (N, C) and losses (N,); every process gets the numbers."""
    split = outputs.split
    if not (arrays := outputs.in_order()):
        return outputs.evaluation()
    logits, losses = arrays
    lines = partial(ClassAnswers(labels).prediction_lines, split.rows, logits, split.labels)
    return outputs.evaluation(losses, compute_metrics(logits, split.labels), lines, logits)


def readable(label: Any, labels: Labels) -> Any:
    """A label as its name, its names (multi-label), its number or its numbers."""
    if labels.problem_type == _SINGLE:
        return labels.names[int(label)]
    if labels.problem_type == MULTI:
        return [name for name, present in zip(labels.names, label, strict=True) if present]
    return float(label) if labels.size == 1 else [float(number) for number in label]


def labels_of(config: Any) -> Labels:
    """A saved model's labels, in the order of its outputs. Raises UserError where it has no name for one."""
    if sorted(config.id2label) != list(range(config.num_labels)):
        raise UserError(
            f"{config.name_or_path}: its config.json has id2label for {listing(config.id2label)}: from 0 on"
        )
    names = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    return Labels(problem_of(config.problem_type), names, ())


def saved_answers(name: str, config: Any) -> Any:
    """How the outputs of a saved model become answers: as a feature knows it, or as a classifier's."""
    return first(feature.answers(name, config) for feature in features()) or ClassAnswers(labels_of(config))
