"""Makes real DeepSpeed checkpoints on CPU, each with the state in memory to compare with.

    torchrun --nproc_per_node N tests/checkpoint/deepspeed_worker.py MODEL FOLDER NAME ...

writes, for each NAME of `KINDS`, FOLDER/NAME/{latest, tag, ...} as DeepSpeed does, and FOLDER/NAME.safetensors with
`weight.X`, `buffer.X`, `exp_avg.X` and `exp_avg_sq.X` from memory. MODEL is a folder with a BERT, for some kinds.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.elastic_ways import ADAM, Odd, engine_of, flat_masters_of, masters_of, start_group

STEPS = 2


@dataclass(frozen=True)
class Kind:
    stage: int
    options: str = ""
    """Of `elastic_ways.OPTIONS`."""
    groups: int = 1
    frozen: bool = False
    frozen_group: bool = False
    """All frozen parameters are in the second group."""
    exclude: bool = False
    """Saved without the frozen parameters, one of which is tied."""
    bert: bool = False
    """MODEL with 3 labels, in place of `elastic_ways.Odd`."""
    later: bool = False
    """Also saves NAME-later, one step after."""


KINDS: dict[str, Kind] = {
    "zero2-fp32": Kind(2),
    "zero2-fp16": Kind(2, "fp16"),
    **{f"zero{stage}-bf16": Kind(stage, "bf16", later=True) for stage in (1, 2, 3)},
    **{f"zero{stage}-bert": Kind(stage, "bf16", groups=2, bert=True) for stage in (1, 2, 3)},
    "zero3-groups": Kind(3, "bf16", groups=3),
    **{f"zero{stage}-frozen": Kind(stage, "bf16", groups=2, frozen=True) for stage in (1, 2, 3)},
    **{f"zero{stage}-excluded": Kind(stage, frozen=True, exclude=True) for stage in (1, 2, 3)},
    "zero3-frozen-group": Kind(3, groups=2, frozen=True, frozen_group=True),  # stages 1 and 2 do not start
    "zero0": Kind(0),
    "zero0-bf16": Kind(0, "bf16"),
    "zero1-bf16-optimizer": Kind(1, "bf16 accumulates", groups=2),
    "zero2-aligned": Kind(2, "bf16 aligned", groups=2),
    "zero2-round-robin": Kind(2, "robin", groups=2),
    "zero2-elastic": Kind(2, "bf16 elastic", groups=2),
    "zero3-subgroups": Kind(3, "bf16 subgroups", groups=2),
}


def groups_of(model: nn.Module, kind: Kind) -> list[dict[str, Any]]:
    parameters, count = [parameter for parameter in model.parameters() if parameter.requires_grad], kind.groups
    dealt = [parameters[number::count] for number in range(count)]
    if kind.frozen_group:
        dealt.insert(1, [parameter for parameter in model.parameters() if not parameter.requires_grad])
    return [{"params": group, "weight_decay": 0.01 * number} for number, group in enumerate(dealt)]


def make_model(kind: Kind) -> nn.Module:
    torch.manual_seed(11)
    if kind.bert:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=3)
    # DeepSpeed's stage 3 cannot gather an empty one
    model: Any = Odd("empty" if kind.stage < 3 else "")
    if kind.frozen:
        model.first.requires_grad_(False)
        model.embed.requires_grad_(not kind.exclude)
    return model


def take_step(engine: Any, kind: Kind, step: int) -> None:
    tokens = torch.arange(5)[None] * (dist.get_rank() + 2 + step) % 13
    engine.backward(engine(tokens, labels=tokens[0, :1] % 3).loss if kind.bert else engine(tokens))
    engine.step()


def make(kind: Kind, folder: Path) -> None:
    model = make_model(kind)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups_of(model, kind), lr=0.01)
    engine = engine_of(model, optimizer, kind.stage, kind.options.split())
    for step in range(STEPS):
        take_step(engine, kind, step)
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=kind.exclude)
    truth = {**weights_and_moments(engine, kind, whole), **buffers_of(engine)}
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in truth.items()}, f"{folder}.safetensors")
    if kind.later:
        take_step(engine, kind, STEPS)
        engine.save_checkpoint(f"{folder}-later")
    engine.destroy()


def buffers_of(engine: Any) -> dict[str, torch.Tensor]:
    persistent = engine.module.state_dict()
    return {f"buffer.{name}": buffer for name, buffer in engine.module.named_buffers() if name in persistent}


def weights_and_moments(engine: Any, kind: Kind, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    masters = flat_masters_of(engine) if "robin" in kind.options else masters_of(engine, ADAM)
    actual = {}
    for name, parameter in engine.module.named_parameters():
        if kind.stage and parameter.requires_grad and name != "nothing":
            value, moments = masters(parameter)
            actual |= {f"{key}.{name}": moment for key, moment in moments.items()}
        else:  # unchanged, or its own master
            value = whole[name].to(parameter.dtype) if kind.stage == 3 else parameter.data
        actual[f"weight.{name}"] = value
    return {key: value.detach().clone().view(whole[key.partition(".")[2]].shape) for key, value in actual.items()}


def main() -> None:
    start_group()
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[3:]:
        make(KINDS[name], folder / name)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
