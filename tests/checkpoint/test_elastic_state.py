"""State saved under one strategy and world size is restored under any other, bit for bit, with parameters, optimizers
and settings that tests/test_elastic.py does not have. (Promise 4.)"""

import json
from pathlib import Path

import pytest

from tests.runs import groups, slow_but

# model or optimizer (see elastic_worker.Way) -> strategies that save and restore it
WAYS = {
    "odd": ["single x1", "zero2 x2", "zero3-subgroups x2", "zero2-robin x2", "zero3-persistent x3", "zero2-offload x2",
            "zero3-swapped x2", "zero1 x2", "ddp x3", "zero3 x1"],
    "frozen": ["single x1", "zero1 x2", "zero2 x3", "zero3-persistent x2"],
    "counting": ["single x1", "zero2 x2", "fsdp x2", "zero3 x2", "ddp x2"],
    "adafactor": ["single x1", "ddp x2"],
    "rows": ["fsdp x2", "single x1", "fsdp x3", "zero3 x2", "fsdp x1", "zero2 x3"],
}  # fmt: skip
ALL = [[name, reader, target] for name, ways in WAYS.items() for reader in ways for target in ways]
NEXT = [[name, ways[n - 1], way] for name, ways in WAYS.items() for n, way in enumerate(ways)]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("plan", slow_but([NEXT, ALL], NEXT), ids=["neighbours", "all"])
def test_restored_state_is_the_saved_state(plan: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    worlds = sorted({int(way[-1]) for _, *ways in plan for way in ways}, reverse=True)
    for action in ("save", "restore"):
        words = {world: [action, tmp_path] for world in worlds}
        groups("tests.checkpoint.elastic_worker", words, seconds=700)
