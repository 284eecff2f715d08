"""Converts a BERT to a BigBird with the same weights, for long texts.

BigBird (Zaheer et al. 2020, arXiv:2007.14062) has BERT's layers with sparse attention. So weights are copied, and the
position table is repeated up to the new length, as in Longformer (Beltagy et al. 2020, arXiv:2004.05150, section 5).
Up to (5 + 2 random) * block tokens BigBird runs full attention: within BERT's positions it computes what BERT does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import BertForPreTraining, BigBirdConfig, BigBirdForMaskedLM, BigBirdModel

from toolkit.config import ModelSettings, PretrainedSettings
from toolkit.demo import PREFIX
from toolkit.errors import UserError, listing
from toolkit.models.bigbird import plan
from toolkit.models.classifier import from_pretrained
from toolkit.pretrained import (
    explain_load_errors,
    full_attention_up_to,
    load_config,
    load_plain_tokenizer,
    model_digest,
    refuse_random,
)
from toolkit.utils.cache import cached_folder
from toolkit.utils.files import explain_write_errors, make_readable, replace_folder

Settings = TypeVar("Settings", bound=PretrainedSettings)

_MADE_BY = "toolkit to-bigbird"
_META = "meta.json"
_LAYOUT = 2  # increase this when a change in this file changes the files in the cache
# Texts to compare a saved and loaded tokenizer by: case, accents, Chinese, special tokens
_PROBES = ("今天的服務很好，房间小。", "The Café's 2nd ROOM wasn't bad!\n東京 [MASK] 42", "ﬁlm\u3000𠮷 😀 ２０２４年")

_POOLER, _MLM_HEAD = "bert.pooler.", "cls.predictions."
_COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "type_vocab_size",
    "initializer_range", "layer_norm_eps", "pad_token_id", "tie_word_embeddings",
)  # fmt: skip


class SparseSizes(NamedTuple):
    """The length and the attention pattern of a BigBird."""

    max_length: int = 4096  # tokens
    block_size: int = 64  # tokens
    num_random_blocks: int = 3  # per query block

    @property
    def sparse_above(self) -> int:
        """The longest text, in tokens, with full attention."""
        return full_attention_up_to(self.block_size, self.num_random_blocks)


def to_bigbird(source: str, output: Path, sizes: SparseSizes, overwrite: bool = False) -> list[str]:
    """Writes a BigBird with the weights of `source` (a folder, a hub name or a `demo:` name) to the folder `output`.

    `output` appears only when it is complete. With `overwrite` it may replace a folder that holds only files that this
    function wrote. Returns lines that describe the result. Raises UserError for a source that is not a BERT, lacks a
    tokenizer or does not fit its config, for an unsuitable length, and for an existing output.
    """
    with explain_write_errors(output):
        _check_output(output, overwrite)
    config = load_config(ModelSettings(model_name_or_path=source))
    _check_kind(source, config)
    _check_length(source, config.max_position_embeddings, sizes)
    with explain_write_errors(output), replace_folder(output, overwrite) as draft:
        parameters, heads = _write_bigbird(source, config, draft, sizes)
        meta = {"made_by": _MADE_BY, "source": source, "files": sorted(path.name for path in draft.iterdir())}
        (draft / _META).write_text(json.dumps(meta, ensure_ascii=False, indent=1), encoding="utf-8")
    return [
        f"wrote {output}: a BigBird of {parameters:,} parameters and {sizes.max_length} positions (the BERT had "
        f"{config.max_position_embeddings}), sparse above {sizes.sparse_above} tokens",
        heads,
        f"next: python recipes/bigbird.py --model_name_or_path {shlex.quote(str(output))} --train_file YOUR_FILE.csv",
    ]


def long_model(settings: Settings, max_length: int | None, accelerator: Accelerator | None = None) -> Settings:
    """Replaces a BERT in the settings by a BigBird of 4096 positions, or of `max_length` if that is more.

    Writes it to the cache, once per machine; all processes must call this. Returns settings with a BigBird or without a
    model unchanged. Raises UserError for other models.
    """
    if settings.model_name_or_path is None:
        return settings
    name, config = settings.model_name_or_path, load_config(settings)
    if config.model_type in ("big_bird", "encoder-decoder"):  # an encoder-decoder of recipes/title.py has one
        return settings
    _check_kind(name, config)
    default = SparseSizes()
    length = max(default.max_length, max_length or 0, config.max_position_embeddings)
    sizes = default._replace(max_length=-(-length // default.block_size) * default.block_size)
    with explain_load_errors(name):
        digits = hashlib.sha256(f"{_LAYOUT} {sizes} {model_digest(name)}".encode()).hexdigest()[:16]
    base = re.sub(r"[^\w.-]", "-", Path(name.removeprefix(PREFIX)).absolute().name)  # as model cards show it
    folder_name = f"{base}-bigbird-{sizes.max_length}-{digits}"
    with cached_folder("models", folder_name, accelerator, source=name) as (folder, draft):
        if draft:
            _write_bigbird(name, config, draft, sizes)
    return dataclasses.replace(settings, model_name_or_path=str(folder))


def _write_bigbird(name: str, bert_config: Any, folder: Path, sizes: SparseSizes) -> tuple[int, str]:
    """Fills an empty folder. Returns the number of parameters, and a description of the heads. Raises UserError for a
    source that cannot be loaded or converted."""
    tokenizer = load_plain_tokenizer(name)
    bert, new, unknown = _load(name, bert_config)
    pooler, mlm = (not any(key.startswith(prefix) for key in new) for prefix in (_POOLER, _MLM_HEAD))
    config, family = _config_of(bert, tokenizer, sizes), BigBirdForMaskedLM if mlm else BigBirdModel
    weights = {key: weight for key, weight in bert.state_dict().items() if key not in new}
    # without the head its decoder is the embeddings
    copied = ("bert.", _MLM_HEAD if mlm else f"{_MLM_HEAD}decoder.weight")
    dropped = sorted({*unknown, *(key for key in weights if not key.startswith(copied))})
    tensors = _bigbird_tensors(name, weights, family, config, pooler)
    config.architectures, config.dtype = [family.__name__], str(bert.dtype).removeprefix("torch.")
    # not `save_pretrained`, which writes only in the first process of a group
    config.to_json_file(folder / "config.json")
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        raise OSError(errno.EIO, str(error)) from error
    _save_tokenizer(name, tokenizer, folder, sizes.max_length)
    make_readable(folder)
    message = "MLM head kept" if mlm else "the BERT has no MLM head to keep"
    message += "" if pooler else "; the BERT has no pooler"
    message += f"; dropped: {listing(dropped, 4)}" if dropped else ""
    return sum(tensor.numel() for tensor in tensors.values()), message


def _load(name: str, config: Any) -> tuple[Any, set[str], list[str]]:
    """Loads a checkpoint as BertForPreTraining, which has the MLM head and the pooler.

    Returns the model, the names of its parameters that the checkpoint lacks (random ones), and names in the checkpoint
    that it does not use. Raises UserError for an incomplete encoder.
    """
    bert, loading = from_pretrained(BertForPreTraining, name, config, dtype="auto", ignore_mismatched_sizes=True)
    mismatched = {key for key, *_ in loading["mismatched_keys"]}
    new = {*loading["missing_keys"], *mismatched}
    encoder = (key for key in new if key.startswith("bert."))
    refuse_random(name, (key for key in encoder if key in mismatched or not key.startswith(_POOLER)))
    return bert, new, sorted(loading["unexpected_keys"])


def _config_of(bert: Any, tokenizer: Any, sizes: SparseSizes) -> BigBirdConfig:
    """A config with BERT's sizes and its tokenizer's ids; BigBird's default ids are those of another vocabulary."""
    options = {name: getattr(bert.config, name) for name in _COPIED}
    # from the weights: transformers unties an output layer that differs, whatever the config says
    options["tie_word_embeddings"] = bert.get_output_embeddings().weight is bert.get_input_embeddings().weight
    if options["pad_token_id"] is None:
        options["pad_token_id"] = tokenizer.pad_token_id
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    return BigBirdConfig(
        **options, max_position_embeddings=sizes.max_length, attention_type="block_sparse", block_size=sizes.block_size,
        num_random_blocks=sizes.num_random_blocks, rescale_embeddings=False, use_bias=True,
        bos_token_id=tokenizer.cls_token_id if first is None else first,
        eos_token_id=tokenizer.sep_token_id if last is None else last, sep_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
    )  # fmt: skip


def _bigbird_tensors(
    name: str, weights: dict[str, Tensor], family: Any, config: BigBirdConfig, pooler: bool
) -> dict[str, Any]:
    """Returns the BigBird's parameters by name (tied ones once), from BERT's tensors, with the position table repeated.
    Raises UserError for a parameter that BERT lacks."""
    with torch.device("meta"):
        model = family(config)
    prefix = "bert." if family is BigBirdModel else ""
    table = "bert.embeddings.position_embeddings.weight"
    rows = torch.arange(config.max_position_embeddings) % weights[table].shape[0]
    renamed = {key.replace("bert.pooler.dense.", _POOLER): weight for key, weight in weights.items()}
    renamed[table] = weights[table][rows]
    shapes = {
        key: parameter.shape
        for key, parameter in model.named_parameters()
        if pooler or not f"{prefix}{key}".startswith(_POOLER)  # leave out a random pooler
    }
    misfits = [key for key, shape in shapes.items() if getattr(renamed.get(prefix + key), "shape", None) != shape]
    if misfits:
        raise UserError(f"{name}: {listing(misfits, 3)} do not fit a BigBird: is it a BERT of transformers?")
    return {key: renamed[prefix + key].contiguous() for key in shapes}


def _save_tokenizer(name: str, tokenizer: Any, folder: Path, max_length: int) -> None:
    """Saves BERT's tokenizer, and raises UserError if AutoTokenizer, given a BigBird's config, loads another one."""
    tokenizer.model_max_length = max_length
    ids = tokenizer(list(_PROBES)).input_ids  # also resets a truncation stored in tokenizer.json
    tokenizer.save_pretrained(folder)
    reloaded = load_plain_tokenizer(str(folder))
    if type(reloaded) is not type(tokenizer) or reloaded(list(_PROBES)).input_ids != ids:
        why = f"becomes a {type(reloaded).__name__} when saved and loaded, and may tokenize differently"
        remedy = "set tokenizer_class in its tokenizer_config.json"
        raise UserError(f"{name}: its tokenizer, a {type(tokenizer).__name__}, {why}: {remedy}")


def _check_kind(name: str, config: Any) -> None:
    """Raises UserError for a model that a BigBird with the same weights would not reproduce."""
    if config.model_type != "bert":
        good = "bert-base-chinese, bert-base-uncased, hfl/chinese-roberta-wwm-ext (a BERT despite its name)"
        raise UserError(
            f"{name} has model_type {config.model_type}, and only bert can be converted: use {good}, or a BigBird"
        )
    positions = getattr(config, "position_embedding_type", None) or "absolute"  # old configs have it
    if positions != "absolute" or config.is_decoder or config.add_cross_attention:
        why = f"a decoder, or has position_embedding_type {positions}"
        raise UserError(f"{name} is {why}: use an encoder with absolute positions")


def _check_length(name: str, positions: int, sizes: SparseSizes) -> None:
    """Raises UserError for inconsistent lengths; `positions` are the BERT's."""
    length, block, random = sizes
    pattern = f"--block_size {block} and --num_random_blocks {random}"
    if block < 1 or random < 1:
        raise UserError(f"{pattern}: both must be at least 1; the defaults are 64 and 3")
    shortest = max(positions, sizes.sparse_above + 1)
    if length < shortest or length % block:
        raise UserError(
            f"--max_length {length}: use a multiple of --block_size {block}, not below the {positions} positions of "
            f"{name}, and above {sizes.sparse_above}, up to which BigBird runs full attention with {pattern}: "
            f"{-(-max(length, shortest) // block) * block}, say"
        )
    try:  # otherwise training would fail at the first batch of one of these lengths
        for width in plan.PAPER_LENGTHS:
            if sizes.sparse_above < width <= length and width % block == 0:
                plan.random_blocks(plan.Pattern(0, 1, block, random, length, width, training=True))
    except ValueError as error:
        why = "BigBird draws random blocks from the first 1024 tokens, which have fewer"
        raise UserError(f"{pattern}: {why}: reduce one of them") from error


def _check_output(output: Path, overwrite: bool) -> None:
    """Raises UserError for a folder that is not empty, unless, with `overwrite`, all of its files are this command's.
    Raises OSError for anything but a folder."""
    names = {path.name for path in output.iterdir()} if os.path.lexists(output) else set()
    if names and not overwrite:
        raise UserError(f"{output} exists and is not empty: name another folder, or replace it with --overwrite")
    ours: set[str] = set()
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # any file may have this name
        meta = json.loads((output / _META).read_text(encoding="utf-8"))
        ours = {_META, *meta["files"]} if meta["made_by"] == _MADE_BY else ours
    if foreign := names - ours:
        why = f"which {_MADE_BY} did not write: name another folder, or remove it yourself"
        raise UserError(f"{output} holds {listing(sorted(foreign), 3)}, {why}")
