"""What the accelerate config, or another launcher, asks for: DeepSpeed, FSDP2 or neither."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.launch import environment
from toolkit.launch.environment import Place
from toolkit.launch.options import DEEPSPEED_CONFIG, find_file, read_config
from toolkit.utils.extras import require_extra

DEFAULT_DEEPSPEED_CONFIG = "ds_configs/zero2.json"
_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def is_set(name: str) -> bool:
    """Whether a variable has a true value. It becomes `true`, which accelerate accepts always."""
    is_true = os.environ.get(name, "").lower() in ("true", "1", "yes", "y", "on", "t")
    if is_true:
        os.environ[name] = "true"
    return is_true


def use_deepspeed(place: Place, device: str) -> bool:
    """Whether this launch uses DeepSpeed. Under other launchers it sets the variables of
    `accelerate launch`, which the accelerators of further models read too."""
    file = os.environ.get(DEEPSPEED_CONFIG)
    by_accelerate = is_set("ACCELERATE_USE_DEEPSPEED")
    if not (by_accelerate or file or place.launcher == "deepspeed"):
        return False
    require_extra("this launch", "deepspeed")
    if is_set("ACCELERATE_USE_FSDP"):
        raise UserError(f"--deepspeed_config {file}: the accelerate config asks for FSDP: use one")
    if file or not by_accelerate:  # accelerate launch has set them
        path = find_file(file or DEFAULT_DEEPSPEED_CONFIG, sys.argv[0], "ds_configs")
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
    if os.environ.get(_ACCUMULATION) == "auto":  # in its config; accelerate reads a number here
        del os.environ[_ACCUMULATION]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        # as its launcher does; without it ZeRO-3 starts `numactl` at each reduction
        os.environ.setdefault("LOCAL_SIZE", str(place.local_world_size))
        # a kernel for its inference takes half a minute to compile, and a killed build leaves a
        # lock on which later runs hang
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return True


def check_config() -> None:
    """Raises UserError for keys of the accelerate config that this toolkit does not support."""
    if is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        why = "each process takes texts of its own: use ZeRO-3 or FSDP2"
        raise UserError(f"parallelism_config in the accelerate config: {why}")
    if is_set("ACCELERATE_USE_FSDP"):
        _check_fsdp()


def _check_fsdp() -> None:
    """Raises UserError for FSDP version 1, and for keys with which it would train otherwise or save
    no memory. Turns off loading of weights in one process only, which leaves a new head without
    data in the others."""
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("FSDP version 1 is not supported: set fsdp_version: 2 in the config file")
    if is_set("FSDP_ACTIVATION_CHECKPOINTING"):  # accelerate 1.15: preserve_rng_state=False
        raise UserError(
            "fsdp_activation_checkpointing in the config file renames weights, and recomputes "
            "layers with other dropout: set it to false, and pass --gradient_checkpointing true"
        )
    if os.environ.get("FSDP_IGNORED_MODULES"):
        why = "fsdp_ignored_modules in the config file: their gradients would not be averaged"
        raise UserError(f"{why}: remove it")
    # accelerate's default is one unit, gathered as a whole
    os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def launch_config() -> dict[str, Any] | None:
    """The config of the `accelerate launch` that started this process, or None."""
    ours = environment.launch_request()
    if ours:
        return read_config(Path(ours["config_file"]))
    words = environment.accelerate_launch_words()
    return parse_launch(words) if words else None


def parse_launch(words: Sequence[str]) -> dict[str, Any]:
    """The config of `accelerate launch` with these arguments: the file, the options that override
    it, and the `source` of num_processes."""
    from accelerate.commands.config import config_args
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(words)
    # without a file `accelerate launch` silently uses the user's default one
    file = Path(options.config_file or config_args.default_config_file)
    config = {**read_config(file), "source": str(file)} if file.is_file() else {}
    if options.num_processes is not None:
        config["num_processes"] = options.num_processes
        config["source"] = "accelerate launch --num_processes"
    if options.mixed_precision:
        config["mixed_precision"] = options.mixed_precision
    return config


def requested_processes(place: Place) -> tuple[int, str]:
    """(number of processes requested, by which file or launcher)."""
    ours = environment.launch_request()
    if ours:
        return int(ours["num_processes"]), str(ours["config_file"])
    # for MULTI_CPU `accelerate launch` silently starts one process, whatever the file requests
    config = launch_config() if place.world_size == 1 else None
    if config and "num_processes" in config:
        return int(config["num_processes"]), config["source"]
    return place.world_size, place.launcher
