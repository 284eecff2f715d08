"""Chinese words first: the tokenizer of checkpoints whose WordPiece vocabulary holds jieba's words.

`Lowin/chinese-bigbird-*`, T5-PEGASUS and their kin segment a text with `jieba.cut(text, HMM=False)`; a word of the
vocabulary is one token, any other goes through BERT's own tokenization. Their published class overrides
`_tokenize` of the tokenizer written in Python; since transformers 5 that override is ignored without a word, and
every Chinese character becomes a token of its own. Here the same tokens come from the fast tokenizer.

The two differ for what the fast tokenizer and the Python one differ in, inside a word that is not in the vocabulary:
some hundred combining marks of rare scripts (their Unicode tables are of other years), and, where letter case is
kept, characters that NFC replaces (the Python one does so since 2023, later than these checkpoints).

`tokenizers.pre_tokenizers.PreTokenizer.custom` with jieba makes the same tokens, too, but takes 2 times as long, and 5
times where texts are truncated, as it must segment them to their end; and a tokenizer with a custom part can be neither
saved nor copied.
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

from toolkit.errors import UserError
from toolkit.utils.compat import require

MARK = "words_first"
"""The key in tokenizer_config.json: transformers saves and loads it, and does not interpret it."""
_CACHED_WORDS = 1_000_000  # words that are not in the vocabulary, about 200 bytes each


class Jieba(NamedTuple):
    """A segmenter of our own: words that someone adds to `jieba.dt` do not change it."""

    cutter: Any
    """Has `cut` and `lcut`."""
    name: str
    """`jieba VERSION DICTIONARY`: equal names segment texts alike."""


@lru_cache(maxsize=1)
def load_jieba() -> Jieba:
    """jieba with its own dictionary; half a second at the first call. Raises UserError when it is missing.

    It neither reads nor writes jieba's cache file: that one has the same name for every version and every user
    of a machine, would be trusted whatever it holds, and saves a tenth of a second. So nothing is printed, and
    any number of processes may start at once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its escapes in strings, and of pkg_resources
        try:
            import jieba
        except ImportError as error:
            raise UserError("segmenting Chinese text into words needs jieba: pip install jieba==0.42.1") from error
    cutter = jieba.Tokenizer()
    with cutter.get_dict_file() as file:
        dictionary = file.read()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(io.BytesIO(dictionary))
    cutter.initialized = True
    return Jieba(cutter, f"jieba {jieba.__version__} {hashlib.sha256(dictionary).hexdigest()[:8]}")


def words_first(tokenizer: Any) -> Any:
    """A copy of a fast WordPiece tokenizer that segments texts into jieba's words first (`WordBackend`).

    `save_pretrained` writes the files of the tokenizer without jieba, and the key `words_first`: `AutoTokenizer` loads
    them, but tokenizes differently until this function is called on the result again.
    Raises UserError when jieba is missing, when the tokenizer is not a fast WordPiece one, and when it was saved
    with a jieba that segments differently from the one installed here.
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

    `AutoTokenizer` alone goes by `tokenizer_class`, which may be one that nobody has, and then by `model_type`:
    for a BigBird it makes an empty sentencepiece tokenizer of a folder that has a vocab.txt.
    Raises UserError as `words_first` does, and what transformers raises where there is no such folder.
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
    """In the place of a `tokenizers.Tokenizer`: everything is that one's, but how it encodes texts.

    Texts become lists of tokens here. A second tokenizer, whose words are the whole vocabulary, turns those into
    encodings, so that truncation, special tokens, pairs and padding are the library's own. Added tokens are matched as
    they are written (letter case counts). `word_ids()` counts tokens.
    """

    def __init__(self, backend: Tokenizer) -> None:
        vars(self).update(_backend=backend, segmenter=load_jieba().name, _settings=[])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_backend"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value)

    def __reduce__(self) -> tuple[type, tuple[Tokenizer]]:
        return WordBackend, (self._backend,)

    def encode_batch(self, texts: Sequence[Any], is_pretokenized: bool = False, add_special_tokens: bool = True) -> Any:
        """Encodings of texts, or of pairs of them, whose offsets cannot be read."""
        if is_pretokenized:
            raise NotImplementedError("a tokenizer that segments with jieba takes whole texts, not lists of words")
        encode = self._assembler().encode_batch
        return list(map(_WithoutOffsets, encode(self._segmented(texts), True, add_special_tokens)))

    def encode_batch_fast(self, texts: Sequence[Any]) -> Any:
        """The same, but of a text that is truncated, what overflows is one token only: the rest is not segmented, which
        is what takes the time."""
        assembler, truncation = self._assembler(), self.truncation or {}
        count = truncation["max_length"] + 1 if truncation.get("direction") == "right" else None
        return assembler.encode_batch_fast(self._segmented(texts, count), True)

    def _assembler(self) -> Tokenizer:
        """Lists of tokens -> encodings; made anew where tokens were added or the settings changed."""
        backend = self._backend
        settings = [backend.get_vocab_size(), backend.truncation, backend.padding, backend.encode_special_tokens]
        settings.append(backend.post_processor and backend.post_processor.__getstate__())
        if settings != self._settings:
            vocabulary = WordLevel(backend.get_vocab(with_added_tokens=True), unk_token=backend.model.unk_token)
            assembler, words = Tokenizer(vocabulary), backend.get_vocab(with_added_tokens=False)
            assembler.post_processor = backend.post_processor
            if backend.truncation:
                assembler.enable_truncation(**backend.truncation)
            if backend.padding:
                assembler.enable_padding(**backend.padding)
            vars(self).update(_words={word: (word,) for word in words}, _added=_pattern_of_added(backend))
            vars(self).update(_assembles=assembler, _settings=settings)
        return self._assembles

    def _segmented(self, texts: Sequence[Any], count: int | None = None) -> list[Any]:
        """The tokens of each text, or of both of a pair; of a text alone at least `count`, where it has that many."""
        return [
            self._tokens(text, count) if isinstance(text, str) else tuple(map(self._tokens, text)) for text in texts
        ]

    def _tokens(self, text: str, count: int | None = None) -> list[str]:
        tokens: list[str] = []
        for tokens_of_word in self._words_of(text):
            tokens += tokens_of_word
            if count is not None and len(tokens) >= count:
                break
        return tokens

    def _words_of(self, text: str) -> Iterator[Sequence[str]]:
        """The tokens of each word in turn; the text is segmented as they are consumed."""
        cut, words = load_jieba().cutter.cut, self._words
        for place, part in enumerate(self._added.split(text) if self._added else [text]):
            if place % 2:  # an added token, between two parts of the text
                yield (part,)
                continue
            for word in cut(part, HMM=False):
                tokens = words.get(word)
                yield self._wordpieces(word) if tokens is None else tokens

    def _wordpieces(self, word: str) -> Sequence[str]:
        """What the ordinary tokenizer makes of a word that is not in its vocabulary."""
        normalizer, pre_tokenizer = self.normalizer, self.pre_tokenizer
        text = word if normalizer is None else normalizer.normalize_str(word)
        pieces = [(text, None)] if pre_tokenizer is None else pre_tokenizer.pre_tokenize_str(text)
        tokens = [token.value for piece, _ in pieces for token in self.model.tokenize(piece)]
        if len(self._words) < _CACHED_WORDS:
            self._words[word] = tokens
        return tokens


class _WithoutOffsets:
    """An encoding; its tokens' places in the text are not known."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def __getattr__(self, name: str) -> Any:
        if name == "offsets":
            raise NotImplementedError("a tokenizer that segments with jieba has no offsets into the text")
        return getattr(vars(self)["_encoding"], name)


def _pattern_of_added(backend: Tokenizer) -> re.Pattern[str] | None:
    """Matches the added tokens, the longest first; not the special ones where those are encoded as any text."""
    every = sorted(backend.get_added_tokens_decoder().values(), key=lambda token: -len(token.content))
    added = [token for token in every if not (token.special and backend.encode_special_tokens)]
    bounded = [(r"(?<!\w){}(?!\w)" if token.single_word else "{}", re.escape(token.content)) for token in added]
    return re.compile(f"({'|'.join(form.format(content) for form, content in bounded)})") if added else None
