"""Near duplicates among real reviews, each found, and nothing else."""

from __future__ import annotations

from toolkit.data.read import read_demo
from toolkit.features.folds.duplicates import SIMILAR, near_duplicates, normalised, similarity


def test_planted_duplicates_are_found() -> None:
    rows = [
        *read_demo("demo:rotten-tomatoes")["train"].rows["text"][:1500],
        "这家书店的服务很好，下次还会再来买书。",
        "...",
    ]
    changed = {
        1502: (5, rows[5].upper() + " !!"),
        1503: (7, f"well, {rows[7]}"),
        1504: (1500, "这家书店的服务很好 下次还会再来买书"),
    }
    texts = [*rows, *(text for _, text in changed.values()), "!!!"]
    assert len(rows[7]) > 100
    found = near_duplicates(texts)
    for place, (original, _) in changed.items():
        assert [original, place] in found
    for group in found:
        for place in group[1:]:
            assert similarity(normalised(texts[group[0]]), normalised(texts[place])) >= SIMILAR
    assert [1501, 1505] not in found  # marks alone are not the same
    assert len(found) < 10


def test_short_and_empty_texts() -> None:
    assert near_duplicates([]) == []
    assert near_duplicates(["", "a", "A.", "b", ""]) == [[0, 4], [1, 2]]
