"""What the accelerate config, or another launcher, asks for: DeepSpeed, FSDP2 or neither."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import UserError
from toolkit.launch import environment
from toolkit.launch.environment import Place
from toolkit.launch.options import DEEPSPEED_CONFIG, find_file, read_config
from toolkit.utils.extras import require_extra

if TYPE_CHECKING:
    from accelerate import Accelerator

DEFAULT_DEEPSPEED_CONFIG = "ds_configs/zero2.json"
_CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# the variable of a key -> why it is not supported, and what to do
_UNSUPPORTED = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config: each process takes texts of its own: "
    "use ZeRO-3 or FSDP2",
    "FSDP_IGNORED_MODULES": "fsdp_ignored_modules: their gradients would not be averaged: remove "
    "it",
    "FSDP_ACTIVATION_CHECKPOINTING": "fsdp_activation_checkpointing renames weights, and "
    "recomputes layers with other dropout: pass --gradient_checkpointing true in its place",
}


def is_set(name: str) -> bool:
    """Whether a variable has a true value."""
    from accelerate.utils import parse_flag_from_env

    return bool(parse_flag_from_env(name))


def set_deepspeed_variables(place: Place, device: str) -> bool:
    """Returns whether this launch uses DeepSpeed, and then sets the variables of `accelerate
    launch`, which the process's further accelerators read too. Raises UserError if DeepSpeed is
    missing, or if the config file asks for FSDP."""
    file = os.environ.get(DEEPSPEED_CONFIG) or os.environ.get(_CONFIG_FILE)
    by_accelerate = is_set("ACCELERATE_USE_DEEPSPEED")
    if not (by_accelerate or file or place.launcher == "deepspeed"):
        return False
    require_extra("this launch", "deepspeed")
    if is_set("ACCELERATE_USE_FSDP"):
        raise UserError(
            "this launch asks for DeepSpeed, and its config file for FSDP: use one"
        )
    if file or not by_accelerate:  # otherwise the stage stands in the accelerate config
        path = find_file(file or DEFAULT_DEEPSPEED_CONFIG, sys.argv[0], "ds_configs")
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ[_CONFIG_FILE] = str(path)
    # in its config; accelerate reads a number here
    if os.environ.get(_ACCUMULATION) == "auto":
        del os.environ[_ACCUMULATION]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        # as its launcher does; without it ZeRO-3 starts `numactl` at each reduction
        os.environ.setdefault("LOCAL_SIZE", str(place.local_world_size))
        # a kernel for its inference takes half a minute to compile, and a killed build leaves a
        # lock on which later runs hang
        importlib.import_module("deepspeed.ops").__compatible_ops__[
            "deepspeed_shm_comm"
        ] = False
    return True


def refuse_unsupported() -> None:
    """Raises UserError for keys of the accelerate config that this toolkit does not support."""
    for name, fault in _UNSUPPORTED.items():
        if os.environ.get(name, "false").lower() != "false":
            raise UserError(f"{fault} (in the accelerate config)")
    if is_set("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            "FSDP version 1 is not supported: set fsdp_version: 2 in the config file"
        )


def set_fsdp_variables() -> None:
    """Without FSDP nothing reads them."""
    # accelerate's default is one unit, gathered as a whole
    os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    # loading in one process only leaves a new head without data in the others
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def strategy_name(accelerator: Accelerator) -> str:
    """As in accelerate_configs/: single, ddp, zero1, zero2, zero3 or fsdp2."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin:
        return f"zero{plugin.zero_stage}"
    if accelerator.is_fsdp2:
        return "fsdp2"
    return "ddp" if accelerator.num_processes > 1 else "single"


def requested_processes(place: Place) -> tuple[int, object]:
    """(number of processes requested, by which file or launcher). `accelerate launch` silently
    starts one process for MULTI_CPU, whatever its file requests."""
    from accelerate.commands.config import config_args

    request = environment.launch_request()
    if request:
        return request["num_processes"], request["config_file"]
    options = environment.accelerate_options()
    if options is None or place.world_size > 1:
        return place.world_size, place.launcher
    if options.num_processes is not None:
        return options.num_processes, "accelerate launch --num_processes"
    # without a file it silently uses the user's default one
    file = Path(options.config_file or config_args.default_config_file)
    if not file.is_file():
        return 1, "accelerate launch"
    return int(read_config(file).get("num_processes", 1)), file
