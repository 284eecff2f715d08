"""Tensors cut out of long one-dimensional buffers that lie in several files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from toolkit.checkpoint.reader import ITEM_BYTES, Span


class Line:
    """Chunks of one dtype at places of an imagined line of elements; there may be gaps between them."""

    def __init__(self, dtype: str, chunks: Iterable[tuple[int, Span]]) -> None:
        """`chunks`: (first element, its span), in order."""
        self.dtype = dtype
        self.chunks = [(start, span) for start, span in chunks if span.count]
        self.starts = [start for start, _ in self.chunks]

    @classmethod
    def of(cls, dtype: str, spans: Iterable[Span]) -> Line:
        """Chunks that follow one another."""
        chunks, place = [], 0
        for span in spans:
            chunks.append((place, span))
            place += span.count
        return cls(dtype, chunks)

    @property
    def count(self) -> int:
        """Elements that there are."""
        return sum(span.count for _, span in self.chunks)

    def cut(self, start: int, count: int) -> tuple[Span, ...]:
        """The spans of elements [start, start + count). Raises LookupError where they are not all there."""
        spans, item = [], ITEM_BYTES[self.dtype]
        index = bisect_right(self.starts, start) - 1
        while count:
            if not 0 <= index < len(self.chunks):
                raise LookupError
            first, span = self.chunks[index]
            skipped = start - first
            taken = min(span.count - skipped, count)
            if skipped < 0 or taken <= 0:
                raise LookupError
            spans.append(Span(span.member, span.start + skipped * item, taken))
            start, count, index = start + taken, count - taken, index + 1
        return tuple(spans)
