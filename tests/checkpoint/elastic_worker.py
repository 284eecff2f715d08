"""Started by tests/checkpoint/test_elastic_state.py: trains a small model under one strategy and
saves it, or restores it under another and compares.

    torchrun --nproc_per_node N -m tests.checkpoint.elastic_worker save|restore FOLDER

FOLDER/plan.json has [model, reader, target] for every restore. `zero2-bf16 x3` is saved and
restored by three processes. The first restore that differs ends them.
"""

import faulthandler
import functools
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.checkpoint import elastic_ways
from tests.checkpoint.elastic_ways import SAVED_AFTER, TRAINED_ON, build, take_step, truth_of
from tests.checkpoint.saved import save_state
from toolkit.checkpoint import folder as folders

HANG_SECONDS = 300  # of one restore


def save(model: str, name: str, root: Path) -> None:
    """ROOT/checkpoint, ROOT/truth.safetensors and ROOT/losses.json of the steps after it."""
    way = build(model, name)
    for step in range(SAVED_AFTER):
        take_step(way, step)
    save_state(way.state, root / "checkpoint", SAVED_AFTER)
    truth = truth_of(way)
    losses = [take_step(way, step) for step in range(SAVED_AFTER, TRAINED_ON)]
    if dist.get_rank() == 0:
        compare_file(load_file(root / "checkpoint" / "weights.safetensors"), truth)
        tensors = {key: value.contiguous() for key, value in truth.items()}
        save_file(tensors, root / "truth.safetensors")
        (root / "losses.json").write_text(json.dumps(losses))
    way.close()


def compare_file(saved: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    """The file has the fp32 masters, the frozen weights and the buffers."""
    expected = {}
    for key, value in truth.items():
        kind, _, name = key.partition(".")
        if kind in ("weight", "frozen", "buffer"):
            expected[name] = value.to(saved[name].dtype)
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)


def compare_after_restore(model: str, root: Path, target: str, exact: bool) -> None:
    """The state bit for bit, the next losses by a tolerance."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    way = build(model, target)
    take_step(way, 50)  # the restore must overwrite this state
    checkpoint = root / "checkpoint"
    folders.load(checkpoint, way.state, folders.read_state(checkpoint))
    expected, actual = load_file(root / "truth.safetensors"), truth_of(way)
    for key in expected.keys() & actual.keys():
        if key.startswith(("frozen.", "buffer.")):  # in the engine's dtype
            expected[key] = expected[key].to(actual[key].dtype)
    where = f"{root.name} -> {target}"
    same = functools.partial(torch.testing.assert_close, msg=lambda text: f"{where}: {text}")
    same(actual, expected, rtol=0, atol=0, check_dtype=False)
    losses = [take_step(way, step) for step in range(SAVED_AFTER, TRAINED_ON)]
    way.close()
    closeness = 1e-6 if exact else 1e-5
    if "16" in where:  # results depend on the memory layout
        closeness = 2e-3 if exact else 2e-2
    same(losses, json.loads((root / "losses.json").read_text()), rtol=closeness, atol=0)


def place(folder: Path, model: str, way: str) -> Path:
    return folder / f"{model}-{way.replace(' ', '-')}"


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    mine = f"x{dist.get_world_size()}"
    if action == "save":
        for model, reader in dict.fromkeys((model, reader) for model, reader, _ in plan):
            if reader.endswith(mine):
                save(model, reader, place(folder, model, reader))
                gc.collect()
    for model, reader, target in plan:
        if action == "restore" and target.endswith(mine):
            compare_after_restore(model, place(folder, model, reader), target, reader == target)
            gc.collect()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    elastic_ways.start_group()
    main()
