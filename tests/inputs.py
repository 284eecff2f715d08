"""Models and files that tests read, made once in a test run for all xdist workers. Nobody writes into them."""

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

_PIECES = "abcdefghijklmnopqrstuvwxyz0123456789"
_WORDS = "good bad film book very the and not room price service story dull fine"
_LABEL_WORDS = ("good", "bad", "film", "book", "very", "room", "dull", "fine", "price", "story")
CHINESE = [
    ("华为发布新手机", "华为公司今天在北京发布新手机,公司表示新手机的价格没有变化,市场反应很好。"),
    ("北京市场价格上涨", "北京市场的价格今天上涨,专家表示价格上涨的原因是天气变化,市民反应不大。"),
    ("公司增加投资", "公司今天表示增加投资,新的投资在上海市场,专家认为公司的发展很好。"),
    ("专家认为经济发展很好", "专家今天在北京表示,中国经济发展很好,市场没有大的变化,投资增加。"),
    ("新手机价格没有变化", "公司发布的新手机价格没有变化,市场反应不大,市民认为价格很好。"),
]
"""Titles of news, and texts."""
_CHINESE = "的是不好很坏书店酒房间电影我他在有一了服务差小大看買賣"


def session_folder() -> Path:
    """The folder of this test run, which tests/conftest.py makes and removes."""
    return Path(os.environ.get("TOOLKIT_TESTS_FOLDER") or tempfile.gettempdir())


def shared_folder(name: str) -> Path:
    return session_folder() / "inputs" / name


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, which `make` has filled: once in a test run, by the worker that needs it first."""
    folder = shared_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            draft = folder.with_name(f"draft of {name}")
            shutil.rmtree(draft, ignore_errors=True)  # of a worker that was killed
            draft.mkdir()
            make(draft)
            draft.rename(folder)
    return folder


def made_once(file: str = "") -> Callable[[Callable[..., object]], Callable[..., Path]]:
    """The decorated function fills a folder, of its name and arguments; the result returns this `file` of it."""

    def decorate(make: Callable[..., object]) -> Callable[..., Path]:
        def path_of(*arguments: str) -> Path:
            name = " ".join([make.__name__, *arguments])
            return shared(name, lambda folder: make(folder, *arguments)) / file

        path_of.__doc__ = make.__doc__
        return path_of

    return decorate


@made_once()
def tiny_model(folder: Path) -> None:
    """A folder with a random BERT (2 layers) and its tokenizer, the same in every session.

    Every size is odd and no parameter's number of elements is divisible by 2: whatever divides them has to pad.
    """
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_CHINESE, *_PIECES, *".,!。，"]
    vocabulary += [*(f"##{piece}" for piece in _PIECES), *_WORDS.split()]
    vocabulary += [f"[unused{number}]" for number in range(127 - len(vocabulary))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=131)
    assert len(tokenizer) == 127
    config = BertConfig(
        vocab_size=127, hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=71,
        max_position_embeddings=131, type_vocab_size=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(20240229)
        model = BertModel(config)
    assert all(parameter.numel() % 2 for parameter in model.parameters())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@made_once()
def sharp_model(folder: Path) -> None:
    """The tiny BERT with attention that prefers some tokens to others, as a pretrained one's does: where all count
    alike, every pattern gives the same numbers."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model(), folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if re.search(r"(query|key|value|attention\.output\.dense)\.weight$", name):
            weight *= 20
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@made_once()
def masked_model(folder: Path) -> None:
    """A small BERT with its masked-language head."""
    import pandas as pd

    from tests.architectures import make_architecture

    make_architecture("BERT", folder, list(pd.read_csv(reviews())["text"][:80]))


@made_once("model")
def masked_bigbird(folder: Path) -> None:
    """A BigBird with blocks of 4 tokens, converted from `masked_model`."""
    from toolkit.models.to_bigbird import SparseSizes, to_bigbird

    to_bigbird(str(masked_model()), folder / "model", SparseSizes(128, 4, 1))


def _demo(name: str, rows: int) -> Any:
    from toolkit.data.read import read_demo

    return read_demo(f"demo:{name}")["train"].rows.shuffle(seed=7).select(range(rows))


@made_once("reviews.csv")
def reviews(folder: Path) -> None:
    """211 real film reviews of uneven length with `neg` and `pos` labels, as a CSV file."""
    _demo("rotten-tomatoes", 211).to_csv(folder / "reviews.csv", index=False)


@made_once("rows.csv")
def uneven_reviews(folder: Path) -> None:
    """About 130 of `reviews`, most of them `neg`; `tags` has one or two classes for each: the label, and `film`;
    `topic` is `long` or `short`; `other` is another row's text."""
    import pandas as pd

    table = pd.read_csv(reviews())
    table = table[(table["label"] == "neg") | (table.index % 5 == 0)]
    film = table["text"].str.contains("film").map({True: "|film", False: ""})
    table["tags"] = table["label"] + film
    table["topic"] = table["text"].str.len().gt(110).map({True: "long", False: "short"})
    table["other"] = table["text"].iloc[::-1].str[:60].tolist()
    table.to_csv(folder / "rows.csv", index=False)


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@made_once("rows.jsonl")
def labelled(folder: Path, kind: str, part: str) -> None:
    """Short texts of uneven length, with labels computed from the words, as a JSONL file."""
    generator = random.Random(5)
    rows = []
    for _ in range({"train": 61, "test": 23}[part]):
        words = generator.choices(_LABEL_WORDS, k=generator.randint(1, 25))
        labels: dict[str, dict[str, object]] = {
            "six classes": {"label": f"class {len(words) % 6 * 2}"},
            "multi-label": {"label": sorted({"good", "bad", "dull"} & {*words})},
            "regression": {"label": len(words) / 10},
            "several numbers": {"length": len(words) / 10, "good": 2 + words.count("good") / 4},
        }
        rows.append({"text": " ".join(words), **labels[kind]})
    write_jsonl(folder / "rows.jsonl", rows)


@made_once("rows.csv")
def long_split(folder: Path, name: str) -> None:
    """`train` or `validation`: 48 and 12 real film reviews with `neg` and `pos` labels as CSV.
    In the tiny model's tokens a third of them are too short for BigBird's sparse pattern (704), and
    the others are not (800 to 1500)."""
    from transformers import AutoTokenizer

    tokenizer, table = AutoTokenizer.from_pretrained(tiny_model()), _demo("imdb", 300)
    lengths = [len(ids) for ids in tokenizer(list(table["text"]))["input_ids"]]
    short = [row for row, length in enumerate(lengths) if length <= 704][:20]
    long = [row for row, length in enumerate(lengths) if 800 <= length <= 1500][:40]
    rows = random.Random(3).sample([*short, *long], 60)
    part = rows[:48] if name == "train" else rows[48:]
    table.select(part).to_csv(folder / "rows.csv", index=False)


@made_once("rows.jsonl")
def titles(folder: Path, name: str) -> None:
    """`train` or `validation`: the beginnings of 48 and 12 real news articles (478 to 1205 tokens
    of the tiny model) with the first 1 to 7 words of their titles, as JSONL files. Most titles end
    in words of the tiny model's vocabulary, so that ROUGE is not 0; some are very short."""
    ends = (" the film and the story", " very good price", " not a dull room", " fine")
    rows = []
    for place, row in enumerate(_demo("bbc", 60)):
        title = " ".join(row["title"].split()[: 1 + place % 7])
        title = title[:2] if place % 6 == 1 and place < 48 else title + ends[place % 4]
        rows.append({"text": row["text"][: 600 + 100 * (place % 10)], "title": title})
    write_jsonl(folder / "rows.jsonl", rows[:48] if name == "train" else rows[48:])


@made_once("rows.jsonl")
def spans(folder: Path, name: str) -> None:
    """`train` or `validation`: 61 and 23 texts of 1 to 60 words with the spans of two labels, as a JSONL file. One
    label's spans have one or two words, each a token of the tiny model, or, misspelt, several."""
    found = {
        "THING": r"\b(?:film|book|story)s?\b",
        "JUDGEMENT": r"\b(?:very )?(?:good|bad|dull|fine)\b",
    }
    generator = random.Random(5)
    rows = []
    for _ in range({"train": 61, "validation": 23}[name]):
        words = generator.choices(
            [*_LABEL_WORDS, "films", "storys", "?"], k=generator.randint(1, 60)
        )
        text = " ".join(words)
        places = [
            (*match.span(), label) for label in found for match in re.finditer(found[label], text)
        ]
        rows.append({"text": text, "entities": sorted(places)})
    write_jsonl(folder / "rows.jsonl", rows)
