"""Tokens on disk: one flat array per split, mapped into memory, so that ranks share its pages."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from toolkit.errors import UserError

_BATCH_TEXTS = 2000


@dataclass(frozen=True)
class LengthBuckets:
    """Which texts may share a micro-batch. A BigBird reads batches of up to `full` tokens with full attention, which
    padding does not change, and wider ones in blocks: which blocks a text attends to follows from the batch's width,
    padding counted."""

    full: int
    block: int

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """(samples,) int64: texts of one bucket are read together as each is alone."""
        return np.where(lengths <= self.full, 0, -(-lengths // self.block))


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
    """(samples,) int64, each sample's row in its source, counted from 0: its id."""
    buckets: LengthBuckets | None = field(default=None, kw_only=True)
    """Where the model reads a text differently in a wider batch."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """(samples,) int64, in tokens."""
        return np.diff(self.offsets)

    def tokens(self, index: int) -> np.ndarray:
        """(length,) int32."""
        return self.input_ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def loss_denominators(self) -> np.ndarray:
        """(samples,) int64: what each sample adds to the loss denominator: 1."""
        return np.ones(len(self), np.int64)

    def texts(self) -> list[str]:
        """The source texts; kept for splits that are evaluated, empty for the training split."""
        return _read_strings(self.folder / "texts.jsonl")

    def cut(self, tokenizer: Any, max_length: int, name: str) -> Split:
        """The same samples, with at most `max_length` tokens of each text; for a split that keeps its texts."""
        arrays: dict[str, Any] = encode(tokenizer, self.texts(), max_length)[0]
        return replace(self, name=name, **arrays)


@dataclass(frozen=True)
class TitleSplit(Split):
    """A split whose samples have titles; their tokens are laid out as the texts' are."""

    target_ids: np.ndarray
    """(tokens,) int32, all titles one after another, with the tokens that begin and end them."""
    target_offsets: np.ndarray
    """(samples + 1,) int64."""

    @property
    def loss_denominators(self) -> np.ndarray:
        """(samples,) int64: what each title adds to the loss denominator: its tokens but the first, which is given."""
        return np.diff(self.target_offsets) - 1

    def target(self, index: int) -> np.ndarray:
        """(length,) int32."""
        return self.target_ids[self.target_offsets[index] : self.target_offsets[index + 1]]

    def titles(self) -> list[str]:
        """The titles as they were written; kept for splits that are evaluated."""
        return _read_strings(self.folder / "titles.jsonl")


def _read_strings(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def save_split(
    folder: Path, arrays: dict[str, np.ndarray], texts: Sequence[str] | None, titles: Sequence[str] | None = None
) -> None:
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    for name, strings in (("texts", texts), ("titles", titles)):
        if strings is not None:
            with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(string, ensure_ascii=False) + "\n" for string in strings)


def load_split(folder: Path, name: str, buckets: LengthBuckets | None = None) -> Split:
    """Maps a saved split into memory; one with titles is a `TitleSplit`."""
    parts = ["input_ids", "offsets", "rows"]
    titled = (folder / name / "target_ids.npy").is_file()
    if titled:
        parts += ["target_ids", "target_offsets"]
    arrays = {part: np.load(folder / name / f"{part}.npy", mmap_mode="r") for part in parts}
    labels = np.load(folder / name / "labels.npy")
    return (TitleSplit if titled else Split)(name, folder / name, labels=labels, buckets=buckets, **arrays)


def encode(
    tokenizer: Any, texts: Sequence[str], max_length: int, progress: str | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """Texts -> ({input_ids, offsets}, how many were cut at `max_length` tokens)."""
    # a copy: how it cut here would stay in it, and be saved with the model by the process that made the tokens
    tokenizer = copy.deepcopy(tokenizer)
    pieces: list[np.ndarray] = []
    lengths: list[int] = [0]
    cut = 0
    for batch in _batches(texts, progress):
        encoded = tokenizer(
            batch,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        pieces += [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]
        lengths += [len(ids) for ids in encoded["input_ids"]]
        if encoded.encodings is not None:  # None for tokenizers written in Python
            cut += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
    flat = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    return {"input_ids": flat, "offsets": np.cumsum(lengths, dtype=np.int64)}, cut


def _batches(texts: Sequence[str], progress: str | None) -> Iterator[Sequence[str]]:
    starts = range(0, len(texts), _BATCH_TEXTS)
    # a bar only where it takes long enough to wonder
    with tqdm(total=len(texts), desc=progress, unit=" texts", disable=progress is None, delay=2.0) as bar:
        for start, stop in pairwise([*starts, len(texts)]):
            yield texts[start:stop]
            bar.update(stop - start)


def fingerprint(tokenizer: Any) -> str:
    """Changes when the tokenizer would make other tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("truncation", None)
        state.pop("padding", None)
        described = json.dumps([state, tokenizer.truncation_side], sort_keys=True)
    else:
        described = json.dumps([sorted(tokenizer.get_vocab().items()), repr(tokenizer)])
    described += getattr(tokenizer, "fingerprint_extra", "")  # what cuts the text before it
    return hashlib.sha256(f"{type(tokenizer).__name__}{described}".encode()).hexdigest()[:32]


def unknown_share(tokenizer: Any, input_ids: np.ndarray) -> float:
    """The part of the tokens that the tokenizer has no word for, from 0 to 1."""
    if tokenizer.unk_token_id is None or not len(input_ids):
        return 0.0
    return float((input_ids == tokenizer.unk_token_id).mean())


def refuse_foreign_tokenizer(tokenizer: Any, config: Any) -> None:
    """Raises UserError when the tokenizer can make tokens the model has no row for."""
    rows = getattr(reader(config), "vocab_size", None)
    if rows and len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer knows {len(tokenizer)} tokens and the model {rows}: they are not of one model; put the "
            "model's own tokenizer files into its folder"
        )


def choose_max_length(wanted: int | None, tokenizer: Any, config: Any) -> int:
    """The wanted length, checked against the model's; the model's own when none is wanted.

    Raises UserError when the model has fewer positions.
    """
    config = reader(config)
    positions = getattr(config, "max_position_embeddings", None)
    # RoBERTa and its kin count positions from pad_token_id + 1
    kind = getattr(config, "model_type", "")
    if positions and ("roberta" in kind or kind in ("camembert", "mpnet", "longformer", "data2vec-text", "xmod")):
        positions -= (config.pad_token_id or 0) + 1
    special = tokenizer.num_special_tokens_to_add()
    if wanted is not None and wanted <= special:
        raise UserError(f"--max_length {wanted} holds no token of a text beside the {special} that begin and end it")
    limits = [limit for limit in (positions, tokenizer.model_max_length) if limit and 0 < limit < 10**6]
    if wanted is None:
        return min(limits) if limits else 512
    if positions and 0 < positions < wanted:
        raise UserError(f"--max_length {wanted}: the model has {positions} positions; pass at most that")
    return wanted


def reader(config: Any) -> Any:
    """The config of what reads the texts: an encoder-decoder has two."""
    return getattr(config, "encoder", config)
