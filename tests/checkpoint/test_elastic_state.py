"""State saved under one strategy and world size is restored under any other, bit for bit, with parameters, optimizers
and settings that tests/test_elastic.py does not have. (Promise 4.)

    torchrun --nproc_per_node N -m tests.checkpoint.test_elastic_state save|restore FOLDER

trains a small model under one strategy and saves it, or restores it under another and compares. FOLDER/plan.json has
[model, reader, target] for every restore. `zero2-offload x3` is saved and restored by three processes. The first
restore that differs ends them.
"""

import faulthandler
import gc
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.checkpoint import states
from tests.runs import groups, slow_but
from toolkit.checkpoint import folder as folders

# model or optimizer (see states.Way) -> strategies that save and restore it
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
        groups("tests.checkpoint.test_elastic_state", words, seconds=700)


SAVED_AFTER, TRAINED_ON = 2, 5
HANG_SECONDS = 300  # of one restore


def build(model: str, name: str) -> states.Way:
    torch.manual_seed(11)
    module = states.Odd()
    if model in ("frozen", "rows"):
        module.first.bias.requires_grad_(False)
        module.second.weight.requires_grad_(False)
    return states.Way(module, name.split()[0], model if model in states.OPTIMIZERS else "adamw")


def take_step(way: states.Way, step: int) -> float:
    """On the same six samples whatever the world size; returns their mean loss."""
    tokens = torch.randint(13, (6, 5), generator=torch.Generator().manual_seed(100 + step))
    way.engine.train()
    loss = way.engine(tokens[dist.get_rank() :: dist.get_world_size()])
    way.update(loss)
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def next_losses(way: states.Way) -> list[float]:
    return [take_step(way, step) for step in range(SAVED_AFTER, TRAINED_ON)]


def assert_in_memory(way: states.Way, checkpoint: Path) -> None:
    """The file has the weights and buffers that the model computes with."""
    weights = states.whole_state(way.module)
    weights["small"] = weights["small"].float()
    states.assert_same(load_file(checkpoint / folders.WEIGHTS_FILE), weights)


def save(model: str, name: str, root: Path) -> None:
    """ROOT/checkpoint, and ROOT/losses.json of the steps after it."""
    way = build(model, name)
    for step in range(SAVED_AFTER):
        take_step(way, step)
    states.save_state(way.live(), root / "checkpoint", SAVED_AFTER)
    dist.barrier()
    assert_in_memory(way, root / "checkpoint")
    losses = next_losses(way)
    if dist.get_rank() == 0:
        (root / "losses.json").write_text(json.dumps(losses))
    way.close()


def compare_after_restore(model: str, root: Path, target: str) -> None:
    """Weights and optimizer state, saved again, bit for bit; then the losses of the run that went on."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    checkpoint, again = root / "checkpoint", root / f"again under {target}"
    way = build(model, target)
    take_step(way, 50)  # the restore must overwrite this state
    folders.load(checkpoint, way.live(), folders.read_state(checkpoint))
    assert_in_memory(way, checkpoint)
    states.save_state(way.live(), again, SAVED_AFTER)
    dist.barrier()
    for file in (folders.WEIGHTS_FILE, folders.OPTIMIZER_FILE):
        saved, restored = load_file(checkpoint / file), load_file(again / file)
        states.assert_same(restored, saved)
    closeness = 1e-6 if root.name == place(model, target) else 1e-5
    expected = json.loads((root / "losses.json").read_text())
    assert next_losses(way) == pytest.approx(expected, rel=closeness), f"{root.name} -> {target}"
    way.close()


def place(model: str, way: str) -> str:
    return f"{model}-{way.replace(' ', '-')}"


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    mine = f"x{dist.get_world_size()}"
    if action == "save":
        for model, reader in dict.fromkeys((model, reader) for model, reader, _ in plan):
            if reader.endswith(mine):
                save(model, reader, folder / place(model, reader))
                gc.collect()
    for model, reader, target in plan:
        if action == "restore" and target.endswith(mine):
            compare_after_restore(model, folder / place(model, reader), target)
            gc.collect()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    states.start_group()
    main()
