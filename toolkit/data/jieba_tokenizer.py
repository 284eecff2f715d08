"""Chinese words first: the tokenizer of checkpoints whose WordPiece vocabulary holds jieba's words.

`Lowin/chinese-bigbird-*`, T5-PEGASUS and their kin segment a text with `jieba.cut(text, HMM=False)`; a word of the
vocabulary is one token, any other goes through BERT's own tokenization. Their published class overrides `_tokenize` of
the tokenizer written in Python, which transformers 5 ignores without a word. Here the fast tokenizer makes the same
tokens, but for what the fast and the Python one differ in, inside a word that is not in the vocabulary: some hundred
combining marks of rare scripts, and, where letter case is kept, characters that NFC replaces.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import NormalizedString, PreTokenizedString, Tokenizer, normalizers
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer, PreTokenizer
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from toolkit.errors import UserError
from toolkit.utils.compat import require
from toolkit.utils.extras import require_extra

MARK = "words_first"
"""The key in tokenizer_config.json: transformers saves and loads it, and does not interpret it."""


class Jieba(NamedTuple):
    """A segmenter of our own: words that someone adds to `jieba.dt` do not change it."""

    cutter: Any
    """Has `cut` and `lcut`."""
    name: str
    """`jieba VERSION DICTIONARY`: equal names segment texts alike."""


@lru_cache(maxsize=1)
def load_jieba() -> Jieba:
    """jieba with its own dictionary; half a second at the first call. Raises UserError when it is missing.

    It neither reads nor writes jieba's cache file, which has one name for every version and user of a machine, and
    would be trusted whatever it holds. So nothing is printed, and any number of processes may start at once.
    """
    require_extra("segmenting Chinese text into words", "titles", "jieba")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its escapes in strings, and of pkg_resources
        import jieba
    cutter = jieba.Tokenizer()
    with cutter.get_dict_file() as file:
        dictionary = file.read()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(io.BytesIO(dictionary))
    cutter.initialized = True
    return Jieba(cutter, f"jieba {jieba.__version__} {hashlib.sha256(dictionary).hexdigest()[:8]}")


def words_first(tokenizer: Any) -> Any:
    """A copy of a fast WordPiece tokenizer that segments texts into jieba's words first (`WordBackend`).

    `save_pretrained` writes the tokenizer without jieba, and the key `words_first`: `AutoTokenizer` loads it, but
    tokenizes differently until this function is called on the result again. Raises UserError when jieba is missing,
    when the tokenizer is not a fast WordPiece one, and when the jieba it was saved with segments differently.
    """
    if isinstance(getattr(tokenizer, "backend_tokenizer", None), WordBackend):
        return tokenizer
    if not _is_wordpiece(tokenizer):
        raise UserError(
            f"--tokenizer jieba needs a model with a WordPiece vocabulary (vocab.txt), and {type(tokenizer).__name__} "
            "has another: leave it out"
        )
    installed, saved = load_jieba().name, tokenizer.init_kwargs.get(MARK)
    if saved not in (None, "jieba", installed):
        raise UserError(
            f"this tokenizer was saved with {saved}, and {installed} is installed, which segments words differently: "
            f"pip install jieba=={str(saved).split()[1]}"
        )
    require(PreTrainedTokenizerFast, "_tokenizer", "transformers")
    segmenting = copy.deepcopy(tokenizer)
    segmenting._tokenizer = WordBackend(segmenting._tokenizer)
    segmenting.init_kwargs[MARK] = installed
    return segmenting


def load_words_first(name: str) -> Any:
    """`words_first` of the tokenizer of a folder or hub name, as these checkpoints are published: BERT's vocab.txt.

    `AutoTokenizer` goes by `tokenizer_class`, which may be one that nobody has, then by `model_type`: for a BigBird
    with a vocab.txt it makes an empty sentencepiece tokenizer. Raises UserError as `words_first` does, and what
    transformers raises where there is no such folder.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ValueError:
        tokenizer = None
    if not _is_wordpiece(tokenizer):
        bert = BertTokenizerFast.from_pretrained(name)
        # without a vocabulary it is made too, of the special tokens
        tokenizer = bert if tokenizer is None or len(bert) > len(bert.all_special_tokens) else tokenizer
    return words_first(tokenizer)


def _is_wordpiece(tokenizer: Any) -> bool:
    return isinstance(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), WordPiece)


def is_jieba(source: Any) -> bool:
    """Whether a tokenizer, or the one saved in a folder, has `words_first`'s mark; also true of the ordinary tokenizer
    that `AutoTokenizer` makes of such a folder or hub name: call `words_first` on that one."""
    if isinstance(source, str | Path):
        path = Path(source) / "tokenizer_config.json"
        marks = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    else:
        marks = getattr(source, "init_kwargs", {})
    return str(marks.get(MARK, "")).split(" ")[0] == "jieba"


class WordBackend:
    """In the place of a `tokenizers.Tokenizer`: a copy of it with a pre-tokenizer of ours makes the tokens, as one that
    has such a part can be neither saved nor copied. Added tokens are matched as they are written."""

    def __init__(self, backend: Tokenizer) -> None:
        vars(self).update(_backend=backend, segmenter=load_jieba().name, _settings=[])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder() if name in ("encode", "encode_batch") else vars(self)["_backend"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value)

    def __reduce__(self) -> tuple[type, tuple[Tokenizer]]:
        return WordBackend, (self._backend,)

    def encode_batch_fast(self, texts: Sequence[Any]) -> Any:
        """Encodings without offsets. Of a single text that is cut, not all that overflows is in them: the rest is not
        segmented, which is what takes the time."""
        cut = self.truncation if all(isinstance(text, str) for text in texts) else None
        return self._encoder(cut["max_length"] if cut and cut["direction"] == "right" else None).encode_batch_fast(
            texts
        )

    def _encoder(self, max_length: int | None = None) -> Tokenizer:
        """Made anew where tokens were added or the settings changed."""
        backend = self._backend
        settings = [max_length, backend.get_vocab_size(), backend.truncation, backend.padding]
        settings += [backend.encode_special_tokens, backend.post_processor and backend.post_processor.__getstate__()]
        if settings != self._settings:
            encoder = copy.deepcopy(backend)
            encoder.pre_tokenizer = PreTokenizer.custom(_Words(backend, max_length))
            encoder.normalizer = normalizers.Sequence([])
            encoder.encode_special_tokens = backend.encode_special_tokens  # which a copy does not have
            vars(self).update(_settings=settings, _encodes=encoder)
        return self._encodes


class _Words:
    """Splits a text into jieba's words, and those that are not in the vocabulary as the tokenizer itself does."""

    def __init__(self, backend: Tokenizer, max_length: int | None) -> None:
        """`max_length`: what follows so many pieces and one more, each a token at least, is left out."""
        self.words, self.max_length = backend.get_vocab(with_added_tokens=False), max_length
        self.normalizer = backend.normalizer or normalizers.Sequence([])
        self.pre_tokenizer = backend.pre_tokenizer or BertPreTokenizer()

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """As `PreTokenizer.custom` calls it."""
        text.split(self._split)

    def _split(self, _: int, text: NormalizedString) -> list[NormalizedString]:
        pieces, end = list[Any](), 0
        for word in load_jieba().cutter.cut(str(text), HMM=False):
            piece: Any = text[end : (end := end + len(word))]
            if word in self.words:
                pieces.append(piece)
            else:
                self.normalizer.normalize(piece)
                parts = self.pre_tokenizer.pre_tokenize_str(piece.normalized)
                pieces += [piece[start:stop] for _, (start, stop) in parts]
            if self.max_length is not None and len(pieces) > self.max_length:
                break
        return pieces
