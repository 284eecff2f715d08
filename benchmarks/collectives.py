"""Counts the collectives and bytes of a step of DDP and FSDP2 on 8, 64 and 1,024 ranks, in one process without network.

    python benchmarks/collectives.py --write          (a minute, 3 GB of memory)

torch's fake process group returns from every collective without communication, so that this process can be rank 0 of
any world. A BERT-base runs forward and backward, wrapped as in the recipes: DDP with torch's buckets of 25 MiB, FSDP2
with a unit for each layer and one for the rest (without data, by FakeTensorMode). `CommDebugMode` counts collectives,
and a hook on its buckets those of DDP's C++ reducer; bytes are those that one rank sends in a ring (Patarasu and Yuan
2009). Gradients are wrong, and times meaningless.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertForSequenceClassification

ROOT = Path(__file__).resolve().parent.parent
RANKS = (8, 64, 1024)
_NAMES = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}
HALF = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
)  # as in accelerate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/collectives.md"
    )
    options = parser.parse_args()
    lines = ["| way | ranks | micro-batches | collectives of a step | bytes that one rank sends by a ring, MB |",
             "|---|---|---|---|---|"]  # fmt: skip
    for ranks in RANKS:
        for row in rows(ranks):
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    if options.write:
        note = "`python benchmarks/collectives.py`: BERT-base, 438 MB of fp32 weights; counted, not measured."
        (ROOT / "benchmarks" / "results" / "collectives.md").write_text(
            f"# Collectives of a step\n\n{note}\n\n" + "\n".join(lines) + "\n", encoding="utf-8"
        )


def rows(ranks: int) -> Iterator[tuple[str, ...]]:
    """(way, ranks, micro-batches, collectives, MB) of each way."""
    warnings.filterwarnings("ignore", message=".*ackward hook.*|.*broadcast_buffers.*")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    for count in (count_ddp(), count_fsdp2(mesh), count_fsdp2(mesh, HALF)):
        for way, micro_batches, counts, size in count:
            collectives = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
            yield way, f"{ranks:,}", str(micro_batches), collectives, f"{size / 1e6:,.0f}"
    dist.destroy_process_group()


def forward_backward(model: Any) -> None:
    model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.float().sum().backward()


def ring_bytes(name: str, size: int) -> float:
    """Bytes that one rank sends for a tensor of `size` bytes; an all-reduce is a reduce-scatter and an all-gather."""
    world = dist.get_world_size()
    return size * (world - 1) / world * (2 if "reduce" in name and "scatter" not in name else 1)


Count = tuple[str, int, Counter[str], float]
"""(way, micro-batches, collectives, bytes)."""


def count_ddp() -> Iterator[Count]:
    # as in the toolkit: a BERT's buffers are constants
    bert = BertForSequenceClassification(BertConfig())
    model = DistributedDataParallel(bert, gradient_as_bucket_view=True, broadcast_buffers=False)
    buckets: list[int] = []

    def record(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        buckets.append(bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, record)
    forward_backward(model)  # DDP rebuilds its buckets after the first step
    forward_backward(model)
    for micro_batches in (1, 2):
        buckets.clear()
        with model.no_sync() if micro_batches == 2 else contextlib.nullcontext():
            forward_backward(model)
        if micro_batches == 2:
            forward_backward(model)
        sent = sum(ring_bytes("all-reduce", size) for size in buckets)
        yield "DDP", micro_batches, Counter({"all-reduce": len(buckets)}), sent


class Bytes(TorchDispatchMode):
    """Sums the bytes that a ring sends for collectives."""

    sent = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            sizes = [
                each.nbytes for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)
            ]
            self.sent += ring_bytes(function.__name__, max(sizes, default=0))
        return function(*arguments, **(options or {}))


def count_fsdp2(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> Iterator[Count]:
    with FakeTensorMode():  # without data
        model: Any = BertForSequenceClassification(BertConfig())
        options = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
        for layer in model.bert.encoder.layer:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        if policy is not None:
            yield "FSDP2, half_precision_weights", 1, *count_step(model, [True])
            return
        yield "FSDP2", 1, *count_step(model, [True])
        yield "FSDP2, reduced once", 2, *count_step(model, [False, True])
        yield "FSDP2, each micro-batch reduced", 2, *count_step(model, [True, True])


def count_step(model: Any, reduced: list[bool]) -> tuple[Counter[str], float]:
    """(collectives, bytes) of a step; `reduced`: whether each of its micro-batches reduces gradients."""
    counts, size = Counter[str](), Bytes()
    for reduce in reduced:
        model.set_requires_gradient_sync(reduce)
        with CommDebugMode() as counted, size:
            forward_backward(model)
        for operator, times in counted.get_comm_counts().items():
            counts[next(name for part, name in _NAMES.items() if part in str(operator))] += times
    return counts, size.sent


if __name__ == "__main__":
    main()
