"""Word boundaries among the tokens of a text: Chinese, languages with spaces, and mixtures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers.pre_tokenizers import BertPreTokenizer

from toolkit.data.jieba_tokenizer import load_jieba

_CHINESE = re.compile(
    "[\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def words_of(text: str) -> Iterator[tuple[int, int]]:
    """(start, end), in characters, of each word and punctuation mark: split at spaces and
    punctuation, as by BERT, and Chinese by jieba. Raises UserError for Chinese without jieba."""
    for part, (start, end) in BertPreTokenizer().pre_tokenize_str(text):
        if _CHINESE.search(part):
            for _, first, last in load_jieba().cutter.tokenize(part, HMM=False):
                yield start + first, start + last
        else:
            yield start, end


def word_starts(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """(tokens,) bool: whether each token, with the character range in `offsets`, begins a word.
    Words that share a token count as one, and a token of spaces as a word."""
    word_at = [-1] * len(text)  # of each character; -1: none
    for word, (start, end) in enumerate(words_of(text)):
        word_at[start:end] = [word] * (end - start)
    starts = []
    previous = -1
    for begin, end in offsets:
        words = [word for word in word_at[begin:end] if word >= 0] or [-1]
        starts.append(words[0] < 0 or words[0] != previous)
        previous = words[-1]
    return np.array(starts, np.bool_)
