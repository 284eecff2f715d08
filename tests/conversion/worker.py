"""Makes real checkpoints on CPU processes, each beside the state that was in memory.

    torchrun --nproc_per_node N -m tests.conversion.worker MODEL FOLDER NAME ...

writes FOLDER/NAME as DeepSpeed, accelerate or torch.distributed.checkpoint does, and FOLDER/NAME.safetensors: the
masters, frozen parameters and persistent buffers, read by those libraries' own functions. Of some kinds also
NAME-later, one step later. MODEL is a folder with a BERT.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.checkpoint.states import Odd, State, Way, shard_by_rows, start_group, whole_state

STEPS = 2
LATER = ("zero1-bf16", "zero2-bf16", "zero3-bf16")
"""Also saved one step later."""


def make_model(name: str, bert: str) -> Any:
    torch.manual_seed(11)
    if "bert" in name:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3)
    model = Odd()
    if "frozen" in name or "excluded" in name:
        model.first.requires_grad_(False)
        model.embed.requires_grad_("frozen" in name)
    return model


def with_deepspeed(name: str, bert: str, folder: Path) -> State:
    way = Way(make_model(name, bert), name)

    def take_step(step: int) -> None:
        tokens = torch.arange(5)[None] * (dist.get_rank() + 2 + step) % 13
        labels = {"labels": tokens[0, :1] % 3} if "bert" in name else {}
        output = way.engine(tokens, **labels)
        way.update(getattr(output, "loss", output))

    for step in range(STEPS):
        take_step(step)
    way.engine.save_checkpoint(str(folder), exclude_frozen_parameters="excluded" in name)
    truth = truth_of(way.engine)
    if name in LATER:
        take_step(STEPS)
        way.engine.save_checkpoint(f"{folder}-later")
    way.close()
    return truth


def truth_of(engine: Any) -> State:
    """In fp32 the weights are the masters."""
    from deepspeed.utils import safe_get_full_fp32_param

    truth = whole_state(engine.module)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            master = safe_get_full_fp32_param(parameter)
            truth[name] = master.detach().clone().view(truth[name].shape)
    return truth


def with_accelerate(folder: Path, safe: bool = True, uses_deepspeed: bool = False) -> State:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    plugin = DeepSpeedPlugin(hf_ds_config=config) if uses_deepspeed else None
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    torch.manual_seed(3)
    model: Any = Odd()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.arange(5)[None]))
    optimizer.step()
    accelerator.save_state(str(folder), safe_serialization=safe)
    return whole_state(accelerator.unwrap_model(model))


def fully_sharded(folder: Path, whole: bool) -> State:
    """As accelerate/utils/fsdp_utils.py writes SHARDED_STATE_DICT and FULL_STATE_DICT."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(5)
    model = Odd()
    shard_by_rows(model)
    state = whole_state(model)
    if not whole:
        checkpoint = folder / "pytorch_model_fsdp_0"
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(checkpoint))
    elif dist.get_rank() == 0:
        folder.mkdir()
        both = {**state, "head.weight": state["embed.weight"]}
        torch.save(both, folder / "pytorch_model_fsdp.bin")
    return state


def make(name: str, bert: str, folder: Path) -> State:
    if name.startswith("ddp"):
        return with_accelerate(folder, safe=name == "ddp-safetensors")
    if name.startswith("fsdp"):
        return fully_sharded(folder, whole=name == "fsdp-full")
    if name == "accelerate-zero2":
        return with_accelerate(folder, uses_deepspeed=True)
    return with_deepspeed(name, bert, folder)


def main() -> None:
    start_group()
    bert, folder, *names = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        truth = make(name, bert, Path(folder, name))
        if dist.get_rank() == 0:
            tensors = {key: tensor.contiguous() for key, tensor in truth.items()}
            save_file(tensors, Path(folder, f"{name}.safetensors"))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
