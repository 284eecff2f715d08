"""Makes real DeepSpeed checkpoints on CPU, each with the state in memory to compare with.

    torchrun --nproc_per_node N tests/checkpoint/deepspeed_worker.py MODEL FOLDER NAME ...

writes, for each NAME of `KINDS`, FOLDER/NAME/{latest, tag, ...} as DeepSpeed does, and FOLDER/NAME.safetensors: what
`truth_of` reads from memory (of stage 0 the weights and buffers). MODEL is a folder with a BERT, for some kinds.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.elastic_ways import ADAM, Odd, engine_of, start_group, truth_of, with_deepspeed
from toolkit.checkpoint.state import persistent_buffers

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
    model, options = make_model(kind), kind.options.split()
    engine = engine_of(model, torch.optim.AdamW(groups_of(model, kind), lr=0.01), kind.stage, options)
    for step in range(STEPS):
        take_step(engine, kind, step)
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=kind.exclude)
    if kind.stage:
        truth = truth_of(with_deepspeed(engine, options, ADAM))
    else:
        tensors = {"weight": model.named_parameters(), "buffer": persistent_buffers(engine.module)}
        truth = {f"{key}.{name}": tensor for key, pairs in tensors.items() for name, tensor in pairs}
    if dist.get_rank() == 0:
        save_file({name: tensor.detach().contiguous() for name, tensor in truth.items()}, f"{folder}.safetensors")
    if kind.later:
        take_step(engine, kind, STEPS)
        engine.save_checkpoint(f"{folder}-later")
    engine.destroy()


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
