"""toolkit/data/batches.py: global batches, each process's micro-batches of them, and padded tensors."""

import hashlib
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BigBirdConfig

from tests.faults import refusal
from tests.splits import of_lengths
from toolkit.data.batches import (
    Collator,
    GlobalBatches,
    accumulation_of,
    collator_of,
    micro_batches,
    padded_width,
)
from toolkit.data.tokens import LengthBuckets, Split
from toolkit.features.titles.data import TitleCollator, TitleSplit

CPU = torch.device("cpu")


def test_models_that_do_not_fit_the_batches() -> None:
    split = of_lengths(np.array([3]), LengthBuckets(704, 64))
    tokenizer = SimpleNamespace(pad_token_id=0, padding_side="right")
    plain = Collator(split, tokenizer, CPU).prepare_model
    plain(None, SimpleNamespace(config=BigBirdConfig()))
    for changed in ("block_size", "num_random_blocks"):
        model = SimpleNamespace(config=BigBirdConfig(**{changed: 2}))
        refusal(plain, None, model, says=[changed, "toolkit to-bigbird"])


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    """Uneven, as texts are: many short ones and a long tail."""
    return np.minimum(
        2 + np.random.default_rng(seed).lognormal(3.0, 0.8, count).astype(np.int64), 512
    )


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 257, 2000, 6401, 20_011])
def test_global_batches_of_an_epoch(count: int) -> None:
    lengths = lengths_of(count, seed=count)
    chances = lengths / lengths.sum()
    for size, grouped, drawn in product([1, 3, 7, 32, 1000], [True, False], [None, chances]):
        order = GlobalBatches(lengths, size, 7, 3, grouped, drawn)
        batches = [batch.tolist() for batch in order]
        assert drawn is not None or sorted(chain(*batches)) == list(range(count))
        assert [len(batch) for batch in batches] == [size] * (count // size) + [count % size] * (
            count % size > 0
        )
        for place in np.random.default_rng(0).permutation(len(order))[
            :400
        ]:  # whichever is asked for first
            assert order[place].tolist() == batches[place], (size, grouped, place)


@pytest.mark.parametrize(
    ("grouped", "drawn", "digest"),
    [(True, False, "c3519be0af5ad3338d4836169287ef8d"), (True, True, "e121a57eef307af4e66715fe96003166"),
     (False, False, "e16104a47aee56671758070b6f6eb2c6"), (False, True, "fed3fc717d8aac030b5ead680a9bfd4d")],
)  # fmt: skip
def test_the_order_stays_the_same_from_version_to_version(
    grouped: bool, drawn: bool, digest: str
) -> None:
    """Checkpoints resume in it."""
    lengths = np.arange(6401) * 7919 % 509 + 3
    order = GlobalBatches(lengths, 32, 7, 3, grouped, lengths / lengths.sum() if drawn else None)
    assert hashlib.md5(np.concatenate([*order]).astype("<i8").tobytes()).hexdigest() == digest


@pytest.mark.parametrize("count", [40, 64, 200, 5000])
def test_batches_are_of_other_samples_in_each_epoch(count: int) -> None:
    """Also where all lengths are sorted: the same batches in another order would not be another epoch."""
    lengths = lengths_of(count)
    epochs = [
        {frozenset(batch.tolist()) for batch in GlobalBatches(lengths, 8, 1, epoch)}
        for epoch in range(2)
    ]
    assert len(epochs[0] & epochs[1]) < len(epochs[0]) / 2


@pytest.mark.parametrize("batch", [8, 16, 32])
def test_grouping_wastes_little_on_padding(batch: int) -> None:
    lengths = lengths_of(5000)
    grouped, plain = (
        1
        - lengths.sum()
        / sum(
            len(each) * lengths[each].max() for each in GlobalBatches(lengths, batch, 1, 0, groups)
        )
        for groups in (True, False)
    )
    assert grouped < 0.15  # of the tokens are padding
    assert plain > 2 * grouped  # the lengths are uneven enough for the test to mean something


def padded_tokens(batch: np.ndarray, lengths: np.ndarray) -> int:
    """Of a micro-batch on a GPU, whose width is a multiple of 8."""
    return len(batch) * -(-int(lengths[batch].max(initial=0)) // 8) * 8


def fewest_batches(lengths: list[int], per_device: int, max_tokens: int) -> int:
    """How many batches of neighbours there must be, one sample after another, longest first."""
    count, width, inside = 0, 0, 0
    for length in sorted(lengths, reverse=True):
        if not inside or inside == per_device or (inside + 1) * width > max_tokens:
            count, width, inside = count + 1, -(-length // 8) * 8, 0
        inside += 1
    return count


@pytest.mark.parametrize("max_tokens", [None, 2, 8, 24, 100, 128, 600, 5000])
@pytest.mark.parametrize("per_device", [1, 3, 7, 16])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_micro_batches_are_exactly_the_global_batch(
    world: int, per_device: int, max_tokens: int | None
) -> None:
    lengths, split = lengths_of(200), of_lengths(lengths_of(200))
    for size in (*range(1, 20), 50, 64, 127):
        indices = np.random.default_rng(size).permutation(200)[:size]
        mine = [
            micro_batches(split, indices, per_device, rank, world, max_tokens)
            for rank in range(world)
        ]
        in_time = [
            batch for at_once in zip(*mine, strict=True) for batch in at_once
        ]  # as many on each process
        assert sorted(np.concatenate(in_time).tolist()) == sorted(indices.tolist())
        assert all(len(batch) <= per_device for batch in in_time)
        assert all(len(batch) for batch in in_time) or size < len(in_time)
        if max_tokens is None:
            assert max(map(len, in_time)) - min(map(len, in_time)) <= 1
        else:
            assert all(
                len(batch) <= 1 or padded_tokens(batch, lengths) <= max_tokens for batch in in_time
            )
        # neighbours in length at the same time: the longest first, over all processes
        assert (np.diff(lengths[np.concatenate(in_time)]) <= 0).all()
        needed = fewest_batches(lengths[indices].tolist(), per_device, max_tokens or 10**6)
        assert len(mine[0]) == -(-needed // world)


@pytest.mark.parametrize("max_tokens", [None, 8, 64, 300, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_no_global_batch_has_more_micro_batches_than_the_most(
    world: int, max_tokens: int | None
) -> None:
    """What is declared to DeepSpeed and to the gradient's scale must hold for every step of every epoch."""
    for seed in range(60):
        generator = np.random.default_rng(seed)
        lengths = lengths_of(int(generator.integers(1, 120)), seed)
        samples, per_device = int(generator.integers(1, 60)), int(generator.integers(1, 12))
        most = accumulation_of(of_lengths(lengths), samples, per_device, world, max_tokens)
        steps = [
            batch
            for grouped in (True, False)
            for batch in GlobalBatches(lengths, samples, seed, 0, grouped)
        ]
        steps += [generator.permutation(len(lengths))[: generator.integers(1, samples + 1)]]
        counts = [
            len(micro_batches(of_lengths(lengths), batch, per_device, 0, world, max_tokens))
            for batch in steps
        ]
        assert max(counts) <= most
        if len(lengths) >= samples:  # and a batch of the longest has as many
            longest = np.argsort(-lengths, kind="stable")[:samples]
            assert (
                len(micro_batches(of_lengths(lengths), longest, per_device, 0, world, max_tokens))
                == most
            )


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """Twelve samples of 1 to 12 tokens; token t of sample s is 100 s + t."""
    samples = [[100 * place + token for token in range(place + 1)] for place in range(12)]
    offsets = np.cumsum([0, *map(len, samples)])
    ids = np.array([token for sample in samples for token in sample], np.int32)
    return Split("train", tmp_path, ids, offsets, np.arange(12) % 3, np.arange(12) * 10)


def collator(split: Split, side: str = "right", pad: int = 7) -> Collator:
    return Collator(split, SimpleNamespace(pad_token_id=pad, padding_side=side), CPU)


@pytest.mark.parametrize(("side", "second"), [("right", [0, 7, 7]), ("left", [7, 7, 0])])
def test_padding(split: Split, side: str, second: list[int]) -> None:
    extra = np.arange(24, dtype=np.float32).reshape(12, 2)
    batch = collator(replace(split, columns={"extra": extra}), side)(np.array([2, 0]))
    assert batch.columns["extra"].tolist() == [[4, 5], [0, 1]]
    refusal(
        replace,
        split,
        columns={"extra": extra[:11]},
        says=["extra", "11 values for 12 samples", "split.rows"],
    )
    assert batch.inputs["input_ids"].tolist() == [[200, 201, 202], second]
    assert torch.equal(batch.inputs["attention_mask"], (batch.inputs["input_ids"] != 7).long())
    assert {tensor.dtype for tensor in batch.inputs.values()} == {torch.int64}
    assert (batch.labels.tolist(), batch.weights.tolist(), batch.ids.tolist()) == (
        [2, 0],
        [1, 1],
        [20, 0],
    )
    assert batch.weights.dtype == torch.float32
    assert (batch.samples, batch.tokens) == (2, 4)
    for alike in ([4, 4], [4]):  # nothing padded needs no mask
        assert set(collator(split, side)(np.array(alike)).inputs) == {"input_ids"}


TITLES = [[2, 31, 3], [2, 3], [2, 31, 32, 33, 3]]


@pytest.fixture
def titled(split: Split) -> TitleSplit:
    """The first three samples, with titles that begin with 2 and end with 3."""
    offsets = np.cumsum([0, *map(len, TITLES)])
    ids = np.array([token for title in TITLES for token in title], np.int32)
    return TitleSplit("train", split.folder, split.input_ids, split.offsets[:4], np.zeros(3, np.int64), split.rows[:3],
                      target_ids=ids, target_offsets=offsets, collator=TitleCollator)  # fmt: skip


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_token_of_a_title_is_told_those_before_it(titled: TitleSplit, side: str) -> None:
    """The decoder's padding is on the right, on whichever side the text has its own."""
    tokenizer, indices = SimpleNamespace(pad_token_id=7, padding_side=side), np.array([2, 1, 0])
    batch, texts = TitleCollator(titled, tokenizer, CPU)(indices), collator(titled, side)(indices)
    assert batch.inputs["decoder_input_ids"].tolist() == [
        [2, 31, 32, 33],
        [2, 7, 7, 7],
        [2, 31, 7, 7],
    ]
    assert batch.labels.tolist() == [[31, 32, 33, 3], [3, -100, -100, -100], [31, 3, -100, -100]]
    assert (batch.inputs["decoder_input_ids"].dtype, batch.labels.dtype) == (
        torch.int64,
        torch.int64,
    )
    assert set(batch.inputs) == {"decoder_input_ids", *texts.inputs}
    assert all(torch.equal(batch.inputs[name], tensor) for name, tensor in texts.inputs.items())
    assert (batch.samples, batch.tokens, batch.ids.tolist()) == (
        texts.samples,
        texts.tokens,
        texts.ids.tolist(),
    )
    assert (batch.labels != -100).sum(1).tolist() == titled.loss_denominators(indices).tolist()


def test_an_empty_micro_batch_becomes_one_sample_without_weight(
    split: Split, titled: TitleSplit
) -> None:
    for kind in (split, titled):
        batch = collator_of(kind, SimpleNamespace(pad_token_id=7, padding_side="right"), CPU)(
            np.zeros(0, np.int64)
        )
        assert (batch.weights.tolist(), batch.ids.tolist(), batch.samples, batch.tokens) == (
            [0.0],
            [-1],
            0,
            0,
        )
        assert batch.inputs["input_ids"].shape[0] == batch.labels.shape[0] == 1
    assert batch.inputs["decoder_input_ids"].shape == batch.labels.shape == (1, 2)


def test_a_gpu_gets_widths_it_is_fast_at(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    collate = collator(split)
    collate.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    monkeypatch.setattr(
        collate, "move", lambda array: torch.from_numpy(np.ascontiguousarray(array))
    )
    assert collate(np.array([8, 0])).inputs["input_ids"].shape == (
        2,
        12,
    )  # as long as the longest text
    collate.longest = 20
    batch = collate(np.array([8, 0]))
    assert batch.inputs["input_ids"].shape == (2, 16)
    assert batch.inputs["attention_mask"].sum().item() == batch.tokens == 10
    for equal in (7, 8):  # no mask, which would rule out the flash kernel
        inputs = collate(np.array([equal])).inputs
        assert inputs["input_ids"].shape == (1, split.lengths[equal])
        assert "attention_mask" not in inputs  # for the model; a recipe that pools gets ones
        assert torch.equal(inputs["attention_mask"], torch.ones_like(inputs["input_ids"]))
    assert [padded_width(length, 50, None) for length in (1, 8, 41, 49, 50)] == [8, 8, 48, 50, 50]
    odd = LengthBuckets(full=33, block=3)
    assert [padded_width(length, 60, odd) for length in (25, 31, 33, 34, 59)] == [
        32,
        32,
        33,
        36,
        60,
    ]


@pytest.mark.parametrize("max_tokens", [None, 700])
@pytest.mark.parametrize("world", range(1, 5))
def test_a_micro_batch_is_read_as_each_of_its_texts_is_alone(
    world: int, max_tokens: int | None
) -> None:
    """Where a model attends in blocks: a batch is either all full attention, or all of one number of blocks."""
    sparse = LengthBuckets(full=100, block=16)
    generator = np.random.default_rng(world)
    for size in (1, 2, 5, 16, 40):
        split = of_lengths(generator.integers(3, 300, 60), sparse)
        batch = generator.permutation(60)[:size]
        mine = [micro_batches(split, batch, 4, rank, world, max_tokens) for rank in range(world)]
        flat = [batch for rank in mine for batch in rank if len(batch)]
        assert sorted(np.concatenate(flat).tolist()) == sorted(batch.tolist())
        assert len({len(rank) for rank in mine}) == 1
        assert len(mine[0]) <= accumulation_of(split, size, 4, world, max_tokens)
        for batch in flat:
            lengths = split.lengths[batch]
            assert lengths.max() <= 100 or len({-(-length // 16) for length in lengths}) == 1
            assert len(batch) <= 4
            assert max_tokens is None or len(batch) == 1 or len(batch) * lengths.max() <= max_tokens
