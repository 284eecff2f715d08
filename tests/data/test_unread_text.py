"""A tokenizer that cannot read part of the texts, and which part of a long text it reads: said, and the same for
whoever loads the saved model."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertConfig

from tests.faults import refusal
from tests.runs import edit_json
from toolkit import settings as task_settings
from toolkit.data.encode import encode_texts, truncate_split
from toolkit.data.prepare import Data, prepare_data
from toolkit.data.tokenizer import choose_max_length, load_tokenizer, set_truncation
from toolkit.pretrained import load_config

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like bert-base-chinese: the tokenizer keeps case, the vocabulary has no capitals."""
    folder = tmp_path_factory.mktemp("model")
    special = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    words = [*special, *LETTERS, *(f"##{each}" for each in LETTERS), *"一二三新闻"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    BertConfig(vocab_size=len(words), max_position_embeddings=32).save_pretrained(folder)
    return folder


def prepared(model: Path, folder: Path, text: str, **values: Any) -> tuple[Data, Any]:
    rows = [f"{text}新闻,{label}\n" for label in ("甲", "乙") * 40]
    file = folder / "train.csv"
    file.write_text("text,label\n" + "".join(rows), encoding="utf-8")
    settings = task_settings(model_name_or_path=str(model), train_file=str(file), **values)
    tokenizer = load_tokenizer(settings.model)
    return prepare_data(settings, tokenizer, load_config(settings.model)), tokenizer


# texts -> do_lower_case, parts of the line; none: all of it is read
UNKNOWN: dict[str, tuple[bool | None, list[str]]] = {
    "NBA": (None, ["NBA (", "--do_lower_case true reads 100 %"]),
    "Café": (None, ["Café (", "--do_lower_case true reads 100 %"]),
    "NBA Café": (True, []),
    "ＮＢＡ": (True, ["ＮＢＡ (", "NFKC", "100 %"]),
    "臺😀": (True, ["臺 (", "😀 ("]),
    "nba": (None, []),
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_words_that_the_model_cannot_read(text: str, model: Path, tmp_path: Path) -> None:
    lower, says = UNKNOWN[text]
    data, _ = prepared(model, tmp_path, text, do_lower_case=lower)
    lines = [note for note in data.notes if "unknown" in note]
    assert len(lines) == bool(says)
    assert all(part in lines[0] for part in ["100 % of the texts", *says] if says)
    assert ("reads" in "".join(lines)) == ("--do_lower_case true reads 100 %" in says)
    another_language = "совсем другой язык и ничего больше "
    says = ["совсем", "--model_name_or_path"]
    refusal(prepared, model, tmp_path, another_language, says=says)


def test_lower_case_for_whoever_loads_the_model(model: Path, tmp_path: Path) -> None:
    _, tokenizer = prepared(model, tmp_path, "NBA", do_lower_case=True)
    tokenizer.save_pretrained(tmp_path / "saved")
    text = "NBA 的 Café"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids[1:4]
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(text)["input_ids"] == ids
    assert Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json")).encode(text).ids == ids
    settings = task_settings(model_name_or_path=str(tmp_path / "saved"), do_lower_case=False).model
    assert load_tokenizer(settings)("N")["input_ids"][1] == tokenizer.unk_token_id
    config, without_option = tmp_path / "saved" / "tokenizer_config.json", "PreTrainedTokenizerFast"
    edit_json(config, tokenizer_class=without_option)
    refusal(load_tokenizer, settings, says=["--do_lower_case", "no such option"])


LONG = "abcdefgh"
# settings -> what is read of "a b c d e f g h新闻" in 6 tokens
READ = {
    "": "abcd",
    "truncation_side left": "gh新闻",
    "truncation_side right": "abcd",
    "head_tokens 1": "ah新闻",
}


@pytest.mark.parametrize("setting", READ)
def test_the_part_of_a_long_text_that_is_read(setting: str, model: Path, tmp_path: Path) -> None:
    """In training, and with the saved model; `--compare_max_length` reads the beginnings."""
    values: dict[str, Any] = dict([setting.split()]) if setting else {}
    data, tokenizer = prepared(model, tmp_path, " ".join(LONG), max_length=6, **values)
    words = ["[CLS]", *READ[setting], "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(data.train.tokens(0)) == words
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = load_tokenizer(task_settings(model_name_or_path=str(tmp_path / "saved")).model)
    texts = [[f"{' '.join(LONG)}新闻", "a"]]
    again = encode_texts(loaded, texts, 6)["input_ids"]
    assert loaded.convert_ids_to_tokens(again) == [*words, "[CLS]", "a", "[SEP]"]
    short = truncate_split(data.validation, tokenizer, 4, "short")
    assert tokenizer.convert_ids_to_tokens(short.tokens(0)) == ["[CLS]", "a", "b", "[SEP]"]


def test_head_tokens_that_leave_nothing_for_the_end(model: Path) -> None:
    settings = task_settings(model_name_or_path=str(model), head_tokens=4)
    tokenizer = load_tokenizer(settings.model)
    set_truncation(tokenizer, settings.data)
    config, says = load_config(settings.model), ["--max_length 6", "4 first", "--head_tokens"]
    refusal(choose_max_length, 6, tokenizer, config, says=says)
    refusal(encode_texts, tokenizer, [["a"], ["b"]], 9, says=["pairs", "--truncation_side right"])
    refusal(choose_max_length, 64, tokenizer, config, says=["32 positions", "recipes/bigbird.py"])
