"""A tokenizer compared with its model before training: silence for the families that people fine-tune; where the
model would get other tokens than it was trained with, an error or a line, whose advice mends it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests import inputs
from tests.architectures import ARCHITECTURES, make_tokenizer
from tests.faults import refusal
from tests.runs import edit_json
from toolkit import settings as task_settings
from toolkit.config import PretrainedSettings
from toolkit.data import tokenizer_check as check
from toolkit.data.jieba_tokenizer import load_jieba, words_first
from toolkit.data.prepare import prepare_data
from toolkit.data.tokenizer import load_tokenizer
from toolkit.pretrained import load_config, refuse_missing_ends

SPECIAL = "[PAD] [UNK] [CLS] [SEP] [MASK] <s> <pad> </s> <unk> <mask>".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def notes(folder: Path, **settings: Any) -> list[str]:
    """What a run reports of a model's folder, after the error that it would raise."""
    pretrained = PretrainedSettings(model_name_or_path=str(folder), **settings)
    tokenizer = load_tokenizer(pretrained)
    refuse_missing_ends(tokenizer, load_config(pretrained))
    return list(check.tokenizer_notes(pretrained, tokenizer))


def vocabulary(words: list[str]) -> dict[str, int]:
    return {word: place for place, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(pd.read_csv(inputs.reviews())["text"])


@pytest.fixture(scope="module")
def byte_pairs(texts: list[str]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE of 1500 tokens."""
    level = pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    common: Any = {"vocab_size": 1500, "special_tokens": SPECIAL, "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=level.alphabet(), **common)
    tokenizer.train_from_iterator(texts, trainer)
    return dict(json.loads(tokenizer.to_str()))


# kind of vocabulary -> architectures, and the class of their tokenizer
FAMILIES = {
    "words": "bert Bert, ernie Bert, electra Electra, distilbert DistilBert, mpnet MPNet",
    "pieces": "xlm-roberta XLMRoberta, deberta-v2 DebertaV2, albert Albert, big_bird BigBird, t5 T5",
    "pairs": "roberta Roberta, longformer Longformer, bart Bart, deberta Deberta, qwen3 Qwen2",
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_families_of_transformers(kind: str, byte_pairs: Any, tmp_path: Path) -> None:
    """No line; and no error for decoders, and for T5, which has a token at the end alone."""
    words = [
        *LETTERS,
        "film",
        "不",
        ",",
        "▁",
        *(f"▁{one}{other}" for one in LETTERS for other in "aeio"),
    ]
    merges = [tuple(pair) for pair in byte_pairs["model"]["merges"]]
    vocabularies: dict[str, Any] = {
        "words": {"vocab": vocabulary(words)},
        "pieces": {"vocab": [(piece, -1.0) for piece in [*SPECIAL, *words]]},
        "pairs": {"vocab": byte_pairs["model"]["vocab"], "merges": merges},
    }
    for family in FAMILIES[kind].split(", "):
        architecture, name = family.split()
        tokenizer_class = getattr(transformers, f"{name}Tokenizer")
        tokenizer = tokenizer_class(pad_token="<pad>", **vocabularies[kind])
        tokenizer.save_pretrained(tmp_path / architecture)
        transformers.AutoConfig.for_model(architecture).save_pretrained(tmp_path / architecture)
        assert notes(tmp_path / architecture) == [], architecture


def test_models_without_special_tokens_at_the_ends(texts: list[str], tmp_path: Path) -> None:
    for name in ("BERT", "XLM-R", "ModernBERT", "Longformer", "GTE", "Qwen3"):
        kind, folder = ARCHITECTURES[name], tmp_path / name
        tokenizer = make_tokenizer(kind.tokenizer, texts[:80])
        getattr(transformers, kind.pretrained).config_class().save_pretrained(folder)
        adds = tokenizer.backend_tokenizer.post_processor
        if name != "Qwen3":
            tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
            tokenizer.save_pretrained(folder)
            refusal(notes, folder, says=["special tokens", "tokenizer.json", "post_processor"])
            tokenizer.backend_tokenizer.post_processor = adds
        tokenizer.save_pretrained(folder)
        assert notes(folder) == [], name


def normalizer(folder: Path, **options: bool) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.BertNormalizer(**options)
    tokenizer.save(str(folder / "tokenizer.json"))


def reverse(folder: Path) -> None:
    words = (folder / "vocab.txt").read_text(encoding="utf-8").split()
    (folder / "vocab.txt").write_text("\n".join([*words[:5], *words[:4:-1]]), encoding="utf-8")


# what the files do not agree on -> the change
FAULTS: dict[str, Any] = {
    "case": lambda folder: normalizer(folder, lowercase=False),
    "accents": lambda folder: normalizer(folder, strip_accents=False),
    "Chinese": lambda folder: normalizer(folder, handle_chinese_chars=False),
    "vocabulary": reverse,
    "bytes": lambda folder: (folder / "vocab.txt").write_bytes(b"\xff\xfea\n"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_of_two_tokenizers(fault: str, tiny_model: Path, tmp_path: Path) -> None:
    """Each run says so until they are mended, also with cached tokens."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    settings = task_settings(model_name_or_path=str(folder), train_file=str(inputs.reviews()))

    def lines() -> list[str]:
        tokenizer = load_tokenizer(settings.model)
        saved = tokenizer.backend_tokenizer.to_str()
        data = prepare_data(settings, tokenizer, load_config(settings.model))
        assert tokenizer.backend_tokenizer.to_str() == saved
        return [note for note in data.notes if "other tokens" in note]

    assert lines() == []
    FAULTS[fault](folder)
    ((line,), again) = lines(), lines()
    assert again == [line]
    keys = re.search('put (".*) into tokenizer_config.json', line)
    is_of_words = fault in ("vocabulary", "bytes")
    assert (keys is None) == (str(folder / "vocab.txt") in line) == is_of_words
    if keys:
        edit_json(folder / "tokenizer_config.json", **json.loads(f"{{{keys[1]}}}"))
    else:
        (folder / "vocab.txt").unlink()
    assert lines() == []
    tokenizer, some = transformers.AutoTokenizer.from_pretrained(folder), check.checked_texts()
    assert check.token_ids(tokenizer, some, 99) == check.ids_of_file(folder, tokenizer, some, 99)
    assert "token_type_ids" in tokenizer("good", "bad")


def test_a_vocabulary_with_capitals_that_is_lower_cased(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary([*LETTERS, *LETTERS.upper()])))
    transformers.AutoConfig.for_model("bert").save_pretrained(tmp_path)
    (line,) = notes(tmp_path)
    assert "26 tokens" in line
    assert "--do_lower_case false" in line
    settings: Any = {"do_lower_case": False}
    assert notes(tmp_path, **settings) == []
    loaded = load_tokenizer(PretrainedSettings(model_name_or_path=str(tmp_path), **settings))
    assert loaded.tokenize("A") == ["A"]


CHINESE = "这家酒店的房间很干净，服务也不错，就是早餐太贵了。NBA总决赛 100%"


def test_texts_that_are_spelled(prepared: Any, texts: list[str], byte_pairs: Any) -> None:
    """By a BPE without its merges, or that never saw the language, and by a vocabulary of jieba's words without
    jieba; letters of a character model, of single-letter words and of Chinese are usual."""

    def fast(content: dict[str, Any]) -> Any:
        tokenizer = Tokenizer.from_str(json.dumps(content))
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    whole = fast(byte_pairs)
    letters = fast(byte_pairs | {"model": {**byte_pairs["model"], "merges": []}})
    characters = [chr(place) for place in range(0x4E00, 0x9FA6)]
    cutter = load_jieba().cutter
    words = [word for word in cutter.FREQ if re.fullmatch("[一-龥]{2}", word)][:6000]
    bert = transformers.BertTokenizer(vocabulary(characters))
    chinese = transformers.BertTokenizer(vocabulary([*characters, *words, *cutter.cut(CHINESE)]))
    decoder = transformers.AutoConfig.for_model("qwen3", vocab_size=2**21)
    for tokenizer, text, says in (
        (whole, texts[0], ""), (letters, texts[0], "1.2 tokens a letter"), (whole, CHINESE, "tokens a letter"),
        (whole, "a b c 1 2 3 ☃", ""), (transformers.CanineTokenizer(), texts[0], ""), (bert, CHINESE, ""),
        (chinese, CHINESE, "--tokenizer jieba"), (words_first(chinese), CHINESE, ""),
    ):  # fmt: skip
        rows = [{"text": text, "label": row % 2} for row in range(40)]
        data = prepared(rows, tokenizer=tokenizer, model=decoder)
        lines = [note for note in data.notes if "a letter" in note or "jieba" in note]
        assert (len(lines), says in "".join(lines)) == (bool(says), True), (says, lines)
