"""Near duplicates among real reviews: all planted ones, and no others."""

from toolkit.data.read import read_demo
from toolkit.features.folds.duplicates import SIMILAR, near_duplicates, normalise, similarity


def test_planted_duplicates_are_found() -> None:
    assert near_duplicates([]) == []
    assert near_duplicates(["", "a", "A.", "b", ""]) == [[0, 4], [1, 2]]
    reviews = read_demo("demo:rotten-tomatoes")["train"].rows["text"][:1500]
    rows = [*reviews, "这家书店的服务很好，下次还会再来买书。", "..."]
    texts = [
        *rows,
        rows[5].upper() + " !!",
        f"well, {rows[7]}",
        "这家书店的服务很好 下次还会再来买书",
        "!!!",
    ]
    assert len(rows[7]) > 100
    groups = near_duplicates(texts)
    assert all(planted in groups for planted in ([5, 1502], [7, 1503], [1500, 1504]))
    assert [1501, 1505] not in groups  # texts of punctuation only
    assert len(groups) < 10
    for first, *others in groups:
        assert all(
            similarity(normalise(texts[first]), normalise(texts[other])) >= SIMILAR
            for other in others
        )
