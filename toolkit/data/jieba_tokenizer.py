"""The tokenizer of checkpoints whose WordPiece vocabulary contains jieba's Chinese words.

`Lowin/chinese-bigbird-*`, T5-PEGASUS and similar models segment a text with `jieba.cut(text,
HMM=False)`; a word of the vocabulary is one token, others go through BERT's tokenization. Their
published class overrides `_tokenize` of the slow tokenizer, which transformers 5 silently ignores.
Here the fast tokenizer makes the same tokens, except where fast and slow tokenizers differ within a
word outside the vocabulary: about a hundred combining marks of rare scripts, and, in cased models,
characters that NFC replaces."""

from __future__ import annotations

import copy
import hashlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple

from tokenizers import NormalizedString, Tokenizer, normalizers
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer, PreTokenizer
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from toolkit.errors import UserError
from toolkit.utils.compat import require
from toolkit.utils.extras import require_extra

MARK = "words_first"
"""The key in tokenizer_config.json, which transformers saves, loads (to `init_kwargs`) and does not
interpret. A plain tokenizer with it makes other tokens: call `words_first` on it."""


class Jieba(NamedTuple):
    """A separate segmenter: words added to `jieba.dt` do not change it."""

    cutter: Any
    """A `jieba.Tokenizer`."""
    name: str
    """`jieba VERSION DICTIONARY_DIGEST`: segmenters of one name return the same words."""


@lru_cache(maxsize=1)
def load_jieba() -> Jieba:
    """jieba with its default dictionary; the first call takes half a second. Raises UserError when
    it is missing.

    It does not use jieba's cache file, which all versions and users of a machine share and jieba
    does not verify. It prints nothing, and several processes may call it at the same time."""
    require_extra("segmenting Chinese text into words", "titles", "jieba")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes, and of pkg_resources
        import jieba
    cutter = jieba.Tokenizer()
    with cutter.get_dict_file() as file:
        dictionary = file.read()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(io.BytesIO(dictionary))
    cutter.initialized = True
    return Jieba(
        cutter, f"jieba {jieba.__version__} {hashlib.sha256(dictionary).hexdigest()[:8]}"
    )


def words_first(tokenizer: Any) -> Any:
    """A copy of a fast WordPiece tokenizer that first segments texts into jieba's words
    (`WordBackend`).

    `save_pretrained` writes the tokenizer without jieba, and the key `words_first`. `AutoTokenizer`
    loads it, but tokenizes differently until this function is called on it. Raises UserError when
    jieba is missing, when the tokenizer is not a fast WordPiece one, or was saved with another
    jieba."""
    if isinstance(getattr(tokenizer, "backend_tokenizer", None), WordBackend):
        return tokenizer
    if not _is_wordpiece(tokenizer):
        raise UserError(
            "--tokenizer jieba needs a model with a WordPiece vocabulary (vocab.txt), and "
            f"{type(tokenizer).__name__} has another: leave it out"
        )
    installed = load_jieba().name
    saved = tokenizer.init_kwargs.get(MARK)
    if saved not in (None, True, installed):
        raise UserError(
            f"this tokenizer was saved with {saved!r} (`{MARK}` in tokenizer_config.json), and "
            f"{installed} is installed, which segments words differently: install that version"
        )
    require(PreTrainedTokenizerFast, "_tokenizer", "transformers")
    segmenting = copy.deepcopy(tokenizer)
    segmenting._tokenizer = WordBackend(segmenting._tokenizer)
    segmenting.init_kwargs[MARK] = installed
    return segmenting


def load_words_first(name: str, **options: Any) -> Any:
    """`words_first` of the tokenizer of a folder or hub name that may have only BERT's vocab.txt.

    `AutoTokenizer` reads `tokenizer_class`, which may not exist, then `model_type`: for a BigBird
    with a vocab.txt it makes an empty sentencepiece tokenizer. Raises UserError as `words_first`
    does, and transformers' errors."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except ValueError:
        tokenizer = None
    if not _is_wordpiece(tokenizer):
        bert = BertTokenizerFast.from_pretrained(name, **options)
        # which without a vocabulary has only the special tokens
        if tokenizer is None or len(bert) > len(bert.all_special_tokens):
            tokenizer = bert
    return words_first(tokenizer)


def _is_wordpiece(tokenizer: Any) -> bool:
    """Whether it is a fast tokenizer with BERT's kind of vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "model", None), WordPiece)


class WordBackend:
    """Wraps a `tokenizers.Tokenizer`, and gives it a pre-tokenizer in Python while it encodes: at
    other times it can be saved and copied. Words outside the vocabulary are split as without jieba;
    added tokens are matched literally."""

    def __init__(self, backend: Tokenizer) -> None:
        words = backend.get_vocab(with_added_tokens=False)
        vars(self).update(
            _backend=backend, segmenter=load_jieba().name, _words=words, _lock=Lock()
        )

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(vars(self)["_backend"], name)
        if name in ("encode", "encode_batch"):
            return partial(self._encode, attribute, None)
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value)

    def __reduce__(self) -> tuple[type, tuple[Tokenizer]]:
        return WordBackend, (self._backend,)

    def encode_batch_fast(self, texts: Sequence[Any]) -> Any:
        """Encodings without offsets. The overflow of a truncated text is incomplete: segmenting it
        would take time."""
        most = None
        cut = self.truncation
        if cut and cut["direction"] == "right" and isinstance(texts[0], str):
            most = cut["max_length"]
        return self._encode(self._backend.encode_batch_fast, most, texts)

    def _encode(
        self, encode: Callable[..., Any], most: int | None, *arguments: Any, **options: Any
    ) -> Any:
        """Calls a method of the tokenizer with the pre-tokenizer in place, one thread at a time."""
        backend = self._backend
        with self._lock:
            normalizer = backend.normalizer
            pre_tokenizer = backend.pre_tokenizer
            splitter: Any = _WordSplitter(self._words, normalizer, pre_tokenizer, most)
            backend.normalizer = normalizers.Sequence([])
            backend.pre_tokenizer = PreTokenizer.custom(splitter)
            try:
                return encode(*arguments, **options)
            finally:
                backend.normalizer = normalizer
                backend.pre_tokenizer = pre_tokenizer


class _WordSplitter:
    """A pre-tokenizer: text -> jieba's words, those outside the vocabulary split further."""

    def __init__(
        self,
        words: Mapping[str, int],
        normalizer: Any,
        pre_tokenizer: Any,
        most: int | None,
    ) -> None:
        self.words = words
        self.normalizer = normalizer or normalizers.Sequence([])
        self.pre_tokenizer = pre_tokenizer or BertPreTokenizer()
        self.most = most
        """Pieces to stop after, with one more; each is at least one token."""

    def pre_tokenize(self, text: Any) -> None:
        text.split(self._split)

    def _split(self, _: int, text: NormalizedString) -> list[Any]:
        pieces: list[Any] = []
        end = 0
        for word in load_jieba().cutter.cut(str(text), HMM=False):
            start = end
            end += len(word)
            piece: Any = text[start:end]
            if word in self.words:
                pieces.append(piece)
            else:
                self.normalizer.normalize(piece)
                parts = self.pre_tokenizer.pre_tokenize_str(piece.normalized)
                pieces += [piece[first:last] for _, (first, last) in parts]
            if self.most is not None and len(pieces) > self.most:
                break
        return pieces
