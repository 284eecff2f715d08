"""Loads the config and tokenizer of a pretrained model by name, with one-line errors."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.utils import cached_file

from toolkit.config import PretrainedSettings
from toolkit.demo import PREFIX, model_path
from toolkit.errors import UserError, first_line, is_panic, listing
from toolkit.utils.cache import digest_of_files
from toolkit.utils.compat import require
from toolkit.utils.files import read_json_object, refuse_lfs_pointer
from toolkit.utils.log import log_on_rank_0

_CONFIG = "config.json"
_BOTH_ENDS = """albert bart bert big_bird camembert convbert data2vec-text deberta deberta-v2
distilbert electra ernie funnel gte layoutlm longformer megatron-bert mobilebert modernbert mpnet
nezha nomic_bert rembert roberta roberta-prelayernorm roformer squeezebert xlm-roberta
xlm-roberta-xl"""
"""Architectures whose published models were trained with a special token at both ends of a text."""
_SECONDS = 5.0  # to wait for the hub
_NETWORK = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy")
_SOURCE_FILES = (".json", ".txt", ".model", ".safetensors", ".bin", ".onnx", ".xml")


def load_config(settings: PretrainedSettings) -> Any:
    """Raises UserError for a config that cannot be read."""
    name = str(settings.model_name_or_path)
    with explain_load_errors(name) as path, quiet_transformers():
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    # code on the hub: only the user may choose it
    if "/" in str(config._attn_implementation):
        config._attn_implementation = None
    return config


def model_digest(name: str) -> str:
    """A digest of a model folder's files, or the commit of a cached hub model."""
    folder = Path(model_path(name))
    if folder.is_dir():
        files = [path for path in folder.iterdir() if path.suffix in _SOURCE_FILES]
        return digest_of_files(folder, files)
    # from snapshots/COMMIT/config.json
    return f"{name}@{Path(str(cached_file(name, 'config.json'))).parent.name}"


def encoder_config(config: Any) -> Any:
    """The encoder's part of an encoder-decoder's config; other configs as they are."""
    return getattr(config, "encoder", config)


def full_attention_up_to(block_size: int, num_random_blocks: int) -> int:
    """Tokens up to which a BigBird uses full attention: 2 global, 3 sliding and 2 x random
    blocks."""
    return (5 + 2 * num_random_blocks) * block_size


def load_plain_tokenizer(name: str, **options: Any) -> Any:
    """Loads the tokenizer of a folder, a hub name or a `demo:` name. Raises UserError, also as
    `refuse_unusable`."""
    with explain_load_errors(name) as path, quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
        tokenizer("a")  # which may be the first to fail
    refuse_unusable(tokenizer, name)
    return tokenizer


def refuse_unusable(tokenizer: Any, name: str) -> None:
    """Raises UserError for a tokenizer without a vocabulary or a padding token."""
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        remedy = "put tokenizer.json (or vocab.txt) beside it"
        if (Path(name) / "vocab.txt").is_file():
            remedy = (
                'if its vocab.txt is a BERT\'s, put {"tokenizer_class": "BertTokenizer", '
                '"do_lower_case": true} (or false) into its tokenizer_config.json'
            )
        raise UserError(f"model {name} has no tokenizer: {remedy}")
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"{name}: its tokenizer has no padding token: set one in its tokenizer_config.json"
        )


def refuse_foreign_tokenizer(tokenizer: Any, config: Any) -> None:
    """Raises UserError when a token has no row in the model's embeddings."""
    rows = getattr(encoder_config(config), "vocab_size", None)
    added = [*tokenizer("a")["input_ids"], *tokenizer("a", "a")["input_ids"]]
    highest = max(*tokenizer.get_vocab().values(), *added)
    if rows and highest >= rows:
        raise UserError(
            f"the tokenizer has a token with id {highest} and the model {rows} rows: they are of "
            "different models; put the model's tokenizer files into its folder"
        )


def refuse_missing_ends(tokenizer: Any, config: Any) -> None:
    """Raises UserError where texts lack the special tokens at their ends with which all published
    models of this architecture were trained."""
    kind = getattr(encoder_config(config), "model_type", "")
    if kind not in _BOTH_ENDS.split():
        return
    ids = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    if ids[:1] == plain[:1] or ids[-1:] == plain[-1:]:
        raise UserError(
            f"the tokenizer makes {tokenizer.convert_ids_to_tokens(ids)} of 'a', and {kind} models are "
            "trained with special tokens around it: take tokenizer.json and tokenizer_config.json "
            "from where the model was published, or give the tokenizer a post_processor "
            "(tokenizers.processors.TemplateProcessing)"
        )


def refuse_random(name: str, missing: Iterable[str]) -> None:
    """Raises UserError for `missing` parameters, which would be initialised at random silently."""
    names = sorted(missing)
    if names:
        raise UserError(
            f"model {name}: its weights do not match its config.json "
            f"({listing(names, 3)} would be random, or lost): use the config.json that belongs to "
            "the weights (`toolkit convert` compares all, and corrects prefixes of names)"
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
    """Disables ZeRO-3's sharding while a model is loaded: a head initialised shard by shard would
    depend on the number of processes."""
    reference = require(
        transformers_deepspeed, "_hf_deepspeed_config_weak_ref", "transformers"
    )
    transformers_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        transformers_deepspeed._hf_deepspeed_config_weak_ref = reference


def _refuse_wrong_folder(folder: Path) -> None:
    """Raises UserError for a run's folder instead of the model in it, and the pointers of Git
    LFS."""
    if (folder / "model" / "config.json").is_file():
        raise UserError(f"{folder} is a run's folder: pass its model, {folder / 'model'}")
    for file in folder.glob("*"):
        if file.is_file():
            refuse_lfs_pointer(file)


@contextlib.contextmanager
def explain_load_errors(name: str, attention: str | None = None) -> Iterator[str]:
    """Yields the model's name for `from_pretrained`: `demo:` names become paths. Turns a library's
    error while loading it into a one-line UserError."""
    if Path(name).is_dir():
        _refuse_wrong_folder(Path(name))
    elif not name.startswith(PREFIX):
        use_cache_if_unreachable(name)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs many retries
    config = Path(name) / _CONFIG
    try:
        if config.is_file():
            read_json_object(config)
        yield model_path(name)
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(_load_error(name, attention, error)) from error


def _load_error(name: str, attention: str | None, error: BaseException) -> str:
    reason = first_line(error)
    if "trust_remote_code" in str(error):
        return (
            f"model {name} needs its own Python code, which is not executed: use a model whose "
            "architecture transformers includes"
        )
    if "ignore_mismatched_sizes" in str(error):
        return (
            f"model {name}: its weights have other sizes than its config.json says (for each name in "
            "id2label an output): use the config.json that belongs to the weights"
        )
    if "weights_only" in str(error):  # torch advises to execute what is in the file
        return (
            f"model {name}: its weights are damaged, or need code, which is not executed: copy them "
            "again, or take a model with safetensors"
        )
    if attention and re.search("attn|attention|kernel", str(error), re.IGNORECASE):
        return f"--attn_implementation {attention} cannot be used: {reason}"
    if "backend tokenizer" in str(error):  # of a class that transformers lacks
        return (
            f"model {name}: transformers has no class for its tokenizer: train with --tokenizer "
            "jieba if its vocab.txt has Chinese words, or name another tokenizer_class in its "
            f"tokenizer_config.json (BertTokenizer, say) [{reason}]"
        )
    weights = Path(name) / "model.safetensors"
    if weights.is_file() and re.search(r"config\.json|recognize", str(error)):
        return (
            f"model {name} is of no class of transformers, or lacks config.json. If a recipe of "
            "yours defines its class, predict in Python: build the model as the recipe does, then "
            f"`model.load_state_dict(safetensors.torch.load_file({str(weights)!r}))` [{reason}]"
        )
    return (
        f"model {name} cannot be loaded: give a folder with config.json, weights and tokenizer "
        "(`toolkit convert` makes one of a checkpoint or an adapter), or a hub name (needs a "
        f"network) [{reason}]"
    )


@cache
def use_cache_if_unreachable(
    name: str, kind: str = "model", copy: Path | None = None
) -> None:
    """Asks the hub for a name once, because libraries retry each file for a minute. If the hub
    cannot be reached, the copy in the cache (`copy` for a data set) is used. Raises UserError if
    there is none. `kind`: model or dataset."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return  # the libraries report it at once
    try:
        get_hf_file_metadata(hf_hub_url(name, _CONFIG, repo_type=kind), timeout=_SECONDS)
    except HfHubHTTPError:
        pass  # it answered: the libraries report the error
    except Exception as error:
        variables = listing(each for each in _NETWORK if each in os.environ)
        reason = f"{first_line(error)}; variables that are set: {variables or 'none'}"
        unreachable = f"{constants.ENDPOINT} cannot be reached [{reason}]"
        cached = copy or Path(str(try_to_load_from_cache(name, _CONFIG)))
        if not cached.exists():
            raise UserError(
                f"{kind} {name} is no folder here, and {unreachable}. In China use a mirror (export "
                "HF_ENDPOINT=https://hf-mirror.com), or ModelScope: pip install modelscope; "
                f"modelscope download --{kind} {name} --local_dir FOLDER; then name ./FOLDER"
            ) from error
        if not constants.HF_HUB_OFFLINE:
            log_on_rank_0(f"{name}: {unreachable}: using the copy in the cache")
            constants.HF_HUB_OFFLINE = kind == "model"
