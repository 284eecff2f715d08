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
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BertForPreTraining,
    BigBirdConfig,
    BigBirdForMaskedLM,
    BigBirdForPreTraining,
    BigBirdModel,
)

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
from toolkit.utils.cache import cached_folder, digest_of_file
from toolkit.utils.files import explain_write_errors, make_readable, replace_folder

Settings = TypeVar("Settings", bound=PretrainedSettings)

_MADE_BY = "toolkit to-bigbird"
_META = "meta.json"
_LAYOUT = 1  # increase this when a change in this file changes the files in the cache
# Texts to compare a saved and loaded tokenizer by: case, accents, Chinese, special tokens
_PROBES = (
    "今天的服務很好，房间小。",
    "The Café's 2nd ROOM wasn't bad!\n東京 [MASK] 42",
    "ﬁlm\u3000𠮷 😀 ２０２４年",
)

_ENCODER = re.compile(r"(bert\.)?(embeddings|encoder|pooler)\.")
_POOLER, _DECODER = "bert.pooler.", "cls.predictions.decoder.weight"
_HEADS = {"MLM": "cls.predictions.", "NSP": "cls.seq_relationship."}
_FAMILIES = {(): BigBirdModel, ("MLM",): BigBirdForMaskedLM, ("MLM", "NSP"): BigBirdForPreTraining}
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

    `output` appears only when it is complete. With `overwrite` it may replace a folder that this function wrote and
    that has not changed since. Returns lines that describe the result. Raises UserError for a source that is not a
    BERT, lacks a tokenizer or does not fit its config, for an unsuitable length, and for an existing output.
    """
    with explain_write_errors(output):
        _check_output(output, overwrite)
    config = load_config(ModelSettings(model_name_or_path=source))
    _check_kind(source, config)
    _check_length(source, config.max_position_embeddings, sizes)
    unchanged = partial(_refuse_foreign, output=output)  # it may have changed in the meantime
    with (
        explain_write_errors(output),
        replace_folder(output, overwrite, check_old=unchanged) as draft,
    ):
        parameters, heads = _write_bigbird(source, config, draft, sizes)
        files = {path.name: digest_of_file(path) for path in sorted(draft.iterdir())}
        meta = {"made_by": _MADE_BY, "source": source, "files": files}
        (draft / _META).write_text(json.dumps(meta, ensure_ascii=False, indent=1), encoding="utf-8")
    return [
        f"wrote {output}: a BigBird of {parameters:,} parameters and {sizes.max_length} positions (the BERT had "
        f"{config.max_position_embeddings}), sparse above {sizes.sparse_above} tokens",
        heads,
        f"next: python recipes/bigbird.py --model_name_or_path {shlex.quote(str(output))} --train_file YOUR_FILE.csv",
    ]


def long_model(
    settings: Settings, max_length: int | None, accelerator: Accelerator | None = None
) -> Settings:
    """Replaces a BERT in the settings by a BigBird of 4096 positions, or of `max_length` if that is more.

    Writes it to the cache, once per machine; all processes must call this. Returns settings with a BigBird or without a
    model unchanged. Raises UserError for other models.
    """
    if settings.model_name_or_path is None:
        return settings
    name, config = settings.model_name_or_path, load_config(settings)
    if config.model_type in (
        "big_bird",
        "encoder-decoder",
    ):  # an encoder-decoder of recipes/title.py has one
        return settings
    _check_kind(name, config)
    default = SparseSizes()
    length = max(default.max_length, max_length or 0, config.max_position_embeddings)
    sizes = default._replace(max_length=-(-length // default.block_size) * default.block_size)
    with explain_load_errors(name):
        digits = hashlib.sha256(f"{_LAYOUT} {sizes} {model_digest(name)}".encode()).hexdigest()[:16]
    base = re.sub(
        r"[^\w.-]", "-", Path(name.removeprefix(PREFIX)).absolute().name
    )  # as model cards show it
    folder_name = f"{base}-bigbird-{sizes.max_length}-{digits}"
    with cached_folder("models", folder_name, accelerator, source=name) as (folder, draft):
        if draft:
            _write_bigbird(name, config, draft, sizes)
    return dataclasses.replace(settings, model_name_or_path=str(folder))


def _write_bigbird(
    name: str, bert_config: Any, folder: Path, sizes: SparseSizes
) -> tuple[int, str]:
    """Fills an empty folder. Returns the number of parameters, and a description of the heads. Raises UserError for a
    source that cannot be loaded or converted."""
    tokenizer = load_plain_tokenizer(name)
    bert, new, unknown = _load(name, bert_config)
    pooler, mlm, nsp = (not _with_prefix(new, prefix) for prefix in (_POOLER, *_HEADS.values()))
    heads = (("MLM", "NSP") if nsp and pooler else ("MLM",)) if mlm else ()
    config = _config_of(bert, tokenizer, sizes)
    family = _FAMILIES[heads]
    weights = {key: weight for key, weight in bert.state_dict().items() if key not in new}
    prefixes = ("bert.", *(_HEADS[head] for head in heads))
    dropped = sorted(
        {*unknown, *(key for key in weights if not key.startswith(prefixes) and key != _DECODER)}
    )
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
    head_names = f"{' and '.join(heads)} head{'s' * (len(heads) > 1)} kept"
    message = head_names if heads else "the BERT has no MLM head to keep"
    message += "" if pooler else "; the BERT has no pooler"
    message += f"; dropped: {listing(dropped, 4)}" if dropped else ""
    return sum(tensor.numel() for tensor in tensors.values()), message


def _with_prefix(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _load(name: str, config: Any) -> tuple[Any, set[str], list[str]]:
    """Loads a checkpoint as BertForPreTraining, which has all heads of pretraining.

    Returns the model, the names of its parameters that the checkpoint lacks (random ones), and names in the checkpoint
    that it does not use. Raises UserError for an incomplete encoder.
    """
    bert, loading = from_pretrained(
        BertForPreTraining, name, config, dtype="auto", ignore_mismatched_sizes=True
    )
    mismatched, unknown = (
        [key for key, *_ in loading["mismatched_keys"]],
        sorted(loading["unexpected_keys"]),
    )
    new = {*loading["missing_keys"], *mismatched}
    pooler = _with_prefix(new, _POOLER)
    lost = set(_with_prefix(new, "bert.")) - set(pooler) | set(_with_prefix(mismatched, "bert."))
    lost |= set(pooler) if len(pooler) == 1 else set()  # weight without bias, or the reverse
    lost |= {key for key in unknown if _ENCODER.match(key)}
    refuse_random(name, lost)
    return bert, new, unknown


def _config_of(bert: Any, tokenizer: Any, sizes: SparseSizes) -> BigBirdConfig:
    """A config with BERT's sizes and its tokenizer's ids; BigBird's default ids are those of another vocabulary."""
    options = {name: getattr(bert.config, name) for name in _COPIED}
    # from the weights: transformers unties an output layer that differs, whatever the config says
    options["tie_word_embeddings"] = (
        bert.get_output_embeddings().weight is bert.get_input_embeddings().weight
    )
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
    renamed = {
        key.replace("bert.pooler.dense.", _POOLER): weight for key, weight in weights.items()
    }
    renamed[table] = weights[table][rows]
    shapes = {
        key: parameter.shape
        for key, parameter in model.named_parameters()
        if pooler or not f"{prefix}{key}".startswith(_POOLER)  # leave out a random pooler
    }
    misfits = [
        key
        for key, shape in shapes.items()
        if getattr(renamed.get(prefix + key), "shape", None) != shape
    ]
    if misfits:
        raise UserError(
            f"{name}: {listing(misfits, 3)} do not fit a BigBird: is it a BERT of transformers?"
        )
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
    kind = config.model_type
    if kind == "big_bird":
        raise UserError(
            f"{name} already is a BigBird, with {config.max_position_embeddings} positions: use it"
        )
    if kind != "bert":
        good = "bert-base-chinese, bert-base-uncased, hfl/chinese-roberta-wwm-ext (a BERT despite its name)"
        raise UserError(
            f"{name} has model_type {kind}, and only bert can be converted: use {good}, or a BigBird"
        )
    positions = (
        getattr(config, "position_embedding_type", None) or "absolute"
    )  # old configs have it
    if positions != "absolute":
        raise UserError(
            f"{name} has position_embedding_type {positions}: use a BERT with absolute positions"
        )
    if config.is_decoder or config.add_cross_attention:
        raise UserError(
            f"{name} is a decoder (is_decoder or add_cross_attention in its config.json): use an encoder"
        )


def _check_length(name: str, positions: int, sizes: SparseSizes) -> None:
    """Raises UserError for inconsistent lengths; `positions` are the BERT's."""
    length, block, random = sizes
    pattern = f"--block_size {block} and --num_random_blocks {random}"
    if block < 1 or random < 1:
        raise UserError(f"{pattern}: both must be at least 1; the defaults are 64 and 3")
    fault = ""
    if length < positions:
        fault = f"less than the {positions} positions of {name}: raise it, and truncate texts when you tokenize them"
    elif length % block:
        fault = f"not a multiple of --block_size {block}: use {-(-length // block) * block}"
    elif length <= sizes.sparse_above:
        fault = (
            f"too short for the sparse pattern: with {pattern} texts of up to {sizes.sparse_above} tokens get full "
            f"attention; use {sizes.sparse_above + block} or more, or smaller blocks"
        )
    if fault:
        raise UserError(f"--max_length {length} is {fault}")
    try:  # otherwise training would fail at the first batch of one of these lengths
        for width in plan.PAPER_LENGTHS:
            if sizes.sparse_above < width <= length and width % block == 0:
                plan.random_blocks(plan.Pattern(0, 1, block, random, length, width, training=True))
    except ValueError as error:
        why = "BigBird draws random blocks from the first 1024 tokens, which have fewer"
        raise UserError(f"{pattern}: {why}: reduce one of them") from error


def _check_output(output: Path, overwrite: bool) -> None:
    """Raises UserError for an output that must not be replaced."""
    if not os.path.lexists(output):
        return
    if output.is_symlink() or not output.is_dir():
        raise UserError(f"{output} exists and is not a folder: name another output")
    if any(output.iterdir()) and not overwrite:
        raise UserError(
            f"{output} exists and is not empty: name another folder, or replace it with --overwrite"
        )
    _refuse_foreign(output, output)


def _refuse_foreign(folder: Path, output: Path) -> None:
    """Raises UserError for files in `folder`, the content of `output`, that this command did not write, or that have
    changed since."""
    digests: dict[str, str] = {}
    # any file may have this name
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        content = json.loads((folder / _META).read_text(encoding="utf-8"))
        digests = dict(content["files"]) if content["made_by"] == _MADE_BY else {}
    others = [path for path in sorted(folder.iterdir()) if path.name != _META or not digests]
    foreign = [
        path.name
        for path in others
        if not path.is_file() or digests.get(path.name) != digest_of_file(path)
    ]
    if foreign:
        why = f"which {_MADE_BY} did not write, or which have changed since"
        raise UserError(
            f"{output} holds {listing(foreign, 3)}, {why}: name another folder, or remove it yourself"
        )
