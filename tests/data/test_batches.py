"""toolkit/data/batches.py: global batches, each process's micro-batches of them, and padded tensors."""

import hashlib
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.faults import refusal
from tests.splits import global_batches, of_lengths
from toolkit.config import TrainingSettings
from toolkit.data.batches import Collator, collate_padded, micro_batches
from toolkit.data.tokens import LengthBuckets, Split
from toolkit.training.schedule import max_micro_batches

CPU = torch.device("cpu")


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    """Uneven, as texts are: many short ones and a long tail."""
    lengths = np.random.default_rng(seed).lognormal(3.0, 0.8, count).astype(np.int64)
    return np.minimum(2 + lengths, 512)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 257, 6401])
def test_global_batches_of_an_epoch(count: int) -> None:
    """Each sample once; of other samples in each epoch: the same batches in another order are no other one."""
    lengths = lengths_of(count, seed=count)
    for size, grouped in product([1, 3, 32, 1000], [True, False]):
        batches = global_batches(lengths, size, 7, 3, grouped)
        assert sorted(chain(*batches)) == list(range(count))
        full, rest = divmod(count, size)
        assert [len(batch) for batch in batches] == [size] * full + [rest] * (rest > 0)
    epochs = [global_batches(lengths, 8, 1, epoch) for epoch in range(2)]
    first, second = ({frozenset(batch.tolist()) for batch in epoch} for epoch in epochs)
    assert count < 31 or len(first & second) < len(first) / 2


def test_the_order_stays_the_same_from_version_to_version() -> None:
    """Checkpoints resume in it."""
    lengths = np.arange(6401) * 7919 % 509 + 3
    digests = []
    for grouped, chances in product([True, False], [None, lengths / lengths.sum()]):
        order = np.concatenate(global_batches(lengths, 32, 7, 3, grouped, chances))
        digests.append(hashlib.md5(order.astype("<i8").tobytes()).hexdigest()[:8])
    assert digests == ["c3519be0", "e121a57e", "e16104a4", "fed3fc71"]


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


BLOCKS = LengthBuckets(full=100, block=16)


@pytest.mark.parametrize("buckets", [None, BLOCKS])
@pytest.mark.parametrize("max_tokens", [None, 2, 24, 128, 5000])
@pytest.mark.parametrize("per_device", [1, 3, 16])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_micro_batches_are_exactly_the_global_batch(
    world: int, per_device: int, max_tokens: int | None, buckets: LengthBuckets | None
) -> None:
    """Where a model attends in blocks, a batch is all full attention, or all of one number of blocks."""
    lengths, most = lengths_of(200), max_tokens or 10**6
    split = of_lengths(lengths, buckets)
    for size in (*range(1, 20), 50, 127):
        indices = np.random.default_rng(size).permutation(200)[:size]
        in_time = micro_batches(split, indices, per_device, world, max_tokens)
        assert len(in_time) % world == 0  # as many on each process
        assert sorted(np.concatenate(in_time).tolist()) == sorted(indices.tolist())
        assert all(len(batch) <= per_device for batch in in_time)
        for batch in in_time:
            assert len(batch) <= 1 or padded_tokens(batch, lengths) <= most
            if buckets and lengths[batch].max(initial=0) > 100:
                assert len({-(-length // 16) for length in lengths[batch]}) == 1
        if buckets:
            continue
        assert all(len(batch) for batch in in_time) or size < len(in_time)
        if max_tokens is None:
            assert max(map(len, in_time)) - min(map(len, in_time)) <= 1
        # neighbours in length at the same time: the longest first, over all processes
        assert (np.diff(lengths[np.concatenate(in_time)]) <= 0).all()
        needed = fewest_batches(lengths[indices].tolist(), per_device, most)
        assert len(in_time) == -(-needed // world) * world


@pytest.mark.parametrize("buckets", [None, BLOCKS])
@pytest.mark.parametrize("max_tokens", [None, 64, 1000])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_no_step_has_more_micro_batches_than_declared(
    world: int, max_tokens: int | None, buckets: LengthBuckets | None
) -> None:
    """To DeepSpeed, which accumulates gradients only if there are several; also where one long text is drawn again and
    again."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        lengths = lengths_of(int(generator.integers(1, 120)), seed).clip(max=max_tokens)
        samples, per_device = int(generator.integers(1, 60)), int(generator.integers(1, 12))
        settings = TrainingSettings(global_batch_size=samples, per_device_batch_size=per_device,
                                    max_tokens_per_batch=max_tokens)  # fmt: skip
        split = of_lengths(lengths, buckets)
        steps = global_batches(lengths, samples, seed, 0)
        steps.append(np.full(samples, lengths.argmax()))
        most = max_micro_batches(settings, split, world)
        for step in steps:
            assert len(micro_batches(split, step, per_device, world, max_tokens)) <= most * world


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """Twelve samples of 1 to 12 tokens; token t of sample s is 100 s + t."""
    samples = [[100 * place + token for token in range(place + 1)] for place in range(12)]
    offsets = np.cumsum([0, *map(len, samples)])
    ids = np.array([token for sample in samples for token in sample], np.int32)
    return Split("train", tmp_path, ids, offsets, np.arange(12) % 3, np.arange(12) * 10)


def tokenizer(side: str = "right") -> SimpleNamespace:
    return SimpleNamespace(pad_token_id=7, padding_side=side)


@pytest.mark.parametrize(("side", "second"), [("right", [0, 7, 7]), ("left", [7, 7, 0])])
def test_padding(split: Split, side: str, second: list[int]) -> None:
    extra = np.arange(24, dtype=np.float32).reshape(12, 2)
    collate = Collator(replace(split, columns={"extra": extra}), tokenizer(side), CPU)
    batch = collate(np.array([2, 0]))
    assert batch.columns["extra"].tolist() == [[4, 5], [0, 1]]
    says = ["extra", "11 values for 12 samples", "split.rows"]
    refusal(replace, split, columns={"extra": extra[:11]}, says=says)
    assert batch.inputs["input_ids"].tolist() == [[200, 201, 202], second]
    assert torch.equal(batch.inputs["attention_mask"], (batch.inputs["input_ids"] != 7).long())
    assert {tensor.dtype for tensor in batch.inputs.values()} == {torch.int64}
    assert batch.labels.tolist() == [2, 0]
    assert batch.weights.tolist() == [1, 1]
    assert batch.ids.tolist() == [20, 0]
    assert (batch.samples, batch.tokens) == (2, 4)
    for alike in ([4, 4], [4]):  # nothing padded needs no mask
        assert set(collate(np.array(alike)).inputs) == {"input_ids"}


@pytest.mark.parametrize(("samples", "length"), [([], 1), ([4], 5), ([5, 4], 6)])
def test_padding_samples_count_nowhere(split: Split, samples: list[int], length: int) -> None:
    """They are short, so that a rank without samples computes little."""
    batch = collate_padded(Collator(split, tokenizer(), CPU), np.array(samples, np.int64), 4)
    padding = 4 - len(samples)
    assert batch.weights.tolist() == [1] * len(samples) + [0] * padding
    assert batch.ids.tolist() == [10 * sample for sample in samples] + [-1] * padding
    assert (batch.samples, batch.tokens) == (len(samples), sum(samples) + len(samples))
    assert batch.inputs["input_ids"].shape == (4, length)
    assert batch.labels.shape == (4,)


def test_a_gpu_gets_widths_it_is_fast_at(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collator, "move", lambda _, array: torch.from_numpy(array))
    for longest, buckets, widths in (
        (99, None, [8, 16, 16, 7]),
        (12, None, [8, 12, 12, 7]),  # there are no more positions
        (99, LengthBuckets(full=9, block=3), [2, 9, 12, 7]),
    ):
        collate = Collator(replace(split, buckets=buckets), tokenizer(), CPU)
        collate.device, collate.longest = SimpleNamespace(type="cuda"), longest  # type: ignore
        batches = [collate(np.array(indices)) for indices in ([1, 0], [8, 0], [11, 0], [6, 6])]
        assert [batch.inputs["input_ids"].shape[1] for batch in batches] == widths
        for batch in batches[:3]:
            assert batch.inputs["attention_mask"].sum().item() == batch.tokens
        equal = batches[3].inputs  # no mask, which would rule out the flash kernel
        assert "attention_mask" not in equal  # for the model; a recipe that pools gets ones
        assert torch.equal(equal["attention_mask"], torch.ones_like(equal["input_ids"]))
