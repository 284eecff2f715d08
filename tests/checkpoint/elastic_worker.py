"""Started by tests/checkpoint/test_elastic_state.py: trains a small model under one strategy, saves it, restores it
under others, and compares.

    torchrun --nproc_per_node N -m tests.checkpoint.elastic_worker FOLDER

FOLDER/plan.json has [model, reader, target] for every restore. `zero2-bf16 x3` is saved and restored by the worker of
three processes; workers of all world sizes run at the same time and wait for each other's checkpoints. The faults of
each restore are written to FOLDER/results-N.jsonl.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.checkpoint.elastic_ways import SAVED_AFTER, TRAINED_ON, Way, build, take_step, truth_of
from tests.checkpoint.handmade import save_state
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.restore import restore

WAIT_SECONDS = 600
HANG_SECONDS = 300  # of one restore


def make(model: str, name: str, root: Path) -> None:
    """ROOT/checkpoint, ROOT/truth.safetensors and ROOT/losses.json of the steps after it."""
    way = build(model, name)
    for step in range(SAVED_AFTER):
        take_step(way, step)
    frozen = [name for name, parameter in way.state.module.named_parameters() if not parameter.requires_grad]
    save_state(way.state, root / "checkpoint", SAVED_AFTER, way.engine, strategy=way.strategy, frozen=frozen)
    truth = truth_of(way)
    saved = way.state.gather_weights(torch.device("cpu"))
    kinds = {"weight", "frozen", "buffer"}
    expected = {key.partition(".")[2]: value for key, value in truth.items() if key.partition(".")[0] in kinds}
    if dist.get_rank() > 0:
        assert not saved, "the unsharded model is in the memory of several ranks"
    elif any(not torch.equal(saved[name].float().view(-1), expected[name].float().view(-1)) for name in expected):
        raise AssertionError("the model folder would lack the masters")
    losses = [take_step(way, step) for step in range(SAVED_AFTER, TRAINED_ON)]
    if dist.get_rank() == 0:
        save_file({key: value.contiguous() for key, value in truth.items()}, root / "truth.safetensors")
        (root / ".losses").write_text(json.dumps(losses))
        (root / ".losses").replace(root / "losses.json")  # last: the others wait for it
    way.close()


def faults_of(model: str, root: Path, target: str, exact: bool) -> list[str]:
    """What differs after a restore: the state bit for bit, the next losses by a tolerance."""
    wait_for(root / "losses.json")
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    way = build(model, target)
    take_step(way, 50)  # the restore must overwrite this state
    restore(way.state, open_checkpoint(root / "checkpoint"), SAVED_AFTER)
    faults = differences(load_file(root / "truth.safetensors"), truth_of(way), way)
    expected = json.loads((root / "losses.json").read_text())
    actual = [take_step(way, step) for step in range(SAVED_AFTER, TRAINED_ON)]
    way.close()
    # bf16's results depend on the memory layout
    half = way.dtype != torch.float32 or "16" in str(root.name)
    closeness = (2e-3 if exact else 2e-2) if half else (1e-6 if exact else 1e-5)
    for step, (one, other) in enumerate(zip(actual, expected, strict=True), SAVED_AFTER + 1):
        if abs(one - other) > closeness * abs(other):
            faults.append(f"loss of step {step} is {one} and was {other}")
    return faults


def differences(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], way: Way) -> list[str]:
    faults = [f"{key} is only in one" for key in sorted(expected.keys() ^ actual.keys())]
    for key in sorted(expected.keys() & actual.keys()):
        was, now = expected[key], actual[key]
        if key.startswith(("frozen.", "buffer.")):  # in the engine's dtype
            was = was.to(now.dtype)
        if not torch.equal(was.float(), now.float()):
            faults.append(f"{key} differs by {(was.float() - now.float()).abs().max():.3g}")
    return faults


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} does not come")
        time.sleep(0.05)
    dist.barrier()


def place(folder: Path, model: str, way: str) -> Path:
    return folder / f"{model}-{way.replace(' ', '-')}"


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    mine = f"x{dist.get_world_size()}"
    readers = dict.fromkeys((model, reader) for model, reader, _ in plan if reader.endswith(mine))
    for model, reader in readers:
        place(folder, model, reader).mkdir(exist_ok=True)
        make(model, reader, place(folder, model, reader))
        gc.collect()
    results = []
    for model, reader, target in plan:
        if not target.endswith(mine):
            continue
        root = place(folder, model, reader)
        try:
            faults = faults_of(model, root, target, reader == target)
        except TimeoutError:
            raise
        except Exception:  # on all ranks
            faults = [traceback.format_exc()[-1500:]]
        results.append({"restore": [model, reader, target], "faults": faults})
        gc.collect()
    if dist.get_rank() == 0:
        (folder / f"results-{mine[1:]}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    os._exit(0)


if __name__ == "__main__":
    from tests.checkpoint.elastic_ways import start_group

    start_group()
    main()
