"""Texts -> tokens on disk: one flat array per split, memory-mapped, so that ranks share its
pages."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from toolkit import pretrained
from toolkit.config import PretrainedSettings
from toolkit.data.jieba_tokenizer import MARK, load_words_first, words_first
from toolkit.data.table import TextBlock
from toolkit.errors import UserError
from toolkit.utils.progress import Progress

_BATCH_TEXTS = 2000
# characters per token of max_length: of longer texts only the beginning is tokenized, if that is
# certain to be enough
_LONG_TEXT = 64
_CUT = 16
_OWN_POSITIONS = ("camembert", "mpnet", "longformer", "data2vec-text", "xmod")
"""Architectures that count positions from pad_token_id + 1, as RoBERTa does."""


@dataclass(frozen=True)
class LengthBuckets:
    """Which texts may share a micro-batch. A BigBird computes batches up to `full` tokens wide with
    full attention, which padding does not change, and wider ones in blocks: which blocks a text
    attends to depends on the padded width."""

    full: int
    block: int

    @classmethod
    def of_model(cls, config: Any) -> LengthBuckets | None:
        """For a model's config; None if the width of a batch does not change the outputs."""
        config = pretrained.encoder_config(config)
        is_bigbird = getattr(config, "model_type", "") == "big_bird"
        if not is_bigbird or config.attention_type != "block_sparse":
            return None
        full = pretrained.full_attention_up_to(config.block_size, config.num_random_blocks)
        return cls(full, config.block_size)

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """(samples,) int64 bucket ids: texts of one bucket have the same outputs together as
        alone."""
        return np.where(lengths <= self.full, 0, -(-lengths // self.block))

    def widest(self, length: int) -> int:
        """The largest length in the bucket of `length`."""
        if length <= self.full:
            return self.full
        return -(-length // self.block) * self.block


@dataclass(frozen=True)
class Split:
    """The tokens and labels of one split; sample i is `input_ids[offsets[i]:offsets[i + 1]]`."""

    name: str
    folder: Path
    input_ids: np.ndarray
    """(tokens,) int32, all samples one after another."""
    offsets: np.ndarray
    """(samples + 1,) int64."""
    labels: np.ndarray
    """(samples,) int64, (samples, classes) float32 or (samples,) float32."""
    rows: np.ndarray
    """(samples,) int64, the sample ids: their rows in the source, from 0."""
    buckets: LengthBuckets | None = field(default=None, kw_only=True)
    """Set if the width of a batch changes the model's outputs."""
    token_types: np.ndarray | None = field(default=None, kw_only=True)
    """(tokens,) int8, of pairs: 0 or 1, the text of each token; None if the tokenizer has no
    types."""
    weights: np.ndarray | None = field(default=None, kw_only=True)
    """(samples,) float32: the weight of each sample's loss (--class_weights); 1 if None."""
    sampling_probabilities: np.ndarray | None = field(default=None, kw_only=True)
    """(samples,) float64, of --sampling, their sum is 1; None: an epoch has each sample once."""
    columns: dict[str, np.ndarray] = field(default_factory=dict, kw_only=True)
    """Name -> (samples, ...): extra arrays for `Batch.columns`."""
    collator: Any = field(default=None, kw_only=True)
    """A subclass of `toolkit.data.batches.Collator`, or a function that makes one; None:
    `Collator`."""

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if len(values) != len(self):
                raise UserError(
                    f"column {name} of the {self.name} split has {len(values)} values for "
                    f"{len(self)} samples: index the values of the file's rows with `split.rows` "
                    "(docs/data.md, Labels)"
                )

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """(samples,) int32, in tokens."""
        return np.subtract(self.offsets[1:], self.offsets[:-1], dtype=np.int32, casting="unsafe")

    def longest(self, count: int) -> np.ndarray:
        """The indices of the `count` longest samples, longest first."""
        count = min(count, len(self))
        longest = np.argpartition(self.lengths, -count)[-count:]
        return longest[np.argsort(-self.lengths[longest], kind="stable")]

    def span(self, index: int) -> slice:
        """The sample's slice of `input_ids` and `token_types`."""
        return slice(self.offsets[index], self.offsets[index + 1])

    def tokens(self, index: int) -> np.ndarray:
        """(length,) int32."""
        return self.input_ids[self.span(index)]

    def gather(self, values: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Per token, (tokens,), of all samples -> (T,), of the samples `indices`, one after
        another."""
        return gather_slices(values, self.offsets, indices)[0]

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,): what each sample adds to the loss denominator: 1, int64, or its weight,
        float64."""
        if self.weights is None:
            return np.broadcast_to(np.int64(1), len(self))[indices]
        return self.weights[indices].astype(np.float64)

    def texts(self) -> list[str]:
        """The source texts, pairs by `join_pair`; empty for the training split, whose texts are not
        saved."""
        lines = read_lines(self.folder / "texts.jsonl")
        return [text if isinstance(text, str) else join_pair(*text) for text in lines]

    def groups(self) -> dict[str, list[str]]:
        """`length` and each column with few distinct values -> the value of each sample."""
        groups = {"length": length_bins(self.lengths)}
        cells = read_lines(self.folder / "groups.jsonl")
        for name in cells[0] if cells else ():
            groups[name] = [row[name] for row in cells]
        return groups

    def truncate(self, tokenizer: Any, max_length: int, name: str) -> Split:
        """The same samples with at most `max_length` tokens each, for a split whose texts are
        saved."""
        lines = read_lines(self.folder / "texts.jsonl")
        texts: Any = lines
        pairs: Any = None
        if not isinstance(lines[0], str):
            texts, pairs = zip(*lines, strict=True)
        arrays: dict[str, Any] = encode_texts(tokenizer, texts, max_length, pairs)
        if self.token_types is None:  # the model may have none
            arrays.pop("token_types", None)
        return replace(self, name=name, **arrays)


def gather_slices(
    values: np.ndarray, offsets: np.ndarray, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The slices `values[offsets[i]:offsets[i + 1]]`, one after another, and (samples,) their
    lengths. A loop over samples would hold the interpreter's lock, which the thread that drives a
    GPU needs."""
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    ends = lengths.cumsum()
    places = np.arange(ends[-1]) + np.repeat(begins - ends + lengths, lengths)
    return values[places], lengths


def length_bins(lengths: np.ndarray) -> list[str]:
    """The length range of each sample, `12 to 30 tokens`: up to five ranges with equal numbers of
    samples."""
    edges = np.unique(np.quantile(lengths, [0.2, 0.4, 0.6, 0.8], method="lower"))
    starts = [int(lengths.min()), *(edges + 1).tolist()]
    ends = [*edges.tolist(), int(lengths.max())]
    return [f"{starts[place]} to {ends[place]} tokens" for place in np.searchsorted(edges, lengths)]


def join_pair(text: str, second: str) -> str:
    """A pair as one text for reports: its first line is the first text."""
    return text.replace("\n", " ") + "\n" + second


# --- files


def read_lines(path: Path) -> list[Any]:
    """The items of a JSONL file; empty if it is missing."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_lines(path: Path, items: Iterable[Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


def save_texts(path: Path, blocks: Iterable[TextBlock]) -> Iterator[TextBlock]:
    """Yields the blocks, and writes each text, or pair, as a line of JSON."""
    with path.open("w", encoding="utf-8") as file:
        for texts, pairs in blocks:
            items = texts if pairs is None else zip(texts, pairs, strict=True)
            file.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
            yield texts, pairs


@contextlib.contextmanager
def append_to_npy(path: Path, dtype: Any) -> Iterator[Callable[[np.ndarray], None]]:
    """Yields a function that appends arrays to a new .npy file: numpy's header has room for any
    length."""
    length = 0

    def write_header() -> None:
        kind = np.lib.format.dtype_to_descr(np.dtype(dtype))
        header = {"descr": kind, "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(file, header)

    def append(array: np.ndarray) -> None:
        nonlocal length
        length += len(array)
        file.write(np.ascontiguousarray(array, dtype).data)

    with path.open("wb") as file:
        write_header()
        yield append
        file.seek(0)
        write_header()


@dataclass
class Counts:
    truncated: int = 0
    """Texts longer than `max_length`."""
    unknown: int = 0
    """Unknown tokens."""
    tokens: int = 0


def save_tokens(
    folder: Path,
    blocks: Iterable[Block],
    ids: str = "input_ids",
    offsets: str = "offsets",
    unknown: int | None = None,
) -> Counts:
    """Appends blocks of tokens to .npy files in a folder as they come. `unknown`: the id of the
    unknown token."""
    counts = Counts()
    with contextlib.ExitStack() as files:
        append = files.enter_context(append_to_npy(folder / f"{ids}.npy", np.int32))
        append_ends = files.enter_context(append_to_npy(folder / f"{offsets}.npy", np.int64))
        append_ends(np.zeros(1, np.int64))
        append_types = None
        for block in blocks:
            append(block.ids)
            append_ends(counts.tokens + np.cumsum(block.lengths))
            if block.types is not None:
                if append_types is None:
                    path = folder / "token_types.npy"
                    append_types = files.enter_context(append_to_npy(path, np.int8))
                append_types(block.types)
            counts.tokens += len(block.ids)
            counts.truncated += block.truncated
            counts.unknown += int((block.ids == unknown).sum())
    return counts


def load_split(
    folder: Path, name: str, model_config: Any = None, split_class: type[Split] = Split
) -> Split:
    """Memory-maps a saved split: the files that are fields of `split_class`."""
    arrays = {}
    for one in fields(split_class):
        file = folder / name / f"{one.name}.npy"
        if file.is_file():
            arrays[one.name] = np.load(file, mmap_mode="r")
    return split_class(name, folder / name, **of_model(arrays, model_config))


def of_model(arrays: Mapping[str, np.ndarray], config: Any) -> dict[str, Any]:
    """The arrays of a split that a model reads, and its length buckets."""
    read: dict[str, Any] = dict(arrays)
    if not has_token_types(config):
        read.pop("token_types", None)
    return {"buckets": LengthBuckets.of_model(config), **read}


# --- texts -> tokens


class Block(NamedTuple):
    """The tokens of some texts."""

    ids: np.ndarray
    """(tokens,) int32, one text after another."""
    lengths: np.ndarray
    """(texts,) int64."""
    types: np.ndarray | None
    """(tokens,) int8, of pairs, if the tokenizer has them."""
    truncated: int
    """Texts that were truncated."""


def encode_blocks(
    tokenizer: Any, blocks: Iterable[TextBlock], max_length: int, total: int, what: str = "tokens"
) -> Iterator[Block]:
    """Blocks of texts -> blocks of their tokens, at most `max_length` of each text; the longer text
    of a pair is truncated first. Tokenizes the next texts while the caller writes these. `what`,
    `total` (texts): for progress."""
    # a copy: its truncation setting would be saved with the model by the process that tokenized
    tokenizer = copy.deepcopy(tokenizer)
    # sets the truncation once, before the threads
    tokenizer(["a"], truncation="longest_first", max_length=max_length)
    encode = _encode_slowly
    workers = 1
    if getattr(tokenizer, "is_fast", False):
        encode = _encode_fast
        workers = 2  # one waits for the tokenizer's own threads while the other makes arrays
    bar = Progress(what, total, "texts")
    done = 0
    with ThreadPoolExecutor(workers, "tokenize") as threads:
        pending = []
        for texts, pairs in blocks:
            pending.append(threads.submit(encode, tokenizer, max_length, texts, pairs))
            if len(pending) > 3:
                block = pending.pop(0).result()
                yield block
                done += len(block.lengths)
                bar.update(done)
        for future in pending:
            yield future.result()
    bar.close()


def _encode_fast(
    tokenizer: Any, max_length: int, texts: Sequence[str], pairs: Sequence[str] | None
) -> Block:
    """By the tokenizer's backend: transformers' own call takes twice as long."""
    types = None
    if pairs is None:
        inputs = cut_long_texts(tokenizer, texts, max_length)
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(inputs)
    else:
        both = list(zip(texts, pairs, strict=True))
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(both)
        if "token_type_ids" in tokenizer.model_input_names:
            types = [each.type_ids for each in encodings]
    truncated = sum(bool(each.overflowing) for each in encodings)
    return _block([each.ids for each in encodings], types, truncated)


def _encode_slowly(
    tokenizer: Any, max_length: int, texts: Sequence[str], pairs: Sequence[str] | None
) -> Block:
    """A tokenizer written in Python."""
    has_types = pairs is not None and "token_type_ids" in tokenizer.model_input_names
    batch = tokenizer(
        texts,
        text_pair=pairs,
        truncation="longest_first",
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=has_types,
    )
    return _block(batch["input_ids"], batch["token_type_ids"] if has_types else None, 0)


def _block(ids: list[list[int]], types: list[list[int]] | None, truncated: int) -> Block:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    flat_types = None if types is None else _flat(types, np.int8)
    return Block(_flat(ids, np.int32), lengths, flat_types, truncated)


def _flat(lists: list[list[int]], dtype: Any) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(lists), dtype, sum(map(len, lists)))


def cut_long_texts(tokenizer: Any, texts: Sequence[str], max_length: int) -> Sequence[str]:
    """The texts, the very long ones (15 MB take 2.3 GB in the tokenizer) cut if this leaves their
    first `max_length` tokens as they are: each word is tokenized alone, and the cut can only change
    the last words."""
    backend = tokenizer.backend_tokenizer
    limit = _LONG_TEXT * max_length
    places = [place for place, text in enumerate(texts) if len(text) > limit]
    # a segmenter of words needs whole texts
    if not places or tokenizer.truncation_side != "right" or hasattr(backend, "segmenter"):
        return texts
    cut = list(texts)
    starts = [texts[place][: _CUT * max_length] for place in places]
    for place, start, each in zip(places, starts, backend.encode_batch(starts), strict=True):
        overflowing = [each, *each.overflowing]
        last_word = max(filter(None, each.word_ids), default=0)
        end_word = max(filter(None, overflowing[-1].word_ids), default=0)
        if end_word >= last_word + 3:
            cut[place] = start
    return cut


def encode_texts(
    tokenizer: Any, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
) -> dict[str, np.ndarray]:
    """Texts (and second texts) in memory -> `input_ids`, `offsets`, and `token_types` of pairs if
    there are any."""
    parts = [slice(start, start + _BATCH_TEXTS) for start in range(0, len(texts), _BATCH_TEXTS)]
    pending = ((texts[part], None if pairs is None else pairs[part]) for part in parts)
    blocks = list(encode_blocks(tokenizer, pending, max_length, len(texts)))
    ids = [np.zeros(0, np.int32), *(block.ids for block in blocks)]
    lengths = [np.zeros(1, np.int64), *(block.lengths for block in blocks)]
    arrays = {
        "input_ids": np.concatenate(ids),
        "offsets": np.cumsum(np.concatenate(lengths)),
    }
    types = [block.types for block in blocks if block.types is not None]
    if types:
        arrays["token_types"] = np.concatenate(types)
    return arrays


# --- tokenizers


def load_tokenizer(settings: PretrainedSettings) -> Any:
    """One that puts the CLS token first pads on the right: padding before it would shift BERT's
    positions, and a text's outputs would depend on the longest of its batch. Raises UserError when
    there is none, it cannot pad, or it does not support `--tokenizer`."""
    name = str(settings.model_name_or_path)
    if settings.tokenizer == "jieba":
        with pretrained.explain_load_errors(name) as path:
            tokenizer = load_words_first(path)
        pretrained.refuse_unusable(tokenizer, name)
    else:
        tokenizer = pretrained.load_plain_tokenizer(name)
        if getattr(tokenizer, "init_kwargs", {}).get(MARK):
            tokenizer = words_first(tokenizer)
    begins_with_cls = tokenizer.cls_token_id in tokenizer("a")["input_ids"][:1]
    if begins_with_cls:
        tokenizer.padding_side = "right"
    return tokenizer


def separator_of(tokenizer: Any) -> str:
    """Joins the texts of several columns: a special token, which no tokenizer drops as white
    space."""
    return str(tokenizer.sep_token or tokenizer.eos_token or "\n")


def fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers that make the same tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("truncation", None)
        state.pop("padding", None)
        described = json.dumps([state, tokenizer.truncation_side], sort_keys=True)
    else:
        described = json.dumps([sorted(tokenizer.get_vocab().items()), repr(tokenizer)])
    described += getattr(backend, "segmenter", "")
    return hashlib.sha256(f"{type(tokenizer).__name__}{described}".encode()).hexdigest()[:32]


def refuse_foreign_tokenizer(tokenizer: Any, config: Any) -> None:
    """Raises UserError when the tokenizer has more tokens than the model has embeddings."""
    rows = getattr(pretrained.encoder_config(config), "vocab_size", None)
    if rows and len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {rows}: they are of "
            "different "
            "models; put the model's tokenizer files into its folder"
        )


def has_token_types(config: Any) -> bool:
    """Whether the model has a token type for each text of a pair; else only the separator
    distinguishes them."""
    return getattr(pretrained.encoder_config(config), "type_vocab_size", 2) != 1


def choose_max_length(
    max_length: int | None, tokenizer: Any, config: Any, pair: bool = False
) -> int:
    """`max_length`, or by default the model's limit. Raises UserError if the model has fewer
    positions."""
    config = pretrained.encoder_config(config)
    positions = getattr(config, "max_position_embeddings", None) or 0
    kind = getattr(config, "model_type", "")
    if positions and ("roberta" in kind or kind in _OWN_POSITIONS):
        positions -= (config.pad_token_id or 0) + 1
    if max_length is None:
        limits = [positions, tokenizer.model_max_length]
        return min((limit for limit in limits if 0 < limit < 10**6), default=512)
    special = tokenizer.num_special_tokens_to_add(pair)
    if max_length <= special:
        raise UserError(
            f"--max_length {max_length} leaves no token for the text: the tokenizer adds {special} "
            "special tokens"
        )
    if 0 < positions < max_length:
        raise UserError(
            f"--max_length {max_length}: the model has {positions} positions; pass at most that"
        )
    return max_length
