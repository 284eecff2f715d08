"""Spans of every text exactly once, and their scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from toolkit.config import ModelSettings
from toolkit.data.table import TextBlock
from toolkit.data.token_files import split_of_arrays
from toolkit.data.tokens import Split
from toolkit.errors import UserError
from toolkit.evaluation.answers import Answers
from toolkit.evaluation.outputs import BatchSizes, ComputeMetrics, Evaluation, Outputs
from toolkit.features.spans.data import SpanCollator, SpanSplit
from toolkit.features.spans.decoding import predict_tags
from toolkit.features.spans.metrics import span_counts, span_metrics
from toolkit.features.spans.model import load_saved_tagger
from toolkit.features.spans.spans import Span, parse_spans
from toolkit.features.spans.windows import WindowReader, arrays_of

Lines = list[list[dict[str, Any]]]
"""The spans of each text, as files have them."""


def span_evaluation(
    outputs: Outputs, labels: Sequence[str], compute_metrics: ComputeMetrics
) -> Evaluation:
    """The evaluation from gathered losses (N,), summed over the tokens of each window, and tags and
    their probabilities (N, T). All ranks get the metrics."""
    arrays = outputs.in_order()
    if not arrays:
        return outputs.make_evaluation()
    split: Any = outputs.split
    losses, tags, probabilities = arrays
    texts = split.texts()
    found = _spans_of_texts(split, texts, labels, tags, probabilities)
    predicted = list(map(_without_probabilities, found))
    truth = split.spans()
    metrics = {"num_samples": len(truth), **compute_metrics(predicted, truth)}

    def lines() -> Iterator[dict[str, Any]]:
        _, counts = span_counts(predicted, truth)
        for place, row in enumerate(split.text_rows.tolist()):
            right, both = counts[place, 0].sum(), counts[place, 1:].sum()
            yield {
                "id": row,
                "label": [_line(span, texts[place]) for span in truth[place]],
                "prediction": found[place],
                # whose weighted mean is the F1 of all texts
                "scores": {"f1": float(2 * right / max(1, both))},
                "weight": int(both),
            }

    return outputs.make_evaluation(losses, metrics, lines)


def _spans_of_texts(
    split: SpanSplit,
    texts: Sequence[str],
    labels: Sequence[str],
    tags: np.ndarray,
    probabilities: np.ndarray,
) -> Lines:
    lines: Lines = [[] for _ in texts]
    for text, start, end, label, probability in split.decode(tags, probabilities):
        line = _line(Span(start, end, labels[label]), texts[text])
        lines[text].append({**line, "probability": round(probability, 6)})
    return lines


def _line(span: Span, text: str) -> dict[str, Any]:
    return {**span._asdict(), "text": text[span.start : span.end]}


def _without_probabilities(lines: Sequence[dict[str, Any]]) -> list[Span]:
    return [Span(line["start"], line["end"], line["label"]) for line in lines]


class SpanOutputs(NamedTuple):
    """Texts and the spans that were found in each."""

    texts: Sequence[str]
    lines: Lines


class SpanAnswers(Answers):
    """Spans by a saved tagger."""

    def __init__(self, labels: Sequence[str], stride: int | None) -> None:
        self.labels = labels
        self.stride = stride

    def load(self, settings: ModelSettings) -> Any:
        return load_saved_tagger(settings)

    def split(
        self,
        tokenizer: Any,
        model_config: Any,
        max_length: int,
        texts: TextBlock,
        shared_as: str | None,
    ) -> Split:
        if len(texts) > 1:
            raise UserError("spans are in one text: leave out --text_pair")

        def encode() -> dict[str, np.ndarray]:
            reader = WindowReader(tokenizer, max_length, self.stride)
            windows = []
            for tokens in reader.tokens(texts[0]):
                windows.append(list(reader.windows(tokens, np.zeros_like(tokens.ids))))
            return arrays_of(windows)

        split: Any = split_of_arrays(encode, model_config, shared_as, SpanSplit)
        return replace(split, source_texts=tuple(texts[0]), collator=SpanCollator)

    def outputs(
        self, accelerator: Any, model: Any, split: Any, tokenizer: Any, *sizes: Any
    ) -> SpanOutputs | None:
        outputs = Outputs(accelerator, split, tokenizer, BatchSizes(*sizes))
        for batch in outputs.batches(model):
            logits = model(**batch.inputs).logits.float()  # (B, S, C)
            tags, probabilities = predict_tags(batch, logits)  # (B, T)
            outputs.add(accelerator.gather_for_metrics((batch.ids, tags, probabilities)))
        arrays = outputs.in_order()
        if not arrays:
            return None
        texts = split.source_texts
        return SpanOutputs(texts, _spans_of_texts(split, texts, self.labels, *arrays))

    def answers(self, outputs: SpanOutputs) -> Iterator[dict[str, Any]]:
        return ({"prediction": lines} for lines in outputs.lines)

    def metrics(self, outputs: SpanOutputs, truth: Sequence[Any]) -> dict[str, Any]:
        return span_metrics(
            list(map(_without_probabilities, outputs.lines)),
            list(map(parse_spans, truth, outputs.texts)),
        )
