"""What is saved under one strategy and number of processes is restored under any other, bit for bit, for
parameters of every awkward kind and settings that the recipes' own matrix (tests/test_elastic.py) has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import groups, lines_of

# model (see elastic_ways.Odd) -> the ways between which it goes
WAYS = {
    "odd": ["single x1", "zero2 x2", "zero3-subgroups x2", "zero2-robin x2", "zero3-kept x3", "zero2-offload x2",
            "zero3-swapped x2", "zero1 x2", "zero2-scattered x2", "zero3-released x3", "zero2-aligned x3",
            "zero3-hpz x2", "ddp x3", "zero1 x1", "zero3 x1"],
    "frozen": ["single x1", "zero1 x2", "zero3-released x3", "zero2 x3", "zero3-kept x2"],
    "scalar": ["single x1", "ddp x2"],
    "empty": ["single x1", "zero1 x2", "zero2 x3", "zero2-robin x2"],
    "half": ["zero1-bf16 x2", "zero1-bf16-accumulates x2", "zero3-bf16-subgroups x3", "zero2-bf16 x3", "single x1",
             "zero1-bf16-accumulates x3", "zero3-bf16-swapped x2", "zero3-bf16-kept x2", "zero2-bf16-offload x2",
             "zero2-fp16 x2", "zero3-fp16 x2", "zero1-fp16 x3"],
    "momentum": ["single x1", "zero2 x2", "fsdp x2", "zero3 x2", "ddp x2"],
    "sgd": ["single x1", "zero3 x2"],
    "rmsprop": ["zero3 x2", "fsdp x2", "zero2 x2"],
    "lion": ["zero2 x2", "ddp x2", "fsdp x2"],
    "amsgrad": ["zero3 x2", "ddp x2"],
    "adagrad": ["single x1", "fsdp x2"],
    "vectors": ["zero2 x2"],
    "adafactor": ["single x1", "ddp x2"],
    "rows": ["fsdp x2", "single x1", "fsdp x3", "zero3 x2", "fsdp x1", "zero2 x3"],
}  # fmt: skip
Triple = tuple[str, str, str]


def some_pairs() -> list[Triple]:
    """Into every way from the one before it."""
    return [(model, ways[place - 1], way) for model, ways in WAYS.items() for place, way in enumerate(ways)]


def all_pairs() -> list[Triple]:
    return [(model, reader, target) for model, ways in WAYS.items() for reader in ways for target in ways]


def restored(folder: Path, plan: list[Triple]) -> dict[Triple, list[str]]:
    """Each restore -> what was wrong with it."""
    (folder / "plan.json").write_text(json.dumps(plan))
    worlds = sorted({int(way[-1]) for _, *ways in plan for way in ways}, reverse=True)
    groups("tests.checkpoint.elastic_worker", {world: [folder] for world in worlds}, seconds=1400)
    results = [line for world in worlds for line in lines_of(folder / f"results-{world}.jsonl")]
    return {(result["model"], result["reader"], result["target"]): result["faults"] for result in results}


def assert_all_are_right(results: dict[Triple, list[str]], plan: list[Triple]) -> None:
    assert set(results) == set(plan)
    wrong = [f"{' '.join(triple)}: {'; '.join(faults[:4])}" for triple, faults in results.items() if faults]
    assert not wrong, f"{len(wrong)} of {len(plan)}:\n" + "\n".join(wrong)


@pytest.mark.multiprocess
def test_some_pairs(tmp_path: Path) -> None:
    assert_all_are_right(restored(tmp_path, some_pairs()), some_pairs())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1500)
def test_all_pairs(tmp_path: Path) -> None:
    assert_all_are_right(restored(tmp_path, all_pairs()), all_pairs())
