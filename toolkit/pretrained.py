"""Loads the config and tokenizer of a pretrained model by name, with one-line errors."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import transformers
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.utils import cached_file

from toolkit.config import PretrainedSettings
from toolkit.demo import PREFIX, model_path
from toolkit.errors import UserError, did_you_mean, first_line, listing, size_text
from toolkit.utils.cache import digest_of_files
from toolkit.utils.compat import require
from toolkit.utils.files import check_model_config, refuse_files_outside
from toolkit.utils.log import logger

_FEW_PARAMETERS = 10**8
_MAX_WIDTH = 4096  # of a trial layer: config.json may hold any number
# file names in checkpoints of this toolkit, DeepSpeed, Accelerate, torch, Lightning and peft, and in a Trainer's folder
_CHECKPOINT_FILES = re.compile(
    r"manifest\.json|adapter_config\.json|latest|.*_(model|optim)_states\.pt|random_states_\d+\.pkl|pytorch_model_fsdp.*"
    r"|\.metadata|checkpoint-\d+|.*\.(distcp|ckpt|pth?)",
    re.DOTALL,
)
_SECONDS = 5.0  # to wait for each address of the hub
_SOURCE_FILES = (".json", ".txt", ".model", ".safetensors", ".bin", ".onnx", ".xml")  # and exported graphs


def load_config(settings: PretrainedSettings) -> Any:
    """Raises UserError for a config that cannot be read, or describes a far larger model than its weights."""
    name = str(settings.model_name_or_path)
    with explain_load_errors(name) as path:
        content = PreTrainedConfig.get_config_dict(path)[0]
        check_model_config(content, f"--model_name_or_path {name}: its config.json")
        _refuse_oversized(name, Path(path), content)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if any("/" in str(part._attn_implementation) for part in _parts(config)):
            config._attn_implementation = None  # a kernel on the hub is code: only the command line may choose it
        for part in _parts(config):
            # dicts, not tuples; chunking changes no result, and fails on lengths that it does not divide
            part.return_dict, part.chunk_size_feed_forward = True, 0
        return config


def _parts(config: Any) -> list[Any]:
    """The config and its sub-configs (of an encoder-decoder)."""
    return [config, *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None)]


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that the config has, as an int, or 0."""
    value = next((config[name] for name in names if config.get(name)), 0)
    return int(value) if isinstance(value, int | float) and abs(value) < 1e30 else 0


def _refuse_oversized(name: str, folder: Path, config: dict[str, Any]) -> None:
    """transformers allocates what config.json asks for (layers of the config, random weights) before it reads the
    weights."""
    size = sum(path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))
    parameters = _parameters(config) if size else 0
    # 8: for quantized weights and shared layers
    if parameters > max(_FEW_PARAMETERS, 8 * size):
        raise UserError(
            f"--model_name_or_path {name}: its config.json describes about {parameters:.0e} parameters "
            f"(num_hidden_layers, hidden_size, vocab_size), but its weights have {size_text(size)}: use the "
            "config.json that belongs to the weights"
        )


def _parameters(config: dict[str, Any]) -> int:
    """The approximate number of parameters, encoder and decoder together."""
    parts = sum(_parameters(part) for part in config.values() if isinstance(part, dict))
    size = partial(_size, config)
    hidden, layers = size("hidden_size", "dim", "d_model"), size("num_hidden_layers", "n_layers", "num_layers")
    rows = size("vocab_size") + size("max_position_embeddings") + size("type_vocab_size")
    wide = 2 * size("intermediate_size", "hidden_dim", "d_ff")
    return (
        parts + rows * size("embedding_size", "hidden_size", "dim", "d_model") + layers * hidden * (4 * hidden + wide)
    )


def model_digest(name: str) -> str:
    """A digest of a model folder's files, or the commit of a cached hub model."""
    folder = Path(model_path(name))
    if folder.is_dir():
        return digest_of_files(folder, (path for path in folder.iterdir() if path.suffix in _SOURCE_FILES))
    # from snapshots/COMMIT/config.json
    return f"{name}@{Path(str(cached_file(name, 'config.json'))).parent.name}"


def encoder_config(config: Any) -> Any:
    """The encoder's part of an encoder-decoder's config; other configs as they are."""
    return getattr(config, "encoder", config)


def attention_dropout(config: Any) -> float:
    """The probability, under any name."""
    names = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
    return max(getattr(config, name, None) or 0.0 for name in names)


def full_attention_up_to(block_size: int, num_random_blocks: int) -> int:
    """Tokens up to which a BigBird uses full attention: 2 global, 3 sliding and 2 x random blocks."""
    return (5 + 2 * num_random_blocks) * block_size


def load_plain_tokenizer(name: str) -> Any:
    """Loads the tokenizer of a folder, a hub name or a `demo:` name. Raises UserError, also as `refuse_unusable`."""
    with explain_load_errors(name) as path:
        if cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False):
            # AutoTokenizer builds the config, with a name for each label
            content = PreTrainedConfig.get_config_dict(path)[0]
            check_model_config(content, f"--model_name_or_path {name}: its config.json")
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    refuse_unusable(tokenizer, name)
    return tokenizer


def refuse_unusable(tokenizer: Any, name: str) -> None:
    """Raises UserError for a tokenizer without a vocabulary or a padding token."""
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"--model_name_or_path {name} has no tokenizer: put tokenizer.json (or vocab.txt) beside it")
    if tokenizer.pad_token_id is None:
        raise UserError(f"{name}: its tokenizer has no padding token: set one in its tokenizer_config.json")


def refuse_random(name: str, missing: Iterable[str]) -> None:
    """Raises UserError for `missing` parameters, which would be initialised at random silently."""
    if missing := sorted(missing):
        raise UserError(
            f"--model_name_or_path {name}: its weights do not match its config.json ({listing(missing, 3)} would be "
            "random, or lost): use the config.json that belongs to the weights"
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences progress bars, and the warnings about a newly initialised head."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def whole_weights() -> Iterator[None]:
    """Disables ZeRO-3's sharding while a model is loaded: a head initialised shard by shard would depend on the number
    of processes. And FSDP's loading in one process only: up to transformers 5.22 the others' weights are zeros."""
    reference = require(transformers_deepspeed, "_hf_deepspeed_config_weak_ref", "transformers")
    transformers_deepspeed.unset_hf_deepspeed_config()
    in_one = os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    try:
        yield
    finally:
        transformers_deepspeed._hf_deepspeed_config_weak_ref = reference
        if in_one is not None:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = in_one


def _refuse_wrong_folder(name: str) -> None:
    """Raises UserError for a missing folder (before the hub is asked for it), a run's folder instead of the model in
    it, a training checkpoint, an adapter, and a folder with links that lead outside."""
    path = Path(name)
    in_a_run = (path.parent / "config.json").is_file() or (path.parent / "model").is_dir()
    local = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or (len(path.parts) > 1 and in_a_run)
    if local and not path.exists():
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings)
        raise UserError(f"--model_name_or_path {name} cannot be loaded: there is no such folder{hint} [config.json]")
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else [name] * path.is_file()
    if not _is_model(path) and any(map(_CHECKPOINT_FILES.fullmatch, names)):
        raise UserError(
            f"--model_name_or_path {name} is a training checkpoint or a LoRA adapter: convert it to a model folder by "
            f"`toolkit convert {name} OUT` (docs/convert.md)"
        )
    if (path / "model" / "config.json").is_file() and (path / "metrics.jsonl").is_file():
        raise UserError(f"{name} is a run's folder: pass its model, {path / 'model'}")
    if path.is_dir():
        refuse_files_outside(path)


def _is_model(path: Path) -> bool:
    kinds = ("model*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
    return (path / "config.json").is_file() and any(any(path.glob(kind)) for kind in kinds)


@contextlib.contextmanager
def explain_load_errors(name: str, attention: str | None = None) -> Iterator[str]:
    """Yields the model's name for `from_pretrained`: `demo:` names become paths. Turns a library's error while loading
    it into a one-line UserError."""
    if not name.startswith(PREFIX):
        _refuse_wrong_folder(name)
        if not Path(name).exists():
            check_reachable(name)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without a network it logs many retries
    try:
        yield model_path(name)
    except UserError:
        raise
    except Exception as error:
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            raise UserError(
                f"--model_name_or_path {name} needs its own Python code, which is not executed: use a model whose "
                f"architecture transformers {transformers.__version__} includes (docs/models.md)"
            ) from error
        if attention and any(word in str(error).lower() for word in ("attn", "attention", "kernel")):
            raise UserError(f"--attn_implementation {attention} cannot be used: {reason}") from error
        hint = "give a folder with config.json and weights, or a hub name (needs a network)"
        raise UserError(f"--model_name_or_path {name} cannot be loaded: {hint} [{reason}]") from error


@cache
def check_reachable(name: str, kind: Literal["model", "dataset"] = "model", copy: Path | None = None) -> None:
    """Asks the hub for a name once, because libraries retry each file for a minute. If the hub cannot be reached, the
    copy in the cache (`copy` for a data set) is used; raises UserError if there is none."""
    file = "config.json" if kind == "model" else "README.md"
    if constants.HF_HUB_OFFLINE or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return  # the libraries report a wrong name at once
    cached = isinstance(try_to_load_from_cache(name, file, repo_type=kind), str) or (copy is not None and copy.exists())
    if not cached:
        _log(f"{name}: fetching it from {constants.ENDPOINT} (set HF_ENDPOINT for another hub)")
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=_SECONDS)
    except HfHubHTTPError:
        pass  # it answered: the libraries report the error
    except Exception as error:
        if not cached:
            setting = "model_name_or_path" if kind == "model" else "dataset_name"
            repository, folder = name if "/" in name else f"OWNER/{name}", name.rpartition("/")[2]
            raise UserError(
                f"--{setting} {name}: {constants.ENDPOINT} cannot be reached [{first_line(error)}]. In China use a "
                "mirror (export HF_ENDPOINT=https://hf-mirror.com), or ModelScope: pip install modelscope; modelscope "
                f"download --{kind} {repository} --local_dir {folder}; then name ./{folder}"
            ) from error
        _log(f"{name}: {constants.ENDPOINT} cannot be reached: using the copy in the cache")
        constants.HF_HUB_OFFLINE = kind == "model"


def _log(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.info(line)
