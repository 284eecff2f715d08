"""Texts -> one flat array of tokens per split, mapped from disk; words that a tokenizer cannot
read, and which part of a long text it reads: said, and the same for who loads the saved model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC
from transformers import AutoTokenizer, BertConfig

from tests.architectures import make_tokenizer
from tests.faults import refusal
from tests.runs import edit_json
from toolkit import settings as task_settings
from toolkit.config import PretrainedSettings
from toolkit.data import encode, token_files
from toolkit.data import tokenizer as tokenizers
from toolkit.data.encode import encode_texts, truncate_split
from toolkit.data.prepare import Data, prepare_data
from toolkit.data.tokenizer import choose_max_length, load_tokenizer, set_truncation
from toolkit.pretrained import load_config

TEXTS = ["good film", "", "很好 的 书店", "the " * 50, "a"]


def config(kind: str = "bert", positions: int | None = 512, pad: int | None = 0) -> SimpleNamespace:
    return SimpleNamespace(model_type=kind, max_position_embeddings=positions, pad_token_id=pad)


def test_a_split_comes_back_as_it_was_saved(tokenizer: Any, tmp_path: Path) -> None:
    before = tokenizer.backend_tokenizer.to_str()
    labels, rows = np.array([0, 1, 0, 1, 0]), np.array([0, 2, 3, 4, 9])
    lines = ["a\nb", "", "很好", '"', "\u2028"]
    (folder := tmp_path / "train").mkdir()
    blocks = encode.encode_blocks(tokenizer, [[TEXTS[:2]], [TEXTS[2:]]], 20, 5)
    counts = token_files.save_tokens(folder, blocks, unknown=1)
    # saved with the model, whether or not this made the tokens
    assert tokenizer.backend_tokenizer.to_str() == before
    np.save(folder / "labels.npy", labels)
    np.save(folder / "rows.npy", rows)
    list(token_files.save_texts(folder / "texts.jsonl", [[lines[:2]], [lines[2:]]]))
    split = token_files.load_split(tmp_path, "train")
    theirs = tokenizer(TEXTS, truncation=True, max_length=20)["input_ids"]
    assert [split.tokens(place).tolist() for place in range(5)] == theirs
    ids = split.input_ids
    totals = (counts.truncated, counts.unknown, counts.tokens)
    assert totals == (1, int((ids == 1).sum()), len(ids))
    assert np.concatenate(counts.has_unknown).tolist() == [1 in tokens for tokens in theirs]
    assert (ids.dtype, split.offsets.dtype) == (np.int32, np.int64)
    assert isinstance(ids, np.memmap)
    assert split.lengths.tolist() == list(map(len, theirs))
    assert (split.labels.tolist(), split.rows.tolist()) == (labels.tolist(), rows.tolist())
    assert split.texts() == lines
    list(token_files.save_texts(folder / "texts.jsonl", [[["a\nb"], ["c\nd"]]]))
    assert split.texts() == ["a b\nc\nd"]  # the first line is the pair's first text


def test_only_the_beginning_of_a_very_long_text_is_tokenized(tokenizer: Any) -> None:
    """Whole where its words might be others than those of the beginning: one endless word, and blanks."""
    long = "good film, 很好[SEP] " * 40
    texts = [long, "word " + "x" * 900, " " * 900 + TEXTS[3], "good film " * 50]
    theirs = tokenizer(texts, truncation=True, max_length=9)["input_ids"]
    ours = encode.encode_texts(tokenizer, [texts], 9)
    assert [part.tolist() for part in np.split(ours["input_ids"], ours["offsets"][1:-1])] == theirs
    lengths = [len(text) for text in encode.cut_long_texts(tokenizer, texts, 9)]
    assert lengths == [144, *map(len, texts[1:])]


def test_padding_does_not_shift_the_positions_of_a_bert(tiny_model: Path, tmp_path: Path) -> None:
    """A model without a CLS token may need it on the left."""
    bert = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    for made, side in ((bert, "right"), (make_tokenizer("causal", TEXTS), "left")):
        made.save_pretrained(tmp_path / side)
        settings = PretrainedSettings(model_name_or_path=str(tmp_path / side))
        assert tokenizers.load_tokenizer(settings).padding_side == side


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens(["hello"]),
        lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", NFC()),
    ],
)
def test_the_fingerprint_is_that_of_the_tokens(tiny_model: Path, change: Any) -> None:
    before, after = (AutoTokenizer.from_pretrained(tiny_model) for _ in range(2))
    fresh = tokenizers.fingerprint(before)
    before(TEXTS, truncation=True, max_length=7, padding=True)
    change(after)
    texts = ["hello GOOD film and very bad book"]  # 14 tokens, cut at 9
    ids = [encode.encode_texts(each, [texts], 9)["input_ids"].tolist() for each in (before, after)]
    assert ids[0] != ids[1]
    assert fresh == tokenizers.fingerprint(before) != tokenizers.fingerprint(after)


def test_choose_max_length() -> None:
    for wanted, limit, model, chosen in (
        (None, 131, config(), 131),
        (None, 10**30, config(), 512),  # a tokenizer without a limit
        (None, 10**30, config(positions=None), 512),
        (None, 10**30, config("xlm-roberta", 514, 1), 512),
        (None, 10**30, config("camembert", 514, 1), 512),
        (None, 512, config("big_bird", 4096), 512),
        (512, 131, config(), 512),  # the tokenizer's own limit may be too low
        (5000, 10**30, config(positions=-1), 5000),  # relative positions
    ):
        tokenizer = SimpleNamespace(model_max_length=limit, init_kwargs={})
        tokenizer.num_special_tokens_to_add = lambda pair: 2
        assert tokenizers.choose_max_length(wanted, tokenizer, model) == chosen
        if model.max_position_embeddings in (512, 514):
            says = ["--max_length 513: the model has 512"]
            refusal(tokenizers.choose_max_length, 513, tokenizer, model, says=says)


LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like bert-base-chinese: the tokenizer keeps case, the vocabulary has no capitals."""
    folder = tmp_path_factory.mktemp("model")
    special = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    words = [*special, *LETTERS, *(f"##{each}" for each in LETTERS), *"一二三新闻"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    BertConfig(vocab_size=len(words), max_position_embeddings=32).save_pretrained(folder)
    return folder


def prepared(chinese: Path, folder: Path, text: str, **values: Any) -> tuple[Data, Any]:
    rows = [f"{text}新闻,{label}\n" for label in ("甲", "乙") * 40]
    file = folder / "train.csv"
    file.write_text("text,label\n" + "".join(rows), encoding="utf-8")
    settings = task_settings(model_name_or_path=str(chinese), train_file=str(file), **values)
    tokenizer = load_tokenizer(settings.model)
    return prepare_data(settings, tokenizer, load_config(settings.model)), tokenizer


# texts -> do_lower_case, parts of the line; none: all of it is read
UNKNOWN: dict[str, tuple[bool | None, list[str]]] = {
    "NBA": (None, ["NBA (", "--do_lower_case true reads 100 %"]),
    "Café": (None, ["Café (", "--do_lower_case true reads 100 %"]),
    "NBA Café": (True, []),
    "ＮＢＡ": (True, ["ＮＢＡ (", "NFKC", "100 %"]),
    "臺😀": (True, ["臺 (", "😀 ("]),
    "ＮＢ": (None, ["--do_lower_case true and", "NFKC", "make readable 100 %"]),
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_words_that_the_model_cannot_read(text: str, chinese: Path, tmp_path: Path) -> None:
    lower, says = UNKNOWN[text]
    data, _ = prepared(chinese, tmp_path, text, do_lower_case=lower)
    lines = [note for note in data.notes if "unknown" in note]
    assert len(lines) == bool(says)
    assert all(part in lines[0] for part in ["100 % of the texts", *says] if says)
    assert ("reads" in "".join(lines)) == ("--do_lower_case true reads 100 %" in says)
    another_language = "совсем другой язык и ничего больше "
    says = ["совсем", "--model_name_or_path"]
    refusal(prepared, chinese, tmp_path, another_language, says=says)


def test_lower_case_for_whoever_loads_the_model(chinese: Path, tmp_path: Path) -> None:
    _, tokenizer = prepared(chinese, tmp_path, "NBA", do_lower_case=True)
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
def test_the_part_of_a_long_text_that_is_read(setting: str, chinese: Path, tmp_path: Path) -> None:
    """In training, and with the saved model; `--compare_max_length` reads the beginnings."""
    values: dict[str, Any] = dict([setting.split()]) if setting else {}
    data, tokenizer = prepared(chinese, tmp_path, " ".join(LONG), max_length=6, **values)
    words = ["[CLS]", *READ[setting], "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(data.train.tokens(0)) == words
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = load_tokenizer(task_settings(model_name_or_path=str(tmp_path / "saved")).model)
    texts = [[f"{' '.join(LONG)}新闻", "a"]]
    again = encode_texts(loaded, texts, 6)["input_ids"]
    assert loaded.convert_ids_to_tokens(again) == [*words, "[CLS]", "a", "[SEP]"]
    short = truncate_split(data.validation, tokenizer, 4, "short")
    assert tokenizer.convert_ids_to_tokens(short.tokens(0)) == ["[CLS]", "a", "b", "[SEP]"]


def test_head_tokens_that_leave_nothing_for_the_end(chinese: Path) -> None:
    settings = task_settings(model_name_or_path=str(chinese), head_tokens=4)
    tokenizer = load_tokenizer(settings.model)
    set_truncation(tokenizer, settings.data)
    config, says = load_config(settings.model), ["--max_length 6", "4 first", "--head_tokens"]
    refusal(choose_max_length, 6, tokenizer, config, says=says)
    refusal(encode_texts, tokenizer, [["a"], ["b"]], 9, says=["pairs", "--truncation_side right"])
    refusal(choose_max_length, 64, tokenizer, config, says=["32 positions", "recipes/bigbird.py"])
