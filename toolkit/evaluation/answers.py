"""From a model's outputs to predictions and metrics; features derive from `Answers` for other models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from toolkit.config import ModelSettings, ProblemType
from toolkit.data.labels import MULTI, Labels
from toolkit.data.table import Table
from toolkit.errors import UserError, listing
from toolkit.evaluation.outputs import ComputeMetrics, Evaluation, predict
from toolkit.utils.features import features

DECISIONS = "decisions.json"
"""The file of a model folder with its thresholds and temperature, which belong to the weights of one step."""
_SINGLE: ProblemType = "single_label_classification"
# above it the confusion matrix would bloat each line of eval.jsonl; predictions.jsonl has the same facts
_MAX_CONFUSION_CLASSES = 100


class Answers:
    """How to load a saved model, run it, and turn its outputs into predictions and metrics."""

    no_answer_reason = ""
    """Why a prediction may be None."""

    def load(self, settings: ModelSettings) -> Any:
        """Loads the saved model. Raises UserError if it cannot be loaded."""
        raise NotImplementedError

    def outputs(self, accelerator: Any, model: Any, split: Any, tokenizer: Any, *sizes: Any) -> Any:
        """The outputs for a whole split, in its order, on the main process, None on the others; a collective, called
        under autocast. `sizes`: as for `toolkit.evaluation.outputs.predict`."""
        raise NotImplementedError

    def answers(self, outputs: Any) -> Iterator[dict[str, Any]]:
        """Yields `prediction`, and the other keys of its line in predictions.jsonl, for each sample."""
        raise NotImplementedError

    def metrics(self, outputs: Any, truth: Sequence[Any]) -> dict[str, Any]:
        """The numbers of eval.jsonl without the loss. `truth`: labels as a file has them (names, numbers, titles)."""
        raise NotImplementedError

    def evaluation(self, evaluation: Evaluation, compute_metrics: ComputeMetrics) -> Evaluation:
        """The evaluation of plain outputs -> the evaluation of these answers; on the main process."""
        return evaluation

    def describe(self, evaluation: Evaluation) -> list[str]:
        """Lines to print: how these answers change the metrics."""
        return []


@dataclass(frozen=True)
class ClassAnswers(Answers):
    """Predicts the most probable class, the labels above 0.5, or (regression) the numbers."""

    labels: Labels

    def load(self, settings: ModelSettings) -> Any:
        from toolkit.models.classifier import (
            load_saved_classifier,
        )  # imports transformers: a report does without

        return load_saved_classifier(settings)

    def outputs(self, accelerator: Any, model: Any, split: Any, tokenizer: Any, *sizes: Any) -> Any:
        return predict(accelerator, model, split, tokenizer, *sizes)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """(N, C) logits -> (N, C) float32: softmax, or a sigmoid per class; regression returns its numbers."""
        tensor = torch.from_numpy(logits)
        if self.labels.problem_type == _SINGLE:
            return tensor.softmax(dim=-1).numpy()
        return tensor.sigmoid().numpy() if self.labels.problem_type == MULTI else logits

    def adjust_logits(self, logits: np.ndarray) -> np.ndarray:
        """(N, C) logits -> (N, C) scores: the prediction is the argmax, or (multi-label) every class above 0."""
        return logits

    def abstains(self, probability: float) -> bool:
        """Whether to predict None if the best class has this probability."""
        return False

    def answers(self, outputs: np.ndarray) -> Iterator[dict[str, Any]]:
        """For each row of (N, C) logits its prediction, and its probabilities rounded to six digits; predicted
        numbers keep float32's digits, however small they are."""
        labels = self.labels
        if labels.problem_type == "regression":
            yield from ({"prediction": _decode_label(row, labels)} for row in outputs)
            return
        for probabilities, scores in zip(
            self.probabilities(outputs), self.adjust_logits(outputs), strict=True
        ):
            rounded = [round(float(probability), 6) for probability in probabilities]
            if labels.problem_type == _SINGLE:
                index = int(scores.argmax())
                prediction = None if self.abstains(probabilities[index]) else labels.names[index]
                yield {"prediction": prediction, "probabilities": rounded}
            else:
                yield {"prediction": _decode_label(scores > 0, labels), "probabilities": rounded}

    def metrics(self, outputs: np.ndarray, truth: Sequence[Any]) -> dict[str, Any]:
        import datasets  # takes half a second with pandas; a run already has its labels as numbers

        table = Table(datasets.Dataset.from_dict({"label": list(truth)}), "texts", "")
        encoded = self.labels.in_columns(table, ("label",)).encode(table, np.arange(len(truth)))
        return classification_metrics(self.adjust_logits(outputs), encoded, self.labels)

    def prediction_lines(
        self, rows: np.ndarray, logits: np.ndarray, truth: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        """The lines of predictions.jsonl: id (row in the file, from 0), label, prediction, probabilities (in the order
        of the classes)."""
        for row, label, answer in zip(rows, truth, self.answers(logits), strict=True):
            yield {"id": int(row), "label": _decode_label(label, self.labels), **answer}


def _decode_label(label: Any, labels: Labels) -> Any:
    """An encoded label -> its name, its names (multi-label), its number or its numbers."""
    if labels.problem_type == _SINGLE:
        return labels.names[int(label)]
    if labels.problem_type == MULTI:
        return [name for name, present in zip(labels.names, label, strict=True) if present]
    numbers = [float(str(number)) for number in np.atleast_1d(label)]  # 0.1, not 0.10000000149
    return numbers[0] if labels.size == 1 else numbers


def labels_of(config: Any) -> Labels:
    """A saved model's labels, in the order of its outputs. Raises UserError if one has no name, or another's."""
    where = f"{config.name_or_path}: id2label in config.json"
    if sorted(config.id2label) != list(range(config.num_labels)):
        raise UserError(
            f"{where} has {listing(config.id2label)}, and needs a name for 0 to {config.num_labels - 1}"
        )
    names = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    if len(set(names)) < len(names):  # metrics would count both as the last of them
        repeated = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{where} names several outputs {repeated!r}: rename them")
    # one output without a type is a number, as in transformers: a reranker's, say
    return Labels(config.problem_type or ("regression" if len(names) == 1 else _SINGLE), names, ())


def answers_for(name: str, config: Any) -> Any:
    """The `Answers` of a saved model: a feature's, or else a classifier's."""
    for feature in features():
        answers = feature.answers(name, config)
        if answers is not None:
            return answers
    return ClassAnswers(labels_of(config))


def classification_metrics(logits: np.ndarray, truth: np.ndarray, labels: Labels) -> dict[str, Any]:
    """(N, C) logits and (N,) or (N, C) labels -> the numbers of eval.jsonl, over all samples.

    Classification: accuracy, F1 (macro, micro, weighted), precision, recall and F1 of each class, the confusion matrix.
    Regression: mean squared error, mean absolute error and Pearson correlation, averaged over the outputs.
    """
    from sklearn import (
        metrics as sk,
    )  # takes a second to import, and only the main process computes

    if labels.problem_type == "regression":
        return _regression_metrics(
            logits.astype(np.float64), truth.reshape(logits.shape).astype(np.float64), labels
        )
    classes = list(range(labels.size))
    single = labels.problem_type == "single_label_classification"
    guess = logits.argmax(axis=1) if single else (logits > 0).astype(int)
    truth = truth if single else truth.astype(int)
    report: Any = sk.classification_report(
        truth, guess, labels=classes, output_dict=True, zero_division=0
    )
    numbers: dict[str, Any] = {"accuracy": float(sk.accuracy_score(truth, guess))}
    for average in (
        "macro",
        "micro",
        "weighted",
    ):  # with a single label the micro F1 equals the accuracy
        numbers[f"f1_{average}"] = float(
            report.get(f"{average} avg", {"f1-score": numbers["accuracy"]})["f1-score"]
        )
    numbers["per_class"] = {
        name: {"precision": float(line["precision"]), "recall": float(line["recall"]), "f1": float(line["f1-score"]),
               "support": int(line["support"])}
        for name, line in zip(labels.names, map(report.__getitem__, map(str, classes)), strict=True)
    }  # fmt: skip
    if single and labels.size <= _MAX_CONFUSION_CLASSES:
        numbers["confusion_matrix"] = sk.confusion_matrix(truth, guess, labels=classes).tolist()
    return numbers


def _regression_metrics(guess: np.ndarray, truth: np.ndarray, labels: Labels) -> dict[str, Any]:
    """(N, C) numbers -> means over the outputs, and `per_output` if there are several."""
    from scipy.stats import pearsonr
    from sklearn import metrics as sk

    varied = (np.ptp(truth, axis=0) > 0) & (
        np.ptp(guess, axis=0) > 0
    )  # the correlation of a constant is undefined
    columns = {
        "mse": sk.mean_squared_error(truth, guess, multioutput="raw_values"),
        "mae": sk.mean_absolute_error(truth, guess, multioutput="raw_values"),
        "pearson": [
            pearsonr(*pair).statistic if vary else 0.0
            for *pair, vary in zip(truth.T, guess.T, varied, strict=True)
        ],
    }
    means = {name: float(np.mean(column)) for name, column in columns.items()}
    each = {label: {name: float(column[place]) for name, column in columns.items()}
            for place, label in enumerate(labels.names)}  # fmt: skip
    return means | ({"per_output": each} if len(each) > 1 else {})
