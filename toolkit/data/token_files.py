"""A split on disk: its tokens and texts, appended as they come, and memory-mapped later.

SPLIT/input_ids.npy  offsets.npy  rows.npy  labels.npy   (token_types.npy of pairs)
SPLIT/texts.jsonl    of evaluated splits, for reports"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.encode import Block, encode_texts
from toolkit.data.table import TextBlock
from toolkit.data.tokens import Split, of_model
from toolkit.utils.cache import cached_folder


def save_texts(path: Path, blocks: Iterable[TextBlock]) -> Iterator[TextBlock]:
    """Yields the blocks, and writes the list of each row's texts as a line of JSON."""
    with path.open("w", encoding="utf-8") as file:
        for texts in blocks:
            for row in zip(*texts, strict=True):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            yield texts


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
    """What is reported of a split's tokens."""

    truncated: int = 0
    """Texts longer than `max_length`."""
    unknown: int = 0
    """Unknown tokens."""
    tokens: int = 0
    has_unknown: list[np.ndarray] = field(default_factory=list)
    """(texts,) bool of each block: whether a text has an unknown token."""

    def add(self, ids: np.ndarray, lengths: np.ndarray, unknown: int | None) -> None:
        """Counts the tokens (T,) of texts one after another, (texts,) their lengths."""
        seen = np.append(0, np.cumsum(ids == unknown))
        ends = np.cumsum(lengths)
        in_text = seen[ends] - seen[ends - lengths]  # (texts,)
        self.tokens += len(ids)
        self.unknown += int(seen[-1])
        self.has_unknown.append(in_text > 0)


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
        append_ends = files.enter_context(
            append_to_npy(folder / f"{offsets}.npy", np.int64)
        )
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
            counts.truncated += block.truncated
            counts.add(block.ids, block.lengths, unknown)
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


def split_of_texts(
    tokenizer: Any,
    model_config: Any,
    max_length: int,
    texts: TextBlock,
    shared_as: str | None = None,
) -> Split:
    """A split of texts in memory; all labels are 0. `shared_as`: as for `split_of_arrays`."""

    def encode() -> dict[str, np.ndarray]:
        rows = np.arange(len(texts[0]), dtype=np.int64)
        arrays = encode_texts(tokenizer, texts, max_length)
        return arrays | {"rows": rows, "labels": np.zeros_like(rows)}

    return split_of_arrays(encode, model_config, shared_as)


def split_of_arrays(
    make_arrays: Callable[[], dict[str, np.ndarray]],
    model_config: Any,
    shared_as: str | None = None,
    split_class: type[Split] = Split,
) -> Split:
    """The split of these arrays, by the names of its fields.

    With `shared_as`, a digest, it lies in a cache folder that one process per machine writes and
    the caller removes."""
    name = "texts"
    if shared_as is None:
        return split_class(name, Path(), **of_model(make_arrays(), model_config))
    with cached_folder("tokens", shared_as, None, "texts to predict") as (folder, draft):
        if draft:
            (draft / name).mkdir()
            for file, array in make_arrays().items():
                np.save(draft / name / f"{file}.npy", array)
    return load_split(folder, name, model_config, split_class)
