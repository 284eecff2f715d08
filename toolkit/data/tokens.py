"""Texts -> tokens on disk: one flat array per split, memory-mapped, so that ranks share its pages."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import hashlib
import itertools
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from toolkit import pretrained
from toolkit.config import PretrainedSettings
from toolkit.data.jieba_tokenizer import MARK, load_words_first, words_first
from toolkit.errors import UserError
from toolkit.utils.progress import Progress

_BATCH_TEXTS = 2000
# characters per token of max_length: of longer texts only the beginning is tokenized, if that is certain to be enough
_LONG_TEXT, _CUT = 64, 16
TextBlock = tuple[Sequence[str], Sequence[str] | None]
"""Texts, and the second texts of pairs."""


@dataclass(frozen=True)
class LengthBuckets:
    """Which texts may share a micro-batch. A BigBird computes batches up to `full` tokens wide with full attention,
    which padding does not change, and wider ones in blocks: which blocks a text attends to depends on the padded
    width."""

    full: int
    block: int

    @classmethod
    def of_model(cls, config: Any) -> LengthBuckets | None:
        """For a model's config; None if the width of a batch does not change the outputs."""
        config = pretrained.encoder_config(config)
        if (
            getattr(config, "model_type", "") != "big_bird"
            or config.attention_type != "block_sparse"
        ):
            return None
        return cls(
            pretrained.full_attention_up_to(config.block_size, config.num_random_blocks),
            config.block_size,
        )

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """(samples,) int64 bucket ids: texts of one bucket have the same outputs together as alone."""
        return np.where(lengths <= self.full, 0, -(-lengths // self.block))

    def widest(self, length: int) -> int:
        """The largest length in the bucket of `length`."""
        return self.full if length <= self.full else -(-length // self.block) * self.block


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
    """(tokens,) int8, of pairs: 0 or 1, the text of each token; None if the tokenizer has no types."""
    weights: np.ndarray | None = field(default=None, kw_only=True)
    """(samples,) float32: the weight of each sample's loss (--class_weights); 1 if None."""
    sampling_probabilities: np.ndarray | None = field(default=None, kw_only=True)
    """(samples,) float64, of --sampling, their sum is 1; None: an epoch has each sample once."""
    columns: dict[str, np.ndarray] = field(default_factory=dict, kw_only=True)
    """Name -> (samples, ...): extra arrays for `Batch.columns`."""
    collator: Any = field(default=None, kw_only=True)
    """A subclass of `toolkit.data.batches.Collator`, or a function that makes one; None: `Collator`."""

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if len(values) != len(self):
                raise UserError(
                    f"column {name} of the {self.name} split has {len(values)} values for {len(self)} samples: index "
                    "the values of the file's rows with `split.rows` (docs/data.md, Labels)"
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
        """Per token, (tokens,), of all samples -> (T,), of the samples `indices`, one after another."""
        return gather_slices(values, self.offsets, indices)[0]

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,): what each sample adds to the loss denominator: 1, int64, or its weight, float64."""
        if self.weights is None:
            return np.broadcast_to(np.int64(1), len(self))[indices]
        return self.weights[indices].astype(np.float64)

    def texts(self) -> list[str]:
        """The source texts, pairs by `join_pair`; empty for the training split, whose texts are not saved."""
        lines = read_lines(self.folder / "texts.jsonl")
        return [text if isinstance(text, str) else join_pair(*text) for text in lines]

    def group_cells(self) -> list[dict[str, str]]:
        """{column: cell} of each sample, of the source's columns that group rows; empty if there are none."""
        return read_lines(self.folder / "groups.jsonl")

    def groups(self) -> dict[str, list[str]]:
        """`length` and each column that groups rows -> the value of each sample."""
        cells = self.group_cells()
        columns = {name: [row[name] for row in cells] for name in (cells[0] if cells else ())}
        return {"length": length_bins(self.lengths)} | columns

    def truncate(self, tokenizer: Any, max_length: int, name: str) -> Split:
        """The same samples with at most `max_length` tokens each, for a split whose texts are saved."""
        lines = read_lines(self.folder / "texts.jsonl")
        texts, pairs = (lines, None) if isinstance(lines[0], str) else zip(*lines, strict=True)
        arrays: dict[str, Any] = encode_texts(tokenizer, texts, max_length, pairs)
        types = None if self.token_types is None else arrays["token_types"]  # a model may have none
        return replace(self, name=name, **arrays | {"token_types": types})


def gather_slices(
    values: np.ndarray, offsets: np.ndarray, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The slices `values[offsets[i]:offsets[i + 1]]`, one after another, and (samples,) their lengths. A loop over
    samples would hold the interpreter's lock, which the thread that drives a GPU needs."""
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    ends = lengths.cumsum()
    return values[np.arange(ends[-1]) + np.repeat(begins - ends + lengths, lengths)], lengths


def length_bins(lengths: np.ndarray) -> list[str]:
    """The length range of each sample, `12 to 30 tokens`: up to five ranges with equal numbers of samples."""
    edges = np.unique(np.quantile(lengths, [0.2, 0.4, 0.6, 0.8], method="lower"))
    starts, ends = (
        [int(lengths.min()), *(edges + 1).tolist()],
        [*edges.tolist(), int(lengths.max())],
    )
    return [f"{starts[place]} to {ends[place]} tokens" for place in np.searchsorted(edges, lengths)]


def join_pair(text: str, second: str) -> str:
    """A pair as one text for reports: its first line is the first text."""
    return text.replace("\n", " ") + "\n" + second


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
    """Yields a function that appends arrays to a new .npy file: numpy's header has room for any length."""
    length = 0

    def header() -> None:
        kind = np.lib.format.dtype_to_descr(np.dtype(dtype))
        np.lib.format.write_array_header_1_0(
            file, {"descr": kind, "fortran_order": False, "shape": (length,)}
        )

    def append(array: np.ndarray) -> None:
        nonlocal length
        length += len(array)
        file.write(np.ascontiguousarray(array, dtype).data)

    with path.open("wb") as file:
        header()
        yield append
        file.seek(0)
        header()


@dataclass
class Counts:
    truncated: int = 0
    """Texts longer than `max_length`."""
    unknown: int = 0  # tokens
    tokens: int = 0


def save_tokens(
    folder: Path,
    blocks: Iterable[Block],
    ids: str = "input_ids",
    offsets: str = "offsets",
    unknown: int | None = None,
) -> Counts:
    """Appends blocks of tokens to .npy files in a folder as they come. `unknown`: the id of the unknown token."""
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
                append_types = append_types or files.enter_context(
                    append_to_npy(folder / "token_types.npy", np.int8)
                )
                append_types(block.types)
            counts.tokens += len(block.ids)
            counts.truncated += block.truncated
            counts.unknown += int((block.ids == unknown).sum())
    return counts


_mapped: dict[Path, int] = {}


@functools.cache
def _report_truncated_files() -> Any:
    """From now on a SIGBUS, because a memory-mapped file became shorter, ends the process with one line. Python's own
    handlers run only after numpy's access has returned, which it never does."""

    def end(_: int) -> None:
        cut = [
            str(file)
            for file, size in _mapped.items()
            if file.is_file() and file.stat().st_size < size
        ]
        why = "bus error: /dev/shm is full (in a container: --shm-size=8g), or the disk of a memory-mapped file failed"
        why = (
            f"{cut[0]} was cut while the run read it: start it again, and its tokens are made anew"
            if cut
            else why
        )
        os.write(2, f"error: {why}\n".encode())
        os._exit(1)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).signal(int(signal.SIGBUS), handler)
    return handler


def load_split(
    folder: Path, name: str, model_config: Any = None, split_class: type[Split] = Split
) -> Split:
    """Memory-maps a saved split: the files that are fields of `split_class`."""
    _report_truncated_files()
    files = {file.stem: file for file in (folder / name).glob("*.npy")}
    _mapped.update({file: file.stat().st_size for file in files.values()})
    arrays = {
        one.name: np.load(files[one.name], mmap_mode="r")
        for one in fields(split_class)
        if one.name in files
    }
    return split_class(name, folder / name, **of_model(arrays, model_config))


def of_model(arrays: Mapping[str, np.ndarray], config: Any) -> dict[str, Any]:
    """The arrays of a split that a model reads, and its length buckets."""
    names = arrays.keys() - (() if has_token_types(config) else {"token_types"})
    return {"buckets": LengthBuckets.of_model(config), **{name: arrays[name] for name in names}}


def load_tokenizer(settings: PretrainedSettings) -> Any:
    """One that puts the CLS token first pads on the right: padding before it would shift BERT's positions, and a text's
    outputs would depend on the longest of its batch. Raises UserError when there is none, it cannot pad, or it does not
    support `--tokenizer`."""
    name = str(settings.model_name_or_path)
    if settings.tokenizer != "jieba":
        tokenizer = pretrained.load_plain_tokenizer(name)
        tokenizer = (
            words_first(tokenizer) if getattr(tokenizer, "init_kwargs", {}).get(MARK) else tokenizer
        )
    else:
        with pretrained.explain_load_errors(name) as path:
            tokenizer = load_words_first(path)
        pretrained.refuse_unusable(tokenizer, name)
    if (
        tokenizer.padding_side == "left"
        and tokenizer.cls_token_id in tokenizer("a")["input_ids"][:1]
    ):
        tokenizer.padding_side = "right"
    return tokenizer


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
    """Blocks of texts -> blocks of their tokens, at most `max_length` of each text; the longer text of a pair is
    truncated first. Tokenizes the next texts while the caller writes these. `what`, `total` (texts): for progress."""
    # a copy: its truncation setting would be saved with the model by the process that tokenized
    tokenizer = copy.deepcopy(tokenizer)
    bar, done = Progress(what, total, "texts"), 0
    fast = getattr(tokenizer, "is_fast", False)
    tokenizer(
        ["a"], truncation="longest_first", max_length=max_length
    )  # sets the truncation once, before the threads
    # one thread waits for the tokenizer's own threads while the other makes arrays of tokens
    with ThreadPoolExecutor(2 if fast else 1, "tokenize") as threads:
        pending: deque[Future[Block]] = deque()
        for block in itertools.chain(blocks, [None]):
            if block is not None:
                pending.append(threads.submit(_encode, tokenizer, fast, max_length, *block))
            while len(pending) > (3 if block is not None else 0):
                yield (ready := pending.popleft().result())
                done += len(ready.lengths)
                bar.update(done)
    bar.close()


def _encode(
    tokenizer: Any, fast: bool, max_length: int, texts: Sequence[str], pairs: Sequence[str] | None
) -> Block:
    has_types = pairs is not None and "token_type_ids" in tokenizer.model_input_names
    if fast:  # transformers' own call takes twice as long
        inputs = (
            cut_long_texts(tokenizer, texts, max_length)
            if pairs is None
            else list(zip(texts, pairs, strict=True))
        )
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(inputs)
        ids, types = (
            [each.ids for each in encodings],
            [each.type_ids for each in encodings] if has_types else [],
        )
    else:
        batch = tokenizer(
            texts,
            text_pair=pairs,
            truncation="longest_first",
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=has_types,
        )
        ids, types = batch["input_ids"], batch["token_type_ids"] if has_types else []
        encodings = batch.encodings or ()  # None for tokenizers written in Python
    lengths = np.fromiter(map(len, ids), np.int64, len(texts))
    flat = partial(np.fromiter, count=int(lengths.sum()))
    chain = itertools.chain.from_iterable
    truncated = sum(bool(each.overflowing) for each in encodings)
    return Block(
        flat(chain(ids), np.int32),
        lengths,
        flat(chain(types), np.int8) if has_types else None,
        truncated,
    )


def cut_long_texts(tokenizer: Any, texts: Sequence[str], max_length: int) -> Sequence[str]:
    """The texts, the very long ones (15 MB take 2.3 GB in the tokenizer) cut if this leaves their first `max_length`
    tokens as they are: each word is tokenized alone, and the cut can only change the last words."""
    backend, size = tokenizer.backend_tokenizer, _CUT * max_length
    long = {
        place: text[:size]
        for place, text in enumerate(texts)
        if len(text) > _LONG_TEXT * max_length
    }
    if (
        not long or tokenizer.truncation_side != "right" or hasattr(backend, "segmenter")
    ):  # which needs whole texts
        return texts
    for place, each in zip(list(long), backend.encode_batch(list(long.values())), strict=True):
        parts = [each, *each.overflowing]
        last, end = (max(filter(None, part.word_ids), default=0) for part in (parts[0], parts[-1]))
        if end < last + 3:
            del long[place]
    return [long.get(place, text) for place, text in enumerate(texts)]


def encode_texts(
    tokenizer: Any, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
) -> dict[str, np.ndarray]:
    """Texts (and second texts) in memory -> `input_ids`, `offsets`, and `token_types` of pairs if there are any."""
    parts = [slice(start, start + _BATCH_TEXTS) for start in range(0, len(texts), _BATCH_TEXTS)]
    pending = ((texts[part], None if pairs is None else pairs[part]) for part in parts)
    blocks = list(encode_blocks(tokenizer, pending, max_length, len(texts)))
    ids = np.concatenate([np.zeros(0, np.int32), *(block.ids for block in blocks)])
    lengths = [np.zeros(1, np.int64), *(block.lengths for block in blocks)]
    arrays = {"input_ids": ids, "offsets": np.cumsum(np.concatenate(lengths))}
    types = [block.types for block in blocks if block.types is not None]
    return arrays | ({"token_types": np.concatenate(types)} if types else {})


def separator_of(tokenizer: Any) -> str:
    """Joins the texts of several columns: a special token, which no tokenizer drops as white space."""
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
            f"the tokenizer has {len(tokenizer)} tokens and the model {rows}: they are of different models; put "
            "the model's tokenizer files into its folder"
        )


def has_token_types(config: Any) -> bool:
    """Whether the model has a token type for each text of a pair; else only the separator distinguishes them."""
    return getattr(pretrained.encoder_config(config), "type_vocab_size", 2) != 1


def choose_max_length(
    max_length: int | None, tokenizer: Any, config: Any, pair: bool = False
) -> int:
    """`max_length`, or by default the model's limit. Raises UserError if the model has fewer positions."""
    config = pretrained.encoder_config(config)
    positions = getattr(config, "max_position_embeddings", None)
    # RoBERTa and its variants count positions from pad_token_id + 1
    kind = getattr(config, "model_type", "")
    if positions and (
        "roberta" in kind or kind in ("camembert", "mpnet", "longformer", "data2vec-text", "xmod")
    ):
        positions -= (config.pad_token_id or 0) + 1
    special = tokenizer.num_special_tokens_to_add(pair)
    if max_length is not None and max_length <= special:
        raise UserError(
            f"--max_length {max_length} leaves no token for the text: the tokenizer adds {special} special tokens"
        )
    limits = [
        limit for limit in (positions, tokenizer.model_max_length) if limit and 0 < limit < 10**6
    ]
    if max_length is None:
        return min(limits) if limits else 512
    if positions and 0 < positions < max_length:
        raise UserError(
            f"--max_length {max_length}: the model has {positions} positions; pass at most that"
        )
    return max_length
