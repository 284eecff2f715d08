"""What is wrong with predicted spans, for the page and a line at the end of a run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.features.spans.metrics import span_intervals
from toolkit.features.spans.spans import Span

_MAX_TEXTS = 20
_CONTEXT = 40
"""Characters that are shown on either side of a span."""


class Mistake(NamedTuple):
    """`kind`: missed, invented, label (the borders are right) or border."""

    kind: str
    truth: Span | None
    found: Span | None


class TextMistakes(NamedTuple):
    """The mistakes in a text, and its pieces for the page: (characters, kind, hint)."""

    row: int
    mistakes: list[Mistake]
    pieces: list[tuple[str, str, str]]


def mistakes_of(truth: Sequence[Span], predicted: Sequence[Span]) -> list[Mistake]:
    """A true span that no predicted one overlaps is missed, a predicted one that overlaps no true
    one is invented."""
    wrong = [span for span in predicted if span not in truth]
    mistakes = []
    overlapping: set[Span] = set()
    for span in truth:
        if span in predicted:
            continue
        others = [
            other for other in wrong if other.start < span.end and span.start < other.end
        ]
        overlapping.update(others)
        kind = "border" if others else "missed"
        if any(other[:2] == span[:2] for other in others):
            kind = "label"
        mistakes.append(Mistake(kind, span, others[0] if others else None))
    for other in wrong:
        if other not in overlapping:
            mistakes.append(Mistake("invented", None, other))
    return mistakes


def summary(
    lines: Iterable[Mapping[str, Any]], texts: Sequence[str] = ()
) -> dict[str, Any]:
    """From the lines of predictions.jsonl: `intervals` of the metrics, `kinds` of mistakes and their
    number, `confusion` of labels ((true, predicted), None for no span, and how often), and `worst`,
    the texts with most mistakes."""
    all_truth = []
    all_predicted = []
    kinds: Counter[str] = Counter()
    confusion: Counter[tuple[str | None, str | None]] = Counter()
    wrong = []
    for place, line in enumerate(lines):
        truth, predicted = _spans(line["label"]), _spans(line["prediction"])
        all_truth.append(truth)
        all_predicted.append(predicted)
        confusion.update((span.label, span.label) for span in truth if span in predicted)
        mistakes = mistakes_of(truth, predicted)
        kinds.update(mistake.kind for mistake in mistakes)
        for _, true, found in mistakes:
            confusion[true and true.label, found and found.label] += 1
        if mistakes:
            wrong.append((place, line["id"], truth, predicted, mistakes))
    wrong.sort(key=lambda item: -len(item[-1]))
    worst = []
    for place, row, truth, predicted, mistakes in wrong[:_MAX_TEXTS]:
        pieces = _pieces(texts[place], truth, predicted) if texts else []
        worst.append(TextMistakes(row, mistakes, pieces))
    return {
        "intervals": span_intervals(all_predicted, all_truth),
        "kinds": {kind: kinds[kind] for kind in ("missed", "invented", "label", "border")},
        "confusion": confusion,
        "worst": worst,
        "num_wrong": len(wrong),
    }


def _spans(items: Sequence[Mapping[str, Any]]) -> list[Span]:
    return [Span(item["start"], item["end"], item["label"]) for item in items]


def _pieces(
    text: str, truth: Sequence[Span], predicted: Sequence[Span]
) -> list[tuple[str, str, str]]:
    """The text, cut at the borders of all spans; what is far from them is left out."""
    borders = {border for span in (*truth, *predicted) for border in span[:2]}
    cuts = sorted(borders | {0, len(text)})
    pieces = []
    for start, end in itertools.pairwise(cuts):
        labels = [_label_at(start, spans) for spans in (truth, predicted)]
        piece = text[start:end]
        if labels == ["", ""] and len(piece) > 2 * _CONTEXT:
            piece = f"{piece[:_CONTEXT]} … {piece[-_CONTEXT:]}"
        kind = "right" if labels[0] == labels[1] else "label"
        if not labels[0] or not labels[1]:
            kind = "missed" if labels[0] else "invented"
        if labels == ["", ""]:
            kind = ""
        pieces.append((piece, kind, " → ".join(label or "–" for label in labels)))
    return pieces


def _label_at(place: int, spans: Sequence[Span]) -> str:
    return next((span.label for span in spans if span.start <= place < span.end), "")
