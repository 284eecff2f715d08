"""Converts a BERT to a BigBird with the same weights, for long texts.

BigBird (Zaheer et al. 2020, arXiv:2007.14062) has BERT's layers with sparse attention. So weights
are copied, and the position table is repeated up to the new length, as in Longformer (Beltagy et
al. 2020, arXiv:2004.05150, section 5). Up to (5 + 2 random) * block tokens BigBird runs full
attention: within BERT's positions it computes what BERT does.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BertForPreTraining,
    BigBirdConfig,
    BigBirdForMaskedLM,
    BigBirdModel,
)

from toolkit.config import ModelSettings, PretrainedSettings
from toolkit.demo import PREFIX
from toolkit.errors import UserError, listing
from toolkit.models.classifier import from_pretrained
from toolkit.pretrained import (
    full_attention_up_to,
    load_config,
    load_plain_tokenizer,
    model_digest,
    refuse_foreign_tokenizer,
    refuse_random,
)
from toolkit.utils.cache import cached_folder, digest_of_text
from toolkit.utils.files import explain_write_errors, make_readable, replace_folder

Settings = TypeVar("Settings", bound=PretrainedSettings)

_LAYOUT = 2  # increase this when a change in this file changes the files in the cache
# Texts to compare a saved and loaded tokenizer by: case, accents, Chinese, special tokens
_PROBES = [
    "今天的服務很好，房间小。",
    "The Café's 2nd ROOM wasn't bad!\n東京 [MASK] 42",
    "ﬁlm\u3000𠮷 😀 ２０２４年",
]
_POOLER = "bert.pooler."
_MLM = "cls.predictions."
_POSITIONS = "bert.embeddings.position_embeddings.weight"
_COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout",
    "type_vocab_size", "initializer_range", "layer_norm_eps", "pad_token_id",
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


def to_bigbird(source: str, output: Path, sizes: SparseSizes) -> list[str]:
    """Writes a BigBird with the weights of `source` (a folder, a hub name or a `demo:` name) to the
    folder `output`.

    `output` appears only when it is complete. Returns lines that describe the result. Raises
    UserError for a source that is not a BERT, lacks a tokenizer or does not fit its config, for an
    unsuitable length, and for an existing output.
    """
    config = load_config(ModelSettings(model_name_or_path=source))
    _check_kind(source, config)
    _check_length(source, config.max_position_embeddings, sizes)
    with explain_write_errors(output), replace_folder(output) as draft:
        heads = _write_bigbird(source, config, draft, sizes)
    path = shlex.quote(str(output))
    return [
        f"wrote {output}: a BigBird of {sizes.max_length} positions (the BERT had "
        f"{config.max_position_embeddings}), sparse above {sizes.sparse_above} tokens",
        heads,
        f"next: python recipes/bigbird.py --model_name_or_path {path} --train_file YOUR_FILE.csv",
    ]


def long_model(
    settings: Settings, max_length: int | None, accelerator: Accelerator | None = None
) -> Settings:
    """Replaces a BERT in the settings by a BigBird of 4096 positions, or of `max_length` if that is
    more.

    Writes it to the cache, once per machine; all processes must call this. Returns settings with a
    BigBird or without a model unchanged. Raises UserError for other models.
    """
    name = settings.model_name_or_path
    if name is None:
        return settings
    config = load_config(settings)
    # an encoder-decoder of recipes/title.py has one
    if config.model_type in ("big_bird", "encoder-decoder"):
        return settings
    _check_kind(name, config)
    default = SparseSizes()
    length = max(default.max_length, max_length or 0, config.max_position_embeddings)
    sizes = default._replace(max_length=_round_up(length, default.block_size))
    digest = digest_of_text(f"{_LAYOUT} {sizes} {model_digest(name)}")
    base = Path(name.removeprefix(PREFIX)).absolute().name  # as model cards show it
    folder_name = f"{base}-bigbird-{sizes.max_length}-{digest}"
    with cached_folder("models", folder_name, accelerator, source=name) as (folder, draft):
        if draft:
            _write_bigbird(name, config, draft, sizes)
    return dataclasses.replace(settings, model_name_or_path=str(folder))


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _write_bigbird(name: str, bert_config: Any, folder: Path, sizes: SparseSizes) -> str:
    """Fills an empty folder. Returns a description of the heads. Raises UserError for a source that
    cannot be loaded or converted."""
    tokenizer = load_plain_tokenizer(name)
    refuse_foreign_tokenizer(tokenizer, bert_config)
    bert, weights, unused = _load_bert(name, bert_config)
    has_mlm = f"{_MLM}transform.dense.weight" in weights
    family = BigBirdForMaskedLM if has_mlm else BigBirdModel
    config = _config_of(bert, tokenizer, sizes)
    config.architectures = [family.__name__]
    config.dtype = bert.dtype
    tensors = _bigbird_tensors(weights, family, config)
    # not `save_pretrained`, which writes only in the first process of a group
    config.to_json_file(folder / "config.json")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(name, tokenizer, folder, sizes.max_length)
    make_readable(folder)
    heads = "MLM head kept" if has_mlm else "the BERT has no MLM head to keep"
    dropped = sorted(
        key for key in {*unused, *weights} if not key.startswith(("bert.", _MLM))
    )
    if dropped:
        heads += f"; dropped: {listing(dropped, 4)}"
    return heads


def _load_bert(name: str, config: Any) -> tuple[Any, dict[str, Tensor], set[str]]:
    """The BERT with all heads of pretraining, those tensors of it that the checkpoint has, and the
    names of others there. Raises UserError for an incomplete encoder."""
    model, loading = from_pretrained(
        BertForPreTraining, name, config, dtype="auto", ignore_mismatched_sizes=True
    )
    missing = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    unused = set(loading["unexpected_keys"])
    random = {
        key for key in missing if key.startswith("bert.") and not key.startswith(_POOLER)
    }
    lost = {key for key in unused if re.match(r"(bert\.)?(embeddings|encoder)\.", key)}
    refuse_random(name, random | lost)
    weights = {key: each for key, each in model.state_dict().items() if key not in missing}
    return model, weights, unused


def _config_of(bert: Any, tokenizer: Any, sizes: SparseSizes) -> BigBirdConfig:
    """A config with BERT's sizes and its tokenizer's ids; BigBird's default ids are those of
    another vocabulary."""
    options = {name: getattr(bert.config, name) for name in _COPIED}
    if options["pad_token_id"] is None:
        options["pad_token_id"] = tokenizer.pad_token_id
    # from the weights: transformers unties an output layer that differs, whatever the config says
    output = bert.get_output_embeddings().weight
    return BigBirdConfig(
        **options,
        tie_word_embeddings=output is bert.get_input_embeddings().weight,
        max_position_embeddings=sizes.max_length,
        attention_type="block_sparse",
        block_size=sizes.block_size,
        num_random_blocks=sizes.num_random_blocks,
        rescale_embeddings=False,
        use_bias=True,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        sep_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
    )


def _bigbird_tensors(
    weights: dict[str, Tensor], family: Any, config: BigBirdConfig
) -> dict[str, Tensor]:
    """The BigBird's parameters by name (tied ones once), from BERT's tensors, with the position
    table repeated; without a pooler that BERT does not have."""
    rows = torch.arange(config.max_position_embeddings) % len(weights[_POSITIONS])
    weights = {**weights, _POSITIONS: weights[_POSITIONS][rows]}
    with torch.device("meta"):
        model = family(config)
    prefix = "bert." if family is BigBirdModel else ""
    tensors = {}
    for name, _ in model.named_parameters():
        key = f"{prefix}{name}".replace(_POOLER, f"{_POOLER}dense.")
        if key in weights or not key.startswith(_POOLER):
            tensors[name] = weights[key].contiguous()
    return tensors


def _save_tokenizer(name: str, tokenizer: Any, folder: Path, max_length: int) -> None:
    """Saves BERT's tokenizer, and raises UserError if AutoTokenizer, given a BigBird's config,
    loads another one."""
    tokenizer.model_max_length = max_length
    ids = tokenizer(_PROBES).input_ids  # also resets a truncation stored in tokenizer.json
    tokenizer.save_pretrained(folder)
    reloaded = load_plain_tokenizer(str(folder))
    if type(reloaded) is not type(tokenizer) or reloaded(_PROBES).input_ids != ids:
        raise UserError(
            f"{name}: its tokenizer, a {type(tokenizer).__name__}, becomes a "
            f"{type(reloaded).__name__} when saved and loaded, and may tokenize differently: set "
            "tokenizer_class in its tokenizer_config.json"
        )


def _check_kind(name: str, config: Any) -> None:
    """Raises UserError for a model that a BigBird with the same weights would not reproduce."""
    if config.model_type != "bert":
        raise UserError(
            f"{name} has model_type {config.model_type}, and only bert can be converted: use "
            "bert-base-chinese, bert-base-uncased, hfl/chinese-roberta-wwm-ext (a BERT despite its "
            "name), or a BigBird"
        )
    if config.is_decoder:
        raise UserError(
            f"{name} is a decoder (is_decoder in its config.json): use an encoder"
        )


def _check_length(name: str, positions: int, sizes: SparseSizes) -> None:
    """Raises UserError for lengths that make no sparse model; `positions` are the BERT's."""
    length = sizes.max_length
    usable = _round_up(length, sizes.block_size)
    if length != usable:
        fault = f"--max_length {length} is not a multiple of {sizes.block_size}"
        raise UserError(f"{fault}: use {usable}")
    if length < positions or length <= sizes.sparse_above:
        raise UserError(
            f"--max_length {length}: {name} reads {positions} tokens, and up to "
            f"{sizes.sparse_above} tokens BigBird has full attention: use more, or truncate texts "
            "when you tokenize them"
        )
