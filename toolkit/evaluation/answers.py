"""From a model's outputs to predictions; features derive from `Answers` for other models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from toolkit.config import ModelSettings, ProblemType
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, Labels
from toolkit.data.table import Table, TextBlock
from toolkit.data.token_files import split_of_texts
from toolkit.data.tokens import Split
from toolkit.errors import UserError, listing
from toolkit.evaluation.metrics import classification_metrics
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, predict
from toolkit.utils.features import features

DECISIONS = "decisions.json"
"""The file of a model folder with its thresholds and temperature, which belong to the weights of
one step."""


class Answers:
    """How to load a saved model, run it, and turn its outputs into predictions and metrics."""

    def load(self, settings: ModelSettings) -> Any:
        """Loads the saved model. Raises UserError if it cannot be loaded."""
        raise NotImplementedError

    def split(
        self,
        tokenizer: Any,
        model_config: Any,
        max_length: int,
        texts: TextBlock,
        shared_as: str | None,
    ) -> Split:
        """The samples to compute for these texts; the arguments of `split_of_texts`."""
        return split_of_texts(tokenizer, model_config, max_length, texts, shared_as)

    def outputs(
        self, accelerator: Any, model: Any, split: Any, tokenizer: Any, *sizes: Any
    ) -> Any:
        """The outputs for all texts of a split, in their order, on the main process, None on the
        others; a collective, called under autocast. `sizes`: as for
        `toolkit.evaluation.outputs.predict`."""
        raise NotImplementedError

    def answers(self, outputs: Any) -> Iterator[dict[str, Any]]:
        """Yields `prediction`, and the other keys of its line in predictions.jsonl, for each
        sample."""
        raise NotImplementedError

    def metrics(self, outputs: Any, truth: Sequence[Any]) -> dict[str, Any]:
        """The numbers of eval.jsonl without the loss. `truth`: labels as a file has them (names,
        numbers, titles)."""
        raise NotImplementedError

    def evaluation(
        self, evaluation: Evaluation, compute_metrics: ComputeMetrics
    ) -> Evaluation:
        """The evaluation of plain outputs -> the evaluation of these answers; on the main
        process."""
        return evaluation

    def describe(self, evaluation: Evaluation) -> list[str]:
        """Lines to print: how these answers change the metrics."""
        return []


@dataclass(frozen=True)
class ClassAnswers(Answers):
    """Predicts the most probable class, the labels above 0.5, or (regression) the numbers."""

    labels: Labels

    def load(self, settings: ModelSettings) -> Any:
        # imports transformers: a report does without
        from toolkit.models.classifier import load_saved_classifier
        from toolkit.pretrained import load_config

        name = str(settings.model_name_or_path)
        config = load_config(settings)
        for feature in features():
            model = feature.load_model(name, config)
            if model is not None:
                return model
        return load_saved_classifier(settings)

    def outputs(
        self, accelerator: Any, model: Any, split: Any, tokenizer: Any, *sizes: Any
    ) -> Any:
        return predict(accelerator, model, split, tokenizer, *sizes)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """(N, C) logits -> (N, C) float32: softmax, or a sigmoid per class; regression returns its
        numbers."""
        if self.labels.problem_type == SINGLE:
            return torch.from_numpy(logits).softmax(dim=-1).numpy()
        if self.labels.problem_type == MULTI:
            return torch.from_numpy(logits).sigmoid().numpy()
        return logits

    def temperature_and_offsets(self) -> tuple[float, np.ndarray]:
        """What `adjust_logits` divides by, and the (C,) float32 that it then subtracts."""
        return 1.0, np.zeros(self.labels.size, np.float32)

    def adjust_logits(self, logits: np.ndarray) -> np.ndarray:
        """(N, C) logits -> (N, C) scores: the prediction is the argmax, or (multi-label) every
        class above 0."""
        temperature, offsets = self.temperature_and_offsets()
        return logits / np.float32(temperature) - offsets

    def abstains(self, probability: float) -> bool:
        """Whether to predict None if the best class has this probability."""
        return False

    def answers(self, outputs: np.ndarray) -> Iterator[dict[str, Any]]:
        """For each row of (N, C) logits its prediction, and its probabilities rounded to six
        digits; predicted numbers keep float32's digits, however small they are."""
        if self.labels.problem_type == REGRESSION:
            for numbers in outputs:
                yield {"prediction": _decode_label(numbers, self.labels)}
            return
        probabilities = self.probabilities(outputs)
        rounded = probabilities.astype(np.float64).round(6).tolist()
        rows = zip(self.adjust_logits(outputs), probabilities, rounded, strict=True)
        for scores, exact, numbers in rows:
            yield {"prediction": self._predict(scores, exact), "probabilities": numbers}

    def _predict(self, scores: np.ndarray, probabilities: np.ndarray) -> Any:
        """From (C,) scores and probabilities."""
        if self.labels.problem_type == MULTI:
            return _decode_label(scores > 0, self.labels)
        best = int(scores.argmax())
        return None if self.abstains(probabilities[best]) else self.labels.names[best]

    def metrics(self, outputs: np.ndarray, truth: Sequence[Any]) -> dict[str, Any]:
        import datasets  # takes half a second with pandas; a run already has its labels as numbers

        table = Table.of(datasets.Dataset.from_dict({"label": list(truth)}), "texts")
        encoded = self.labels.in_columns(table, ("label",)).encode(table)
        return classification_metrics(self.adjust_logits(outputs), encoded, self.labels)

    def prediction_lines(
        self, rows: np.ndarray, logits: np.ndarray, truth: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        """The lines of predictions.jsonl: id (row in the file, from 0), label, prediction,
        probabilities (in the order of the classes)."""
        for row, label, answer in zip(rows, truth, self.answers(logits), strict=True):
            yield {"id": int(row), "label": _decode_label(label, self.labels), **answer}


def _decode_label(label: Any, labels: Labels) -> Any:
    """An encoded label -> its name, its names (multi-label), its number or its numbers."""
    if labels.problem_type == SINGLE:
        return labels.names[int(label)]
    if labels.problem_type == MULTI:
        return [name for name, present in zip(labels.names, label, strict=True) if present]
    # 0.1, not 0.10000000149
    numbers = [float(str(number)) for number in np.atleast_1d(label)]
    return numbers[0] if labels.size == 1 else numbers


def labels_of(config: Any) -> Labels:
    """A saved model's labels, in the order of its outputs. Raises UserError if one has no name, or
    another's."""
    where = f"{config.name_or_path}: id2label in config.json"
    if sorted(config.id2label) != list(range(config.num_labels)):
        has = listing(config.id2label)
        raise UserError(
            f"{where} has {has}, and needs a name for 0 to {config.num_labels - 1}"
        )
    values = [config.id2label[index] for index in range(config.num_labels)]
    names = tuple(map(str, values))
    are_names = all(isinstance(value, str | int | float) for value in values)
    are_unicode = not re.search("[\ud800-\udfff]", "".join(names))
    if not are_names or not are_unicode or not all(map(str.strip, names)):
        raise UserError(f"{where} has an output without a name in Unicode: name each")
    if len(set(names)) < len(names):  # metrics would count both as the last of them
        [(repeated, _)] = Counter(names).most_common(1)
        raise UserError(f"{where} names several outputs {repeated!r}: rename them")
    # one output without a type is a number, as in transformers: a reranker's, say
    problem_type = config.problem_type or (REGRESSION if len(names) == 1 else SINGLE)
    if problem_type not in get_args(ProblemType):
        kinds = listing(get_args(ProblemType))
        raise UserError(
            f"{config.name_or_path}: problem_type {problem_type!r} in config.json is none of {kinds}"
        )
    return Labels(problem_type, names, ())


def answers_for(name: str, config: Any) -> Any:
    """The `Answers` of a saved model: a feature's, or else a classifier's."""
    for feature in features():
        answers = feature.answers(name, config)
        if answers is not None:
            return answers
    return ClassAnswers(labels_of(config))
