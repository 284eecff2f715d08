"""Chinese words first: the tokenizer of checkpoints whose WordPiece vocabulary holds jieba's words.

`Lowin/chinese-bigbird-*`, T5-PEGASUS and their kin cut a text with `jieba.cut(text, HMM=False)`; a word of the
vocabulary is one token, any other goes through BERT's own tokenization. Their published class overrides
`_tokenize` of the tokenizer written in Python; since transformers 5 that override is ignored without a word, and
every Chinese character becomes a token of its own. Here the same tokens come from the fast tokenizer.

The two differ for what the fast tokenizer and the Python one differ in, inside a word that is not in the vocabulary:
some hundred combining marks of rare scripts (their Unicode tables are of other years), and, where letter case is
kept, characters that NFC replaces (the Python one does so since 2023, later than these checkpoints).
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import BatchEncoding, TruncationStrategy

from toolkit.errors import UserError
from toolkit.utils.compat import require

MARK = "words_first"
"""The key in tokenizer_config.json: transformers carries it along and makes nothing of it."""
_MOST_REMEMBERED = 1_000_000  # words that are not in the vocabulary, about 200 bytes each


class Jieba(NamedTuple):
    """A segmenter of our own: words that someone adds to `jieba.dt` do not change it."""

    cutter: Any
    """Has `cut` and `lcut`."""
    name: str
    """`jieba VERSION DICTIONARY`: texts are cut alike where it is equal."""


@lru_cache(maxsize=1)
def load_jieba() -> Jieba:
    """jieba with its own dictionary; half a second at the first call. Raises UserError when it is missing.

    It neither reads nor writes jieba's cache file: that one has the same name for every version and every user
    of a machine, would be believed whatever it holds, and saves a tenth of a second. So nothing is printed, and
    any number of processes may start at once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its escapes in strings, and of pkg_resources
        try:
            import jieba
        except ImportError as error:
            raise UserError("cutting Chinese text into words needs jieba: pip install jieba==0.42.1") from error
    cutter = jieba.Tokenizer()
    with cutter.get_dict_file() as file:
        dictionary = file.read()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(io.BytesIO(dictionary))
    cutter.initialized = True
    return Jieba(cutter, f"jieba {jieba.__version__} {hashlib.sha256(dictionary).hexdigest()[:8]}")


def words_first(tokenizer: Any) -> JiebaTokenizer:
    """A copy of a fast WordPiece tokenizer that cuts texts into jieba's words first.

    Raises UserError when jieba is missing, when the tokenizer is not a fast WordPiece one, and when it was saved
    with a jieba that cuts differently from the one installed here.
    """
    if isinstance(tokenizer, JiebaTokenizer):
        return tokenizer
    if not _is_wordpiece(tokenizer):
        raise UserError(
            f"--tokenizer jieba needs a model with a WordPiece vocabulary (vocab.txt), and {type(tokenizer).__name__} "
            "has another: leave it out"
        )
    here, saved = load_jieba().name, tokenizer.init_kwargs.get(MARK)
    if saved not in (None, "jieba", here):
        raise UserError(
            f"this tokenizer was saved with {saved} and here is {here}, which cuts words differently: "
            f"pip install jieba=={str(saved).split()[1]}"
        )
    require(PreTrainedTokenizerFast, "_encode_plus", "transformers")  # overridden below
    made = copy.deepcopy(tokenizer)
    made.__class__ = JiebaTokenizer
    made._ordinary_class = type(tokenizer)
    made.init_kwargs[MARK] = here
    return made


def load_words_first(name: str) -> JiebaTokenizer:
    """The tokenizer of a folder or hub name, in the way of these checkpoints: BERT's, with jieba.

    `AutoTokenizer` alone goes by `tokenizer_class`, which may be one that nobody has, and then by `model_type`:
    for a BigBird it makes an empty sentencepiece tokenizer of a folder that has a vocab.txt.
    Raises UserError as `words_first` does, and what transformers raises where there is no such folder.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ValueError:
        tokenizer = None
    if not _is_wordpiece(tokenizer):
        berts = BertTokenizerFast.from_pretrained(name)
        # without a vocabulary it is made too, of the special tokens
        tokenizer = berts if tokenizer is None or len(berts) > len(berts.all_special_tokens) else tokenizer
    return words_first(tokenizer)


def _is_wordpiece(tokenizer: Any) -> bool:
    return isinstance(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), WordPiece)


def is_jieba(where: Any) -> bool:
    """Whether a tokenizer, or the one saved in a folder, cuts into jieba's words.

    Also true of the ordinary tokenizer that `AutoTokenizer` makes of such a folder or hub name: give that one
    to `words_first`.
    """
    if isinstance(where, str | Path):
        path = Path(where) / "tokenizer_config.json"
        marks = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    else:
        marks = getattr(where, "init_kwargs", {})
    return str(marks.get(MARK, "")).split(" ")[0] == "jieba"


class JiebaTokenizer(PreTrainedTokenizerFast):
    """A fast tokenizer in everything but how it cuts; made by `words_first`.

    `save_pretrained` writes the ordinary tokenizer's files and the key `words_first`. `AutoTokenizer` loads them,
    but alone it cuts differently: `words_first(AutoTokenizer.from_pretrained(folder))` is this one again.
    Added tokens are found in the text as they are written (letter case counts). There are no offsets into the text,
    and `word_ids()` counts tokens.
    """

    _ordinary_class: type = PreTrainedTokenizerFast
    _words: _Words | None = None

    @property
    def fingerprint_extra(self) -> str:
        """What decides the ids beside `backend_tokenizer`."""
        return load_jieba().name

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        ordinary = copy.copy(self)
        ordinary.__class__ = self._ordinary_class
        return ordinary.save_pretrained(save_directory, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_words"}

    def _encode_plus(
        self,
        text: Any,
        text_pair: Any = None,
        truncation_strategy: TruncationStrategy = TruncationStrategy.DO_NOT_TRUNCATE,
        max_length: int | None = None,
        is_split_into_words: bool = False,
        return_overflowing_tokens: bool = False,
        return_offsets_mapping: bool = False,
        split_special_tokens: bool | None = None,
        **options: Any,
    ) -> BatchEncoding:
        if not isinstance(text, str) and not text:
            raise ValueError("there is no text in the batch")
        if is_split_into_words or return_offsets_mapping:
            raise NotImplementedError("a tokenizer that cuts with jieba takes whole texts and has no offsets into them")
        if self._words is None or self._words.size != len(self):
            self._words = _Words(self)
        words = self._words
        cutting = truncation_strategy != TruncationStrategy.DO_NOT_TRUNCATE and self.truncation_side == "right"
        # what lies behind the cut need not be cut into words: jieba is what takes the time
        enough = max_length if cutting and text_pair is None and not return_overflowing_tokens else None
        words.most = None if enough is None else enough + 1
        split = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        words.whole = _pattern_of(self, with_special=not split)
        twin = copy.copy(self)  # the library's own method on finished tokens
        twin._tokenizer = words.assembler
        twin._tokenizer.post_processor = self.backend_tokenizer.post_processor
        return PreTrainedTokenizerFast._encode_plus(
            twin,
            words.of_any(text),
            text_pair if text_pair is None else words.of_any(text_pair),
            truncation_strategy=truncation_strategy,
            max_length=max_length,
            is_split_into_words=True,
            return_overflowing_tokens=return_overflowing_tokens,
            **options,
        )


class _Words:
    """Texts -> tokens; made of the ordinary tokenizer at the first text."""

    whole: re.Pattern[str] | None
    """Finds added tokens such as [SEP]."""
    most: int | None
    """Tokens of a text that are wanted."""

    def __init__(self, tokenizer: JiebaTokenizer) -> None:
        backend = tokenizer.backend_tokenizer
        self.size = len(tokenizer)  # with added tokens, to notice that some were added
        self.vocabulary = frozenset(backend.get_vocab(with_added_tokens=False))
        # finished tokens -> encodings: truncation, special tokens and padding as everywhere else
        everything = WordLevel(backend.get_vocab(with_added_tokens=True), unk_token=str(tokenizer.unk_token))
        self.assembler = Tokenizer(everything)
        self.normalizer, self.pre_tokenizer, self.model = backend.normalizer, backend.pre_tokenizer, backend.model
        self.cut = load_jieba().cutter.cut
        self.remembered: dict[str, list[str]] = {}
        """The tokens of words that are not in the vocabulary."""

    def of_any(self, text: Any) -> Any:
        """A text, a pair of them, or a batch of either, each text as its list of tokens: at least `most` of them
        where it has that many, and not many more."""
        if not isinstance(text, str):
            return type(text)(self.of_any(part) for part in text)
        tokens: list[str] = []
        for found in self._of_words(text):
            tokens += found
            if self.most is not None and len(tokens) >= self.most:
                break
        return tokens

    def _of_words(self, text: str) -> Iterator[Sequence[str]]:
        """The tokens of each word in turn; words are cut as they are asked for."""
        start = 0
        for match in [] if self.whole is None else self.whole.finditer(text):
            yield from self._of_plain(text[start : match.start()])
            yield (match.group(),)
            start = match.end()
        yield from self._of_plain(text[start:])

    def _of_plain(self, text: str) -> Iterator[Sequence[str]]:
        for word in self.cut(text, HMM=False):
            if word in self.vocabulary:
                yield (word,)
            else:
                tokens = self.remembered.get(word)
                yield self._of_unknown(word) if tokens is None else tokens

    def _of_unknown(self, word: str) -> list[str]:
        """What the ordinary tokenizer makes of a word, which holds no added token; remembered."""
        text = word if self.normalizer is None else self.normalizer.normalize_str(word)
        pieces = [(text, None)] if self.pre_tokenizer is None else self.pre_tokenizer.pre_tokenize_str(text)
        if len(self.remembered) >= _MOST_REMEMBERED:
            self.remembered.clear()
        made = [token.value for piece, _ in pieces for token in self.model.tokenize(piece)]
        self.remembered[word] = made
        return made


def _pattern_of(tokenizer: JiebaTokenizer, with_special: bool) -> re.Pattern[str] | None:
    """Of the added tokens, the longest first."""
    added = [token for token in tokenizer.added_tokens_decoder.values() if with_special or not token.special]
    added.sort(key=lambda token: -len(token.content))
    escaped = ((re.escape(token.content), token.single_word) for token in added)
    found = "|".join(rf"(?<!\w){content}(?!\w)" if alone else content for content, alone in escaped)
    return re.compile(found) if found else None
