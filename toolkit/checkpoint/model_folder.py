"""A Hugging Face folder from a model under any strategy, and its weights back into one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import save_file

from toolkit.checkpoint import adapter
from toolkit.checkpoint.live import tied_names
from toolkit.files import replace_folder
from toolkit.pretrained import quiet_transformers

_STATE = "trainer_state.json"  # the name and the key that transformers' Trainer uses


def save_model(
    accelerator: Accelerator, model: torch.nn.Module, tokenizer: Any, folder: Path, step: int | None = None
) -> None:
    """Saves config, weights and tokenizer; all processes must call it, the main one writes.

    Each folder appears whole: a reader finds the old one or the new one, never a half. With LoRA the model is the
    merged one, which needs no peft, and the adapter alone stands beside it in adapter/. A model that is not from
    `transformers` is saved as model.safetensors, and by its own `save(folder, state_dict)` where it has one. `step`,
    the optimizer steps taken, is kept in the folder: see `step_of`.
    """
    state = accelerator.get_state_dict(model)  # a collective where the parameters are sharded
    if accelerator.is_main_process:
        unwrapped = accelerator.unwrap_model(model)
        lora = adapter.config_of(unwrapped)
        plain = unwrapped.get_base_model() if lora else unwrapped
        merged = adapter.merge(state, lora.lora_alpha / lora.r) if lora else state
        with replace_folder(folder, overwrite=True) as draft, quiet_transformers():
            _save_weights(plain, {name: tensor.contiguous() for name, tensor in merged.items()}, draft)
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(draft)
            if step is not None:
                (draft / _STATE).write_text(json.dumps({"global_step": step}), encoding="utf-8")
            _make_readable(draft)
        if lora:  # after the model, whose step tells a resumed run whether both are of one step
            with replace_folder(folder.with_name(adapter.FOLDER), overwrite=True) as draft:
                adapter.write(unwrapped, state, draft)
                _make_readable(draft)
    accelerator.wait_for_everyone()


def _save_weights(module: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
    if hasattr(module, "save_pretrained"):
        module.save_pretrained(folder, state_dict=state)
        return
    tied = tied_names(module)
    once = {name: tensor for name, tensor in state.items() if name not in tied}
    save_file(once, folder / "model.safetensors", metadata={"format": "pt"})
    if hasattr(module, "save"):
        module.save(folder, state)


def step_of(folder: Path) -> int | None:
    """The optimizer step whose weights a model folder holds, where it says so."""
    try:
        return int(json.loads((folder / _STATE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_weights(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Copies a saved folder's weights into a prepared model, for evaluation; all processes must call it.

    Only the main process reads the folder, one tensor at a time: other machines need not have it. With
    LoRA it reads the adapter beside that folder.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        load_into_shards(model, folder, accelerator.is_main_process)
        return
    module = accelerator.unwrap_model(model)
    parameters = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    with contextlib.ExitStack() as stack:
        read = _tensors(module, folder, stack) if accelerator.is_main_process else {}
        names = _agree(accelerator, [name for name in parameters if name in read])
        for name in names:
            with _gathered(accelerator, parameters[name]) as target, torch.no_grad():
                if accelerator.is_main_process:
                    target.copy_(read[name]())
                if accelerator.num_processes > 1 and not _is_sharded(accelerator):
                    torch.distributed.broadcast(target, src=0)
    accelerator.wait_for_everyone()


def load_into_shards(model: torch.nn.Module, folder: Path, reads: bool) -> None:
    """Copies a saved folder's weights into parameters that FSDP2 shards; one process reads them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = {}
    if reads:
        with contextlib.ExitStack() as stack:
            state = {name: tensor() for name, tensor in _tensors(model, folder, stack).items()}
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    )


def _tensors(model: torch.nn.Module, folder: Path, stack: contextlib.ExitStack) -> dict[str, Callable[[], Any]]:
    """A tensor's name in the model -> what reads it from the folder."""
    found: dict[str, Callable[[], Any]] = {}
    folder, names = adapter.reader(model, folder)
    for path in sorted(folder.glob("*.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        found |= {names.get(name, name): functools.partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
    return found


def _agree(accelerator: Accelerator, names: list[str]) -> list[str]:
    from accelerate.utils import broadcast_object_list

    return list(broadcast_object_list([names], from_process=0)[0])


def _is_sharded(accelerator: Accelerator) -> bool:
    plugin = accelerator.state.deepspeed_plugin
    return accelerator.distributed_type == DistributedType.DEEPSPEED and plugin.zero_stage == 3


@contextlib.contextmanager
def _gathered(accelerator: Accelerator, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The whole parameter; what the main process writes into it reaches the others on leaving."""
    if _is_sharded(accelerator) and hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            yield parameter.data
    else:
        yield parameter.data


def _make_readable(folder: Path) -> None:
    """As any other file: safetensors leaves its files to their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)
