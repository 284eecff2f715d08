"""Loads universal checkpoints into DeepSpeed's engines and writes down what they hold then.

    torchrun --nproc_per_node N -m tests.checkpoint.universal_worker MODEL OUT KIND=ROOT ...

A ROOT without `latest_universal` is loaded as DeepSpeed loads what it saved itself, for comparison.
For the number I of each pair it writes OUT/I.safetensors, named as the truth that deepspeed_worker.py writes and
`compute.NAME` for the weights that the model computes with and `next.weight.NAME` for those after one more step, and
OUT/I.json: the optimizer's `steps` on every rank, its `groups` of settings, what had to be `restored_by_hand`, whether
all states shared `one_step`, and so on; or the `error`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.checkpoint.deepspeed_worker import (
    KINDS,
    STEPS,
    Kind,
    buffers_of,
    config_of,
    groups_of,
    make_model,
    moments_of,
    take_step,
    weights_of,
)


def load(kind: Kind, root: Path, out: Path) -> None:
    import deepspeed

    model = make_model(kind)
    with torch.no_grad():  # so that what is not loaded shows
        for parameter in model.parameters():
            parameter.add_(100)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups_of(model, kind), lr=0.5)
    universal = (root / "latest_universal").is_file()
    config = {**config_of(kind), "checkpoint": {"load_universal": universal}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    where, client_state = engine.load_checkpoint(str(root))
    states = list(engine.optimizer.optimizer.state.values())
    facts: dict[str, Any] = {"path": where, "client_state": sorted(client_state), "global_steps": engine.global_steps}
    facts |= {"one_step": len(states) > 1 and all(state["step"] is states[0]["step"] for state in states)}
    before = held_by(engine, kind)
    if universal:
        restore_the_rest(engine, root)
    for buffer in engine.module.buffers():  # at stage 3 DeepSpeed gives each rank its own back
        dist.broadcast(buffer, 0)
    found = held_by(engine, kind)
    facts["restored_by_hand"] = sorted(name for name in found if not torch.equal(found[name], before[name]))
    found |= {**weights_of(engine, kind, whole), **moments_of(engine, kind)}
    facts |= {"steps": everywhere(steps_of(engine)), "groups": groups_in(engine)}
    take_step(engine, kind, STEPS)
    facts["next_steps"] = everywhere(steps_of(engine))
    found |= {f"next.{name}": tensor for name, tensor in weights_of(engine, kind, whole).items()}
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, f"{out}.safetensors")
        Path(f"{out}.json").write_text(json.dumps(facts), encoding="utf-8")
    engine.destroy()


def restore_the_rest(engine: Any, root: Path) -> None:
    """What docs/convert.md says a script has to do: frozen parameters, buffers, and a step for each sub-group."""
    import deepspeed

    folder = root / (root / "latest_universal").read_text() / "zero"
    parameters = dict(engine.module.named_parameters())
    frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
    kept = {name: buffer for name, buffer in engine.module.named_buffers() if name in engine.module.state_dict()}
    divided = any(hasattr(parameter, "ds_id") for parameter in frozen.values())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(frozen.values()), modifier_rank=0, enabled=divided):
        for name, tensor in [*frozen.items(), *kept.items()]:
            if tensor.numel():  # on other ranks than 0 nothing is gathered
                tensor.copy_(torch.load(folder / name / "fp32.pt")["param"])
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()


def held_by(engine: Any, kind: Kind) -> dict[str, torch.Tensor]:
    """Copies of the buffers, and of the weights that the model computes with."""
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=kind.stage == 3):
        found = {f"compute.{name}": parameter.detach().clone() for name, parameter in parameters.items()}
    return {**found, **{name: buffer.clone() for name, buffer in buffers_of(engine).items()}}


def steps_of(engine: Any) -> list[float]:
    return [float(state["step"]) for state in engine.optimizer.optimizer.state.values() if "step" in state]


def groups_in(engine: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if isinstance(value, int | float | str | bool | tuple)}
        for group in engine.optimizer.optimizer.param_groups
    ]


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    # fp16 is refused on CPU only because it is slow there
    type(deepspeed.get_accelerator()).supported_dtypes = lambda _: [torch.float32, torch.bfloat16, torch.float16]
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    for number, pair in enumerate(sys.argv[3:]):
        name, _, root = pair.partition("=")
        out = Path(sys.argv[2]) / str(number)
        try:
            load(KINDS[name], Path(root), out)
        except Exception as error:  # on all ranks alike, or the next collective hangs and the test ends it
            if dist.get_rank() == 0:
                text = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
                Path(f"{out}.json").write_text(json.dumps(text), encoding="utf-8")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
