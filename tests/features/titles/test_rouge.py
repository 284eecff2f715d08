"""ROUGE against rouge-chinese, and cases counted by hand."""

import os
import re
import unicodedata
from typing import Any

import pytest

from tests.inputs import CHINESE
from toolkit.features.titles import rouge
from toolkit.features.titles.evaluation import title_metrics


def cut_by_jieba(text: str) -> str:
    """As users of rouge-chinese do, after the same normalisation."""
    import jieba

    jieba.setLogLevel(60)
    jieba.dt.tmp_dir = os.environ["TOOLKIT_TESTS_FOLDER"]  # its cache file, removed at the end
    words = jieba.lcut(unicodedata.normalize("NFKC", text).lower())
    return " ".join(word for word in words if any(letter.isalnum() for letter in word))


def cut_into_characters(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).lower()
    spaced = re.sub("([㐀-鿿豈-﫿〇぀-ヿ])", r" \1 ", text)
    whole_numbers = re.sub(r"(?<=\d)\.(?=\d)", "ⴰ", spaced)  # a letter no title contains
    return re.sub(r"[\W_]+", " ", whole_numbers).replace("ⴰ", ".").strip()


@pytest.mark.parametrize(
    ("segmenter", "cut"), [("jieba", cut_by_jieba), ("char", cut_into_characters)]
)
def test_chinese_titles_score_as_in_rouge_chinese(segmenter: str, cut: Any) -> None:
    """Each title and text for each title: sentences that share words, and others."""
    rouge_chinese = pytest.importorskip("rouge_chinese")
    pairs = [(text, title) for row in CHINESE for text in row for title, _ in CHINESE]
    predictions, references = map(list, zip(*pairs, strict=True))
    ours = rouge.scores(predictions, references, segmenter)
    # counts n-grams as ROUGE is defined: by default it takes sets
    words = [*map(cut, predictions)], [*map(cut, references)]
    theirs = rouge_chinese.Rouge(exclusive=False).get_scores(*words)
    for pair, mine, other in zip(pairs, ours, theirs, strict=True):
        expected = [other[name]["f"] for name in ("rouge-1", "rouge-2", "rouge-l")]
        # it adds 1e-8 to a denominator
        assert list(mine.values()) == pytest.approx(expected, abs=1e-7), pair


@pytest.mark.parametrize(
    ("prediction", "reference", "segmenter", "expected"),
    [
        # tokens: the cat sat | the cat ran home: 2 of 3 and 4; 1 of 2 and 3 bigrams; LCS the cat
        ("The cat sat.", "the cat ran home", "word", (4 / 7, 2 / 5, 4 / 7)),
        # a word that occurs twice on one side counts once
        ("the the", "the cat", "word", (1 / 2, 0, 1 / 2)),
        # the order matters to LCS only
        ("b a", "a b", "word", (1, 0, 1 / 2)),
        # mate60 and 3.5 are words
        ("Mate60 售 3.5", "mate60 3.5", "char", (4 / 5, 0, 4 / 5)),
        # full-width is the same
        ("２０２４年Ｔ恤！", "2024年t恤", "jieba", (1, 1, 1)),
        # numbers and marks
        ("涨50%，到3.5亿", "涨 50%", "jieba", (4 / 7, 2 / 5, 4 / 7)),
        ("《》——……😀", "a", "char", (0, 0, 0)),
        ("", "a b", "word", (0, 0, 0)),
    ],
)
def test_counted_by_hand(
    prediction: str, reference: str, segmenter: str, expected: tuple[float, ...]
) -> None:
    (scores,) = rouge.scores([prediction], [reference], segmenter)
    assert scores == pytest.approx(dict(zip(rouge.KINDS, expected, strict=True)))


def test_auto_goes_by_the_references() -> None:
    for references, segmenter in (
        (["Ink helps drive democracy in Asia", "the character 好 means good"], "word"),
        (["Apple 发布 iPhone 新品", "华为手机"], "jieba"),
        (["새 휴대폰 발표"], "char"),
        (["Новый телефон"], "char"),
        (["Le président élu à Paris hier"], "word"),
        (["", "2024 !"], "word"),
    ):
        assert rouge.resolve("auto", references) == segmenter
        assert title_metrics(references, references)["rouge_segmenter"] == segmenter
    assert rouge.resolve("char", ["a"]) == "char"
